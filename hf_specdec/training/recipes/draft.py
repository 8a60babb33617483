"""Plain draft models: small students of the target, distilled on its own answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_specdec.training.examples import Example
from hf_specdec.training.features import Text
from hf_specdec.training.losses import cross_entropy, mean_rows
from hf_specdec.training.recipes.base import Losses, RecipeOptions
from hf_specdec.training.recipes.students import StudentRecipe, student_of


class DraftStudent(StudentRecipe):
    """Cross entropy with the target's law at every answer token."""

    name = "draft"
    unread = ("decay", "coverage", "draft_vocab_size", "drop_rate", "drop_least")

    @classmethod
    def new(cls, target: Any, examples: Sequence[Example], options: RecipeOptions) -> DraftStudent:
        """A student with its first weights."""
        return cls(target, student_of(target, options.num_layers), options)

    def losses(self, texts: Sequence[Text], seed: int = 0) -> Losses:
        states, labels = self._states(texts), _answers(texts)
        means = mean_rows(torch.cat([text.last[:-1] for text in texts]), self.output)
        losses, is_best = cross_entropy(torch.cat(states), self.output, means, labels)
        return Losses(losses.sum(), len(labels), (int(is_best.sum()),), (len(labels),))

    @torch.no_grad()
    def agreement(self, texts: Sequence[Text]) -> list[Tensor]:
        labels = _answers(texts).split([text.num_answer_tokens for text in texts])
        pairs = zip(self._states(texts), labels, strict=True)
        return [ahead(self.best(states) == wanted, self.depth) for states, wanted in pairs]

    def _states(self, texts: Sequence[Text]) -> list[Tensor]:
        """For every text the states that score its answer, from one pass padded on the right."""
        longest = max(len(text.tokens) for text in texts)
        padded = [torch.nn.functional.pad(text.tokens, (0, longest - len(text.tokens))) for text in texts]
        states = self.read(torch.stack(padded).to(self.student.device))
        return [row[text.prompt_length - 1 : len(text.tokens) - 1] for row, text in zip(states, texts, strict=True)]


def ahead(is_right: Tensor, depth: int) -> Tensor:
    """What chains behind answer tokens hit, given whether each answer token was foreseen; (A,) -> (A - 1, depth)."""
    padded = torch.nn.functional.pad(is_right[1:], (0, depth - 1))
    return padded.unfold(0, depth, 1) if len(is_right) > 1 else is_right.new_zeros(0, depth)


def _answers(texts: Sequence[Text]) -> Tensor:
    return torch.cat([text.tokens[text.prompt_length :] for text in texts])
