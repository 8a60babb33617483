"""What a benchmark asks: questions of a file or of a data set of the Hub, by category."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_specdec.rows import HUB_PREFIX, chat_of, parsed, read_rows

_IDS = ("question_id", "prompt_id", "task_id", "id")


@dataclass(frozen=True)
class Question:
    """One question in one or more turns, `history` being the messages of the conversation before the first."""

    question_id: Any
    category: str
    turns: tuple[str, ...]
    history: tuple[dict[str, str], ...] = ()


def read_questions(
    location: str | Path, categories: tuple[str, ...] | None = None, limit: int | None = None
) -> list[Question]:
    """Reads questions, the first `limit` of every wanted category.

    Args:
        location: a file of JSON lines, or `hub:NAME` or `hub:NAME:SPLIT`, a data set of the Hub. Rows are in
            Spec-Bench's form (`question_id`, `category` and `turns`), or have a `prompt`, or `messages` of which the
            user's last is asked. Without an id the row's number is one, without a category the name of the whole.
        categories: which to keep; `None` means all.
        limit: how many of each; `None` means all.

    Raises:
        ValueError: if a row is no question, or a category has none.
    """
    kept: dict[str, list[Question]] = {category: [] for category in categories or ()}
    known: set[str] = set()
    for number, row in read_rows(str(location)):
        question = _question(row, number, location)
        known.add(question.category)
        if categories is None or question.category in kept:
            kept.setdefault(question.category, []).append(question)
    if missing := [category for category, questions in kept.items() if not questions]:
        raise ValueError(f"{location} has no questions of {', '.join(missing)}; it has {', '.join(sorted(known))}.")
    if not kept:
        raise ValueError(f"{location} has no questions; every line must be one JSON object.")
    return [question for questions in kept.values() for question in questions[:limit]]


def published_name(location: str) -> str:
    """What a document calls the questions: a file by its name, as it is nobody's business in which folder it was."""
    return location if location.startswith(HUB_PREFIX) else Path(location).name


def grouped(questions: Sequence[Question], size: int) -> Iterator[list[Question]]:
    """Questions of one category, `size` at a time."""
    for category in dict.fromkeys(question.category for question in questions):
        same = [question for question in questions if question.category == category]
        yield from (same[start : start + size] for start in range(0, len(same), size))


def digest(questions: Sequence[Question]) -> str:
    """A name for exactly these questions in this order."""
    return hashlib.sha256(json.dumps([asdict(question) for question in questions]).encode()).hexdigest()


def _question(row: Any, number: int, location: str | Path) -> Question:
    try:
        row = parsed(row)
        history, turns = _asked(row)
    except ValueError as error:
        raise ValueError(
            f"{location}, line {number} is no question: {error}. Every line needs `turns` (a list of texts), `prompt` "
            "or `messages`, and may have `question_id` and `category`."
        ) from error
    identity = next((row[name] for name in _IDS if row.get(name) is not None), number)
    return Question(identity, str(row.get("category") or published_name(str(location))), turns, history)


def _asked(row: dict[str, Any]) -> tuple[tuple[dict[str, str], ...], tuple[str, ...]]:
    """The messages before the first turn, and the turns."""
    listed = next((row[name] for name in ("turns", "prompt") if isinstance(row.get(name), list)), None)
    if listed is None:
        *history, last = chat_of(row)
        return tuple(history), (last["content"],)
    if not listed or not all(isinstance(turn, str) for turn in listed):
        raise ValueError("turns must be a list of at least one text")
    return (), tuple(listed)
