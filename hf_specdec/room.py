"""How far a round may draft."""

from __future__ import annotations

from dataclasses import dataclass

from hf_specdec.cached_model import CachedModel
from hf_specdec.state import DecodeState
from hf_specdec.stopping import Stopping


@dataclass(frozen=True)
class Room:
    """The limits of every round of a call.

    Attributes:
        target: what the target has read, and what it can still read.
        state: the rows.
        stopping: says how long a row may get.
        longest: longest draft of the call.
        prompt_takes_draft: whether a draft may ride behind the prompt in the first pass.
        may_plant: whether drafts may be trees, of which more tokens than a row still gets can be of use.
    """

    target: CachedModel
    state: DecodeState
    stopping: Stopping
    longest: int
    prompt_takes_draft: bool
    may_plant: bool = False

    def limits(self, is_first: bool) -> list[int]:
        """Most tokens every riding row may draft, so that the target's own token still has room behind them."""
        state = self.state
        if is_first and not self.prompt_takes_draft:
            return [0] * len(state.rows)
        # The pass is as wide as the widest draft, so that much room every row must have.
        room = min(self.target.room()) - (state.prompt_length if is_first else 1)
        widest = max(0, min(self.longest, room))
        if self.target.compiled is not None and not is_first:
            widest = self.target.compiled.widest(room + 1) - 1
        until_end = [0 if state.finished[row] else self.stopping.max_length - state.lengths[row] for row in state.rows]
        if self.may_plant and not is_first:  # of a tree the prompt's pass takes a path
            return [widest if tokens > 1 else 0 for tokens in until_end]
        return [min(widest, max(0, tokens - 1)) for tokens in until_end]

    def width(self, num_drafted: int, is_first: bool) -> int:
        """Drafted tokens that the round's pass has places for: compiled passes come in few widths."""
        if self.target.compiled is None or is_first:
            return num_drafted
        return self.target.compiled.narrowest(num_drafted + 1) - 1
