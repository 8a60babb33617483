"""Figures of matplotlib, which is loaded only where one is drawn, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_specdec.files import whole


def require_matplotlib() -> None:
    """Raises `ValueError` if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError('Pictures need matplotlib: pip install "hf_specdec[plots]"') from error


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, whose parts do not overlap.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Writes a figure in the format that the path's ending says; the file appears whole."""
    with whole(path) as part:
        figure.savefig(part, dpi=120, format=path.suffix[1:])
