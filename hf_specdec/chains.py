"""Tokens in one array, with tables that lead from a k-gram to the places where it stands; and votes among such places.

Works like the match finder of LZ77 compressors (hash chains), not like a tree: for a few lengths k a table leads from
the hash of a k-gram to its newest place, from which links lead to the older ones. Writing a token is a handful of
integer operations, whatever the number of tokens; whoever follows the links compares tokens, so hash collisions cost
time and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import mul
from typing import NamedTuple

import numpy as np

# Stands where nothing shall be matched: nothing equals it, nothing is copied across it.
GAP = -1

# Shorter additions are entered token by token, which is then faster than a dozen numpy calls.
BULK = 64
# Longer ones are entered piece by piece, which bounds the memory of the intermediate results.
_CHUNK = 2**18

# k-grams are hashed by a polynomial over 32-bit integers; its upper bits are well mixed (Knuth's multiplicative hash).
_HASH_BITS = 32
_MASK = 2**_HASH_BITS - 1
_MULTIPLIER = 0x9E3779B1


class ChainedTokens:
    """Tokens in one growing array, and a table of chains for each of some lengths.

    Args:
        lengths: the lengths k that have a table.
        margin: gaps in front, more than any length that is compared: looking back then always stays inside.
        capacity: places there is room for at first.
        only_first: whether the tables hold the oldest of equal k-grams alone (now and then another one too).

    Attributes:
        array: the tokens, int32; every place that holds none is a gap.
        size: where the next token goes.
        stretch: where the tokens behind the last gap begin.
        tables: one for each length, in the same order.
    """

    array: np.ndarray

    def __init__(self, lengths: Sequence[int], margin: int, capacity: int = 256, only_first: bool = False):
        self.array = np.full(max(capacity, 2 * margin), GAP, dtype=np.int32)
        self.tables = [ChainTable(length, len(self.array), only_first) for length in lengths]
        self.size = self.stretch = margin
        self._renew_views()

    @property
    def num_bytes(self) -> int:
        """Memory that is held, reserves included."""
        return self.array.nbytes + sum(table.num_bytes for table in self.tables)

    def append(self, values: list[int] | np.ndarray) -> None:
        """Appends tokens or gaps; arrays in a few passes over all of them, lists one by one."""
        self.reserve(len(values))
        if isinstance(values, np.ndarray):
            self._push_many(values)
        else:
            self._push(values)

    def ending(self, most: int) -> list[int]:
        """The last tokens, as many as there are behind the last gap and at most `most`."""
        return self.view[max(self.stretch, self.size - most) : self.size].tolist()

    def continuations(self, places: np.ndarray, width: int, runs_on: bool) -> np.ndarray:
        """The tokens from every place on, (places, width); what comes behind a gap has no meaning.

        Args:
            places: in front of the end, shape (places,).
            width: tokens to take.
            runs_on: whether behind the end stands the copy itself, as in a repetition.
        """
        steps = np.arange(width)
        if runs_on:  # the copy agrees with this place wherever it is asked
            steps = steps % (self.size - places[:, None])
        return self.array.take(places[:, None] + steps, mode="clip")

    def reserve(self, num_more: int) -> None:
        """Makes room; one place behind the last token always remains a gap."""
        capacity = len(self.array)
        if self.size + num_more < capacity:
            return
        while self.size + num_more >= capacity:
            capacity *= 2
            for table in self.tables:
                table.double()
        array = np.full(capacity, GAP, dtype=np.int32)
        array[: self.size] = self.array[: self.size]
        self.array = array
        self._renew_views()

    def move_down(self, oldest: int, distance: int) -> None:
        """Drops what lies in front of `oldest`, which moves down by `distance` like everything behind it."""
        live, moved = slice(oldest, self.size), slice(oldest - distance, self.size - distance)
        self.array[moved] = self.array[live].copy()
        self.array[moved.stop :] = GAP
        for table in self.tables:
            table.move_down(live, moved, distance)
        self.size, self.stretch = moved.stop, self.stretch - distance

    def _push(self, values: list[int]) -> None:
        first, num_before = self.size, self.size - self.stretch
        for position, token in enumerate(values, start=first):
            self.view[position] = token
            if token < 0:
                self.stretch = position + 1
        self.size += len(values)
        for table in self.tables:
            table.push(values, first, num_before)

    def _push_many(self, values: np.ndarray) -> None:
        """The same as `_push` of every value, in a few passes over all of them."""
        first, self.size = self.size, self.size + len(values)
        self.array[first : self.size] = values
        gaps = (values < 0).nonzero()[0]
        if len(gaps):
            self.stretch = first + int(gaps[-1]) + 1
        for table in self.tables:
            table.push_many(first, self.size, self.stretch)

    def _renew_views(self) -> None:
        # Single numbers are read and written through memoryviews, which is three times as fast.
        self.view = self.array.data
        for table in self.tables:
            table.tokens, table.view = self.array, self.view


class ChainTable:
    """Where the k-grams of one length k are that have a successor: a bucket's newest, and from each the next older.

    A k-gram is named by the position behind it, where its continuation begins; 0 ends a chain.

    Args:
        length: k.
        capacity: positions there is room for; also the number of buckets, a power of two or any number.
        only_first: whether to enter only k-grams that are not in the table yet. (In bulk, those of earlier additions
            are entered once more, which is harmless: the oldest one comes last in its chain.)
    """

    tokens: np.ndarray
    view: memoryview

    def __init__(self, length: int, capacity: int, only_first: bool = False):
        self.length, self.only_first = length, only_first
        self.bucket_bits = (capacity - 1).bit_length()
        self.heads = np.zeros(2**self.bucket_bits, dtype=np.int32)
        self.previous = np.zeros(capacity, dtype=np.int32)
        self.factors = [pow(_MULTIPLIER, power + 1, 2**_HASH_BITS) for power in range(length + 1)]  # newest token first
        self.rolled = 0  # hash of the newest tokens
        self._renew_views()

    @property
    def num_bytes(self) -> int:
        """Memory that is held, reserves included."""
        return self.heads.nbytes + self.previous.nbytes

    def _renew_views(self) -> None:
        self.shift = _HASH_BITS - self.bucket_bits
        self.heads_view, self.previous_view = self.heads.data, self.previous.data

    def candidates(self, ending: list[int], oldest: int, most: int) -> list[int]:
        """Positions whose k-gram shares a bucket with the ending's last k tokens, newest first, down to `oldest`."""
        found: list[int] = []
        previous = self.previous_view
        position = self.heads_view[self._hash(ending) >> self.shift]
        while position > oldest and len(found) < most:
            found.append(position)
            position = previous[position]
        return found

    def matches(self, gram: list[int], most: int | None = None) -> list[int]:
        """Positions behind k tokens equal to these, newest first; only the newest `most`."""
        found: list[int] = []
        previous, view, length, newest = self.previous_view, self.view, self.length, gram[-1]
        position = self.heads_view[self._hash(gram) >> self.shift]
        while position and len(found) != most:
            if view[position - 1] == newest and view[position - length : position].tolist() == gram:
                found.append(position)
            position = previous[position]
        return found

    def push(self, values: list[int], position: int, num_before: int) -> None:
        """Enters the k-grams that are followed by these tokens; `num_before` tokens lie behind the last gap."""
        heads, previous, view, length, shift = self.heads_view, self.previous_view, self.view, self.length, self.shift
        rolled, leaving, enters_all = self.rolled, self.factors[length], not self.only_first
        for place, token in enumerate(values, start=position):
            if token < 0:
                rolled, num_before = 0, -1
            elif num_before < length:
                rolled = (rolled + token) * _MULTIPLIER & _MASK
            else:
                bucket = rolled >> shift
                if enters_all or not self.matches(view[place - length : place].tolist(), 1):
                    previous[place] = heads[bucket]
                    heads[bucket] = place
                rolled = ((rolled + token) * _MULTIPLIER - view[place - length] * leaving) & _MASK
            num_before += 1
        self.rolled = rolled

    def push_many(self, first: int, last: int, stretch: int) -> None:
        """`push` for the tokens in [first, last), which are stored already; behind `stretch` there is no gap."""
        for begin in range(first, last, _CHUNK):
            positions = self._enterable(begin, min(begin + _CHUNK, last))
            if len(positions):
                hashes = self._hashes(positions)
                if self.only_first:
                    hashes, positions = self._firsts(hashes, positions)
                self._enter(positions, (hashes >> np.uint32(self.shift)).astype(np.int64))
        self.rolled = self._hash(self.view[max(stretch, last - self.length) : last].tolist())

    def double(self) -> None:
        """Doubles positions and buckets. Bucket b becomes 2b and 2b + 1, and both begin with the chain b had."""
        self.previous = np.concatenate([self.previous, np.zeros_like(self.previous)])
        self.heads = np.repeat(self.heads, 2)
        self.bucket_bits += 1
        self._renew_views()

    def move_down(self, live: slice, moved: slice, distance: int) -> None:
        """Moves all positions; chains end where they led out of the live part."""
        self.previous[moved] = np.maximum(self.previous[live] - distance, 0)
        np.maximum(self.heads - distance, 0, out=self.heads)

    def _enterable(self, first: int, last: int) -> np.ndarray:
        """Positions in [first, last) with k tokens before them and a token behind, no gap among these."""
        clean = self.tokens[first - self.length : last] >= 0
        enterable = clean[self.length :].copy()
        for back in range(self.length):
            enterable &= clean[back : back + last - first]
        return enterable.nonzero()[0] + first

    def _hash(self, ending: list[int]) -> int:
        return sum(map(mul, reversed(ending), self.factors[: self.length])) & _MASK

    def _hashes(self, positions: np.ndarray) -> np.ndarray:
        hashes = np.zeros(len(positions), dtype=np.uint32)
        unsigned = self.tokens.view(np.uint32)
        for back, factor in enumerate(self.factors[: self.length]):
            hashes += unsigned[positions - 1 - back] * np.uint32(factor)
        return hashes

    def _firsts(self, hashes: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Without those whose k-gram stands at an earlier one of the positions, if the first of its hash is meant."""
        _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
        earliest = positions[first][group]
        differs = np.zeros(len(positions), dtype=bool)
        for distance in range(1, self.length + 1):
            differs |= self.tokens[positions - distance] != self.tokens[earliest - distance]
        is_kept = differs | (earliest == positions)
        return hashes[is_kept], positions[is_kept]

    def _enter(self, positions: np.ndarray, buckets: np.ndarray) -> None:
        """Links positions of the same bucket, each to the next older one."""
        # Sorted by bucket, then position: one sort of unique numbers is faster than a stable argsort.
        keys = np.sort(buckets << 32 | positions)
        buckets, positions = keys >> 32, keys & 0xFFFFFFFF
        is_first = np.append(True, buckets[1:] != buckets[:-1])
        older = np.where(is_first, self.heads[buckets], np.append(0, positions[:-1]))
        self.previous[positions] = older
        is_last = np.append(is_first[1:], True)
        self.heads[buckets[is_last]] = positions[is_last]


class Vote(NamedTuple):
    """How the places that agree so far go on.

    Attributes:
        token: what most of them go on with.
        votes: how many do.
        num_voters: how many places got there.
    """

    token: int
    votes: int
    num_voters: int


def votes(voters: np.ndarray) -> Iterator[Vote]:
    """One vote after the other on the next token: the most frequent one; of equals, that of the newest place.

    Args:
        voters: continuations, newest first, shape (places, width). A place that disagrees, or has come to a gap, votes
            no more.
    """
    step, width = 0, voters.shape[1]
    while step < width:
        # As long as half of the voters side with the newest one, it wins: then nobody has to be counted.
        newest = voters[0, step:].tolist()
        agree = np.logical_and.accumulate(voters[:, step:] == voters[0, step:], axis=1)
        num_before, run = len(voters), 0
        for token, num_agreeing in zip(newest, agree.sum(axis=0).tolist(), strict=True):
            if token < 0 or 2 * num_agreeing < num_before:
                break
            yield Vote(token, num_agreeing, num_before)
            num_before, run = num_agreeing, run + 1
        if step + run == width:
            return
        voters = voters[agree[:, run - 1]] if run else voters
        step += run
        column = voters[:, step].tolist()
        ballots = Counter(token for token in column if token >= 0)
        if not ballots:
            return
        winner, count = ballots.most_common(1)[0]  # of equals the first one met, which is the newest
        yield Vote(winner, count, len(column))
        voters = voters[voters[:, step] == winner]
        step += 1
