"""Drafting with a model whose tokens are not the target's.

Two ways, both after Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies" (arXiv 2502.05202):

- "tli", token-level intersection: the draft model's scores are cut down to the tokens that both know and renormalised
  before a token is drawn, so the law that the verifier is told, in the target's ids, is the law drawn from.
- "slem", string-level exact match: the draft model writes on greedily in its own tokens, and the target's tokenizer
  says what that is in the target's. Such a draft is a function of the text, so it is judged as a point mass.

Which one drafts for a row follows from what became of its earlier drafts, never from the draft at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.cached_model import CachedModel
from hf_specdec.drafters.base import DraftContext, DraftSession
from hf_specdec.drafters.drawing import Drawing, chain
from hf_specdec.drafters.translation import Reading, Translation
from hf_specdec.noise import RoundNoise
from hf_specdec.schedule import Rate, Trials
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.verify import TargetPass
from hf_specdec.vocabulary import DraftVocabularyLogitsProcessor

TOKENS, STRINGS = "tli", "slem"
METHODS = (TOKENS, STRINGS)
# Share of the wanted tokens that stayed in measured pairs (benchmarks/README.md), in greedy calls and in sampled ones,
# and how many drafts of a text it counts for.
_MEASURED = {False: {TOKENS: 0.29, STRINGS: 0.37}, True: {TOKENS: 0.15, STRINGS: 0.21}}
_WEIGHT = 3.0


class SharedTokens:
    """Brings a draft model's logits to the target's ids; only tokens that both know can be drafted.

    Args:
        to_target: for every id of the draft model its image among the target's ids, or -1.
        num_scored: ids that the draft model scores.
        vocabulary: V, ids that the target scores.

    Attributes:
        num: ids of the draft model that can be drafted.
    """

    def __init__(self, to_target: list[int], num_scored: int, vocabulary: int):
        images = torch.tensor(to_target[:num_scored], dtype=torch.long)
        self.own = ((images >= 0) & (images < vocabulary)).nonzero()[:, 0]
        self.images = images[self.own]
        self.vocabulary, self.num = vocabulary, len(self.own)
        self.is_injective = len(self.images.unique()) == self.num
        # Of several that spell the same, the first is what the draft model reads of it.
        self.back = torch.zeros(vocabulary, dtype=torch.long).index_copy(0, self.images.flip(0), self.own.flip(0))
        self.restrict = DraftVocabularyLogitsProcessor(self.own) if self.num else None

    def to(self, device: torch.device) -> SharedTokens:
        """The same, kept on a device."""
        self.own, self.images, self.back = (index.to(device) for index in (self.own, self.images, self.back))
        return self

    def of_target(self, logits: Tensor) -> Tensor:
        """Logits (A, V of the draft model) -> log-probabilities (A, V of the target), -inf for all other tokens."""
        assert self.restrict is not None
        kept = self.restrict(self.own, logits.float())[:, self.own]  # (A, K)
        if self.is_injective:
            return kept.new_full((len(kept), self.vocabulary), -torch.inf).index_copy(1, self.images, kept)
        return kept.new_zeros(len(kept), self.vocabulary).index_add(1, self.images, kept.exp()).log()

    def of_draft(self, tokens: Tensor) -> Tensor:
        """The draft model's ids of drafted tokens."""
        return self.back[tokens.to(self.back.device)]


class Choice:
    """Which method drafts next: the one whose drafts stay more often, now and then the other.

    Args:
        methods: to choose from.
        do_sample: whether the call samples; before anything was drafted, what was measured in such calls counts.
    """

    def __init__(self, methods: tuple[str, ...], do_sample: bool):
        self.rates = {method: Rate(_MEASURED[do_sample][method], _WEIGHT) for method in methods}
        self.trials = Trials()
        self.method = methods[0]

    def decide(self) -> None:
        """Begins a round."""
        wanted = max if not self.trials.is_due() else min
        self.method = wanted(self.rates, key=lambda method: self.rates[method].value)

    def learn(self, accepted: int, asked: int) -> None:
        """Counts the outcome of a row's draft."""
        self.rates[self.method].add(accepted / asked)


