"""The user's logits processors at every position of a draft."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec import host
from hf_specdec.accept import Draft
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
        self._num_ignored = [host.num_ignored(processor) for processor in processors]

    def stateless_part(self) -> Scorer:
        """The processors a drafter may apply too: those without a state to disturb, as copies of its own.

        Some cache a table as wide as the first scores they see, and the drafter's may be narrower.
        """
        return Scorer(LogitsProcessorList(copy.copy(p) for p in self.processors if host.is_stateless(p)))

    def on(self, device: torch.device) -> Scorer:
        """The processors, copied to another device."""
        return Scorer(LogitsProcessorList(host.on_device(processor, device) for processor in self.processors))

    def at_all_positions(
        self, logits: Tensor, state: DecodeState, first: int = 0, draft: Draft | None = None
    ) -> Tensor:
        """Scores (A, K, V) from logits (A, K, V); position k of a row follows `first + k` drafted tokens.

        The drafted tokens must have been written behind the rows (`DecodeState.write`).

        Args:
            logits: as the model said.
            state: the rows.
            first: drafted tokens in front of the first position.
            draft: if it is a tree, what the positions follow; `first` must be 0.
        """
        assert self.is_stateless
        scores = logits
        prefixes: _Prefixes | None = None
        for processor, num_ignored in zip(self.processors, self._num_ignored, strict=True):
            if host.reads_scores_only(processor):
                flat = scores.flatten(0, 1)
                unread_ids: Any = state.sequences.new_zeros(len(flat), 1)
                scores = processor(unread_ids, flat).view_as(scores)
                continue
            prefixes = prefixes or _prefixes(state, scores.shape[1], first, draft)
            # A set stays what it is if a prefix is filled up with its last token, unless that one is passed over.
            if host.reads_token_set(processor) and min(state.row_lengths) + first > num_ignored:
                scores = prefixes.scored_as_sets(processor, scores)
            else:
                scores = prefixes.scored_by_length(processor, scores)
        return scores

    def at_one_position(self, logits: Tensor, state: DecodeState, offset: int) -> Tensor:
        """Scores (B, V) of the position `offset` tokens behind the rows' common end: one call, all rows."""
        length = state.lengths[state.rows[0]] + offset
        assert len(state.rows) == state.num_rows
        prefixes: Any = state.prefixes(length, state.row_index)
        return self.processors(prefixes, logits)


@dataclass(frozen=True)
class _Prefixes:
    """What stands in front of every position of a pass; all positions of all rows, one after the other (M of them).

    Attributes:
        state: the rows.
        rows: of every position, shape (M,).
        ends: the rows' lengths without a draft, shape (M,).
        num_drafted: drafted tokens up to every position, shape (M,).
        paths: which ones, in order, shape (M, D).
        known_lengths: of the prefixes, if the host knows them without asking the device.
    """

    state: DecodeState
    rows: Tensor
    ends: Tensor
    num_drafted: Tensor
    paths: Tensor
    known_lengths: list[int] | None = None

    def scored_as_sets(self, processor: Any, scores: Tensor) -> Tensor:
        """One call for all positions: shorter prefixes are filled up with their own last token."""
        lengths = (self.ends + self.num_drafted)[:, None]
        longest = max(self.state.row_lengths) + self.paths.shape[1]
        ids = self.state.with_paths(self.rows, self.ends, self.paths, longest)
        inside = torch.arange(ids.shape[1], device=ids.device) < lengths
        ids = torch.where(inside, ids, ids.gather(1, (lengths - 1).clamp(min=0)))
        return host.for_rows(processor, self.rows)(ids, scores.flatten(0, 1)).view_as(scores)

    def scored_by_length(self, processor: Any, scores: Tensor) -> Tensor:
        """One call for all positions whose prefixes have the same length."""
        flat = scores.flatten(0, 1)
        places: dict[int, list[int]] = {}
        for place, length in enumerate(self._lengths):
            places.setdefault(length, []).append(place)
        processed = torch.empty_like(flat)
        for length, group in places.items():
            at = torch.tensor(group, device=scores.device)
            rows = self.rows[at]
            ids = self.state.with_paths(rows, self.ends[at], self.paths[at], length)
            processed[at] = host.for_rows(processor, rows)(ids, flat[at])
        return processed.view_as(scores)

    @functools.cached_property
    def _lengths(self) -> list[int]:
        """Of all prefixes; those of trees are brought from the device once a pass."""
        return (self.ends + self.num_drafted).tolist() if self.known_lengths is None else self.known_lengths


def _prefixes(state: DecodeState, num_positions: int, first: int, draft: Draft | None) -> _Prefixes:
    device, num_rows = state.device, len(state.rows)
    ends = torch.tensor(state.row_lengths, device=device).repeat_interleave(num_positions)
    rows = state.row_index.repeat_interleave(num_positions)
    if draft is None or draft.parents is None:
        num_drafted = (first + torch.arange(num_positions, device=device)).repeat(num_rows)
        paths = torch.arange(first + num_positions - 1, device=device).expand(len(rows), -1)
        known = [length + first + k for length in state.row_lengths for k in range(num_positions)]
        return _Prefixes(state, rows, ends, num_drafted, paths, known)
    seen = draft.seen[:, :, 1:].flatten(0, 1)  # (M, N)
    return _Prefixes(state, rows, ends, seen.sum(dim=1), torch.argsort(~seen, dim=1, stable=True))
