"""One pass of the target over a draft, and the user's logits processors at every position of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.state import CachedModel, DecodeState


class TargetPass:
    """What the target said about a round's draft.

    Attributes:
        logits: raw, in float32 as plain `generate` casts them, shape (A, N + 1, V); position i follows i
            drafted tokens.
        hidden_states: one tensor (A, N + 1, H) a layer, if the call asked for them, else `None`.
        prompt_hidden_states: in the first pass, the same over the whole prompt, (A, P, H).
    """

    def __init__(self, outputs: Any, num_positions: int, device: torch.device):
        self.logits = outputs.logits[:, -num_positions:].to(device=device, dtype=torch.float32, copy=True)
        states = outputs.get("hidden_states")
        self.hidden_states = states and tuple(layer[:, -num_positions:] for layer in states)
        self.prompt_hidden_states = states and tuple(layer[:, : layer.shape[1] - num_positions + 1] for layer in states)


def verify(target: CachedModel, state: DecodeState, draft: Draft) -> TargetPass:
    """Runs the target over [last token, draft] of every riding row."""
    tokens = torch.cat([state.last_tokens(), draft.tokens], dim=1).to(target.model.device)
    outputs = target.read(tokens, num_logits=draft.width + 1)
    return TargetPass(outputs, draft.width + 1, state.device)


class Scorer:
    """Applies logits processors to the positions of a draft, each with the prefix plain `generate` would show.

    Args:
        processors: in the order in which plain `generate` applies them.

    Attributes:
        is_stateless: whether every processor is known to be a function of a row's own prefix and scores.
            Only then may positions be scored that end up refused.
    """

    def __init__(self, processors: LogitsProcessorList):
        self.processors = processors
        self.is_stateless = all(host.is_stateless(processor) for processor in processors)

    def stateless_part(self) -> Scorer:
        """The processors a drafter may apply too: those without a state to disturb."""
        return Scorer(LogitsProcessorList(p for p in self.processors if host.is_stateless(p)))

    def at_all_positions(self, logits: Tensor, state: DecodeState, first: int = 0) -> Tensor:
        """Scores (A, K, V) from logits (A, K, V); position k of a row follows `first + k` drafted tokens.

        The drafted tokens must have been written behind the rows (`DecodeState.write`).
        """
        assert self.is_stateless
        scores = logits
        for processor in self.processors:
            if host.reads_scores_only(processor):
                flat = scores.flatten(0, 1)
                scores = processor(state.prefixes(1, flat.new_zeros(len(flat)).long()), flat).view_as(scores)
            else:
                scores = self._by_prefix(processor, scores, state, first)
        return scores

    def at_one_position(self, logits: Tensor, state: DecodeState, offset: int) -> Tensor:
        """Scores (B, V) of the position `offset` tokens behind the rows' common end: one call, all rows."""
        length = state.lengths[state.rows[0]] + offset
        assert len(state.rows) == state.num_rows
        prefixes: Any = state.prefixes(length, state.row_index)
        return self.processors(prefixes, logits)

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
