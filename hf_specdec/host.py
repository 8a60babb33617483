"""The edge to Transformers: the only file that knows private or version-dependent names.

A new Transformers release changes this file and no other. The oldest supported release is 5.17, the newest
the one named in pyproject.toml.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    logits_process,
    stopping_criteria,
)
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Transformers 5.24 hands caches around as `cache`; older releases say `past_key_values`.
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# Logits processors that read nothing but the scores.
_SCORES_ONLY = {
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    )
}
# Logits processors that are a function of a row's own prefix and scores: the same prefix, the same result.
_PREFIX_ONLY = {
    getattr(logits_process, name)
    for name in (
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensAtBeginLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
    )
}
# Slots that a growing cache layer has to spare when it grows: a share of those in use, within limits.
_SPARE_SHARE, _LEAST_SPARE, _MOST_SPARE = 8, 64, 512
# Model types whose passes over several tokens behind a cache fail or differ from single steps.
_UNVERIFIABLE = {"cpmant", "git", "prophetnet"}
# Encoders that keep a cache though they read in both directions, unless they are told to be decoders.
_BIDIRECTIONAL = {"big_bird", "megatron-bert", "rembert", "roformer"}
if CACHE_NAME == "past_key_values":  # older hosts let these read tokens that come later, decoders or not
    _UNVERIFIABLE |= _BIDIRECTIONAL | {"doge"}
# Settings of models whose attention is local in some layers.
_WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size", "window_size")
# Passes over more tokens copy keys and values for every head, as the host does: the copies no longer matter.
_WIDEST_IN_GROUPS = 64
# Of these, the ones that read which tokens a prefix holds, not in which order or how often.
_TOKEN_SET = {logits_process.RepetitionPenaltyLogitsProcessor}
# Stopping criteria that judge a row by its own tokens or by the clock, whatever the other rows do.
_ROWWISE_CRITERIA = {
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
    stopping_criteria.EosTokenCriteria,
}


# --- models -----------------------------------------------------------------------------------------------


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
    _refuse_attention(model)


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


def _attention(model: Any) -> str:
    return model.config.get_text_config(decoder=True)._attn_implementation or "eager"


def _refuse_attention(model: Any) -> None:
    """Raises `ValueError` for attention that is not causal when several tokens are read behind a cache."""
    name = _attention(model)
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
    name = _attention(model)
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


# --- processes that share the weights ---------------------------------------------------------------------


def is_synced(model: Any, synced_gpus: bool | None) -> bool:
    """Whether every pass is made by all processes together; left open, it is decided as plain `generate` does."""
    if synced_gpus is not None:
        return synced_gpus
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    num_processes = torch.distributed.get_world_size() if is_distributed else 1
    return num_processes > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def is_sharded(model: Any) -> bool:
    """Whether processes share a model's weights, so that all must take part in each of its passes."""
    is_split = any(hasattr(weight, "ds_id") or hasattr(weight, "placements") for weight in model.parameters())
    return is_split or is_fsdp_managed_module(model)


def anyone_goes_on(model: Any, has_ended: bool, is_synced: bool, device: torch.device) -> bool:
    """Whether this process, or, if they are synced, any process, has not ended yet: then all ask each other."""
    return model._has_unfinished_sequences(has_ended, is_synced, device=device)


# --- generation settings ----------------------------------------------------------------------------------


def named_arguments(model: Any, args: tuple) -> dict[str, Any]:
    """Positional arguments of `generate` by their names."""
    names = list(inspect.signature(type(model).generate).parameters)[1:]
    return dict(zip(names, args, strict=False))


def setting(model: Any, generation_config: GenerationConfig | None, arguments: dict[str, Any]) -> Callable:
    """How `generate` will read a setting: from its arguments, else the given config, else the model's."""

    def read(name: str) -> Any:
        if name in arguments:
            return arguments[name]
        value = getattr(generation_config, name, None)
        return value if value is not None else getattr(model.generation_config, name, None)

    return read


