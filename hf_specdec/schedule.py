"""How long a draft pays: the tokens a round is expected to yield over the seconds such rounds have taken.

What is learned is kept apart from what is decided. `Experience` holds counts and seconds and lives as long as the
drafter; `expected_tokens` and `best_width` are pure functions. Nothing here looks at the value of a sampled token:
decisions rest on earlier rounds and on confidences that are functions of the text alone, so the law of the output
stays what it is.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# Older outcomes fade once a rate has seen this many, so that it follows the text.
_MEMORY = 32.0
_NUM_BINS = 20
# Seconds of a width: the median of this many newest measurements.
_RECENT = 9
# A single measurement that exceeds the lowest by this factor is no guide (a compilation, a page fault).
_OUTLIER = 5.0
# What a round may exceed its expected seconds by before that is put down to the machine.
_SURPRISE = 1.5
# What a token costs, as a share of a plain round, as long as too little was measured: one copied, one drafted.
_COPY_SLOPE, _DRAFT_SLOPE = 0.02, 0.1
# A draft must promise so much more than a round without one: of many estimates the highest is likely to be too high.
_LEAST_GAIN = 1.05
# Rounds that `Keep` remembers, asks before its first verdict and in later trials, and rests.
_SHORT_MEMORY, _FIRST_TRIAL, _TRIAL = 24, 32, 4
_SHORTEST_REST, _LONGEST_REST = 8, 64
# How fast a row that is ahead loses its weight: by this times its lead as a share of what the shortest may still get.
_HURRY = 8.0
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


class Rate:
    """A probability that follows its outcomes.

    Args:
        guess: the estimate before any outcome.
        weight: how many outcomes the guess counts for.
    """

    def __init__(self, guess: float, weight: float):
        self.hits = guess * weight
        self.tries = weight

    @property
    def value(self) -> float:
        """The estimate."""
        return self.hits / self.tries

    def add(self, hit: float) -> None:
        """Counts one outcome: whether it was one, or to what part."""
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
    """Seconds of a round by its width, the longest draft in it: on a line through what was measured at each width.

    Args:
        slope: guessed cost of a token, as a share of a round without a draft, until two widths were measured.
    """

    def __init__(self, slope: float):
        self.slope = slope
        self.measured: dict[int, deque[float]] = {}
        self.doubted: set[int] = set()  # widths of which one measurement did not count
        self.line: tuple[float, float] | None = None  # seconds at width 0, and per drafted token
        self._lock = threading.Lock()  # several calls may share a drafter

    def add(self, width: int, seconds: float) -> None:
        """Notes how long a round took.

        Once the line is well founded, a round far above it is put down to the machine: the first of a new width does
        not count, and others count no more than a surprise may, so that a dearer round is believed step by step.
        """
        with self._lock:
            if sum(map(len, self.measured.values())) >= _RECENT:
                most = _SURPRISE * self.at(width, plain=0.0)
                if seconds > most and width not in self.measured.keys() | self.doubted:
                    self.doubted.add(width)
                    return
                seconds = min(seconds, most)
            self.measured.setdefault(width, deque(maxlen=_RECENT)).append(seconds)
            self.line = self._fitted()

    def at(self, width: int, plain: float) -> float:
        """Expected seconds at a width, no less than those of a round without a draft."""
        if self.line is None:
            return plain * (1 + self.slope * width)
        return max(plain, self.line[0] + self.line[1] * width)

    def _fitted(self) -> tuple[float, float]:
        """Least squares, weighted by the number of measurements."""
        points = self._points()
        total = sum(weight for *_, weight in points)
        centre = sum(width * weight for width, _, weight in points) / total
        level = sum(seconds * weight for _, seconds, weight in points) / total
        spread = sum(weight * (width - centre) ** 2 for width, _, weight in points)
        if spread == 0:
            rise = self.slope * level / (1 + self.slope * centre)
        else:
            rise = sum(weight * (width - centre) * (seconds - level) for width, seconds, weight in points) / spread
        # A longer draft never counts as cheaper; the bound above keeps the line positive at width 0.
        rise = min(max(rise, 0.0), level / (centre + 1))
        return level - rise * centre, rise

    def _points(self) -> list[tuple[int, float, int]]:
        """Every width with its seconds and the number of measurements."""
        # Of two measurements the lower one counts: the first may have compiled or loaded something.
        points = [(width, statistics.median_low(values), len(values)) for width, values in self.measured.items()]
        lowest = min(seconds for _, seconds, _ in points)
        return [point for point in points if point[2] > 1 or point[1] <= _OUTLIER * lowest]


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

    def paid(self) -> None:
        """It pays, or might again: the next pause will be short."""
        self.idle, self.pause = 0, _SHORTEST_PAUSE


class Keep:
    """Whether a drafter that copies earns its keep: the tokens that only it had against the time it takes.

    Attributes:
        gain: share of a round's tokens that no drafter before it had, lately and on average.
        cost: share of a round's seconds that asking and teaching it have taken, likewise.
    """

    def __init__(self) -> None:
        self.gain = self.cost = 0.0
        self.num_asked = self.rest = 0
        self.trial, self.pause = _FIRST_TRIAL, _SHORTEST_REST

    def is_resting(self) -> bool:
        """Counts a round; whether it is one of a rest, in which nobody asks or teaches the drafter."""
        self.rest -= 1
        return self.rest >= 0

    def asked(self, gain: float, cost: float) -> None:
        """Notes a round in which it was asked; begins a rest if its keep is not earned, a longer one every time."""
        self.num_asked += 1
        self.trial -= 1
        weight = 1 / min(self.num_asked, _SHORT_MEMORY)
        self.gain += weight * (gain - self.gain)
        self.cost += weight * (cost - self.cost)
        if self.gain >= self.cost:
            self.pause = _SHORTEST_REST
        elif self.trial <= 0:
            self.rest, self.trial, self.pause = self.pause, _TRIAL, min(2 * self.pause, _LONGEST_REST)


# Names that no drafter has: rounds without a draft, and rounds of all drafters that cost nothing.
PLAIN, FREE = "(plain)", "(free)"


class Load(NamedTuple):
    """What the cost of a round depends on beside its width.

    Attributes:
        num_rows: rows in the target's pass.
        size: of the text that has been read, in steps of which two double it.
    """

    num_rows: int
    size: int = 0

    @classmethod
    def of(cls, num_rows: int, num_tokens: int) -> Load:
        """The load of rows of which the longest has so many tokens."""
        return cls(num_rows, round(2 * math.log2(max(1, num_tokens))))


class Experience:
    """What the rounds of a drafter's arms with one target have taught; kept over calls."""

    def __init__(self) -> None:
        self.acceptance: dict[str, Acceptance] = {}
        self.trials: dict[str, Trials] = {}
        self.keeps: dict[tuple[str, int], Keep] = {}
        self.round_seconds: dict[tuple[str, Load], RoundSeconds] = {}

    def acceptance_of(self, arm: str) -> Acceptance:
        """The acceptance rates of an arm."""
        return self.acceptance.setdefault(arm, Acceptance())

    def trials_of(self, arm: str) -> Trials:
        """The trials of an arm, or of `PLAIN` rounds."""
        return self.trials.setdefault(arm, Trials())

    def keep_of(self, arm: str, num_rows: int) -> Keep:
        """What an arm that copies is worth in batches of about so many rows: 1, 2, 3 to 4, 5 to 8, ..."""
        return self.keeps.setdefault((arm, (num_rows - 1).bit_length()), Keep())

    def is_measured(self, arm: str, load: Load) -> bool:
        """Whether seconds of an arm, or of `PLAIN` rounds, are known under a load."""
        return self._line(arm, load).line is not None

    def record_seconds(self, arm: str, load: Load, width: int, seconds: float) -> None:
        """Notes how long a round took, everything included.

        Args:
            arm: who drafted with passes of its own; `FREE` or `PLAIN` if nobody did.
            load: of the round.
            width: longest draft; of the arm's own, if it has passes.
            seconds: of the round.
        """
        if seconds > 0:  # else the clock is too coarse
            self.round_seconds.setdefault((arm, load), _unmeasured(arm)).add(width, seconds)

    def seconds(self, arm: str, load: Load, longest: int) -> Callable[[int], float]:
        """Expected seconds of a round by its width; in units of a plain round if nothing was measured yet.

        Args:
            arm: whose passes it pays for, or `FREE`.
            load: of the round. What was measured under the nearest one stands in as long as nothing else is known.
            longest: most tokens the arm drafts. Copies beside it may be longer and cost what they cost without it.
        """
        load = self.nearest(arm, load)
        plain = self._plain(load)
        own, copies = self._line(arm, load), self._line(FREE, load)

        def at(width: int) -> float:
            drafted = min(width, longest)
            beyond = copies.at(width, plain) - copies.at(drafted, plain)
            return own.at(drafted, plain) + beyond if width else plain

        return at

    def nearest(self, arm: str, load: Load) -> Load:
        """The nearest load of so many rows under which the arm was measured, and if possible `PLAIN` rounds too."""
        known = list(self.round_seconds)
        measured = [other for name, other in known if name == arm and other.num_rows == load.num_rows]
        comparable = [other for other in measured if (PLAIN, other) in known]
        return min(comparable or measured, key=lambda other: abs(other.size - load.size), default=load)

    def _line(self, arm: str, load: Load) -> RoundSeconds:
        return self.round_seconds.get((arm, load)) or _unmeasured(arm)

    def _plain(self, load: Load) -> float:
        """Seconds of a round without a draft; where none was measured, of one with a copy of no length."""
        for name in (PLAIN, FREE):
            if self.is_measured(name, load):
                return self._line(name, load).at(0, plain=0.0)
        return 1.0


