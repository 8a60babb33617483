"""Random numbers that belong to a row and a position, not to a batch.

A row's numbers are a function of (seed, stream, row, tokens it has emitted): they do not depend on the other rows, on
the width of the batch's draft or on the global random state. Philox is a counter-based generator, so there is no stream
to keep in step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy
import torch
from torch import Tensor

from hf_specdec.accept import Draft


@dataclass(frozen=True)
class RoundNoise:
    """Independent uniforms on [0, 1) for one round; float64, or float32 where the device has no float64.

    Attributes:
        finals: for the target's own token at every position, shape (B, N + 1). They belong to the row and the position
            in its text, whatever the round: a token that is not drafted, or drafted as a point mass, depends on
            nothing else.
        draws: for drawing the draft, shape (B, N).
        coins: for judging it, shape (B, N).
        gumbels: standard Gumbel noise for every token of every position, shape (B, N + 1, V), in coupled sampling
            only. It belongs to the row and the position too.
    """

    finals: Tensor
    draws: Tensor
    coins: Tensor
    gumbels: Tensor | None = None

    def at_positions_of(self, draft: Draft) -> RoundNoise:
        """The numbers for a draft's own width; in a tree every position has those of its place in the text."""
        cut = replace(self, draws=self.draws[:, : draft.width], coins=self.coins[:, : draft.width])
        finals, gumbels = self.finals[:, : draft.width + 1], self.gumbels
        if gumbels is not None:
            gumbels = gumbels[:, : draft.width + 1]
        if draft.parents is None:
            return replace(cut, finals=finals, gumbels=gumbels)
        depths = draft.seen.sum(dim=2) - 1  # (B, N + 1)
        if gumbels is not None:
            gumbels = gumbels[torch.arange(len(depths), device=depths.device)[:, None], depths]
        return replace(cut, finals=finals.gather(1, depths), gumbels=gumbels)

    def of_draft(self, device: torch.device) -> RoundNoise:
        """The same numbers, those for drawing a draft on the device of a drafter."""
        gumbels = None if self.gumbels is None else self.gumbels.to(device)
        return replace(self, draws=self.draws.to(device), gumbels=gumbels)


class Noise:
    """The random numbers of one `generate` call.

    Args:
        seed: any integer.
        device: where the numbers are needed.
        coupled_vocabulary: V, for coupled sampling; `None` without it.
        stream: tells calls of one seed apart whose numbers must be independent (see `DraftSession`); below 2**64.
            Gumbel noise is the same in all streams.
    """

    def __init__(self, seed: int, device: torch.device, coupled_vocabulary: int | None = None, stream: int = 0):
        self.seed = seed % 2**64
        self.stream = stream
        self.device = device
        self.coupled_vocabulary = coupled_vocabulary
        self._gumbels: dict[tuple[int, int], Tensor] = {}
        self.dtype = torch.float32 if device.type == "mps" else torch.float64

    def round(self, rows: list[int], num_emitted: list[int], width: int) -> RoundNoise:
        """Numbers for a round in which every row drafts at most `width` tokens.

        Args:
            rows: indices of the rows in the whole batch.
            num_emitted: tokens every row has emitted when the round begins. They grow with every round, so no
                two rounds of a row share numbers (block verification looks at coins it does not use up).
            width: N.
        """
        pairs = list(zip(rows, num_emitted, strict=True))
        per_round = self._uniforms([self._of_round(row, count, width) for row, count in pairs])  # (B, N, 2)
        finals = self._uniforms([self._of_positions(row, count, width + 1) for row, count in pairs])
        gumbels = self._gumbels_of_round(rows, num_emitted, width)
        return RoundNoise(finals, per_round[..., 0], per_round[..., 1], gumbels)

    def _uniforms(self, numbers: list[numpy.ndarray]) -> Tensor:
        """One array a row, on the device; clamped so that u * total stays below every total."""
        stacked = torch.from_numpy(numpy.stack(numbers)).to(device=self.device, dtype=self.dtype)
        return stacked.clamp(max=1 - torch.finfo(self.dtype).eps)

    def gumbels(self, row: int, position: int) -> Tensor:
        """Standard Gumbel noise of one position of a row's output (from 0), shape (V,)."""
        if (row, position) not in self._gumbels:
            assert self.coupled_vocabulary is not None
            drawn = self._generator(row, position, purpose=1, stream=0).standard_exponential(self.coupled_vocabulary)
            exponentials = torch.from_numpy(drawn).clamp(min=1e-300)
            self._gumbels[row, position] = -exponentials.log().to(self.device, self.dtype)
        return self._gumbels[row, position]

    def _gumbels_of_round(self, rows: list[int], num_emitted: list[int], width: int) -> Tensor | None:
        if self.coupled_vocabulary is None:
            return None
        first = dict(zip(rows, num_emitted, strict=True))
        self._gumbels = {key: value for key, value in self._gumbels.items() if key[1] >= first.get(key[0], key[1] + 1)}
        of_rows = [[self.gumbels(row, start + i) for i in range(width + 1)] for row, start in first.items()]
        return torch.stack([torch.stack(positions) for positions in of_rows])

    def _of_round(self, row: int, num_emitted: int, width: int) -> numpy.ndarray:
        """Numbers (N, 2) of a row's round that began after so many tokens."""
        return self._generator(row, num_emitted, purpose=0, stream=self.stream).random((width, 2))

    def _of_positions(self, row: int, first: int, count: int) -> numpy.ndarray:
        """One number for each of `count` positions: every one starts a block of four, which one counter value fills."""
        return _philox([self.seed, row], [first, self.stream, 0, 2]).random(4 * count)[::4]

    def _generator(self, row: int, position: int, purpose: int, stream: int) -> numpy.random.Generator:
        return _philox([self.seed, row], [0, stream, position, purpose])


def _philox(key: list[int], counter: list[int]) -> numpy.random.Generator:
    uint64 = numpy.uint64
    return numpy.random.Generator(
        numpy.random.Philox(key=numpy.array(key, dtype=uint64), counter=numpy.array(counter, dtype=uint64))
    )