def refuse_settings(read: Callable[[str], Any]) -> None:
    """Raises `ValueError` for generation settings that speculation cannot honour exactly."""
    if (read("num_beams") or 1) > 1:
        raise ValueError(
            f"num_beams={read('num_beams')}: beam search keeps several hypotheses a row, which a draft cannot serve. "
            "Set num_beams=1, or assistant=False for this call."
        )
    if read("use_cache") is False:
        raise ValueError("use_cache=False: verifying a draft needs the key-value cache. Pass use_cache=True.")
    if read("cache_implementation") == "paged":
        raise ValueError(
            'cache_implementation="paged" would skip the assistant without a word. '
            "Leave it out, or set assistant=False for this call."
        )
    if read("cache_implementation") == "quantized":
        raise ValueError(
            'cache_implementation="quantized": a quantised cache cannot be rolled back after a refused draft. '
            "Leave it out, or set assistant=False for this call."
        )
    if read("return_token_timestamps"):
        raise ValueError(
            "return_token_timestamps=True needs the attentions of every token, which are not returned with an "
            "assistant. Leave it out, or set assistant=False for this call."
        )
    for name in ("penalty_alpha", "dola_layers", "constraints", "force_words_ids"):
        if read(name):
            raise ValueError(f"{name}={read(name)!r} selects a decoding method that takes no assistant. Leave it out.")
    for name in ("use_mtp", "speculation_type", "assistant_early_exit"):
        if read(name):
            raise ValueError(
                f"{name}={read(name)!r} starts the host's own speculative decoding, and assistant= was given too. "
                "Pass one of the two."
            )
    if read("prompt_lookup_num_tokens"):
        raise ValueError(
            f"prompt_lookup_num_tokens={read('prompt_lookup_num_tokens')} starts the host's own prompt lookup, and "
            'assistant= was given too. Pass one: assistant="prompt-lookup" does the same, for batches as well.'
        )


def cache_wanted(generation_config: GenerationConfig, cache: Cache) -> bool:
    """Whether the caller will see the cache after the call."""
    return bool(generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False))


def fill_id(generation_config: GenerationConfig) -> int:
    """The id that fills finished rows: padding, or 0 where the config names none."""
    pad = generation_config._pad_token_tensor
    return 0 if pad is None else int(pad)


def is_rowwise(criterion: Any) -> bool:
    """Whether a stopping criterion is known to judge every row by itself."""
    return type(criterion) in _ROWWISE_CRITERIA


def is_length_or_end(criterion: Any) -> bool:
    """Whether a criterion says no more than the maximal length and the end-of-sequence ids do."""
    return type(criterion) in {stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria}


def end_ids(criteria: StoppingCriteriaList) -> frozenset[int]:
    """All end-of-sequence ids the criteria look for."""
    ends = [c for c in criteria if type(c) is stopping_criteria.EosTokenCriteria]
    return frozenset(i for criterion in ends for i in criterion.eos_token_id.flatten().tolist())


def longest_allowed(criteria: StoppingCriteriaList) -> int:
    """Tokens a row may have, prompt included: a user's own length criterion replaces the host's."""
    limits = [c.max_length for c in criteria if type(c) is stopping_criteria.MaxLengthCriteria]
    return min(limits, default=2**62)


def without_tokenizer_work(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with stop strings and token healing switched off wherever they were set."""
    changed = {name: value for name, value in arguments.items() if name not in ("stop_strings", "token_healing")}
    if arguments.get("generation_config") is not None:
        changed["generation_config"] = copy.deepcopy(arguments["generation_config"])
        changed["generation_config"].stop_strings = changed["generation_config"].token_healing = None
    # What a config leaves open, the host takes from the model's own; only an argument overrides that.
    if model.generation_config.stop_strings:
        changed["stop_strings"] = None
    if model.generation_config.token_healing:
        changed["token_healing"] = False
    return changed


def stop_string_criterion(stop_strings: str | list[str], tokenizer: Any) -> Any:
    """The host's criterion for stop strings."""
    return stopping_criteria.StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)


# --- logits processors ------------------------------------------------------------------------------------


def reads_scores_only(processor: LogitsProcessor) -> bool:
    """Whether a processor is known to look at nothing but the scores (ours say so themselves)."""
    return type(processor) in _SCORES_ONLY or getattr(processor, "reads_scores_only", False)


def reads_token_set(processor: LogitsProcessor) -> bool:
    """Whether a processor is known to read a prefix as a set of tokens, so that repeating one changes nothing."""
    return type(processor) in _TOKEN_SET


