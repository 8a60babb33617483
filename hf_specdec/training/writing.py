"""Lets a target write many texts at once: rows that have ended leave the passes, so no work is wasted on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec import host
from hf_specdec.cached_model import CachedModel

# Dropping rows copies the cache, so it waits until so large a share of the rows has ended.
_SHARE_TO_DROP = 0.125


@dataclass(frozen=True)
class Written:
    """What the target wrote behind a prompt: its end token included, and whether there was one."""

    tokens: list[int]
    finished: bool


@torch.inference_mode()
def write(
    model: Any,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    ends: frozenset[int],
    generator: torch.Generator,
    top_p: float = 1.0,
) -> list[Written]:
    """Continues prompts, all in one batch.

    Args:
        model: the target.
        prompts: token ids, at least one each.
        temperatures: one a prompt; 0 is greedy.
        max_new_tokens: where a text is cut.
        ends: ids that end a text.
        generator: of the random numbers, on the CPU.
        top_p: keep the likeliest tokens of this mass when sampling.

    Raises:
        ValueError: if the model cannot read padded prompts.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    riding = list(range(len(prompts)))
    device = host.device_of(model) or torch.device("cpu")
    reader = CachedModel(model, host.new_cache(model), host.draft_arguments(model), len(prompts), device)
    heat = torch.tensor(temperatures, device=device)
    logits = _read_prompts(reader, prompts)
    while riding:
        tokens = _choose(logits, heat[riding], generator, top_p)
        for row, token in zip(riding, tokens.tolist(), strict=True):
            if not _has_ended(texts[row], max_new_tokens, ends):
                texts[row].append(token)
        going = [place for place, row in enumerate(riding) if not _has_ended(texts[row], max_new_tokens, ends)]
        if not going:
            break
        if len(going) <= (1 - _SHARE_TO_DROP) * len(riding):
            reader.keep_rows(going)
            riding, tokens = [riding[place] for place in going], tokens[going]
        logits = reader.read(tokens[:, None]).logits[:, -1]
        reader.commit([1] * len(riding))
    return [Written(text, text[-1] in ends) for text in texts]


def _has_ended(text: list[int], max_new_tokens: int, ends: frozenset[int]) -> bool:
    return bool(text) and (len(text) >= max_new_tokens or text[-1] in ends)


def _read_prompts(reader: CachedModel, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Logits behind every prompt, (B, V)."""
    widths = [len(prompt) for prompt in prompts]
    tokens = torch.zeros(len(prompts), max(widths), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, tokens.shape[1] - len(prompt) :] = torch.tensor(prompt)
    logits = reader.read(tokens.to(reader.device), widths).logits[:, -1]
    reader.commit(widths)
    if logits.isnan().any():
        raise ValueError(
            f"{type(reader.model).__name__} cannot read prompts of different lengths together; use a batch size of 1."
        )
    return logits


def _choose(logits: Tensor, heat: Tensor, generator: torch.Generator, top_p: float) -> Tensor:
    """One token a row: the likeliest where the temperature is 0, else drawn by inverting the distribution (A,)."""
    greedy = logits.max(dim=-1).indices  # on CPUs four times as fast as argmax
    drawn = (heat > 0).nonzero()[:, 0]
    coins = torch.rand(len(logits), generator=generator).to(logits.device)  # one a row, whatever is drawn
    if len(drawn):
        probs = (logits[drawn].float() / heat[drawn, None]).softmax(dim=-1)
        greedy[drawn] = _drawn(probs, coins[drawn, None], top_p)
    return greedy


def _drawn(probs: Tensor, coins: Tensor, top_p: float) -> Tensor:
    """Inverts the cumulative distribution; with `top_p`, of the likeliest tokens only."""
    ids = None
    if top_p < 1:
        probs, ids = probs.topk(min(256, probs.shape[-1]), dim=-1)
        ahead = probs.cumsum(dim=-1) - probs
        probs = probs.masked_fill(ahead >= top_p, 0)
    sums = probs.cumsum(dim=-1)
    places = torch.searchsorted(sums, coins * sums[:, -1:], right=True).clamp(max=probs.shape[-1] - 1)
    return (places if ids is None else ids.gather(1, places))[:, 0]
