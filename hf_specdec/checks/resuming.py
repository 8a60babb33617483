"""What a benchmark has finished, kept beside its document until that is written, so that a killed run goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_specdec.checks.documents import write_json
from hf_specdec.checks.questions import Question, digest
from hf_specdec.checks.report import Batch, Run, Turn
from hf_specdec.checks.settings import BenchOptions
from hf_specdec.stats import SpecStats


class Kept:
    """The folder of an unfinished benchmark: what was asked for, and a file for everything that was finished.

    Args:
        output: of the document; the folder lies beside it.
        settings: of the benchmark.
        questions: that are asked.

    Raises:
        ValueError: if the folder holds a benchmark of other options or questions.
    """

    def __init__(self, output: Path, settings: Sequence[BenchOptions], questions: Sequence[Question]):
        self.folder = output.with_name(f"{output.name}.partial")
        asked = {"settings": [setting.published() for setting in settings], "questions": digest(questions)}
        path = self.folder / "options.json"
        if path.is_file():
            self.refuse_other("options", _read(path), asked)
        else:
            self.folder.mkdir(exist_ok=True)
            write_json(asked, path)

    def setting(self, number: int) -> KeptSetting:
        """What is kept of one setting."""
        return KeptSetting(self, number)

    def discard(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder)

    def refuse_other(self, what: str, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Raises `ValueError` unless both are the same."""
        was, is_now = dict(_leaves(before)), dict(_leaves(json.loads(json.dumps(now))))
        for name in {**was, **is_now}:
            if was.get(name) != is_now.get(name):
                raise ValueError(
                    f"{self.folder} holds an unfinished run with other {what} ({name}: {was.get(name)!r}, now "
                    f"{is_now.get(name)!r}). Repeat what that run was asked for to go on with it, remove the folder to "
                    "begin anew, or name another output."
                )


class KeptSetting:
    """What is kept of one setting: where it runs, its finished groups, in the end its document."""

    def __init__(self, kept: Kept, number: int):
        self.kept = kept
        self.name = f"setting-{number}"
        self.resumed_at: list[int] = []

    def begin(self, environment: dict[str, Any]) -> tuple[dict[str, Any], list[Batch]]:
        """Begins, or goes on.

        Args:
            environment: where it runs now.

        Returns:
            The environment that it began in, and the groups that are finished.

        Raises:
            ValueError: if both environments differ in more than the date.
        """
        batches: list[Batch] = []
        while (path := self._path(len(batches))).is_file():
            batches.append(_batch(_read(path)))
        path = self._path("environment")
        begun = _read(path) if path.is_file() else environment
        self.kept.refuse_other("surroundings", begun, environment | {"date": begun["date"]})
        write_json(begun, path)
        self._note_start(len(batches))
        return begun, batches

    def keep(self, number: int, batch: Batch) -> None:
        """Keeps a finished group; groups are finished one after the other."""
        write_json(asdict(batch), self._path(number))

    def finish(self, document: dict[str, Any]) -> None:
        """Keeps the document of the setting."""
        write_json(document, self._path("document"))

    def document(self) -> dict[str, Any] | None:
        """The document of the setting, if it is finished."""
        path = self._path("document")
        return _read(path) if path.is_file() else None

    def _note_start(self, number: int) -> None:
        path = self._path("starts")
        before = _read(path) if path.is_file() else []
        self.resumed_at = sorted({*before, number} - {0})
        write_json(self.resumed_at, path)

    def _path(self, what: int | str) -> Path:
        return self.kept.folder / f"{self.name}-{what}.json"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _batch(fields: dict[str, Any]) -> Batch:
    return Batch(**fields | {"runs": {name: _run(run) for name, run in fields["runs"].items()}})


def _run(fields: dict[str, Any]) -> Run:
    turns = [[Turn(**turn) for turn in turns] for turns in fields["turns"]]
    return Run(**fields | {"turns": turns, "stats": fields["stats"] and SpecStats(**fields["stats"])})


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The values inside of a JSON value, each with where it stands."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inside:
        yield ".".join(path), value
    for name, part in inside:
        yield from _leaves(part, (*path, str(name)))
