"""The target's own first layers draft; verification goes on from what they have computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.drafters.drawing import Drawing, drawn
from hf_specdec.noise import RoundNoise
from hf_specdec.options import SpeculationOptions
from hf_specdec.state import DecodeState


class EarlyExit(Drafter):
    """Drafts with the target's first layers, its final norm and its head; needs no other weights.

    Verification runs only the remaining layers over the drafted tokens: states and cache entries of the first
    layers are shared. Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding"
    (arXiv 2404.16710). It pays for models that were trained to be left early.

    Args:
        exit_layer: how many layers draft, from 1 to all but one.
        num_draft_tokens: tokens to draft in a round.
        draft_temperature: temperature to draft at instead of the call's; 0 drafts greedily.

    Raises:
        ValueError: if an option is out of range.
    """

    name = "early-exit"
    default_num_draft_tokens = 4
    draws = True
    reads_states = True

    def __init__(self, exit_layer: int, num_draft_tokens: int | None = None, draft_temperature: float | None = None):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens, draft_temperature=draft_temperature))
        if isinstance(exit_layer, bool) or not isinstance(exit_layer, int) or exit_layer < 1:
            raise ValueError(f"exit_layer={exit_layer!r}: at least one layer must draft.")
        self.exit_layer = exit_layer

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:
        """Raises `ValueError` if the target has too few layers, keeps them in no list, or has an encoder."""
        if target.config.is_encoder_decoder:
            raise ValueError(f"EarlyExit needs a decoder-only target, and {type(target).__name__} has an encoder.")
        if self.exit_layer >= host.num_layers(target):
            raise ValueError(
                f"exit_layer={self.exit_layer}: {type(target).__name__} has {host.num_layers(target)} layers, and at "
                "least one must be left for verification."
            )
        host.decoder_layers(target)

    def check_synced(self) -> None:
        """Raises `ValueError`: drafting passes are the target's, which other processes would have to make too."""
        raise ValueError("EarlyExit drafts with the target's own layers, which synced_gpus=True has shared out.")

    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        """Begins a call.

        Raises:
            ValueError: if the target's passes cannot be masked by us.
        """
        if not context.takes_trees:
            raise ValueError(
                f"EarlyExit cannot draft for {type(context.target).__name__} in this call: its first layers read ahead "
                "of the others, which takes eager or sdpa attention, position ids, full or sliding-window layers, a "
                "growing cache and no output_attentions. Use another drafter, or change that."
            )
        return _EarlyExitSession(self.exit_layer, context)


class _EarlyExitSession(DraftSession):
    """Reads the last token and every drafted one with the first layers of the loop's own reader."""

    shares_passes = True

    def __init__(self, exit_layer: int, context: DraftContext):
        assert context.reader is not None
        self.exit_layer = exit_layer
        self.reader = context.reader
        self.drawing = Drawing.of(context)

    def within_context(self, state: DecodeState, limits: list[int]) -> list[int]:
        # Before the prompt's pass nothing can be read ahead.
        return limits if self.reader.num_slots else [0] * len(limits)

    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        limits = self.within_context(state, limits)
        if max(limits) == 0:
            return Draft.empty(len(limits), state.device)
        self.reader.forget_early()
        token = state.last_tokens()
        noise = noise and noise.of_draft(state.device)
        tokens, laws, states = [], [], []
        for step in range(max(limits)):
            logits, exit_state = self.reader.read_early(token, self.exit_layer)
            drafted, law = self.drawing.draw(logits.float().to(state.device), state, step, noise)
            tokens.append(drafted)
            laws.append(law)
            states.append(exit_state)
            token = drafted[:, None]
        states.append(self.reader.read_early(token, self.exit_layer)[1])
        return replace(drawn(tokens, laws, limits, state.device), states=torch.cat(states, dim=1))


@dataclass(frozen=True)
class ExitEstimate:
    """How good the exits of a model are on some text.

    Attributes:
        best: the exit layer that promises most.
        agreements: by exit layer, how often its best token is the whole model's.
        speedups: by exit layer, the expected tokens of a round over its cost, against plain decoding with passes of
            the same number of layers; costs are counted in layers only.
    """

    best: int
    agreements: dict[int, float]
    speedups: dict[int, float]


@torch.no_grad()
def best_exit_layer(
    model: PreTrainedModel, input_ids: Tensor, num_draft_tokens: int = 4, max_new_tokens: int = 64
) -> ExitEstimate:
    """Estimates which exit layer drafts best, on text that the model generates greedily.

    Args:
        model: the target.
        input_ids: prompts without padding, shape (B, P).
        num_draft_tokens: tokens to draft in a round.
        max_new_tokens: how much text to judge.

    Raises:
        ValueError: if the model has an encoder, a single layer, or keeps its layers in no list.
    """
    EarlyExit(1).check(model)
    arguments = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": max_new_tokens, "do_sample": False}
    text = type(model).generate(model, input_ids, **arguments)  # whatever assistant is attached
    start, num_layers = input_ids.shape[1] - 1, host.num_layers(model)
    final = model(text, use_cache=False).logits[:, start:-1].argmax(dim=-1)
    agreements, speedups = {}, {}
    for layer in range(1, num_layers):
        with host.skipping(model, range(layer, num_layers)):
            early = model(text, use_cache=False).logits[:, start:-1].argmax(dim=-1)
        rate = float((early == final).float().mean())
        tokens = sum(rate**place for place in range(num_draft_tokens + 1))
        # Every drafted token and the last one pass the early layers one by one, then the others once together.
        layers = (num_draft_tokens + 1) * layer + num_layers - layer
        agreements[layer], speedups[layer] = rate, tokens * num_layers / layers
    return ExitEstimate(max(speedups, key=lambda layer: speedups[layer]), agreements, speedups)
