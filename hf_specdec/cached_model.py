"""A model and what it has read: the only place that runs the target or a draft model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec import host
from hf_specdec.halves import Halves
from hf_specdec.slots import Slots

_NO_LIMIT = 2**62


@dataclass(frozen=True)
class CompiledPasses:
    """A compiled forward pass, and the few widths it is compiled for (each is compiled once, for up to a minute)."""

    call: Callable[..., Any]
    widths: tuple[int, ...]

    def widest(self, room: int) -> int:
        """The widest pass for which there is room, at least 1."""
        return max(width for width in self.widths if width <= max(1, room))

    def narrowest(self, num_tokens: int) -> int:
        """The narrowest pass that takes so many tokens."""
        return min(width for width in self.widths if width >= num_tokens)


class CachedModel(Slots):
    """A model together with its cache, the mask over the cache's slots, and positions.

    The target and a draft model are both driven through it.

    Args:
        model: a model with a decoder.
        cache: its cache, empty or about to be described by `start`.
        arguments: further model arguments of every pass.
        num_rows: A, the rows of the cache.
        device: where masks and positions are kept: that of the tokens (an offloaded model has none of its own).
        position_limit: positions are clamped below it; for drafters whose context is shorter than the
            target's, where some rows may run past it without being used.
        compiled: the model's compiled pass and its widths; passes of other widths run uncompiled.
        may_rearrange: see `Slots`.

    Attributes:
        ahead: tokens that only the model's first layers have read, shape (A, W); they are in none of the counts.
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
        super().__init__(cache, num_rows, device, host.accepts_position_ids(model), may_rearrange)
        self.model = model
        self.arguments = arguments
        self.position_limit = position_limit
        self.context_limits = host.context_limits(model)
        self.compiled = compiled
        self.halves: Halves | None = None
        self.ahead: Tensor | None = None

    @property
    def num_ahead(self) -> int:
        """Tokens of every row that only the first layers have read."""
        return 0 if self.ahead is None else self.ahead.shape[1]

    @property
    def counts_slots(self) -> bool:
        """Whether a hole would shift what some layer sees, so that holes must be closed at once."""
        return host.counts_slots(self.model, self.cache)

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

    def room(self) -> list[int]:
        """Tokens every row can still read: slots of a fixed cache, positions the model was built for."""
        slots = (host.capacity(self.cache) or _NO_LIMIT) - self.num_slots
        counts = self.num_tokens
        if self.next_positions is None:  # a model that counts by itself counts slots, padding and all
            counts = [self.num_slots] * len(counts)
        most, border = self.context_limits
        return [min(slots, (border if border and count <= border else most or _NO_LIMIT) - count) for count in counts]

    def read(
        self, tokens: Tensor, widths: list[int] | None = None, num_logits: int = 1, seen: Tensor | None = None
    ) -> Any:
        """Runs the model over new tokens, appending one slot for each column.

        Args:
            tokens: shape (A, W); a row with fewer tokens holds them at the right.
            widths: number of tokens of every row; `None` when each has W.
            num_logits: positions to score, counted from the end.
            seen: if the tokens are a tree, which of them each one sees, bool, shape (A, W, W).

        Returns:
            The model's output; logits cover at least the last `num_logits` positions.
        """
        self.forget_ahead()
        width = tokens.shape[1]
        token_mask = self._token_mask(widths, width)
        mask = self._extended_mask(tokens, token_mask)
        positions = self._positions(width, token_mask)
        shown, attention = positions, mask
        if seen is not None:
            assert self.next_positions is not None
            shown = self.next_positions[..., None] + seen.sum(dim=2) - 1
            attention = host.tree_mask(self.model, self.cache, self.mask, seen, self.num_slots)
        if shown is not None and self.position_limit is not None:
            shown = shown.clamp(max=self.position_limit - 1)
        call = None
        if self.compiled is not None and width in self.compiled.widths and seen is None:
            call = self.compiled.call
        with host.heads_in_groups():
            outputs = host.forward(self.model, tokens, self.cache, attention, shown, num_logits, self.arguments, call)
        # Only now has the pass happened: an exception above leaves the bookkeeping as it was.
        self._advance(host.cache_of(outputs), mask, positions, width, widths)
        return outputs

    def read_ahead(self, tokens: Tensor, halves: Halves, is_scored: bool = True) -> Tensor:
        """Runs the model's first layers over one more token of every row.

        The other layers read it in `read_rest`; `read` and `forget_ahead` drop it.

        Args:
            tokens: shape (A, 1).
            halves: of the model, the same ones until then.
            is_scored: whether logits are wanted; they are zeros if not.

        Returns:
            Logits as if these layers were all, shape (A, V).

        Raises:
            ValueError: if the layers hand on more than states.
        """
        self.halves = halves
        self.ahead = tokens if self.ahead is None else torch.cat([self.ahead, tokens], dim=1)
        half = halves.first if is_scored else halves.lead
        logits = self._read_in_part(half, self.cache, tokens).logits[:, -1]
        halves.check([tokens.shape] * self.num_ahead)
        return logits

    def read_rest(self) -> Any:
        """Runs the other layers over what the first ones have read ahead.

        Returns:
            The model's output, with logits of all these positions.
        """
        assert self.halves is not None and self.ahead is not None
        width, cache = self.num_ahead, host.behind(self.cache, self.halves.exit_layer)
        outputs = self._read_in_part(self.halves.rest, cache, self.ahead)
        self._advance(self.cache, self._extended_mask(self.ahead, None), self._positions(width, None), width, None)
        self._catch_up()
        return outputs

    def forget_ahead(self) -> None:
        """Drops what the first layers have read ahead of the others."""
        if self.halves is not None:
            host.truncate(self.cache, self.num_slots)
            self._catch_up()

    def _catch_up(self) -> None:
        assert self.halves is not None
        self.halves.forget()
        self.halves = self.ahead = None

    def _read_in_part(self, half: Any, cache: Any, tokens: Tensor) -> Any:
        """A pass of some layers over the last of the tokens that are read ahead."""
        assert self.ahead is not None
        mask, positions = self._extended_mask(self.ahead, None), self._positions(self.num_ahead, None)
        shown = None if positions is None else positions[..., -tokens.shape[1] :]
        # Nobody looks at the states of a part.
        arguments = {name: value for name, value in self.arguments.items() if not name.startswith("output_")}
        with host.heads_in_groups():
            return host.forward(half, tokens, cache, mask, shown, tokens.shape[1], arguments)

    def keep_rows(self, places: list[int]) -> None:
        """Keeps some of the rows."""
        index = torch.tensor(places, device=self.device)
        self.arguments = {name: _select(value, index, len(self.num_tokens)) for name, value in self.arguments.items()}
        super().keep_rows(places)


def _select(value: Any, index: Tensor, num_rows: int) -> Any:
    """Some rows of a model argument; what has no row axis stays."""
    has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == num_rows
    return value[index.to(value.device)] if has_rows else value
