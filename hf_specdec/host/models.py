"""What a model is: its sizes, where it lives, whether its passes can be verified."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.host.attention import refuse_attention
from hf_specdec.host.names import CACHE_NAME

# Model types whose passes over several tokens behind a cache fail or differ from single steps.
_UNVERIFIABLE = {"cpmant", "git", "prophetnet"}
# Encoders that keep a cache though they read in both directions, unless they are told to be decoders.
_BIDIRECTIONAL = {"big_bird", "megatron-bert", "rembert", "roformer"}
if CACHE_NAME == "past_key_values":  # older hosts let these read tokens that come later, decoders or not
    _UNVERIFIABLE |= _BIDIRECTIONAL | {"doge"}


def accepts_position_ids(model: Any) -> bool:
    """Whether every row can be given positions of its own (of encoder-decoder models, few take any)."""
    return not model.config.is_encoder_decoder and "position_ids" in inspect.signature(model.forward).parameters


def max_positions(model: Any) -> int | None:
    """Positions the model was built for; `None` when its config names no limit."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)


def vocabulary_size(model: Any) -> int:
    """Number of ids the model scores: rows of its output layer, padding included."""
    head = model.get_output_embeddings()
    if hasattr(head, "out_features"):  # quantised and sharded weights have other shapes
        return head.out_features
    if head is not None and hasattr(head, "weight"):
        return head.weight.shape[0]
    return model.config.get_text_config(decoder=True).vocab_size


def hidden_size(model: Any) -> int:
    """Width of the hidden states between the decoder's layers."""
    return model.config.get_text_config(decoder=True).hidden_size


def num_layers(model: Any) -> int:
    """Layers of the decoder."""
    return model.config.get_text_config(decoder=True).num_hidden_layers


def revision(model: Any) -> str | None:
    """The commit a model was opened from; `None` if it came from no repository."""
    return getattr(model.config, "_commit_hash", None)


def is_offloaded(model: Any) -> bool:
    """Whether accelerate brings the weights to where they are needed, so that the model has no device of its own."""
    return hasattr(model, "_hf_hook") or len(set(getattr(model, "hf_device_map", {}).values())) > 1


def device_of(model: Any) -> torch.device | None:
    """Where a model wants its tokens; `None` where it takes them from anywhere (accelerate moves them)."""
    return None if is_offloaded(model) else model.device


def is_empty(model: Any) -> bool:
    """Whether a model was built without weights and never loaded."""
    return not is_offloaded(model) and model.device.type == "meta"


def num_embeddings(model: Any) -> int:
    """Number of ids the model can read."""
    return model.get_input_embeddings().weight.shape[0]


def refuse_model(model: Any) -> None:
    """Raises `ValueError` for a model that cannot be read several tokens at a time, or be rolled back."""
    name = type(model).__name__
    if not (isinstance(model, PreTrainedModel) and model.can_generate()):
        raise ValueError(f"{name} cannot generate text; speculative decoding needs a model with a language-model head.")
    if model.config.model_type in _UNVERIFIABLE:
        raise ValueError(
            f"{name} cannot read several tokens behind its cache as it reads them one by one, so a draft cannot be "
            "verified. Call generate() with assistant=False."
        )
    if model.config.model_type in _BIDIRECTIONAL and not model.config.is_decoder:
        raise ValueError(
            f"{name} reads a text in both directions, so a draft would change the text it is verified with. Load it "
            "with is_decoder=True, or call generate() with assistant=False."
        )
    if model._is_stateful:
        raise ValueError(
            f"{name} keeps a recurrent state, which cannot be rolled back after a refused draft. "
            "Call generate() with assistant=False."
        )
    refuse_attention(model)


@contextmanager
def decoding(model: Any) -> Iterator[None]:
    """The host's own mode for passes after the prompt (it swaps expert kernels on accelerators)."""
    with model._optimize_model_for_decode():
        yield


def refuse_target(model: Any) -> None:
    """Raises `ValueError` for a model whose decoding cannot be verified; it may still draft if `refuse_model` lets it.

    These are quantised models whose passes over several tokens differ from single ones by more than rounding.
    """
    refuse_model(model)
    if any(type(module).__module__.startswith("torch.ao.nn.quantized.dynamic") for module in model.modules()):
        raise ValueError(
            "torch.ao's dynamic quantisation rounds all tokens of a pass on one scale, so a draft would change the "
            "text it is verified with. Quantise weights only, or set assistant=False."
        )
    config = getattr(model.config, "quantization_config", None)
    outliers = getattr(config, "llm_int8_threshold", 0) if getattr(config, "load_in_8bit", False) else 0
    if outliers:
        raise ValueError(
            f"load_in_8bit with llm_int8_threshold={outliers} looks for outliers in all tokens of a pass at once, so a "
            "draft would change the text it is verified with. Load the model with llm_int8_threshold=0.0 or in 4 bits, "
            "or set assistant=False."
        )
