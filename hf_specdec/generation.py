"""How an assistant attaches to `generate`: `enable` on a model, or `speculate` for one call."""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import logging

from hf_specdec import host
from hf_specdec.checks.pair import first_meeting
from hf_specdec.drafters import NAMED, Drafter, DraftModel
from hf_specdec.hub import drafter_from, may_be_drafter
from hf_specdec.loop import SpeculativeLoop
from hf_specdec.options import OPTION_NAMES, SpeculationOptions, take_options
from hf_specdec.request import Request
from hf_specdec.stats import SpecStats

logger = logging.get_logger(__name__)

_ATTRIBUTE = "_hf_specdec"


def enable(model: Any, assistant: Any = None, **options: Any) -> Any:
    """Lets this model's `generate` take `assistant=`.

    Only this instance changes, and only by one attribute; copies keep the ability, `disable` undoes it.

    Args:
        model: a Transformers model that generates, or a PEFT wrapper around one.
        assistant: what every call uses that does not say otherwise: a drafter, a smaller model, a name
            ("prompt-lookup", "suffix"), a folder or a Hub id. Without it, plain calls stay plain.
        **options: defaults of every call, see `SpeculationOptions`.

    Returns:
        The model.

    Raises:
        ValueError: if the model cannot generate, the assistant is unknown, or an option is. Whether the
            assistant fits is checked at every call, since the tokenizer may be known only there.
    """
    if hasattr(model, "_orig_mod"):  # torch.compile: the wrapper generates with what it wraps
        enable(model._orig_mod, assistant, **options)
        return model
    core = _core_model(model)
    host.refuse_target(core)
    taken = take_options(options)
    if options:
        raise ValueError(f"enable() got unknown options {sorted(options)}; allowed are {', '.join(OPTION_NAMES)}.")
    previous = model.__dict__.get("generate")
    known = model.__dict__.get(_ATTRIBUTE)
    if known is not None and known.is_enabled:
        previous = known.previous
    attachment = _Attachment(previous, options=taken, is_enabled=True)
    if assistant is not None and assistant is not False:
        attachment.default = attachment.resolve(assistant, core)
    model.__dict__[_ATTRIBUTE] = attachment
    model.__dict__["generate"] = types.MethodType(generate, model)
    return model


def disable(model: Any) -> Any:
    """Gives a model back its own `generate`; does nothing to one that was never enabled.

    Args:
        model: as it was given to `enable`.

    Returns:
        The model.
    """
    if hasattr(model, "_orig_mod"):
        disable(model._orig_mod)
        return model
    attachment = _attached_to(model)
    if attachment is None:
        return model
    del model.__dict__[_ATTRIBUTE]
    if attachment.is_enabled:
        model.__dict__.pop("generate", None)
        if attachment.previous is not None:
            model.__dict__["generate"] = attachment.previous
    return model


def last_stats(model: Any) -> SpecStats | None:
    """Statistics of a model's last call.

    Args:
        model: an enabled model, or one that `hf_specdec.generate` was called with.

    Returns:
        The statistics; `None` before the first call, or if it was plain.

    Raises:
        ValueError: if it is neither. (`speculate` leaves nothing on the model: read `assistant.stats`.)
    """
    attachment = _attached_to(getattr(model, "_orig_mod", model))
    if attachment is None:
        raise ValueError("This model is not enabled; call hf_specdec.enable(model) first, or read assistant.stats.")
    return attachment.last_stats


def speculate(assistant: Any, **options: Any) -> Speculate:
    """One call's assistant without `enable`: `model.generate(..., custom_generate=speculate(assistant))`.

    The host keeps streamers, tokenizers and `synced_gpus` from custom generation, so streaming, stop strings, token
    healing and an explicit `synced_gpus=True` need `enable` (with ZeRO-3 or FSDP, leaving it open is enough). So does
    sampling with a `seed` where one call decodes several segments (Whisper, long audio): here every segment would meet
    the same random numbers.

    Args:
        assistant: as in `enable`.
        **options: see `SpeculationOptions`.

    Returns:
        What `custom_generate=` takes, for one call or several.

    Raises:
        ValueError: if an option is unknown or out of range. What the assistant is, is found out when it is called.
    """
    taken = take_options(options)
    if options:
        raise ValueError(f"speculate() got unknown options {sorted(options)}; allowed are {', '.join(OPTION_NAMES)}.")
    return Speculate(assistant, taken)


class Unservable(ValueError):
    """A call that cannot be served exactly, found out before the first pass."""


