"""The page of a run: all text escaped, nothing loaded from elsewhere."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from unicodedata import category

from hf_specdec.files import write_text
from hf_specdec.pages.charts import Curve, bar, curves, sample
from hf_specdec.pages.pieces import Pieces
from hf_specdec.pages.run import Run
from hf_specdec.rounds import BONUS, CORRECTION, PLAIN, RowRound
from hf_specdec.stats import SpecStats

# Colours and underlines in the style sheet; further drafters use them again.
_NUM_STYLES = 6
_MEANINGS = {
    CORRECTION: "the target's own, in place of a refused one",
    BONUS: "the target's own, behind a draft that stayed whole",
    PLAIN: "the target's own, without a draft",
}
_END, _PART = '<i class="end"></i>', '<i class="part"></i>'
_PHASES = {
    "prefill": "the prompt's pass",
    "draft": "drafting",
    "verify": "the target's other passes",
    "accept": "judging, and waiting for the device",
    "bookkeeping": "caches, statistics, streaming",
}
_ADVICE = {"correctness": "Output", "speed": "Speed", "advice": "To do"}


def write_page(run: Run, path: str | Path) -> Path:
    """Writes the page of a run, one HTML file that needs no network; returns its path."""
    return write_text(Path(path), page(run))


def page(run: Run) -> str:
    """The page of a run as HTML."""
    styles = {arm: f"arm-{index % _NUM_STYLES + 1}" for index, arm in enumerate(run.trace.arms)}
    stats = run.trace.stats()
    style, script = _asset("page.css"), _asset("page.js")
    return Template(_asset("page.html")).substitute(
        title=_text(f"{run.about.get('target', 'A target')} with {run.trace.assistant}"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        figures=_definitions(_figures(stats)),
        about=_definitions(run.about),
        who=_who(run, stats, styles),
        rows="\n".join(_row(run, row, styles) for row in range(len(run.prompts))),
        curves=_curves(run, stats, styles),
        time=_time(stats),
        findings=_findings(run),
        data=_data(run, styles),
    )


def _asset(name: str) -> str:
    return files("hf_specdec.pages").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _definitions(shown: dict[str, str]) -> str:
    return "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in shown.items())


def _figures(stats: SpecStats) -> dict[str, str]:
    seconds = sum(stats.seconds.values())
    return {
        "tokens": str(stats.emitted),
        "rounds": str(stats.rounds),
        "tokens a round": _number(stats.mean_acceptance_length, ".2f"),
        "of drafted tokens stayed": _number(stats.acceptance_rate, ".0%"),
        "seconds": f"{seconds:.2f}",
        "tokens a second": _number(stats.emitted / seconds if seconds else None, ".1f"),
    }


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


# --- who produced it --------------------------------------------------------------------------------------


def _who(run: Run, stats: SpecStats, styles: dict[str, str]) -> str:
    """The legend, with counts."""
    own = dict.fromkeys(_MEANINGS, 0)
    for turn in run.trace.rounds:
        for part in turn.rows:
            if part.last is not None:
                own[part.last] += 1
    lines = [
        _who_line(f"drafted by {arm}", _token("token", f"kept {style}"), style, stats.accepted_by[arm], stats, arm)
        for arm, style in styles.items()
    ]
    lines += [
        _who_line(meaning, _token("token", kind), "ink", own[kind], stats)
        for kind, meaning in _MEANINGS.items()
        if own[kind]
    ]
    if refused := stats.drafted - stats.accepted:
        looks = f"{_refused_token('token', '')}{_others(3)}"
        who = "drafted and refused (+3: in other branches of a tree)"
        lines.append(f'<tr><td>{looks}</td><th scope="row">{who}</th><td>{refused}</td><td></td><td></td></tr>')
    return _table(("looks like", "who", "tokens", "of the text", "of its drafts"), lines, "who")


def _who_line(who: str, look: str, style: str, tokens: int, stats: SpecStats, arm: str | None = None) -> str:
    share = tokens / stats.emitted
    of_drafts = "" if arm is None else f"{tokens} of {stats.drafted_by[arm]} ({tokens / stats.drafted_by[arm]:.0%})"
    return (
        f'<tr><td>{look}</td><th scope="row">{_text(who)}</th><td>{tokens}</td>'
        f"<td>{bar(share, style)} {share:.0%}</td><td>{of_drafts}</td></tr>"
    )


def _table(heads: tuple[str, ...], lines: list[str], style: str = "", caption: str = "") -> str:
    """A table that scrolls by itself where the window is narrow."""
    above = f"<caption>{_text(caption)}</caption>" if caption else ""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        f'<div class="scroll"><table class="{style}">{above}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


# --- the texts --------------------------------------------------------------------------------------------


def _row(run: Run, row: int, styles: dict[str, str]) -> str:
    """A prompt and its text, round by round."""
    rounds = list(_rounds_of(run, row))
    tokens = sum(len(part.emitted) for _, part, _ in rounds)
    title = "The text" if len(run.prompts) == 1 else f"Text {row + 1}"
    shown = "".join(_round(number, part, pieces, styles) for number, (_, part, pieces) in enumerate(rounds, start=1))
    length = len(run.trace.prompts[row])
    return (
        f'<section class="row" aria-labelledby="row-{row}">'
        f'<h2 id="row-{row}">{title} <small>{tokens} tokens in {len(rounds)} rounds</small></h2>'
        f"<details><summary>The prompt ({length} tokens)</summary>"
        f'<div class="prompt">{_text(run.prompts[row])}</div></details>'
        f'<div class="text" role="group" data-row="{row}" aria-labelledby="row-{row}" '
        f'aria-roledescription="text by rounds">{shown}</div></section>'
    )


def _rounds_of(run: Run, row: int) -> Iterator[tuple[int, RowRound, Pieces]]:
    """A row's rounds: the place among all rounds, what happened, what it looks like."""
    for index, (turn, texts) in enumerate(zip(run.trace.rounds, run.pieces, strict=True)):
        for part, pieces in zip(turn.rows, texts, strict=True):
            if part.row == row:
                yield index, part, pieces


