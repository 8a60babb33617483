"""What a drafter is: a strategy the user holds, and a session it starts for every call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

from hf_specdec.accept import Draft
from hf_specdec.noise import RoundNoise
from hf_specdec.options import SpeculationOptions
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.stats import SharedStats


@dataclass(frozen=True)
class DraftContext:
    """What a session may know about its call.

    Attributes:
        target: the model whose tokens are guessed; a session must leave it as it is.
        do_sample: whether the call samples. If not, drafting greedily is best.
        scorer: the call's stateless logits processors, for drafters that draft from a law.
        draft_temperature: the temperature asked for, `None` for the call's own.
    """

    target: PreTrainedModel
    do_sample: bool
    scorer: Scorer
    draft_temperature: float | None = None


class DraftSession(ABC):
    """A drafter at work in one call. Rows are the riding rows of the state, in its order."""

    @abstractmethod
    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        """Drafts tokens for every row.

        Args:
            state: what has been generated. A session may write its tokens behind the rows' ends.
            limits: most tokens of each row, possibly 0; the draft is at most `max(limits)` wide.
            noise: the round's random numbers, as wide as `max(limits)`; `None` in greedy decoding. Only
                `noise.draws` may be used, or in coupled sampling `noise.gumbels`, which the target's choice
                shares: the others must stay independent of the draft.

        Returns:
            A draft on the state's device. Tokens with `probs` must have been drawn from them.
        """

    def commit(self, state: DecodeState, outcome: Outcome) -> None:  # noqa: B027 - most sessions read the state
        """Called when the round's tokens have become part of the state."""

    def keep_rows(self, places: list[int]) -> None:  # noqa: B027
        """Called when finished rows leave: the rows at these places stay."""


class Drafter(ABC):
    """A drafting strategy with its options; safe to use in several calls, one after the other or at once.

    Attributes:
        name: what the registry and benchmarks call it.
        default_num_draft_tokens: longest draft when neither the drafter nor the call says one.
        options: the options given to the drafter itself; those of a call override them.
        stats: counts and seconds of all its calls.
    """

    name: ClassVar[str]
    default_num_draft_tokens: ClassVar[int]

    def __init__(self, options: SpeculationOptions | None = None):
        self.options = options or SpeculationOptions()
        self.stats = SharedStats()

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:  # noqa: B027 - most fit any target
        """Raises `ValueError` if this drafter cannot serve the target.

        Args:
            target: the model about to generate.
            tokenizer: the target's tokenizer, if the caller knows it.
        """

    def check_synced(self) -> None:  # noqa: B027 - most make no passes that other processes have a part in
        """Raises `ValueError` if this drafter cannot serve calls in which all processes pass together (synced_gpus)."""

    @abstractmethod
    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        """Begins a call."""
