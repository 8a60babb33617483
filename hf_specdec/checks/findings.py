"""What a check found, and the report it makes up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

LEVELS = ("ok", "warning", "error")
SAFE = "none: the target verifies every drafted token"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what was looked at, such as "vocabulary".
        level: "ok", "warning" (it works, but slower than it could) or "error" (it cannot be served).
        found: what was found.
        correctness: what it means for the output.
        speed: what it means for speed.
        advice: what to do.
    """

    topic: str
    level: str
    found: str
    correctness: str = SAFE
    speed: str = "none"
    advice: str = "nothing"

    def __post_init__(self) -> None:
        assert self.level in LEVELS, self.level

    def __str__(self) -> str:
        parts = [f"{self.topic}: {self.found}"]
        if self.level != "ok":
            parts[0] = parts[0].removesuffix(".") + "."
            parts += [f"For correctness: {self.correctness}.", f"For speed: {self.speed}.", f"To do: {self.advice}."]
        return " ".join(parts)


@dataclass(frozen=True)
class Bill:
    """What a drafter costs in memory, in bytes; `None` where it is not known.

    Attributes:
        target_weights: of the target.
        drafter_weights: of the drafter.
        target_cache_per_token: keys and values of one token of the target, sliding windows not considered.
        drafter_cache_per_token: the same of the drafter.
        context: tokens of a row for which the caches below are computed.
        batch: rows.
        target_cache: the target's keys and values at that context and batch.
        drafter_cache: the drafter's.
        memory: of the device.
    """

    target_weights: int | None
    drafter_weights: int | None
    target_cache_per_token: int | None
    drafter_cache_per_token: int | None
    context: int
    batch: int
    target_cache: int | None
    drafter_cache: int | None
    memory: int | None

    @property
    def extra(self) -> int | None:
        """What the drafter adds."""
        return _sum(self.drafter_weights, self.drafter_cache)

    @property
    def left(self) -> int | None:
        """What weights and caches of both leave of the device's memory; negative if it is too small."""
        used = _sum(self.target_weights, self.target_cache, self.extra)
        return None if used is None or self.memory is None else self.memory - used

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        return asdict(self) | {"extra": self.extra, "left": self.left}


def _sum(*parts: int | None) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


@dataclass(frozen=True)
class Measurement:
    """What a few rounds took, and what follows.

    Attributes:
        batch: rows.
        prompt_tokens: length of the longest prompt.
        plain_seconds: of a token without a drafter, for all rows.
        verify_seconds: of a pass of the target, by its number of tokens a row.
        draft_seconds: of a drafted token, for all rows.
        round_seconds: of a round, everything included, by drafted tokens.
        acceptance: how often a drafted token stayed where all before it did, by position; `None` where none got there.
        break_even: share of drafted tokens that must stay for drafting to pay; `None` if no share is enough.
        num_draft_tokens: the recommended draft length; 0 if drafting does not pay.
        speedup: expected at that length, against plain generation.
        verdict: whether it will pay, in one sentence.
    """

    batch: int
    prompt_tokens: int
    plain_seconds: float
    verify_seconds: dict[int, float]
    draft_seconds: float
    round_seconds: dict[int, float]
    acceptance: list[float | None]
    break_even: float | None
    num_draft_tokens: int
    speedup: float
    verdict: str


@dataclass(frozen=True)
class CompatReport:
    """Whether a drafter fits a target, and what it costs.

    Attributes:
        target: its name.
        drafter: its name.
        findings: everything that was looked at.
        bill: the drafter's cost in memory.
        measurement: its cost in time, if that was asked for.
    """

    target: str
    drafter: str
    findings: tuple[Finding, ...]
    bill: Bill | None = None
    measurement: Measurement | None = field(default=None)

    @property
    def level(self) -> str:
        """The worst level of all findings."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    @property
    def errors(self) -> list[Finding]:
        """What makes the pair impossible to serve."""
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """What costs speed, or could not be looked at."""
        return [finding for finding in self.findings if finding.level == "warning"]

    def to_dict(self) -> dict[str, Any]:
        """The whole report, ready for JSON."""
        return {
            "target": self.target,
            "drafter": self.drafter,
            "level": self.level,
            "findings": [asdict(finding) for finding in self.findings],
            "bill": self.bill and self.bill.to_dict(),
            "measurement": self.measurement and asdict(self.measurement),
        }

    def __str__(self) -> str:
        lines = [f"{self.drafter} for {self.target}: {self.level}"]
        return "\n".join(lines + [f"{finding.level:8} {finding}" for finding in self.findings])