class CrossVocabularySession(DraftSession):
    """Keeps the draft model's cache in step with the rows' text, which it reads in its own tokens.

    The cache keeps tokens that are settled; the last word is read again in every round, since its tokens may change.

    Args:
        model: a decoder-only model.
        translation: between its tokenizer and the target's.
        choices: what has been learned of the methods, one a row; rows may share one.
        context: of the call.
        state: of the call.

    Raises:
        ValueError: if the model cannot serve several rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        translation: Translation,
        choices: list[Choice],
        context: DraftContext,
        state: DecodeState,
    ):
        cache, limit, num_rows = host.new_cache(model), host.max_positions(model), len(state.rows)
        host.refuse_cache(cache, is_filled=False)
        if num_rows > 1 and not (host.accepts_position_ids(model) and host.can_be_ragged(cache)):
            raise ValueError(
                f"{type(model).__name__} cannot draft for several rows in other tokens than the target's: they would "
                "have to have one length. Generate one row at a time, or use another drafter."
            )
        self.translation, self.choices = translation, choices
        self.device = host.device_of(model) or state.device
        self.reader = CachedModel(model, cache, host.draft_arguments(model), num_rows, self.device, limit)
        self.context_length = limit or 2**62
        self.drawing = Drawing(context, state, self.device)
        sizes = host.vocabulary_size(model), host.vocabulary_size(context.target)
        self.shared = SharedTokens(translation.to_target, *sizes).to(self.device)
        self.num_embeddings = host.num_embeddings(model)
        self.num_known = min(len(translation.draft.pieces), sizes[0])
        self.vocabulary = sizes[1]
        self.readings = [Reading(translation) for _ in state.rows]
        self.read: list[list[int]] = [[] for _ in state.rows]  # what the cache holds
        self.drafted: Tensor | None = None  # tokens read in this round behind the text, (A, N - 1)
        self.asked = [0] * num_rows

    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        self.asked = limits = self.within_context(state, limits)
        if max(limits) == 0:
            return Draft.empty(len(limits), state.device)
        for choice in {id(choice): choice for choice in self.choices}.values():
            choice.decide()
        writes = [choice.method == STRINGS for choice in self.choices]
        own, tokens, laws = self._run(state, max(limits), noise, writes)
        self.drafted = own[:, :-1]
        if not any(writes):
            return chain(tokens, laws, limits, state.device)
        drafted = Draft.empty(len(limits), state.device) if all(writes) else chain(tokens, laws, limits, state.device)
        return self._with_text(drafted, own.tolist(), state, limits, writes)

    def within_context(self, state: DecodeState, limits: list[int]) -> list[int]:
        lengths = [len(ids) for ids in self._texts(state)]
        return [max(0, min(k, self.context_length - n)) for k, n in zip(limits, lengths, strict=True)]

    def commit(self, state: DecodeState, outcome: Outcome, target_pass: TargetPass | None = None) -> None:
        if self.drafted is None:  # no row drafted in this round
            return
        for choice, asked, accepted in zip(self.choices, self.asked, outcome.accepted, strict=True):
            if asked:
                choice.learn(accepted, asked)
        held = [read + new for read, new in zip(self.read, self.drafted.tolist(), strict=True)]
        self.drafted = None
        texts, done = self._texts(state), self.reader.num_committed
        # At least one settled token is read again, so that every row has one to read.
        limits = [len(reading.settled) - 1 for reading in self.readings]
        keep = [max(0, min(n, _num_equal(h, t))) for n, h, t in zip(limits, held, texts, strict=True)]
        # Every row re-reads as many tokens as the row that needs most: a block without holes.
        num_pending = max(len(text) - kept for text, kept in zip(texts, keep, strict=True))
        pairs = zip(texts, keep, done, strict=True)
        keep = [max(committed, min(kept, len(text) - num_pending)) for text, kept, committed in pairs]
        self.reader.commit([kept - committed for kept, committed in zip(keep, done, strict=True)])
        self.read = [text[:kept] for text, kept in zip(texts, keep, strict=True)]

    def keep_rows(self, places: list[int]) -> None:
        self.reader.keep_rows(places)
        self.choices = [self.choices[place] for place in places]
        self.readings = [self.readings[place] for place in places]
        self.read = [self.read[place] for place in places]

    def _texts(self, state: DecodeState) -> list[list[int]]:
        """Every row's text in the draft model's tokens."""
        for reading, row in zip(self.readings, state.rows, strict=True):
            reading.extend(state.tokens[row][reading.num_read :])
        return [reading.ids for reading in self.readings]

    def _run(
        self, state: DecodeState, count: int, noise: RoundNoise | None, writes: list[bool]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Runs the draft model `count` steps.

        Args:
            state: the rows.
            count: N.
            noise: of the round.
            writes: in which rows it writes its own tokens; in the others it draws shared ones.

        Returns:
            Its own tokens (A, N); the target's tokens (A,) and laws (A, V) of every step, where any row draws.
        """
        noise, is_written = self.drawing.noise(noise), torch.tensor(writes, device=self.device)
        own: list[Tensor] = []
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        logits = self._read_pending(state)
        for step in range(count):
            likeliest = logits[:, : self.num_known].argmax(dim=-1)
            if all(writes):
                own.append(likeliest)
            else:
                token, law = self.drawing.token(self.shared.of_target(logits), state, step, noise)
                tokens.append(token)
                laws.extend(() if law is None else (law,))
                own.append(torch.where(is_written, likeliest, self.shared.of_draft(token)))
            if step + 1 < count:
                logits = self.reader.read(own[-1][:, None]).logits[:, -1]
        return torch.stack(own, dim=1), tokens, laws

    def _read_pending(self, state: DecodeState) -> Tensor:
        """Reads what the model has not seen of every row; the logits of the last token, (A, V of the draft model)."""
        texts = self._texts(state)
        pending = [text[len(read) :] for text, read in zip(texts, self.read, strict=True)]
        self.read = [list(text) for text in texts]
        widths = [len(row) for row in pending]
        padded = [[0] * (max(widths) - len(row)) + row for row in pending]
        # A tokenizer may know more than its model; such ids are read as the last one.
        tokens = torch.tensor(padded, device=self.device).clamp(max=self.num_embeddings - 1)
        return self.reader.read(tokens, widths=widths).logits[:, -1]

    def _with_text(
        self, draft: Draft, own: list[list[int]], state: DecodeState, limits: list[int], writes: list[bool]
    ) -> Draft:
        """The draft with written text, in the target's tokens, in the rows that write."""
        copies: list[list[int]] = [[] for _ in own]
        for place, row in enumerate(state.rows):
            if writes[place]:
                written = self.translation.written(own[place], state.tokens[row], limits[place])
                copies[place] = _before(written, self.vocabulary)
        text = Draft.of_copies(copies, state.device)
        if all(writes):
            return text
        width, is_written = draft.width, torch.tensor(writes, device=state.device)
        text = text.widened(width)
        return replace(
            draft,
            tokens=torch.where(is_written[:, None], text.tokens, draft.tokens),
            lengths=torch.where(is_written, text.lengths, draft.lengths),
            drawn=None if draft.probs is None else ~is_written,
        )


def _num_equal(first: list[int], second: list[int]) -> int:
    """How many leading tokens are the same."""
    pairs: Iterable[tuple[int, int]] = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _before(tokens: list[int], vocabulary: int) -> list[int]:
    """The tokens before the first one that the target does not score."""
    return tokens[: next((place for place, token in enumerate(tokens) if token >= vocabulary), len(tokens))]
