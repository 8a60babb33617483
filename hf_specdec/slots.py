"""Which slot of a cache holds which token: the only place that shortens and rearranges a cache.

A cache has the same number of slots for all rows, but rows keep different numbers of tokens. Refused tokens
leave holes, which the attention mask hides, while position ids say where in its own row every token stands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_specdec import host

# A cache is compacted when closing its holes would free more than this share of its slots.
_MAX_WASTE = 0.25


class Slots:
    """A cache, the mask over its slots, and positions. Whoever reads tokens into it is a subclass.

    Tokens read since the last `commit` are provisional. All bookkeeping is in integers on the host, so that it never
    waits for a device.

    Args:
        cache: empty, or about to be described by `start`.
        num_rows: A, the rows of the cache.
        device: where masks and positions are kept.
        counts_positions: whether the reader wants position ids.
        may_rearrange: whether slots may move to close holes. A single row and rows in lockstep have no holes but the
            user's own, which must stay.

    Attributes:
        num_slots: slots in the cache.
        num_tokens: tokens of every row in the cache; its other slots are padding and holes.
        num_committed: how many of them are not provisional.
        padding: masked slots in front of every row's first token when the prompt had been read.
        mask: which slots hold a token of their row, shape (A, num_slots); `None` where all are known to.
        next_positions: position id of every row's next token, shape (..., A); `None` if nobody wants any.
    """

    def __init__(
        self, cache: Any, num_rows: int, device: torch.device, counts_positions: bool, may_rearrange: bool = True
    ):
        self.cache = cache
        self.device = device
        self.may_rearrange = may_rearrange
        self.num_slots = 0
        self.num_tokens = [0] * num_rows
        self.num_committed = [0] * num_rows
        self.padding = [0] * num_rows
        self.mask: Tensor | None = None
        self.next_positions: Tensor | None = None
        if counts_positions:
            self.next_positions = torch.zeros(num_rows, dtype=torch.long, device=device)

    @property
    def has_provisional(self) -> bool:
        """Whether anything was read since the last `commit`."""
        return self.num_committed != self.num_tokens

    def commit(self, kept: list[int], order: list[list[int]] | None = None) -> None:
        """Keeps `kept[i]` provisional tokens of row i and rolls the others back.

        Args:
            kept: how many of every row.
            order: which ones, as places among the columns of the last pass; `None` for the first.

        What all rows drop is cropped. Where rows differ, refused tokens become holes. The holes are closed at
        once where something counts slots (a sliding window), else when many have piled up.
        """
        if order is not None:
            self._bring_forward(order)
        totals = [done + k for done, k in zip(self.num_committed, kept, strict=True)]
        dropped = [count - total for count, total in zip(self.num_tokens, totals, strict=True)]
        self.num_tokens, self.num_committed = totals, list(totals)
        if self.next_positions is not None:
            self.next_positions = self.next_positions - torch.tensor(dropped, device=self.device)
        is_ragged = min(dropped) < max(dropped)
        if is_ragged:
            self._punch_holes(dropped)
        if is_ragged and self.counts_slots:
            self._compact()
        else:
            self._crop(min(dropped))
            self._compact_when_sparse()

    def keep_rows(self, places: list[int]) -> None:
        """Keeps some of the rows."""
        index = torch.tensor(places, device=self.device)
        host.keep_rows(self.cache, index)
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
    def counts_slots(self) -> bool:
        """Whether a hole would shift what some layer sees, so that holes must be closed at once."""
        return False

    def _advance(
        self, cache: Any, mask: Tensor | None, positions: Tensor | None, width: int, widths: list[int] | None
    ) -> None:
        """Notes a pass that has happened, over `width` columns and so many tokens of every row (`None`: all)."""
        self.cache, self.mask = cache, mask
        self.next_positions = None if positions is None else positions[..., -1] + 1
        self.num_slots += width
        self.num_tokens = [
            n + w for n, w in zip(self.num_tokens, widths or [width] * len(self.num_tokens), strict=True)
        ]

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

    def _bring_forward(self, order: list[list[int]]) -> None:
        """Moves some of the newest tokens of every row in front of the others that were read with them."""
        width = max(count - done for count, done in zip(self.num_tokens, self.num_committed, strict=True))
        places = [list(dict.fromkeys([*row, *range(width)])) for row in order]
        if any(row != list(range(width)) for row in places):
            host.reorder_newest(self.cache, torch.tensor(places, device=self.device), self.num_slots)

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