class Speculate:
    """What the host calls in place of its own decoding method.

    Args:
        assistant: a drafter, or what stands for one.
        options: of the call.
        streamer: gets every token once, in order.
        report: called with the statistics of all uses so far, which then must belong to one call.
        synced_gpus: the argument of `generate`; `None` leaves it to the model.
        is_checked: whether the drafter and the settings have been found to fit already.
    """

    def __init__(
        self,
        assistant: Any,
        options: SpeculationOptions,
        streamer: Any = None,
        report: Callable[[SpecStats], None] | None = None,
        synced_gpus: bool | None = None,
        is_checked: bool = False,
    ):
        self.assistant = assistant
        self.options = options
        self.streamer = streamer
        self.report = report
        self.synced_gpus = synced_gpus
        self.is_checked = is_checked
        self.stats = SpecStats()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decodes what the host prepared: all of a call, or one of its segments (Whisper, long audio).

        The signature is the host's for custom generation; it hands over what the encoder read since that is named.
        """
        self.assistant = drafter = resolve_assistant(self.assistant, model)
        is_synced = host.is_synced(model, self.synced_gpus)
        if not self.is_checked:
            _refuse(model, drafter, host.setting(model, generation_config, {}), None, is_synced)
        _refuse_prompt(input_ids, model_kwargs)
        encoder_inputs = inputs_tensor if model.config.is_encoder_decoder else None
        request = Request(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, encoder_inputs
        )
        options = drafter.options.overridden_by(self.options)
        if self.report is not None:  # all our uses belong to one call, which must not meet the same noise twice
            options = options.for_segment(self.stats.calls)
        try:
            loop = SpeculativeLoop(model, drafter, options, request, self.streamer, is_synced)
        except ValueError as reason:
            raise Unservable(str(reason)) from reason
        output = loop.run()
        if self.streamer is not None:
            self.streamer.end()
        self.stats = loop.stats if self.stats.calls == 0 else _sum([self.stats, loop.stats])
        if self.report is not None:
            self.report(self.stats)
        return output


def _sum(parts: list[SpecStats]) -> SpecStats:
    total = SpecStats()
    for part in parts:
        total.merge(part)
    return total


@dataclass
class _Attachment:
    """What `enable` leaves on a model.

    Attributes:
        previous: the instance's own `generate` from before, if it had one.
        default: assistant of calls that name none.
        options: defaults of every call.
        is_enabled: whether the model's `generate` is ours. If not, `hf_specdec.generate` was called with it, perhaps by
            the instance's own `generate`.
        resolved: drafters made from names and folders, so that a second call reuses them.
        last_stats: of the last call.
    """

    previous: Callable[..., Any] | None
    default: Drafter | None = None
    options: SpeculationOptions = field(default_factory=SpeculationOptions)
    is_enabled: bool = False
    resolved: dict[str, Drafter] = field(default_factory=dict)
    last_stats: SpecStats | None = None

    def resolve(self, assistant: Any, target: PreTrainedModel) -> Drafter:
        """The drafter an assistant stands for; what was opened by name is opened once."""
        if not isinstance(assistant, str | os.PathLike):
            return resolve_assistant(assistant, target)
        name = os.fspath(assistant)
        if name not in self.resolved:
            self.resolved[name] = resolve_assistant(name, target)
        return self.resolved[name]

    def record(self, stats: SpecStats) -> None:
        """Remembers the statistics of the last call."""
        self.last_stats = stats

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attachment:
        # A copied model keeps its assistant and shares it; a bound `previous` must follow the copy.
        return _Attachment(copy.deepcopy(self.previous, memo), self.default, self.options, self.is_enabled)

    def __reduce__(self) -> tuple[Any, ...]:
        # Drafters are not part of a pickled model: it comes back with plain `generate`.
        return (_Attachment, (None,))


def resolve_assistant(assistant: Any, target: Any) -> Drafter:
    """Makes a drafter from a model, a name, a folder or a Hub id.

    Raises:
        ValueError: if it is none of these.
    """
    if isinstance(assistant, Drafter):
        return assistant
    if isinstance(assistant, type) and issubclass(assistant, Drafter):
        raise ValueError(f"assistant={assistant.__name__} is a class; pass an object, {assistant.__name__}(...).")
    assistant = getattr(assistant, "_orig_mod", assistant)
    if isinstance(assistant, PreTrainedModel):
        return DraftModel(assistant)
    if isinstance(assistant, os.PathLike):
        assistant = os.fspath(assistant)
    if not isinstance(assistant, str):
        raise ValueError(
            f"assistant= must be a drafter, a transformers model, a name ({', '.join(NAMED)}), a folder or a Hub id, "
            f"not {type(assistant).__name__}."
        )
    if assistant in NAMED:
        return NAMED[assistant]()
    refuse_unknown_name(assistant)
    return drafter_from(assistant, target)


def refuse_unknown_name(assistant: str) -> None:
    """Raises `ValueError` if a text can stand for no drafter, whatever the target."""
    if assistant not in NAMED and not may_be_drafter(assistant):
        raise ValueError(
            f"assistant={assistant!r} is neither a strategy ({', '.join(NAMED)}), nor a folder, "
            "nor a Hub id such as 'org/name'."
        )


@torch.no_grad()
def generate(self: Any, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
    """`generate` of an enabled model: takes `assistant=` and its options beside the host's arguments.

    `hf_specdec.generate(model, ..., assistant=...)` does the same for one call of a model that is not enabled, and
    leaves its own `generate` as it is; `last_stats` tells of such a call too.

    Args:
        self: the target.
        *args: as in `transformers.GenerationMixin.generate`.
        assistant: a drafter, a smaller model, a name, a folder or a Hub id; `False` switches the default off.
        **kwargs: options (`SpeculationOptions`, `num_assistant_tokens`) and the host's arguments; `tokenizer` and
            `assistant_tokenizer` tell how the tokens of a draft model relate to the target's.

    Returns:
        What `transformers.GenerationMixin.generate` returns: ids (B, longest), or its output object.

    Raises:
        ValueError: for what cannot be served exactly; the message says why and what to do.
    """
    self = getattr(self, "_orig_mod", self)
    attachment = _attachment_of(self)
    plain = attachment.previous
    if plain is None or getattr(getattr(plain, "func", None), "calls_hf_specdec", False):  # that would lead back here
        plain = types.MethodType(type(self).generate, self)
    attachment.last_stats = None
    if assistant is False or (assistant is None and attachment.default is None):
        _refuse_options_alone(attachment, kwargs)
        return plain(*args, **kwargs)
    target = _core_model(self)
    kwargs = host.named_arguments(target, args) | kwargs
    streamer = kwargs.pop("streamer", None)
    with _ending_on_error(streamer):
        given = take_options(kwargs)
        options = attachment.options.overridden_by(given)
        drafter = attachment.default if assistant is None else attachment.resolve(assistant, target)
        drafter = _with_tokenizer(drafter, kwargs.pop("assistant_tokenizer", None))
        try:
            _refuse_call(target, drafter, kwargs)
            return _generate_with(target, plain, attachment, drafter, options, streamer, dict(kwargs))
        except Unservable as reason:
            if assistant is not None or given != SpeculationOptions():
                raise
            refusal = reason
    # The caller may know nothing of the default assistant: beam search must go on working for it.
    logger.warning_once(f"The default assistant sits this call out. {refusal}")
    return plain(**kwargs) if streamer is None else plain(streamer=streamer, **kwargs)


def _attached_to(model: Any) -> _Attachment | None:
    """What `enable`, or an earlier call of `hf_specdec.generate`, has left on a model."""
    return getattr(model, "__dict__", {}).get(_ATTRIBUTE)


def _attachment_of(model: Any) -> _Attachment:
    """What is left on a model; new on the first call of `hf_specdec.generate` with it."""
    if (attachment := _attached_to(model)) is None:
        host.refuse_target(_core_model(model))
        attachment = model.__dict__[_ATTRIBUTE] = _Attachment(previous=None)
    return attachment


def _refuse_options_alone(attachment: _Attachment, kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` for our options in a call without an assistant, which would ignore them."""
    given = [name for name in OPTION_NAMES if name in kwargs]
    if given and attachment.previous is None:  # a model's own `generate` may have arguments of these names
        raise ValueError(
            f"{', '.join(given)}: options of an assistant, and this call has none. Name one (assistant=...), or leave "
            "them out."
        )


