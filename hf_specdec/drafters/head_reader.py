"""What a head of the EAGLE family has read of a call, and what it has yet to read."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specdec import host
from hf_specdec.drafters.base import DraftContext, DraftSession
from hf_specdec.drafters.drawing import Drawing
from hf_specdec.heads import EagleHead
from hf_specdec.slots import Slots
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.verify import TargetPass


def refuse_target(head: EagleHead, target: PreTrainedModel) -> None:
    """Raises `ValueError` if the head cannot read this target. The head itself stays as it is: sessions bind copies."""
    if target.config.is_encoder_decoder:
        raise ValueError("Heads over hidden states draft for decoder-only targets, not for encoder-decoder models.")
    if not isinstance(host.decoder_layers(target), torch.nn.ModuleList):
        raise ValueError(f"The layers of {type(target).__name__} are no list, so their states cannot be tapped.")
    copy.copy(head).bind(target)
    if head.config.kind == "eagle3" and max(head.config.taps) > host.num_layers(target):
        raise ValueError(f"The head taps {head.config.taps}; the target has {host.num_layers(target)} layers.")


def taps_of(head: EagleHead, target: PreTrainedModel) -> tuple[int, ...]:
    """The target's hidden states that the head reads, in its order."""
    return (host.num_layers(target),) if head.config.kind == "eagle" else head.config.taps


