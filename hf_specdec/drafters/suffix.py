"""Suffix decoding: copy what most often followed such an end, in this text and in earlier outputs."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import host
from hf_specdec.chains import GAP
from hf_specdec.drafters.base import Copy, CopySession, DraftContext, Drafter
from hf_specdec.history import CopyRule, Proposal, TokenHistory
from hf_specdec.options import SpeculationOptions, check_count
from hf_specdec.paths import chain_of
from hf_specdec.schedule import copy_confidence
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.verify import TargetPass
from hf_specdec.vocabulary import Vocabulary, tokenizer_fingerprint


@dataclass(frozen=True)
class _Settings:
    """What drafters of one namespace must agree on."""

    max_tree_depth: int
    max_cached_requests: int
    max_cached_tokens: int
    rule: CopyRule

    def __post_init__(self) -> None:
        check_count("max_tree_depth", self.max_tree_depth)
        check_count("max_cached_requests", self.max_cached_requests, minimum=0)
        check_count("max_cached_tokens", self.max_cached_tokens)

    def new_history(self) -> TokenHistory | None:
        if self.max_cached_requests == 0:
            return None
        return TokenHistory(self.max_tree_depth, self.max_cached_requests, self.max_cached_tokens)


class Suffix(Drafter):
    """Drafts what most often followed the longest tails of the text, in it and in the outputs of earlier calls.

    Needs no second model. Pays where outputs repeat their input, themselves or each other: agents, code edits,
    structured answers, many requests of one kind. Drafts grow with the match and end where they get unlikely.
    Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv 2411.04975);
    options are called, and mean, what vLLM's `suffix_decoding_*` do.

    A row's output is remembered when the row has finished, for all later rounds and calls of this object; the oldest
    outputs are forgotten first. What is remembered changes the speed, never the output or its law: under sampling too a
    seed says the text, whatever was remembered. (Beside a drafter that draws its drafts, in `Auto`, it does so in the
    first call only: numbers that made an output must not judge its copies, so later calls derive others from the seed.)

    A deep copy is the drafter itself. A pickle holds its settings, not what it remembers: see `save`.

    Args:
        max_tree_depth: longest tail that is matched; also the longest draft if no length is given.
        max_cached_requests: outputs to remember; 0 looks into the row's own text only.
        max_spec_factor: most tokens to draft for every token of the match, in calls with a fixed draft length. Where
            lengths follow the measured record, confidence takes its place.
        max_spec_offset: added to that.
        min_token_prob: a draft ends where the probability that all of it is right falls below this, estimated from
            what followed the matches.
        max_cached_tokens: tokens of outputs to remember. They take about 60 bytes each at most, so that the default
            bounds them at about 240 MB.
        namespace: drafters of this process with the same namespace and settings share one memory; without it, a
            drafter's memory is its own. Nothing crosses namespaces: use one for every tenant whose outputs must
            not show in the speed of others.
        tokenizer: the target's tokenizer; a memory that belongs to another one is then refused.
        num_draft_tokens: most tokens to draft in a round.
        branches: whether drafts may be trees, which go on with every token that was often enough seen there, in the own
            text or in earlier outputs. Where the target cannot verify trees, and without it, a draft is the chain of
            the most frequent tokens, from the better of the two.

    Raises:
        ValueError: if a value is out of range, the namespace has other settings, or its memory is another tokenizer's.
    """

    name = "suffix"
    default_num_draft_tokens = 24

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        max_cached_tokens: int = 4_000_000,
        namespace: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        num_draft_tokens: int | None = None,
        branches: bool = True,
    ):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens))
        rule = CopyRule(max_spec_factor, max_spec_offset, min_token_prob)
        self.settings = _Settings(max_tree_depth, max_cached_requests, max_cached_tokens, rule)
        self.default_num_draft_tokens = max_tree_depth
        self.namespace = namespace
        if branches not in (True, False):
            raise ValueError(f"branches={branches!r} must be True or False.")
        self.branches = branches
        self._fingerprint: tuple[Any, int, str] | None = None  # of the tokenizer that was seen last
        known = Vocabulary() if tokenizer is None else Vocabulary(fingerprint=self._fingerprint_of(tokenizer))
        self.history = self._joined_memory()
        if self.history is not None:
            self.history.claim(known)

    @property
    def cached_requests(self) -> int:
        """Outputs that are remembered."""
        return 0 if self.history is None else self.history.num_requests

    @property
    def cached_tokens(self) -> int:
        """Tokens of these outputs."""
        return 0 if self.history is None else self.history.num_tokens

    @property
    def num_bytes(self) -> int:
        """Memory they take, reserves included."""
        return 0 if self.history is None else self.history.num_bytes

    def clear(self) -> None:
        """Forgets all outputs; the memory stays tied to its vocabulary."""
        if self.history is not None:
            self.history.clear()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the remembered outputs, and which vocabulary they belong to, into a folder; see `TokenHistory.save`.

        Raises:
            ValueError: if this drafter remembers nothing by its settings.
        """
        self._memory().save(folder)

    def load(self, folder: str | os.PathLike[str]) -> Suffix:
        """Puts saved outputs in place of what is remembered; see `TokenHistory.load`.

        The drafter's own settings stay as they are: they say how many of the outputs are kept and how they are used.

        Returns:
            The drafter.

        Raises:
            ValueError: if there is no usable file, or it belongs to another vocabulary.
        """
        self._memory().load(folder)
        return self

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:
        """Raises `ValueError` if the remembered outputs belong to another vocabulary."""
        if self.history is None:
            return
        belongs_to = self.history.vocabulary
        fingerprint = self._fingerprint_of(tokenizer) if belongs_to.fingerprint and tokenizer is not None else None
        belongs_to.merged(Vocabulary(host.vocabulary_size(target), fingerprint))

    def start(self, context: DraftContext, state: DecodeState) -> CopySession:
        """Begins a call. The first one ties the memory to the target's vocabulary."""
        vocabulary_size = host.vocabulary_size(context.target)
        if self.history is not None:
            self.history.claim(Vocabulary(vocabulary_size))
        rule = self.settings.rule
        if context.is_scheduled:
            rule = replace(rule, max_spec_factor=float(self.settings.max_tree_depth))
        return _SuffixSession(self, rule, vocabulary_size, state, self.branches and context.takes_trees)

    def __deepcopy__(self, memo: dict[int, Any]) -> Suffix:
        # A copy of a target that holds this drafter shares it, and what it remembers.
        return self

    def __getstate__(self) -> dict[str, Any]:
        # What is remembered belongs to this process, and may be confidential: `save` writes it, pickling does not.
        hidden = {"history": None, "_fingerprint": None}
        return super().__getstate__() | hidden

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.history = self._joined_memory()

    def _joined_memory(self) -> TokenHistory | None:
        """The namespace's memory, or an empty one of the drafter's own."""
        return self.settings.new_history() if self.namespace is None else _shared(self.namespace, self.settings)

    def _memory(self) -> TokenHistory:
        if self.history is None:
            raise ValueError("max_cached_requests=0: there are no remembered outputs. Set it to at least 1.")
        return self.history

    def _fingerprint_of(self, tokenizer: Any) -> str:
        if not hasattr(tokenizer, "get_vocab"):
            raise ValueError(f"tokenizer= must be a Transformers tokenizer, not {type(tokenizer).__name__}.")
        seen = self._fingerprint
        if seen is None or seen[0] is not tokenizer or seen[1] != len(tokenizer):
            self._fingerprint = seen = (tokenizer, len(tokenizer), tokenizer_fingerprint(tokenizer))
        return seen[2]


