"""An independent, smaller model that drafts token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import host
from hf_specdec.accept import Draft, sample
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.noise import RoundNoise
from hf_specdec.options import SpeculationOptions
from hf_specdec.state import CachedModel, DecodeState, Outcome
from hf_specdec.verify import Scorer
from hf_specdec.vocabulary import DraftVocabularyLogitsProcessor, differing_tokens


class DraftModel(Drafter):
    """Drafts with a smaller causal language model that shares the target's tokenizer.

    Under sampling it draws from its own law after the call's temperature, top-k, top-p and min-p (and the
    other stateless processors), and reports exactly that law to the verifier. Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).

    Args:
        model: a decoder-only model; it is used as it is and never modified.
        num_draft_tokens: tokens to draft in a round.
        draft_temperature: temperature to draft at instead of the call's; 0 drafts greedily.
        tokenizer: the drafter's tokenizer. With both tokenizers known, their vocabularies are compared
            token by token, and output layers padded to different sizes are accepted.
        target_tokenizer: the target's tokenizer; the call's own `tokenizer=` counts as well.

    Raises:
        ValueError: if `model` is no causal language model or an option is out of range.
    """

    name = "draft-model"
    default_num_draft_tokens = 5

    def __init__(
        self,
        model: PreTrainedModel,
        num_draft_tokens: int | None = None,
        draft_temperature: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens, draft_temperature=draft_temperature))
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"DraftModel needs a transformers.PreTrainedModel, not {type(model).__name__}.")
        host.refuse_model(model)
        self.model = model
        self.tokenizer = tokenizer
        self.target_tokenizer = target_tokenizer

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:
        """Raises `ValueError` if the two models score different vocabularies or sit on different devices."""
        if self.model.device != target.device:
            raise ValueError(
                f"The drafter is on {self.model.device} and the target on {target.device}. "
                f'Move the drafter: drafter_model.to("{target.device}").'
            )
        theirs = self.target_tokenizer or tokenizer
        if self.tokenizer is not None and theirs is not None:
            _refuse_other_tokenizer(self.tokenizer, theirs)
        elif host.vocabulary_size(self.model) != host.vocabulary_size(target):
            raise ValueError(
                f"The drafter scores {host.vocabulary_size(self.model)} ids and the target "
                f"{host.vocabulary_size(target)}: they may not share a vocabulary. If they use one tokenizer and only "
                "pad their output layers differently, show it: DraftModel(model, tokenizer=..., target_tokenizer=...)."
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
        model = drafter.model
        self.context_length = host.max_positions(model) or 2**62
        self.reader = CachedModel(
            model,
            host.new_cache(model),
            host.draft_arguments(model),
            num_rows=len(state.rows),
            position_limit=host.max_positions(model),
        )
        self.is_greedy = not context.do_sample or context.draft_temperature == 0
        self.scorer = _draft_scorer(drafter, context)
        self.num_embeddings = host.num_embeddings(model)
        self.target_vocabulary = host.vocabulary_size(context.target)
        self.pending: list[int] = []  # tokens of every row that the round's first pass read
        self.width = 0  # tokens drafted in the round

    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        lengths = [len(state.tokens[row]) for row in state.rows]
        limits = [max(0, min(k, self.context_length - n)) for k, n in zip(limits, lengths, strict=True)]
        self.width = max(limits)
        if self.width == 0:
            return Draft.empty(len(limits), state.device)
        logits = self._read_pending(state)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for step in range(self.width):
            token, law = self._draw(logits, state, step, noise)
            tokens.append(token)
            if law is not None:
                laws.append(law)
            if step + 1 < self.width:
                logits = self.reader.read(token[:, None]).logits[:, -1]
        return Draft(
            tokens=torch.stack(tokens, dim=1),
            lengths=torch.tensor(limits, device=state.device),
            probs=torch.stack(laws, dim=1) if laws else None,
        )

    def commit(self, state: DecodeState, outcome: Outcome) -> None:
        if self.reader.num_provisional == 0:
            return
        # The model has read all but the last drafted token. Every row re-reads as many tokens as the row
        # that needs most, so that pending tokens form a block without holes.
        emitted = [len(tokens) for tokens in outcome.emitted]
        still_valid = [min(accepted, self.width - 1) for accepted in outcome.accepted]
        pending = max(new - valid for new, valid in zip(emitted, still_valid, strict=True))
        block = max(self.pending)
        kept = [max(block + new - pending, block - own) for new, own in zip(emitted, self.pending, strict=True)]
        self.reader.commit(kept)

    def keep_rows(self, places: list[int]) -> None:
        self.reader.keep_rows(places)

    def _read_pending(self, state: DecodeState) -> Tensor:
        """Reads what the model has not seen of every row; the logits of the last token, (A, V)."""
        rows = [state.tokens[row][seen:] for row, seen in zip(state.rows, self.reader.num_tokens, strict=True)]
        self.pending = [len(row) for row in rows]
        padded = [[0] * (max(self.pending) - len(row)) + row for row in rows]
        # Ids behind the drafter's own vocabulary (a padded target may emit them) are read as its last one.
        tokens = torch.tensor(padded, device=state.device).clamp(max=self.num_embeddings - 1)
        return self.reader.read(tokens, widths=self.pending).logits[:, -1]

    def _draw(
        self, logits: Tensor, state: DecodeState, step: int, noise: RoundNoise | None
    ) -> tuple[Tensor, Tensor | None]:
        """The next drafted token of every row and, when sampling, the law it was drawn from."""
        scores = self.scorer.at_all_positions(logits[:, None].float(), state, first=step)[:, 0]
        if self.is_greedy:
            token, law = scores.argmax(dim=-1), None
        else:
            assert noise is not None
            law = _fit(scores.softmax(dim=-1), self.target_vocabulary)
            token = sample(law, noise.draws[:, step])
        state.write(token[:, None], offset=step)
        return token, law


def _draft_scorer(drafter: DraftModel, context: DraftContext) -> Scorer:
    """The call's processors, at the draft's own temperature and within the shared vocabulary."""
    processors = context.scorer.processors
    if context.do_sample and context.draft_temperature:
        processors = host.with_temperature(processors, context.draft_temperature)
    shared = min(host.vocabulary_size(drafter.model), host.vocabulary_size(context.target))
    if drafter.tokenizer is not None:
        shared = min(shared, len(drafter.tokenizer))
    if shared < host.vocabulary_size(drafter.model):
        processors = LogitsProcessorList([DraftVocabularyLogitsProcessor.below(shared), *processors])
    return Scorer(processors)


def _fit(law: Tensor, size: int) -> Tensor:
    """The law over the target's vocabulary: ids outside the shared ones have no mass."""
    missing = size - law.shape[-1]
    return torch.nn.functional.pad(law, (0, missing)) if missing > 0 else law[..., :size]


def _refuse_other_tokenizer(drafter: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
    different = differing_tokens(drafter, target)
    if different:
        raise ValueError(
            f"The drafter's tokenizer and the target's differ in {len(different)} tokens, for example "
            f"{', '.join(map(repr, different[:3]))}. Use a drafter that shares the target's vocabulary."
        )
