"""Records the rounds of calls, for whoever asks; costs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hf_specdec.accept import Draft
from hf_specdec.paths import chain_of
from hf_specdec.rounds import RowRound, Trace, TracedRound
from hf_specdec.state import DecodeState, Outcome

_LISTENER: ContextVar[list[Trace] | None] = ContextVar("hf_specdec_traces", default=None)


@contextmanager
def trace() -> Iterator[list[Trace]]:
    """Records every round of the speculative calls made inside the block, by this thread or task.

    A call costs one more read of the device a round while it is traced. Calls without an assistant leave no trace; one
    that fails leaves its rounds up to there.

    Yields:
        A list that gets a `Trace` for every call. Where one call decodes several texts (Whisper, long audio), for each.
    """
    traces: list[Trace] = []
    token = _LISTENER.set(traces)
    try:
        yield traces
    finally:
        _LISTENER.reset(token)


class Tracer:
    """Writes down the rounds of a call; without a listener, does nothing.

    Args:
        assistant: the drafter's name.
        state: the prompts.
    """

    def __init__(self, assistant: str, state: DecodeState):
        self.trace: Trace | None = None
        self._rows: list[RowRound] = []
        self._seconds: dict[str, float] = {}
        if (listener := _LISTENER.get()) is not None:
            self.trace = Trace(assistant, [list(tokens) for tokens in state.tokens])
            listener.append(self.trace)

    def record(self, state: DecodeState, draft: Draft, outcome: Outcome, names: list[str]) -> None:
        """Notes a round before it is committed, for the rows that had not ended; names of drafters by place."""
        if self.trace is None:
            return
        tokens = draft.tokens.tolist()
        parents = None if draft.parents is None else draft.parents.tolist()
        self._rows = []
        for place, row in enumerate(state.rows):
            if state.finished[row]:
                continue
            length = outcome.drafted[place]
            drafted, chain = tokens[place][:length], chain_of(length)
            follows = chain if parents is None else parents[place][:length]
            emitted = outcome.appended[place][: outcome.emitted[place]]
            kept = _path(drafted, follows, emitted[: outcome.accepted[place]])
            tree = None if follows == chain else follows
            self._rows.append(RowRound(row, names[place] if length else None, drafted, tree, kept, emitted))

    def end_round(self, seconds: dict[str, float]) -> None:
        """Adds the round that was noted last; seconds by phase since the call began."""
        if self.trace is None:
            return
        spent = {phase: total - self._seconds.get(phase, 0.0) for phase, total in seconds.items()}
        self.trace.rounds.append(TracedRound({phase: value for phase, value in spent.items() if value > 0}, self._rows))
        self._seconds = dict(seconds)


def _path(drafted: list[int], parents: list[int], accepted: list[int]) -> list[int]:
    """Which drafted tokens were accepted: tokens with the same parent differ."""
    path: list[int] = []
    for token in accepted:
        parent = path[-1] if path else -1
        path.append(next(i for i, t in enumerate(drafted) if t == token and parents[i] == parent))
    return path
