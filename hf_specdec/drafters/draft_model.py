"""A smaller model that drafts token by token."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.cached_model import CachedModel, CompiledPasses
from hf_specdec.drafters import encoder_decoder
from hf_specdec.drafters.base import Compilation, DraftContext, DraftSession, WeightedDrafter
from hf_specdec.drafters.cross_vocabulary import METHODS, STRINGS, TOKENS, Choice, CrossVocabularySession, SharedTokens
from hf_specdec.drafters.drawing import Drawing, chain
from hf_specdec.drafters.translation import Translation, refuse_tokenizer, translation_between
from hf_specdec.noise import RoundNoise
from hf_specdec.options import SpeculationOptions
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.verify import TargetPass
from hf_specdec.vocabulary import DraftVocabularyLogitsProcessor, agreeing_ids, differing_tokens

_SHOW_BOTH = (
    "Show both tokenizers: DraftModel(model, tokenizer=..., target_tokenizer=...), or generate(..., tokenizer=..., "
    "assistant_tokenizer=...). One tokenizer with differently padded output layers is fine, and so are two."
)


class DraftModel(WeightedDrafter):
    """Drafts with a smaller language model, of the target's tokenizer or of another one.

    Under sampling it draws from its own law after the call's temperature, top-k, top-p and min-p (and the
    other stateless processors), and reports exactly that law to the verifier. Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).

    With both tokenizers known, their vocabularies are compared token by token. If all tokens have the same ids, output
    layers may be padded to different sizes. If only added tokens differ, those are not drafted. If others do, the
    draft model reads the text in its own tokens and either draws only tokens that both know ("tli") or writes text that
    is then put into the target's tokens ("slem"): see `cross_vocabulary`. Decoder-only models only.

    Args:
        model: a decoder-only model, or for an encoder-decoder target also an encoder-decoder model or a bare decoder
            (`WhisperForCausalLM`). It is used as it is and never modified. It may sit on another device than the
            target and have another dtype: drafted tokens (and their laws) move once a round.
        num_draft_tokens: tokens to draft in a round.
        draft_temperature: temperature to draft at instead of the call's; 0 drafts greedily.
        tokenizer: the drafter's tokenizer; a call's own `assistant_tokenizer=` counts instead.
        target_tokenizer: the target's tokenizer; a call's own `tokenizer=` counts instead.
        translation: "tli" or "slem", how to draft with another tokenizer. Unset, in every row the one whose drafts have
            stayed more often.
        shares_encoder: whether the model's decoder was made for the target's encoder, whose outputs it then reads
            instead of running an encoder of its own (distil-whisper). Unset, it does so if it has no encoder, or if
            `model.get_encoder() is target.get_encoder()`. Only the widths are checked.

    Raises:
        ValueError: if `model` generates no text or an option is out of range.
    """

    name = "draft-model"
    default_num_draft_tokens = 5
    draws = True

    def __init__(
        self,
        model: PreTrainedModel,
        num_draft_tokens: int | None = None,
        draft_temperature: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        shares_encoder: bool | None = None,
        translation: str | None = None,
    ):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens, draft_temperature=draft_temperature))
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"DraftModel needs a transformers.PreTrainedModel, not {type(model).__name__}.")
        host.refuse_model(model)
        encoder_decoder.refuse_option(model, shares_encoder)
        for given in (tokenizer, target_tokenizer):
            if given is not None:
                refuse_tokenizer(given)
        if translation is not None and translation not in METHODS:
            raise ValueError(
                f"translation={translation!r} is unknown; use one of {', '.join(METHODS)}, or leave it out."
            )
        self.model = model
        self.shares_encoder = shares_encoder
        self.tokenizer = tokenizer
        self.target_tokenizer = target_tokenizer
        self.translation = translation
        self._named: DraftModel | None = None  # its twin with the tokenizer that a call named
        self._forget_pairs()

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> DraftModel:
        """The same drafter with its tokenizer named; itself, if that is known already."""
        if tokenizer is self.tokenizer:
            return self
        refuse_tokenizer(tokenizer)
        if (named := self._named) is None or named.tokenizer is not tokenizer:
            named = copy.copy(self)
            named.tokenizer, self._named = tokenizer, named
        return named

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:
        """Raises `ValueError` if vocabularies differ, the model was never loaded, or it lacks what it attends to."""
        if host.attends_to_encoder(self.model):
            encoder_decoder.refuse_target(self.model, target, self.shares_encoder)
        if host.is_empty(self.model):
            raise ValueError(
                f"The drafter {type(self.model).__name__} is on the meta device, where it has no weights. Load it with "
                "from_pretrained on any real device; it need not be the target's."
            )
        theirs = self.target_tokenizer if tokenizer is None else tokenizer
        if self.tokenizer is not None and theirs is not None:
            self._compare(target, theirs)
        else:
            refuse_unknown_vocabulary(self.model, target, _SHOW_BOTH)

    def check_synced(self) -> None:
        """Raises `ValueError` if processes share the drafter: each of them needs its own number of drafting passes."""
        if host.is_sharded(self.model):
            raise ValueError(
                f"The drafter {type(self.model).__name__} is sharded over processes, which would have to draft in step "
                "under synced_gpus=True. Load it whole in every process, or use another drafter."
            )

    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        """Begins a call with an empty cache."""
        pair = self._pairs.get(context.target)
        if pair is None or pair.translation is None:
            return _DraftModelSession(self, context, state, None if pair is None else pair.shared)
        if context.is_scheduled:  # where lengths follow earlier calls, so may the method
            learned = self._learned.setdefault(context.target, {})
            choice = learned.setdefault(context.do_sample, Choice(pair.methods, context.do_sample))
            choices = [choice] * len(state.rows)
        else:
            choices = [Choice(pair.methods, context.do_sample) for _ in state.rows]
        return CrossVocabularySession(self.model, pair.translation, choices, context, state)

    def _compare(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Finds out whether the target's tokens are the drafter's, and if not, that they can be translated."""
        assert self.tokenizer is not None
        known = self._pairs.get(target)
        if known is not None and known.tokenizer is tokenizer:
            return
        refuse_tokenizer(tokenizer)
        if not (different := differing_tokens(self.tokenizer, tokenizer)):
            self._pairs[target] = _Pair(tokenizer)
        elif (shared := agreeing_ids(self.tokenizer, tokenizer)) is not None:
            self._pairs[target] = _Pair(tokenizer, shared=shared)
        else:
            translation = self._translation(tokenizer, different)
            self._pairs[target] = _Pair(tokenizer, translation, self._methods(translation, target))
        self._learned.pop(target, None)

    def _translation(self, tokenizer: PreTrainedTokenizerBase, different: list[str]) -> Translation:
        begin = (
            f"The drafter's tokenizer and the target's differ in {len(different)} tokens, for example "
            f"{', '.join(map(repr, different[:3]))}. "
        )
        if host.attends_to_encoder(self.model):
            raise ValueError(begin + "Models that attend to an encoder must share the target's vocabulary.")
        try:
            assert self.tokenizer is not None
            return translation_between(tokenizer, self.tokenizer)
        except ValueError as reason:
            raise ValueError(begin + str(reason)) from reason

    def _methods(self, translation: Translation, target: PreTrainedModel) -> tuple[str, ...]:
        """The method asked for, or both; without a shared token only one can draft anything."""
        sizes = host.vocabulary_size(self.model), host.vocabulary_size(target)
        has_shared = SharedTokens(translation.to_target, *sizes).num > 0
        if self.translation == TOKENS and not has_shared:
            raise ValueError(
                "translation=\"tli\": the drafter's tokenizer and the target's share no token at all. Leave the "
                'option out, or use translation="slem".'
            )
        if self.translation is not None:
            return (self.translation,)
        return METHODS if has_shared else (STRINGS,)

    def _forget_pairs(self) -> None:
        """Targets with the tokenizers they were seen with, and what greedy and sampled calls taught of them."""
        self._pairs: WeakKeyDictionary[PreTrainedModel, _Pair] = WeakKeyDictionary()
        self._learned: WeakKeyDictionary[PreTrainedModel, dict[bool, Choice]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in super().__getstate__().items() if name not in ("_pairs", "_learned")}
        return kept | {"_named": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_pairs()

    def __deepcopy__(self, memo: dict[int, Any]) -> DraftModel:
        # A copy of a target that holds this drafter shares it: copying weights would surprise everyone.
        return self


@dataclass(frozen=True)
class _Pair:
    """What was found out about the drafter's tokenizer and a target's.

    Attributes:
        tokenizer: the target's.
        translation: between their tokens; `None` if these have the same ids.
        methods: to draft with another tokenizer.
        shared: ids that mean the same to both; `None` for all.
    """

    tokenizer: Any
    translation: Translation | None = None
    methods: tuple[str, ...] = METHODS
    shared: list[int] | None = None


class _DraftModelSession(DraftSession):
    """Keeps the draft model's cache in step with the rows.

    Tokens the model has not read (the newest of a row, after full acceptance also the last drafted one)
    are pending: they ride in front of the next draft, so a commit never runs the model.
    """

    def __init__(self, drafter: DraftModel, context: DraftContext, state: DecodeState, shared: list[int] | None):
        model, limit = drafter.model, host.max_positions(drafter.model)
        cache, compiled = _cache_and_call(model, context.compilation)
        refuse_cache(model, cache, context, len(state.rows))
        self.device = host.device_of(model) or state.device
        arguments = host.draft_arguments(model)
        if host.attends_to_encoder(model):
            arguments |= encoder_decoder.encoder_arguments(model, context, drafter.shares_encoder)
        self.reader = CachedModel(model, cache, arguments, len(state.rows), self.device, limit, compiled)
        self.context_length = limit or 2**62
        self.drawing = Drawing(context, state, self.device)
        own = len(drafter.tokenizer) if drafter.tokenizer is not None else None
        self.vocabulary = SharedVocabulary(drafter.model, context.target, own, shared)
        self.num_embeddings = host.num_embeddings(model)
        self.num_drafted = 0  # in this round

    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        limits = self.within_context(state, limits)
        self.num_drafted = max(limits)
        if self.num_drafted == 0:
            return Draft.empty(len(limits), state.device)
        logits = self._read_pending(state)
        noise = self.drawing.noise(noise)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for step in range(self.num_drafted):
            token, law = self.drawing.token(self.vocabulary.of_target(logits), state, step, noise)
            tokens.append(token)
            if law is not None:
                laws.append(law)
            if step + 1 < self.num_drafted:
                logits = self.reader.read(token[:, None].to(self.device)).logits[:, -1]
        return chain(tokens, laws, limits, state.device)

    def within_context(self, state: DecodeState, limits: list[int]) -> list[int]:
        return limits_within(self.context_length, self.reader, state, limits)

    def commit(self, state: DecodeState, outcome: Outcome, target_pass: TargetPass | None = None) -> None:
        if not self.reader.has_provisional:  # no row drafted in this round
            return
        # The model has read all but the last drafted token. Every row re-reads as many tokens as the row
        # that needs most, so that pending tokens form a block without holes.
        still_valid = [min(accepted, self.num_drafted - 1) for accepted in outcome.accepted]
        num_pending = max(len(new) - valid for new, valid in zip(outcome.appended, still_valid, strict=True))
        if self.reader.compiled is not None:
            num_pending = max(num_pending, *self.reader.compiled.widths)
        lengths = [len(state.tokens[row]) for row in state.rows]
        committed = self.reader.num_committed
        self.reader.commit([max(0, n - num_pending - done) for n, done in zip(lengths, committed, strict=True)])

    def keep_rows(self, places: list[int]) -> None:
        self.reader.keep_rows(places)

    def _read_pending(self, state: DecodeState) -> Tensor:
        """Reads what the model has not seen of every row; the logits of the last token, (A, V)."""
        rows = [state.tokens[row][seen:] for row, seen in zip(state.rows, self.reader.num_tokens, strict=True)]
        widths = [len(row) for row in rows]
        padded = [[0] * (max(widths) - len(row)) + row for row in rows]
        # Ids behind the drafter's own vocabulary (a padded target may emit them) are read as its last one.
        tokens = torch.tensor(padded, device=self.device).clamp(0, self.num_embeddings - 1)
        return self.reader.read(tokens, widths=widths).logits[:, -1]


def _cache_and_call(model: PreTrainedModel, compilation: Compilation | None) -> tuple[Any, CompiledPasses | None]:
    """A cache for the draft model, and its compiled pass if the call compiles and this model can."""
    if compilation is not None and not host.attends_to_encoder(model):
        cache = host.new_static_cache(model, compilation.num_slots)
        call = host.compiled_call(model, compilation.config, cache)
        if call is not None:
            # One token after the other, behind the two that a round leaves pending at most.
            return cache, CompiledPasses(call, (1, 2))
    return host.new_cache(model), None


def refuse_cache(model: PreTrainedModel, cache: Any, context: DraftContext, num_rows: int) -> None:
    """Raises `ValueError` if a draft model's cache cannot be rolled back, or not row by row where that is needed."""
    host.refuse_cache(cache, is_filled=False)
    if num_rows > 1 and not (context.in_lockstep or host.can_be_ragged(cache)):
        raise ValueError(
            f"{type(model).__name__} cannot draft for several rows: its cache cannot be rearranged row by row. "
            "Generate one row at a time, or use another drafter."
        )


def limits_within(length: int, reader: CachedModel, state: DecodeState, limits: list[int]) -> list[int]:
    """The limits, shortened where a row nears the end of what a draft model can read: `length` tokens."""
    counts = [len(state.tokens[row]) for row in state.rows]
    if reader.next_positions is None:  # the model counts by itself, padding included
        counts = state.row_lengths
    return [max(0, min(limit, length - count)) for limit, count in zip(limits, counts, strict=True)]


def refuse_unknown_vocabulary(model: PreTrainedModel, target: PreTrainedModel, advice: str) -> None:
    """Raises `ValueError` if two models differ in size, which is all there is to see without tokenizers."""
    own, theirs = host.vocabulary_size(model), host.vocabulary_size(target)
    if own != theirs:
        raise ValueError(
            f"The drafter scores {own} ids and the target {theirs}: they may not share a vocabulary. {advice}"
        )


class SharedVocabulary:
    """Brings a draft model's logits to the target's ids; only ids that both know can be drafted.

    Args:
        model: the draft model.
        target: the target.
        num_known: ids of the draft model's tokenizer, if that is known.
        shared: ids that mean the same to both tokenizers; `None` for all that are known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        num_known: int | None = None,
        shared: list[int] | None = None,
    ):
        own, self.size = host.vocabulary_size(model), host.vocabulary_size(target)
        limit = min(own, self.size, num_known or own)
        self.restrict: DraftVocabularyLogitsProcessor | None = None
        if shared is not None:
            self.restrict = DraftVocabularyLogitsProcessor(torch.tensor([i for i in shared if i < min(own, self.size)]))
        elif limit < own:
            self.restrict = DraftVocabularyLogitsProcessor.below(limit)

    def of_target(self, logits: Tensor) -> Tensor:
        """Logits (A, V of the draft model) -> (A, V of the target)."""
        if self.restrict is not None:
            logits = self.restrict(torch.empty(0), logits)
        missing = self.size - logits.shape[-1]
        return (
            torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self.size]
        )
