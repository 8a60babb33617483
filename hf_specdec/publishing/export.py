"""Writes heads in the formats of serving engines, for those who outgrow one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import host
from hf_specdec.checkpoints import load_head
from hf_specdec.checkpoints.files import read_config
from hf_specdec.checkpoints.write import head_tensors, write_tensors
from hf_specdec.heads import EagleConfig, EagleHead
from hf_specdec.loading import target_name
from hf_specdec.provenance import Provenance, filling

_DEFAULT_NUM_DRAFT_TOKENS = 5


def export(location: str, output: str | Path, format: str, target: PreTrainedModel) -> Path:
    """Writes a head for a serving engine. What the head shares with its target is written out where engines want it.

    Args:
        location: a folder or Hub id with a head of the EAGLE family.
        output: a folder that does not exist yet.
        format: a name of `FORMATS`: "vllm-speculators", "sglang" or "safeailab".
        target: the model the head drafts for.

    Returns:
        The folder.

    Raises:
        ValueError: if the format is unknown or cannot hold this head, the head was made for another target, or `output`
            exists.
    """
    refuse_export(output, format)
    if (provenance := Provenance.read(read_config(location), location)) is not None:
        provenance.check(target, location)  # its rows of the output layer are about to be written
    head = load_head(location, target)
    config, tensors = FORMATS[format](head, target)
    config["dtype"] = str(head.dtype).removeprefix("torch.")
    with filling(Path(output)) as part:
        write_tensors(tensors, part / "model.safetensors")
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Path(output)


def refuse_export(output: str | Path, format: str) -> None:
    """Raises `ValueError` for a format that is unknown or a folder that exists: before a target is loaded."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown; use one of {', '.join(FORMATS)}.")
    if Path(output).exists():
        raise ValueError(f"{output} exists; give a folder that does not.")


# --- speculators: vLLM ------------------------------------------------------------------------------------


def _speculators(head: EagleHead, target: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The format of the speculators library 0.9, which vLLM opens."""
    config = _eagle3(head, "vllm-speculators")
    if config.fc_bias:
        raise ValueError("Format vllm-speculators has no bias in fc, and this head has one; it is served here only.")
    is_parallel = config.mask_token_id is not None
    # Parallel heads are served with embeddings of their own.
    tensors = _written_out(head, target, with_embedding=is_parallel)
    if is_parallel:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    settings = {
        "architectures": ["PEagleDraftModel" if is_parallel else "Eagle3DraftModel"],
        "speculators_model_type": "peagle" if is_parallel else "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "peagle" if is_parallel else "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [_proposal(config)],
            "verifier": {"name_or_path": _location(target), "architectures": [type(target).__name__]},
        },
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "target_hidden_size": None if config.hidden_size == config.target_hidden_size else config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": _body(config),
    }
    return settings | ({"mask_token_id": config.mask_token_id} if is_parallel else {}), tensors


def _location(target: PreTrainedModel) -> str:
    """Where an engine finds the target: its Hub id if it is known, else its folder on this machine."""
    name, folder = target_name(target), Path(str(target.config.name_or_path))
    return name if "/" in name or not folder.is_dir() else str(folder.resolve())


def _proposal(config: EagleConfig) -> dict[str, Any]:
    return {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_draft_tokens or _DEFAULT_NUM_DRAFT_TOKENS,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }


def _body(config: EagleConfig) -> dict[str, Any]:
    """The head's layers, as the settings of a language model."""
    rope = dict(config.rope)
    positions = rope.pop("max_position_embeddings", 2048)
    if config.qkv_bias != config.output_bias:
        raise ValueError("The format has one setting for all biases of the attention; this head has only some.")
    if config.mlp_bias and config.qk_norm:
        raise ValueError("Engines know biases of MLPs in layers without norms of queries and keys only (mlp_bias).")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("Engines turn whole heads; this one turns a part of them (partial_rotary_factor).")
    windows = {layer.window for layer in config.layers}
    if len(windows) > 1:
        raise ValueError(f"The head's layers have different windows ({windows}), which engines do not open.")
    window = windows.pop()
    if window and not config.qk_norm:
        raise ValueError("Engines know windows in layers with norms of queries and keys only; this head has none.")
    sliding: dict[str, Any] = {"sliding_window": window, "use_sliding_window": True} if window else {}
    if window:
        sliding["layer_types"] = ["sliding_attention"] * len(config.layers)
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": positions,
        "vocab_size": config.vocab_size,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        **sliding,
    }


# --- SGLang and SafeAILab ---------------------------------------------------------------------------------


