"""Random numbers that belong to a row and a position, not to a batch.

A row's numbers are a function of (seed, row, tokens it had emitted when the round began): they do not depend
on the other rows, on the width of the batch's draft or on the global random state. Philox is a
counter-based generator, so there is no stream to keep in step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True)
class RoundNoise:
    """Independent uniforms on [0, 1) for one round; float64, or float32 where the device has no float64.

    Attributes:
        final: for the target's own token after the accepted ones, shape (B,).
        draws: for drawing the draft, shape (B, N).
        coins: for judging it, shape (B, N).
        replacements: for the token in place of a refused one in step-by-step acceptance, shape (B, N).
        gumbels: standard Gumbel noise for every token of every position, shape (B, N + 1, V), in coupled sampling
            only. It belongs to the row and the position in its text, whatever the round.
    """

    final: Tensor
    draws: Tensor
    coins: Tensor
    replacements: Tensor
    gumbels: Tensor | None = None

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
    """

    def __init__(self, seed: int, device: torch.device, coupled_vocabulary: int | None = None):
        self.seed = seed % 2**64
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
        numbers = [self._of_row(row, count, width) for row, count in zip(rows, num_emitted, strict=True)]
        block = torch.from_numpy(numpy.stack(numbers)).to(device=self.device, dtype=self.dtype)
        block = block.clamp(max=1 - torch.finfo(self.dtype).eps)  # so that u * total stays below every total
        per_token = block[:, 1:].unflatten(1, (width, 3)) if width else block.new_empty(len(rows), 0, 3)
        draws, coins, replacements = per_token.unbind(dim=2)
        gumbels = self._gumbels_of_round(rows, num_emitted, width)
        return RoundNoise(block[:, 0], draws, coins, replacements, gumbels)

    def gumbels(self, row: int, position: int) -> Tensor:
        """Standard Gumbel noise of one position of a row's output (from 0), shape (V,)."""
        if (row, position) not in self._gumbels:
            assert self.coupled_vocabulary is not None
            drawn = self._generator(row, position, stream=1).standard_exponential(self.coupled_vocabulary)
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

    def _of_row(self, row: int, num_emitted: int, width: int) -> numpy.ndarray:
        return self._generator(row, num_emitted, stream=0).random(1 + 3 * width)

    def _generator(self, row: int, position: int, stream: int) -> numpy.random.Generator:
        key = numpy.array([self.seed, row], dtype=numpy.uint64)
        counter = numpy.array([0, 0, position, stream], dtype=numpy.uint64)
        return numpy.random.Generator(numpy.random.Philox(key=key, counter=counter))
