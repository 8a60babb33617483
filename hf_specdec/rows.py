"""Rows of JSON-lines files and of the Hub's data sets: where prompts and questions come from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_specdec.loading import Chat

HUB_PREFIX = "hub:"


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
    for number, line in enumerate(Path(path).read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if line.strip():
            yield number, line


def parsed(row: Any) -> dict[str, Any]:
    """A row as a dictionary.

    Raises:
        ValueError: if it is a line that holds no JSON object.
    """
    if isinstance(row, str):
        row = json.loads(row)
    if not isinstance(row, dict):
        raise ValueError("expected an object")
    return row


def chat_of(row: Any) -> Chat:
    """The conversation of a row up to a user's message; of `turns` the first is asked.

    Raises:
        ValueError: if it holds none.
    """
    row = parsed(row)
    if isinstance(row.get("prompt"), str) and row["prompt"].strip():
        return [{"role": "user", "content": row["prompt"]}]
    if isinstance(row.get("turns"), list) and row["turns"] and isinstance(row["turns"][0], str):
        return [{"role": "user", "content": row["turns"][0]}]
    if isinstance(row.get("messages"), list):
        return _until_last_user(row["messages"])
    raise ValueError("there is no `prompt`, `messages` or `turns`")


def _hub_rows(location: str) -> Iterable[tuple[int, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f'Reading {HUB_PREFIX}{location} needs: pip install "hf_specdec[data]"') from error
    name, _, split = location.partition(":")
    return enumerate(load_dataset(name, split=split or "train", streaming=False), 1)


def _until_last_user(messages: list[Any]) -> Chat:
    chat = []
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError("a message has a `role` and a `content`")
        chat.append({"role": message["role"], "content": message["content"]})
    while chat and chat[-1]["role"] != "user":
        chat.pop()
    if not chat:
        raise ValueError("there is no message of a user")
    return chat
