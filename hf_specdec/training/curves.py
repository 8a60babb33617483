"""The picture of a training: loss and held-out acceptance against answer tokens seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_specdec.pictures import new_figure, save


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, one JSON line each; a line cut short by a kill is left out.

    Raises:
        ValueError: if another line is damaged.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); mend it or remove it.") from error


def draw(metrics: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws the curves of a run.

    Args:
        metrics: as `read_metrics` reads them; at least one.
        path: of the picture, whose ending says its format.
        title: above it.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    seen = [entry["answer_tokens"] / 1e6 for entry in metrics]
    left.plot(seen, [entry["loss"] for entry in metrics], label="training loss")
    left.set_ylabel("loss")
    for position in range(len(metrics[-1]["acceptance_by_position"])):
        rates = [entry["acceptance_by_position"][position] for entry in metrics]
        right.plot(seen, rates, label=f"token {position + 1}")
    right.set_ylabel("held-out acceptance, given those before")
    for axes in (left, right):
        axes.set_xlabel("million answer tokens seen")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    save(figure, path)
