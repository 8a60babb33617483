"""Heads of the EAGLE family that draft one token after the other, or trees level by level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.accept import Draft
from hf_specdec.drafters.base import DraftContext, DraftSession, WeightedDrafter
from hf_specdec.drafters.drawing import chain
from hf_specdec.drafters.head_reader import HeadSession, refuse_target
from hf_specdec.heads import EagleHead
from hf_specdec.noise import RoundNoise
from hf_specdec.options import SpeculationOptions, check_count
from hf_specdec.state import DecodeState
from hf_specdec.trees import Children, grow, most_probable


@dataclass(frozen=True)
class DraftTree:
    """How draft trees grow (EAGLE-2, arXiv 2406.16858).

    Attributes:
        depth: levels.
        top_k: tokens of a level that go on, and children of each.
        total_tokens: tokens that are kept, the most probable ones.

    Raises:
        ValueError: if one is less than 1.
    """

    depth: int = 7
    top_k: int = 10
    total_tokens: int = 60

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "total_tokens"):
            check_count(name, getattr(self, name))


class Eagle(WeightedDrafter):
    """Drafts with a head over the target's hidden states: EAGLE-1, 2 and 3 and HASS, as chains or trees.

    Chains are drawn from the head's own law when the call samples, after the call's stateless processors, and exactly
    that law is reported. Trees hold the head's most probable tokens, and are compared with the target's samples.
    Li et al., arXiv 2401.15077, 2406.16858 and 2503.01840.

    Args:
        head: as `load_drafter` opens it; every call binds a copy to its target.
        num_draft_tokens: tokens to draft in a round; the head's own setting or 5 by default, in a tree
            `tree.total_tokens`.
        tree: draft trees like this, where the target can verify them; `None` for chains.
        draft_temperature: temperature to draft chains at instead of the call's; 0 drafts greedily.

    Raises:
        ValueError: if an option is out of range, or the head drafts in parallel.
    """

    name = "eagle"
    default_num_draft_tokens = 5
    draws = True
    reads_states = True

    def __init__(
        self,
        head: EagleHead,
        num_draft_tokens: int | None = None,
        tree: DraftTree | None = None,
        draft_temperature: float | None = None,
    ):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens, draft_temperature=draft_temperature))
        if not isinstance(head, EagleHead):
            raise ValueError(f"Eagle needs an EagleHead, not {type(head).__name__}; load_drafter opens checkpoints.")
        if head.config.mask_token_id is not None:
            raise ValueError("This head drafts all tokens at once: use ParallelDraft(head).")
        if tree is not None and not isinstance(tree, DraftTree):
            raise ValueError(f"tree={tree!r} must be a DraftTree or None.")
        self.head, self.tree = head, tree
        self.plants = tree is not None
        self.default_num_draft_tokens = tree.total_tokens if tree else head.config.num_draft_tokens or 5

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:
        """Raises `ValueError` if the head was made for another kind of target."""
        refuse_target(self.head, target)

    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        """Begins a call with an empty cache."""
        return _EagleSession(self, context, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Eagle:
        return self  # a copy of a target that holds this drafter shares it


class _EagleSession(HeadSession):
    """Drafts from what the target has really read; what the head fed back to itself is dropped after the round."""

    def __init__(self, drafter: Eagle, context: DraftContext, state: DecodeState):
        super().__init__(drafter.head, context, state)
        self.max_length = context.max_length
        self.tree = drafter.tree if context.takes_trees else None
        self.grows_trees = self.tree is not None

    @torch.no_grad()
    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        if not self.read.can_draft(limits):
            return Draft.empty(len(limits), state.device)
        tokens, hidden, widths = self.read.take()
        last = self.read.reader.read(tokens, hidden, widths)[:, -1]
        self.read.reader.commit(widths)
        if self.tree is None:
            return self._chain(last, state, limits, noise)
        return self._tree(self.tree, last, limits, state)

    def _logits(self, states: Tensor) -> Tensor:
        return self.read.to_target(self.head.logits(states).to(self.head.device), self.vocabulary)

    def _chain(self, last: Tensor, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        noise = self.drawing.noise(noise)
        for step in range(max(limits)):
            token, law = self.drawing.token(self._logits(last), state, step, noise)
            tokens.append(token)
            if law is not None:
                laws.append(law)
            if step + 1 < max(limits):
                hidden = self.head.feedback(last)[:, None]
                last = self.read.reader.read(token[:, None].to(self.head.device), hidden)[:, -1]
        return chain(tokens, laws, limits, state.device)

    def _tree(self, tree: DraftTree, last: Tensor, limits: list[int], state: DecodeState) -> Draft:
        total = min(tree.total_tokens, max(limits))
        branches = _Branches(self.head, self.read.reader, last, tree.top_k)
        depth = min(tree.depth, total, self._most_tokens_ahead(state, limits))
        tokens, parents, scores = grow(branches.children(last), branches.step, depth, tree.top_k, total)
        allowed = torch.tensor(limits, device=tokens.device)
        lengths = torch.minimum(scores.isfinite().sum(dim=1), allowed)
        return Draft(tokens.to(state.device), lengths.to(state.device), parents=parents.to(state.device))

    def _most_tokens_ahead(self, state: DecodeState, limits: list[int]) -> int:
        """How far a path may lead in the row that has most room for it, so that the target's token ends no row."""
        lengths = (length for length, limit in zip(state.row_lengths, limits, strict=True) if limit > 0)
        return max(1, self.max_length - min(lengths) - 1)


class _Branches:
    """The levels of a tree that a head has read.

    Args:
        head: the head.
        reader: its cache, in which the text has been committed.
        last: the state behind the text, shape (A, H).
        top_k: children of a token.
    """

    def __init__(self, head: EagleHead, reader: Any, last: Tensor, top_k: int):
        self.head, self.reader, self.top_k = head, reader, top_k
        self.states = last[:, None]
        self.base = reader.next_positions
        self.seen = torch.zeros(len(last), 1, 0, dtype=torch.bool, device=last.device)

    def children(self, states: Tensor) -> Children:
        """What is most likely to follow states (..., H), in ids of the target."""
        logprobs, ids = most_probable(self.head.logits(states), self.top_k)
        return logprobs.to(self.head.device), self.head.to_target(ids.to(self.head.device))

    def step(self, tokens: Tensor, parents: Tensor, depth: int) -> Children:
        """Reads a level's beam; see `trees.Step`."""
        if depth == 1:
            parents = torch.zeros_like(parents)
        index = parents[:, :, None]
        hidden = self.head.feedback(self.states.gather(1, index.expand(-1, -1, self.states.shape[2])))
        above = self.seen.gather(1, index.expand(-1, -1, self.seen.shape[2]))
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        self.seen = torch.cat([above, itself], dim=2)
        positions = (self.base[:, None] + depth - 1).expand_as(tokens)
        self.states = self.reader.read(tokens, hidden, seen=self.seen, positions=positions)
        return self.children(self.states)
