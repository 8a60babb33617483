"""Prompt lookup: copy what followed the last time the text ended like this."""

from __future__ import annotations

import numpy as np

from hf_specdec import host
from hf_specdec.chains import BULK, GAP, ChainedTokens, ChainTable, votes
from hf_specdec.drafters.base import Copy, CopySession, DraftContext, Drafter, DraftSession
from hf_specdec.drafters.lookup_on_device import DeviceLookupSession, TensorLookup
from hf_specdec.options import SpeculationOptions, check_count
from hf_specdec.schedule import copy_confidence
from hf_specdec.state import DecodeState

# With fewer rows the host's index is faster, which takes some 25 microseconds a row.
_ROWS_FOR_DEVICE = 16
PREFERENCES = ("earliest", "newest", "frequent")
# With more matches than this, only the newest vote: a longer list costs time and changes nothing.
_MOST_VOTERS = 64
_NO_LIMIT = 2**62


class PromptLookup(Drafter):
    """Drafts by copying from prompt and output: finds the longest n-gram that ends the text elsewhere in it.

    Needs no second model and drafts in microseconds; pays wherever the output repeats its input or itself
    (summaries, code edits, retrieval, translation of names). Saxena, "Prompt Lookup Decoding" (2023).

    Args:
        min_ngram: shortest tail of the text that is looked up.
        max_ngram: longest tail; longer matches win. One of the two given sets both; with neither, tails of 1
            to 4 tokens are looked up (in our measurements better than vLLM's 5 to 5, see benchmarks/README.md).
        num_draft_tokens: most tokens to copy in a round.
        tokens_per_match: most tokens to copy for every token of the match, since a longer match is a surer
            one, in calls with a fixed draft length; `None` copies `num_draft_tokens` whatever the match. Where
            lengths follow the measured record, confidence takes its place.
        prefer: which of several longest matches is copied: "earliest", "newest", or "frequent" (at every
            token, the continuation most matches agree on; the newest among equals).
        on_device: whether to look up by tensor operations where the text lives, all rows of a batch at once, instead of
            in an index on the host; the drafts are the same. Nobody then reads how sure a draft is: where lengths
            follow the measured record they are chosen by position alone, and a pass is as wide as the draft might
            be. A lookup is some hundred small operations whatever the batch, an index some 25 microseconds a row.
            `None`: on the device if that is not the CPU, the batch has 16 rows or more, and nobody else drafts.

    Raises:
        ValueError: if a window is not positive, min_ngram exceeds max_ngram, or `prefer` or `on_device` is unknown.
    """

    name = "prompt-lookup"
    default_num_draft_tokens = 15

    def __init__(
        self,
        min_ngram: int | None = None,
        max_ngram: int | None = None,
        num_draft_tokens: int | None = None,
        prefer: str = "frequent",
        tokens_per_match: int | None = 5,
        on_device: bool | None = None,
    ):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens))
        self.min_ngram, self.max_ngram = _windows(min_ngram, max_ngram)
        if prefer not in PREFERENCES:
            raise ValueError(f"prefer={prefer!r} is unknown; use one of {', '.join(PREFERENCES)}.")
        if tokens_per_match is not None:
            check_count("tokens_per_match", tokens_per_match)
        self.prefer = prefer
        if on_device not in (None, True, False):
            raise ValueError(f"on_device={on_device!r} must be True, False or None (chosen for the call).")
        self.tokens_per_match = tokens_per_match
        self.on_device = on_device

    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        """Begins a call: on the host with an empty index for every row."""
        settings = self.min_ngram, self.max_ngram, self.prefer, None if context.is_scheduled else self.tokens_per_match
        vocabulary = host.vocabulary_size(context.target)
        is_on_device = self.on_device
        if is_on_device is None:
            is_large = len(state.rows) >= _ROWS_FOR_DEVICE
            is_on_device = context.is_alone and is_large and state.device.type != "cpu"
        if is_on_device:
            return DeviceLookupSession(TensorLookup(*settings, most_voters=_MOST_VOTERS), state, vocabulary)
        return _LookupSession([NgramIndex(*settings, vocabulary) for _ in state.rows])


