"""Forward passes: the arguments of the prompt's and the later ones, and what they hand back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.utils import (
    MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from hf_specdec.host.caches import forgets_nothing, is_fixed, num_slots
from hf_specdec.host.names import CACHE_NAME


def prefill(model: Any, input_ids: Tensor, generation_config: GenerationConfig, kwargs: dict[str, Any]) -> Any:
    """The prompt's pass, exactly as plain `generate` makes it (chunks, embeddings, a cache handed in)."""
    return model._prefill(input_ids, generation_config, kwargs)


def decoder_mask(model: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The mask over the tokens that are being generated; an encoder's own mask is another one."""
    return kwargs.get(_mask_name(model))


def prompt_takes_draft(generation_config: GenerationConfig, kwargs: dict[str, Any], tokens_given: Tensor) -> bool:
    """Whether a draft may ride behind the prompt in the first pass.

    Not behind a cache that was handed in, chunks or embeddings, nor with inputs that exist per prompt token;
    and layers that forget can be rolled back only once they record, which starts after the prompt.
    """
    known = {"attention_mask", "decoder_attention_mask", "position_ids", CACHE_NAME}
    per_token = any(
        isinstance(value, Tensor) and value.dim() > 1 and name not in known for name, value in kwargs.items()
    )
    positions = kwargs.get("position_ids")
    return (
        tokens_given.shape[1] > 0
        and not per_token
        and (positions is None or positions.dim() == 2)
        and generation_config.prefill_chunk_size is None
        and num_slots(kwargs[CACHE_NAME]) == 0
        and forgets_nothing(kwargs[CACHE_NAME])
    )


def behind_prompt(model: Any, kwargs: dict[str, Any], num_drafted: int) -> dict[str, Any]:
    """Arguments of the prompt's pass when `num_drafted` tokens ride behind the prompt."""
    arguments = dict(kwargs)
    if "logits_to_keep" in arguments:
        arguments["logits_to_keep"] = num_drafted + 1
    if num_drafted == 0:
        return arguments
    if (mask := decoder_mask(model, arguments)) is not None:
        arguments[_mask_name(model)] = torch.cat([mask, mask.new_ones(len(mask), num_drafted)], dim=1)
    if (positions := arguments.get("position_ids")) is not None:
        ahead = torch.arange(1, num_drafted + 1, device=positions.device)
        arguments["position_ids"] = torch.cat([positions, positions[..., -1:] + ahead], dim=-1)
    return arguments


def after_prompt(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the later passes: what does not belong to the prompt alone."""
    own = {_mask_name(model), "position_ids", "inputs_embeds", CACHE_NAME}
    dropped = own.union(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
    return {name: value for name, value in kwargs.items() if name not in dropped}


def forward(
    model: Any,
    tokens: Tensor,
    cache: Cache,
    mask: Any,
    position_ids: Tensor | None,
    num_logits: int,
    kwargs: dict[str, Any],
    call: Callable[..., Any] | None = None,
) -> Any:
    """One pass after the prompt.

    Args:
        model: any model with a language-model head.
        tokens: new tokens, shape (B, W).
        cache: what the model has read so far.
        mask: over cached slots and new tokens, shape (B, S + W); `None` where nothing is masked. Or what `tree_mask`
            made.
        position_ids: shape (..., B, W); `None` for models that count by themselves.
        num_logits: positions to score, counted from the end.
        kwargs: the call's other model arguments.
        call: what runs the pass; `None` is the model itself, uncompiled.
    """
    arguments = dict(kwargs)
    is_ready = mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2)
    if mask is not None and not is_ready:
        arguments[_mask_name(model)] = mask
    if position_ids is not None:
        arguments["position_ids"] = position_ids
    if "logits_to_keep" in arguments:
        arguments["logits_to_keep"] = num_logits
    if (types := arguments.get("token_type_ids")) is not None:
        arguments["token_type_ids"] = types[:, -1:].expand(tokens.shape)
    for name in ("mm_token_type_ids", "moe_mm_token_type_ids"):
        if arguments.get(name) is not None:
            arguments[name] = torch.zeros_like(tokens)
    arguments[CACHE_NAME] = cache
    inputs = model.prepare_inputs_for_generation(tokens, next_sequence_length=tokens.shape[1], **arguments)
    _refuse_cut_inputs(model, inputs, tokens)
    if is_ready or _is_shifted(inputs.get(_mask_name(model)), mask, cache):
        inputs[_mask_name(model)] = mask
    return (call or model)(**inputs, return_dict=True)


def compiled_call(model: Any, generation_config: GenerationConfig, cache: Any) -> Callable[..., Any] | None:
    """The model's compiled pass, if plain `generate` would compile its passes on this cache; else `None`."""
    if not model._valid_auto_compile_criteria({CACHE_NAME: cache}, generation_config):
        return None
    return model.get_compiled_call(generation_config.compile_config)


def _refuse_cut_inputs(model: Any, inputs: dict[str, Any], tokens: Tensor) -> None:
    """Raises `ValueError` if a model's own code feeds it fewer tokens than it was given."""
    fed = inputs.get("decoder_input_ids" if model.config.is_encoder_decoder else "input_ids")
    if fed is not None and fed.shape[1] != tokens.shape[1]:
        raise ValueError(
            f"{type(model).__name__}.prepare_inputs_for_generation feeds {fed.shape[1]} of {tokens.shape[1]} tokens "
            "behind a cache, so a draft cannot be verified. Let it obey next_sequence_length, or set assistant=False."
        )


def _is_shifted(fed: Any, mask: Any, cache: Cache) -> bool:
    """Whether a mask over all slots was lengthened, as PEFT does for learned prefixes that it does not find in it."""
    are_flat = all(isinstance(each, Tensor) and each.dim() == 2 for each in (fed, mask))
    return are_flat and fed.shape[1] != mask.shape[1] and not is_fixed(cache)


def _mask_name(model: Any) -> str:
    return "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"


def draft_arguments(model: Any) -> dict[str, Any]:
    """Model arguments for passes that `generate` did not prepare."""
    arguments: dict[str, Any] = {"use_cache": True}
    if model._supports_logits_to_keep():
        arguments["logits_to_keep"] = 1
    return arguments


def cache_of(outputs: Any) -> Any:
    """The cache a forward pass hands back; `None` from a model that keeps none."""
    return outputs.get(CACHE_NAME)


def hidden_states_of(outputs: Any) -> tuple[Tensor, ...] | None:
    """The decoder's hidden states of a pass, if it was asked for them."""
    states = outputs.get("decoder_hidden_states")
    return outputs.get("hidden_states") if states is None else states


def output_dict(model: Any, kwargs: dict[str, Any], cache: Any, hidden_states: Any, **values: Any) -> Any:
    """What plain `generate` returns with `return_dict_in_generate=True`.

    Args:
        model: the target.
        kwargs: arguments of its forward passes.
        cache: goes under the host's own name for it.
        hidden_states: of the generated tokens.
        **values: fields that all kinds of output share.
    """
    values[CACHE_NAME] = cache
    if not model.config.is_encoder_decoder:
        return GenerateDecoderOnlyOutput(hidden_states=hidden_states, **values)
    del values["attentions"]  # refused for these models
    if hidden_states is not None:
        values["encoder_hidden_states"] = kwargs["encoder_outputs"].get("hidden_states")
    return GenerateEncoderDecoderOutput(decoder_hidden_states=hidden_states, **values)
