"""Rows of JSON-lines files and of the Hub's data sets: where prompts and questions come from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_specdec.loading import Chat

HUB_PREFIX = "hub:"
TURNS = ("last", "all")
# What a row may hold.
FIELDS = "`prompt`, `turns`, `messages` or `conversations`"
_SPEAKERS = {"human": "user", "gpt": "assistant"}  # as ShareGPT calls them

# What is said before the target's first answer, then before its second, and so on.
Conversation = list[Chat]


def read_rows(location: str) -> Iterable[tuple[int, Any]]:
    """Every row with its number, from 1; those of files are lines yet to be `parsed`.

    Args:
        location: a file of JSON lines, or `hub:NAME` or `hub:NAME:SPLIT`, a data set of the Hub (the split "train").

    Raises:
        ValueError: if the data set's package is not installed.
    """
    if location.startswith(HUB_PREFIX):
        return _hub_rows(location.removeprefix(HUB_PREFIX))
    return file_rows(location)


def file_rows(path: str) -> Iterable[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers."""
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig", errors="replace").split("\n"), 1):
        if line.strip():
            yield number, line


def parsed(row: Any) -> dict[str, Any]:
    """A row as a dictionary.

    Raises:
        ValueError: if it is a line that holds no JSON object.
    """
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError("expected an object")
    return row


def chat_of(row: Any) -> Chat:
    """The conversation of a row up to the last message of a user; of `turns` the first is asked.

    Raises:
        ValueError: if it holds none.
    """
    return conversation_of(row)[0]


def conversation_of(row: Any, turns: str = "last") -> Conversation:
    """What a target is to answer in a row: a chat up to a user's message, for every turn that is asked.

    Args:
        row: with `prompt`, `turns` (what a user says, one text after the other; `prompt` may be such a list too),
            `messages` or ShareGPT's `conversations`.
        turns: "last": the last message of a user is asked, behind all before it as they are; of `turns` the first.
            "all": every turn of the user is asked in order, without the answers given.

    Raises:
        ValueError: if it holds nothing to ask.
    """
    row = parsed(row)
    if isinstance(row.get("prompt"), str) and row["prompt"].strip():
        return [[{"role": "user", "content": row["prompt"]}]]
    listed = row.get("turns") or row.get("prompt")
    if isinstance(listed, list) and listed:
        if not all(isinstance(text, str) and text.strip() for text in listed):
            raise ValueError("`turns` must be texts")
        asked = [[{"role": "user", "content": text}] for text in listed]
        return asked if turns == "all" else asked[:1]
    messages = row.get("messages") or row.get("conversations")
    if isinstance(messages, list):
        chat = _until_last_user([_message(message) for message in messages])
        return _asked_in_order(chat) if turns == "all" else [chat]
    raise ValueError(f"there is no {FIELDS}")


def users_texts_of(row: Any) -> list[str]:
    """All that the user says in a row, whoever else speaks in between.

    Raises:
        ValueError: if it holds nothing to ask.
    """
    row = parsed(row)
    # Up to a user's last message a chat holds the others, and need not be one that can be asked turn by turn.
    turns = "last" if row.get("messages") or row.get("conversations") else "all"
    return [message["content"] for chat in conversation_of(row, turns) for message in chat if message["role"] == "user"]


def _hub_rows(location: str) -> Iterable[tuple[int, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f'Reading {HUB_PREFIX}{location} needs: pip install "hf_specdec[data]"') from error
    name, _, split = location.partition(":")
    try:
        return enumerate(load_dataset(name, split=split or "train", streaming=False), 1)
    except Exception as error:  # of the library, of the Hub, or of the files
        raise ValueError(f"{HUB_PREFIX}{location} cannot be read: {error}") from error


def _message(given: Any) -> dict[str, str]:
    """A message in the host's spelling."""
    if not isinstance(given, dict):
        raise ValueError("a message is an object")
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("a message has two texts: `role` and `content`, or `from` and `value`")
    return {"role": _SPEAKERS.get(role, role), "content": content}


def _until_last_user(chat: Chat) -> Chat:
    last = max((place for place, message in enumerate(chat) if message["role"] == "user"), default=None)
    if last is None or not chat[last]["content"].strip():
        raise ValueError("there is no message of a user to answer")
    return chat[: last + 1]


def _asked_in_order(chat: Chat) -> Conversation:
    """Cut behind every turn of the user; what an assistant answered there is left out."""
    turns: Conversation = [[]]
    is_answered = False
    for message in chat:
        if message["role"] not in ("system", "user", "assistant"):
            raise ValueError(f"turns of the role {message['role']!r} cannot be asked in order; use --turns last")
        if message["role"] == "assistant" and any(other["role"] == "user" for other in turns[-1]):
            is_answered = True
            continue
        if is_answered:
            turns.append([])
        is_answered = False
        turns[-1].append(message)
    return turns
