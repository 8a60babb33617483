"""Names of tensors in all dialects, brought to those of `EagleHead`."""

from __future__ import annotations

import re

import torch
from torch import Tensor

# Beginnings of foreign names and what they are called here, after a leading "model." is gone.
_RENAMED = {
    "midlayer.": "layers.0.",
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    "embed_layernorm.": "embed_norm.",
    "embedding_layernorm.": "embed_norm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "lm_head_layernorm.": "norm.",
    "pre_lm_head_layernorm.": "norm.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGRAL = ("d2t", "t2d")


def renamed(tensors: dict[str, Tensor], location: str) -> dict[str, tuple[str, Tensor]]:
    """Every tensor under our name, with the name it has in the file.

    Rotary frequencies, which old files repeat although they follow from the settings, are left out; nothing else is.

    Raises:
        ValueError: if two tensors mean the same, or one holds values that no head can compute with.
    """
    found: dict[str, tuple[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        ours = our_name(name)
        if ours in found:
            raise ValueError(f"{location} holds {found[ours][0]} and {name}, which mean the same.")
        _check_values(ours, name, value, location)
        found[ours] = (name, value)
    return _one_norm_for_plain_layers(found, location)


def our_name(name: str) -> str:
    """What a tensor of a file is called in `EagleHead`, whatever the dialect."""
    name = name.removeprefix("model.")
    for foreign, ours in _RENAMED.items():
        if name.startswith(foreign):
            return ours + name.removeprefix(foreign)
    return name


def num_layers(names: dict[str, tuple[str, Tensor]], location: str) -> int:
    """Decoder layers in a file; settings are often copied from the target and wrong.

    Raises:
        ValueError: if there are none, or one is missing between others.
    """
    indices = {int(match[1]) for name in names if (match := re.match(r"layers\.(\d+)\.", name))}
    if indices != set(range(len(indices))) or not indices:
        raise ValueError(f"{location} holds layers {sorted(indices)}; layers 0, 1, ... were expected.")
    return len(indices)


def _check_values(ours: str, name: str, value: Tensor, location: str) -> None:
    if ours in _INTEGRAL:
        if value.is_floating_point():
            raise ValueError(f"{location}: {name} holds {value.dtype}; integers were expected.")
    elif value.dtype not in _FLOATS:
        raise ValueError(f"{location}: {name} holds {value.dtype}; quantised heads are not supported yet.")
    elif value.device.type != "meta" and not torch.isfinite(value).all():  # a header alone has no values
        raise ValueError(f"{location}: {name} holds values that are not finite numbers.")


def _one_norm_for_plain_layers(found: dict[str, tuple[str, Tensor]], location: str) -> dict[str, tuple[str, Tensor]]:
    """Layers that read no tokens have one norm for what comes in; some call it `hidden_norm`."""
    for name in [name for name in found if re.fullmatch(r"layers\.\d+\.hidden_norm\.weight", name)]:
        layer = name.removesuffix("hidden_norm.weight")
        query = found.get(f"{layer}self_attn.q_proj.weight")
        if query is None or query[1].ndim != 2 or query[1].shape[1] != found[name][1].shape[0]:
            continue
        if f"{layer}input_layernorm.weight" in found:
            raise ValueError(
                f"{location} holds {found[name][0]} and an input_layernorm for a layer that reads hidden states alone; "
                "engines disagree about which of them counts."
            )
        found[f"{layer}input_layernorm.weight"] = found.pop(name)
    return found
