"""Restricting what a drafter may propose to ids the target knows."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase


class DraftVocabularyLogitsProcessor(LogitsProcessor):
    """A Transformers logits processor that leaves a draft only some ids and renormalises over them.

    Applied before drawing, the restricted law is the one that was really drawn from, so verification stays
    exact; the target's own law is never restricted.

    Args:
        allowed: ids that may be drafted, shape (K,), or a boolean mask over the drafter's vocabulary.

    Raises:
        ValueError: if no id is allowed, or an id is negative.
    """

    reads_scores_only = True

    def __init__(self, allowed: Tensor):
        ids = allowed.nonzero()[:, 0] if allowed.dtype == torch.bool else allowed.unique()
        if len(ids) == 0:
            raise ValueError("No id is allowed in the draft; pass at least one id of the target's vocabulary.")
        if ids[0] < 0:
            raise ValueError(f"Draft ids must not be negative, but {int(ids[0])} was passed.")
        self.allowed = ids

    @classmethod
    def below(cls, limit: int) -> DraftVocabularyLogitsProcessor:
        """Allows all ids smaller than `limit`: what a padded output layer needs."""
        return cls(torch.arange(limit))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) with minus infinity outside the allowed ids, log-normalised inside them."""
        if self.allowed[-1] >= scores.shape[-1]:
            raise ValueError(
                f"Draft id {int(self.allowed[-1])} is outside the drafter's {scores.shape[-1]} scored ids."
            )
        self.allowed = self.allowed.to(scores.device)
        kept = scores[:, self.allowed].log_softmax(dim=-1)
        return torch.full_like(scores, -torch.inf).index_copy(1, self.allowed, kept)


def differing_tokens(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> list[str]:
    """Tokens that two tokenizers do not give the same id, sorted."""
    ours, theirs = first.get_vocab(), second.get_vocab()
    return sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
