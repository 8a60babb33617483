"""Drafters that propose all tokens of a round in one pass: mask tokens stand for those in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.cached_model import CachedModel
from hf_specdec.drafters.base import DraftContext, DraftSession, WeightedDrafter
from hf_specdec.drafters.draft_model import (
    SharedVocabulary,
    limits_within,
    refuse_cache,
    refuse_unknown_vocabulary,
)
from hf_specdec.drafters.drawing import Drawing, chain
from hf_specdec.drafters.head_reader import HeadSession, refuse_target
from hf_specdec.drafters.translation import refuse_tokenizer
from hf_specdec.heads import EagleHead
from hf_specdec.noise import RoundNoise
from hf_specdec.options import SpeculationOptions, check_count
from hf_specdec.state import DecodeState
from hf_specdec.vocabulary import differing_tokens

_SHOW_ONE = (
    "If they use one tokenizer and only pad their output layers differently, show it: ParallelDraft(model, "
    "tokenizer=..., target_tokenizer=...)."
)


class ParallelDraft(WeightedDrafter):
    """Drafts several tokens in one pass: a P-EAGLE head (arXiv 2602.01469) or a PARD model (arXiv 2504.18583).

    When the call samples, every token is drawn from its own law given the text alone, and that law is reported.

    Args:
        model: an `EagleHead` with a mask token, or a decoder-only language model that was trained with one.
        mask_token_id: of a language model, the id that stands for tokens not known yet.
        num_draft_tokens: tokens to draft in a round; by default the head's own setting, else 5.
        tokenizer: a language model's tokenizer. With both tokenizers known, their vocabularies are compared token by
            token, and output layers padded to different sizes are accepted.
        target_tokenizer: the target's tokenizer; a call's own `tokenizer=` counts instead.

    Raises:
        ValueError: if the model cannot draft in parallel or an option is out of range.
    """

    name = "parallel-draft"
    default_num_draft_tokens = 5
    draws = True

    def __init__(
        self,
        model: EagleHead | PreTrainedModel,
        mask_token_id: int | None = None,
        num_draft_tokens: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens))
        self.model = model
        for given in (tokenizer, target_tokenizer):
            if given is not None:
                refuse_tokenizer(given)
        if isinstance(model, EagleHead):
            mask_token_id = _mask_of_head(model, mask_token_id)
            if tokenizer is not None or target_tokenizer is not None:
                raise ValueError("A head drafts ids of its target; tokenizers are compared for language models only.")
            self.default_num_draft_tokens = model.config.num_draft_tokens or 5
        elif isinstance(model, PreTrainedModel):
            _refuse_model(model, mask_token_id)
        else:
            raise ValueError(f"ParallelDraft needs an EagleHead or a language model, not {type(model).__name__}.")
        self.mask_token_id: Any = mask_token_id
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer
        self._agrees_with: Any = None  # the tokenizer it was last compared with

    @property
    def reads_states(self) -> bool:  # type: ignore[override]
        """Whether it is a head over the target's states."""
        return isinstance(self.model, EagleHead)

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:
        """Raises `ValueError` if the target is of another kind or vocabulary than the model was made for."""
        if isinstance(self.model, EagleHead):
            refuse_target(self.model, target)
        elif target.config.is_encoder_decoder:
            raise ValueError("ParallelDraft drafts for decoder-only targets, not for encoder-decoder models.")
        elif host.is_empty(self.model):
            raise ValueError(f"The drafter {type(self.model).__name__} is on the meta device, where it has no weights.")
        else:
            self._compare(target, self.target_tokenizer if tokenizer is None else tokenizer)

    def _compare(self, target: PreTrainedModel, tokenizer: Any) -> None:
        """Raises `ValueError` if the language model's ids are not the target's, or seem not to be."""
        if self.tokenizer is None or tokenizer is None:
            model: Any = self.model
            refuse_unknown_vocabulary(model, target, _SHOW_ONE)
        elif tokenizer is not self._agrees_with:
            refuse_tokenizer(tokenizer)
            if different := differing_tokens(self.tokenizer, tokenizer):
                raise ValueError(
                    f"The drafter's tokenizer and the target's differ in {len(different)} tokens, for example "
                    f"{', '.join(map(repr, different[:3]))}. Use a drafter that shares the target's vocabulary."
                )
            self._agrees_with = tokenizer

    def check_synced(self) -> None:
        """Raises `ValueError` if processes share the drafter."""
        if host.is_sharded(self.model):
            raise ValueError("The drafter is sharded over processes. Load it whole in every process.")

    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        """Begins a call with an empty cache."""
        kind = _HeadSession if isinstance(self.model, EagleHead) else _ModelSession
        return kind(self, context, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelDraft:
        return self  # a copy of a target that holds this drafter shares it


def _mask_of_head(head: EagleHead, mask_token_id: int | None) -> int:
    own = head.config.mask_token_id
    if own is None:
        raise ValueError("This head drafts one token after the other: use Eagle(head).")
    if mask_token_id not in (None, own):
        raise ValueError(f"mask_token_id={mask_token_id!r}: the head was made with {own}.")
    return own


def _refuse_model(model: PreTrainedModel, mask_token_id: Any) -> None:
    host.refuse_model(model)
    if model.config.is_encoder_decoder:
        raise ValueError("ParallelDraft needs a decoder-only model.")
    check_count("mask_token_id", mask_token_id, minimum=0)
    if mask_token_id >= host.num_embeddings(model):
        raise ValueError(f"mask_token_id={mask_token_id}: the model has {host.num_embeddings(model)} embeddings.")


class _ParallelSession(DraftSession):
    """Draws every token of a round from one pass."""

    drawing: Drawing

    def _draft(self, logits: Tensor, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        """A chain from logits (A, K, V)."""
        noise = self.drawing.noise(noise)
        pairs = [self.drawing.token(logits[:, step], state, step, noise) for step in range(max(limits))]
        laws = [law for _, law in pairs if law is not None]
        return chain([token for token, _ in pairs], laws, limits, state.device)


class _HeadSession(HeadSession, _ParallelSession):
    """A head over the target's states: learned ones stand in for those that do not exist yet."""

    def __init__(self, drafter: ParallelDraft, context: DraftContext, state: DecodeState):
        model: Any = drafter.model
        super().__init__(model, context, state)
        self.mask_token_id = drafter.mask_token_id

    @torch.no_grad()
    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        if not self.read.can_draft(limits):
            return Draft.empty(len(limits), state.device)
        count = max(limits)
        tokens, hidden, widths = self.read.take()
        masks = tokens.new_full((len(tokens), count - 1), self.mask_token_id)
        unknown = self.head.masked_hidden().expand(len(tokens), count - 1, -1)
        tokens, hidden = torch.cat([tokens, masks], dim=1), torch.cat([hidden, unknown], dim=1)
        states = self.read.reader.read(tokens, hidden, [width + count - 1 for width in widths])
        self.read.reader.commit(widths)
        logits = self.head.logits(states[:, -count:]).to(self.head.device)
        return self._draft(self.read.to_target(logits, self.vocabulary), state, limits, noise)


class _ModelSession(_ParallelSession):
    """A language model with a cache of its own, which holds real tokens only between rounds."""

    def __init__(self, drafter: ParallelDraft, context: DraftContext, state: DecodeState):
        model: Any = drafter.model
        limit = host.max_positions(model)
        self.device = host.device_of(model) or state.device
        cache = host.new_cache(model)
        refuse_cache(model, cache, context, len(state.rows))
        arguments = host.draft_arguments(model)
        self.reader = CachedModel(model, cache, arguments, len(state.rows), self.device, limit)
        self.context_length = limit or 2**62
        self.mask_token_id = drafter.mask_token_id
        self.num_embeddings = host.num_embeddings(model)
        own = len(drafter.tokenizer) if drafter.tokenizer is not None else None
        self.shared = SharedVocabulary(model, context.target, own)
        self.drawing = Drawing(context, state, self.device)

    def within_context(self, state: DecodeState, limits: list[int]) -> list[int]:
        return limits_within(self.context_length, self.reader, state, limits)

    @torch.no_grad()
    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        limits = self.within_context(state, limits)
        count = max(limits)
        if count == 0:
            return Draft.empty(len(limits), state.device)
        rows = [state.tokens[row][seen:] for row, seen in zip(state.rows, self.reader.num_tokens, strict=True)]
        widths, masks = [len(row) for row in rows], [self.mask_token_id] * (count - 1)
        padded = [[0] * (max(widths) - len(row)) + row + masks for row in rows]
        # Ids behind the drafter's own vocabulary (a padded target may emit them) are read as its last one.
        tokens = torch.tensor(padded, device=self.device).clamp(0, self.num_embeddings - 1)
        outputs = self.reader.read(tokens, [width + count - 1 for width in widths], num_logits=count)
        self.reader.commit(widths)
        logits = outputs.logits[:, -count:]
        shared = torch.stack([self.shared.of_target(logits[:, step]) for step in range(count)], dim=1)
        return self._draft(shared, state, limits, noise)

    def keep_rows(self, places: list[int]) -> None:
        self.reader.keep_rows(places)
