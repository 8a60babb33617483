"""Tiny random models of several families, all with visible differences between their logits."""

from __future__ import annotations

import copy

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(family: str = "llama", *, seed: int = 0, vocab: int = 64, dtype: torch.dtype = torch.float64, **changes):
    """A random model of a family, in evaluation mode, greedy by default."""
    torch.manual_seed(seed)
    model = _build(family, vocab, changes).eval().to(dtype)
    model.generation_config.do_sample = False
    model.generation_config.use_cache = True  # MPT says no
    return model


def small(seed: int, layers: int = 2, scale: float = 0.15):
    """A float32 Llama with a vocabulary of eight, none of which is nearly impossible: laws of it can be enumerated."""
    model = tiny(seed=seed, vocab=8, dtype=torch.float32, num_hidden_layers=layers)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale / model.lm_head.weight.std())
    return model


def _build(family: str, vocab: int, changes: dict) -> PreTrainedModel:
    common = COMMON | {"vocab_size": vocab} | changes
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**common))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=8, **common))
    if family.startswith("mistral"):
        return MistralForCausalLM(MistralConfig(sliding_window=int(family.removeprefix("mistral") or 8), **common))
    if family == "gemma3":
        mixed = ["sliding_attention", "full_attention", "sliding_attention"]
        common |= {"num_hidden_layers": 3, "layer_types": mixed, "sliding_window": 6, "head_dim": 8}
        common |= {"initializer_range": 0.05}  # with larger weights it repeats one token for ever
        return Gemma3ForCausalLM(Gemma3TextConfig(query_pre_attn_scalar=8, **common))
    if family == "gpt2":
        sizes = {"n_positions": common["max_position_embeddings"], "n_embd": 32, "n_layer": 2, "n_head": 2}
        ids = {name: common[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, initializer_range=0.3, **sizes, **ids))
    if family == "mpt":
        return MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=vocab, initializer_range=0.3))
    if family == "bloom":
        return BloomForCausalLM(
            BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=vocab, initializer_range=0.3)
        )
    raise ValueError(family)


def jittered(model: PreTrainedModel, scale: float = 0.03, seed: int = 1) -> PreTrainedModel:
    """A copy that usually agrees with the model, but not always: a good drafter."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in copied.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            weight.add_(noise.to(weight) * scale)
    return copied


def prompts(num_rows: int, longest: int = 12, *, vocab: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged prompts with repetitions in them, padded on the left; ids (B, longest) and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(num_rows, longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row in range(num_rows):
        length = longest if row == 0 else int(torch.randint(3, longest + 1, (), generator=generator))
        motif = torch.randint(3, vocab, (max(2, length // 2),), generator=generator)
        ids[row, -length:] = motif.repeat(8)[:length]
        mask[row, -length:] = 1
    return ids, mask
