"""P-EAGLE heads (arXiv 2602.01469): all tokens of a draft in one pass, learned states standing in for unknown ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_specdec.heads import EagleConfig
from hf_specdec.training.examples import Example
from hf_specdec.training.features import Text
from hf_specdec.training.losses import cross_entropy, mean_rows
from hf_specdec.training.recipes.base import Losses, RecipeOptions
from hf_specdec.training.recipes.conditional_drop import Slots, draw_slots, keep_all, summed, unused_id
from hf_specdec.training.recipes.heads import HeadRecipe, head_config


class PEagle(HeadRecipe):
    """One pass over real rows and some slots behind them; all depths count alike."""

    name = "p-eagle"
    unread = ("decay",)

    @classmethod
    def config(
        cls, target: Any, draft_vocab_size: int, options: RecipeOptions, examples: Sequence[Example]
    ) -> EagleConfig:
        seen = {token for example in examples for token in (*example.prompt, *example.answer)}
        mask = unused_id(seen, target.get_input_embeddings().weight.shape[0])
        return head_config(
            target, draft_vocab_size, options.num_layers, mask_token_id=mask, num_draft_tokens=options.depth
        )

    def losses(self, texts: Sequence[Text], seed: int = 0) -> Losses:
        parts = (self._losses(text, seed + number) for number, text in enumerate(texts) if _num_rows(text))
        total = self.output.new_zeros((), dtype=torch.promote_types(self.output.dtype, torch.float32))
        return summed(parts, self.depth, total)

    def _losses(self, text: Text, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, whether the text's token was best, and depths, of one text's rows and slots that learn."""
        first, count = text.prompt_length - 1, _num_rows(text)
        options = self.options
        slots = draw_slots(torch.arange(first, first + count), self.depth, options.drop_rate, options.drop_least, seed)
        states, places, depths = self._read(text, slots)
        predicted = places + 2 + depths
        labels = self.own_ids[text.tokens[predicted.clamp(max=len(text.tokens) - 1)]]
        wanted = ((predicted < len(text.tokens)) & (labels >= 0)).nonzero()[:, 0]
        # What scores token n stands in row n - prompt_length of `last`.
        means = mean_rows(text.last, self.output)[predicted[wanted] - text.prompt_length]
        losses, is_best = cross_entropy(self.normed(states[wanted]), self.output, means, labels[wanted])
        return losses, is_best, depths[wanted]

    @torch.no_grad()
    def agreement(self, texts: Sequence[Text]) -> list[Tensor]:
        return [self._agreement(text) for text in texts]

    def _agreement(self, text: Text) -> Tensor:
        first, count = text.prompt_length - 1, _num_rows(text)
        if count == 0:
            return torch.zeros(0, self.depth, dtype=torch.bool)
        states, places, depths = self._read(text, keep_all(torch.arange(first, first + count), self.depth))
        predicted = places + 2 + depths
        best = self.head.to_target(self.head.logits(states).argmax(dim=-1))
        is_right = best == text.tokens[predicted.clamp(max=len(text.tokens) - 1)]
        return (is_right & (predicted < len(text.tokens))).view(self.depth, count).T

    def _read(self, text: Text, slots: Slots) -> tuple[Tensor, Tensor, Tensor]:
        """States of the rows where drafts begin and of all slots, with their places and depths."""
        head, known = self.head, len(text.tokens) - 2
        assert head.config.mask_token_id is not None
        masks = text.tokens.new_full((len(slots.places),), head.config.mask_token_id)
        hidden = head.combine(text.taps[:known].to(head.dtype))
        unknown = head.masked_hidden().expand(len(masks), -1)
        slots = Slots(slots.places.to(head.device), slots.depths.to(head.device))
        positions = torch.cat([torch.arange(known, device=head.device), slots.places + slots.depths])
        tokens, rows = torch.cat([text.tokens[1 : known + 1], masks]), torch.cat([hidden, unknown])
        states = head(tokens[None], rows[None], positions[None], slots.mask(known))[0]
        begins = torch.arange(text.prompt_length - 1, known, device=head.device)
        places = torch.cat([begins, slots.places])
        return states[text.prompt_length - 1 :], places, torch.cat([torch.zeros_like(begins), slots.depths])


def _num_rows(text: Text) -> int:
    """Rows where drafts begin: behind every answer token but the last."""
    return max(0, len(text.tokens) - 1 - text.prompt_length)
