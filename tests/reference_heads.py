"""Heads computed slowly and obviously from the tensors and settings of a file, and files to compute them from.

Every state is computed from scratch, token by token and head by head, without a cache.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

H, T, V, DRAFT, HEADS, KV, DIM, INNER = 32, 32, 64, 40, 4, 2, 8, 48
DEPTH = 8  # layers of the target


# --- files ------------------------------------------------------------------------------------------------


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0, dtype=torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 + ("norm" in name)).to(dtype)
        for name, shape in shapes.items()
    }


def layer_shapes(prefix: str, source: int, norms: tuple[str, ...], hidden: int = H, biases: tuple[str, ...] = ()):
    """A decoder layer whose attention reads `source` columns."""
    shapes = {
        "self_attn.q_proj.weight": (HEADS * DIM, source),
        "self_attn.k_proj.weight": (KV * DIM, source),
        "self_attn.v_proj.weight": (KV * DIM, source),
        "self_attn.o_proj.weight": (hidden, HEADS * DIM),
        "mlp.gate_proj.weight": (INNER, hidden),
        "mlp.up_proj.weight": (INNER, hidden),
        "mlp.down_proj.weight": (hidden, INNER),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes |= {f"{name}.weight": (DIM if name[-6:] in ("q_norm", "k_norm") else hidden,) for name in norms}
    shapes |= {f"{name}.bias": (shapes[f"{name}.weight"][0],) for name in biases}
    return {prefix + name: shape for name, shape in shapes.items()}


def vocabulary_tensors(seed: int = 0, *, with_t2d: bool = True) -> dict[str, Tensor]:
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:DRAFT].sort().values
    tensors = {"d2t": ids - torch.arange(DRAFT)}
    if with_t2d:
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def common_config(**changes) -> dict:
    config = {
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
    }
    return config | changes


def eagle1(dtype=torch.float64, *, bias: bool = False, biases=(), layers: int = 1):
    shapes = {"fc.weight": (H, 2 * H)} | ({"fc.bias": (H,)} if bias else {})
    shapes |= layer_shapes("layers.0.", H, (), biases=biases)
    for index in range(1, layers):
        shapes |= layer_shapes(f"layers.{index}.", H, ("input_layernorm",), biases=biases)
    config = common_config(architectures=["LlamaForCausalLM"], rope_theta=500000)
    return config | ({} if bias else {"bias": False}), random_tensors(shapes, dtype=dtype)


def old_speculators(dtype=torch.float64):
    shapes = {"fusion_fc.weight": (H, 2 * H), "fusion_fc.bias": (H,)} | layer_shapes("transformer.", H, ())
    for name in ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm"):
        shapes[f"{name}.weight"] = (H,)
    config = {"speculators_model_type": "eagle", "layernorms": True, "fusion_bias": True}
    return config | {"transformer_layer_config": common_config(rope_theta=1e6)}, random_tensors(shapes, dtype=dtype)


def eagle3(dtype=torch.float64, *, prefix: str = "midlayer.", taps: int = 3, **changes):
    """The research format."""
    shapes = {"fc.weight": (H, taps * T), "norm.weight": (H,), "lm_head.weight": (DRAFT, H)}
    shapes |= layer_shapes(prefix, 2 * H, ("hidden_norm", "input_layernorm"))
    config = common_config(architectures=["LlamaForCausalLM"], draft_vocab_size=DRAFT, **changes)
    return config, random_tensors(shapes, dtype=dtype) | vocabulary_tensors()


def specforge(dtype=torch.float64, **changes):
    config, tensors = eagle3(dtype, **changes)
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    return config | {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": DIM, "eagle_config": ids}, tensors


def modelopt(dtype=torch.float64):
    config, tensors = eagle3(dtype, prefix="layers.0.")
    del tensors["t2d"]
    options = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    return config | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": options}, tensors


def speculators(dtype=torch.float64, *, kind: str = "eagle3", **options):
    body, tensors = eagle3(dtype, prefix="layers.0.")
    if options.get("norm_before_fc"):
        tensors |= random_tensors({"input_norm.weight": (3 * T,)}, 5, dtype)
    if options.get("fc_norm"):
        tensors |= random_tensors({f"fc_norm.{tap}.weight": (T,) for tap in range(3)}, 6, dtype)
    body.pop("architectures")
    body.pop("draft_vocab_size")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": DRAFT,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "target_hidden_size": None,
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "proposal_methods": [proposal]},
        "transformer_layer_config": body | {"model_type": "llama", "rope_theta": 1e6},
    }
    return config | options, tensors


def deepspec(dtype=torch.float64, *, layers: int = 2):
    shapes = {"fc.weight": (H, 5 * T), "norm.weight": (H,), "lm_head.weight": (V, H), "embed_tokens.weight": (V, H)}
    norms = ("hidden_norm", "input_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    for index in range(layers):
        shapes |= layer_shapes(f"layers.{index}.", 2 * H, norms)
    config = common_config(architectures=["Qwen3Eagle3Model"], ttt_length=7, step_loss_decay=0.8, head_dim=DIM)
    return config | {"target_layer_ids": [0, 2, 3, 5, 7], "rope_theta": 1e6}, random_tensors(shapes, dtype=dtype)


def parallel(dtype=torch.float64, *, layers: int = 4, mask_key: str = "ptd_token_id", plain_norm="input_layernorm"):
    """Amazon's format of P-EAGLE."""
    config, tensors = specforge(dtype)
    shapes = {"mask_hidden": (1, 1, 3 * T), "embed_tokens.weight": (V, H)}
    for index in range(1, layers):
        shapes |= layer_shapes(f"layers.{index}.", H, (plain_norm,))
    config |= {"num_hidden_layers": layers, mask_key: 63}
    return config, tensors | random_tensors(shapes, 7, dtype)


