"""The two sides of a pair as a check sees them: models without weights, heads by their shapes, tokenizers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hf_specdec import host
from hf_specdec.checkpoints import files as checkpoint
from hf_specdec.checkpoints import inspect_head, recognise
from hf_specdec.checkpoints.headers import Stored
from hf_specdec.checkpoints.tokenizers import tokenizer_at, tokenizer_of
from hf_specdec.drafters import NAMED, Drafter, DraftModel
from hf_specdec.heads import EagleConfig, EagleHead

HEADS = ("eagle", "parallel-head")
_MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class Side:
    """What is known of a target or a drafter.

    Attributes:
        name: a folder, a Hub id or a class.
        kind: "causal-lm", "parallel-model", "eagle", "parallel-head", or "strategy" for what has no weights.
        model: of a language model; on the meta device if it was not loaded.
        tokenizer: if one was found.
        head: the shape of a head.
        settings: of the checkpoint's config.json.
        num_bytes: of its weights; `None` if neither a model nor a header tells.
        dtype: of its weights, if known.
        problem: why it cannot be opened at all.
        unread: tensors of a head that say which ids it has and could not be read, their file being cut short.
        arm: the drafter itself, if it is a strategy or holds a head.
    """

    name: str
    kind: str
    model: Any = None
    tokenizer: Any = None
    head: EagleConfig | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    num_bytes: int | None = None
    dtype: torch.dtype | None = None
    problem: str | None = None
    unread: tuple[str, ...] = ()
    arm: Drafter | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether weights are in memory."""
        return self.model is not None and not host.is_empty(self.model)


def target_side(target: Any, tokenizer: Any = None, trust_remote_code: bool = False) -> Side:
    """A target from a folder, a Hub id or a model.

    Raises:
        ValueError: if there is no such model.
    """
    if isinstance(target, str):
        return _model_side(target, "causal-lm", tokenizer, trust_remote_code)
    model = _unwrapped(target)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"target must be a folder, a Hub id or a transformers model, not {type(target).__name__}.")
    return side_of_model(model, "causal-lm", tokenizer or tokenizer_of(model))


def drafter_sides(drafter: Any, target: Side, tokenizer: Any = None, trust_remote_code: bool = False) -> list[Side]:
    """A drafter from a name, a folder, a Hub id, a model or a `Drafter`: one side for each that drafts.

    Raises:
        ValueError: if there is no such drafter.
    """
    if isinstance(drafter, str) and drafter not in NAMED:
        return [_side_of_location(drafter, target, tokenizer, trust_remote_code)]
    if isinstance(drafter, str):
        drafter = NAMED[drafter]()
    drafter = _unwrapped(drafter)
    if isinstance(drafter, PreTrainedModel):
        drafter = DraftModel(drafter)
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter must be a name ({', '.join(NAMED)}), a folder, a Hub id, a transformers model or a drafter, "
            f"not {type(drafter).__name__}."
        )
    return [side_of_drafter(arm, tokenizer, may_open=True) for arm in drafter.arms]


def side_of_drafter(arm: Drafter, tokenizer: Any = None, may_open: bool = False) -> Side:
    """A drafter in memory.

    Args:
        arm: the drafter.
        tokenizer: its tokenizer, where it holds none.
        may_open: whether a tokenizer that nobody gave may be opened from where the model came from.
    """
    weights = weights_of(arm)
    if isinstance(weights, EagleHead):
        kind = "eagle" if weights.config.mask_token_id is None else "parallel-head"
        return Side(arm.name, kind, head=weights.config, num_bytes=_bytes_of(weights), dtype=weights.dtype, arm=arm)
    if weights is not None:
        kind = "causal-lm" if isinstance(arm, DraftModel) else "parallel-model"
        known = getattr(arm, "tokenizer", None) or tokenizer
        return side_of_model(weights, kind, known or (tokenizer_of(weights) if may_open else None))
    return Side(arm.name, "strategy", num_bytes=0, arm=arm)


def weights_of(arm: Drafter) -> EagleHead | PreTrainedModel | None:
    """The head or the model that a drafter drafts with; `None` if it needs none."""
    parts = (getattr(arm, "head", None), getattr(arm, "model", None))
    return next((part for part in parts if isinstance(part, EagleHead | PreTrainedModel)), None)


def side_of_model(model: PreTrainedModel, kind: str, tokenizer: Any = None) -> Side:
    """A model in memory."""
    name = model.name_or_path or type(model).__name__
    num_bytes = None if host.is_empty(model) else _bytes_of(model)
    return Side(name, kind, model, tokenizer, settings=model.config.to_dict(), num_bytes=num_bytes, dtype=model.dtype)


