"""One pass of the target over a draft."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.cached_model import CachedModel
from hf_specdec.request import Request
from hf_specdec.state import DecodeState


class TargetPass:
    """What the target said about a round's draft.

    Attributes:
        tokens: what was read, the rows' last tokens and the draft, -1 for padding; shape (A, N + 1).
        logits: raw, in float32 as plain `generate` casts them, shape (A, N + 1, V); position i follows i
            drafted tokens.
        hidden_states: one tensor (A, N + 1, H) a layer, if the call asked for them, else `None`.
        prompt_hidden_states: in the first pass, the same over the whole prompt, (A, P, H).
        states: what a drafter taps, by index into the hidden states: (A, N + 1, H) each.
        prompt_states: in the first pass, the same over the prompt without its last token, (A, P - 1, H).
        attentions: one tensor (A, heads, W, K) a layer over the whole pass, if the call asked for them.
        windows: with them, how many keys a single query of each layer would have seen at most.
    """

    def __init__(
        self, outputs: Any, tokens: Tensor, device: torch.device, tapped: dict[int, list[Tensor]] | None = None
    ):
        self.tokens, num_positions = tokens, tokens.shape[1]
        self.logits = outputs.logits[:, -num_positions:].to(device=device, dtype=torch.float32, copy=True)
        self.attentions = outputs.get("attentions")
        self.windows = host.windows(host.cache_of(outputs)) if self.attentions else []
        states = host.hidden_states_of(outputs)
        self.hidden_states = states and tuple(layer[:, -num_positions:] for layer in states)
        self.prompt_hidden_states = states and tuple(layer[:, : layer.shape[1] - num_positions + 1] for layer in states)
        whole = {tap: _joined(passes) for tap, passes in (tapped or {}).items()}
        self.states = {tap: layer[:, -num_positions:] for tap, layer in whole.items()}
        self.prompt_states = {tap: layer[:, : layer.shape[1] - num_positions] for tap, layer in whole.items()}


def _joined(passes: list[Tensor]) -> Tensor:
    """States of passes behind each other; those of one pass, as of most prompts, are not copied."""
    return passes[0] if len(passes) == 1 else torch.cat(passes, dim=1)


def run_target(
    target: CachedModel, state: DecodeState, request: Request, draft: Draft, taps: tuple[int, ...]
) -> TargetPass:
    """Runs the target over [last token, draft] of every riding row."""
    last = state.last_tokens()
    if _goes_on(target, request, draft, taps):
        return TargetPass(target.read_rest(), _read(last, draft), state.device)
    tokens = torch.cat([last, draft.tokens], dim=1)
    seen = None if draft.parents is None else draft.seen
    with host.tapped(target.model, taps) as tapped:
        outputs = target.read(tokens, num_logits=draft.width + 1, seen=seen)
    return TargetPass(outputs, _read(last, draft), state.device, tapped)


def run_prompt(
    target: CachedModel, state: DecodeState, request: Request, draft: Draft, taps: tuple[int, ...]
) -> TargetPass:
    """The first pass, over [prompt, draft]: the host makes it, as it would for plain `generate`."""
    assert draft.parents is None  # the host masks the prompt's pass
    arguments = host.behind_prompt(target.model, request.arguments, draft.width)
    tokens = torch.cat([request.input_ids, draft.tokens], dim=1)
    with host.tapped(target.model, taps) as tapped:
        outputs = host.prefill(target.model, tokens, request.config, arguments)
    cache = host.cache_of(outputs)
    host.refuse_cache(cache, is_filled=True)
    host.start_recording(cache)
    mask = host.decoder_mask(target.model, arguments)
    target.start(cache, draft.width + 1, mask, arguments.get("position_ids"))
    return TargetPass(outputs, _read(state.last_tokens(), draft), state.device, tapped)


def _goes_on(target: CachedModel, request: Request, draft: Draft, taps: tuple[int, ...]) -> bool:
    """Whether the first layers have read all of it already, and nobody wants to see what they say."""
    is_watched = bool(taps) or request.config.output_hidden_states or request.config.output_attentions
    return draft.is_read_ahead and target.num_ahead == draft.width + 1 and not is_watched


def _read(last: Tensor, draft: Draft) -> Tensor:
    """What a round's positions stand for, (A, N + 1), from the last tokens (A, 1): -1 for padding."""
    return torch.cat([last, torch.where(draft.valid, draft.tokens, -1)], dim=1)
