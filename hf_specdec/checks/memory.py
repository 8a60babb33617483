"""What a drafter costs in memory: weights, and keys and values."""

from __future__ import annotations

import os
from typing import Any

import torch

from hf_specdec import host
from hf_specdec.checks.findings import Bill
from hf_specdec.checks.sides import Side


def bill(target: Side, drafters: list[Side], context: int | None, batch: int) -> Bill:
    """The bill of a pair.

    Args:
        target: the target.
        drafters: all that draft.
        context: tokens of a row; by default what the target was built for.
        batch: rows.
    """
    length = context or host.max_positions(target.model) or 2048
    target_dtype = target.dtype or torch.bfloat16
    theirs = [_cache(target, 1, target_dtype), _cache(target, length, target_dtype)]
    ours = [_drafters_caches(drafters, count, target_dtype) for count in (1, length)]
    return Bill(
        target_weights=target.num_bytes,
        drafter_weights=_total(_weights_in_use(side, target) for side in drafters),
        target_cache_per_token=theirs[0],
        drafter_cache_per_token=ours[0],
        context=length,
        batch=batch,
        target_cache=_times(theirs[1], batch),
        drafter_cache=_times(ours[1], batch),
        memory=_memory(target),
    )


def _drafters_caches(drafters: list[Side], length: int, target: torch.dtype) -> int | None:
    return _total(_cache(side, length, _dtype_in_use(side, target)) for side in drafters)


def _dtype_in_use(side: Side, target: torch.dtype) -> torch.dtype:
    """What is opened by name takes the target's dtype."""
    return side.dtype if side.is_loaded and side.dtype is not None else target


def _weights_in_use(side: Side, target: Side) -> int | None:
    is_kept = side.is_loaded or "quantization_config" in side.settings
    if is_kept or side.num_bytes is None or side.dtype is None or target.dtype is None:
        return side.num_bytes
    return side.num_bytes * target.dtype.itemsize // side.dtype.itemsize


def _cache(side: Side, length: int, dtype: torch.dtype) -> int | None:
    """Bytes of keys and values of a row of a length; layers with a sliding window keep no more than that."""
    if side.kind == "strategy":
        return 0
    if side.head is not None:
        return 2 * side.head.num_kv_heads * side.head.head_dim * dtype.itemsize * length * len(side.head.layers)
    if side.model is None:
        return None
    config = side.model.config.get_text_config(decoder=True)
    windows: list[int | None] = host.windows(host.new_cache(side.model)) or [None] * host.num_layers(side.model)
    slots = sum(min(length, window or length) for window in windows)
    numbers = _width(config)
    return None if numbers is None else numbers * dtype.itemsize * slots


def _width(config: Any) -> int | None:
    """Numbers a layer keeps of a token: its keys and its values."""
    queries = getattr(config, "num_attention_heads", None) or getattr(config, "decoder_attention_heads", None)
    if queries is None:
        return None
    if getattr(config, "kv_lora_rank", None) and getattr(config, "v_head_dim", None):  # latent attention, kept expanded
        return queries * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // queries
    return 2 * (getattr(config, "num_key_value_heads", None) or queries) * head_dim


def _memory(target: Side) -> int | None:
    """Bytes of the device: the loaded target's, or the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = target.model.device if target.is_loaded else accelerator or torch.device("cpu")
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _times(value: int | None, count: int) -> int | None:
    return None if value is None else value * count


def _total(parts: Any) -> int | None:
    known = list(parts)
    return None if None in known else sum(known)
