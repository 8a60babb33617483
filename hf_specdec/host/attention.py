"""Attention: which kinds can be verified, and a cheaper way through short passes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Passes over more tokens copy keys and values for every head, as the host does: the copies no longer matter.
_WIDEST_IN_GROUPS = 64


def attention_of(model: Any) -> str:
    """The name of the decoder's attention function."""
    return model.config.get_text_config(decoder=True)._attn_implementation or "eager"


def refuse_attention(model: Any) -> None:
    """Raises `ValueError` for attention that is not causal when several tokens are read behind a cache."""
    name = attention_of(model)
    if name.startswith("paged|"):
        raise ValueError(
            f"attn_implementation={name!r} belongs to continuous batching and reads no mask, so a draft cannot be "
            f'verified. Call model.set_attn_implementation("{name.removeprefix("paged|")}").'
        )
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"attn_implementation={name!r} has no mask function, so the host gives it no mask and a draft cannot be "
            f'verified. Register one: transformers.AttentionMaskInterface.register("{name}", '
            "transformers.masking_utils.sdpa_mask), or another that fits it."
        )


def attends_by_mask(model: Any) -> bool:
    """Whether attention is known to depend on unmasked slots and their order alone, wherever they lie.

    Flash attention gathers them (kernels from the Hub go through the same function), the others weigh them. A
    function of the user's own might count slots.
    """
    name = attention_of(model)
    known = [ALL_ATTENTION_FUNCTIONS[kind] for kind in ("sdpa", "flex_attention", "flash_attention_2")]
    known += [sdpa_attention_forward, _sdpa_by_groups]
    return name == "eager" or ALL_ATTENTION_FUNCTIONS.get(name) in known


class _HeadsInGroups(threading.local):
    """Whether this thread's passes read keys and values once for all heads that share them."""

    is_on = False


_heads_in_groups = _HeadsInGroups()
_threads_in_groups = 0
_lock = threading.Lock()


@contextmanager
def heads_in_groups() -> Iterator[None]:
    """Makes short passes of this thread cheaper: sdpa reads shared keys and values once, as for a single token.

    The host has that shortcut for one query a row; for several under a mask it copies the whole cache to every head,
    in every layer. Whatever else sdpa may be set to is left alone.
    """
    _install(+1)
    before, _heads_in_groups.is_on = _heads_in_groups.is_on, True
    try:
        yield
    finally:
        _heads_in_groups.is_on = before
        _install(-1)


def _install(change: int) -> None:
    """Puts the function in the host's table for the first thread that wants it, and takes it out after the last."""
    global _threads_in_groups
    with _lock:
        _threads_in_groups += change
        if _threads_in_groups and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = _sdpa_by_groups
        elif not _threads_in_groups and ALL_ATTENTION_FUNCTIONS["sdpa"] is _sdpa_by_groups:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]


def _sdpa_by_groups(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The host's sdpa, with the queries of heads that share keys laid end to end: (B, H, W, d) to (B, H/g, gW, d)."""
    num_rows, num_heads, width, _ = query.shape
    size = num_heads // key.shape[1]
    shares_mask = attention_mask is not None and attention_mask.shape[1] == 1
    is_plain = not any(kwargs.get(name) for name in ("dropout", "softcap", "output_attentions"))
    if (
        torch.compiler.is_compiling()
        or not _heads_in_groups.is_on
        or not (shares_mask and is_plain and 1 < width <= _WIDEST_IN_GROUPS and size > 1)
        or kwargs.get("position_bias") is not None
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    assert attention_mask is not None
    grouped = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(num_rows, key.shape[1], size * width, -1),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, size, 1),
        scale=kwargs.get("scaling"),
    )
    return grouped.reshape(num_rows, num_heads, width, -1).transpose(1, 2).contiguous(), None