def num_ignored(processor: LogitsProcessor) -> int:
    """Tokens at the front of a row that a processor passes over: the most of any row."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    return int(ignored.max()) if isinstance(ignored, Tensor) else ignored or 0


def is_stateless(processor: LogitsProcessor) -> bool:
    """Whether a processor is known to be a function of a row's own prefix and scores."""
    return reads_scores_only(processor) or type(processor) in _PREFIX_ONLY


def for_rows(processor: LogitsProcessor, rows: Tensor) -> LogitsProcessor:
    """The processor for some rows of the batch, in the given order: some hold one number a row."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    selected: Any = copy.copy(processor)
    selected.prompt_ignore_length = ignored.to(rows.device)[rows]
    return selected


def on_device(processor: LogitsProcessor, device: torch.device) -> LogitsProcessor:
    """A copy of a processor with its tensors on a device."""
    moved: Any = copy.copy(processor)
    vars(moved).update({name: value.to(device) for name, value in vars(processor).items() if isinstance(value, Tensor)})
    return moved


def with_temperature(processors: LogitsProcessorList, temperature: float) -> LogitsProcessorList:
    """The processors with their temperature replaced."""
    warper = logits_process.TemperatureLogitsWarper
    first_truncation = next((i for i, p in enumerate(processors) if reads_scores_only(p)), len(processors))
    place = next((i for i, p in enumerate(processors) if isinstance(p, warper)), first_truncation)
    others = [p for p in processors if not isinstance(p, warper)]
    return LogitsProcessorList([*others[:place], warper(float(temperature)), *others[place:]])


# --- forward passes ---------------------------------------------------------------------------------------


def prefill(model: Any, input_ids: Tensor, generation_config: GenerationConfig, kwargs: dict) -> Any:
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
        and all(type(layer) in _FORGET_NOTHING for layer in _own(kwargs[CACHE_NAME]).layers)
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
    call: Callable | None = None,
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


# --- trees ------------------------------------------------------------------------------------------------


def takes_trees(model: Any, cache: Any) -> bool:
    """Whether every token of a pass can be told which others it sees, and at which position it stands.

    That takes attention by a mask of ours, positions that are not derived from another mask, and layers that see
    everything or a sliding window.
    """
    config = model.config.get_text_config(decoder=True)
    return (
        accepts_position_ids(model)
        and _attention(model) in ("eager", "sdpa")
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
    if _attention(model) == "sdpa":
        return allowed[:, None]
    lowest = torch.finfo(model.dtype).min
    return torch.zeros_like(allowed, dtype=model.dtype).masked_fill(~allowed, lowest)[:, None]


# --- what the layers say ----------------------------------------------------------------------------------


def decoder_layers(model: Any) -> Any:
    """The decoder's layers, in order.

    Raises:
        ValueError: if they are no list.
    """
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers(model):
            return module
    raise ValueError(
        f"{type(model).__name__} does not keep its layers in a list, so their outputs cannot be read. Use a drafter "
        "that needs none (prompt lookup, suffix, a draft model)."
    )


def refuse_halves(model: Any) -> None:
    """Raises `ValueError` if the layers of a model take more from each other than their states."""
    if getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        raise ValueError(
            f"The last layers of {type(model).__name__} read the keys of earlier ones (num_kv_shared_layers), so they "
            "cannot be run alone. Use another drafter than EarlyExit."
        )


@contextmanager
def tapped(model: Any, taps: Iterable[int]) -> Iterator[dict[int, list[Tensor]]]:
    """Collects some hidden states of the passes made inside by this thread, without keeping the others.

    Args:
        model: the target.
        taps: indices into what `output_hidden_states=True` returns: 0 for the embeddings, i for what enters layer
            i, and the number of layers for the decoder's output.

    Yields:
        For every tap one tensor (B, W, H) a pass, in order.
    """
    found: dict[int, list[Tensor]] = {tap: [] for tap in taps}
    handles, thread = [], threading.get_ident()
    try:
        for tap, states in found.items():
            if tap == num_layers(model):
                hook = functools.partial(_keep_output, states, thread)
                handles.append(model.get_decoder().register_forward_hook(hook))
            else:
                hook = functools.partial(_keep_input, states, thread)
                handles.append(decoder_layers(model)[tap].register_forward_pre_hook(hook, with_kwargs=True))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _keep_input(states: list[Tensor], thread: int, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    if threading.get_ident() == thread:
        states.append(args[0] if args else kwargs["hidden_states"])


def _keep_output(states: list[Tensor], thread: int, module: Any, args: tuple, output: Any) -> None:
    if threading.get_ident() == thread:
        states.append(output[0])


# --- compiled passes --------------------------------------------------------------------------------------


def compiled_call(model: Any, generation_config: GenerationConfig, cache: Any) -> Callable | None:
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


def attends_to_encoder(model: Any) -> bool:
    """Whether the decoder looks at what an encoder says: its own, or one whose outputs it is handed."""
    return model.config.is_encoder_decoder or "encoder_outputs" in inspect.signature(model.forward).parameters


def encoder_width(model: Any) -> int | None:
    """Width of the encoder outputs that a decoder attends to, as far as its config says."""
    return getattr(model.config, "hidden_size", None)


def encoder_input(model: Any) -> tuple[str, int | None]:
    """What a model's encoder reads, and how many bands it has if these are spectra."""
    return model.get_encoder().main_input_name, getattr(model.config, "num_mel_bins", None)