def _generate_with(
    target: Any,
    plain: Callable[..., Any],
    attachment: _Attachment,
    drafter: Drafter,
    options: SpeculationOptions,
    streamer: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Takes out what the host would lose and hands the rest to it."""
    synced_gpus = kwargs.pop("synced_gpus", None)
    kwargs = _take_over_tokenizer_work(target, kwargs.pop("tokenizer", None), kwargs)
    speculate = Speculate(drafter, options, streamer, attachment.record, synced_gpus, is_checked=True)
    return plain(custom_generate=speculate, **kwargs)


def _with_tokenizer(drafter: Any, tokenizer: Any) -> Drafter:
    """The drafter, given its tokenizer in the host's spelling (`assistant_tokenizer=`)."""
    if tokenizer is None:
        return drafter
    if not isinstance(drafter, DraftModel):
        raise ValueError(
            f"assistant_tokenizer= is the tokenizer of a draft model, and {drafter.name} is none. Leave it out; among "
            "several drafters, give it to the one it belongs to: DraftModel(model, tokenizer=...)."
        )
    return drafter.with_tokenizer(tokenizer)


@contextmanager
def _ending_on_error(streamer: Any) -> Iterator[None]:
    """Ends the streamer of a call that fails: whoever reads it in another thread must not wait for ever."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            streamer.end()
        raise


def _refuse_call(target: Any, drafter: Drafter, kwargs: dict[str, Any]) -> None:
    """Raises `Unservable` for what can be told before any work is done."""
    try:
        _check_call(target, drafter, kwargs)
    except ValueError as reason:
        raise Unservable(str(reason)) from reason


def _check_call(target: Any, drafter: Drafter, kwargs: dict[str, Any]) -> None:
    for name in ("assistant_model", "custom_generate"):
        if kwargs.get(name) is not None:
            raise ValueError(f"assistant= and {name}= both say how to decode; pass one of the two.")
    prompt = kwargs["inputs"] if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    if prompt is not None:
        _refuse_prompt(prompt, kwargs)
        _refuse_mask(prompt, kwargs.get("attention_mask"))
    read = host.setting(target, kwargs.get("generation_config"), kwargs)
    is_synced = host.is_synced(target, kwargs.get("synced_gpus"))
    _refuse(target, drafter, read, kwargs.get("tokenizer"), is_synced)


def _refuse_prompt(prompt: Any, arguments: dict[str, Any]) -> None:
    if not isinstance(prompt, Tensor):
        raise ValueError(
            f"The prompt must be a tensor of token ids, not {type(prompt).__name__}. Hand over what a tokenizer "
            'returns by its names: generate(**tokenizer(text, return_tensors="pt"), ...).'
        )
    if not prompt.is_floating_point() and prompt.dim() != 2:
        raise ValueError(
            f"The prompt has shape {tuple(prompt.shape)}; ids of shape (texts, tokens) were expected. Of one text, "
            "ids[None] is such a batch."
        )
    if prompt.shape[-1] == 0 and arguments.get("inputs_embeds") is None:
        raise ValueError("The prompt is empty; pass at least one token (for example the BOS token).")


def _refuse_mask(prompt: Tensor, mask: Any) -> None:
    if prompt.is_floating_point() or not isinstance(mask, Tensor) or mask.dim() != 2:
        return  # not of ids, or of a kind that the model judges
    if len(mask) != len(prompt) or mask.shape[1] < prompt.shape[1]:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, and the prompts have {tuple(prompt.shape)}: it must say of "
            "each of their tokens whether it counts. Pass the mask that the tokenizer returned with them."
        )


def _refuse(target: Any, drafter: Drafter, read: Callable[[str], Any], tokenizer: Any, is_synced: bool) -> None:
    host.refuse_target(target)
    host.refuse_settings(read)
    drafter.check(target, tokenizer)
    _introduce(target, drafter, tokenizer)
    if is_synced:
        drafter.check_synced()
        if (read("guidance_scale") or 1) != 1:
            raise ValueError(
                f"guidance_scale={read('guidance_scale')} makes passes of its own for every token, and under "
                "synced_gpus=True no other process would make them too. Leave one of the two out."
            )


def _introduce(target: Any, drafter: Drafter, tokenizer: Any) -> None:
    """Checks a pair that has not met before: raises `ValueError` for errors, warns once of the rest."""
    found = first_meeting(target, drafter, tokenizer)
    if errors := [str(finding) for finding in found if finding.level == "error"]:
        raise ValueError(f"The drafter does not fit the target. {' '.join(errors)}")
    for finding in found:
        logger.warning_once(f"The drafter fits the target, but not perfectly. {finding}")


def _take_over_tokenizer_work(target: Any, tokenizer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Stop strings and token healing: the host drops the tokenizer in custom generation, so they happen here."""
    read = host.setting(target, kwargs.get("generation_config"), kwargs)
    stop_strings, heals = read("stop_strings"), read("token_healing")
    if not stop_strings and not heals:
        return kwargs
    if tokenizer is None:
        raise ValueError("stop_strings and token_healing need the target's tokenizer; pass tokenizer=.")
    kwargs = host.without_tokenizer_work(target, kwargs)
    if stop_strings:
        given = kwargs.get("stopping_criteria") or []
        ours = host.stop_string_criterion(stop_strings, tokenizer)
        kwargs["stopping_criteria"] = StoppingCriteriaList([ours, *given])
    if heals:
        name = "input_ids" if kwargs.get("input_ids") is not None else "inputs"
        if kwargs.get(name) is None:
            raise ValueError("token_healing needs a prompt of token ids; pass input_ids.")
        kwargs[name] = target.heal_tokens(kwargs[name], tokenizer)
    return kwargs


def _core_model(model: Any) -> Any:
    """The Transformers model itself, unwrapped from `torch.compile` and PEFT."""
    model = getattr(model, "_orig_mod", model)
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model
