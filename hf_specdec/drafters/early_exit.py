"""The target's own first layers draft; its pass goes on from what they have computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.drafters.drawing import Drawing, chain
from hf_specdec.halves import Halves
from hf_specdec.noise import RoundNoise
from hf_specdec.options import SpeculationOptions, check_count
from hf_specdec.state import DecodeState


class EarlyExit(Drafter):
    """Drafts with the target's first layers, its norm and its head; needs no other weights.

    The target's pass then runs only the other layers over the drafted tokens: states and cache entries of the first
    ones are shared, so that every layer reads a token once. (Where a call wants hidden states or attentions, or another
    drafter taps hidden states, the pass runs all layers.) It pays for targets that were trained to be left early, such
    as the LayerSkip checkpoints, which are plain Llama models.

    In a round it drafts for all rows or for none: beside drafters that copy (`Auto`), the whole batch copies or the
    whole batch leaves early. Passes of its calls are not compiled.

    Under sampling, drafts are drawn from the exit's own law after the call's stateless processors, and exactly that law
    is reported. Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding" (arXiv
    2404.16710).

    Args:
        exit_layer: how many layers draft, from 1 to all but one; a quarter of them by default. `best_exit_layer`
            estimates the best.
        num_draft_tokens: tokens to draft in a round.
        draft_temperature: temperature to draft at instead of the call's; 0 drafts greedily.

    Raises:
        ValueError: if an option is out of range.
    """

    name = "early-exit"
    default_num_draft_tokens = 4
    draws = True
    reads_states = True

    def __init__(
        self,
        exit_layer: int | None = None,
        num_draft_tokens: int | None = None,
        draft_temperature: float | None = None,
    ):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens, draft_temperature=draft_temperature))
        if exit_layer is not None:
            check_count("exit_layer", exit_layer)
        self.exit_layer = exit_layer

    def exit_of(self, target: PreTrainedModel) -> int:
        """How many layers of this target draft."""
        return self.exit_layer or max(1, host.num_layers(target) // 4)

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:
        """Raises `ValueError` if the target has too few layers, or they cannot be run a few at a time."""
        name, num_layers, exit_layer = type(target).__name__, host.num_layers(target), self.exit_of(target)
        if target.config.is_encoder_decoder:
            raise ValueError(f"EarlyExit needs a decoder-only target, and {name} has an encoder. Use another drafter.")
        if exit_layer >= num_layers:
            raise ValueError(
                f"exit_layer={exit_layer}: {name} has {num_layers} layers, and at least one must be left to verify. "
                f"Choose fewer than {num_layers}, or use another drafter."
            )
        host.refuse_halves(target)
        Halves(target, exit_layer)

    def check_synced(self) -> None:
        """Raises `ValueError`: its passes are the target's, which other processes would have to make too."""
        raise ValueError(
            "EarlyExit drafts with the target's own layers, whose weights the processes share under synced_gpus=True. "
            "Use a drafter without passes of the target's, such as Suffix()."
        )

    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        """Begins a call.

        Raises:
            ValueError: if the first layers of the call's cache cannot get ahead of the others.
        """
        return _EarlyExitSession(self.exit_of(context.target), context, state)


class _EarlyExitSession(DraftSession):
    """Has the first layers of the call's own reader read the last token and every drafted one."""

    shares_passes = True

    def __init__(self, exit_layer: int, context: DraftContext, state: DecodeState):
        assert context.reader is not None
        host.refuse_reading_ahead(context.reader.cache)
        self.exit_layer, self.reader = exit_layer, context.reader
        self.drawing = Drawing(context, state, state.device)

    @cached_property
    def halves(self) -> Halves:
        """Of the target: made when its prompt has been read, for it may install hooks of its own in the first pass."""
        return Halves(self.reader.model, self.exit_layer)

    def within_context(self, state: DecodeState, limits: list[int]) -> list[int]:
        return limits if self.reader.num_slots else [0] * len(limits)  # the prompt is read by all layers at once

    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        limits = self.within_context(state, limits)
        if max(limits) == 0:
            return Draft.empty(len(limits), state.device)
        self.reader.forget_ahead()
        noise = self.drawing.noise(noise)
        token, tokens, laws = state.last_tokens(), [], []
        for step in range(max(limits)):
            logits = self.reader.read_ahead(token, self.halves)
            drafted, law = self.drawing.token(logits, state, step, noise)
            tokens.append(drafted)
            if law is not None:
                laws.append(law)
            token = drafted[:, None].to(state.device)
        self.reader.read_ahead(token, self.halves, is_scored=False)
        return replace(chain(tokens, laws, limits, state.device), is_read_ahead=True)


