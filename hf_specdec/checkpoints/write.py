"""Writes a head the way `load_head` reads it: the widespread names, with every setting said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hf_specdec.files import whole, write_text
from hf_specdec.heads import EagleConfig, EagleHead


def head_settings(config: EagleConfig) -> dict[str, Any]:
    """The config.json of a head.

    Raises:
        ValueError: for EAGLE-1, which is read and not written.
    """
    if config.kind != "eagle3":
        raise ValueError("Heads of EAGLE-1 are read, not written; write a head of kind 'eagle3'.")
    rope = dict(config.rope)
    positions = rope.pop("max_position_embeddings", None)
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": len(config.layers),
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": positions,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "shares_lm_head": not config.own_lm_head,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "mask_token_id": config.mask_token_id,
        "num_draft_tokens": config.num_draft_tokens,
        "eagle_config": {
            "use_aux_hidden_state": True,
            # Layers whose output is read: one less than the index into hidden_states.
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
        },
    }
    return {name: value for name, value in settings.items() if value is not None}


def head_tensors(head: EagleHead) -> dict[str, Tensor]:
    """The tensors of a head, on the CPU: its own, and which ids of the target it has."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    ids = tensors.pop("draft_ids")
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write_head(head: EagleHead, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes config.json and model.safetensors into a folder; each is whole or not there.

    Args:
        head: of kind "eagle3".
        folder: exists.
        dtype: of its weights on disk.

    Raises:
        ValueError: for EAGLE-1, which is read and not written.
    """
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in head_tensors(head).items()}
    write_tensors(tensors, folder / "model.safetensors")
    settings = head_settings(head.config) | {"dtype": str(dtype).removeprefix("torch.")}
    write_text(folder / "config.json", json.dumps(settings, indent=2) + "\n")


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a file of tensors that appears whole or not at all.

    Raises:
        OSError: if the disk is full.
    """
    try:
        with whole(path) as part:
            save_file(tensors, part, metadata={**(metadata or {}), "format": "pt"})
            with part.open("rb") as file:
                os.fsync(file.fileno())
    except SafetensorError as error:  # how the library says that the disk is full
        raise OSError(f"{path} could not be written: {error}") from error
