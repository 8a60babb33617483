"""A memory of token sequences that answers one question: how did text go on after a tail like this?

Tokens lie in one array, indexed by hash chains (`chains.py`): a lookup walks a bounded number of links and compares the
places it finds with the tail.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hf_specdec.chains import BULK, GAP, ChainedTokens, ChainTable, votes
from hf_specdec.options import check_count
from hf_specdec.paths import chain_of
from hf_specdec.vocabulary import Vocabulary, read_count

_NO_TOKEN = -2  # equals nothing that is stored
_ID_LIMIT = 2**31

# The lengths k that have a table. A match of m tokens is found by the longest k <= m.
ANCHORS = (8, 3, 1)
# The newest matches of every anchor vote; older ones would cost time and say less about what comes now.
MOST_VOTERS = 64
# Links that are followed for them; the rest are hash collisions.
_MOST_VISITED = 2 * MOST_VOTERS
_SMALLEST_CAPACITY = 256

FILE_NAME = "history.safetensors"
_FORMAT, _VERSION = "hf_specdec.history", "1"


class Proposal(NamedTuple):
    """A continuation, copied from what followed the matches.

    Attributes:
        tokens: the continuation, the most frequent token at every step.
        probs: of every token, the share of the matches that got there and continued with it.
        num_matches: places that were found.
        match_length: tokens the tail and those places have in common.
        score: expected number of tokens that are right, if the shares are probabilities: the sum of their
            running products.
        parents: in a tree, which token each one follows, -1 for the tail; `None` for a chain.
    """

    tokens: list[int]
    probs: list[float]
    num_matches: int
    match_length: int
    score: float
    parents: list[int] | None = None


NOTHING = Proposal([], [], 0, 0, 0.0)
_NOBODY = np.empty((0, 0), dtype=np.int32)


@dataclass(frozen=True)
class CopyRule:
    """How much of a continuation is copied.

    Attributes:
        max_spec_factor: most tokens to copy for every token of the match.
        max_spec_offset: added to that.
        min_token_prob: copying ends where the running product of the shares falls below this.

    Raises:
        ValueError: if a value is out of range or no number.
    """

    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        _check_number("max_spec_factor", self.max_spec_factor, lowest=0)
        _check_number("max_spec_offset", self.max_spec_offset)
        _check_number("min_token_prob", self.min_token_prob, lowest=0, highest=1)

    def budget(self, match_length: int, limit: int) -> int:
        """Most tokens to copy after a match of this length; never falls when the match grows."""
        return max(0, int(min(limit, match_length * self.max_spec_factor + self.max_spec_offset)))


class TokenHistory:
    """Token sequences ("requests") in the order of their arrival, and an index over them.

    Takes about 30 to 60 bytes a token. Several threads may share one history.

    Args:
        max_depth: longest match that is recognised, in tokens.
        max_requests: with more requests, the oldest are forgotten; `None` keeps all.
        max_tokens: with more tokens, the oldest requests are forgotten, and of a single longer request all but its
            end; `None` keeps all. Only a request that grows (`extend`) may exceed it.

    Raises:
        ValueError: if a value is no positive integer.

    Attributes:
        vocabulary: what the ids belong to, as far as it is known.
    """

    _text: ChainedTokens  # in front of every request stands a gap; more may stand in it
    _oldest: int  # where the oldest remembered request begins, with its gap

    def __init__(self, max_depth: int = 24, max_requests: int | None = None, max_tokens: int | None = None):
        check_count("max_depth", max_depth)
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens)):
            if value is not None:
                check_count(name, value)
        self.max_depth, self.max_requests, self.max_tokens = max_depth, max_requests, max_tokens
        self.vocabulary = Vocabulary()
        self._num_readers = 0
        self._lock = threading.RLock()
        self._forget_everything()

    @property
    def num_requests(self) -> int:
        """Requests that are remembered."""
        return len(self._requests)

    @property
    def num_tokens(self) -> int:
        """Tokens of all remembered requests."""
        with self._lock:
            return self._text.size - self._oldest - len(self._requests)

    @property
    def num_bytes(self) -> int:
        """Memory that is held, reserves included."""
        with self._lock:
            return self._text.num_bytes + 8 * len(self._requests)

    def clear(self) -> None:
        """Forgets all requests and gives their memory back. What the ids belong to stays known."""
        with self._lock:
            self._forget_everything()

    def claim(self, vocabulary: Vocabulary) -> None:
        """Ties the history to a vocabulary; from then on, other ids are refused.

        Raises:
            ValueError: if it is tied to another one.
        """
        with self._lock:
            self.vocabulary = self.vocabulary.merged(vocabulary)

    def next_reader(self) -> int:
        """A number that none of those had who have read the history, or written what is in it; from 0.

        Saved with the history: it keeps random numbers apart that must be independent.
        """
        with self._lock:
            self._num_readers += 1
            return self._num_readers - 1

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Adds a whole request and forgets the oldest ones if there are too many; an empty one is no request.

        Args:
            tokens: ids, or `GAP` where nothing shall be matched.

        Raises:
            ValueError: if an id is negative or outside the vocabulary.
        """
        if self.max_tokens is not None:
            tokens = tokens[-self.max_tokens :]
        if len(tokens) == 0:
            return
        with self._lock:
            self._write(tokens, is_new=True)
            self._forget_oldest()

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends to the newest request, or begins the first one. Arguments and errors as in `add`."""
        if len(tokens) == 0:
            return
        with self._lock:
            self._write(tokens, is_new=not self._requests)
            self._forget_oldest()

    def propose(self, tail: Sequence[int] | None, limit: int, rule: CopyRule, with_branches: bool = False) -> Proposal:
        """The continuation with the largest score over all lengths of the match; of equals, the longer match's.

        Matches of m tokens are looked for with the longest anchor k <= m, and only the newest `MOST_VOTERS` places
        that share k tokens with the tail are looked at. At every step they vote on the next token, ties going to
        the newest place; a place where its request ended votes for nothing, but counts as one that got there.

        Args:
            tail: the text to be continued; its last `max_depth` tokens matter. `None` is the end of the newest
                request, and a copy may then run into itself, as in a repetition.
            limit: most tokens to copy.
            rule: how many of them to copy.
            with_branches: whether to go on with all tokens that were voted for, in a tree of as many tokens: those
                that most of the matches got to. The matches, and the score, are still those of the best chain.
        """
        with self._lock:
            own = tail is None
            ending = self._text.ending(self.max_depth) if tail is None else _behind_last_gap(tail[-self.max_depth :])
            chain, voters = self._best(ending, limit, rule, runs_on=own)
            is_divided = min(chain.probs, default=1.0) < 1
        if not (with_branches and is_divided):
            return chain
        tokens, probs, parents = _branches(voters.tolist(), rule.min_token_prob, voters.shape[1])
        return chain if parents == chain_of(len(tokens)) else Proposal(tokens, probs, *chain[2:5], parents)

    def _best(self, ending: list[int], limit: int, rule: CopyRule, runs_on: bool) -> tuple[Proposal, np.ndarray]:
        """The best chain, and the continuations that voted for it."""
        best, longest = (NOTHING, _NOBODY), len(ending)
        for table in self._text.tables:
            # The longest match a table stands for has the largest budget, which bounds every score.
            if table.length <= longest and rule.budget(longest, limit) > best[0].score:
                places, lengths = self._matches(table, ending)
                if len(places):
                    rows = self._text.continuations(places, rule.budget(longest, limit), runs_on)
                    best = _best_of_lengths(rows, np.minimum(lengths, longest), limit, rule, best)
            longest = min(longest, table.length - 1)
        return best

    def _matches(self, table: ChainTable, ending: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Places behind the newest matches of a table's length, newest first, and how long each match is."""
        places = np.array(table.candidates(ending, self._oldest, _MOST_VISITED), dtype=np.int64)
        if len(places) == 0:
            return places, places
        # The sentinel differs from everything, so the first difference is the length of the match.
        backwards = np.full(self.max_depth + 1, _NO_TOKEN)
        backwards[: len(ending)] = ending[::-1]
        before = self._text.array.take(places[:, None] - np.arange(1, self.max_depth + 2), mode="clip")
        lengths = (before == backwards).argmin(axis=1)
        found = (lengths >= table.length).nonzero()[0][:MOST_VOTERS]
        return places[found], lengths[found]

    def _write(self, tokens: Sequence[int] | np.ndarray, is_new: bool) -> None:
        values = self._checked_array(tokens) if len(tokens) >= BULK else self._checked_list(tokens)
        if is_new:
            self._text.reserve(len(values) + 1)
            self._requests.append(self._text.size)
            self._text.append([GAP])
        self._text.append(values)

    def _checked_list(self, tokens: Sequence[int] | np.ndarray) -> list[int]:
        try:
            values = list(map(index, tokens))
        except TypeError:
            raise ValueError(f"A history holds flat lists of token ids, not {tokens!r}.") from None
        limit = self.vocabulary.size or _ID_LIMIT
        if min(values) < GAP or max(values) >= limit:
            raise ValueError(_out_of_range(next(value for value in values if not GAP <= value < limit), limit))
        return values

    def _checked_array(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        values = np.asarray(tokens)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(f"A history holds flat lists of token ids, not {values.dtype} of shape {values.shape}.")
        limit = self.vocabulary.size or _ID_LIMIT
        if values.min() < GAP or values.max() >= limit:
            raise ValueError(_out_of_range(int(values[(values < GAP) | (values >= limit)][0]), limit))
        return values

    def _forget_everything(self) -> None:
        margin = max(self.max_depth, *ANCHORS) + 1  # gaps in front
        self._text = ChainedTokens(ANCHORS, margin, _SMALLEST_CAPACITY)
        self._requests: deque[int] = deque()  # position of the gap in front of every request
        self._margin = self._oldest = margin

    def _forget_oldest(self) -> None:
        """Keeps the limits. Forgotten requests lie in front of `_oldest`, where no lookup goes."""
        requests = self._requests
        most_requests, most_tokens = self.max_requests or math.inf, self.max_tokens or math.inf
        while len(requests) > 1 and (len(requests) > most_requests or self.num_tokens > most_tokens):
            requests.popleft()
            self._oldest = requests[0]
        num_forgotten = self._oldest - self._margin
        if num_forgotten > max(_SMALLEST_CAPACITY, self._text.size // 2):
            self._move_down(num_forgotten)

    def _move_down(self, distance: int) -> None:
        """Drops the forgotten front of the storage."""
        self._text.move_down(self._oldest, distance)
        self._requests = deque(position - distance for position in self._requests)
        self._oldest = self._margin

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokens and what they belong to into one file of a folder; the index is rebuilt on loading.

        An interrupted save leaves an earlier one as it was.

        Args:
            folder: made if it does not exist; the file in it is called `FILE_NAME`.
        """
        with self._lock:
            tokens = self._text.array[self._oldest : self._text.size].copy()
            starts = np.array(self._requests, dtype=np.int64) - self._oldest
            metadata = {"format": _FORMAT, "version": _VERSION, "readers": str(self._num_readers)}
            metadata |= self.vocabulary.to_metadata()
        lengths = np.diff(starts, append=len(tokens)) - 1
        _write_atomically(Path(folder), {"tokens": np.delete(tokens, starts), "lengths": lengths}, metadata)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Puts the requests of a saved history in place of this one's. On an error this one stays as it is.

        Args:
            folder: where a history was saved.

        Raises:
            ValueError: if there is no history, it is damaged, of another version or of another vocabulary.
        """
        path = Path(folder) / FILE_NAME
        tokens, lengths, metadata = _read(path)
        saved_vocabulary, num_readers = Vocabulary.from_metadata(metadata), read_count(metadata, "readers", minimum=0)
        with self._lock:
            vocabulary = self.vocabulary.merged(saved_vocabulary)
            _check_contents(path, tokens, lengths, vocabulary)
            self.vocabulary = vocabulary
            self._num_readers = max(self._num_readers, num_readers)
            self._forget_everything()
            tokens, lengths = _newest_of_each(tokens, lengths, self.max_tokens)
            starts = np.cumsum(lengths) - lengths
            if len(lengths):
                self._requests.extend((starts + np.arange(len(lengths)) + self._text.size).tolist())
                self._text.append(np.insert(tokens, starts, GAP))
            self._forget_oldest()


def _newest_of_each(tokens: np.ndarray, lengths: np.ndarray, most: int | None) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` tokens of every request, from its end, as `add` keeps them."""
    if most is None or not len(lengths) or lengths.max() <= most:
        return tokens, lengths
    from_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(tokens))
    return tokens[from_end <= most], np.minimum(lengths, most)


def _best_of_lengths(
    rows: np.ndarray, lengths: np.ndarray, limit: int, rule: CopyRule, best: tuple[Proposal, np.ndarray]
) -> tuple[Proposal, np.ndarray]:
    """The best of the continuations that matches of every length vote for, or `best` if none scores more.

    Args:
        rows: continuations, newest first, shape (matches, width).
        lengths: of the matches, shape (matches,).
        limit: most tokens to copy.
        rule: how many to copy.
        best: of the longer matches, and those that voted for it.
    """
    for length in sorted(set(lengths.tolist()), reverse=True):
        budget = rule.budget(length, limit)
        if budget <= best[0].score:
            break  # shorter matches have no larger budget, and no score exceeds its budget
        voters = rows[lengths >= length, :budget]
        tokens, probs = _most_frequent(voters, rule.min_token_prob)
        score = sum(_running_products(probs))
        if score > best[0].score:
            best = Proposal(tokens, probs, len(voters), length, score), voters
    return best


def _branches(voters: list[list[int]], min_token_prob: float, most: int) -> tuple[list[int], list[float], list[int]]:
    """The tokens that most voters got to, best first; of equals, what was met first.

    Args:
        voters: continuations, newest first.
        min_token_prob: share of the voters that a path must have.
        most: tokens to take.

    Returns:
        Tokens, the share of each among those that got to the one it follows, and parents.
    """
    tokens: list[int] = []
    probs: list[float] = []
    parents: list[int] = []
    ahead: list[tuple[int, int, int, int, int, float, float, list[list[int]]]] = []
    order, width = itertools.count(), len(voters[0])

    def meet(parent: int, depth: int, agreeing: list[list[int]], product: float) -> None:
        ballots: dict[int, list[list[int]]] = {}
        for voter in agreeing:
            ballots.setdefault(voter[depth], []).append(voter)
        for token, siding in ballots.items():
            share = len(siding) / len(agreeing)
            if token >= 0 and product * share >= min_token_prob:
                heappush(ahead, (-len(siding), next(order), token, parent, depth, share, product * share, siding))

    meet(-1, 0, voters, 1.0)
    while ahead and len(tokens) < most:
        _, _, token, parent, depth, share, product, siding = heappop(ahead)
        tokens.append(token)
        probs.append(share)
        parents.append(parent)
        if depth + 1 < width:
            meet(len(tokens) - 1, depth + 1, siding, product)
    return tokens, probs, parents


def _most_frequent(voters: np.ndarray, min_token_prob: float) -> tuple[list[int], list[float]]:
    """The most frequent token at every step among the rows that agree so far, and its share of them."""
    chosen: list[int] = []
    shares: list[float] = []
    remaining = 1.0
    for token, count, num_voters in votes(voters):
        share = count / num_voters
        remaining *= share
        if remaining < min_token_prob:
            break
        chosen.append(token)
        shares.append(share)
    return chosen, shares


def _running_products(probs: list[float]) -> Iterator[float]:
    product = 1.0
    for prob in probs:
        product *= prob
        yield product


def _behind_last_gap(tail: Sequence[int]) -> list[int]:
    tokens = list(tail)
    gaps = [place for place, token in enumerate(tokens) if token < 0]
    return tokens[gaps[-1] + 1 :] if gaps else tokens


def _out_of_range(token: int, limit: int) -> str:
    return f"Token id {token} cannot be stored: ids must be at least 0 and below {limit}."


def _check_number(name: str, value: Any, lowest: float = -math.inf, highest: float = math.inf) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and lowest <= value <= highest:
        return
    borders = [f"of at least {lowest}"] * (lowest > -math.inf) + [f"of at most {highest}"] * (highest < math.inf)
    raise ValueError(f"{name}={value!r} must be a finite number{' ' if borders else ''}{' and '.join(borders)}.")


def _write_atomically(folder: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes a file beside the old one, then puts it in its place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as reason:
        raise ValueError(f"{folder} is a file; name a folder to save the history in.") from reason
    unfinished = folder / f".{FILE_NAME}.{os.getpid()}.{threading.get_ident()}"
    try:
        save_file(tensors, unfinished, metadata)
        os.replace(unfinished, folder / FILE_NAME)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    """Tokens, lengths of the requests and header of a saved history."""
    if not path.is_file():
        raise ValueError(f"There is no saved history: {path} does not exist.")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            if metadata.get("format") != _FORMAT or names != {"tokens", "lengths"}:
                raise ValueError(f"{path} is no history of this package; it was written by something else.")
            if metadata.get("version") != _VERSION:
                raise ValueError(
                    f"{path} has version {metadata.get('version')} and this release reads version {_VERSION}. "
                    "Save it anew with the release that reads it now, or begin with an empty history."
                )
            return file.get_tensor("tokens"), file.get_tensor("lengths"), metadata
    except SafetensorError as reason:
        raise ValueError(
            f"{path} is damaged or no safetensors file ({reason}); delete it or restore a copy."
        ) from reason


def _check_contents(path: Path, tokens: np.ndarray, lengths: np.ndarray, vocabulary: Vocabulary) -> None:
    flat = tokens.ndim == lengths.ndim == 1 and tokens.dtype == np.int32 and lengths.dtype == np.int64
    if not flat or (lengths < 1).any() or lengths.sum() != len(tokens):
        raise ValueError(
            f"{path} is damaged: its requests have {lengths.sum()} tokens by their lengths ({lengths.dtype}, shape "
            f"{lengths.shape}), and {tokens.dtype} of shape {tokens.shape} are stored. Delete it or restore a copy."
        )
    limit = vocabulary.size or _ID_LIMIT
    wrong = tokens[(tokens < GAP) | (tokens >= limit)]
    if len(wrong):
        raise ValueError(f"{path} holds token id {wrong[0]}, outside the vocabulary of {limit} ids; delete it.")
