"""Heads in the very forms that are published: their settings and tensors by name, small.

Keys and names are those of the repositories that each form is called after; sizes are ours, values random. What a
reader must make of a form (dialect, hidden states, mask) stands beside it, written down by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.reference_heads import DRAFT, HEADS, INNER, KV, H, V, layer_shapes, random_tensors, vocabulary_tensors

MASK = 63
QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
CONCAT = ("hidden_norm", "input_layernorm")
IDS = "eagle_aux_hidden_state_layer_ids"
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}


@dataclass(frozen=True)
class Form:
    """A head on disk, and what it is.

    Attributes:
        config: its config.json.
        tensors: of its file.
        dialect: what it must be recognised as.
        taps: indices into the `hidden_states` of a target with eight layers.
        is_pickled: whether the file is `pytorch_model.bin`.
        target_hidden_size: of its target.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    dialect: str
    taps: tuple[int, ...] = (2, 4, 5)
    is_pickled: bool = False
    target_hidden_size: int = H

    @property
    def is_parallel(self) -> bool:
        return "mask_hidden" in self.tensors


def llama(**changes: Any) -> dict[str, Any]:
    """The settings that nearly every head repeats; `None` removes one."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": H,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": V,
    }
    return {key: value for key, value in (config | changes).items() if value is not None or key not in config}


def of(shapes: dict[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    return random_tensors(shapes, seed, dtype)


# --- EAGLE-1, HASS ----------------------------------------------------------------------------------------


def eagle1(config: dict[str, Any], *, bias: bool = False, **layer: Any) -> Form:
    shapes = {"fc.weight": (H, 2 * H)} | ({"fc.bias": (H,)} if bias else {})
    shapes |= layer_shapes("layers.0.", H, (), **layer)
    return Form(config, of(shapes), "eagle", (), is_pickled=True)


def vicuna() -> Form:
    """As many heads of keys as of queries, which the settings do not say; `fc` has a bias."""
    form = eagle1(llama(num_key_value_heads=None, rms_norm_eps=1e-6), bias=True)
    whole = {f"layers.0.self_attn.{name}_proj.weight": (H, H) for name in "kv"}
    return Form(form.config, form.tensors | of(whole, 1), "eagle", (), is_pickled=True)


def llama2_chat() -> Form:
    form = eagle1(llama(max_position_embeddings=4096, pretraining_tp=1, rope_scaling=None), bias=True)
    tensors = form.tensors | of({"embed_tokens.weight": (V, H)}, 1)
    return Form(form.config, tensors, "eagle", ())


def with_extra_norms() -> Form:
    """A variant with norms around the whole, under the names of those who trained it."""
    form = eagle1(llama(rope_theta=500000), bias=True)
    names = ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")
    return Form(form.config, form.tensors | of({f"{name}.weight": (H,) for name in names}, 1), "eagle", ())


def old_speculators(source: Form) -> Form:
    """An EAGLE-1 head as the first releases of the speculators library converted it."""
    has_norms = "embed_layernorm.weight" in source.tensors
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "layernorms": has_norms,
        "fusion_bias": "fc.bias" in source.tensors,
        "speculators_config": {"algorithm": "eagle", "proposal_methods": [{"proposal_type": "greedy"}]},
        "transformer_layer_config": source.config | {"architectures": None},
    }
    tensors = {}
    for name, value in source.tensors.items():
        name = name.replace("hidden_layernorm.", "transformer.input_layernorm.").replace("layers.0.", "transformer.")
        name = name.replace("fc.", "fusion_fc.").replace("lm_head_layernorm", "pre_lm_head_layernorm")
        tensors[name.replace("embed_layernorm", "embedding_layernorm")] = value
    return Form(config, tensors, "speculators eagle", ())


# --- EAGLE-3 ----------------------------------------------------------------------------------------------


def tensors3(
    prefix: str = "midlayer.", *, dim: int = 8, taps: int = 3, norms: tuple[str, ...] = CONCAT, width: int = H
):
    shapes = {"fc.weight": (H, taps * width), "norm.weight": (H,), "lm_head.weight": (DRAFT, H)}
    layer = layer_shapes(prefix, 2 * H, norms)
    if dim != 8:
        rows = {"q": HEADS * dim, "k": KV * dim, "v": KV * dim}
        layer |= {f"{prefix}self_attn.{name}_proj.weight": (count, 2 * H) for name, count in rows.items()}
        layer[f"{prefix}self_attn.o_proj.weight"] = (H, HEADS * dim)
    return of(shapes | layer) | vocabulary_tensors()


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name not in names}


def wide_target() -> Form:
    """A head narrower than its target brings its own embeddings."""
    tensors = tensors3(width=2 * H) | of({"embed_tokens.weight": (V, H)}, 1)
    config = llama(draft_vocab_size=DRAFT, target_hidden_size=2 * H)
    return Form(config, tensors, "eagle3", target_hidden_size=2 * H)


def specforge(tensors: dict[str, Tensor] | None = None, **changes: Any) -> Form:
    config = llama(architectures=["LlamaForCausalLMEagle3"], torch_dtype="bfloat16", draft_vocab_size=DRAFT)
    return Form(config | changes, tensors or tensors3(), "specforge")


def nested(ids: list[int] | None = (1, 3, 4), **changes: Any) -> dict[str, Any]:
    return ({IDS: list(ids)} if ids else {}) | {"use_aux_hidden_state": True} | changes


def modelopt(tensors: dict[str, Tensor], taps: tuple[int, ...] = (2, 4, 5), **options: Any) -> Form:
    template = {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    config = llama(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=len(tensors["lm_head.weight"]),
        head_dim=8,
        rope_theta=10000,
        rope_scaling=YARN,
        eagle_config=nested() | template | options,
    )
    return Form(config, tensors, "modelopt", taps)


def plain_layer() -> dict[str, Tensor]:
    """What ModelOpt writes of a head without taps: a layer that reads hidden states alone."""
    shapes = {"norm.weight": (H,), "lm_head.weight": (DRAFT, H)} | layer_shapes("layers.0.", H, ("input_layernorm",))
    return of(shapes) | vocabulary_tensors(with_t2d=False)


def speculators(architecture: str, kind: str = "eagle3", tensors: dict[str, Tensor] | None = None, **options) -> Form:
    tensors = tensors or tensors3("layers.0.")
    if options.get("norm_before_fc"):
        tensors = tensors | of({"input_norm.weight": (3 * H,)}, 5)
    if options.get("fc_norm"):
        tensors = tensors | of({f"fc_norm.{tap}.weight": (H,) for tap in range(3)}, 6)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    config = {
        "architectures": [architecture],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": DRAFT,
        IDS: [2, 4, 5],
        "target_hidden_size": None,
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": llama(architectures=None, rope_theta=1000000, head_dim=8),
    }
    return Form(config | options, tensors, f"speculators {kind}")


def deepspec() -> Form:
    norms = (*CONCAT, "self_attn.q_norm", "self_attn.k_norm")
    shapes = {"embed_tokens.weight": (V, H), "fc.weight": (H, 5 * H), "norm.weight": (H,), "lm_head.weight": (V, H)}
    config = llama(architectures=["Qwen3Eagle3Model"], model_type="qwen3", head_dim=8, rope_theta=1000000)
    config |= {"ttt_length": 7, "step_loss_decay": 0.8, "target_layer_ids": [0, 2, 3, 5, 7], "attention_bias": False}
    return Form(config, of(shapes | layer_shapes("layers.0.", 2 * H, norms)), "deepspec", (1, 3, 4, 6, 8))


# --- P-EAGLE ----------------------------------------------------------------------------------------------


def parallel_tensors(prefix: str = "midlayer.", *, layers: int = 4, flat: bool = False, attention: tuple = (), **layer):
    """A head of several layers, of which the first reads tokens; `attention` are further norms of every one."""
    shapes: dict[str, tuple[int, ...]] = {"mask_hidden": (1, 3 * H) if flat else (1, 1, 3 * H)}
    shapes |= {
        "embed_tokens.weight": (V, H),
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (DRAFT, H),
    }
    shapes |= layer_shapes(prefix, 2 * H, (*CONCAT, *attention), **layer)
    for index in range(1, layers):
        shapes |= layer_shapes(f"layers.{index}.", H, ("input_layernorm", *attention), **layer)
    return of(shapes) | vocabulary_tensors()


def amazon() -> Form:
    tensors = parallel_tensors(biases=(*QKV, "self_attn.o_proj"))
    form = specforge(
        tensors, num_hidden_layers=4, attention_bias=True, rope_theta=500000, ptd_token_id=MASK, eagle_config=nested()
    )
    return Form(form.config, tensors, "p-eagle")


def peagle(architecture: str, tensors: dict[str, Tensor], **changes: Any) -> Form:
    config = llama(architectures=[architecture], draft_vocab_size=DRAFT, num_hidden_layers=4, mask_token_id=MASK)
    return Form(config | changes, tensors, "p-eagle")


def speculators_peagle(architecture: str = "PEagleDraftModel", key: str = "mask_token_id", **options: Any) -> Form:
    tensors = parallel_tensors("layers.0.", layers=2)
    return speculators(architecture, "peagle", tensors, **{key: MASK}, **options)


QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QUARTER = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
FORMS = {
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": eagle1(llama(rope_theta=500000, bias=False)),
    "HArmonizedSS/HASS-LLaMA3-Instruct-8B": eagle1(llama(rope_theta=500000, bias=False, torch_dtype="bfloat16")),
    "yuhuili/EAGLE-Vicuna-7B": vicuna(),
    "yuhuili/EAGLE-llama2-chat": llama2_chat(),
    "yuhuili/EAGLE-Qwen2": eagle1(llama(qkv_bias=True, rope_theta=1000000), bias=True, biases=QKV),
    "EAGLE-1 with extra norms": with_extra_norms(),
    "nm-testing, plain": old_speculators(eagle1(llama(rope_theta=500000))),
    "nm-testing, norms": old_speculators(with_extra_norms()),
    "yuhuili/EAGLE3-LLaMA3.1": Form(llama(draft_vocab_size=DRAFT), tensors3(), "eagle3", is_pickled=True),
    "yuhuili/EAGLE3-Vicuna1.3-13B": Form(llama(draft_vocab_size=DRAFT, num_hidden_layers=40), tensors3(), "eagle3"),
    "yuhuili/EAGLE3-LLaMA3.3-70B": wide_target(),
    "AngelSlim/Qwen3-8B": Form(
        llama(architectures=["Eagle3LlamaForCausalLM"], draft_vocab_size=DRAFT, head_dim=8), tensors3(), "eagle3"
    ),
    "AngelSlim/Qwen3-4B": Form(
        llama(architectures=["Eagle3LlamaForCausalLM"], draft_vocab_size=DRAFT, head_dim=16), tensors3(dim=16), "eagle3"
    ),
    "Eagle3Qwen3": Form(
        llama(architectures=["Eagle3Qwen3ForCausalLM"], draft_vocab_size=DRAFT, head_dim=8),
        tensors3(norms=(*CONCAT, *QK_NORMS)),
        "eagle3",
    ),
    "nebius/EAGLE3-gpt-oss-20b": Form(
        llama(
            truncated_vocab_size=DRAFT,
            draft_vocab_size=DRAFT,
            head_dim=16,
            rope_theta=150000,
            rope_scaling=YARN | {"original_max_position_embeddings": 4096, "truncate": False},
        ),
        tensors3(dim=16),
        "eagle3",
    ),
    "SpecForge qwen3-8b": specforge(tensors3() | of({"embed_tokens.weight": (V, H)}, 1), head_dim=8, rope_theta=1e6),
    "SpecForge gpt-oss-20B": specforge(tensors3(dim=16), head_dim=16, eagle_config={IDS: [1, 3, 4]}),
    "SpecForge llama3-70B": specforge(rope_theta=500000, rope_scaling=LLAMA3_ROPE),
    "SpecForge EAGLE-3.1": specforge(
        tensors3() | of({f"fc_norm.{tap}.weight": (H,) for tap in range(3)}, 6), fc_norm=True, norm_output=True
    ),
    "SGLang with norms of taps": specforge(
        tensors3() | of({f"aux_norm_{place}.weight": (H,) for place in ("low", "mid", "high")}, 6), use_aux_norm=True
    ),
    "Qwen3.5-9B": specforge(
        tensors3(dim=256), head_dim=256, partial_rotary_factor=0.25, rope_parameters=QUARTER, eagle_config=nested()
    ),
    "nvidia, yarn and no t2d": modelopt(without(tensors3("layers.0."), "t2d")),
    "nvidia, whole vocabulary": modelopt(
        without(tensors3("layers.0."), "t2d", "d2t") | of({"lm_head.weight": (V, H)}, 1)
    ),
    "nvidia/gpt-oss-120b-Eagle3-v2": modelopt(
        without(tensors3("layers.0."), "t2d", "fc.weight"), (8,), use_aux_hidden_state=False, **{IDS: []}
    ),
    "ModelOpt without taps": modelopt(plain_layer(), (8,), use_aux_hidden_state=False, **{IDS: []}),
    "RedHatAI/Qwen3-8B-speculator.eagle3": speculators("Eagle3Speculator", norm_before_residual=True),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": speculators(
        "Eagle3DraftModel", norm_before_fc=True, norm_before_residual=True, embed_requires_grad=False, norm_output=False
    ),
    "deepseek-ai/eagle3_qwen3_4b": deepspec(),
    "amazon/GPT-OSS-20B-P-EAGLE": amazon(),
    "PeagleLlama": peagle("PeagleLlamaForCausalLM", parallel_tensors(flat=True)),
    "PeagleQwen3": peagle("PeagleQwen3ForCausalLM", parallel_tensors("layers.0.", attention=QK_NORMS), head_dim=8),
    "RedHatAI/Qwen3-8B-speculator.peagle": speculators_peagle("PEagleSpeculator", "ptd_token_id"),
}