def _round(number: int, part: RowRound, pieces: Pieces, styles: dict[str, str]) -> str:
    """A round in the text: what stayed, what was refused behind it, the target's own token."""
    style = styles.get(part.arm or "", "")
    kept = len(part.kept)
    parts = [_token(piece, f"kept {style}") for piece in pieces.emitted[:kept]]
    refused, others = _refused(part)
    parts += [_refused_token(pieces.drafted[place], style) for place in refused]
    if others:
        parts.append(_others(others))
    parts += [_token(piece, str(part.last)) for piece in pieces.emitted[kept:]]
    label = _text(_spoken(number, part, pieces))
    return (
        f'<span class="round" role="button" tabindex="{0 if number == 1 else -1}" data-round="{number - 1}" '
        f'aria-label="{label}">{"".join(parts)}</span>'
    )


def _token(piece: str, style: str) -> str:
    """A token of the text; a frame leaves out the space in front of a word, which may hang at a line's end."""
    word = piece if style.startswith("kept") else piece.lstrip(" ") or piece
    return f'<span class="t">{piece[: len(piece) - len(word)]}<span class="{style}">{_shown(word)}</span></span>'


def _shown(piece: str, end: str = f"{_END}\n") -> str:
    """A token's text; what is not seen and a line's end get a mark, which copies and counts as nothing."""
    mark = "" if any(char in "\n\t" or category(char)[0] not in "CM" for char in piece) else _PART
    return mark + _text(piece).replace("\n", end)


def _refused_token(piece: str, style: str) -> str:
    """A token that is not in the text, nor are its line ends."""
    return f'<del class="{style}">{_shown(piece, _END)}</del>'


def _text(text: str) -> str:
    """Text that reads in a browser as it is: raw carriage returns would turn into line feeds."""
    return escape(text).replace("\r", "&#13;")


def _others(count: int) -> str:
    return f'<del class="more" title="more refused tokens, in other branches">+{count}</del>'


def _refused(part: RowRound) -> tuple[list[int], int]:
    """The refused tokens along the first branch where the text left the draft; how many others there are."""
    path: list[int] = []
    end = part.kept[-1] if part.kept else -1
    for place, parent in enumerate(part.known_parents):
        if parent == (path[-1] if path else end):
            path.append(place)
    return path, len(part.drafted) - len(part.kept) - len(path)


