"""What has been generated: the tokens of all rows, ragged on the right.

A row's draft is written behind the row's end, so that `sequences[row, :t]` is the row's prefix of length t for
drafted tokens too. Accepting tokens moves the row's length; refusing them moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """What one round added, for the rows that took part in it (in the order of `DecodeState.rows`).

    Attributes:
        appended: new tokens of every row. A row that has ended gets none, or, when the batch advances in
            lockstep, filling.
        emitted: how many of them are not filling.
        drafted: tokens that were drafted for the row.
        accepted: how many of the emitted tokens were drafted.
        finished: whether the row has ended, in this round or before.
        positions: for every new token the position of the target's pass that it follows, counted from 0, the row's last
            token. `None` if the draft was a chain: 0, 1, 2, ... in every row.
        judged: if the draft was a tree, at how many of these positions drafted tokens were judged; else `None`.
    """

    appended: list[list[int]]
    emitted: list[int]
    drafted: list[int]
    accepted: list[int]
    finished: list[bool]
    positions: list[list[int]] | None = None
    judged: list[int] | None = None


class DecodeState:
    """All rows of a call: their tokens, their lengths, and which of them still take part.

    Args:
        input_ids: prompts, padded on the left, shape (B, P).
        attention_mask: 1 for prompt tokens and 0 for padding, shape (B, >= P); `None` without padding.
        fill: id that stands behind the end of finished rows.

    Attributes:
        sequences: prompt, output and, behind a row's end, its current draft; shape (B, capacity).
        lengths: tokens of every row, left padding included (plain `generate` counts them alike).
        prompt_mask: which tokens of the prompts are none of the padding, bool, shape (B, P); `None` if all are.
        tokens: the same as lists on the host, without padding: what drafters search. (In lockstep a finished
            row goes on with filling.)
        is_left_padded: whether all padding stands in front of the prompts.
        rows: indices of the rows that ride in the next target pass.
        finished: whether a row has ended.
    """

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None, fill: int):
        num_rows, self.prompt_length = input_ids.shape
        self.sequences = torch.nn.functional.pad(input_ids.long(), (0, 64), value=fill)
        self.fill = fill
        self.is_left_padded = attention_mask is None or not bool((attention_mask.long().diff(dim=1) < 0).any())
        self.lengths = [self.prompt_length] * num_rows
        self.prompt_mask = _prompt_mask(input_ids, attention_mask)
        self.tokens = _without_padding(input_ids, self.prompt_mask)
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
    def num_emitted(self) -> list[int]:
        """Tokens the riding rows have behind their prompts."""
        return [length - self.prompt_length for length in self.row_lengths]

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

    def append(self, tokens: list[list[int]]) -> None:
        """Writes one token list a riding row behind its end, without counting them: `commit` does."""
        widest = max(map(len, tokens))
        self.write(torch.tensor([row + [self.fill] * (widest - len(row)) for row in tokens], device=self.device))

    def prefixes(self, length: int, rows: Tensor) -> Tensor:
        """The first `length` tokens of some rows, drafted ones included; shape (len(rows), length)."""
        return self.sequences[rows, :length]

    def with_paths(self, rows: Tensor, ends: Tensor, paths: Tensor, length: int) -> Tensor:
        """Prefixes that go on with some of the tokens written behind their rows' ends.

        Args:
            rows: indices of rows, shape (M,).
            ends: their lengths without a draft, shape (M,).
            paths: which of the written tokens follow, in order, shape (M, D).
            length: of the result; what lies beyond a path means nothing.

        Returns:
            Tokens, shape (M, length).
        """
        columns = torch.arange(length, device=self.device).expand(len(rows), -1)
        steps = columns - ends[:, None]  # from 0 for the first drafted token
        if paths.shape[1]:
            drafted = ends[:, None] + paths.gather(1, steps.clamp(0, paths.shape[1] - 1))
            columns = torch.where(steps < 0, columns, drafted)
        return self.sequences[rows[:, None], columns]

    def commit(self, outcome: Outcome) -> None:
        """Makes a round's tokens part of the rows. They must have been written already."""
        for row, appended, finished in zip(self.rows, outcome.appended, outcome.finished, strict=True):
            self.lengths[row] += len(appended)
            self.tokens[row].extend(appended)
            self.finished[row] = finished

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


def _prompt_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    if attention_mask is None:
        return None
    return attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :].to(input_ids.device, torch.bool)


def _without_padding(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    rows = input_ids.tolist()
    if mask is None:
        return rows
    return [[t for t, m in zip(row, kept, strict=True) if m] for row, kept in zip(rows, mask.tolist(), strict=True)]
