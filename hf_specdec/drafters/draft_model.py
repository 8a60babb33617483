"""A smaller model that drafts token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.cached_model import CachedModel, CompiledPasses
from hf_specdec.drafters import encoder_decoder
from hf_specdec.drafters.base import Compilation, DraftContext, DraftSession, WeightedDrafter
from hf_specdec.drafters.drawing import Drawing, chain
from hf_specdec.noise import RoundNoise
from hf_specdec.options import SpeculationOptions
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.verify import TargetPass
from hf_specdec.vocabulary import DraftVocabularyLogitsProcessor, differing_tokens


class DraftModel(WeightedDrafter):
    """Drafts with a smaller language model that shares the target's tokenizer.

    Under sampling it draws from its own law after the call's temperature, top-k, top-p and min-p (and the
    other stateless processors), and reports exactly that law to the verifier. Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).

    Args:
        model: a decoder-only model, or for an encoder-decoder target also an encoder-decoder model or a bare decoder
            (`WhisperForCausalLM`). It is used as it is and never modified. It may sit on another device than the
            target and have another dtype: drafted tokens (and their laws) move once a round.
        num_draft_tokens: tokens to draft in a round.
        draft_temperature: temperature to draft at instead of the call's; 0 drafts greedily.
        tokenizer: the drafter's tokenizer. With both tokenizers known, their vocabularies are compared
            token by token, and output layers padded to different sizes are accepted.
        target_tokenizer: the target's tokenizer; the call's own `tokenizer=` counts as well.
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
    ):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens, draft_temperature=draft_temperature))
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"DraftModel needs a transformers.PreTrainedModel, not {type(model).__name__}.")
        host.refuse_model(model)
        encoder_decoder.refuse_option(model, shares_encoder)
        self.model = model
        self.shares_encoder = shares_encoder
        self.tokenizer = tokenizer
        self.target_tokenizer = target_tokenizer
        self._comparison = TokenizerComparison()

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:
        """Raises `ValueError` if vocabularies differ, the model was never loaded, or it lacks what it attends to."""
        if host.attends_to_encoder(self.model):
            encoder_decoder.refuse_target(self.model, target, self.shares_encoder)
        if host.is_empty(self.model):
            raise ValueError(
                f"The drafter {type(self.model).__name__} is on the meta device, where it has no weights. Load it with "
                "from_pretrained on any real device; it need not be the target's."
            )
        self._comparison.check(self.model, target, self.tokenizer, self.target_tokenizer or tokenizer, "DraftModel")

    def check_synced(self) -> None:
        """Raises `ValueError` if processes share the drafter: each of them needs its own number of drafting passes."""
        if host.is_sharded(self.model):
            raise ValueError(
                f"The drafter {type(self.model).__name__} is sharded over processes, which would have to draft in step "
                "under synced_gpus=True. Load it whole in every process, or use another drafter."
            )

    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        """Begins a call with an empty cache."""
        return _DraftModelSession(self, context, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> DraftModel:
        # A copy of a target that holds this drafter shares it: copying weights would surprise everyone.
        return self


class _DraftModelSession(DraftSession):
    """Keeps the draft model's cache in step with the rows.

    Tokens the model has not read (the newest of a row, after full acceptance also the last drafted one)
    are pending: they ride in front of the next draft, so a commit never runs the model.
    """

    def __init__(self, drafter: DraftModel, context: DraftContext, state: DecodeState):
        model, limit = drafter.model, host.max_positions(drafter.model)
        cache, compiled = _cache_and_call(model, context.compilation)
        host.refuse_cache(cache, is_filled=False)
        if len(state.rows) > 1 and not (context.in_lockstep or host.can_be_ragged(cache)):
            raise ValueError(
                f"{type(model).__name__} cannot draft for several rows: its cache cannot be rearranged row by row. "
                "Generate one row at a time, or use another drafter."
            )
        self.device = host.device_of(model) or state.device
        arguments = host.draft_arguments(model)
        if host.attends_to_encoder(model):
            arguments |= encoder_decoder.encoder_arguments(model, context, drafter.shares_encoder)
        self.reader = CachedModel(model, cache, arguments, len(state.rows), self.device, limit, compiled)
        self.context_length = limit or 2**62
        self.drawing = Drawing(context, state, self.device)
        own = len(drafter.tokenizer) if drafter.tokenizer is not None else None
        self.vocabulary = SharedVocabulary(drafter.model, context.target, own)
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
        lengths = [len(state.tokens[row]) for row in state.rows]
        if self.reader.next_positions is None:  # the model counts by itself, padding included
            lengths = state.row_lengths
        return [max(0, min(k, self.context_length - n)) for k, n in zip(limits, lengths, strict=True)]

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


class TokenizerComparison:
    """Compares a draft model's tokenizer with the target's, and remembers the one it was compared with."""

    def __init__(self) -> None:
        self._agrees_with: PreTrainedTokenizerBase | None = None

    def check(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        own: PreTrainedTokenizerBase | None,
        theirs: PreTrainedTokenizerBase | None,
        name: str,
    ) -> None:
        """Raises `ValueError` if the two models do not share a vocabulary, or seem not to.

        Args:
            model: the draft model.
            target: the target.
            own: the draft model's tokenizer, if it is known.
            theirs: the target's, if it is known.
            name: of the drafter's class.
        """
        if own is not None and theirs is not None:
            if theirs is not self._agrees_with:
                _refuse_other_tokenizer(own, theirs)
            self._agrees_with = theirs
        elif host.vocabulary_size(model) != host.vocabulary_size(target):
            raise ValueError(
                f"The drafter scores {host.vocabulary_size(model)} ids and the target {host.vocabulary_size(target)}: "
                "they may not share a vocabulary. If they use one tokenizer and only pad their output layers "
                f"differently, show it: {name}(model, tokenizer=..., target_tokenizer=...)."
            )


class SharedVocabulary:
    """Brings a draft model's logits to the target's ids; only ids that both know can be drafted.

    Args:
        model: the draft model.
        target: the target.
        num_known: ids of the draft model's tokenizer, if that is known.
    """

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, num_known: int | None = None):
        own, self.size = host.vocabulary_size(model), host.vocabulary_size(target)
        shared = min(own, self.size, num_known or own)
        self.restrict = DraftVocabularyLogitsProcessor.below(shared) if shared < own else None

    def of_target(self, logits: Tensor) -> Tensor:
        """Logits (A, V of the draft model) -> (A, V of the target)."""
        if self.restrict is not None:
            logits = self.restrict(torch.empty(0), logits)
        missing = self.size - logits.shape[-1]
        return (
            torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self.size]
        )


def _refuse_other_tokenizer(drafter: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
    different = differing_tokens(drafter, target)
    if different:
        raise ValueError(
            f"The drafter's tokenizer and the target's differ in {len(different)} tokens, for example "
            f"{', '.join(map(repr, different[:3]))}. Use a drafter that shares the target's vocabulary."
        )