def _unmeasured(arm: str) -> RoundSeconds:
    return RoundSeconds(_COPY_SLOPE if arm in (PLAIN, FREE) else _DRAFT_SLOPE)


# --- what is decided --------------------------------------------------------------------------------------


def row_weights(num_emitted: list[int], num_left: int) -> list[float]:
    """What a token is worth in every row, from 0 to 1.

    A batch takes as long as the row that ends last. As long as rows may end anywhere, that may be any of them; the
    nearer the end of the room, the surer it is one that lags behind.

    Args:
        num_emitted: tokens that every row has.
        num_left: most tokens that the shortest of them can still get.
    """
    shortest = min(num_emitted, default=0)
    return [math.exp(-_HURRY * (count - shortest) / max(1, num_left)) for count in num_emitted]


def expected_tokens(survival: list[list[float]], weights: list[float], in_lockstep: bool) -> list[float]:
    """Tokens a round yields by its width, from 0 to the longest draft, each counted with the weight of its row.

    Args:
        survival: for every row that has not ended, the probabilities that its first 1, 2, ... drafted tokens all stay.
        weights: of these rows.
        in_lockstep: whether rows advance by as many tokens as the row that is refused first.
    """
    tokens = [sum(weights)]
    widest = (min if in_lockstep else max)(map(len, survival), default=0)
    for width in range(widest):
        if in_lockstep:
            tokens.append(tokens[-1] + sum(weights) * math.prod(row[width] for row in survival))
        else:
            pairs = zip(survival, weights, strict=True)
            tokens.append(tokens[-1] + sum(weight * row[width] for row, weight in pairs if width < len(row)))
    return tokens


def best_width(tokens: list[float], seconds: Callable[[int], float]) -> tuple[int, float]:
    """The width that yields most tokens a second, and how many those are; 0 if none is clearly better.

    Args:
        tokens: expected by width, from 0.
        seconds: of a round, by width.
    """
    speeds = [count / seconds(width) for width, count in enumerate(tokens)]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return (best, speeds[best]) if speeds[best] >= _LEAST_GAIN * speeds[0] else (0, speeds[0])
