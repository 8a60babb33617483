"""The user's logits processors at every position of a draft."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec import host
from hf_specdec.state import DecodeState


class Scorer:
    """Applies logits processors to the positions of a draft, each with the prefix plain `generate` would show.

    Args:
        processors: in the order in which plain `generate` applies them.

    Attributes:
        is_stateless: whether every processor is known to be a function of a row's own prefix and scores.
            Only then may positions be scored that end up refused.
        reads_scores_only: whether none of them looks at the tokens.
    """

    def __init__(self, processors: LogitsProcessorList):
        self.processors = processors
        self.is_stateless = all(host.is_stateless(processor) for processor in processors)
        self.reads_scores_only = all(host.reads_scores_only(processor) for processor in processors)

    def stateless_part(self) -> Scorer:
        """The processors a drafter may apply too: those without a state to disturb, as copies of its own.

        Some cache a table as wide as the first scores they see, and the drafter's may be narrower.
        """
        return Scorer(LogitsProcessorList(copy.copy(p) for p in self.processors if host.is_stateless(p)))

    def on(self, device: torch.device) -> Scorer:
        """The processors, copied to another device."""
        return Scorer(LogitsProcessorList(host.on_device(processor, device) for processor in self.processors))

    def at_all_positions(self, logits: Tensor, state: DecodeState, first: int = 0) -> Tensor:
        """Scores (A, K, V) from logits (A, K, V); position k of a row follows `first + k` drafted tokens.

        The drafted tokens must have been written behind the rows (`DecodeState.write`).
        """
        assert self.is_stateless
        scores = logits
        for processor in self.processors:
            if host.reads_scores_only(processor):
                flat = scores.flatten(0, 1)
                unread_ids: Any = state.sequences.new_zeros(len(flat), 1)
                scores = processor(unread_ids, flat).view_as(scores)
            elif host.reads_token_set(processor) and min(state.row_lengths) + first > 0:
                scores = self._by_token_set(processor, scores, state, first)
            else:
                scores = self._by_prefix(processor, scores, state, first)
        return scores

    def at_one_position(self, logits: Tensor, state: DecodeState, offset: int) -> Tensor:
        """Scores (B, V) of the position `offset` tokens behind the rows' common end: one call, all rows."""
        length = state.lengths[state.rows[0]] + offset
        assert len(state.rows) == state.num_rows
        prefixes: Any = state.prefixes(length, state.row_index)
        return self.processors(prefixes, logits)

    def _by_token_set(self, processor: Any, scores: Tensor, state: DecodeState, first: int) -> Tensor:
        """One call for all positions: shorter prefixes are filled up with their own last token."""
        num_positions = scores.shape[1]
        own = torch.tensor(state.row_lengths, device=state.device)[:, None] + first
        lengths = (own + torch.arange(num_positions, device=state.device)).flatten()[:, None]  # (A * K, 1)
        rows = state.row_index.repeat_interleave(num_positions)
        ids = state.prefixes(max(state.row_lengths) + first + num_positions - 1, rows)
        inside = torch.arange(ids.shape[1], device=state.device) < lengths
        ids = torch.where(inside, ids, ids.gather(1, (lengths - 1).clamp(min=0)))
        return host.for_rows(processor, rows)(ids, scores.flatten(0, 1)).view_as(scores)

    def _by_prefix(self, processor: Any, scores: Tensor, state: DecodeState, first: int) -> Tensor:
        """One call for all positions whose prefixes have the same length."""
        places: dict[int, list[tuple[int, int]]] = {}
        for place, length in enumerate(state.row_lengths):
            for position in range(scores.shape[1]):
                places.setdefault(length + first + position, []).append((place, position))
        processed = torch.empty_like(scores)
        for length, group in places.items():
            at = torch.tensor(group, device=scores.device).unbind(dim=1)  # (places, positions)
            rows = state.row_index[at[0]]
            processed[at] = host.for_rows(processor, rows)(state.prefixes(length, rows), scores[at])
        return processed