@dataclass(frozen=True)
class ExitEstimate:
    """How good the exits of a model are on some text.

    Attributes:
        best: the exit layer with the largest speedup. Where even that is below 1, early exit does not pay.
        agreements: by exit layer, how often its best token is the whole model's.
        speedups: by exit layer, expected tokens of a round over its cost, in terms of plain decoding. Costs are counted
            in weights read by a pass, so overheads of short passes are left out.
    """

    best: int
    agreements: dict[int, float]
    speedups: dict[int, float]


@torch.no_grad()
def best_exit_layer(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    num_draft_tokens: int = 4,
    max_new_tokens: int = 64,
) -> ExitEstimate:
    """Estimates which exit layer drafts best, on what the model says greedily behind some prompts.

    Args:
        model: the target.
        input_ids: prompts, shape (B, P).
        attention_mask: 0 for padding, shape (B, P).
        num_draft_tokens: tokens to draft in a round.
        max_new_tokens: how much text to judge behind every prompt.

    Returns:
        How often every exit agrees with the whole model, what that is worth, and the best one.

    Raises:
        ValueError: if `EarlyExit` cannot draft for the model, or an argument is out of range.
    """
    EarlyExit().check(model)
    check_count("num_draft_tokens", num_draft_tokens)
    check_count("max_new_tokens", max_new_tokens)
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        raise ValueError("input_ids must be a tensor of prompts, shape (B, P); of one text, ids[None] is such a batch.")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    texts = [_greedy(model, ids[kept.bool()][None], max_new_tokens) for ids, kept in zip(input_ids, mask, strict=True)]
    agreements = {layer: _agreement(model, layer, texts) for layer in range(1, host.num_layers(model))}
    speedups = {layer: _speedup(model, layer, rate, num_draft_tokens) for layer, rate in agreements.items()}
    return ExitEstimate(max(speedups, key=lambda layer: speedups[layer]), agreements, speedups)


def _greedy(model: PreTrainedModel, prompt: Tensor, max_new_tokens: int) -> tuple[Tensor, Tensor]:
    """A text (1, T) and the tokens of it that the model has chosen itself."""
    arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": max_new_tokens, "do_sample": False}
    plain: Any = type(model)
    text = plain.generate(model, prompt, **arguments)  # whatever assistant is attached
    return text, text[0, prompt.shape[1] :]


def _agreement(model: PreTrainedModel, layer: int, texts: list[tuple[Tensor, Tensor]]) -> float:
    """How often the exit chooses as the whole model has."""
    halves, hits = Halves(model, layer), []
    for text, chosen in texts:
        early = halves.first(text[:, :-1], use_cache=False).logits[0, -len(chosen) :].argmax(dim=-1)
        hits.append((early == chosen).float())
        halves.forget()
    return float(torch.cat(hits).mean())


def _speedup(model: PreTrainedModel, layer: int, rate: float, num_draft_tokens: int) -> float:
    """Tokens of a round over its cost, where plain decoding has one token a pass."""
    sizes, head = [_size(module) for module in host.decoder_layers(model)], _size(model.get_output_embeddings())
    first, rest = sum(sizes[:layer]), sum(sizes[layer:])
    tokens = sum(rate**place for place in range(num_draft_tokens + 1))
    # The first layers read every drafted token and the last one, one by one; the others read all of them at once.
    cost = (num_draft_tokens + 1) * first + num_draft_tokens * head + rest + head
    return tokens * (first + rest + head) / cost


def _size(module: torch.nn.Module | None) -> int:
    return 0 if module is None else sum(weight.numel() for weight in module.parameters())
