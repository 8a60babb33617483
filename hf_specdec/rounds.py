"""What happened in the rounds of a call: who drafted what, what of it stayed, what the target said itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hf_specdec.paths import chain_of
from hf_specdec.stats import PHASES, SpecStats

# What a round's last token is: the target's own choice in place of a refused one, behind a draft that stayed to its
# end, or without any draft.
CORRECTION, BONUS, PLAIN = "correction", "bonus", "plain"


@dataclass(frozen=True)
class RowRound:
    """One row's part in a round.

    Attributes:
        row: index in the batch.
        arm: the drafter's name; `None` if nothing was drafted.
        drafted: ids that the target judged.
        parents: in a tree, which drafted token each one follows, by its place, -1 for the text; `None` for a chain.
        kept: places of the drafted tokens that stayed, in order.
        emitted: ids that the row gained: those that stayed, and mostly one of the target's own.

    Raises:
        ValueError: if these do not belong together.
    """

    row: int
    arm: str | None
    drafted: list[int]
    parents: list[int] | None
    kept: list[int]
    emitted: list[int]

    def __post_init__(self) -> None:
        for name in ("drafted", "kept", "emitted"):
            _check_ids(name, getattr(self, name))
        _check_ids("row", [self.row])
        if (self.arm is None) != (not self.drafted) or not isinstance(self.arm, str | None):
            raise ValueError(
                f"arm={self.arm!r} with {len(self.drafted)} drafted tokens: a name and tokens, or neither."
            )
        if self.parents is not None:
            _check_ids("parents", self.parents, least=-1)
            if len(self.parents) != len(self.drafted) or any(parent >= i for i, parent in enumerate(self.parents)):
                raise ValueError(f"parents={self.parents} must name an earlier token, or -1, for every drafted one.")
        if any(place >= len(self.drafted) for place in self.kept):
            raise ValueError(f"kept={self.kept} names tokens that were not drafted; there are {len(self.drafted)}.")
        parents = self.known_parents
        follows = [parents[place] for place in self.kept] == [-1, *self.kept][: len(self.kept)]
        if not follows or self.emitted[: len(self.kept)] != [self.drafted[place] for place in self.kept]:
            raise ValueError(
                f"kept={self.kept} must be a path of drafted tokens that emitted={self.emitted} begins with."
            )
        if len(self.emitted) > len(self.kept) + 1:
            raise ValueError(f"emitted={self.emitted} may have one token more than stayed, not more.")

    @property
    def known_parents(self) -> list[int]:
        """The parents, of a chain too."""
        return chain_of(len(self.drafted)) if self.parents is None else self.parents

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        depths: list[int] = []
        for parent in self.known_parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    @property
    def last(self) -> str | None:
        """What the last token is: `CORRECTION`, `BONUS` or `PLAIN`; `None` if it was drafted."""
        if len(self.emitted) == len(self.kept):
            return None
        end = self.kept[-1] if self.kept else -1
        if end in self.known_parents:
            return CORRECTION
        return BONUS if self.drafted else PLAIN

    @property
    def num_judged(self) -> int:
        """Positions at which a drafted token was judged: those that stayed, and one that was refused."""
        return len(self.kept) + (self.last == CORRECTION)

    def count(self, stats: SpecStats) -> None:
        """Adds the row's round to statistics."""
        stats.record_row(len(self.drafted), len(self.kept), len(self.emitted), self.arm or "", self.num_judged)


@dataclass(frozen=True)
class TracedRound:
    """One round: a pass of the target over all rows that had not ended.

    Attributes:
        seconds: by phase, see `SpecStats`.
        rows: those that took part, in the order of the batch.
    """

    seconds: dict[str, float]
    rows: list[RowRound]

    def __post_init__(self) -> None:
        numbers = self.seconds.values() if isinstance(self.seconds, dict) else [None]
        is_sound = all(isinstance(number, int | float) and 0 <= number < float("inf") for number in numbers)
        if not is_sound or not set(self.seconds) <= set(PHASES):
            raise ValueError(f"seconds={self.seconds!r} must be numbers of at least 0 by phase ({', '.join(PHASES)}).")


