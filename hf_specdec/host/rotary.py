"""Rotary embeddings: which change with the length of a text, and their frequencies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_specdec.host.models import max_positions


def context_limits(model: Any) -> tuple[int | None, int | None]:
    """Positions a row may run up to, and below which length of the row fewer: its own border; `None` without one.

    A text within the original context of a "longrope" model must not be read beyond it: the whole pass would change.
    """
    limit, (_, border) = max_positions(model), rope_border(model)
    if border is not None and limit is not None:
        border = min(border, limit)
    return limit, border


def refuse_rope(model: Any, prompt_length: int, max_length: int, num_rows: int) -> None:
    """Raises `ValueError` where the rotary embedding would depend on how far a pass reads ahead.

    "dynamic" frequencies change with the longest position of every pass beyond the trained context; "longrope" changes
    them once, when a pass first reaches beyond its original context.
    """
    kind, border = rope_border(model)
    if border is None or max_length <= border:
        return
    if kind == "dynamic" or prompt_length <= border or num_rows > 1:
        raise ValueError(
            f"{kind} rotary embeddings change when a text grows past {border} tokens, and this one may reach "
            f"{max_length}; a draft would make them change too early. Lower max_new_tokens, or set assistant=False."
        )


def rope_border(model: Any) -> tuple[str, int | None]:
    """The kind of rotary embedding that depends on the length of the text, and from which length on."""
    config = model.config.get_text_config(decoder=True)
    for rope in _rope_settings(model):
        if rope.get("rope_type") == "dynamic":
            return "dynamic", max_positions(model)
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            return "longrope", original or getattr(config, "original_max_position_embeddings", None)
    return "fixed", None


def _rope_settings(model: Any) -> list[dict[str, Any]]:
    """Rope parameters: one set, or one for every kind of layer."""
    found = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested if nested and "rope_type" not in found else [found]


# Kinds whose frequencies never change with the length of the text.
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def rope_settings(model: Any) -> dict[str, Any]:
    """What `rope_frequencies` needs to turn like a model's layers do; plain frequencies where it turns otherwise."""
    found = dict(_rope_settings(model)[0])
    if found.get("rope_type") not in ROPE_KINDS:
        found = {"rope_type": "default"}
    found["rope_theta"] = float(found.get("rope_theta") or 10000.0)
    if (limit := max_positions(model)) is not None:
        found["max_position_embeddings"] = limit
    return found


def rope_frequencies(settings: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Rotary frequencies as the host computes them.

    Args:
        settings: `rope_type` (one of `ROPE_KINDS`), `rope_theta`, and what that kind reads; also
            `max_position_embeddings`, from which "yarn" may take its factor.
        head_dim: of the attention.

    Returns:
        Frequencies, shape (D / 2,) for the first D dimensions of a head, and the factor for cosine and sine.
    """
    rope = {name: value for name, value in settings.items() if name != "max_position_embeddings"}
    if rope["rope_type"] == "default":
        width = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.int64, device="cpu").float() / width
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=settings.get("max_position_embeddings", 2048),
        rope_parameters=rope,
    )
    with torch.device("cpu"):  # also while a model is built without weights
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