# Memories that are shared by name; the only thing here that outlives the drafters.
_NAMESPACES: dict[str, tuple[_Settings, TokenHistory | None]] = {}
_NAMESPACES_LOCK = threading.Lock()


def _shared(namespace: str, settings: _Settings) -> TokenHistory | None:
    if not isinstance(namespace, str) or not namespace:
        raise ValueError(f"namespace={namespace!r} must be a name; leave it out for a memory of the drafter's own.")
    with _NAMESPACES_LOCK:
        if namespace not in _NAMESPACES:
            _NAMESPACES[namespace] = settings, settings.new_history()
        known, history = _NAMESPACES[namespace]
    if known != settings:
        raise ValueError(f"namespace={namespace!r} is in use with other settings: {known}. Use these, or another name.")
    return history


class _Row:
    """A row's own text."""

    def __init__(self, prompt_length: int, max_depth: int):
        self.prompt_length = prompt_length
        self.history = TokenHistory(max_depth)
        self.num_read = 0
        self.is_remembered = False

    def read(self, text: list[int], vocabulary_size: int) -> None:
        """Adds what the text has gained. Ids that stand for images and the like must never be drafted."""
        new = text[self.num_read :]
        self.history.extend([token if 0 <= token < vocabulary_size else GAP for token in new])
        self.num_read = len(text)


