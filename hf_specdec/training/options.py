"""What a training is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_specdec.options import check_count
from hf_specdec.training.recipes.base import RecipeOptions

OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class TrainOptions:
    """How to train a drafter.

    Args:
        kind: a name of `recipes.RECIPES`.
        data: a folder made by `hf-specdec data`; it may grow meanwhile, every epoch reads what is there.
        output: where the best drafter is kept, with the log, the curves and what a resumed run needs.
        target: a folder or Hub id; `None` is the embedded demo model.
        recipe: how this kind of drafter learns.
        init_from: the output of another training, or a drafter of that kind (a folder or a Hub id), whose weights this
            one begins with.
        time_budget: seconds, over all resumed runs; `None` for no limit.
        max_steps: steps of the optimiser; `None` for no limit.
        epochs: passes over the data; `None` for no limit.
        batch_tokens: answer tokens that go through the drafter together.
        batches_per_step: batches of a step of the optimiser. The first steps take one, so that learning starts soon.
        learning_rate: the highest; `None` leaves it to the kind.
        optimizer: "adamw" or "muon" (for matrices; the rest by AdamW); `None` leaves it to the kind.
        warmup_steps: over which the learning rate rises.
        decay_share: of the whole training, at its end, over which the learning rate falls to nothing.
        weight_decay: of matrices.
        max_grad_norm: longer gradients are shortened.
        held_out_share: of the prompts, kept for evaluation.
        num_held_out: greedy answers to evaluate on at most.
        evaluate_every: seconds between evaluations.
        evaluate_steps: steps between evaluations instead; `None` leaves it to the clock.
        save_every: seconds between states on disk.
        save_steps: steps between states on disk instead; `None` leaves it to the clock.
        cache_gigabytes: most disk for the target's hidden states; 0 computes them anew in every epoch.
        cache: folder for them; by default within `output`.
        device: such as "cpu" or "cuda"; `None` is the accelerator if there is one.
        dtype: of the target and the drafter; what is learned is kept in float32 beside it.

    Raises:
        ValueError: if a value is out of range, or nothing ends the training.
    """

    kind: str
    data: str
    output: str
    target: str | None = None
    recipe: RecipeOptions = field(default_factory=RecipeOptions)
    init_from: str | None = None
    time_budget: float | None = None
    max_steps: int | None = None
    epochs: int | None = None
    batch_tokens: int = 2048
    batches_per_step: int = 2
    learning_rate: float | None = None
    optimizer: str | None = None
    warmup_steps: int = 30
    decay_share: float = 0.3
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    held_out_share: float = 0.03
    num_held_out: int = 64
    evaluate_every: float = 300.0
    evaluate_steps: int | None = None
    save_every: float = 60.0
    save_steps: int | None = None
    cache_gigabytes: float = 16.0
    cache: str | None = None
    device: str | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "batches_per_step", "num_held_out"):
            check_count(name, getattr(self, name))
        for name in ("max_steps", "epochs", "evaluate_steps", "save_steps"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        self._check_range("time_budget", 0, float("inf"))
        self._check_range("learning_rate", 0, 1)
        self._check_range("max_grad_norm", 0, float("inf"))
        self._check_range("evaluate_every", 0, float("inf"))
        self._check_range("save_every", 0, float("inf"))
        self._check_range("held_out_share", 0, 0.9)
        check_count("warmup_steps", self.warmup_steps, 0)
        for name, high in (("decay_share", 1.0), ("weight_decay", 1.0), ("cache_gigabytes", float("inf"))):
            if not 0 <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 0 and at most {high:g}.")
        if self.optimizer not in (None, *OPTIMIZERS):
            raise ValueError(f"optimizer={self.optimizer!r} is unknown; use one of {', '.join(OPTIMIZERS)}.")
        if self.time_budget is None and self.max_steps is None and self.epochs is None:
            raise ValueError("Nothing ends this training: give time_budget, max_steps or epochs.")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value: Any = getattr(self, name)
        if value is not None and not low < value <= high:
            raise ValueError(f"{name}={value!r} must be above {low} and at most {high}.")
