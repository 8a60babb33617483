"""Which kind of drafter a checkpoint holds: by its settings first, then by the names of its tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.checkpoints import files
from hf_specdec.checkpoints.names import file_names

# Types of the speculators library that are read here.
_SPECULATORS = {"eagle": "speculators eagle", "eagle3": "speculators eagle3", "peagle": "speculators peagle"}
# Where heads that draft in parallel keep the id that stands for unknown tokens.
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Settings of DFlash, the mask of which some other heads keep there too.
_DFLASH = "dflash_config"
# What families of models call their embeddings.
_TABLES = re.compile("embed|embd|wte|shared")
_LOOKED_FOR = (
    "speculators_model_type; draft_vocab_size, an Eagle3 architecture or 'midlayer.*' (EAGLE-3); 'fc.weight' or "
    "'fusion_fc.weight' with one layer (EAGLE-1, HASS); ttt_length with target_layer_ids (DeepSpec); 'mask_hidden' "
    "(P-EAGLE); spd_type or pard_token (PARD); an architecture ...ForCausalLM with its embeddings (a language model)"
)


@dataclass(frozen=True)
class Dialect:
    """What a checkpoint was recognised as.

    Attributes:
        name: of the format.
        family: what can open it: "eagle" and "parallel-head" (a head over the target's hidden states that drafts one
            token after the other, or all at once), "parallel-model" (a language model that drafts all at once) or
            "causal-lm" (any complete language model).
        mask_token_id: of the parallel families, the id that stands for tokens not known yet.
    """

    name: str
    family: str
    mask_token_id: int | None = None


def recognise(location: str) -> Dialect:
    """Says what a folder or a Hub repository holds.

    Of a repository with a complete language model only the settings are fetched, of safetensors only the headers read.

    Raises:
        ValueError: if it is none of the known formats, or one that is known and not supported yet.
    """
    config = files.read_config(location)
    with files.expected_kinds(location):
        return _recognised(config, location)


def _recognised(config: dict[str, Any], location: str) -> Dialect:
    _refuse_by_config(config, location)
    if (name := config.get("speculators_model_type")) is not None:
        return _of_head(_SPECULATORS[name], config, location)
    if (pard := _pard(config, location)) is not None:
        return pard
    if "Qwen3Eagle3Model" in architectures(config) or ("ttt_length" in config and "target_layer_ids" in config):
        return Dialect("deepspec", "eagle")
    if _says_eagle3(config):
        return _eagle3(config, location)
    return _by_names(config, location)


def architectures(config: dict[str, Any]) -> list[str]:
    """The class names a config was written with."""
    found = config.get("architectures") or []
    return [str(name) for name in found] if isinstance(found, list) else [str(found)]


def mask_id(config: dict[str, Any], location: str) -> int | None:
    """The id that stands for unknown tokens; `None` if the settings name none.

    Raises:
        ValueError: if they name different ones.
    """
    found = {key: config[key] for key in MASK_KEYS if config.get(key) is not None}
    if (within := (config.get(_DFLASH) or {}).get("mask_token_id")) is not None:
        found[f"{_DFLASH}.mask_token_id"] = within
    if len(set(found.values())) > 1:
        raise ValueError(f"{location}/config.json contradicts itself about the mask: {found}.")
    return next(iter(found.values()), None)


def is_parallel(config: dict[str, Any], location: str) -> bool:
    """Whether the settings say that a head drafts all tokens at once."""
    names = " ".join(architectures(config)).lower()
    return (
        config.get("speculators_model_type") == "peagle" or "peagle" in names or mask_id(config, location) is not None
    )


def _unsupported(config: dict[str, Any]) -> str | None:
    """The name of a format that is known and cannot be opened."""
    names = " ".join(architectures(config)).lower()
    projector = str((config.get(_DFLASH) or {}).get("projector_type", "")).lower()
    kind = str(config.get("speculators_model_type", "")).lower()
    if "dspark" in names or projector == "dspark" or kind == "dspark":
        return "DSpark"
    if "dflash2" in names or kind == "dflash2":
        return "DFlash2"
    is_other = kind in _SPECULATORS or _says_eagle3(config)
    if "dflash" in names or kind == "dflash" or (_DFLASH in config and not is_other):
        return "DFlash"
    if "medusa_num_heads" in config or "medusa" in names:
        return "Medusa"
    if kind == "mtp" or "mtp" in names:
        return "MTP"
    if config.get("spd_type") == "pard2" or any(key.startswith("pard2") for key in config):
        return "PARD-2"
    if "deepseekv2" in names and "eagle3" in names:
        return "EAGLE-3 with latent attention (MLA)"
    return None


def _refuse_by_config(config: dict[str, Any], location: str) -> None:
    if (name := _unsupported(config)) is not None:
        raise ValueError(f"{location} holds a {name} drafter (config.json), which is not supported yet.")
    kind = config.get("speculators_model_type")
    if kind is not None and kind not in _SPECULATORS:
        raise ValueError(
            f"{location}/config.json: speculators_model_type={kind!r} is not supported yet; "
            f"supported are {', '.join(_SPECULATORS)}."
        )


def _of_head(name: str, config: dict[str, Any], location: str) -> Dialect:
    if name == "speculators peagle":
        return Dialect(name, "parallel-head", mask_id(config, location))
    return Dialect(name, "eagle")


def _pard(config: dict[str, Any], location: str) -> Dialect | None:
    """PARD, which shares its key for the mask with heads: a head says so in its other settings, or has an `fc`."""
    if config.get("spd_type") != "pard" and (config.get("pard_token") is None or _says_eagle3(config)):
        return None
    if config.get("spd_type") != "pard" and _is_head(files.survey(location)):
        return None
    if mask_id(config, location) is None:
        raise ValueError(f"{location}/config.json: spd_type='pard' needs pard_token, the id of the mask.")
    return Dialect("pard", "parallel-model", mask_id(config, location))


def _says_eagle3(config: dict[str, Any]) -> bool:
    names = " ".join(architectures(config)).lower()
    keys = ("draft_vocab_size", "truncated_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    return "eagle3" in names or "peagle" in names or any(config.get(key) is not None for key in keys)


def _eagle3(config: dict[str, Any], location: str) -> Dialect:
    if is_parallel(config, location):
        return Dialect("p-eagle", "parallel-head", mask_id(config, location))
    if "use_last_layernorm" in (config.get("eagle_config") or {}):
        return Dialect("modelopt", "eagle")
    return Dialect("specforge" if "LlamaForCausalLMEagle3" in architectures(config) else "eagle3", "eagle")


def _is_head(names: Any) -> bool:
    return bool({"fc.weight", "fusion_fc.weight", "model.fc.weight", "mask_hidden", "model.mask_hidden"} & set(names))


def _by_names(config: dict[str, Any], location: str) -> Dialect:
    """Settings like those of a language model: a head of EAGLE-1, or the model itself."""
    is_model = any(name.endswith(("ForCausalLM", "LMHeadModel", "Generation")) for name in architectures(config))
    # A head has one layer; the weights of larger models are not fetched to find out. Weights in formats that are
    # not read here (GGUF, say) belong to models.
    is_far = not Path(location).is_dir() and config.get("num_hidden_layers") != 1
    if is_model and (is_far or not files.has_weights(location)):
        return Dialect("causal-lm", "causal-lm")
    stored = files.survey(location)
    names = {name.removeprefix("model.") for name in stored}
    if any(name.startswith("midlayer.") for name in names) or names & {"d2t", "layers.0.hidden_norm.weight"}:
        return _eagle3(config, location)
    if "fusion_fc.weight" in names:
        return Dialect("speculators eagle", "eagle")
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return Dialect("eagle", "eagle")
    if any(name.startswith("mtp.") or ".eh_proj." in name for name in names) and not is_model:
        raise ValueError(f"{location} holds a MTP drafter ('mtp.*' or 'eh_proj'), which is not supported yet.")
    # Layers without the model around them and without a final norm: a head that has lost its fc.
    is_bare = any(name.startswith("layers.0.") for name in stored) and "norm.weight" not in names
    if is_model and not is_bare and len(names) > 1 and any(_TABLES.search(name) for name in names):
        return Dialect("causal-lm", "causal-lm")
    raise ValueError(
        f"{location} is no known kind of drafter. Looked for {_LOOKED_FOR}. {file_names(stored.values())} holds "
        f"{', '.join(sorted(stored)[:5])}{' ...' if len(stored) > 5 else ''}."
    )
