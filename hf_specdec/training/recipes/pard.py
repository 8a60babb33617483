"""PARD models (arXiv 2504.18583): small language models that draft all tokens in one pass, behind masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.training.examples import Example
from hf_specdec.training.features import Text
from hf_specdec.training.losses import cross_entropy, mean_rows
from hf_specdec.training.recipes.base import Losses, RecipeOptions
from hf_specdec.training.recipes.conditional_drop import Slots, draw_slots, keep_all, summed, unused_id
from hf_specdec.training.recipes.students import StudentRecipe, student_of


class Pard(StudentRecipe):
    """A student that reads real tokens and masks behind them; the mask's embedding is all that it learns of its table.

    Args:
        target: the model to draft for.
        student: as `student_of` makes it.
        options: how to train.
        mask_token_id: an id that no text holds.
    """

    name = "pard"
    unread = ("decay", "coverage", "draft_vocab_size")

    def __init__(self, target: Any, student: Any, options: RecipeOptions, mask_token_id: int):
        super().__init__(target, student, options)
        self.mask_token_id, self.table = mask_token_id, target.get_input_embeddings().weight.detach()
        student.config.update({"pard_token": mask_token_id, "spd_type": "pard"})
        self.mask = nn.Parameter(self.table.float().mean(dim=0).to(self.table.dtype))
        self.module = nn.ModuleDict({"student": student, "mask": nn.ParameterList([self.mask])})

    @classmethod
    def new(cls, target: Any, examples: Sequence[Example], options: RecipeOptions) -> Pard:
        """A student with its first weights."""
        seen = {token for example in examples for token in (*example.prompt, *example.answer)}
        mask = unused_id(seen, target.get_input_embeddings().weight.shape[0])
        return cls(target, student_of(target, options.num_layers), options, mask)

    def losses(self, texts: Sequence[Text], seed: int = 0) -> Losses:
        parts = (self._losses(text, seed + number) for number, text in enumerate(texts))
        total = torch.zeros((), dtype=self.fine, device=self.student.device)
        return summed(parts, self.depth, total)

    def _losses(self, text: Text, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        options = self.options
        begins = torch.arange(text.prompt_length - 1, len(text.tokens) - 1)
        slots = draw_slots(begins, self.depth, options.drop_rate, options.drop_least, seed)
        states, places, depths = self._read(text, slots)
        predicted = places + 1 + depths
        wanted = (predicted < len(text.tokens)).nonzero()[:, 0]
        # What scores token n stands in row n - prompt_length of `last`.
        means = mean_rows(text.last, self.output)[predicted[wanted] - text.prompt_length]
        losses, is_best = cross_entropy(states[wanted], self.output, means, text.tokens[predicted[wanted]])
        return losses, is_best, depths[wanted]

    @torch.no_grad()
    def agreement(self, texts: Sequence[Text]) -> list[Tensor]:
        return [self._agreement(text) for text in texts]

    def _agreement(self, text: Text) -> Tensor:
        begins = torch.arange(text.prompt_length, len(text.tokens) - 1)
        states, places, depths = self._read(text, keep_all(begins, self.depth))
        # The row in front of the first place scores the first answer token, which is never drafted.
        states, places, depths = states[1:], places[1:], depths[1:]
        predicted = places + 1 + depths
        is_right = self.best(states) == text.tokens[predicted.clamp(max=len(text.tokens) - 1)]
        return (is_right & (predicted < len(text.tokens))).view(self.depth, len(begins)).T

    def _read(self, text: Text, slots: Slots) -> tuple[Tensor, Tensor, Tensor]:
        """States of the rows from the prompt's last token on and of all slots, with their places and depths."""
        device, known, first = self.student.device, len(text.tokens) - 1, text.prompt_length - 1
        slots = Slots(slots.places.to(device), slots.depths.to(device))
        unknown = self.mask.expand(len(slots.places), -1)
        embeds = torch.cat([nn.functional.embedding(text.tokens[:known], self.table), unknown])
        positions = torch.cat([torch.arange(known, device=device), slots.places + slots.depths])
        barred = torch.zeros(1, 1, len(embeds), len(embeds), dtype=embeds.dtype, device=device)
        barred.masked_fill_(~slots.mask(known), torch.finfo(embeds.dtype).min)
        states = self.read(embeds[None], attention_mask=barred, position_ids=positions[None])[0]
        begins = torch.arange(first, known, device=device)
        places = torch.cat([begins, slots.places])
        return states[first:], places, torch.cat([torch.zeros_like(begins), slots.depths])

    def to_save(self) -> dict[str, Any]:
        """The student's weights with the mask's row in its table."""
        weights = self.student.state_dict()
        embedding = self.student.get_input_embeddings().weight
        table = embedding.detach().clone()
        table[self.mask_token_id] = self.mask.detach()
        same = {name for name, weight in weights.items() if weight.data_ptr() == embedding.data_ptr()}
        return {"state_dict": weights | dict.fromkeys(same, table)}

    def load_table(self, table: Tensor) -> None:
        """Takes back the mask's row."""
        self.mask.copy_(table[self.mask_token_id])