# --- what is not loaded -----------------------------------------------------------------------------------


def _side_of_location(location: str, target: Side, tokenizer: Any, trust_remote_code: bool) -> Side:
    _refuse_nowhere(location)
    try:
        settings = checkpoint.read_config(location)
    except ValueError as reason:
        strategies = "" if Path(location).exists() else f"; strategies are {', '.join(NAMED)}"
        raise ValueError(f"drafter={location!r} cannot be opened{strategies}. {reason}") from reason
    tokenizer = tokenizer or tokenizer_at(location, trust_remote_code)
    try:
        kind = recognise(location).family
    except ValueError as reason:
        return Side(location, "unknown", tokenizer=tokenizer, settings=settings, problem=str(reason))
    if kind not in HEADS:
        return _model_side(location, kind, tokenizer, trust_remote_code)
    head, problem = None, None
    tensors, num_bytes, unread = _tensors_of_head(location)
    try:
        head = inspect_head(location, target.model, tensors)
    except ValueError as reason:
        problem = str(reason)
    dtypes = [tensor.value.dtype for tensor in tensors.values() if tensor.value.is_floating_point()]
    dtype = next(iter(dtypes), None)
    return Side(location, kind, None, tokenizer, head, settings, num_bytes, dtype, problem, unread)


def _model_side(location: str, kind: str, tokenizer: Any, trust_remote_code: bool) -> Side:
    _refuse_nowhere(location)
    settings = checkpoint.read_config(location)
    model = _without_weights(location, trust_remote_code)
    headers = checkpoint.read_headers(location)
    num_bytes = sum(tensor.num_bytes for tensor in headers.values()) if headers else None
    tokenizer = tokenizer or tokenizer_at(location, trust_remote_code)
    return Side(location, kind, model, tokenizer, None, settings, num_bytes, model.dtype)


def _refuse_nowhere(location: str) -> None:
    parts = location.split("/")
    if not Path(location).exists() and (len(parts) > 2 or not all(parts) or location.startswith((".", "~"))):
        raise ValueError(f"{location!r} is neither a folder nor a Hub id such as 'org/name'.")


def _without_weights(location: str, trust_remote_code: bool) -> PreTrainedModel:
    """The model on the meta device, where it has shapes and no values."""
    try:
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
        kind: Any = getattr(transformers, next(iter(config.architectures or []), ""), None)
        with torch.device("meta"):
            if kind is not None:
                model = kind(config)
            else:
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(
            f"{location!r} could not be understood as a language model; give a folder or a Hub id of one. "
            f"Transformers said: {error}"
        ) from error
    model.generation_config = _generation_config(location, model.generation_config)
    return model.to(config.dtype or torch.float32).eval()


def _generation_config(location: str, default: Any) -> Any:
    if checkpoint.fetch_known(location, "generation_config.json") is None:
        return default
    try:
        return GenerationConfig.from_pretrained(location)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{location}: generation_config.json cannot be read: {error}") from error


def _tensors_of_head(location: str) -> tuple[dict[str, Stored], int | None, tuple[str, ...]]:
    """Tensors without values, but those that say which ids a head has; their bytes; what could not be read."""
    headers = checkpoint.read_headers(location)
    if headers is None:  # a pickle has no header
        tensors = checkpoint.read_tensors(location)
        return tensors, sum(tensor.value.nbytes for tensor in tensors.values()), ()
    tensors = {name: Stored(name, info.without_values(), info.file) for name, info in headers.items()}
    maps = {name: headers[name].values() for name in tensors if name.removeprefix("model.") in _MAPS}
    unread = tuple(sorted(name for name, values in maps.items() if values is None))
    if unread:  # nothing is said about ids then: offsets of zero fit any head
        maps = {name: torch.zeros(headers[name].shape, dtype=torch.long) for name in maps if name.endswith("d2t")}
    found = {name: replace(tensors[name], value=values) for name, values in maps.items() if values is not None}
    tensors = {name: tensor for name, tensor in tensors.items() if name.removeprefix("model.") not in _MAPS}
    return tensors | found, sum(info.num_bytes for info in headers.values()), unread


# --- models in memory -------------------------------------------------------------------------------------


def _unwrapped(model: Any) -> Any:
    """The model itself, unwrapped from `torch.compile` and PEFT."""
    model = getattr(model, "_orig_mod", model)
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
