"""Every argument of `generate` and every field of GenerationConfig is served as in plain, or refused.

The tables below must know them all: a new Transformers release that adds one makes `test_the_tables_are_complete` fail.
"""

from __future__ import annotations

import inspect
from pathlib import Path

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
# Each has a test of its own: served, or (the last two) refused beside an assistant.
TESTED_ELSEWHERE = {
    "num_return_sequences": "test_identity.py::test_num_return_sequences",
    "output_attentions": "test_outputs.py::test_attention_maps_of_one_row_are_plains",
    "stop_strings": "test_stopping.py::test_stop_strings_inside_a_block",
    "token_healing": "test_inputs.py::test_healed_tokens_in_a_batch",
    "watermarking_config": "test_surface.py::test_a_watermark_is_as_strong_as_in_plain",
    "generation_config": "test_enable.py::test_a_generation_config_object_is_obeyed",
    "logits_processor": "test_processors.py::test_greedy_parity_under_a_users_processor",
    "stopping_criteria": "test_stopping.py::test_a_users_criterion_ends_rows_where_it_says",
    "prefix_allowed_tokens_fn": "test_processors.py::test_greedy_parity_under_a_prefix_constraint",
    "negative_prompt_ids": "test_processors.py::test_greedy_parity_under_guidance_with_a_negative_prompt",
    "negative_prompt_attention_mask": "test_processors.py::test_greedy_parity_under_guidance_with_a_negative_prompt",
    "streamer": "test_streaming.py::test_puts_are_those_of_plain",
    "inputs": "test_enable.py::test_an_enabled_model_generates_what_the_plain_one_does",
    "synced_gpus": "test_synced.py::test_processes_pass_together_until_all_have_ended",
    "assistant_model": "test_bad_input.py::test_another_way_of_decoding_beside_the_assistant",
    "custom_generate": "test_bad_input.py::test_another_way_of_decoding_beside_the_assistant",
}
# What else a call may bring: arguments of the model.
MODEL_INPUTS = {
    "inputs_embeds": "test_inputs.py::test_prompts_given_as_embeddings",
    "token_type_ids": "test_inputs.py::test_token_types",
    "position_ids": "test_inputs.py::test_positions_of_the_users_own",
    "attention_mask": "test_unusual_targets.py::test_masks_with_holes_of_the_users_own",
    "past_key_values": "test_outputs.py::test_a_cache_of_the_user_is_filled_as_plain_fills_it",
    "pixel_values": "test_vision.py::test_greedy_identity",
}
# And where the weights may be, in what form, and how they attend.
MODELS = {
    "another device": "test_devices.py::test_a_drafter_on_another_device_drafts_the_same",
    "another dtype": "test_identity.py::test_a_drafter_in_another_dtype",
    "device_map": "test_unusual_targets.py::test_a_device_map_over_cpu_and_disk",
    "layers on several devices": "test_devices.py::test_a_target_spread_over_two_devices",
    "offload": "test_unusual_targets.py::test_weights_offloaded_by_accelerate",
    "quantised": "test_quantised.py::test_ternary_weights_and_8_bit_activations",
    "quantised on the scale of a pass": "test_quantised.py::test_outliers_sought_in_a_whole_pass_are_refused",
    "eager, sdpa": "test_identity.py::test_attention_implementations",
    "flex_attention": "test_attention.py::test_flex_attention",
    "flash_attention_2, 3, 4": "test_attention.py::test_flash_attention_gathers_what_holes_leave",
    "kernels of the Hub": "test_attention.py::test_kernels_from_the_hub_go_the_way_of_flash_attention",
    "attention of the user's own": (
        "test_attention.py::test_attention_of_the_users_own_sees_the_slots_that_plain_shows_it"
    ),
    "paged attention": "test_attention.py::test_attention_of_continuous_batching_is_refused",
    "remote code": "test_unusual_targets.py::test_remote_code_that_prepares_its_own_inputs",
    "generate of an instance": "test_enable.py::test_an_instance_generate_is_called_through_and_restored",
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


@pytest.mark.parametrize("place", sorted({*TESTED_ELSEWHERE.values(), *MODEL_INPUTS.values(), *MODELS.values()}))
def test_the_tests_named_by_the_tables_exist(place):
    file, name = place.split("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text()


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
