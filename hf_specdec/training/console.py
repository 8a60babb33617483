"""What a training shows: a bar with the time left on a terminal, a line an evaluation everywhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Held-out answers below which chance decides which drafter is kept.
_FEW = 10


class ConsoleReport:
    """Shows the events of a training; use it as a context.

    Args:
        console: where to.
    """

    def __init__(self, console: Console):
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.bar = self.progress.add_task("", total=1.0)
        self.acceptance = ""

    def __enter__(self) -> ConsoleReport:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self._show_start(event)
        elif event["event"] == "evaluation":
            self._show_evaluation(event)
        else:
            speed = event["answer_tokens"] / max(event["seconds"], 1e-9)
            text = f"step {event['step']}  loss {event['loss']:.3f}  {speed:.0f} tokens/s{self.acceptance}"
            self.progress.update(self.bar, completed=event["fraction"], description=text)

    def _show_start(self, event: dict[str, Any]) -> None:
        self.console.print(
            f"{event['examples']} examples to learn from, {event['held_out']} to evaluate on; "
            f"hidden states take up to {event['bytes'] / 1e9:.2f} GB on disk",
            highlight=False,
        )
        if event["held_out"] < _FEW:
            self.console.print(
                f"Warning: {event['held_out']} held-out answers are too few to judge by: acceptance is coarse, and "
                "chance has a say in which drafter is kept. Make more data, or hold out more (--held-out-share).",
                highlight=False,
            )
        if event["fraction"] >= 1:
            self.console.print(
                f"There is nothing left to do: this run ended at step {event['step']}. Give it more --time-budget, "
                "--max-steps or --epochs to go on.",
                highlight=False,
            )
        elif event["step"]:
            self.console.print(f"Going on from step {event['step']}", highlight=False)

    def _show_evaluation(self, event: dict[str, Any]) -> None:
        rates = " ".join(f"{rate:.2f}" for rate in event["acceptance_by_position"])
        self.acceptance = f"  held out {rates}"
        loss = "      " if event["loss"] is None else f"{event['loss']:6.3f}"
        self.console.print(
            f"step {event['step']:6d}  {event['answer_tokens'] / 1e6:7.3f}M tokens  {event['seconds'] / 60:6.1f} min  "
            f"loss {loss}  acceptance {rates}  length {event['acceptance_length']:.3f}"
            f"{'  best' if event['is_best'] else ''}",
            highlight=False,
        )
