"""What a recipe is: how one kind of drafter begins, what it learns from, and how it is kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_specdec.options import check_count
from hf_specdec.training.examples import Example
from hf_specdec.training.features import Text


@dataclass(frozen=True)
class RecipeOptions:
    """How to train, whatever the kind.

    Args:
        depth: how many tokens ahead the drafter learns to draft.
        decay: what a step counts of the one before.
        coverage: the share of answer tokens that a head's own vocabulary holds.
        draft_vocab_size: ids of that vocabulary, whatever the share; `None` leaves it to `coverage`.
        drop_rate: of drafters that predict all tokens at once, the share of places that learn a token further ahead.
        drop_least: but at least this share.
        num_layers: decoder layers of the drafter.
        seed: of first weights and of what is drawn while training.

    Raises:
        ValueError: if a value is out of range.
    """

    depth: int = 7
    decay: float = 0.8
    coverage: float = 0.995
    draft_vocab_size: int | None = None
    drop_rate: float = 0.7
    drop_least: float = 0.2
    num_layers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("depth", "num_layers"):
            check_count(name, getattr(self, name))
        for name in ("decay", "coverage", "drop_rate", "drop_least"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0 and at most 1.")
        if self.draft_vocab_size is not None:
            check_count("draft_vocab_size", self.draft_vocab_size)


@dataclass(frozen=True)
class Losses:
    """What a batch costs, as sums that may be added over batches and processes.

    Attributes:
        total: the loss summed over positions, to be differentiated.
        count: by what the sum is divided: positions at the first depth.
        hits: by depth, how often the drafter's best id was the text's.
        seen: by depth, how many positions there were.
    """

    total: Tensor
    count: int
    hits: tuple[int, ...]
    seen: tuple[int, ...]


class Recipe(ABC):
    """One kind of drafter in training.

    Attributes:
        name: as the command line spells it.
        taps: the target's hidden states it reads.
        module: what is trained: parameters without `requires_grad` belong to the target.
        depth: how many tokens ahead it learns to draft.
        optimizer: for its matrices, unless a training says another: "adamw" or "muon".
        learning_rate: the highest, unless a training says another.
        unread: options that say nothing about this kind.
    """

    name: str
    unread: tuple[str, ...] = ()
    optimizer = "adamw"
    learning_rate = 3e-4
    taps: tuple[int, ...] = ()
    module: nn.Module
    depth: int

    @classmethod
    @abstractmethod
    def new(cls, target: Any, examples: Sequence[Example], options: RecipeOptions) -> Recipe:
        """A drafter with its first weights for a target, from the examples it is going to learn from."""

    @classmethod
    def refuse_unread(cls, options: RecipeOptions) -> None:
        """Raises `ValueError` for an option that would change nothing."""
        if told := [name for name in cls.unread if getattr(options, name) != getattr(RecipeOptions(), name)]:
            raise ValueError(f"{', '.join(told)}: {cls.name} has no use for that; leave it out.")

    @abstractmethod
    def losses(self, texts: Sequence[Text], seed: int = 0) -> Losses:
        """What the drafter loses on these texts; `seed` is of what is drawn for that."""

    @abstractmethod
    def agreement(self, texts: Sequence[Text]) -> list[Tensor]:
        """Where the drafter's best ids are those of the text.

        Returns:
            For every text a tensor of shape (A, depth), boolean. Row i is what would be drafted behind answer token
            i, had every token before it been drafted right; where the text ends there is nothing to agree with.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes config.json and model.safetensors, which `load_drafter` opens, into an existing folder."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Takes the trained weights back from what `save` has written."""

    def describe(self) -> dict[str, Any]:
        """The facts for the record of a run."""
        trained = [weight for weight in self.module.parameters() if weight.requires_grad]
        return {"kind": self.name, "depth": self.depth, "trained_parameters": sum(map(Tensor.numel, trained))}
