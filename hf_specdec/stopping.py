"""Where a row ends: judged after every emitted token, as plain `generate` judges it."""

from __future__ import annotations

from torch import Tensor
from transformers import StoppingCriteriaList

from hf_specdec import host
from hf_specdec.state import DecodeState


class Stopping:
    """Applies stopping criteria to tokens one by one, though they arrive several at a time.

    Args:
        criteria: all criteria of the call, the host's own included.

    Attributes:
        max_length: tokens a row may have, prompt included.
        end_ids: end-of-sequence ids.
        is_rowwise: whether every criterion is known to judge each row by itself. One of the user's own may
            compare rows, so it has to see whole columns of the batch.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.max_length = host.longest_allowed(criteria)
        self.end_ids = host.end_ids(criteria)
        self.others = StoppingCriteriaList(c for c in criteria if not host.is_length_or_end(c))
        self.is_rowwise = all(host.is_rowwise(criterion) for criterion in criteria)

    def cut(self, state: DecodeState, row: int, tokens: list[int], scores: list[Tensor] | None) -> tuple[int, bool]:
        """How many new tokens of a row stay, and whether the row ends with the last of them.

        Args:
            state: the tokens have been written behind the row's end.
            row: index in the whole batch.
            tokens: the new tokens.
            scores: the row's scores up to the last new token, if the call records them.
        """
        for count, token in enumerate(tokens, start=1):
            length = state.lengths[row] + count
            told = self._told_to_stop(state, row, length, scores)  # asked after every token, as in plain
            if told or token in self.end_ids or length >= self.max_length:
                return count, True
        return len(tokens), False

    def column(
        self, state: DecodeState, offset: int, tokens: list[int], scores: tuple[Tensor, ...] | None
    ) -> list[bool]:
        """Which rows end with a new token, judged for the whole batch at once.

        Args:
            state: rows of one common length, the new token written `offset` tokens behind it.
            offset: tokens between the rows' ends and the new token.
            tokens: the new token of every row.
            scores: per step, scores of all rows (B, V), if the call records them.
        """
        length = state.lengths[state.rows[0]] + offset + 1
        ended = [token in self.end_ids or length >= self.max_length for token in tokens]
        if self.others:
            told = self.others(state.prefixes(length, state.row_index), scores)
            ended = [a or b for a, b in zip(ended, told.tolist(), strict=True)]
        return ended

    def _told_to_stop(self, state: DecodeState, row: int, length: int, scores: list[Tensor] | None) -> bool:
        if not self.others:
            return False
        seen = None if scores is None else tuple(s[None] for s in scores[: length - state.prompt_length])
        return bool(self.others(state.sequences[row : row + 1, :length], seen).item())
