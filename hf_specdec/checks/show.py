"""A report as a table for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_specdec.checks.findings import Bill, CompatReport, Finding, Measurement

_COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show(report: CompatReport, console: Console) -> None:
    """Prints a report: findings, the bill, what was measured, and the outcome in one line."""
    console.print(_findings(report))
    console.print()
    if report.bill is not None:
        _show_bill(report.bill, console)
    if report.measurement is not None:
        _show_measurement(report.measurement, console)
    counts = f"{len(report.errors)} error(s), {len(report.warnings)} warning(s)"
    outcome = {
        "ok": "The drafter fits.",
        "warning": "The drafter can be used, with reservations.",
        "error": "The drafter does not fit.",
    }
    console.print(f"[{_COLOURS[report.level]}]{outcome[report.level]}[/] {counts}.")
    if report.measurement is not None:
        console.print(escape(report.measurement.verdict))


def _findings(report: CompatReport) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, title=f"{escape(report.drafter)} for {escape(report.target)}")
    table.title_justify = "left"
    table.add_column("")
    table.add_column("looked at", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in report.findings:
        level = f"[{_COLOURS[finding.level]}]{finding.level}[/]"
        table.add_row(level, finding.topic, "\n".join(_lines(finding)))
    return table


def _lines(finding: Finding) -> list[str]:
    lines = [escape(finding.found)]
    if finding.level != "ok" or not finding.correctness.startswith("none"):
        lines.append(f"[dim]output:[/] {escape(finding.correctness)}")
    if finding.speed != "none":
        lines.append(f"[dim]speed:[/] {escape(finding.speed)}")
    if finding.advice != "nothing":
        lines.append(f"[dim]to do:[/] {escape(finding.advice)}")
    return lines


def _show_bill(bill: Bill, console: Console) -> None:
    table = Table(box=box.SIMPLE, show_edge=False, title=f"memory at {bill.context} tokens, batch {bill.batch}")
    table.title_justify = "left"
    for name in ("", "weights", "cache per token", "cache"):
        table.add_column(name, justify="left" if not name else "right")
    for name in ("target", "drafter"):
        parts: list[Any] = [getattr(bill, f"{name}_{part}") for part in ("weights", "cache_per_token", "cache")]
        table.add_row(name, *map(amount, parts))
    console.print(table)
    console.print(f" The drafter adds {amount(bill.extra)}; of {amount(bill.memory)} both leave {amount(bill.left)}.\n")


def _show_measurement(found: Measurement, console: Console) -> None:
    title = f"measured (batch {found.batch}, prompts of {found.prompt_tokens} tokens)"
    table = Table(box=box.SIMPLE, show_edge=False, title=title)
    table.title_justify = "left"
    table.add_column("drafted tokens a round")
    columns = {0: found.plain_seconds} | found.round_seconds
    for width in columns:
        table.add_column(str(width) if width else "plain", justify="right")
    table.add_row("target's pass, ms", "", *(f"{1000 * value:.1f}" for value in found.verify_seconds.values()))
    table.add_row("whole round, ms", *(f"{1000 * value:.1f}" for value in columns.values()))
    rates = [found.acceptance[width - 1] if width <= len(found.acceptance) else None for width in found.round_seconds]
    table.add_row("stays at that position", "", *("n/a" if rate is None else f"{rate:.0%}" for rate in rates))
    needed = "no share is enough" if found.break_even is None else f"{found.break_even:.0%} must stay to break even"
    console.print(table)
    console.print(
        f" A drafted token takes {1000 * found.draft_seconds:.1f} ms; {needed}; recommended draft length: "
        f"{found.num_draft_tokens}.\n"
    )


def amount(num_bytes: int | None) -> str:
    """Bytes for people."""
    if num_bytes is None:
        return "unknown"
    value = float(num_bytes)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.2g} {unit}"
