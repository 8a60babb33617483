"""What a benchmark measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from hf_specdec.checks.questions import published_name
from hf_specdec.checks.report import HOST_LOOKUP, PLAIN
from hf_specdec.checks.variants import HOST, split_variant
from hf_specdec.options import check_count

TURNS = ("first", "all")


@dataclass(frozen=True)
class BenchOptions:
    """One setting of a benchmark.

    Args:
        questions: a file or `hub:NAME`; see `read_questions`.
        target: a folder or Hub id; `None` is the embedded demo model.
        variants: names from `VARIANTS`, those that end in "=" followed by a folder or Hub id, some by a number
            ("token-recycling=16": the nodes of its trees). Plain generation always runs, as everything is compared
            with it.
        dtype: "bfloat16", "float32" or "float16".
        device: such as "cpu" or "cuda"; `None` is the accelerator if there is one.
        categories: which to ask; `None` means all.
        limit: how many questions of each category, from the first; `None` means all.
        turns: "first" asks only the first turn of every question; "all" asks every turn, each after the
            variant's own earlier answers.
        batch_size: questions of one category that are answered together. Transformers' own assisted
            generation can only do one.
        max_new_tokens: most tokens of an answer.
        temperature: 0 is greedy. Other sampling settings stay those of the model's generation config.
        num_draft_tokens: longest draft of our variants; `None` leaves it to each strategy.
        seed: of the first question; every variant answers a question from the same seed.
        past_ends: whether answers go on past the end-of-sequence ids: all variants then write as many tokens, and
            batches stay full.

    Raises:
        ValueError: if a value is out of range or a variant is unknown.
    """

    questions: str
    target: str | None = None
    variants: tuple[str, ...] = (PLAIN, HOST_LOOKUP, "prompt-lookup")
    dtype: str = "bfloat16"
    device: str | None = None
    categories: tuple[str, ...] | None = None
    limit: int | None = None
    turns: str = "first"
    batch_size: int = 1
    max_new_tokens: int = 128
    temperature: float = 0.0
    num_draft_tokens: int | None = None
    seed: int = 0
    past_ends: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_new_tokens"):
            check_count(name, getattr(self, name))
        for name in ("limit", "num_draft_tokens"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be a finite number of at least 0 (0 is greedy).")
        if self.turns not in TURNS:
            raise ValueError(f"turns={self.turns!r} is unknown; use one of {', '.join(TURNS)}.")
        self._check_variants()

    def _check_variants(self) -> None:
        for spelling in self.variants:
            split_variant(spelling)
        if len(set(self.variants)) < len(self.variants):
            raise ValueError(f"variants={','.join(self.variants)} names one twice; name each once.")
        of_host = [spelling for spelling in self.variants if spelling.startswith(HOST)]
        if self.batch_size > 1 and of_host:
            raise ValueError(
                f"{', '.join(of_host)}: Transformers' own assisted generation serves one question at a time, and "
                f"batch_size={self.batch_size}. Leave these variants out, or set batch_size=1."
            )

    @property
    def names(self) -> list[str]:
        """All variants that run, plain first."""
        return [PLAIN, *(name for name in self.variants if name != PLAIN)]

    def published(self) -> dict[str, Any]:
        """The options as a document shows them."""
        return asdict(self) | {"questions": published_name(self.questions)}


def combinations(
    targets: Sequence[str | None] = (None,),
    batch_sizes: Sequence[int] = (1,),
    temperatures: Sequence[float] = (0.0,),
    variants: Sequence[str] = (PLAIN, HOST_LOOKUP, "prompt-lookup"),
    **others: Any,
) -> list[BenchOptions]:
    """Every combination of targets, batch sizes and temperatures as a setting.

    Args:
        targets: see `BenchOptions`.
        batch_sizes: where one of several is 1, Transformers' own assisted generation is measured there, and left out
            of the larger ones.
        temperatures: see `BenchOptions`.
        variants: see `BenchOptions`.
        others: of all settings.

    Raises:
        ValueError: if a value is out of range, or one is named twice.
    """
    for name, values in (("target", targets), ("batch_size", batch_sizes), ("temperature", temperatures)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name}={','.join(map(str, values))}: name at least one, and each once.")
    ours = tuple(name for name in variants if not (name.startswith(HOST) and 1 in batch_sizes))
    return [
        BenchOptions(
            target=target,
            batch_size=batch_size,
            temperature=temperature,
            variants=tuple(variants) if batch_size == 1 else ours,
            **others,
        )
        for target, batch_size, temperature in product(targets, batch_sizes, temperatures)
    ]
