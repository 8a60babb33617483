"""The file of finished answers: JSON lines, the first of which says what they answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Kept:
    """What has been measured so far, and where it is written down.

    Args:
        path: the file; `None` keeps everything in memory only.
        settings: what the answers depend on.

    Raises:
        ValueError: if the file holds answers under other settings.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self.path, self.entries = path, {}
        lines = read(path) if path is not None and path.exists() else []
        if lines and lines[0] != settings:
            raise ValueError(f"{path} holds answers under other settings, {lines[0]}; give --keep another file.")
        self.entries = {tuple(line["key"]): line["value"] for line in lines[1:]}
        if not lines:
            self._write(settings)

    def get(self, *key: Any) -> Any:
        """What was kept under a key, or `None`."""
        return self.entries.get(key)

    def put(self, value: Any, *key: Any) -> None:
        """Keeps a value, at once."""
        self.entries[key] = value
        self._write({"key": key, "value": value})

    def _write(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[Any]:
    """The lines of a file; the last one is dropped if it was not finished."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]