def is_raw_input(model: Any, inputs: Tensor) -> bool:
    """Whether these are what an encoder reads first: not embeddings, nor the ids that `generate` makes up.

    Where only encoder outputs were passed, these ids are all negative.
    """
    if model.get_encoder().main_input_name != "input_ids":
        return inputs.is_floating_point()
    return not inputs.is_floating_point() and bool((inputs >= 0).all())


def encode(model: Any, inputs: Tensor, mask: Tensor | None, num_rows: int) -> Any:
    """What a model's own encoder says.

    Args:
        model: an encoder-decoder model.
        inputs: what `generate` was given, before it is repeated for several samples each; shape (B / n, ...).
        mask: over the inputs, repeated already, shape (B, ...), or `None`.
        num_rows: B.
    """
    encoder, repeats = model.get_encoder(), num_rows // len(inputs)
    inputs = inputs.to(device_of(model) or inputs.device)
    arguments = {encoder.main_input_name: inputs.to(model.dtype) if inputs.is_floating_point() else inputs}
    if mask is not None and "attention_mask" in inspect.signature(encoder.forward).parameters:
        arguments["attention_mask"] = mask[::repeats].to(inputs.device)
    outputs = encoder(**arguments, return_dict=True)
    _, expanded = model._expand_inputs_for_generation(repeats, is_encoder_decoder=True, encoder_outputs=outputs)
    return expanded["encoder_outputs"]


def encoder_outputs_of(kwargs: dict[str, Any], model: Any) -> Any:
    """What the target's encoder said, for a decoder that may sit elsewhere and compute in another dtype."""
    outputs = kwargs["encoder_outputs"]
    states = outputs[0].to(device=device_of(model) or outputs[0].device, dtype=model.dtype)
    if states is not outputs[0]:
        outputs = copy.copy(outputs)
        outputs["last_hidden_state"] = states
    return outputs


def encoder_arguments(model: Any, outputs: Any, mask: Tensor | None) -> dict[str, Any]:
    """Arguments with which a decoder attends to an encoder; a bare decoder takes no mask over it."""
    arguments = {"encoder_outputs": outputs}
    if mask is not None and model.config.is_encoder_decoder:
        arguments["attention_mask"] = mask.to(outputs[0].device)
    return arguments


def cache_of(outputs: Any) -> Any:
    """The cache a forward pass hands back; `None` from a model that keeps none."""
    return outputs.get(CACHE_NAME)


def hidden_states_of(outputs: Any) -> tuple[Tensor, ...] | None:
    """The decoder's hidden states of a pass, if it was asked for them."""
    states = outputs.get("decoder_hidden_states")
    return outputs.get("hidden_states") if states is None else states


def windows(cache: Cache) -> list[int | None]:
    """For every layer, how many keys a single query of plain decoding sees at most; `None` without a limit."""
    return [getattr(layer, "sliding_window", None) for layer in _own(cache).layers]


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


# --- caches -----------------------------------------------------------------------------------------------


def new_cache(model: Any) -> Cache:
    """An empty growing cache with the model's own layer kinds, ready to be rolled back."""
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    start_recording(cache)
    return EncoderDecoderCache(cache, DynamicCache(config=config)) if attends_to_encoder(model) else cache


