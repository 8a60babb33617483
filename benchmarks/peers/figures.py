"""What follows from the answers, and the table that shows it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from hf_specdec.checks.report import typical
from peers.environments import OURS
from peers.kept import Kept
from peers.side import GENERATE, PLAIN

# Which of our ways does what a peer's way of another name does.
COUNTERPARTS = {
    "draft-model-default": "draft-model",
    "suffix-decoding": "suffix",
    "suffix-tree": "suffix",
    "suffix-recycle-merge": "auto",
}


def figures(questions: list[dict[str, Any]], peers: dict[str, Any], kept: Kept) -> dict[str, Any]:
    """By peer and way: sums, rates, speed-ups with their intervals, and answers as those of plain `generate`."""
    asked = {question["question_id"]: question["category"] for question in questions}
    answers = {name: {which: kept.get(which, name) or {} for which in asked} for name in peers}
    return {name: {way: of_way(name, way, asked, answers) for way in ways_of(answers[name])} for name in peers}


def ways_of(answers: dict[Any, Any]) -> list[str]:
    """All ways in which something was answered, plain ones first."""
    ways = {way for given in answers.values() for way in given}
    return sorted(ways, key=lambda way: (way != PLAIN, way != GENERATE, way))


def of_way(name: str, way: str, asked: dict[Any, str], answers: dict[str, Any]) -> dict[str, Any]:
    """The figures of one way; those of its failures are left out."""
    given = {which: answer for which in asked if "tokens" in (answer := answers[name][which].get(way, {}))}
    errors = [answers[name][which][way]["error"] for which in asked if "error" in answers[name][which].get(way, {})]
    if not given:
        return {"error": errors[0]}
    host = GENERATE if GENERATE in ways_of(answers[name]) else PLAIN
    tokens = sum(len(answer["tokens"]) for answer in given.values())
    passes, seconds = (sum(answer[key] for answer in given.values()) for key in ("target_passes", "seconds"))
    counterpart = COUNTERPARTS.get(way, way)
    return {
        "answers": len(given),
        "errors": errors,
        "tokens": tokens,
        "target_passes": passes,
        "seconds": seconds,
        "tokens_per_pass": tokens / passes,
        "tokens_per_second": tokens / seconds,
        "over_plain": ratio(asked, given, of_all(answers, name, PLAIN), "seconds"),
        "over_generate": ratio(asked, given, of_all(answers, name, GENERATE), "seconds"),
        "as_generate": sum(answer["tokens"] == tokens_of(answers, name, host, key) for key, answer in given.items()),
        "as_ours": sum(answer["tokens"] == tokens_of(answers, OURS, PLAIN, key) for key, answer in given.items()),
        "ours_over_it": {
            "speed": ratio(asked, of_all(answers, OURS, counterpart), given, "seconds"),
            "tokens_per_pass": ratio(asked, of_all(answers, OURS, counterpart), given, "target_passes"),
        },
    }


def of_all(answers: dict[str, Any], name: str, way: str) -> dict[Any, Any]:
    """A way's answers by question, without failures."""
    given = {which: found.get(way, {}) for which, found in answers.get(name, {}).items()}
    return {which: answer for which, answer in given.items() if "tokens" in answer}


def tokens_of(answers: dict[str, Any], name: str, way: str, which: Any) -> list[int] | None:
    """One answer, if there is one."""
    return answers[name][which].get(way, {}).get("tokens")


def ratio(asked: dict[Any, str], ones: dict[Any, Any], others: dict[Any, Any], cost: str) -> dict[str, Any] | None:
    """How many times as many tokens for their cost the ones have: medians within categories, and the interval."""
    groups: dict[str, list[float]] = {}
    for which, category in asked.items():
        if which in ones and which in others:
            one, other = (len(answer["tokens"]) / answer[cost] for answer in (ones[which], others[which]))
            groups.setdefault(category, []).append(one / other)
    if not groups:
        return None
    value, interval = typical(list(groups.values()))
    return {"ratio": value, "interval": interval}


# --- the table --------------------------------------------------------------------------------------------

HEADINGS = {
    "peer": "left",
    "way": "left",
    "tokens a pass": "right",
    "speed-up over its own plain run": "right",
    "over its `generate`": "right",
    "our speed over it": "right",
    "as `generate`": "right",
    "lowest p-value of its samples": "left",
}


def table(document: dict[str, Any]) -> Table:
    """One line a way; where there are no figures, the reason."""
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title="Peers", title_justify="left")
    for heading, side in HEADINGS.items():
        shown.add_column(heading, justify=side)
    for name, peer in document["peers"].items():
        laws = document["laws"].get(name, {})
        shown.add_section()
        if peer["error"] is not None:
            shown.add_row(name, peer["error"])
        for way, error in peer["unusable"].items():
            shown.add_row(name, f"{way}: {error}")
        for way, found in document["figures"][name].items():
            shown.add_row(name, *cells(way, found), law_cell(laws.get(way, laws if "error" in laws else None)))
    return shown


def cells(way: str, found: dict[str, Any]) -> list[str]:
    """The figures of a way, or why there are none."""
    if "error" in found:
        return [f"{way}: {found['error']}", *[""] * 5]
    ratios = (described(found[name]) for name in ("over_plain", "over_generate"))
    ours = described(found["ours_over_it"]["speed"])
    same = f"{found['as_generate']}/{found['answers']}"
    return [way, f"{found['tokens_per_pass']:.2f}", *ratios, ours, same]


def described(found: dict[str, Any] | None) -> str:
    """A ratio and its interval."""
    if found is None:
        return ""
    low, high = found["interval"]
    return f"{found['ratio']:.2f} ({low:.2f}-{high:.2f})"


def law_cell(found: dict[str, Any] | None) -> str:
    """The worst of a way's tests."""
    if not found:
        return ""
    if "error" in found:
        return str(found["error"])
    errors = [test["error"] for test in found.values() if "error" in test]
    if errors:
        return str(errors[0])
    draw, test = min(found.items(), key=lambda item: item[1]["p_value"])
    impossible = f", {test['impossible']} impossible" if test["impossible"] else ""
    return f"{test['p_value']:.2g} ({draw}, n = {test['samples']}{impossible})"