class _SuffixSession(CopySession):
    """Looks every row's end up in its own text and in earlier outputs."""

    def __init__(self, drafter: Suffix, rule: CopyRule, vocabulary_size: int, state: DecodeState, branches: bool):
        self.branches = branches
        self.settings, self.rule, self.past = drafter.settings, rule, drafter.history
        self.noise_stream = 0 if self.past is None else self.past.next_reader()
        self.vocabulary_size = vocabulary_size
        self.rows = [_Row(len(state.tokens[row]), self.settings.max_tree_depth) for row in state.rows]

    def copies(self, state: DecodeState, limits: list[int]) -> list[Copy]:
        rows = zip(self.rows, state.rows, limits, strict=True)
        return [self._copy(row, state.tokens[index], limit) for row, index, limit in rows]

    def commit(self, state: DecodeState, outcome: Outcome, target_pass: TargetPass | None = None) -> None:
        if self.past is None:
            return
        for place, (row, index) in enumerate(zip(self.rows, state.rows, strict=True)):
            if outcome.finished[place] and not row.is_remembered:
                num_filling = len(outcome.appended[place]) - outcome.emitted[place]
                text = state.tokens[index]
                self.past.add(text[row.prompt_length : len(text) - num_filling])
                row.is_remembered = True

    def keep_rows(self, places: list[int]) -> None:
        self.rows = [self.rows[place] for place in places]

    def _copy(self, row: _Row, text: list[int], limit: int) -> Copy:
        """The better proposal of the own text and of earlier outputs; both of them, if that is a tree."""
        if limit <= 0:
            return Copy([], [])
        row.read(text, self.vocabulary_size)
        own = row.history.propose(None, limit, self.rule, self.branches)
        if self.past is None:
            return _as_copy(own)
        past = self.past.propose(text[-self.settings.max_tree_depth :], limit, self.rule, self.branches)
        better, other = (past, own) if past.score > own.score else (own, past)
        copy = _as_copy(better)
        if not (self.branches and other.tokens):
            return copy
        both = copy.united(_as_copy(other), limit)
        return copy if both.parents is None else both


def _as_copy(proposal: Proposal) -> Copy:
    """The proposal with a confidence for every token: of few matches and short ones, less than their share."""
    tokens, probs, num_matches, match_length, _, parents = proposal
    confidences: list[float] = []
    voters, depths = [float(num_matches)], [match_length]  # of the text, then of every token
    for share, parent in zip(probs, parents or chain_of(len(tokens)), strict=True):
        before, depth = voters[parent + 1], depths[parent + 1]
        voters.append(before * share)
        depths.append(depth + 1)
        confidences.append(copy_confidence(voters[-1], before, depth))
    return Copy(tokens, confidences, parents)
