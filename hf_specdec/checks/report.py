"""What a benchmark measured, the figures that follow from it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_specdec.stats import SpecStats

PLAIN = "plain"
HOST_LOOKUP = "host-prompt-lookup"
_RESAMPLES = 2000


@dataclass(frozen=True)
class Turn:
    """One answer: token ids of the prompt and of what was generated, the end-of-sequence token included."""

    prompt: list[int]
    answer: list[int]


@dataclass
class Run:
    """What one variant did with one batch of questions, all turns together.

    Attributes:
        turns: by question, then by turn.
        seconds: wall-clock time of the `generate` calls.
        target_passes: forward passes of the target.
        rounds: target passes summed over the rows that took part in them.
        stats: counts of our own variants, `None` for plain generation and the host's.
    """

    turns: list[list[Turn]]
    seconds: float
    target_passes: int
    rounds: int
    stats: SpecStats | None = None

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(len(turn.answer) for turns in self.turns for turn in turns)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def answers(self) -> list[list[list[int]]]:
        """Token ids generated, by question and turn."""
        return [[turn.answer for turn in turns] for turns in self.turns]


@dataclass
class Batch:
    """Questions of one category that were answered together; `runs` by variant, in the order they ran."""

    category: str
    question_ids: list[Any]
    runs: dict[str, Run]

    def ratio(self, name: str, base: str) -> float:
        """Speed of a variant over that of another one, on these questions."""
        return self.runs[name].speed / self.runs[base].speed

    def identical(self, name: str) -> int:
        """Questions that a variant answered exactly as plain generation did."""
        pairs = zip(self.runs[name].answers(), self.runs[PLAIN].answers(), strict=True)
        return sum(answers == plain for answers, plain in pairs)


def summary(batches: list[Batch], name: str, is_greedy: bool) -> dict[str, Any]:
    """All figures of one variant.

    Args:
        batches: what was measured.
        name: the variant.
        is_greedy: whether outputs can be expected to be equal; sampled ones are not compared.

    Returns:
        `total` and `by_category`: counts, speed-up against plain and identical outputs. `geometric_mean`:
        over categories. `overhead_share`: acceptance and bookkeeping as a share of the rounds' seconds, the
        prompt's pass left out. `profile`: counts and seconds of our own variants (see `SpecStats.to_dict`), else
        `None`. `against_host_prompt_lookup`: the same speed-ups with that variant as the base.
    """
    groups = by_category(batches)
    stats = merged([batch.runs[name] for batch in batches])
    figures = {
        "total": group_summary(batches, name, is_greedy),
        "by_category": {category: group_summary(group, name, is_greedy) for category, group in groups.items()},
        "geometric_mean": geometric_mean(batches, name, PLAIN),
        "overhead_share": overhead_share(stats),
        "profile": stats and stats.to_dict(),
    }
    if HOST_LOOKUP in batches[0].runs:
        figures["against_host_prompt_lookup"] = {
            "by_category": {category: speedups(group, name, HOST_LOOKUP) for category, group in groups.items()},
            "geometric_mean": geometric_mean(batches, name, HOST_LOOKUP),
        }
    return figures


def by_category(batches: list[Batch]) -> dict[str, list[Batch]]:
    """Batches by category, in order of appearance."""
    groups: dict[str, list[Batch]] = {}
    for batch in batches:
        groups.setdefault(batch.category, []).append(batch)
    return groups


def group_summary(batches: list[Batch], name: str, is_greedy: bool) -> dict[str, Any]:
    """Counts, speed-up against plain, and identical outputs of a group of batches."""
    return {
        "questions": sum(len(batch.question_ids) for batch in batches),
        **counts([batch.runs[name] for batch in batches]),
        **speedups(batches, name, PLAIN),
        "identical": sum(batch.identical(name) for batch in batches) if is_greedy else None,
    }


def counts(runs: list[Run]) -> dict[str, Any]:
    """Sums over runs and the rates that follow.

    Transformers' own assisted generation does not tell what it drafted: there, counts of drafts are `None`
    and the mean acceptance length is tokens per target pass.
    """
    tokens, rounds = sum(run.tokens for run in runs), sum(run.rounds for run in runs)
    stats = merged(runs)
    return {
        "tokens": tokens,
        "seconds": sum(run.seconds for run in runs),
        "target_passes": sum(run.target_passes for run in runs),
        "rounds": rounds,
        "drafted": stats and stats.drafted,
        "accepted": stats and stats.accepted,
        "rounds_with_draft": stats and stats.rounds_with_draft,
        "coverage": stats and stats.coverage,
        "mean_acceptance_length": stats.mean_acceptance_length if stats else tokens / rounds,
        "acceptance_rate": stats and stats.acceptance_rate,
        "seconds_by_phase": stats and stats.seconds,
    }


def merged(runs: list[Run]) -> SpecStats | None:
    """Statistics of all runs together; `None` if they have none."""
    total = SpecStats()
    for run in runs:
        if run.stats is None:
            return None
        total.merge(run.stats)
    return total


def speedups(batches: list[Batch], name: str, base: str) -> dict[str, Any]:
    """How much faster a variant is: ratio of sums, and median of paired ratios with its interval."""
    ours, theirs = (_speed_of_sums([batch.runs[which] for batch in batches]) for which in (name, base))
    median, interval = typical([[batch.ratio(name, base) for batch in batches]])
    return {"speedup": ours / theirs, "median_speedup": median, "speedup_interval": interval}


def geometric_mean(batches: list[Batch], name: str, base: str) -> dict[str, Any]:
    """The same over categories, each with the same weight."""
    groups = list(by_category(batches).values())
    median, interval = typical([[batch.ratio(name, base) for batch in group] for group in groups])
    sums = [speedups(group, name, base)["speedup"] for group in groups]
    return {
        "speedup": statistics.geometric_mean(sums),
        "median_speedup": median,
        "speedup_interval": interval,
    }


def typical(groups: list[list[float]]) -> tuple[float, list[float]]:
    """Geometric mean of the groups' medians, and its 95 % bootstrap interval (resampled within groups)."""
    value = statistics.geometric_mean([statistics.median(group) for group in groups])
    generator = np.random.default_rng(0)
    medians = [np.median(generator.choice(group, (_RESAMPLES, len(group))), axis=1) for group in groups]
    resampled = np.exp(np.mean(np.log(medians), axis=0))
    return value, np.percentile(resampled, [2.5, 97.5]).tolist()


def overhead_share(stats: SpecStats | None) -> float | None:
    """Acceptance and bookkeeping as a share of the rounds' seconds, the prompt's pass left out."""
    if stats is None:
        return None
    overhead = stats.seconds["accept"] + stats.seconds["bookkeeping"]
    rounds = overhead + stats.seconds["draft"] + stats.seconds["verify"]
    return overhead / rounds if rounds else None


def first_difference(answer: list[int], other: list[int]) -> int | None:
    """Index of the first token in which two answers differ; `None` if they are equal."""
    if answer == other:
        return None
    pairs = zip(answer, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(answer), len(other)))


def _speed_of_sums(runs: list[Run]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
