"""Families: where trees can be masked the text is plain's; elsewhere chains are drafted, or the model is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_specdec
from hf_specdec import host
from tests.families import small_family
from tests.models import prompts
from tests.test_vision import inputs_of, llava, qwen2_vl
from tests.tree_drafters import Oracle

# Attention of many kinds: full, sliding, mixed; rotary, learned, parallel, latent, with sinks, experts or soft caps.
TREES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "ministral",
    "gemma",
    "gemma2",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "gptj",
    "gpt_bigcode",
    "codegen",
    "ctrl",
    "opt",
    "falcon",
    "bert",
    "biogpt",
    "stablelm",
    "starcoder2",
    "persimmon",
    "cohere",
    "cohere2",
    "olmo2",
    "olmo3",
    "exaone4",
    "glm4",
    "granite",
    "smollm3",
    "diffllama",
    "helium",
    "modernbert-decoder",
    "jetmoe",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "minicpm3",
    "ernie4_5",
    "gemma4_text",
]
CHAINS = ["gpt_neo", "llama4_text", "bart", "mpt", "bloom", "whisper", "lfm3"]
RECURRENT = ["mamba", "falcon_mamba", "falcon_h1", "rwkv", "qwen3_next", "olmo_hybrid", "nemotron_h"]
REFUSED = {model_type: {} for model_type in RECURRENT} | {
    "recurrent_gemma": {"num_hidden_layers": 3},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "mamba2": {"num_heads": 8, "n_groups": 1},
}


def drafted(model, num_rows, inputs=None, **changes):
    """Plain text, text with trees, and the drafter."""
    ids, mask = prompts(num_rows)
    kwargs = inputs or {"input_ids": ids, "attention_mask": mask}
    kwargs |= {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | changes
    hf_specdec.enable(model)
    plain = model.generate(assistant=False, **kwargs)
    oracle = Oracle(plain, 16, is_deep=True)
    return plain, model.generate(assistant=oracle, **kwargs), oracle


def built(model_type, **changes):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this host does not know the family")
    return small_family(model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "takes_trees"), [*((name, True) for name in TREES), *((name, False) for name in CHAINS)]
)
def test_trees_are_verified_as_plain_generation_reads_or_chains_drafted_instead(model_type, takes_trees):
    model = built(model_type)
    for num_rows in (1, 3):
        plain, ours, oracle = drafted(model, num_rows)
        assert torch.equal(plain, ours)
        assert oracle.takes_trees == [takes_trees] and oracle.stats.accepted > 0
        assert oracle.stats.mean_acceptance_length > 2 or not takes_trees


@pytest.mark.parametrize("model_type", REFUSED)
def test_recurrent_states_are_refused(model_type):
    model = built(model_type, **REFUSED[model_type])
    with pytest.raises(ValueError, match="cannot be rolled back"):
        hf_specdec.enable(model)


@pytest.mark.parametrize("model_type", ["big_bird", "megatron-bert", "rembert", "roformer"])
def test_encoders_are_refused_unless_they_are_decoders(model_type):
    with pytest.raises(ValueError, match=r"in both directions.*is_decoder=True|cannot read several tokens"):
        hf_specdec.enable(built(model_type, is_decoder=False))


@pytest.mark.parametrize("model_type", ["doge", "gemma3n_text"])
def test_families_that_hosts_treat_differently_are_right_or_refused(model_type):
    """Doge was not causal in passes without padding; Gemma 3n's caches had other layers."""
    model = built(model_type)
    for num_rows in (1, 3):
        try:
            plain, ours, oracle = drafted(model, num_rows)
        except ValueError as reason:
            if "cannot read several tokens" not in str(reason):
                raise
            continue
        assert torch.equal(plain, ours)
        assert oracle.stats.accepted > 0


def test_models_that_read_the_whole_text_again_are_refused():
    with pytest.raises(ValueError, match="cannot read several tokens behind its cache"):
        hf_specdec.enable(built("cpmant"))


def test_states_of_convolutions_are_refused_or_read_chains():
    """Of Lfm2 only the attention could mask a tree: its convolutions read what stands before a token in the pass."""
    model = built("lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    for num_rows in (1, 3):
        plain, ours, oracle = drafted(model, num_rows)
        assert torch.equal(plain, ours)
        assert oracle.takes_trees == [False]


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("make", [llava, qwen2_vl])
@pytest.mark.parametrize("has_image", [True, False])
def test_trees_behind_images(make, num_rows, has_image):
    torch.manual_seed(0)
    model = make().eval()
    inputs = inputs_of(make, num_rows)
    inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"])}
    plain, ours, oracle = drafted(model, num_rows, inputs if has_image else None)
    assert torch.equal(plain, ours)
    assert oracle.takes_trees == [True] and oracle.stats.mean_acceptance_length > 2


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_family_of_the_host_is_right_or_refused(model_type):
    """Whatever can be built small: a tree is never verified wrongly."""
    try:
        model = small_family(model_type)
        host.refuse_target(model)
    except ValueError as reason:
        pytest.skip(str(reason))
    for num_rows in (1, 3):
        try:
            model.generate(prompts(num_rows)[0], attention_mask=prompts(num_rows)[1], max_new_tokens=3)
        except Exception as reason:
            pytest.skip(f"plain generation fails: {reason}")
        try:
            plain, ours, oracle = drafted(model, num_rows)
        except ValueError as reason:
            if "assistant=False" not in str(reason):  # no refusal, which would name a way out
                raise
            pytest.skip(str(reason))
        assert torch.equal(plain, ours)
        assert oracle.stats.accepted > 0
