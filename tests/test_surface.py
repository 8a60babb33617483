"""Every argument of `generate` and every field of GenerationConfig is served as in plain, or refused.

The tables below must know them all: a new Transformers release that adds one makes `test_the_tables_are_complete` fail.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from tests.models import jittered, prompts, tiny
from tests.reference import assert_follows, target_law
from tests.test_law import PLAIN, PROMPT, VOCAB, small

# Greedy output is plain's, batch 1 and 3.
SERVED_GREEDILY = {
    "bad_words_ids": [[5], [6, 7]],
    "begin_suppress_tokens": [9, 30],
    "bos_token_id": 1,
    "cache_implementation": "static",
    "decoder_start_token_id": 1,
    "disable_compile": True,
    "do_sample": False,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.3,
    "eos_token_id": [2, 7, 11],
    "exponential_decay_length_penalty": (3, 1.3),
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 2,
    "guidance_scale": 1.6,
    "max_cache_len": 64,
    "max_length": 25,
    "max_new_tokens": 17,
    "max_time": 1000.0,
    "min_length": 20,
    "min_new_tokens": 9,
    "no_repeat_ngram_size": 2,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "pad_token_id": 3,
    "prefill_chunk_size": 5,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "repetition_penalty": 1.4,
    "return_dict_in_generate": True,
    "sequence_bias": [[[7], 1.5]],
    "suppress_tokens": [4, 20],
    "use_cache": True,
}
# The law of sampled output is plain's.
SERVED_IN_LAW = {
    "temperature": 0.7,
    "top_k": 4,
    "top_p": 0.8,
    "min_p": 0.1,
    "typical_p": 0.7,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.05,
    "top_h": 0.5,
}
REFUSED = {
    "assistant_early_exit": 1,
    "constraints": ["a constraint"],
    "dola_layers": "low",
    "force_words_ids": [[5]],
    "num_beams": 2,
    "penalty_alpha": 0.6,
    "prompt_lookup_num_tokens": 3,
    "speculation_type": "dflash",
    "use_mtp": True,
}
# Served, each by tests of its own.
TESTED_ELSEWHERE = {
    "num_return_sequences": "test_identity.py",
    "output_attentions": "test_outputs.py",
    "stop_strings": "test_stopping.py",
    "token_healing": "test_surface.py",
    "watermarking_config": "test_surface.py",
    "generation_config": "test_enable.py",
    "logits_processor": "test_processors.py",
    "stopping_criteria": "test_stopping.py",
    "prefix_allowed_tokens_fn": "test_processors.py",
    "negative_prompt_ids": "test_processors.py",
    "negative_prompt_attention_mask": "test_processors.py",
    "streamer": "test_streaming.py",
    "inputs": "test_enable.py",
    "synced_gpus": "test_synced.py",
    "assistant_model": "test_bad_input.py",
    "custom_generate": "test_bad_input.py",
}
# Settings of beam search, of the host's own assisted decoding and of continuous batching: plain decoding of one
# hypothesis a row does not read them, and neither do we. (compile_config acts on accelerators only.)
WITHOUT_EFFECT = {
    "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "cache_config",
    "compile_config", "continuous_batching_config", "diversity_penalty", "early_stopping", "is_assistant",
    "length_penalty", "low_memory", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "num_beam_groups", "target_lookbehind", "transformers_version",
}  # fmt: skip


def known() -> set[str]:
    return {*SERVED_GREEDILY, *SERVED_IN_LAW, *REFUSED, *TESTED_ELSEWHERE, *WITHOUT_EFFECT}


def test_the_tables_are_complete():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert fields | arguments <= known()


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(tiny())


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", SERVED_GREEDILY)
def test_greedy_output_is_plains(target, name, num_rows):
    if name not in vars(GenerationConfig()):
        pytest.skip(f"this Transformers has no {name}")
    ids, mask = prompts(num_rows)
    kwargs = {"attention_mask": mask, "eos_token_id": [2, 30], "pad_token_id": 0, "max_new_tokens": 24}
    kwargs |= {name: SERVED_GREEDILY[name]}
    if name == "max_length":
        del kwargs["max_new_tokens"]
    if name == "max_cache_len":
        kwargs["cache_implementation"] = "static"
    if name == "encoder_no_repeat_ngram_size" or name == "encoder_repetition_penalty":
        kwargs["eos_token_id"] = None
    plain = target.generate(ids, assistant=False, **kwargs)
    for drafter in (DraftModel(jittered(target)), PromptLookup(1, 3)):
        ours = target.generate(ids, assistant=drafter, **kwargs)
        same = [torch.as_tensor(x if torch.is_tensor(x) else x.sequences) for x in (plain, ours)]
        assert torch.equal(*same)
        assert type(plain) is type(ours)


@pytest.mark.parametrize("name", SERVED_IN_LAW)
def test_the_law_is_plains(name):
    """4 calls of 500 rows: 2,000 samples of two tokens."""
    if name not in vars(GenerationConfig()):
        pytest.skip(f"this Transformers has no {name}")
    model = hf_specdec.enable(small(0))
    settings = PLAIN | {"max_new_tokens": 3, name: SERVED_IN_LAW[name]}
    config = GenerationConfig(**settings)
    config._eos_token_tensor = None
    processors = model._get_logits_processor(config, PROMPT.shape[1], PROMPT, None, LogitsProcessorList(), "cpu", {})
    assert len(processors) == 1
    law = target_law(model, PROMPT, processors, 2, VOCAB)
    drafter = DraftModel(small(5, layers=1), num_draft_tokens=2)
    rows = PROMPT.repeat(500, 1)
    samples = [
        model.generate(rows, assistant=drafter, seed=seed, **settings)[:, PROMPT.shape[1] :] for seed in range(4)
    ]
    assert_follows(torch.cat(samples)[:, :2], law)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_settings_say_so(target, name):
    if name not in vars(GenerationConfig()):
        pytest.skip(f"this Transformers has no {name}")
    with pytest.raises(ValueError, match=name):
        target.generate(prompts(1)[0], assistant="ngram", max_new_tokens=5, **{name: REFUSED[name]})


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_watermark_is_as_strong_as_in_plain(target, num_rows):
    ids, mask = prompts(num_rows)
    kwargs = {"attention_mask": mask, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    kwargs["watermarking_config"] = {"bias": 2.5, "greenlist_ratio": 0.4}
    plain = target.generate(ids, assistant=False, **kwargs)
    assert not torch.equal(plain, target.generate(ids, assistant=False, **(kwargs | {"watermarking_config": None})))
    assert torch.equal(plain, target.generate(ids, assistant=jittered(target), **kwargs))


def test_token_healing(tmp_path):
    from tests.tokenizers_for_tests import trained_tokenizer

    tokenizer = trained_tokenizer()
    model = hf_specdec.enable(tiny(vocab=len(tokenizer)))
    ids = tokenizer("the quick bro", return_tensors="pt").input_ids
    kwargs = {"max_new_tokens": 8, "eos_token_id": None, "token_healing": True, "tokenizer": tokenizer}
    plain = model.generate(ids, assistant=False, **kwargs)
    assert torch.equal(plain, model.generate(ids, assistant="ngram", **kwargs))
