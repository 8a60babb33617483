"""Files that appear whole: written under another name, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def part_of(path: Path) -> Path:
    """Where a file is written before it appears."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file, which appears at its path when the block has ended well; else nothing is left of it."""
    part = part_of(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Writes a text, in UTF-8; returns its path."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def refuse_homeless(path: Path) -> None:
    """Raises `ValueError` before long work if its result could not be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder, or lies in none that exists. Name another file.")
