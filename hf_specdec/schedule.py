"""How long a draft pays: the tokens a round is expected to yield over the seconds such rounds have taken.

What is learned is kept apart from what is decided. `Experience` holds counts and seconds and lives as long as the
drafter; `expected_tokens` and `best_width` are pure functions. Nothing here looks at the value of a sampled token:
decisions rest on earlier rounds and on confidences that are functions of the text alone, so the law of the output
stays what it is.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Older outcomes fade once a rate has seen this many, so that it follows the text.
_MEMORY = 64.0
_NUM_BINS = 20
# Seconds of a width: the median of this many newest measurements.
_RECENT = 9
# A first measurement that exceeds all others by this factor is no guide (a compilation, a page fault).
_OUTLIER = 5.0
# What a drafted token costs, as a share of a plain round, as long as too little was measured.
_GUESSED_SLOPE = {True: 0.02, False: 0.1}
# Rounds without a draft before the next trial; the pause doubles with every trial that did not pay.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 128


def copy_confidence(votes: float, num_voters: float, depth: int) -> float:
    """How likely a copied token is right, before anything was learned about the text at hand.

    Args:
        votes: earlier places that went on with this token.
        num_voters: earlier places that matched at all.
        depth: matching tokens in front of it, drafted ones included.
    """
    return (votes / num_voters) * votes / (num_voters + 3 / depth)


# --- what is learned --------------------------------------------------------------------------------------


@dataclass
class Rate:
    """A probability that follows its outcomes.

    Attributes:
        guess: the estimate before any outcome.
        weight: how many outcomes it takes to outweigh the guess.
    """

    guess: float
    weight: float
    hits: float = 0.0
    tries: float = 0.0

    @property
    def value(self) -> float:
        """The estimate."""
        return (self.hits + self.guess * self.weight) / (self.tries + self.weight)

    def add(self, hit: bool) -> None:
        """Counts one outcome."""
        fade = min(1.0, _MEMORY / (self.tries + 1))
        self.hits = self.hits * fade + hit
        self.tries = self.tries * fade + 1


class Acceptance:
    """How often one drafter's tokens stay: by its own confidence, or else by their position in the draft."""

    def __init__(self) -> None:
        self.by_confidence = [Rate((place + 0.5) / _NUM_BINS, weight=8.0) for place in range(_NUM_BINS)]
        self.by_position: list[Rate] = []

    def of_confidences(self, confidences: list[float]) -> list[Rate]:
        """The rates of tokens whose drafter says how sure it is of each."""
        return [self.by_confidence[min(_NUM_BINS - 1, int(value * _NUM_BINS))] for value in confidences]

    def of_positions(self, num_tokens: int) -> list[Rate]:
        """The rates of the first tokens of a draft about which nothing else is known."""
        missing = num_tokens - len(self.by_position)
        self.by_position.extend(Rate(0.7, weight=2.0) for _ in range(missing))
        return self.by_position[:num_tokens]


class RoundSeconds:
    """Seconds of a round by its width, the longest draft in it: on a line through the medians of what was measured.

    Args:
        is_free: whether drafting costs nothing to speak of, so that only the target's pass grows.
    """

    def __init__(self, is_free: bool):
        self.slope = _GUESSED_SLOPE[is_free]
        self.measured: dict[int, deque[float]] = {}
        self.line: tuple[float, float] | None = None  # seconds at width 0, and per drafted token

    def add(self, width: int, seconds: float) -> None:
        """Notes how long a round took."""
        known = [statistics.median(values) for values in self.measured.values()]
        if width not in self.measured and known and seconds > _OUTLIER * max(known):
            return
        self.measured.setdefault(width, deque(maxlen=_RECENT)).append(seconds)
        self.line = None

    def at(self, width: int) -> float | None:
        """Expected seconds at a width of at least 1; `None` if no such round was ever measured."""
        if not self.measured:
            return None
        if self.line is None:
            self.line = self._fitted()
        return self.line[0] + self.line[1] * width

    def _fitted(self) -> tuple[float, float]:
        """Least squares weighted by the number of measurements; a longer draft never counts as cheaper."""
        points = [(width, statistics.median(values), len(values)) for width, values in self.measured.items()]
        total = sum(weight for *_, weight in points)
        centre = sum(width * weight for width, _, weight in points) / total
        level = sum(seconds * weight for _, seconds, weight in points) / total
        spread = sum(weight * (width - centre) ** 2 for width, _, weight in points)
        if spread == 0:
            rise = self.slope * level / (1 + self.slope * centre)
        else:
            rise = sum(weight * (width - centre) * (seconds - level) for width, seconds, weight in points) / spread
        rise = max(rise, 0.0)
        return level - rise * centre, rise