def without_taps(dtype=torch.float64):
    """A head over the last hidden state, with the layer of EAGLE-3."""
    config, tensors = modelopt(dtype)
    del tensors["fc.weight"]
    config["eagle_config"] |= {"use_aux_hidden_state": False}
    del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return config, tensors


def write(folder: Path, config: dict, tensors: dict[str, Tensor] | None, *, pickled: bool = False) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None and pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    elif tensors is not None:
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return str(folder)


# --- the slow forward -------------------------------------------------------------------------------------


def scaled(rope: dict, theta: float, frequencies: Tensor) -> tuple[Tensor, float]:
    """Rotary frequencies of long contexts, pair by pair, and the factor of cosine and sine."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return frequencies, 1.0
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    if kind == "yarn":  # arXiv 2309.00071: pairs that turn often within the old context stay, slow ones are stretched
        width = 2 * len(frequencies)

        def pair_that_turns(times: float) -> float:
            return width * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair_that_turns(rope.get("beta_fast", 32)), pair_that_turns(rope.get("beta_slow", 1))
        if rope.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        ramp = ((torch.arange(len(frequencies)).float() - first) / max(last - first, 0.001)).clamp(0, 1)
        return frequencies / factor * ramp + frequencies * (1 - ramp), 0.1 * math.log(factor) + 1
    assert kind == "llama3"
    found = []
    for frequency in frequencies.tolist():
        turns = original * frequency / (2 * math.pi)
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        found.append((1 - smooth) * frequency / factor + smooth * frequency)
    return torch.tensor(found), 1.0


class ReferenceHead:
    """One head, read token by token.

    Args:
        config: as in the file.
        tensors: as in the file.
        embedding: the target's, shape (V, T).
        lm_head: the target's.
    """

    def __init__(self, config: dict, tensors: dict[str, Tensor], embedding: Tensor, lm_head: Tensor):
        self.config = config
        self.body = config.get("transformer_layer_config", config)
        self.tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self.lm_head = self.tensors.get("lm_head.weight", lm_head)
        self.is_first_kind = any(name in self.tensors and self.tensors[name].shape[1] == 2 * H and not self.has("d2t")
                                 for name in ("fc.weight", "fusion_fc.weight"))  # fmt: skip

    def has(self, name: str) -> bool:
        return name in self.tensors

    def rms(self, state: Tensor, name: str) -> Tensor:
        return self.tensors[name] * state / (state.square().mean() + self.body["rms_norm_eps"]).sqrt()

    def linear(self, state: Tensor, name: str) -> Tensor:
        result = self.tensors[f"{name}.weight"] @ state
        return result + self.tensors[f"{name}.bias"] if self.has(f"{name}.bias") else result

    def combined(self, features: Tensor) -> Tensor:
        """Features of one token, shape (num_taps * T,)."""
        if self.is_first_kind or not self.has("fc.weight"):
            return features
        if self.has("input_norm.weight"):
            features = self.rms(features, "input_norm.weight")
        for names in (("fc_norm.0", "fc_norm.1", "fc_norm.2"), ("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
            if self.has(f"{names[0]}.weight"):
                taps = zip(names, features.split(T), strict=True)
                features = torch.cat([self.rms(tap, f"{name}.weight") for name, tap in taps])
        return self.linear(features, "fc")

    def masked(self) -> Tensor:
        return self.combined(self.tensors["mask_hidden"].flatten())

    def states(self, tokens: list[int], hidden: list[Tensor], positions: list[int], sees: Tensor) -> list[Tensor]:
        """States of all tokens; `sees[i, j]` says whether token i looks at token j."""
        embeds = [self.embedding[token] for token in tokens]
        for name in ("embedding_layernorm.weight", "embed_layernorm.weight"):
            if self.has(name):
                embeds = [self.rms(embed, name) for embed in embeds]
        if self.is_first_kind:
            fc = "fc" if self.has("fc.weight") else "fusion_fc"
            hidden = [self.linear(torch.cat(pair), fc) for pair in zip(embeds, hidden, strict=True)]
        for prefix in self.prefixes():
            hidden = self.layer(prefix, embeds, hidden, positions, sees)
        return hidden

    def prefixes(self) -> list[str]:
        first = [prefix for prefix in ("midlayer.", "transformer.") if self.has(f"{prefix}mlp.gate_proj.weight")]
        numbered = [f"layers.{i}." for i in range(9) if self.has(f"layers.{i}.mlp.gate_proj.weight")]
        return first + numbered

    def layer(self, prefix: str, embeds, hidden, positions, sees) -> list[Tensor]:
        sources, residuals = [], []
        for embed, state in zip(embeds, hidden, strict=True):
            residual = state
            if self.tensors[f"{prefix}self_attn.q_proj.weight"].shape[1] == 2 * H:
                normed = self.rms(state, f"{prefix}hidden_norm.weight")
                source = torch.cat([self.rms(embed, f"{prefix}input_layernorm.weight"), normed])
                residual = normed if self.config.get("norm_before_residual") else state
            elif self.has(f"{prefix}input_layernorm.weight"):
                source = self.rms(state, f"{prefix}input_layernorm.weight")
            elif self.has("hidden_layernorm.weight"):
                source = self.rms(state, "hidden_layernorm.weight")
            elif self.has(f"{prefix}hidden_norm.weight"):
                source = self.rms(state, f"{prefix}hidden_norm.weight")
            else:
                source = state
            sources.append(source)
            residuals.append(residual)
        attended = self.attention(f"{prefix}self_attn.", sources, positions, sees)
        return [self.behind(prefix, r + a) for r, a in zip(residuals, attended, strict=True)]

    def behind(self, prefix: str, state: Tensor) -> Tensor:
        normed = self.rms(state, f"{prefix}post_attention_layernorm.weight")
        gate, up = self.linear(normed, f"{prefix}mlp.gate_proj"), self.linear(normed, f"{prefix}mlp.up_proj")
        return state + self.linear(gate * gate.sigmoid() * up, f"{prefix}mlp.down_proj")

    def attention(self, prefix: str, sources, positions, sees) -> list[Tensor]:
        dim = self.body.get("head_dim") or self.tensors[f"{prefix}q_proj.weight"].shape[0] // HEADS
        queries = [self.heads(prefix, "q", source, p, dim) for source, p in zip(sources, positions, strict=True)]
        keys = [self.heads(prefix, "k", source, p, dim) for source, p in zip(sources, positions, strict=True)]
        values = [self.linear(source, f"{prefix}v_proj").split(dim) for source in sources]
        results = []
        for i, query in enumerate(queries):
            seen = [j for j in range(len(sources)) if sees[i, j]]
            heads = []
            for index, head in enumerate(query):
                shared = index // (len(query) // len(keys[i]))
                weights = torch.stack([head @ keys[j][shared] / math.sqrt(dim) for j in seen]).softmax(dim=0)
                heads.append(sum(w * values[j][shared] for w, j in zip(weights, seen, strict=True)))
            results.append(self.linear(torch.cat(heads), f"{prefix}o_proj"))
        return results

    def heads(self, prefix: str, which: str, source: Tensor, position: int, dim: int) -> list[Tensor]:
        heads = self.linear(source, f"{prefix}{which}_proj").split(dim)
        if self.has(f"{prefix}{which}_norm.weight"):
            heads = [self.rms(head, f"{prefix}{which}_norm.weight") for head in heads]
        return [self.rotated(head, position, dim) for head in heads]

    def rotated(self, head: Tensor, position: int, dim: int) -> Tensor:
        """Turns pairs (i, i + D / 2), with angles in float32 as all models do."""
        rope = self.body.get("rope_parameters") or self.body.get("rope_scaling") or {}
        theta = float(rope.get("rope_theta", self.body.get("rope_theta", 10000.0)))
        width = int(dim * rope.get("partial_rotary_factor", self.body.get("partial_rotary_factor", 1.0)))
        frequencies, scale = scaled(rope, theta, 1.0 / theta ** (torch.arange(0, width, 2).float() / width))
        angles = (position * frequencies).to(head.dtype)
        # float32 before the cosine, so that both sides round alike
        cos, sin = (scale * angles.float().cos()).to(head.dtype), (scale * angles.float().sin()).to(head.dtype)
        low, high = head[: width // 2], head[width // 2 : width]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, head[width:]])

    def logits(self, state: Tensor) -> Tensor:
        return self.lm_head @ self.normed(state)

    def normed(self, state: Tensor) -> Tensor:
        for name in ("norm.weight", "pre_lm_head_layernorm.weight", "lm_head_layernorm.weight"):
            if self.has(name):
                return self.rms(state, name)
        return state

    def feedback(self, state: Tensor) -> Tensor:
        says_so = "speculators_model_type" in self.config or self.has("fc_norm.0.weight")
        is_fed_back = self.config.get("norm_output") and says_so
        return self.normed(state) if is_fed_back else state
