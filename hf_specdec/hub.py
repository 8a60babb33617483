"""Folders and Hub ids as assistants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.drafters import Drafter, DraftModel


def drafter_from(location: str, target: PreTrainedModel) -> Drafter | None:
    """Opens a folder or a Hub repository as a drafter for a target, on the target's device and in its dtype.

    Args:
        location: a local folder, or a Hub id such as "org/name".
        target: the model it is to draft for.

    Returns:
        The drafter; `None` if `location` is no folder and cannot be a Hub id.

    Raises:
        ValueError: if the folder or repository cannot be opened as a causal language model, or for an
            encoder-decoder target as a model of the target's kind.
    """
    if not location or not (Path(location).is_dir() or _looks_like_hub_id(location)):
        return None
    try:
        model: Any = _kind(location, target).from_pretrained(location, dtype=target.dtype)
    except (OSError, KeyError) as error:
        raise ValueError(f"assistant={location!r} could not be opened as a language model: {error}") from error
    return DraftModel(model.to(target.device).eval())


def _kind(location: str, target: PreTrainedModel) -> Any:
    """The class to open a location with: a decoder, or with its encoder what is of an encoder-decoder target's kind."""
    if not target.config.is_encoder_decoder:
        return AutoModelForCausalLM
    is_same_kind = AutoConfig.from_pretrained(location).model_type == target.config.model_type
    return type(target) if is_same_kind else AutoModelForCausalLM


def _looks_like_hub_id(location: str) -> bool:
    parts = location.split("/")
    return len(parts) == 2 and all(part and part not in {".", ".."} for part in parts)