def _sglang(head: EagleHead, target: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The format of SpecForge, which SGLang opens."""
    config = _one_layer(head, "sglang")
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        raise ValueError(
            "SGLang gives the target's embeddings to a head of the target's width, so this head's own would be lost. "
            "Use vllm-speculators."
        )
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_body(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        # Layers whose output is read: one less than the index into hidden_states.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
        },
    }
    if config.fc_norm != config.norm_output:
        raise ValueError(
            f"Format sglang has norms before fc and after the layer together; this head has fc_norm={config.fc_norm} "
            f"and norm_output={config.norm_output}. Use vllm-speculators."
        )
    if config.fc_norm:
        settings |= {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    return settings, _renamed(_written_out(head, target, with_embedding=False))


def _safeailab(head: EagleHead, target: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The format of the EAGLE repository, which knows no options and reads fixed hidden states."""
    config = _one_layer(head, "safeailab")
    depth = host.num_layers(target)
    if config.taps != (2, depth // 2, depth - 3):
        raise ValueError(
            f"The head reads the hidden states {config.taps}; format safeailab always reads "
            f"{(2, depth // 2, depth - 3)}. Use another format."
        )
    if config.fc_norm or config.norm_output:
        raise ValueError("Format safeailab has no norms before fc and feeds states back before the last; use another.")
    if (kind := config.rope["rope_type"]) != "default":
        raise ValueError(f"Format safeailab has plain rotary embeddings; this head's are scaled ({kind}). Use another.")
    body = _body(config)
    # This loader knows the older places of the base.
    settings = {"architectures": ["LlamaForCausalLM"], **body, "rope_theta": body["rope_parameters"]["rope_theta"]}
    settings |= {"draft_vocab_size": config.draft_vocab_size, "tie_word_embeddings": False}
    if config.hidden_size != config.target_hidden_size:
        settings["target_hidden_size"] = config.target_hidden_size
    return settings, _renamed(_written_out(head, target, with_embedding=False))


# What the one layer of these engines' Llama does not have.
_UNUSUAL = ("norm_before_residual", "norm_before_fc", "fc_bias", "qk_norm", "qkv_bias", "output_bias", "mlp_bias")


def _one_layer(head: EagleHead, format: str) -> EagleConfig:
    """The config of a head that these engines can compute."""
    config = _eagle3(head, format)
    unusual = [name for name in _UNUSUAL if getattr(config, name)]
    reasons = {
        f"sets {', '.join(unusual)}": bool(unusual),
        "drafts all tokens at once": config.mask_token_id is not None,
        f"has {len(config.layers)} layers": len(config.layers) > 1,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ValueError(f"Format {format} holds heads with one plain layer; this one {reason}. Use vllm-speculators.")
    return config


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer.", 1): value for name, value in tensors.items()}


# --- what formats share -----------------------------------------------------------------------------------


def _eagle3(head: EagleHead, format: str) -> EagleConfig:
    config = head.config
    if config.kind != "eagle3" or not config.has_fc:
        raise ValueError(f"Format {format} holds EAGLE-3 and P-EAGLE heads over several states; this one is another.")
    reads = [layer.reads_tokens for layer in config.layers]
    reasons = {
        "has no final norm": not config.final_norm,
        "reads tokens in other layers": reads != [True] + [False] * (len(reads) - 1),
        "has a layer without a norm of what it reads": not all(layer.input_norm for layer in config.layers),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ValueError(
            f"Format {format} holds heads whose first layer reads tokens, with all norms; this one {reason}."
        )
    return config


def _written_out(head: EagleHead, target: PreTrainedModel, with_embedding: bool) -> dict[str, Tensor]:
    """All tensors of a head, with the rows it shares of the target's output layer, and its embeddings if wanted."""
    tensors = head_tensors(head)
    if "lm_head.weight" not in tensors:
        layer: Any = target.get_output_embeddings()
        if getattr(layer, "bias", None) is not None:
            raise ValueError("The head shares an output layer with a bias, which these formats cannot hold.")
        rows = layer.weight.detach()[head.draft_ids.to(layer.weight.device)]
        tensors["lm_head.weight"] = rows.to("cpu", head.dtype).contiguous()
    if with_embedding and "embed_tokens.weight" not in tensors:
        table: Any = target.get_input_embeddings()
        tensors["embed_tokens.weight"] = table.weight.detach().to("cpu", head.dtype).clone()
    if head.config.draft_vocab_size == head.config.vocab_size:
        tensors = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    return {name: value.contiguous() for name, value in tensors.items()}


FORMATS = {"vllm-speculators": _speculators, "sglang": _sglang, "safeailab": _safeailab}
