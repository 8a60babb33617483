"""The options of a call: checked once, frozen, merged from the least to the most specific."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from hf_specdec.accept import RULES

# "auto" is block verification. Coupled sampling needs no rule: it is greedy decoding of noisy scores.
VERIFICATIONS = {"auto": "block", "coupled": "block"} | {name: name for name in RULES}

# Odd and far from the seeds people choose, so that segments share no random numbers with other calls.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class SpeculationOptions:
    """How a call drafts and verifies. `None` means: not said here, ask the next more general place.

    Args:
        num_draft_tokens: longest draft of a round, at least 1; every draft is then as long as the drafter can make it.
            Unset, every round drafts as far as it pays by the measured record, at most the drafter's default. As an
            argument of a call it may also be given as `num_assistant_tokens`; that field of a GenerationConfig
            steers the host's own assisted decoding and does not count here.
        draft_temperature: temperature the drafter samples at; 0 drafts greedily. Unset, the drafter uses
            the call's own temperature. It changes speed, never the law of the output.
        verification: "token" (rejection sampling token by token), "block" (never accepts fewer), or "auto":
            block verification. Where tokens must be judged one by one, "block" is the token rule too. "coupled" ties
            Gumbel noise to (seed, row, position): the sampled text is then the same whatever the drafter, its draft
            length or the batch, at the price of some acceptance. Greedy decoding has only one rule, so there
            the choice changes nothing.
        seed: makes sampling reproducible; without it the seed is drawn from torch's global generator. The text of a
            drafter that copies (prompt lookup, suffixes) is then the same whatever it drafts. Of one that draws its
            drafts it depends on their lengths: a call with a seed fixes them, one without takes random numbers that no
            seed repeats (not that of `torch.manual_seed` either); verification="coupled" gives both.
        generator: a `torch.Generator` to draw the seed from instead. Not together with `seed`.

    Raises:
        ValueError: if a value is out of range or of another type.
    """

    num_draft_tokens: int | None = None
    draft_temperature: float | None = None
    verification: str | None = None
    seed: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None:
            check_count("num_draft_tokens", self.num_draft_tokens)
        if self.draft_temperature is not None and not (
            isinstance(self.draft_temperature, int | float)
            and not isinstance(self.draft_temperature, bool)
            and 0 <= self.draft_temperature < float("inf")
        ):
            raise ValueError(
                f"draft_temperature={self.draft_temperature!r} must be a finite number of at least 0 "
                "(0 drafts greedily); leave it out to draft at the call's own temperature."
            )
        if self.verification is not None and self.verification not in tuple(VERIFICATIONS):
            raise ValueError(f"verification={self.verification!r} is unknown; use one of {', '.join(VERIFICATIONS)}.")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ValueError(f"seed={self.seed!r} must be an integer.")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise ValueError(f"generator must be a torch.Generator, not {type(self.generator).__name__}.")
        if self.seed is not None and self.generator is not None:
            raise ValueError("seed= and generator= both fix the random numbers; pass one of the two.")

    def overridden_by(self, other: SpeculationOptions) -> SpeculationOptions:
        """These options with every value that `other` sets put in place."""
        given = {f.name: getattr(other, f.name) for f in fields(other) if getattr(other, f.name) is not None}
        if "seed" in given:
            given.setdefault("generator", None)
        if "generator" in given:
            given.setdefault("seed", None)
        return replace(self, **given)

    @property
    def rule(self) -> str:
        """The acceptance rule's name in `accept.RULES`."""
        return VERIFICATIONS[self.verification or "auto"]

    @property
    def is_coupled(self) -> bool:
        """Whether sampling is tied to (seed, row, position)."""
        return self.verification == "coupled"

    def is_scheduled(self, is_drawn: bool) -> bool:
        """Whether draft lengths follow the measured record; `is_drawn` says whether drafts are drawn from a law."""
        is_reproducible = is_drawn and (self.seed is not None or self.generator is not None)
        return self.num_draft_tokens is None and (self.is_coupled or not is_reproducible)

    def for_segment(self, index: int) -> SpeculationOptions:
        """The options for one of several texts of a call, each with random numbers of its own."""
        if self.seed is None or index == 0:
            return self
        return replace(self, seed=(self.seed + index * _SEED_STEP) % 2**64)

    def first_seed(self) -> int:
        """The seed of the call's random numbers."""
        if self.seed is not None:
            return self.seed
        device = "cpu" if self.generator is None else self.generator.device
        return int(torch.randint(2**62, (), generator=self.generator, device=device))


OPTION_NAMES = tuple(f.name for f in fields(SpeculationOptions))


def take_options(arguments: dict[str, Any]) -> SpeculationOptions:
    """Removes the options from keyword arguments, the host's own name for the draft length included.

    Args:
        arguments: keyword arguments of `generate` or `enable`; what is taken is deleted from it.

    Raises:
        ValueError: if an option is out of range, or both names of the draft length are given and differ.
    """
    taken = {name: arguments.pop(name) for name in OPTION_NAMES if name in arguments}
    alias = arguments.pop("num_assistant_tokens", None)
    if alias is not None:
        given = taken.get("num_draft_tokens")
        if given is not None and given != alias:
            raise ValueError(
                f"num_draft_tokens={given} and num_assistant_tokens={alias} are two names of one option; pass one."
            )
        taken["num_draft_tokens"] = alias
    return SpeculationOptions(**taken)


def check_count(name: str, value: Any, minimum: int = 1) -> None:
    """Raises `ValueError` unless the value is an integer of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}={value!r} must be an integer of at least {minimum}.")
