"""A small random model of every family the host knows, built from its own default settings."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

# What families call their sizes; each takes those that its config has.
WIDTHS = dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "project_dim", "embedding_size", "d_embed"), 32
)
INNER = dict.fromkeys(
    (
        "intermediate_size",
        "ffn_dim",
        "decoder_ffn_dim",
        "encoder_ffn_dim",
        "n_inner",
        "ffn_hidden_size",
        "hidden_dim",
        "mlp_dim",
        "d_ff",
        "d_inner",
        "dff",
        "shared_intermediate_size",
    ),
    64,
)
DEPTHS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2
)
HEADS = dict.fromkeys(
    (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "attention_heads",
        "num_heads",
    ),
    4,
)
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
EXPERTS |= dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2)
EXPERTS |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32)
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
OTHERS = {"vocab_size": 64, "max_position_embeddings": 256, "n_positions": 256, "sliding_window": 8, "rotary_dim": 4}
OTHERS |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3, "init_std": 0.3}
OTHERS |= {"num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "window_size": 4}
OTHERS |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
OTHERS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "is_decoder": True}
OTHERS |= {"attention_types": [[["global", "local"], 1]], "mamba_d_state": 4, "mamba_n_heads": 4, "state_size": 4}
SIZES: dict[str, Any] = WIDTHS | INNER | DEPTHS | HEADS | EXPERTS | LATENT | OTHERS
# Sizes that do not go with each other everywhere; the first selection with which a model can be built is taken.
LEFT_OUT = ((), ("head_dim",), ("num_key_value_heads",), ("num_key_value_heads", "head_dim"), ("layer_types",))


def small_family(model_type: str, **changes: Any) -> PreTrainedModel:
    """A model of a family, in evaluation mode, greedy by default; float64, or float32 where attention is eager.

    Raises:
        ValueError: if no small one can be built from these sizes.
    """
    try:
        defaults = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    except Exception as reason:
        raise ValueError(f"{model_type} has no default settings: {reason}") from reason
    sizes = {name: value for name, value in SIZES.items() if _has(defaults, name)}
    if "head_dim" in vars(defaults) and vars(defaults)["head_dim"] is None:
        sizes["head_dim"] = SIZES["head_dim"]
    if getattr(defaults, "layer_types", None):  # every kind of layer
        kinds = list(dict.fromkeys(defaults.layer_types))
        shares = bool(getattr(defaults, "num_kv_shared_layers", 0))  # those above read the caches of those below
        sizes["layer_types"] = kinds * 2 if shares else (kinds * 2)[: max(2, len(kinds))]
        sizes |= {name: len(sizes["layer_types"]) for name in DEPTHS if name in sizes}
    reasons = []
    for names in LEFT_OUT:
        chosen = {name: value for name, value in sizes.items() if name not in names} | changes
        try:
            return _built(type(defaults)(**chosen))
        except Exception as reason:  # whatever a family thinks of sizes that do not fit it
            reasons.append(f"{type(reason).__name__}: {reason}"[:100])
    raise ValueError(f"No small {model_type} could be built: {'; '.join(reasons)}")


def _has(config: Any, name: str) -> bool:
    """Whether a size is set and not zero, and the same in all layers."""
    try:
        value = getattr(config, name, None)
        return value is not None and (value != 0 or isinstance(value, bool))
    except Exception:  # an error of the host's own where sizes vary from layer to layer
        return False


def _built(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device("meta"):
        num_weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if num_weights > 10_000_000:
        raise ValueError(f"{num_weights} weights")
    model = AutoModelForCausalLM.from_config(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped kernels know no float64
    # The host's eager attention casts scores to float32, where float64's lowest number is -inf and padding gives NaN.
    is_eager = model.config.get_text_config(decoder=True)._attn_implementation == "eager"
    model = model.eval().to(torch.float32 if is_eager else torch.float64)
    model.generation_config.do_sample, model.generation_config.use_cache = False, True
    with torch.no_grad():
        model(torch.arange(3, 15)[None])
    return model