class _RoomyLayer(DynamicLayer):
    """Appends in place: the host's layer copies all it holds in every pass, which batches and long texts feel.

    What it shows is the beginning of a longer tensor. Whoever rearranges a layer gives it tensors of its own, which are
    then copied once.
    """

    whole_keys: Tensor | None = None
    whole_values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.whole_keys, self.keys = _appended(self.whole_keys, self.keys, key_states)
        self.whole_values, self.values = _appended(self.whole_values, self.values, value_states)
        return self.keys, self.values

    def reset(self) -> None:
        self.whole_keys = self.whole_values = None
        super().reset()


def _appended(whole: Tensor | None, held: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor with room, and its beginning: what is held, (B, heads, S, d), then the new slots."""
    if held is None or held.numel() == 0:
        held = new[:, :, :0]
    used, end = held.shape[2], held.shape[2] + new.shape[2]
    if whole is None or whole.shape[2] < end or not _is_beginning(held, whole):
        spare = min(max(end // _SPARE_SHARE, _LEAST_SPARE), _MOST_SPARE)
        whole = new.new_empty(*new.shape[:2], end + spare, new.shape[3])
        whole[:, :, :used] = held
    whole[:, :, used:end] = new
    return whole, whole[:, :, :end]


def _is_beginning(held: Tensor, whole: Tensor) -> bool:
    return held.data_ptr() == whole.data_ptr() and held.stride() == whole.stride() and len(held) == len(whole)


class _WindowedLayer(DynamicSlidingWindowLayer):
    """A recording layer that shows a pass no more than its window, also in the second pass before a `crop`.

    Transformers 5.17 shows everything recorded, which no longer fits the mask; newer releases do as here.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]


# Cache layers whose slots can be rearranged row by row.
_RAGGED_LAYERS = (DynamicLayer, _RoomyLayer, DynamicSlidingWindowLayer, _WindowedLayer)