def _spoken(number: int, part: RowRound, pieces: Pieces) -> str:
    """A round in words."""
    kept = len(part.kept)
    said = [f"Round {number}."]
    if part.arm is not None:
        said.append(f"{part.arm} drafted {len(part.drafted)}, {kept} stayed.")
    if kept:
        said.append(f"Drafted: “{''.join(pieces.emitted[:kept])}”.")
    if part.last is not None:
        said.append(f"“{pieces.emitted[-1]}”: {_MEANINGS[part.last]}.")
    return " ".join(said)


# --- curves, time, check ----------------------------------------------------------------------------------


def _curves(run: Run, stats: SpecStats, styles: dict[str, str]) -> str:
    """Both curves of every drafter, their legend and their figures."""
    if not stats.drafted:
        return "<p>Nothing was drafted.</p>"
    counts = {arm: run.trace.by_depth(arm) for arm in styles}
    charts = {
        "If all before it stayed": [Curve(arm, styles[arm], kept, judged) for arm, (_, judged, kept) in counts.items()],
        "At all, in drafts that go so far": [
            Curve(arm, styles[arm], kept, drafted) for arm, (drafted, _, kept) in counts.items()
        ],
    }
    figures = [
        f"<figure><figcaption>{title}</figcaption>"
        f"{curves(shown, f'How often the token at a position of a draft stayed, {title.lower()}')}</figure>"
        for title, shown in charts.items()
        if any(curve.points for curve in shown)
    ]
    legend = "".join(f"<li>{sample(style)} {_text(arm)}</li>" for arm, style in styles.items())
    tables = "".join(_positions(arm, *columns) for arm, columns in counts.items())
    return (
        f'<div class="charts">{"".join(figures)}</div><ul class="legend">{legend}<li>larger dots: more drafts</li></ul>'
        f"<details><summary>The figures</summary>{tables}</details>"
    )


def _positions(arm: str, *columns: list[int]) -> str:
    """A drafter's counts by position."""
    lines = [
        f'<tr><th scope="row">{position}</th>{"".join(f"<td>{count}</td>" for count in counts)}</tr>'
        for position, counts in enumerate(zip(*columns, strict=True), start=1)
    ]
    return _table(("position", "drafted", "judged", "stayed"), lines, caption=f"{arm}, rounds by position")


def _time(stats: SpecStats) -> str:
    total = sum(stats.seconds.values()) or 1.0
    lines = [
        f'<tr><th scope="row">{phase} <small>{_PHASES[phase]}</small></th><td>{bar(seconds / total)}</td>'
        f"<td>{seconds:.3f} s</td><td>{seconds / total:.0%}</td></tr>"
        for phase, seconds in stats.seconds.items()
    ]
    return _table(("phase", "", "seconds", "share"), lines, "time")


def _findings(run: Run) -> str:
    if not run.findings:
        return "<p>They were not checked.</p>"
    shown = []
    for finding in run.findings:
        facts = finding.__dict__
        is_silent = finding.level == "ok"
        advice = {} if is_silent else {title: facts[name] for name, title in _ADVICE.items()}
        shown.append(
            f'<li class="{finding.level}"><b class="level">{finding.level}</b> <b>{_text(finding.topic)}</b>: '
            f"{_text(finding.found)}<dl>{_definitions(advice)}</dl></li>"
        )
    return f'<ul class="findings">{"".join(shown)}</ul>'


# --- what the script shows --------------------------------------------------------------------------------


def _data(run: Run, styles: dict[str, str]) -> str:
    """Every row's rounds as JSON that cannot end its element."""
    rows = [
        [_round_data(run, index, part, pieces, styles) for index, part, pieces in _rounds_of(run, row)]
        for row in range(len(run.prompts))
    ]
    return json.dumps({"meanings": _MEANINGS, "rows": rows}).replace("<", "\\u003c").replace("&", "\\u0026")


def _round_data(run: Run, index: int, part: RowRound, pieces: Pieces, styles: dict[str, str]) -> dict[str, Any]:
    return {
        "sharing": len(run.trace.rounds[index].rows),
        "seconds": run.trace.rounds[index].seconds,
        "arm": part.arm,
        "style": styles.get(part.arm or "", ""),
        "drafted": pieces.drafted,
        "parents": part.parents,
        "kept": part.kept,
        "last": part.last,
        "own": pieces.emitted[-1] if part.last is not None else None,
    }
