"""Another side's process, from here: asked line by line, and never an exception."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from peers.environments import interpreter, requirements
from peers.side import Case, reply

Answer = dict[str, Any]


class Process:
    """A peer at work on a case.

    Attributes:
        name: of the peer.
        error: why it cannot answer (any more), if it cannot.
        environment: what is installed there.
        ways: what it can do.
        unusable: what it cannot do here, and why.
    """

    def __init__(self, name: str, case: Case, environments: Path | None, log: Path):
        self.name, self.log = name, log
        self.error: str | None = None
        self.environment: Answer = {}
        self.ways: list[str] = []
        self.unusable: dict[str, str] = {}
        python = interpreter(name, environments)
        if python is None:
            self.error = f"no environment (--make-environments makes one from {requirements(name).name})"
            return
        command = [python, str(Path(__file__).parent), "--side", name, "--case", json.dumps(asdict(case))]
        with log.open("w") as said:  # what libraries print is long, and of interest only if it was the last
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
            self.process = subprocess.Popen(command, text=True, **pipes)

    def begin(self) -> None:
        """Waits until its models are loaded."""
        if self.error is not None:
            return
        answer = self._heard()
        self.error = answer.get("error")
        if self.error is None:
            self.environment, self.unusable = answer["environment"], answer["unusable"]
            self.ways = [way for way in answer["ways"] if way not in self.unusable]

    def ask(self, **asked: Any) -> Answer:
        """The answer to one request; `{"error": ...}` if there is none."""
        if self.error is not None:
            return {"error": self.error}
        with suppress(OSError):  # if it has ended, the next line says so
            reply(self.process.stdin, asked)
        return self._heard()

    def end(self) -> None:
        """Lets the process end, and waits for it."""
        if hasattr(self, "process"):
            self.process.communicate()

    def _heard(self) -> Answer:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        said = [written for written in self.log.read_text(errors="replace").splitlines() if written.strip()]
        self.error = f"ended early: {said[-1] if said else 'without a word'}"[:500]
        return {"error": self.error}


@contextmanager
def started(names: list[str], case: Case, environments: Path | None, console: Console) -> Iterator[dict[str, Process]]:
    """All peers' processes, loaded; they end with the block."""
    with tempfile.TemporaryDirectory() as logs:
        processes = {name: Process(name, case, environments, Path(logs, name)) for name in names}
        try:
            for process in processes.values():
                process.begin()
                said = process.error or ", ".join(process.ways)
                console.print(f"{process.name}: {said}", highlight=False, soft_wrap=True)
            yield processes
        finally:
            for process in processes.values():
                process.end()