def _own(cache: Cache) -> Cache:
    """The part of a cache that holds generated tokens: cross-attention to an encoder never changes."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _layers(cache: Cache) -> list[Any]:
    """The self-attention layers that hold keys and values."""
    return [layer for layer in _own(cache).layers if getattr(layer, "keys", None) is not None]


def is_sliding(cache: Cache) -> bool:
    """Whether any layer forgets what leaves its window."""
    return any(getattr(layer, "is_sliding", False) for layer in _own(cache).layers)


def can_be_ragged(cache: Cache) -> bool:
    """Whether rows may keep different numbers of slots: the cache can be rearranged row by row.

    A fixed cache needs room for it, which only one of our own is known to have (`with_room`).
    """
    if isinstance(cache, _RoomyStaticCache):
        return True
    return not isinstance(cache, EncoderDecoderCache) and all(type(layer) in _RAGGED_LAYERS for layer in cache.layers)


def with_room(model: Any, cache: Any, max_length: int, num_ahead: int) -> Any:
    """A fixed cache that the host has just made, replaced by one with room for drafts in all rows; others stay.

    Passes are as wide as the widest draft and rows that have ended ride along, so the widest pass must fit behind
    the longest text. Sliding layers keep everything: their ring buffers cannot be rolled back, and their masks do
    the forgetting.

    Args:
        model: the target.
        cache: what the host prepared.
        max_length: tokens the longest text may get.
        num_ahead: tokens of the widest pass.

    Raises:
        ValueError: if the cache is one that an earlier call has made and returned, and too small for the text.
    """
    if type(cache) is _RoomyStaticCache and (slots := capacity(cache)) is not None and slots < max_length - 1:
        raise ValueError(
            f"The static cache that an earlier call has returned holds {slots} tokens, and the text may reach "
            f"{max_length}. Lower max_new_tokens, or do not set cache_implementation: the default cache grows."
        )
    is_ours_to_replace = type(cache) is StaticCache and not getattr(cache, "_is_user_defined", False)
    if not is_ours_to_replace or cache.offloading:
        return cache
    config = model.config.get_text_config(decoder=True)
    if {type(layer) for layer in cache.layers} - {StaticLayer, StaticSlidingWindowLayer}:
        return cache
    # The host makes a cache no smaller than the last one, so that compiled passes meet the same shapes again.
    longest = max(max_length, *(layer.max_cache_len + 1 for layer in cache.layers))
    return _RoomyStaticCache(config, longest + num_ahead)


def new_static_cache(model: Any, num_slots: int) -> Cache:
    """An empty fixed cache of plain layers, which can be rolled back and rearranged."""
    return _RoomyStaticCache(model.config.get_text_config(decoder=True), num_slots)


class _RoomyStaticCache(StaticCache):
    """A static cache of plain layers only."""

    def __init__(self, config: Any, max_cache_len: int):
        super().__init__(config=config, max_cache_len=max_cache_len)
        self.layers = [_CroppableStaticLayer(max_cache_len=max_cache_len) for _ in self.layers]


class _CroppableStaticLayer(StaticLayer):
    """A static layer that can be rolled back on every supported host: the oldest cannot do it by itself."""

    is_croppable = True

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length.sub_(abs(tokens_to_remove))  # in place: compiled passes know its address


def is_fixed(cache: Cache) -> bool:
    """Whether the cache was allocated once, so that its rows stay."""
    return bool(cache.is_compileable)


def counts_slots(model: Any, cache: Cache) -> bool:
    """Whether a hole would shift what some layer sees, so that holes must be closed at once.

    A model with local attention masks by slots even on a cache that keeps everything.
    """
    config = model.config.get_text_config(decoder=True)
    return is_sliding(cache) or is_fixed(cache) or any(getattr(config, name, None) for name in _WINDOW_SETTINGS)


def capacity(cache: Cache) -> int | None:
    """Slots a fixed cache has; `None` for a growing one."""
    if not is_fixed(cache):
        return None
    return min(layer.get_max_length() for layer in _own(cache).layers if layer.get_max_length() > 0)


def num_slots(cache: Cache) -> int:
    """Slots filled so far."""
    return int(cache.get_seq_length())


def refuse_cache(cache: Any, is_filled: bool) -> None:
    """Raises `ValueError` for a cache that cannot be rolled back.

    Args:
        cache: what the model keeps its past in.
        is_filled: whether the prompt has been read. Some layers know only then (a recurrent state appears with
            the first tokens); of others the class tells before any work.
    """
    if cache is None:
        raise ValueError(
            "The model has no key-value cache, without which a draft cannot be verified. "
            "Call generate() with assistant=False."
        )
    if not isinstance(cache, Cache):
        raise ValueError(
            f"The model keeps its past in a {type(cache).__name__}, which cannot be rolled back after a refused draft. "
            "Call generate() with assistant=False."
        )
    stuck = sorted(
        {type(layer).__name__ for layer in _own(cache).layers if not (layer if is_filled else type(layer)).is_croppable}
    )
    if stuck:
        raise ValueError(
            f"{type(cache).__name__} with {', '.join(stuck)} cannot be rolled back after a refused draft. "
            'Use the default cache (cache_implementation="dynamic"), or assistant=False for this call.'
        )


def refuse_reading_ahead(cache: Cache) -> None:
    """Raises `ValueError` for a cache whose first layers cannot get ahead of the others."""
    if getattr(cache, "offloading", False):
        raise ValueError(
            "An offloaded cache brings in the layers of whole passes one by one, so EarlyExit cannot read ahead with "
            'the first ones. Use the default cache (cache_implementation="dynamic"), or another drafter.'
        )
    known = {*_RAGGED_LAYERS, *_FORGET_NOTHING, StaticSlidingWindowLayer}
    others = {type(layer) for layer in _own(cache).layers} - known
    if others:
        names = ", ".join(sorted(other.__name__ for other in others))
        raise ValueError(
            f"EarlyExit reads ahead with the first layers, which caches of {names} are not known to allow. Use another "
            "drafter."
        )


def start_recording(cache: Cache) -> None:
    """Makes sliding layers keep what a rollback may need until the next `crop`, and others append in place."""
    cache.activate_past_recording()
    own = _own(cache)
    for layer in own.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.__class__ = _WindowedLayer
        elif type(layer) is DynamicLayer and not own.offloading:
            layer.__class__ = _RoomyLayer


def stop_recording(cache: Cache) -> None:
    """Leaves layers as plain `generate` does: sliding ones within their window, none recording or with room."""
    crop(cache, 0)
    for layer in _own(cache).layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False
        if type(layer) is _WindowedLayer:
            layer.__class__ = DynamicSlidingWindowLayer  # type: ignore[assignment]
        elif type(layer) is _RoomyLayer:
            layer.whole_keys = layer.whole_values = None
            layer.__class__ = DynamicLayer  # type: ignore[assignment]


def crop(cache: Cache, num_slots_to_drop: int) -> None:
    """Drops the newest slots of all rows. Zero still trims sliding layers to their window."""
    layers: list[Any] = _own(cache).layers
    for layer in layers:
        # The oldest host makes a decoder's cache with a layer for every encoder layer, and cannot crop those left over.
        if not (isinstance(layer, DynamicLayer) and layer.keys is None):
            layer.crop(-num_slots_to_drop)


def truncate(cache: Cache, num_slots: int) -> None:
    """Brings every layer back to `num_slots` slots, also where a pass stopped between two layers."""
    for layer in _layers(cache):
        surplus = int(layer.get_seq_length()) - num_slots
        if surplus > 0:
            layer.crop(-surplus)


def behind(cache: Cache, num_layers: int) -> Cache:
    """A view of a cache whose first layers are ahead, for passes of the layers behind them.

    The host asks the first layer of a kind how much has been read. In place of those that are ahead stand others of
    their kind, or, where nobody will ask, any.
    """
    view: Any = copy.copy(cache)
    rest = cache.layers[num_layers:]
    view.layers = [_alike(layer, rest) for layer in cache.layers[:num_layers]] + rest
    return view


def _alike(layer: Any, others: list[Any]) -> Any:
    """The first that is of a layer's kind, if any is, else the first."""
    return next((other for other in others if type(other) is type(layer)), others[0])


