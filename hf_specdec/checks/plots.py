"""Pictures of a benchmark's document: one file for every figure and setting."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_specdec.checks.documents import settings_of
from hf_specdec.checks.report import PLAIN
from hf_specdec.checks.tables import setting_title, variant_labels
from hf_specdec.pictures import new_figure, save

# Okabe and Ito's colours, which all kinds of colour vision tell apart; yellow is left out, as it is faint on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
_DASHES = ("-", "--", ":", "-.")
# Positions that fewer drafts than this have reached say little.
_FEWEST = 5
_LEGEND_WIDTH = 100  # characters


def draw_plots(document: dict[str, Any], folder: Path, console: Console | None = None) -> list[Path]:
    """Draws all figures that the document has the numbers for.

    Args:
        document: of `run_bench`.
        folder: for the files; it is made if it does not exist.
        console: where to say which files were written, and what is left out.

    Returns:
        The files' paths.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings, written = settings_of(document), []
    for number, setting in enumerate(settings):
        for name, plot in PLOTS.items():
            path = folder / (f"{name}.png" if len(settings) == 1 else f"{name}-{number}.png")
            figure = plot(setting)
            if not isinstance(figure, str):
                save(figure, path)
                written.append(path)
            if console is not None:
                said = f"{path.name} is left out: {figure}" if isinstance(figure, str) else str(path)
                console.print(said, markup=False, highlight=False, soft_wrap=True)
    return written


# --- the figures: each is one, or words for why there is none ---------------------------------------------


def acceptance_by_position(document: dict[str, Any]) -> Any:
    """How often a drafted token stays, given that all before it did."""
    curves = {name: _rates(profile) for name, profile in _profiles(document).items()}
    if not any(curves.values()):
        return "nothing was drafted"
    figure, axes = _axes(document, "Acceptance by position")
    for style, name in styled(document, curves):
        axes.plot(range(1, len(curves[name]) + 1), curves[name], **style)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="position in the draft", ylabel="accepted, given that all before it were", ylim=(-0.03, 1.03))
    return _finished(figure, axes)


def speedup_by_category(document: dict[str, Any]) -> Any:
    """Speed-ups against plain generation, with their 95 % intervals."""
    variants = {name: figures for name, figures in document["variants"].items() if name != PLAIN}
    if not variants:
        return "only plain generation was measured"
    categories = list(document["variants"][PLAIN]["by_category"])
    rows = [*categories, *(["geometric mean"] if len(categories) > 1 else [])]
    height = 2 + len(rows) * max(0.4, 0.16 * len(variants))
    figure, axes = _axes(document, "Speed-up over plain generation (median and 95 % interval)", height)
    for index, (style, name) in enumerate(styled(document, variants)):
        groups = variants[name]["by_category"] | {"geometric mean": variants[name]["geometric_mean"]}
        middles = [groups[row]["median_speedup"] for row in rows]
        bounds = [groups[row]["speedup_interval"] for row in rows]
        errors = [
            [max(0.0, middle - low) for middle, (low, _) in zip(middles, bounds, strict=True)],
            [max(0.0, high - middle) for middle, (_, high) in zip(middles, bounds, strict=True)],
        ]
        shift = 0.7 * ((index + 0.5) / len(variants) - 0.5)
        axes.errorbar(middles, [row + shift for row in range(len(rows))], xerr=errors, **style | {"linestyle": "none"})
    axes.axvline(1, color="0.4", linewidth=1)
    for row in range(len(rows) - 1):
        axes.axhline(row + 0.5, color="0.9", linewidth=0.8)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="times as fast as plain generation", ylim=(len(rows) - 0.5, -0.5))
    return _finished(figure, axes, grid="x")


