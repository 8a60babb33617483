"""Our drafters in the host's own assisted decoding: batch 1, as far as the host goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specdec.accept import Draft
from hf_specdec.drafters import DraftContext, Drafter
from hf_specdec.noise import Noise
from hf_specdec.options import SpeculationOptions
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome


def as_candidate_generator(
    drafter: Drafter,
    target: PreTrainedModel,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList | None = None,
    options: SpeculationOptions | None = None,
) -> CandidateGenerator:
    """Wraps a drafter for the host's `_assisted_decoding` loop.

    The host has no public place to hand it in; replacing the model's `_get_candidate_generator` works. Its
    loop serves one row, and checks stopping criteria once a round: `enable` is the better way.

    Args:
        drafter: any strategy of this package.
        target: the model that verifies.
        generation_config: of the call; says whether it samples and how long the text may get.
        logits_processor: of the call; the drafter applies the stateless ones.
        options: options of the call.

    Returns:
        What the host's loop asks for candidates, in one call.

    Raises:
        ValueError: if it is no drafter, or cannot serve the target.
    """
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter= must be a drafter such as Suffix(), not {type(drafter).__name__}; a model becomes one by "
            "DraftModel(model)."
        )
    if any(arm.reads_states for arm in drafter.arms):
        raise ValueError(
            f"{drafter.name} drafts from the target's hidden states, which the host's own loop does not hand out. Use "
            "hf_specdec.enable(model) and generate(assistant=...)."
        )
    drafter.check(target)
    merged = drafter.options.overridden_by(options or SpeculationOptions())
    return _DrafterAsCandidates(drafter, target, generation_config, logits_processor or LogitsProcessorList(), merged)


class _DrafterAsCandidates(CandidateGenerator):
    def __init__(
        self,
        drafter: Drafter,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        processors: LogitsProcessorList,
        options: SpeculationOptions,
    ):
        self.drafter = drafter
        self.max_length = generation_config.max_length
        self.num_draft_tokens = options.num_draft_tokens or drafter.default_num_draft_tokens
        self.seed = options.first_seed() if generation_config.do_sample else None
        self.context = DraftContext(
            target, bool(generation_config.do_sample), Scorer(processors).stateless_part(), options.draft_temperature
        )
        self.state: DecodeState | None = None

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """The prompt with its draft, (1, t + N), and the draft's logits (1, N, V) or `None`."""
        if self.state is None:
            self.state = DecodeState(input_ids, None, fill=0)
            self.session = self.drafter.start(self.context, self.state)
        limit = max(0, min(self.num_draft_tokens, self.max_length - input_ids.shape[1] - 1))
        noise = None
        if self.seed is not None:
            noise = Noise(self.seed, input_ids.device).round([0], self.state.num_emitted, limit)
        self.draft = self.session.propose(self.state, [limit], noise) if limit else Draft.empty(1, input_ids.device)
        length = int(self.draft.lengths)
        logits = None if self.draft.probs is None or length == 0 else self.draft.probs[:, :length].log()
        return torch.cat([input_ids, self.draft.tokens[:, :length]], dim=1), logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Tells the session what became of its draft."""
        assert self.state is not None
        new = input_ids[:, self.state.lengths[0] :]
        self.state.write(new)
        length = int(self.draft.lengths)
        self.state.commit(outcome := Outcome(new.tolist(), [new.shape[1]], [length], [int(num_matches)], [False]))
        self.session.commit(self.state, outcome)