def keep_rows(cache: Cache, rows: Tensor) -> None:
    """Keeps some rows of a growing cache, in the given order. Its layers may lie on different devices."""
    for layer in _layers(cache):
        index = rows.to(layer.keys.device)
        if layer.keys.shape[-2]:
            layer.batch_select_indices(index)
        else:  # rolled back to nothing: the host leaves the rows of such a layer as they are
            layer.keys, layer.values = layer.keys[index], layer.values[index]


def gather_slots(cache: Cache, index: Tensor, num_slots_before: int) -> None:
    """Rearranges the slots of every row.

    Args:
        cache: a cache with `num_slots_before` slots, sliding layers recording.
        index: for every row and new slot, the old slot it comes from, shape (B, S_new). A sliding layer
            keeps the last window of it; old slots it no longer holds may only be asked for where they are
            masked.
        num_slots_before: S, needed because a sliding layer stores only the end of it.
    """
    new = index.shape[1]
    for layer in _layers(cache):
        if is_fixed(cache):
            layer.keys[:, :, :new] = _take(layer.keys, index)
            layer.values[:, :, :new] = _take(layer.values, index)
            layer.cumulative_length.fill_(new)
            continue
        stored = layer.keys.shape[-2]
        visible = min(new, layer.sliding_window - 1) if layer.is_sliding else new
        source = (index[:, new - visible :] - (num_slots_before - stored)).clamp(min=0)
        layer.keys = _take(layer.keys, source)
        layer.values = _take(layer.values, source)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = new


def reorder_newest(cache: Cache, order: Tensor, num_slots_before: int) -> None:
    """Rearranges the newest slots of every row.

    Args:
        cache: a cache with `num_slots_before` slots, sliding layers recording.
        order: which of the newest W slots stands where, shape (B, W).
        num_slots_before: S.
    """
    width = order.shape[1]
    for layer in _layers(cache):
        end = num_slots_before if is_fixed(cache) else layer.keys.shape[-2]
        newest = slice(end - width, end)
        layer.keys[:, :, newest] = _take(layer.keys[:, :, newest], order)
        layer.values[:, :, newest] = _take(layer.values[:, :, newest], order)


def _take(states: Tensor, index: Tensor) -> Tensor:
    """(B, heads, S, d) at slots (B, S_new) -> (B, heads, S_new, d)."""
    expanded = index.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, expanded)


# Layers that can be rolled back from the first pass on, since they keep whatever they were given.
_FORGET_NOTHING = (DynamicLayer, _RoomyLayer, StaticLayer, _CroppableStaticLayer)


# --- rotary embeddings ------------------------------------------------------------------------------------

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
