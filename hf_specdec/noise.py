"""Random numbers that belong to a row and a position, not to a batch.

A row's numbers are a function of (seed, row, tokens it had emitted when the round began): they do not depend
on the other rows, on the width of the batch's draft or on the global random state. Philox is a
counter-based generator, so there is no stream to keep in step.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    final: Tensor
    draws: Tensor
    coins: Tensor
    replacements: Tensor


class Noise:
    """The random numbers of one `generate` call.

    Args:
        seed: any integer.
        device: where the numbers are needed.
    """

    def __init__(self, seed: int, device: torch.device):
        self.seed = seed % 2**64
        self.device = device
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
        return RoundNoise(block[:, 0], *(per_token[..., kind] for kind in range(3)))

    def _of_row(self, row: int, num_emitted: int, width: int) -> numpy.ndarray:
        key = numpy.array([self.seed, row], dtype=numpy.uint64)
        counter = numpy.array([0, 0, num_emitted, 0], dtype=numpy.uint64)
        return numpy.random.Generator(numpy.random.Philox(key=key, counter=counter)).random(1 + 3 * width)