@dataclass
class Trace:
    """Every round of one call.

    Attributes:
        assistant: the drafter's name.
        prompts: ids of every row's prompt, without padding.
        rounds: in order; the first is the prompt's pass.
    """

    assistant: str
    prompts: list[list[int]]
    rounds: list[TracedRound] = field(default_factory=list)

    @property
    def arms(self) -> list[str]:
        """The drafters that drafted, in the order in which they first did."""
        return list(dict.fromkeys(part.arm for turn in self.rounds for part in turn.rows if part.arm is not None))

    def tokens(self, row: int) -> list[int]:
        """What a row gained, all rounds together.

        Raises:
            ValueError: if the call had no such row.
        """
        if row not in range(len(self.prompts)):
            raise ValueError(f"row={row!r}: rows of the call are counted from 0 to {len(self.prompts) - 1}.")
        return [token for turn in self.rounds for part in turn.rows if part.row == row for token in part.emitted]

    def stats(self, arm: str | None = None) -> SpecStats:
        """The call's statistics, counted from its rounds.

        Args:
            arm: of the rounds of this drafter alone, without seconds; `None` for all.

        Raises:
            ValueError: if no drafter of this name drafted.
        """
        if arm is not None:
            self._refuse_unknown(arm)
        stats = SpecStats(calls=1)
        for turn in self.rounds:
            parts = [part for part in turn.rows if arm in (None, part.arm)]
            stats.target_passes += bool(parts)
            for part in parts:
                part.count(stats)
            for phase, seconds in turn.seconds.items() if arm is None else ():
                stats.seconds[phase] += seconds
        return stats

    def by_depth(self, arm: str) -> tuple[list[int], list[int], list[int]]:
        """A drafter's rounds by depth in the draft, which in a chain is the position, from 0.

        Args:
            arm: the drafter's name.

        Returns:
            Rounds whose drafts went so deep; of those, rounds in which all before it stayed and a token there was
            judged; and rounds in which one stayed.

        Raises:
            ValueError: if no drafter of this name drafted.
        """
        self._refuse_unknown(arm)
        parts = [part for turn in self.rounds for part in turn.rows if part.arm == arm]
        depths = range(max((part.depth for part in parts), default=0))
        judged = [part.num_judged for part in parts]
        return (
            [sum(part.depth > depth for part in parts) for depth in depths],
            [sum(count > depth for count in judged) for depth in depths],
            [sum(len(part.kept) > depth for part in parts) for depth in depths],
        )

    def _refuse_unknown(self, arm: str) -> None:
        known = list(dict.fromkeys([*self.arms, self.assistant]))  # whose name it has even if it never drafted
        if arm not in known:
            raise ValueError(f"arm={arm!r} drafted nothing in this call; known are {', '.join(known)}.")

    def to_dict(self) -> dict[str, Any]:
        """The trace, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Any) -> Trace:
        """The trace that `to_dict` made a document of.

        Raises:
            ValueError: if it is none.
        """
        try:
            rounds = [
                TracedRound(turn["seconds"], [RowRound(**part) for part in turn["rows"]]) for turn in document["rounds"]
            ]
            trace = cls(document["assistant"], document["prompts"], rounds)
            for prompt in trace.prompts:
                _check_ids("prompts", prompt)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"This is no trace of a call ({type(error).__name__}: {error}).") from error
        if not isinstance(trace.assistant, str):
            raise ValueError(f"assistant={trace.assistant!r} must be the name of a drafter.")
        if any(part.row >= len(trace.prompts) for turn in rounds for part in turn.rows):
            raise ValueError(f"A round speaks of a row that has no prompt; there are {len(trace.prompts)}.")
        return trace


def _check_ids(name: str, ids: Any, least: int = 0) -> None:
    is_list = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= least for i in ids)
    if not is_list:
        raise ValueError(f"{name}={ids!r} must be a list of integers of at least {least}.")