class Trials:
    """When to try again what did not pay."""

    def __init__(self) -> None:
        self.idle = 0
        self.pause = _SHORTEST_PAUSE

    def is_due(self) -> bool:
        """Counts a round that was not used; whether the next trial is due now."""
        self.idle += 1
        if self.idle < self.pause:
            return False
        self.idle, self.pause = 0, min(2 * self.pause, _LONGEST_PAUSE)
        return True

    def was_chosen(self) -> None:
        """It pays again: the next pause will be short."""
        self.idle, self.pause = 0, _SHORTEST_PAUSE


FREE = ""  # the name under which all drafters that cost nothing share their rounds' seconds


class Experience:
    """What the rounds of a drafter's arms with one target have taught; kept over calls."""

    def __init__(self) -> None:
        self.acceptance: dict[str, Acceptance] = {}
        self.trials: dict[str, Trials] = {}
        self.plain_seconds: dict[int, RoundSeconds] = {}
        self.draft_seconds: dict[tuple[str, int], RoundSeconds] = {}

    def acceptance_of(self, arm: str) -> Acceptance:
        """The acceptance rates of an arm."""
        return self.acceptance.setdefault(arm, Acceptance())

    def trials_of(self, arm: str) -> Trials:
        """The trials of an arm."""
        return self.trials.setdefault(arm, Trials())

    def is_measured(self, arm: str, num_rows: int) -> bool:
        """Whether the arm has drafted for so many rows before."""
        return (arm, num_rows) in self.draft_seconds

    def knows_plain(self, num_rows: int) -> bool:
        """Whether a round without a draft, or with a free one, was ever measured."""
        return num_rows in self.plain_seconds or self.is_measured(FREE, num_rows)

    def record_seconds(self, arm: str, num_rows: int, width: int, seconds: float) -> None:
        """Notes how long a round took, everything included.

        Args:
            arm: who drafted; `FREE` where it cost nothing.
            num_rows: rows in the target's pass.
            width: longest draft.
            seconds: of the round.
        """
        if width == 0:
            self.plain_seconds.setdefault(num_rows, RoundSeconds(is_free=True)).add(0, seconds)
        else:
            key = arm, num_rows
            self.draft_seconds.setdefault(key, RoundSeconds(is_free=arm == FREE)).add(width, seconds)

    def seconds(self, arm: str, num_rows: int) -> Callable[[int], float]:
        """Expected seconds of a round by its width; in units of a plain round if nothing was measured yet."""
        line = self.draft_seconds.get((arm, num_rows)) or RoundSeconds(is_free=arm == FREE)
        plain = self._plain(num_rows)

        def at(width: int) -> float:
            if width == 0:
                return plain
            expected = line.at(width)
            return plain * (1 + line.slope * width) if expected is None else max(expected, plain)

        return at

    def _plain(self, num_rows: int) -> float:
        """Seconds of a round without a draft; where none was measured, of one with a free draft of no length."""
        for line in (self.plain_seconds.get(num_rows), self.draft_seconds.get((FREE, num_rows))):
            if line is not None and (seconds := line.at(0)) is not None:
                return seconds
        return 1.0


# --- what is decided --------------------------------------------------------------------------------------


def expected_tokens(survival: list[list[float]], num_rows: int, in_lockstep: bool) -> list[float]:
    """Tokens a round yields by its width, from 0 to the longest draft.

    Args:
        survival: for every row with a draft, the probabilities that its first 1, 2, ... tokens all stay.
        num_rows: rows that have not ended, with a draft or without.
        in_lockstep: whether rows advance by as many tokens as the row that is refused first.
    """
    tokens = [float(num_rows)]
    for width in range(max(map(len, survival), default=0)):
        if in_lockstep:
            if len(survival) < num_rows or min(map(len, survival)) <= width:
                break
            together = 1.0
            for row in survival:
                together *= row[width]
            tokens.append(tokens[-1] + num_rows * together)
        else:
            tokens.append(tokens[-1] + sum(row[width] for row in survival if width < len(row)))
    return tokens


def best_width(tokens: list[float], seconds: Callable[[int], float]) -> tuple[int, float]:
    """The width that yields most tokens a second, and how many those are.

    Args:
        tokens: expected by width, from 0.
        seconds: of a round, by width.
    """
    speeds = [count / seconds(width) for width, count in enumerate(tokens)]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return best, speeds[best]
