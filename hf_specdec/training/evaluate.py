"""How much of a drafter's drafts a target would keep, counted on texts the target wrote itself.

Greedy answers are what greedy decoding gives, so a drafted token is kept exactly if it is the text's next token. Counts
add up over texts and processes; rates are made by whoever reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

# Drafted tokens of a round, for the mean acceptance length.
CHAIN = 4


@dataclass(frozen=True)
class Acceptance:
    """Counts over the places where drafts may begin.

    Attributes:
        hits: by position, how often the drafted token was the text's, whatever the ones before it.
        seen: by position, places where the text goes on that far.
        kept: by position, how often it and all before it were right.
        reached: by position, how often all before it were right and the text goes on that far.
        tokens: tokens written in rounds of `CHAIN` drafted tokens each, from the first answer token on.
        rounds: how many rounds that took.
    """

    hits: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    tokens: int = 0
    rounds: int = 0

    def __add__(self, other: Acceptance) -> Acceptance:
        pairs = zip(self.counts(), other.counts(), strict=True)
        added = [tuple(a + b for a, b in zip_longest(mine, theirs, fillvalue=0)) for mine, theirs in pairs]
        hits, seen, kept, reached = added
        return Acceptance(hits, seen, kept, reached, self.tokens + other.tokens, self.rounds + other.rounds)

    def counts(self) -> tuple[tuple[int, ...], ...]:
        """All counts by position."""
        return self.hits, self.seen, self.kept, self.reached

    @property
    def length(self) -> float:
        """Tokens a round, the target's own among them: the mean acceptance length of a chain."""
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> list[float]:
        """How often the token at a position is right, given that all before it were."""
        return _rates(self.kept, self.reached)

    @property
    def unconditional(self) -> list[float]:
        """How often the token at a position is right, given the text before it."""
        return _rates(self.hits, self.seen)


def count(agreement: Tensor) -> Acceptance:
    """Counts of one text.

    Args:
        agreement: as `Recipe.agreement` returns it, shape (A, depth).
    """
    places, depth = agreement.shape
    rows = agreement.tolist()
    seen = tuple(max(0, places - ahead) for ahead in range(depth))
    kept = agreement.cumprod(dim=1).sum(dim=0).tolist()
    reached = [seen[0] if depth else 0]
    for ahead in range(1, depth):
        reached.append(sum(all(row[:ahead]) for row in rows[: seen[ahead]]))
    place = rounds = 0
    while place < places:
        wrong = next((ahead for ahead, is_right in enumerate(rows[place][:CHAIN]) if not is_right), min(depth, CHAIN))
        place, rounds = place + wrong + 1, rounds + 1
    return Acceptance(tuple(agreement.sum(dim=0).tolist()), seen, tuple(kept), tuple(reached), places, rounds)


def total(counted: Iterable[Acceptance]) -> Acceptance:
    """All counts together."""
    return sum(counted, Acceptance())


def _rates(part: Sequence[int], whole: Sequence[int]) -> list[float]:
    return [some / every if every else 0.0 for some, every in zip(part, whole, strict=True)]
