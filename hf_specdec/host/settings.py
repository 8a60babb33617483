"""Arguments, generation settings and stopping criteria of `generate`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import stopping_criteria

# Stopping criteria that judge a row by its own tokens or by the clock, whatever the other rows do.
_ROWWISE_CRITERIA = {
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
    stopping_criteria.EosTokenCriteria,
}


def named_arguments(model: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments of `generate` by their names."""
    names = list(inspect.signature(type(model).generate).parameters)[1:]
    return dict(zip(names, args, strict=False))


def setting(model: Any, generation_config: GenerationConfig | None, arguments: dict[str, Any]) -> Callable[[str], Any]:
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
