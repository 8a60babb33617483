"""Small language models that begin with some of the target's layers and share its embeddings and output layer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec import host
from hf_specdec.training.losses import centred
from hf_specdec.training.recipes.base import Recipe, RecipeOptions


class StudentRecipe(Recipe):
    """A model of the target's kind with fewer layers, which learns the target's laws over its whole vocabulary.

    Args:
        target: the model to draft for.
        student: as `student_of` makes it.
        options: how to train.
    """

    def __init__(self, target: Any, student: Any, options: RecipeOptions):
        self.target, self.student, self.options = target, student, options
        self.module, self.depth = student, options.depth
        self.output = centred(target.get_output_embeddings().weight.detach())
        self.fine = torch.promote_types(self.output.dtype, torch.float32)

    def save(self, folder: Path) -> None:
        self.student.save_pretrained(folder, **self.to_save())

    def to_save(self) -> dict[str, Any]:
        """What `save_pretrained` is told."""
        return {}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        kept = type(self.student).from_pretrained(folder, dtype=self.student.dtype)
        weights = dict(kept.named_parameters())
        for name, weight in self.student.named_parameters():
            if weight.requires_grad:
                weight.copy_(weights[name])
        self.load_table(kept.get_input_embeddings().weight)

    def load_table(self, table: Tensor) -> None:
        """Takes back what has been learned of the embeddings, which are the target's: nothing."""

    def read(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """States that the output layer reads: (B, W) or embeddings (B, W, H) -> (B, W, H)."""
        name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
        return self.student.get_decoder()(**{name: tokens}, use_cache=False, **arguments)[0]

    def best(self, states: Tensor) -> Tensor:
        """Ids scored best; (N, H) -> (N,)."""
        return torch.cat([(rows @ self.output.T).argmax(dim=-1) for rows in states.split(128)])


def chosen_layers(depth: int, count: int) -> list[int]:
    """Which of a target's layers a student begins with: evenly from the first to the last.

    Raises:
        ValueError: if it is to have more than the target.
    """
    if count >= depth:
        raise ValueError(f"num_layers={count}: a draft model needs fewer layers than its target, which has {depth}.")
    return [0] if count == 1 else [round(index * (depth - 1) / (count - 1)) for index in range(count)]


@torch.no_grad()
def student_of(target: Any, num_layers: int) -> Any:
    """A model of the target's class with some of its layers; embeddings, final norm and output layer are shared.

    Raises:
        ValueError: if the target's layers cannot be copied one by one.
    """
    indices = chosen_layers(host.num_layers(target), num_layers)
    config = copy.deepcopy(target.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[index] for index in indices]
    with torch.device(target.device):
        student = type(target)(config).to(target.dtype)
    layers = host.decoder_layers(target)
    try:
        for mine, index in zip(host.decoder_layers(student), indices, strict=True):
            mine.load_state_dict(layers[index].state_dict())
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"The layers of {type(target).__name__} cannot be copied into a smaller one: {error}"
        ) from error
    _copy_others(student, target)
    student.set_input_embeddings(target.get_input_embeddings())
    student.set_output_embeddings(target.get_output_embeddings())
    for module in (student.get_input_embeddings(), student.get_output_embeddings()):
        module.requires_grad_(False)
    return student.eval()


def _copy_others(student: Any, target: Any) -> None:
    """Everything of the same name and shape outside the layers, such as the final norm."""
    theirs = dict(target.named_parameters())
    inside = {id(weight) for layer in host.decoder_layers(student) for weight in layer.parameters()}
    for name, weight in student.named_parameters():
        other: nn.Parameter | None = theirs.get(name)
        if id(weight) not in inside and other is not None and other.shape == weight.shape:
            weight.copy_(other)
