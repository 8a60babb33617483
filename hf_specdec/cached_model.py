"""What a model has read: the only place that drives, shortens and rearranges a cache.

A cache has the same number of slots for all rows, but rows keep different numbers of tokens. Refused tokens
leave holes, which the attention mask hides, while position ids say where in its own row every token stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec import host

# A cache is compacted when closing its holes would free more than this share of its slots.
_MAX_WASTE = 0.25
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class CompiledPasses:
    """A compiled forward pass, and the few widths it is compiled for (each is compiled once, for up to a minute)."""

    call: Callable
    widths: tuple[int, ...]

    def widest(self, room: int) -> int:
        """The widest pass for which there is room, at least 1."""
        return max(width for width in self.widths if width <= max(1, room))

    def narrowest(self, num_tokens: int) -> int:
        """The narrowest pass that takes so many tokens."""
        return min(width for width in self.widths if width >= num_tokens)


class CachedModel:
    """A model together with its cache, the mask over the cache's slots, and positions.

    The target and a draft model are both driven through it. Tokens read since the last `commit` are
    provisional. All bookkeeping is in integers on the host, so that it never waits for a device.

    Args:
        model: a model with a decoder.
        cache: its cache, empty or about to be described by `start`.
        arguments: further model arguments of every pass.
        num_rows: A, the rows of the cache.
        device: where masks and positions are kept: that of the tokens (an offloaded model has none of its own).
        position_limit: positions are clamped below it; for drafters whose context is shorter than the
            target's, where some rows may run past it without being used.
        compiled: the model's compiled pass and its widths; passes of other widths run uncompiled.
        may_rearrange: whether slots may move to close holes. A single row and rows in lockstep have no holes but the
            user's own, which must stay.

    Attributes:
        num_slots: slots in the cache.
        num_tokens: tokens of every row in the cache; its other slots are padding and holes.
        num_committed: how many of them are not provisional.
        padding: masked slots in front of every row's first token when the prompt had been read.
        mask: which slots hold a token of their row, shape (A, num_slots); `None` where all are known to.
        next_positions: position id of every row's next token, shape (..., A); `None` for a model that
            takes none.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        arguments: dict[str, Any],
        num_rows: int,
        device: torch.device,
        position_limit: int | None = None,
        compiled: CompiledPasses | None = None,
        may_rearrange: bool = True,
    ):
        self.model = model
        self.cache = cache
        self.arguments = arguments
        self.device = device
        self.position_limit = position_limit
        self.compiled = compiled
        self.may_rearrange = may_rearrange
        self.num_slots = 0
        self.num_tokens = [0] * num_rows
        self.num_committed = [0] * num_rows
        self.padding = [0] * num_rows
        self.mask: Tensor | None = None
        self.next_positions: Tensor | None = None
        if host.accepts_position_ids(model):
            self.next_positions = torch.zeros(num_rows, dtype=torch.long, device=device)

    def start(self, cache: Any, num_provisional: int, mask: Tensor | None, positions: Tensor | None) -> None:
        """Takes over after a prompt's pass that was made elsewhere.

        Args:
            cache: the cache, filled.
            num_provisional: how many of its last tokens a commit may still drop.
            mask: over all slots, shape (A, S), or `None` without padding.
            positions: position ids of the pass, shape (..., A or 1, P); `None` if the model takes none.

        Raises:
            ValueError: if the mask does not cover what the model has put into the cache.
        """
        num_rows = len(self.num_tokens)
        self.cache = cache
        self.num_slots = host.num_slots(cache)
        if mask is not None and mask.shape[1] < self.num_slots:
            raise ValueError(
                f"The model put {self.num_slots} entries into its cache for {mask.shape[1]} tokens of the prompt, so "
                "rows cannot be told apart. Generate one row at a time without padding, or set assistant=False."
            )
        self.mask = None if mask is None else mask.long()[:, : self.num_slots]
        self.num_tokens = [self.num_slots] * num_rows if self.mask is None else self.mask.sum(dim=1).tolist()
        self.num_committed = [count - num_provisional for count in self.num_tokens]
        self.padding = [self.num_slots - count for count in self.num_tokens]
        self.next_positions = None
        if positions is not None:
            self.next_positions = positions[..., -1].expand(*positions.shape[:-2], num_rows) + 1

    @property
    def has_provisional(self) -> bool:
        """Whether anything was read since the last `commit`."""
        return self.num_committed != self.num_tokens

    def room(self) -> list[int]:
        """Tokens every row can still read: slots of a fixed cache, positions the model was built for."""
        slots = (host.capacity(self.cache) or _NO_LIMIT) - self.num_slots
        counts = self.num_tokens
        if self.next_positions is None:  # a model that counts by itself counts slots, padding and all
            counts = [self.num_slots] * len(counts)
        limits = [host.position_limit(self.model, count) or _NO_LIMIT for count in counts]
        return [min(slots, limit - count) for limit, count in zip(limits, counts, strict=True)]

    def read(self, tokens: Tensor, widths: list[int] | None = None, num_logits: int = 1) -> Any:
        """Runs the model over new tokens, appending one slot for each column.

        Args:
            tokens: shape (A, W); a row with fewer tokens holds them at the right.
            widths: number of tokens of every row; `None` when each has W.
            num_logits: positions to score, counted from the end.

        Returns:
            The model's output; logits cover at least the last `num_logits` positions.
        """
        width = tokens.shape[1]
        token_mask = self._token_mask(widths, width)
        mask = self._extended_mask(tokens, token_mask)
        positions = self._positions(width, token_mask)
        shown = positions
        if positions is not None and self.position_limit is not None:
            shown = positions.clamp(max=self.position_limit - 1)
        call = self.compiled.call if self.compiled is not None and width in self.compiled.widths else None
        outputs = host.forward(self.model, tokens, self.cache, mask, shown, num_logits, self.arguments, call)
        # Only now has the pass happened: an exception above leaves the bookkeeping as it was.
        self.cache, self.mask = host.cache_of(outputs), mask
        self.next_positions = None if positions is None else positions[..., -1] + 1
        self.num_slots += width
        self.num_tokens = [n + w for n, w in zip(self.num_tokens, widths or [width] * len(tokens), strict=True)]
        return outputs

    def commit(self, kept: list[int]) -> None:
        """Keeps the first `kept[i]` provisional tokens of row i and rolls the others back.

        What all rows drop is cropped. Where rows differ, refused tokens become holes. The holes are closed at
        once where something counts slots (a sliding window), else when many have piled up.
        """
        totals = [done + k for done, k in zip(self.num_committed, kept, strict=True)]
        dropped = [count - total for count, total in zip(self.num_tokens, totals, strict=True)]
        self.num_tokens, self.num_committed = totals, list(totals)
        if self.next_positions is not None:
            self.next_positions = self.next_positions - torch.tensor(dropped, device=self.device)
        is_ragged = min(dropped) < max(dropped)
        if is_ragged:
            self._punch_holes(dropped)
        if is_ragged and host.counts_slots(self.model, self.cache):
            self._compact()
        else:
            self._crop(min(dropped))
            self._compact_when_sparse()

    def keep_rows(self, places: list[int]) -> None:
        """Keeps some of the rows."""
        index = torch.tensor(places, device=self.device)
        host.keep_rows(self.cache, index)
        self.arguments = {name: _select(value, index, len(self.num_tokens)) for name, value in self.arguments.items()}
        self.num_tokens = [self.num_tokens[place] for place in places]
        self.num_committed = [self.num_committed[place] for place in places]
        self.mask = None if self._is_dense or self.mask is None else self.mask[index]
        if self.next_positions is not None:
            self.next_positions = self.next_positions[..., index]
        self._compact_when_sparse()

    def restore_layout(self) -> None:
        """Lays every row out from the left, as plain `generate` leaves it: its padding, then its tokens.

        Behind a row that ended before the others, slots are masked. A cache that may not or cannot be rearranged has
        never been, so it is left alone.
        """
        is_as_left = self.mask is None and not any(self.padding)
        if is_as_left or not self.may_rearrange or not host.can_be_ragged(self.cache):
            return
        num_slots = max(p + n for p, n in zip(self.padding, self.num_tokens, strict=True))
        if self.mask is None:  # compacted, padding and all
            self.mask = torch.ones(len(self.padding), self.num_slots, dtype=torch.long, device=self.device)
        counts, padding = (torch.tensor(n, device=self.device)[:, None] for n in (self.num_tokens, self.padding))
        rank = torch.arange(num_slots, device=self.device) - padding
        order = torch.argsort(self.mask, dim=1, stable=True)  # the row's tokens come last
        source = order.gather(1, (self.num_slots - counts + rank).clamp(0, self.num_slots - 1))
        self._arrange(source, ((rank >= 0) & (rank < counts)).long())

    def forget_interrupted_pass(self) -> None:
        """Drops what a pass that raised may have left in some layers."""
        host.truncate(self.cache, self.num_slots)

    @property
    def _is_dense(self) -> bool:
        """Whether no slot is masked."""
        return min(self.num_tokens) == self.num_slots

    def _token_mask(self, widths: list[int] | None, width: int) -> Tensor | None:
        """Which of the new columns hold a token, shape (A, W); `None` if all do."""
        if widths is None or min(widths) == width:
            return None
        own = torch.tensor(widths, device=self.device)[:, None]
        return (torch.arange(width, device=self.device) >= width - own).long()

    def _extended_mask(self, tokens: Tensor, token_mask: Tensor | None) -> Tensor | None:
        if self.mask is None and token_mask is None and not host.is_fixed(self.cache):
            return None  # a fixed cache has empty slots, so some models need to be told which are in use
        old = torch.ones(len(tokens), self.num_slots, dtype=torch.long, device=self.device)
        new = torch.ones_like(tokens) if token_mask is None else token_mask
        return torch.cat([old if self.mask is None else self.mask, new], dim=1)

    def _positions(self, width: int, token_mask: Tensor | None) -> Tensor | None:
        """Position ids of the new columns, shape (..., A, W)."""
        if self.next_positions is None:
            return None
        ahead = torch.arange(width, device=self.device)
        if token_mask is not None:
            ahead = (token_mask.cumsum(dim=1) - 1).clamp(min=0)
        return self.next_positions[..., None] + ahead

    def _crop(self, dropped: int) -> None:
        host.crop(self.cache, dropped)
        self.num_slots -= dropped
        if self.mask is not None:
            self.mask = None if self._is_dense else self.mask[:, : self.num_slots]

    def _punch_holes(self, dropped: list[int]) -> None:
        """Masks the last `dropped[i]` slots of row i."""
        if self.mask is None:
            self.mask = torch.ones(len(dropped), self.num_slots, dtype=torch.long, device=self.device)
        ends = self.num_slots - torch.tensor(dropped, device=self.device)[:, None]
        self.mask = self.mask * (torch.arange(self.num_slots, device=self.device) < ends)

    def _compact_when_sparse(self) -> None:
        freed = self.num_slots - max(self.num_tokens)
        tolerated = 0 if host.is_fixed(self.cache) else _MAX_WASTE * self.num_slots  # a fixed cache would overflow
        if self.may_rearrange and freed > tolerated and host.can_be_ragged(self.cache):
            self._compact()

    def _compact(self) -> None:
        """Moves every row's tokens to the right edge; the fullest row decides the new width."""
        assert self.mask is not None
        # Sorting zeros before ones keeps the tokens in order and gathers holes and padding at the left.
        index = torch.argsort(self.mask, dim=1, stable=True)[:, -max(self.num_tokens) :]
        self._arrange(index, self.mask.gather(1, index))

    def _arrange(self, index: Tensor, mask: Tensor) -> None:
        """Rebuilds the cache from old slots: `index` (A, S_new) names them, `mask` says which hold tokens."""
        host.gather_slots(self.cache, index, self.num_slots)
        self.num_slots = index.shape[1]
        self.mask = None if self._is_dense else mask


def _select(value: Any, index: Tensor, num_rows: int) -> Any:
    """Some rows of a model argument; what has no row axis stays."""
    has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == num_rows
    return value[index.to(value.device)] if has_rows else value
