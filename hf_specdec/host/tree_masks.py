"""Masks for passes over trees of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_specdec.host.attention import attention_of
from hf_specdec.host.caches import can_be_ragged
from hf_specdec.host.models import accepts_position_ids


def takes_trees(model: Any, cache: Any) -> bool:
    """Whether every token of a pass can be told which others it sees, and at which position it stands.

    That takes attention by a mask of ours, positions that are not derived from another mask, and layers that see
    everything or a sliding window.
    """
    config = model.config.get_text_config(decoder=True)
    return (
        accepts_position_ids(model)
        and attention_of(model) in ("eager", "sdpa")
        and set(_layer_kinds(model)) <= {"full_attention", "sliding_attention"}
        and not getattr(config, "alibi", False)
        and not getattr(config, "window_size", None)  # GPT-Neo cuts its windows by slots, whatever the mask says
        and isinstance(cache, Cache)
        and can_be_ragged(cache)
    )


def _layer_kinds(model: Any) -> list[str]:
    """What every layer sees, in the words the host's mask functions use."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "layer_types", None) is not None:
        return list(config.layer_types)
    if getattr(config, "sliding_window", None) is not None:
        return ["sliding_attention"] * config.num_hidden_layers
    if getattr(config, "attention_chunk_size", None) is not None:
        return ["chunked_attention"] * config.num_hidden_layers
    return ["full_attention"] * config.num_hidden_layers


def tree_mask(model: Any, cache: Cache, mask: Tensor | None, seen: Tensor, num_slots_before: int) -> Any:
    """A ready attention mask for a pass over tokens that see only some of each other.

    Args:
        model: the target.
        cache: what it has read.
        mask: over the cached slots, shape (B, S); `None` where all hold a token of their row.
        seen: which new tokens every new token sees, bool, shape (B, W, W).
        num_slots_before: S.

    Returns:
        What the model takes as its attention mask: (B, 1, W, K), or one such tensor for every kind of layer.
    """
    kinds = _layer_kinds(model)
    ready = {kind: _mask_of_kind(model, cache, mask, seen, num_slots_before, kinds.index(kind)) for kind in set(kinds)}
    config = model.config.get_text_config(decoder=True)
    return ready if getattr(config, "layer_types", None) is not None else ready[kinds[0]]


def _mask_of_kind(model: Any, cache: Cache, mask: Tensor | None, seen: Tensor, num_slots: int, layer: int) -> Tensor:
    """The mask that a layer and all of its kind need."""
    num_rows, width, _ = seen.shape
    past = seen.new_ones(num_rows, num_slots) if mask is None else mask.bool()
    allowed = torch.cat([past[:, None].expand(-1, width, -1), seen], dim=2)  # (B, W, S + W)
    if _layer_kinds(model)[layer] == "sliding_attention":
        depths = seen.sum(dim=2) - 1  # (B, W)
        slots = torch.arange(-num_slots, 0, device=seen.device).expand(num_rows, -1)
        keys = torch.cat([slots, depths], dim=1)  # how far from the first new token, as the host counts: by slots
        window = model.config.get_text_config(decoder=True).sliding_window
        allowed = allowed & (keys[:, None] > depths[:, :, None] - window)
    num_keys, first_key = cache.get_mask_sizes(width, layer)
    allowed = torch.nn.functional.pad(allowed[..., first_key:], (0, max(0, num_keys - allowed.shape[2] + first_key)))
    if attention_of(model) == "sdpa":
        return allowed[:, None]
    lowest = torch.finfo(model.dtype).min
    return torch.zeros_like(allowed, dtype=model.dtype).masked_fill(~allowed, lowest)[:, None]