class HeadReader(Slots):
    """A head's cache: a row t holds the target's state at t and the token at t + 1.

    Args:
        head: bound to its target.
        num_rows: A, riding rows.
    """

    def __init__(self, head: EagleHead, num_rows: int):
        cache: Any = DynamicCache()
        super().__init__(cache, num_rows, head.device, counts_positions=True, may_rearrange=num_rows > 1)
        self.head = head

    def read(
        self,
        tokens: Tensor,
        hidden: Tensor,
        widths: list[int] | None = None,
        seen: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Runs the head, appending one slot for each column.

        Args:
            tokens: shape (A, W); a row with fewer holds them at the right.
            hidden: combined states, or states fed back, shape (A, W, H).
            widths: number of tokens of every row; `None` when each has W.
            seen: which of the newest slots, these included, each token sees, shape (A, W, <= S + W); what lies in
                front of them is seen as usual. `None` for a chain.
            positions: instead of those that follow the slots before, shape (A, W).

        Returns:
            States, shape (A, W, H).
        """
        width = tokens.shape[1]
        token_mask = self._token_mask(widths, width)
        mask = self._extended_mask(tokens, token_mask)
        counted = self._positions(width, token_mask)
        assert counted is not None
        shown = counted if positions is None else positions
        states = self.head(tokens, hidden, shown, self._attention(mask, width, seen), self.cache)
        self._advance(self.cache, mask, counted, width, widths)
        return states

    def _attention(self, mask: Tensor | None, width: int, seen: Tensor | None) -> Tensor | None:
        if mask is None and seen is None:
            return None
        total = self.num_slots + width
        device = self.device
        allowed = torch.ones(width, total, dtype=torch.bool, device=device).tril(self.num_slots)[None]
        if seen is not None:
            before = torch.ones(*seen.shape[:2], total - seen.shape[2], dtype=torch.bool, device=device)
            allowed = torch.cat([before, seen], dim=2)
        if mask is not None:
            allowed = allowed & mask[:, None].bool()
        itself = torch.eye(width, dtype=torch.bool, device=device)
        return (allowed | torch.nn.functional.pad(itself, (self.num_slots, 0)))[:, None]


class Pending:
    """Real states of the target that a head has not read, with the tokens that followed them.

    Args:
        head: whose states.
        taps: which states.
        num_rows: A.
    """

    def __init__(self, head: EagleHead, taps: tuple[int, ...], num_rows: int):
        self.head, self.taps = head, taps
        self.states: list[list[Tensor]] = [[] for _ in range(num_rows)]
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.starts: list[int] | None = None  # position of every row's first state

    def add(self, state: DecodeState, outcome: Outcome, target_pass: TargetPass) -> None:
        """Takes over what a round has made part of the rows."""
        now = torch.cat([target_pass.states[tap] for tap in self.taps], dim=-1)
        if self.starts is None:
            self._add_prompt(state, outcome, target_pass)
        for place, new in enumerate(outcome.appended):
            positions = outcome.positions[place] if outcome.positions is not None else list(range(len(new)))
            index = torch.tensor(positions, dtype=torch.long, device=now.device)
            self.states[place].append(now[place].index_select(0, index))
            self.tokens[place].extend(new)

    def _add_prompt(self, state: DecodeState, outcome: Outcome, target_pass: TargetPass) -> None:
        """The prompt, as far as the target has read it in this call: aligned from the right, without padding."""
        self.starts = []
        for place, row in enumerate(state.rows):
            prompt = state.tokens[row][: len(state.tokens[row]) - len(outcome.appended[place])]
            tapped = [target_pass.prompt_states[tap][place] for tap in self.taps]
            if state.prompt_mask is not None and len(tapped[0]):
                kept = state.prompt_mask[row, :-1][-len(tapped[0]) :].to(tapped[0].device)
                tapped = [states[len(states) - len(kept) :][kept] for states in tapped]
            count = max(0, min(len(tapped[0]), len(prompt) - 1))
            self.states[place].append(torch.cat([states[len(states) - count :] for states in tapped], dim=-1))
            self.tokens[place].extend(prompt[len(prompt) - count :])
            self.starts.append(max(0, len(prompt) - 1 - count))

    def keep_rows(self, places: list[int]) -> None:
        """Keeps some of the rows."""
        self.states = [self.states[place] for place in places]
        self.tokens = [self.tokens[place] for place in places]
        if self.starts is not None:
            self.starts = [self.starts[place] for place in places]

    def take(self) -> tuple[Tensor, Tensor, list[int]]:
        """Everything pending, which then is no more: tokens (A, W), combined states (A, W, H), both at the right."""
        widths = [len(tokens) for tokens in self.tokens]
        width, device = max(widths), self.head.device
        padded = [[0] * (width - len(tokens)) + tokens for tokens in self.tokens]
        states = self._take_states(width)
        self.tokens = [[] for _ in widths]
        return torch.tensor(padded, device=device), self.head.combine(states), widths

    def _take_states(self, width: int) -> Tensor:
        """States of all rows (A, W, ...) at the right. Those of long prompts are large: no row is kept beside them."""
        head, columns = self.head, self.states[0][0].shape[-1]
        states = torch.zeros(len(self.states), width, columns, device=head.device, dtype=head.dtype)
        for row, parts in zip(states, self.states, strict=True):
            end = width
            while parts:
                part = parts.pop()
                row[end - len(part) : end] = part
                end -= len(part)
        return states


class HeadContext:
    """A head in one call: its cache over the target's real states and what is yet to be read into it.

    Args:
        head: bound to its target.
        target: whose states it reads.
        num_rows: A.
    """

    def __init__(self, head: EagleHead, target: PreTrainedModel, num_rows: int):
        self.head, self.taps = head, taps_of(head, target)
        self.reader = HeadReader(head, num_rows)
        self.pending = Pending(head, self.taps, num_rows)

    def can_draft(self, limits: list[int]) -> bool:
        """Whether tokens are wanted, and every row that wants some has a state to draft from."""
        waiting = zip(self.pending.tokens, limits, strict=True)
        return self.pending.starts is not None and max(limits) > 0 and all(row or not limit for row, limit in waiting)

    def take(self) -> tuple[Tensor, Tensor, list[int]]:
        """What is to be read now; see `Pending.take`."""
        if self.reader.num_slots == 0:
            self.reader.next_positions = torch.tensor(self.pending.starts, device=self.head.device)
        return self.pending.take()

    def commit(self, state: DecodeState, outcome: Outcome, target_pass: TargetPass | None) -> None:
        """Drops what was drafted and notes what the target has read."""
        if self.reader.has_provisional:
            self.reader.commit([0] * len(self.reader.num_tokens))
        if target_pass is not None:
            self.pending.add(state, outcome, target_pass)

    def keep_rows(self, places: list[int]) -> None:
        """Keeps some of the rows."""
        if self.reader.num_slots:
            self.reader.keep_rows(places)
        else:
            self.reader = HeadReader(self.head, len(places))
        self.pending.keep_rows(places)

    def to_target(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Scores of the head's ids (..., D) as scores of the target's (..., V), -inf where it has none."""
        if logits.shape[-1] == vocabulary:
            return logits
        full = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
        full[..., self.head.draft_ids] = logits
        return full


class HeadSession(DraftSession):
    """A session of a head: reads what the target has said, forgets what it drafted itself.

    Args:
        head: as the drafter holds it; the session binds a copy to its target.
        context: of the call.
        state: of the call.
    """

    def __init__(self, head: EagleHead, context: DraftContext, state: DecodeState):
        self.head = copy.copy(head).bind(context.target)
        self.read = HeadContext(self.head, context.target, len(state.rows))
        self.taps = self.read.taps
        self.drawing = Drawing(context, state, self.head.device)
        self.vocabulary = host.vocabulary_size(context.target)

    def commit(self, state: DecodeState, outcome: Outcome, target_pass: TargetPass | None = None) -> None:
        self.read.commit(state, outcome, target_pass)

    def keep_rows(self, places: list[int]) -> None:
        self.read.keep_rows(places)
