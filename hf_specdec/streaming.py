"""Hands tokens to a streamer as plain `generate` would: once each, in order, one position at a time."""

from __future__ import annotations

from typing import Any

import torch

from hf_specdec.state import DecodeState


class Stream:
    """Feeds a Transformers streamer; without one, does nothing.

    With several rows a position is held back until every unfinished row has it, and then put as one (B,)
    tensor, finished rows filled: the exact sequence of plain `generate`.
    """

    def __init__(self, streamer: Any, state: DecodeState):
        self.streamer = streamer
        self.num_put = state.prompt_length
        if streamer is not None:
            streamer.put(state.sequences[:, : state.prompt_length].cpu())

    def advance(self, state: DecodeState) -> None:
        """Puts every position that all unfinished rows have reached."""
        if self.streamer is None:
            return
        unfinished = [n for n, done in zip(state.lengths, state.finished, strict=True) if not done]
        ready = min(unfinished) if unfinished else max(state.lengths)
        for position in range(self.num_put, ready):
            column = [_token(state, row, position) for row in range(state.num_rows)]
            self.streamer.put(torch.tensor(column, device="cpu"))  # as in plain, wherever the model is
        self.num_put = max(self.num_put, ready)


def _token(state: DecodeState, row: int, position: int) -> int:
    back = state.lengths[row] - position
    return state.tokens[row][-back] if back > 0 else state.fill
