"""What has been generated (`DecodeState`) and what a model has read of it (`CachedModel`).

The rows of a batch are ragged: each accepts its own number of tokens. Two layouts follow from that.

* `DecodeState.sequences` is ragged on the right. A row's draft is written behind the row's end, so that
  `sequences[row, :t]` is the row's prefix of length t for drafted tokens too; accepting tokens moves the
  row's length, refusing them moves nothing.
* A cache has the same number of slots for all rows. Refused tokens leave holes, which the attention mask
  hides, while position ids say where in its own row every token stands. `CachedModel.commit` is the only
  place that shortens or rearranges a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec import host

# Full-attention caches are compacted when holes make up more than this share of their slots.
_MAX_HOLES = 0.25


@dataclass(frozen=True)
class Outcome:
    """What one round added, for the rows that took part in it (in the order of `DecodeState.rows`).

    Attributes:
        emitted: new tokens of every row. A row that has ended gets none, or, when the batch advances in
            lockstep, filling.
        drafted: tokens that were drafted for it.
        accepted: how many of the new tokens were drafted.
        finished: whether the row has ended.
        num_emitted: how many of the new tokens are not filling.
    """

    emitted: list[list[int]]
    drafted: list[int]
    accepted: list[int]
    finished: list[bool]
    num_emitted: list[int]


class DecodeState:
    """All rows of a call: their tokens, their lengths, and which of them still take part.

    Args:
        input_ids: prompts, padded on the left, shape (B, P).
        attention_mask: 1 for prompt tokens and 0 for padding, shape (B, >= P); `None` without padding.
        fill: id that stands behind the end of finished rows.

    Attributes:
        sequences: prompt, output and, behind a row's end, its current draft; shape (B, capacity).
        lengths: tokens of every row, left padding included (plain `generate` counts them alike).
        tokens: the same as lists on the host, without padding: what drafters search.
        rows: indices of the rows that ride in the next target pass.
        finished: whether a row has ended.
    """

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None, fill: int):
        num_rows, self.prompt_length = input_ids.shape
        self.sequences = torch.nn.functional.pad(input_ids, (0, 64), value=fill)
        self.fill = fill
        self.lengths = [self.prompt_length] * num_rows
        self.tokens = _without_padding(input_ids, attention_mask)
        self.rows = list(range(num_rows))
        self.finished = [False] * num_rows

    @property
    def device(self) -> torch.device:
        """Where the tokens live."""
        return self.sequences.device

    @property
    def num_rows(self) -> int:
        """Rows of the whole batch, finished ones included."""
        return len(self.lengths)

    @property
    def is_done(self) -> bool:
        """Whether every row has ended."""
        return all(self.finished)

    @property
    def row_lengths(self) -> list[int]:
        """Lengths of the riding rows."""
        return [self.lengths[row] for row in self.rows]

    @property
    def row_index(self) -> Tensor:
        """The riding rows as a tensor, shape (A,)."""
        return torch.tensor(self.rows, device=self.device)

    def last_tokens(self) -> Tensor:
        """The newest token of every riding row, which no model has read yet; shape (A, 1)."""
        ends = torch.tensor(self.row_lengths, device=self.device)[:, None] - 1
        return self.sequences[self.row_index[:, None], ends]

    def write(self, tokens: Tensor, offset: int = 0) -> None:
        """Writes tokens (A, N) behind the riding rows' ends, `offset` tokens away, without counting them."""
        width = tokens.shape[1]
        if width == 0:
            return
        self._reserve(max(self.row_lengths) + offset + width)
        starts = torch.tensor(self.row_lengths, device=self.device) + offset
        columns = starts[:, None] + torch.arange(width, device=self.device)
        self.sequences[self.row_index[:, None], columns] = tokens

    def prefixes(self, length: int, rows: Tensor) -> Tensor:
        """The first `length` tokens of some rows, drafted ones included; shape (len(rows), length)."""
        return self.sequences[rows, :length]

    def commit(self, outcome: Outcome) -> None:
        """Makes a round's tokens part of the rows. They must have been written already."""
        for row, emitted, finished in zip(self.rows, outcome.emitted, outcome.finished, strict=True):
            self.lengths[row] += len(emitted)
            self.tokens[row].extend(emitted)
            self.finished[row] = self.finished[row] or finished

    def drop_finished(self) -> list[int] | None:
        """Takes finished rows out of the following passes.

        Returns:
            Which of the riding rows stay, by their place among them; `None` when all do.
        """
        kept = [place for place, row in enumerate(self.rows) if not self.finished[row]]
        if len(kept) == len(self.rows):
            return None
        self.rows = [self.rows[place] for place in kept]
        return kept

    def output(self) -> Tensor:
        """All rows, filled behind their ends to the longest; shape (B, longest)."""
        longest = max(self.lengths)
        self._reserve(longest)
        columns = torch.arange(longest, device=self.device)
        ends = torch.tensor(self.lengths, device=self.device)[:, None]
        return torch.where(columns < ends, self.sequences[:, :longest], self.fill)

    def _reserve(self, columns: int) -> None:
        missing = columns - self.sequences.shape[1]
        if missing > 0:
            growth = max(missing, self.sequences.shape[1] // 2)
            self.sequences = torch.nn.functional.pad(self.sequences, (0, growth), value=self.fill)


class CachedModel:
    """A model together with what it has read: its cache, the mask over the cache's slots, and positions.

    The target and a draft model are both driven through it. Slots appended since the last `commit` are
    provisional. All bookkeeping is in integers on the host, so that it never waits for a device.

    Args:
        model: a decoder-only model.
        cache: its cache, empty or about to be described by `start`.
        arguments: further model arguments of every pass.
        num_rows: A, the rows of the cache.
        position_limit: positions are clamped below it; for drafters whose context is shorter than the
            target's, where some rows may run past it without being used.

    Attributes:
        num_slots: slots in the cache.
        num_provisional: of those, the ones appended since the last `commit`.
        num_tokens: tokens of every row in the cache; the other slots are padding and holes.
        padding: masked slots in front of every row's prompt.
        mask: which slots hold a token of their row, shape (A, num_slots); `None` while all do.
        next_positions: position id of every row's next token, shape (..., A); `None` for a model that
            takes none.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        arguments: dict[str, Any],
        num_rows: int,
        position_limit: int | None = None,
    ):
        self.model = model
        self.cache = cache
        self.arguments = arguments
        self.position_limit = position_limit
        self.num_slots = 0
        self.num_provisional = 0
        self.num_tokens = [0] * num_rows
        self.padding = [0] * num_rows
        self.mask: Tensor | None = None
        self.next_positions: Tensor | None = None
        if host.accepts_position_ids(model):
            self.next_positions = torch.zeros(num_rows, dtype=torch.long, device=model.device)

    def start(self, cache: Any, num_provisional: int, mask: Tensor | None, positions: Tensor | None) -> None:
        """Takes over after a prompt's pass that was made elsewhere.

        Args:
            cache: the cache, filled.
            num_provisional: how many of its last slots a commit may still drop.
            mask: over all slots, shape (A, S), or `None` without padding.
            positions: position ids of the pass, shape (..., A or 1, P); `None` if the model takes none.
        """
        num_rows = len(self.num_tokens)
        self.cache = cache
        self.num_slots, self.num_provisional = host.num_slots(cache), num_provisional
        self.mask = None if mask is None else mask.long()[:, : self.num_slots]
        self.num_tokens = [self.num_slots] * num_rows if self.mask is None else self.mask.sum(dim=1).tolist()
        self.padding = [self.num_slots - count for count in self.num_tokens]
        self.next_positions = None
        if positions is not None:
            self.next_positions = positions[..., -1].expand(*positions.shape[:-2], num_rows) + 1

    def room(self) -> list[int]:
        """Tokens every row can still read: slots of a fixed cache, positions the model was built for."""
        no_limit = 2**62
        slots = (host.capacity(self.cache) or no_limit) - self.num_slots
        positions = host.max_positions(self.model) or no_limit
        return [min(slots, positions - count) for count in self.num_tokens]

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
        self._extend_mask(tokens, token_mask)
        positions = self._positions(width, token_mask)
        outputs = host.forward(self.model, tokens, self.cache, self.mask, positions, num_logits, self.arguments)
        self.cache = host.cache_of(outputs)
        self.num_slots += width
        self.num_provisional += width
        self.num_tokens = [n + w for n, w in zip(self.num_tokens, widths or [width] * len(tokens), strict=True)]
        return outputs

    def commit(self, kept: list[int]) -> None:
        """Keeps the first `kept[i]` provisional slots of row i and rolls the others back.

        What all rows drop is cropped. Where rows differ, the refused slots become holes, and the cache is
        compacted at once if a layer has a sliding window, which counts holes too, else when many have piled up.
        """
        dropped = [self.num_provisional - k for k in kept]
        self.num_tokens = [n - d for n, d in zip(self.num_tokens, dropped, strict=True)]
        if self.next_positions is not None:
            self.next_positions = self.next_positions - torch.tensor(dropped, device=self._device)
        if min(dropped) < max(dropped):
            self._punch_holes(kept)
        if min(dropped) < max(dropped) and host.is_sliding(self.cache):
            self.compact()
        else:
            self._crop(min(dropped))
            self._compact_when_sparse()
        self.num_provisional = 0

    def keep_rows(self, places: list[int]) -> None:
        """Keeps some of the rows."""
        index = torch.tensor(places, device=self._device)
        host.keep_rows(self.cache, index)
        self.num_tokens = [self.num_tokens[place] for place in places]
        self.padding = [self.padding[place] for place in places]
        self.mask = None if self._is_dense or self.mask is None else self.mask[index]
        if self.next_positions is not None:
            self.next_positions = self.next_positions[..., index]
        self.arguments = {key: _select(value, index) for key, value in self.arguments.items()}
        self._compact_when_sparse()

    def compact(self) -> None:
        """Moves every row's tokens to the right edge; the fullest row decides the new width."""
        assert self.mask is not None
        width = max(self.num_tokens)
        # Sorting zeros before ones keeps the tokens in order and gathers holes and padding at the left.
        index = torch.argsort(self.mask, dim=1, stable=True)[:, -width:]
        self.arrange(index, self.mask.gather(1, index))

    def restore_layout(self) -> None:
        """Lays every row out from the left, as plain `generate` leaves it: its padding, then its tokens.

        Behind a row that ended before the others, slots are masked.
        """
        if self.mask is None:
            return
        num_slots = max(p + n for p, n in zip(self.padding, self.num_tokens, strict=True))
        counts = torch.tensor(self.num_tokens, device=self._device)[:, None]
        rank = torch.arange(num_slots, device=self._device) - torch.tensor(self.padding, device=self._device)[:, None]
        order = torch.argsort(self.mask, dim=1, stable=True)  # the row's tokens come last
        source = order.gather(1, (self.num_slots - counts + rank).clamp(0, self.num_slots - 1))
        self.arrange(source, ((rank >= 0) & (rank < counts)).long())

    def arrange(self, index: Tensor, mask: Tensor) -> None:
        """Rebuilds the cache from old slots: `index` (A, S_new) names them, `mask` says which hold tokens."""
        host.gather_slots(self.cache, index, self.num_slots)
        self.num_slots = index.shape[1]
        self.mask = None if self._is_dense else mask

    @property
    def _device(self) -> torch.device:
        return self.model.device

    @property
    def _is_dense(self) -> bool:
        """Whether no slot is masked."""
        return min(self.num_tokens) == self.num_slots

    def _token_mask(self, widths: list[int] | None, width: int) -> Tensor | None:
        if widths is None or min(widths) == width:
            return None
        missing = torch.tensor(widths, device=self._device)[:, None]
        return (torch.arange(width, device=self._device) >= width - missing).long()

    def _extend_mask(self, tokens: Tensor, token_mask: Tensor | None) -> None:
        if self.mask is None and token_mask is not None:
            self.mask = token_mask.new_ones(len(tokens), self.num_slots)
        if self.mask is not None:
            new = self.mask.new_ones(tokens.shape) if token_mask is None else token_mask
            self.mask = torch.cat([self.mask, new], dim=1)

    def _positions(self, width: int, token_mask: Tensor | None) -> Tensor | None:
        if self.next_positions is None:
            return None
        ahead = torch.arange(width, device=self._device)
        if token_mask is not None:
            ahead = (token_mask.cumsum(dim=1) - 1).clamp(min=0)
        positions = self.next_positions[..., None] + ahead
        self.next_positions = positions[..., -1] + 1
        return positions if self.position_limit is None else positions.clamp(max=self.position_limit - 1)

    def _crop(self, dropped: int) -> None:
        host.crop(self.cache, dropped)
        self.num_slots -= dropped
        if self.mask is not None:
            self.mask = None if self._is_dense else self.mask[:, : self.num_slots]

    def _punch_holes(self, kept: list[int]) -> None:
        if self.mask is None:
            self.mask = torch.ones(len(kept), self.num_slots, dtype=torch.long, device=self._device)
        order = torch.arange(self.num_provisional, device=self._device)
        keep = order < torch.tensor(kept, device=self._device)[:, None]
        provisional = self.mask[:, self.num_slots - self.num_provisional :] * keep
        self.mask = torch.cat([self.mask[:, : self.num_slots - self.num_provisional], provisional], dim=1)

    def _compact_when_sparse(self) -> None:
        wasted = self.num_slots - max(self.num_tokens)  # slots in which no row would lose a token
        if wasted > _MAX_HOLES * self.num_slots and host.can_be_ragged(self.cache):
            self.compact()


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    rows = input_ids.tolist()
    if attention_mask is None:
        return rows
    masks = attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :].tolist()
    return [[t for t, m in zip(row, mask, strict=True) if m] for row, mask in zip(rows, masks, strict=True)]


def _select(value: Any, index: Tensor) -> Any:
    """Rows of a model argument; what has no row axis stays."""
    return value[index.to(value.device)] if isinstance(value, Tensor) and value.dim() > 0 else value
