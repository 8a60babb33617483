"""Folders of training data: what a target answered, as token ids.

A folder holds `data.json` (where the data come from) and shards `answers-00000.jsonl`, `answers-00001.jsonl`, ..., one
example a line. Shards appear whole and never change, so a folder may be read while it grows.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from hf_specdec.files import whole

T = TypeVar("T")

RECORD_NAME = "data.json"
SOURCES = ("self", "file", "hub")

_NUM_SHOWN = 3  # broken lines


@dataclass(frozen=True)
class Example:
    """A prompt and the target's own answer.

    Args:
        prompt: token ids as the target reads them, chat template included.
        answer: token ids the target wrote behind it, its end-of-turn token included.
        temperature: the answer was sampled at; 0 is greedy.
        source: who wrote the prompt: "self" (the target), "file" or "hub".
        finished: whether the target ended the answer; otherwise it was cut at the limit.
        conversation: of a later turn of a conversation, `conversation_name` of its first prompt.

    Raises:
        ValueError: if a field is of another type, or prompt or answer is empty.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float
    source: str
    finished: bool
    conversation: str | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "answer"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, int | float) or self.temperature < 0:
            raise ValueError(f"temperature={self.temperature!r} must be a number of at least 0.")
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source!r} must be one of {', '.join(SOURCES)}.")
        if not isinstance(self.finished, bool):
            raise ValueError(f"finished={self.finished!r} must be true or false.")
        if self.conversation is not None and not _is_name(self.conversation):
            raise ValueError(f"conversation={self.conversation!r} must be 16 hexadecimal digits.")


def read_examples(folder: str | os.PathLike[str]) -> list[Example]:
    """Reads all examples of a data folder, in the order they were written.

    Broken lines are counted and shown on standard error; the rest is kept.

    Args:
        folder: made by `hf-specdec data`.

    Raises:
        ValueError: if there is no such folder, or no example in it.
    """
    shards = shard_paths(folder)
    if not shards:
        raise ValueError(
            f"{folder} holds no answers-*.jsonl; make training data with: hf-specdec data --output {folder}"
        )
    examples: list[Example] = []
    broken: list[str] = []
    for path in shards:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            if not line:
                continue
            try:
                examples.append(_parsed(line))
            except ValueError as error:
                broken.append(f"{path.name}, line {number}: {error}")
    show_left_out(broken, str(folder))
    if not examples:
        raise ValueError(f"{folder} holds no readable example; remove it and make the data again.")
    return examples


def write_shard(folder: str | os.PathLike[str], index: int, examples: Iterable[Example]) -> Path:
    """Writes one shard of a data folder; it appears whole or not at all."""
    path = Path(folder) / f"answers-{index:05d}.jsonl"
    write_whole(path, "".join(json.dumps(_fields(example)) + "\n" for example in examples))
    return path


def shard_paths(folder: str | os.PathLike[str]) -> list[Path]:
    """The shards of a data folder, in order."""
    return sorted(Path(folder).glob("answers-[0-9][0-9][0-9][0-9][0-9].jsonl"))


def next_index(folder: str | os.PathLike[str]) -> int:
    """The index of the shard to come, behind all that are there."""
    return max((int(path.stem.rpartition("-")[2]) + 1 for path in shard_paths(folder)), default=0)


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `data.json` says: the target, fingerprints, settings and counts.

    Raises:
        ValueError: if it is missing or broken.
    """
    path = Path(folder) / RECORD_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); make training data with: hf-specdec data") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(record).__name__}.")
    return record


def write_record(folder: str | os.PathLike[str], record: dict[str, Any]) -> None:
    """Writes `data.json`."""
    write_whole(Path(folder) / RECORD_NAME, json.dumps(record, indent=2) + "\n")


def is_held_out(example: Example, share: float) -> bool:
    """Whether an example is for evaluation and not for training.

    The prompt alone decides, of a conversation the first one, so data that grow never move an example, and all answers
    to a prompt and all turns of a conversation stay together.

    Args:
        example: any.
        share: of all prompts that are held out, at least 0 and less than 1.

    Raises:
        ValueError: if `share` is out of range.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share={share!r} must be at least 0 and less than 1.")
    return int(example.conversation or conversation_name(example.prompt), 16) < share * 2**64


def conversation_name(prompt: Sequence[int]) -> str:
    """What tells a conversation from others: a digest of its first prompt, as hexadecimal digits."""
    return blake2b(json.dumps(prompt).encode(), digest_size=8).hexdigest()


def readable(rows: Iterable[tuple[int, Any]], read: Callable[[Any], T], where: str) -> list[T]:
    """What `read` makes of numbered rows; those that it refuses by `ValueError` are counted and shown."""
    found, broken = [], []
    for number, row in rows:
        try:
            found.append(read(row))
        except ValueError as error:
            broken.append(f"line {number}: {error}")
    show_left_out(broken, where)
    return found


def show_left_out(found: list[str], where: str, what: str = "broken lines") -> None:
    """Says on standard error how much of a file was passed over, and what the first of it is."""
    if found:
        shown = "\n".join(f"  {one}" for one in found[:_NUM_SHOWN])
        more = f"\n  and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else ""
        print(f"{where}: {len(found)} {what} are left out:\n{shown}{more}", file=sys.stderr)


def remove_parts(folder: str | os.PathLike[str]) -> None:
    """Removes what a process was writing when it was killed: files of `part_of` and folders of `filling`."""
    folder = Path(folder)
    for path in folder.glob("**/.*.part"):
        if re.fullmatch(r"\..+\.\d+\.part", path.name):
            path.unlink(missing_ok=True)
    for path in folder.parent.glob(f".{glob.escape(folder.name)}-????????"):
        if path.is_dir() and {inner.name for inner in path.iterdir()} <= {"part"}:
            shutil.rmtree(path, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that appears whole or not at all, even if the machine stops."""
    with whole(path) as part, part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _parsed(line: str) -> Example:
    fields = json.loads(line)
    if not isinstance(fields, dict) or {*fields, "conversation"} != set(Example.__dataclass_fields__):
        raise ValueError(f"expected an object with {', '.join(Example.__dataclass_fields__)}")
    return Example(**fields)


def _fields(example: Example) -> dict[str, Any]:
    """What stands in a line; a text of one turn says nothing of a conversation."""
    return {name: value for name, value in asdict(example).items() if value is not None}


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch("[0-9a-f]{16}", name) is not None


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"{name} must be a list of token ids with at least one, not {str(ids)[:40]!r}.")
    return tuple(ids)