def cost_by_width(document: dict[str, Any]) -> Any:
    """Seconds of a round by the drafted tokens in it, where draft lengths were chosen by measurement."""
    curves = {}
    for name, profile in _profiles(document).items():
        if points := _costs(profile["round_seconds"]):
            curves[name] = points
    if not curves:
        return "no variant has measured rounds of several widths (draft lengths were fixed, or nothing was drafted)"
    figure, axes = _axes(document, "What a round takes")
    for style, name in styled(document, curves):
        widths, seconds = zip(*curves[name], strict=True)
        axes.plot(widths, [1e3 * value for value in seconds], **style)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="drafted tokens in the round", ylabel="milliseconds (median)", ylim=(0, None))
    return _finished(figure, axes)


def length_by_draft(document: dict[str, Any]) -> Any:
    """Tokens that a round with a draft yields by the draft's length: what is promised, and what was measured."""
    profiles = {name: profile for name, profile in _profiles(document).items() if profile["rounds_with_draft"]}
    if not profiles:
        return "nothing was drafted"
    figure, axes = _axes(document, "Acceptance length against draft length")
    for style, name in styled(document, profiles):
        profile, survival, length = profiles[name], 1.0, [1.0]
        for rate in _rates(profile):
            survival *= rate
            length.append(length[-1] + survival)
        axes.plot([], [], **style)  # for the legend
        style["label"] = None
        axes.plot(range(len(length)), length, **style | {"marker": "none"})
        drafts = profile["rounds_with_draft"]
        point = (profile["drafted"] / drafts, 1 + profile["accepted"] / drafts)
        axes.plot(*point, **style | {"linestyle": "none", "markersize": 9})
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(
        xlabel="draft length (line: drafts cut behind this position; mark: mean of all, trees with all their tokens)",
        ylabel="tokens a round with a draft yields",
    )
    return _finished(figure, axes)


PLOTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "acceptance-by-position": acceptance_by_position,
    "speedup-by-category": speedup_by_category,
    "cost-by-width": cost_by_width,
    "length-by-draft": length_by_draft,
}


# --- numbers ----------------------------------------------------------------------------------------------


def _profiles(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: figures["profile"] for name, figures in document["variants"].items() if figures.get("profile")}


def _rates(profile: dict[str, Any]) -> list[float]:
    """Conditional acceptance up to where drafts become rare."""
    rates = []
    for accepted, tested in zip(profile["accepted_at"], profile["tested_at"], strict=True):
        if tested < _FEWEST:
            break
        rates.append(accepted / tested)
    return rates


def _costs(measured: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Median seconds by width at the load that was measured most, whoever drafted; none of a single width."""
    loads: dict[tuple[int, int], dict[int, list[float]]] = {}
    for entry in measured:
        widths = loads.setdefault((entry["rows"], entry["text_tokens"]), {})
        for width, seconds in entry["seconds"].items():
            widths.setdefault(int(width), []).extend(seconds)
    most = max(loads.values(), key=lambda widths: (len(widths), sum(map(len, widths.values()))), default={})
    # A single measurement may have been of anything.
    points = sorted((width, statistics.median(seconds)) for width, seconds in most.items() if len(seconds) > 1)
    return points if len(points) > 1 else []


# --- how they look ----------------------------------------------------------------------------------------


def _axes(document: dict[str, Any], title: str, height: float = 4.8) -> tuple[Any, Any]:
    figure = new_figure(8, height)
    axes = figure.subplots()
    axes.set_title(f"{title}\n{setting_title(document)}", fontsize="medium", loc="left")
    return figure, axes


def styled(document: dict[str, Any], shown: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """A variant looks the same in all figures of a document."""
    labels = variant_labels([name for name in document["variants"] if name != PLAIN])
    styles = []
    for index, (name, label) in enumerate(labels.items()):
        style = {
            "label": label,
            "color": _COLOURS[index % len(_COLOURS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linestyle": _DASHES[index // len(_COLOURS) % len(_DASHES)],
            "markersize": 5,
            "linewidth": 1.6,
        }
        styles.append((style, name))
    return [(style, name) for style, name in styles if name in shown]


def _finished(figure: Any, axes: Any, grid: str = "both") -> Any:
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), math.floor(_LEGEND_WIDTH / (max(map(len, labels)) + 6))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure
