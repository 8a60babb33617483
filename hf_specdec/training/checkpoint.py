"""The state of a training: written whole or not at all, so that a kill at any moment leaves the last one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hf_specdec.checkpoints.write import write_tensors

STATE_NAME = "training-state.safetensors"


@dataclass
class Progress:
    """Where a training stands.

    Attributes:
        step: steps of the optimiser.
        epoch: passes over the data that were completed.
        cursor: batches of this epoch that were learned.
        num_examples: examples this epoch is made of; data that have grown since are for the next one.
        answer_tokens: learned so far, each time anew.
        seconds: spent so far, over all resumed runs.
        best: the held-out acceptance length of the drafter that is kept; 0 before the first evaluation.
        loss: mean over the steps since the last evaluation, as (sum, count).
        target: its fingerprint.
    """

    step: int = 0
    epoch: int = 0
    cursor: int = 0
    num_examples: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    loss: tuple[float, int] = (0.0, 0)
    target: dict[str, Any] = field(default_factory=dict)


class Weights:
    """What a training changes of a module: in float32 or what is finer, beside the module's own dtype.

    Args:
        module: whose parameters with `requires_grad` are trained.

    Attributes:
        masters: by name.
    """

    def __init__(self, module: nn.Module):
        self.module = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        fine = {name: torch.promote_types(weight.dtype, torch.float32) for name, weight in self.module.items()}
        self.masters = {name: nn.Parameter(x.detach().to(fine[name], copy=True)) for name, x in self.module.items()}

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds what was learned into the module."""
        for name, master in self.masters.items():
            self.module[name].copy_(master)

    @torch.no_grad()
    def show(self, tensors: dict[str, Tensor]) -> None:
        """Puts other weights, all of them, into the module until `publish`."""
        for name, weight in self.module.items():
            weight.copy_(tensors[name])

    def take_gradients(self) -> Tensor:
        """All gradients of the module in one row, which it then has no more."""
        rows = []
        for name, weight in self.module.items():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            rows.append(grad.flatten().to(self.masters[name].dtype))
            weight.grad = None
        return torch.cat(rows)

    def set_gradients(self, row: Tensor) -> None:
        """Gives the optimisers a row of gradients."""
        sizes = [master.numel() for master in self.masters.values()]
        for master, grad in zip(self.masters.values(), row.split(sizes), strict=True):
            master.grad = grad.view_as(master)

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], may_lack: bool = False) -> None:
        """Takes over weights by name.

        Args:
            tensors: weights.
            may_lack: whether weights that are not among them stay as they are.

        Raises:
            ValueError: if names or shapes are others.
        """
        if tensors.keys() - self.masters.keys() or (self.masters.keys() != tensors.keys() and not may_lack):
            differing = sorted(self.masters.keys() ^ tensors.keys())
            raise ValueError(f"These weights are of another drafter; names differ: {', '.join(differing[:5])}.")
        for name in tensors:
            master = self.masters[name]
            if master.shape != tensors[name].shape:
                raise ValueError(
                    f"These weights are of another drafter: {name} has shape {tuple(tensors[name].shape)}, here "
                    f"{tuple(master.shape)}."
                )
            if not tensors[name].isfinite().all():
                raise ValueError(f"{name} holds values that are not finite numbers.")
        for name in tensors:
            self.masters[name].copy_(tensors[name])
        self.publish()


def write_state(
    folder: Path, progress: Progress, weights: Weights, optimizers: list[torch.optim.Optimizer], facts: dict[str, Any]
) -> None:
    """Writes everything a run goes on from.

    Raises:
        OSError: if the disk is full; the state written before is still there.
    """
    tensors: dict[str, Tensor] = {f"module.{name}": master for name, master in weights.masters.items()}
    for index, optimizer in enumerate(optimizers):
        for number, slots in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{number}.{name}": torch.as_tensor(value) for name, value in slots.items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    metadata = {"progress": json.dumps(asdict(progress)), "facts": json.dumps(facts)}
    write_tensors(tensors, folder / STATE_NAME, metadata)


# What a run goes on from: where it stands, facts of it, and tensors by name.
State = tuple[Progress, dict[str, Any], dict[str, Tensor]]


def read_state(folder: Path) -> State | None:
    """What `write_state` wrote: progress, facts and tensors; `None` if there is none.

    Raises:
        ValueError: if the file is damaged.
    """
    path = folder / STATE_NAME
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged ({error}), so its training cannot go on; the drafter beside it is not touched. Start "
            "anew with another output."
        ) from error
    try:
        progress = Progress(**json.loads(metadata["progress"]))
        progress.loss = tuple(progress.loss)  # type: ignore[assignment]
        return progress, json.loads(metadata["facts"]), tensors
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path} was not written by this version of a training: {error!r}.") from error


def restore(tensors: dict[str, Tensor], weights: Weights, optimizers: list[torch.optim.Optimizer]) -> None:
    """Puts weights and the optimisers' memories back."""
    weights.load(_behind(tensors, "module."))
    for index, optimizer in enumerate(optimizers):
        slots: dict[int, dict[str, Tensor]] = {}
        for name, value in _behind(tensors, f"optimizer.{index}.").items():
            number, key = name.split(".")
            slots.setdefault(int(number), {})[key] = value
        optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})


def _behind(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
