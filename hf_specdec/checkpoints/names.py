"""Names of tensors in all dialects, brought to those of `EagleHead`."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from hf_specdec.checkpoints.headers import Stored, TensorInfo

# Beginnings of foreign names and what they are called here, after a leading "model." is gone; those that go together.
_STYLES = (
    {"midlayer.": "layers.0."},
    {
        "fusion_fc.": "fc.",
        "transformer.": "layers.0.",
        "embedding_layernorm.": "embed_norm.",
        "pre_lm_head_layernorm.": "norm.",
    },
    {
        "embed_layernorm.": "embed_norm.",
        "hidden_layernorm.": "layers.0.input_layernorm.",
        "lm_head_layernorm.": "norm.",
    },
    {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."},
)
_RENAMED = {foreign: ours for style in _STYLES for foreign, ours in style.items()}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGRAL = ("d2t", "t2d")


def renamed(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Every tensor under our name.

    Rotary frequencies, which old files repeat although they follow from the settings, are left out; nothing else is.

    Raises:
        ValueError: if two tensors mean the same, or one holds values that no head can compute with.
    """
    found: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        ours = our_name(name)
        if ours in found:
            raise ValueError(f"{found[ours]} and {stored.name} mean the same.")
        _check_values(ours, stored)
        found[ours] = stored
    return _one_norm_for_plain_layers(found)


def our_name(name: str) -> str:
    """What a tensor of a file is called in `EagleHead`, whatever the dialect."""
    name = name.removeprefix("model.")
    for foreign, ours in _RENAMED.items():
        if name.startswith(foreign):
            return ours + name.removeprefix(foreign)
    return name


def file_names(found: Iterable[Stored | TensorInfo]) -> str:
    """The files that tensors lie in, for messages."""
    return ", ".join(sorted({stored.file for stored in found}))


def expected_name(ours: str, found: dict[str, Stored]) -> str:
    """What a tensor that is missing would be called beside those that a file holds."""
    known = [stored.name.removeprefix("model.") for stored in found.values()]
    for style in _STYLES:
        if any(name.startswith(tuple(style)) for name in known):
            for foreign, meant in style.items():
                if ours.startswith(meant):
                    return foreign + ours.removeprefix(meant)
    return ours


def num_layers(found: dict[str, Stored]) -> int:
    """Decoder layers in a file; settings are often copied from the target and wrong.

    Raises:
        ValueError: if there are none, or one is missing between others.
    """
    indices = {int(match[1]) for name in found if (match := re.match(r"layers\.(\d+)\.", name))}
    if indices != set(range(len(indices))) or not indices:
        raise ValueError(
            f"{file_names(found.values())} holds layers {sorted(indices)}; layers 0, 1, ... were expected."
        )
    return len(indices)


def _check_values(ours: str, stored: Stored) -> None:
    value = stored.value
    if ours in _INTEGRAL:
        if value.is_floating_point():
            raise ValueError(f"{stored} holds {value.dtype}; integers were expected.")
    elif value.dtype not in _FLOATS:
        raise ValueError(f"{stored} holds {value.dtype}; quantised heads are not supported yet.")
    elif value.device.type != "meta" and not torch.isfinite(value).all():  # a header alone has no values
        raise ValueError(f"{stored} holds values that are not finite numbers.")


def _one_norm_for_plain_layers(found: dict[str, Stored]) -> dict[str, Stored]:
    """Layers that read no tokens have one norm for what comes in; some call it `hidden_norm`."""
    for name in [name for name in found if re.fullmatch(r"layers\.\d+\.hidden_norm\.weight", name)]:
        layer = name.removesuffix("hidden_norm.weight")
        query = found.get(f"{layer}self_attn.q_proj.weight")
        if query is None or len(query.shape) != 2 or query.shape[1:] != found[name].shape:
            continue
        if f"{layer}input_layernorm.weight" in found:
            raise ValueError(
                f"{found[name]} stands beside an input_layernorm, in a layer that reads hidden states alone; "
                "engines disagree about which of them counts."
            )
        found[f"{layer}input_layernorm.weight"] = found.pop(name)
    return found
