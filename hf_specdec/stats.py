"""Counts and seconds of speculative decoding; rates are divided late, from counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

PHASES = ("prefill", "draft", "verify", "accept", "bookkeeping")


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@dataclass
class SpecStats:
    """What happened in one call, or, on a drafter, in all its calls.

    A round of a row is one target pass it took part in, the prompt's pass included. Counts are exact; a
    draft token counts as accepted when it was emitted, so tokens cut off behind an end-of-sequence token
    are drafted but not accepted.

    Attributes:
        rounds: R, summed over rows.
        drafted: D, tokens the target had to judge.
        accepted: C, drafted tokens that were emitted.
        rounds_with_draft: rounds of rows that had at least one drafted token.
        emitted: tokens emitted, drafted or not.
        calls: `generate` calls; where one of them decodes several texts (Whisper, long audio), each counts.
        target_passes: forward passes of the target, each over all unfinished rows.
        drafted_at: rounds that drafted a token at position i (from 0); of a tree, more than i tokens.
        tested_at: of those, the rounds in which all earlier positions were accepted and a token at this one was judged.
            Where a path of a tree was accepted to its leaf, nothing was drafted behind it, so nothing was judged there.
        accepted_at: rounds in which positions 0..i were accepted in a row.
        drafted_by: tokens drafted by each drafter, by name.
        accepted_by: of those, the tokens that were emitted; all others came from the target itself.
        seconds: wall-clock time by phase: prefill (the first pass), draft, verify (the other target
            passes), accept (processors, the rule and the round's one read of the device), bookkeeping.
            Work queued on an accelerator shows up in the phase that waits for it.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds_with_draft: int = 0
    emitted: int = 0
    calls: int = 0
    target_passes: int = 0
    drafted_at: list[int] = field(default_factory=list)
    tested_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def record_row(self, drafted: int, accepted: int, emitted: int, drafter: str, judged: int | None = None) -> None:
        """Adds one row's round.

        Args:
            drafted: tokens that were drafted.
            accepted: how many of them were emitted.
            emitted: tokens in all.
            drafter: whose draft it was.
            judged: positions at which a drafted token was judged; `None` for a chain: every emitted token was, and
                behind the last one nothing (an end, or a cut in lockstep).
        """
        judged = min(drafted, emitted) if judged is None else judged
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        if drafted > 0:
            self.rounds_with_draft += 1
            self.drafted_by[drafter] = self.drafted_by.get(drafter, 0) + drafted
            self.accepted_by[drafter] = self.accepted_by.get(drafter, 0) + accepted
        missing = drafted - len(self.drafted_at)
        for counts in (self.drafted_at, self.tested_at, self.accepted_at):
            counts.extend([0] * missing)
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.tested_at[position] += position < judged
            self.accepted_at[position] += position < accepted

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @property
    def acceptance_rate(self) -> float | None:
        """Draft acceptance rate C / D; `None` when nothing was drafted."""
        return _ratio(self.accepted, self.drafted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a round yields on average, the target's own token included: 1 + C / R."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def coverage(self) -> float | None:
        """Share of rounds that had a draft."""
        return _ratio(self.rounds_with_draft, self.rounds)

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """P(position i accepted | drafted, all earlier positions accepted)."""
        return [_ratio(a, t) for a, t in zip(self.accepted_at, self.tested_at, strict=True)]

    @property
    def cumulative_acceptance_by_position(self) -> list[float | None]:
        """P(positions 0..i all accepted | position i drafted)."""
        return [_ratio(a, d) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def seconds_per_token(self) -> float | None:
        """Draft and verify seconds per emitted token; the prompt's own pass is left out.

        On an accelerator, whose queue is waited for in `accept`, add those seconds for the time of the passes.
        """
        return _ratio(self.seconds["draft"] + self.seconds["verify"], self.emitted)

    def merge(self, other: SpecStats) -> None:
        """Adds another record's counts and seconds to this one."""
        for name in (f.name for f in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                mine.update({key: mine.get(key, 0) + value for key, value in theirs.items()})
            elif isinstance(mine, list):
                mine.extend([0] * (len(theirs) - len(mine)))
                mine[: len(theirs)] = [a + b for a, b in zip(mine, theirs, strict=False)]
            else:
                setattr(self, name, mine + theirs)

    def reset(self) -> None:
        """Sets every count and every second back to zero."""
        self.__init__()  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """Counts, seconds and the rates derived from them, ready for JSON.

        The counters of vLLM are there under its names, so that what reads those can be fed: drafts are rounds of a row
        that had one, tokens per position are those accepted along with all before them. One case differs: what was
        accepted behind an end-of-sequence token counts there, and does not here.
        """
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        counts = {key: value.copy() if isinstance(value, list | dict) else value for key, value in counts.items()}
        return counts | {
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "coverage": self.coverage,
            "acceptance_by_position": self.acceptance_by_position,
            "cumulative_acceptance_by_position": self.cumulative_acceptance_by_position,
            "seconds_per_token": self.seconds_per_token,
            "spec_decode_num_drafts": self.rounds_with_draft,
            "spec_decode_num_draft_tokens": self.drafted,
            "spec_decode_num_accepted_tokens": self.accepted,
            "spec_decode_num_accepted_tokens_per_pos": self.accepted_at.copy(),
        }

    def __str__(self) -> str:
        def show(value: float | None, form: str = ".2f") -> str:
            return "n/a" if value is None else format(value, form)

        judged = [rate for rate in self.acceptance_by_position if rate is not None]  # unjudged positions come last
        by_position = " ".join(map(show, judged)) or "n/a"
        by_drafter = "  ".join(f"{name} {count}" for name, count in self.accepted_by.items()) or "n/a"
        seconds = "  ".join(f"{name} {self.seconds[name]:.3f}" for name in PHASES)
        return "\n".join(
            [
                f"tokens emitted          {self.emitted}",
                f"rounds                  {self.rounds} ({show(self.coverage, '.0%')} with a draft)",
                f"drafted / accepted      {self.drafted} / {self.accepted} ({show(self.acceptance_rate, '.0%')})",
                f"mean acceptance length  {show(self.mean_acceptance_length)} tokens a round",
                f"acceptance by position  {by_position} (of rounds that got there)",
                f"accepted by drafter     {by_drafter}",
                f"seconds                 {seconds}",
            ]
        )


class SharedStats(SpecStats):
    """Statistics that several calls, possibly of several threads, add to."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def merge(self, other: SpecStats) -> None:
        with self._lock:
            super().merge(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedStats:
        copy = SharedStats()
        copy.merge(self)
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore_shared_stats, ({f.name: getattr(self, f.name) for f in fields(self)},))


def _restore_shared_stats(values: dict[str, Any]) -> SharedStats:
    stats = SharedStats()
    for name, value in values.items():
        setattr(stats, name, value)
    return stats
