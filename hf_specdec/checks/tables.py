"""What a benchmark's document says, as tables for a terminal: a column for every variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from hf_specdec.checks.report import HOST_LOOKUP, PLAIN
from hf_specdec.publishing.card import short_variant
from hf_specdec.stats import PHASES


def table(document: dict[str, Any]) -> Table:
    """The document of a benchmark as one table: a column for every variant."""
    variants = document["variants"]
    shown = _speedups_table(variants, "plain generation")
    shown.add_section()
    for label, cell in _SUMMARY_ROWS.items():
        shown.add_row(label, *(cell(figures, figures["total"]) for figures in variants.values()))
    return shown


def host_table(document: dict[str, Any]) -> Table:
    """The same speed-ups with Transformers' own prompt lookup as the base, which must be among the variants."""
    variants = {name: figures["against_host_prompt_lookup"] for name, figures in document["variants"].items()}
    shown = _speedups_table(variants, HOST_LOOKUP)
    shown.add_section()
    shown.add_row("geometric mean", *(_ratio(figures["geometric_mean"]) for figures in variants.values()))
    return shown


def lengths_table(document: dict[str, Any]) -> Table:
    """Tokens a round, by category: what drafts yield, whatever the machine's speed."""
    variants = document["variants"]
    shown = _empty_table("Tokens a round, the target's own included", list(variants))
    for category in variants[PLAIN]["by_category"]:
        groups = (figures["by_category"][category] for figures in variants.values())
        shown.add_row(escape(category), *(f"{group['mean_acceptance_length']:.2f}" for group in groups))
    return shown


def profile_table(document: dict[str, Any]) -> Table:
    """Where the seconds went and who drafted what: a column for every variant of ours."""
    figures = {name: figures for name, figures in document["variants"].items() if figures["profile"] is not None}
    profiles = {name: figure["profile"] for name, figure in figures.items()}
    shown = _empty_table("Seconds by phase, tokens by drafter (accepted of drafted)", list(profiles))
    for phase in PHASES:
        cells = ((profiles[name]["seconds"][phase], figures[name]["total"]["seconds"]) for name in profiles)
        shown.add_row(phase, *(_seconds(*cell) for cell in cells))
    rests = ((figure["total"]["seconds"], sum(figure["profile"]["seconds"].values())) for figure in figures.values())
    shown.add_row("outside the loop", *(_seconds(total - inside, total) for total, inside in rests))
    shown.add_section()
    for arm in dict.fromkeys(arm for profile in profiles.values() for arm in profile["drafted_by"]):
        shown.add_row(arm, *(_by_arm(profile, arm) for profile in profiles.values()))
    shown.add_row("target itself", *(str(profile["emitted"] - profile["accepted"]) for profile in profiles.values()))
    return shown


def setting_title(document: dict[str, Any]) -> str:
    """What tells a setting from others: target, precision, place, batch size and temperature."""
    options, where = document["options"], document["environment"]
    way = f"temperature {options['temperature']:g}" if options["temperature"] else "greedy"
    return f"{where['target'] or 'target'}, {where['dtype']} on {where['device']}, batch {options['batch_size']}, {way}"


def variant_labels(names: list[str]) -> dict[str, str]:
    """What variants are called where room is short: without the folders of their drafters, if that tells them apart."""
    short = {name: short_variant(name) for name in names}
    return {name: label if list(short.values()).count(label) == 1 else name for name, label in short.items()}


def _speedups_table(variants: dict[str, Any], base: str) -> Table:
    """A row for every category of what has `by_category`."""
    title = f"Speed-up against {base}: median of paired ratios (95 % interval)"
    shown = _empty_table(title, list(variants))
    for category in variants[PLAIN]["by_category"]:
        shown.add_row(escape(category), *(_ratio(figures["by_category"][category]) for figures in variants.values()))
    return shown


def _empty_table(title: str, columns: list[str]) -> Table:
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title=title, title_justify="left")
    shown.add_column("")
    for heading in variant_labels(columns).values():
        shown.add_column(escape(heading), justify="right", overflow="fold")
    return shown


def _ratio(figures: dict[str, Any]) -> str:
    low, high = figures["speedup_interval"]
    return f"{figures['median_speedup']:.2f} ({low:.2f}-{high:.2f})"


def _seconds(part: float, whole: float) -> str:
    return f"{part:.2f} ({part / whole:.0%})"


def _by_arm(profile: dict[str, Any], arm: str) -> str:
    if arm not in profile["drafted_by"]:
        return ""
    return f"{profile['accepted_by'][arm]} of {profile['drafted_by'][arm]}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


# Rows below the categories: how each is made from a variant's figures and its totals.
_SUMMARY_ROWS: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
    "geometric mean": lambda figures, total: _ratio(figures["geometric_mean"]),
    "tokens/second": lambda figures, total: f"{total['tokens'] / total['seconds']:.1f}",
    "tokens/round": lambda figures, total: f"{total['mean_acceptance_length']:.2f}",
    "accepted/drafted": lambda figures, total: _percent(total["acceptance_rate"]),
    "rounds with draft": lambda figures, total: _percent(total["coverage"]),
    "overhead": lambda figures, total: _percent(figures["overhead_share"]),
    "identical": lambda figures, total: (
        "" if total["identical"] is None else f"{total['identical']}/{total['questions']}"
    ),
}