class _LookupSession(CopySession):
    def __init__(self, indexes: list[NgramIndex]):
        self.indexes = indexes

    def copies(self, state: DecodeState, limits: list[int]) -> list[Copy]:
        rows = zip(self.indexes, state.rows, limits, strict=True)
        return [index.copy(state.tokens[row], limit) for index, row, limit in rows]

    def keep_rows(self, places: list[int]) -> None:
        self.indexes = [self.indexes[place] for place in places]


class NgramIndex:
    """Where every n-gram of a growing text ends, for all n of a window.

    Reading a token takes the same time whatever the length of the text, and about 10 bytes for every n and one for the
    text itself.

    Args:
        min_ngram: smallest n.
        max_ngram: largest n.
        prefer: see `PromptLookup`.
        tokens_per_match: see `PromptLookup`.
        vocabulary: ids from here on stand for images and the like and are never copied; `None` for no limit.
    """

    def __init__(
        self,
        min_ngram: int,
        max_ngram: int,
        prefer: str,
        tokens_per_match: int | None = None,
        vocabulary: int | None = None,
    ):
        self.vocabulary = vocabulary or _NO_LIMIT
        self.prefer = prefer
        self.tokens_per_match = tokens_per_match
        sizes = range(max_ngram, min_ngram - 1, -1)
        self.text = ChainedTokens(sizes, margin=max_ngram + 1, only_first=prefer == "earliest")
        self.num_read = 0

    @property
    def num_bytes(self) -> int:
        """Memory that is held, reserves included."""
        return self.text.num_bytes

    def copy(self, text: list[int], limit: int) -> Copy:
        """At most `limit` tokens that followed the longest earlier match of the text's tail.

        Args:
            text: the text of the last call, grown at its end.
            limit: most tokens to return.
        """
        self._read(text)
        for table in self.text.tables if limit > 0 else ():
            size = table.length
            matches = self._voters(table, text[-size:]) if len(text) > size else None
            if matches:
                if self.tokens_per_match is not None:
                    limit = min(limit, size * self.tokens_per_match)
                return self._majority(matches, limit, size)
        return Copy([], [])

    def _read(self, text: list[int]) -> None:
        """Adds what the text has gained since the last call."""
        new = text[self.num_read :]
        self.num_read += len(new)
        if new and max(new) >= self.vocabulary:
            new = [token if token < self.vocabulary else GAP for token in new]
        self.text.append(new if len(new) < BULK else np.array(new))

    def _voters(self, table: ChainTable, tail: list[int]) -> list[int]:
        """The matches that decide how the text goes on, newest first."""
        if self.prefer == "earliest":
            return table.matches(tail)[-1:]
        return table.matches(tail, _MOST_VOTERS if self.prefer == "frequent" else 1)

    def _majority(self, matches: list[int], limit: int, size: int) -> Copy:
        """The continuation that most matches of `size` tokens share, token by token; of equals, the newest one's."""
        rows = self.text.continuations(np.array(matches), limit, runs_on=True)
        steps = list(votes(rows))
        confidences = [copy_confidence(count, total, size + step) for step, (_, count, total) in enumerate(steps)]
        return Copy([vote.token for vote in steps], confidences)


def _windows(min_ngram: int | None, max_ngram: int | None) -> tuple[int, int]:
    if min_ngram is None and max_ngram is None:
        return 1, 4
    for name, size in (("min_ngram", min_ngram), ("max_ngram", max_ngram)):
        if size is not None:
            check_count(name, size)
    smallest = max_ngram if min_ngram is None else min_ngram
    largest = min_ngram if max_ngram is None else max_ngram
    assert smallest is not None and largest is not None
    if smallest > largest:
        raise ValueError(f"min_ngram={smallest} exceeds max_ngram={largest}; the longest match must not be shorter.")
    return smallest, largest
