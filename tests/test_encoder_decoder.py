"""Encoder-decoder targets: the decoder's text is plain generate's, batches advance in lockstep."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_specdec
from hf_specdec import DraftModel, PromptLookup, host
from tests.models import prompts, tiny

IDS = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "bos_token_id": 1}


def t5():
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, initializer_factor=3.0, **sizes, **IDS))


def bart():
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128}
    config = BartConfig(vocab_size=64, init_std=0.5, forced_eos_token_id=None, **layers, **sizes, **IDS)
    return BartForConditionalGeneration(config)


@pytest.fixture(scope="module", params=[t5, bart], ids=["t5", "bart"])
def target(request):
    torch.manual_seed(0)
    model = request.param().eval().double()
    model.generation_config.update(do_sample=False, forced_bos_token_id=None)
    return hf_specdec.enable(model)


def source(num_rows):
    ids, mask = prompts(num_rows)
    return {"input_ids": ids, "attention_mask": mask}


DRAFTERS = {
    "lookup": lambda: PromptLookup(1, 3),
    "draft model": lambda: DraftModel(tiny(seed=3)),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("ends", [None, [2, 7, 11, 30]])
def test_greedy_identity(target, drafter, num_rows, ends):
    kwargs = source(num_rows) | {"max_new_tokens": 30, "eos_token_id": ends}
    plain = target.generate(assistant=False, **kwargs)
    assert torch.equal(plain, target.generate(assistant=DRAFTERS[drafter](), **kwargs))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_output_dicts_agree(target, num_rows):
    fields = ["output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate"]
    kwargs = source(num_rows) | {"max_new_tokens": 12, "eos_token_id": None} | dict.fromkeys(fields, True)
    plain, ours = (target.generate(assistant=assistant, **kwargs) for assistant in (False, PromptLookup(1, 3)))
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("scores", "logits"):
        for there, here in zip(plain[name], ours[name], strict=True):
            assert torch.allclose(there, here, atol=1e-6)
    for there, here in zip(plain.decoder_hidden_states, ours.decoder_hidden_states, strict=True):
        assert all(torch.allclose(a, b, atol=1e-8) for a, b in zip(there, here, strict=True))
    assert len(ours.encoder_hidden_states) == len(plain.encoder_hidden_states)
    there, here = plain[host.CACHE_NAME], ours[host.CACHE_NAME]
    assert isinstance(here, EncoderDecoderCache)
    assert here.get_seq_length() == there.get_seq_length()
    for a, b in zip(there.self_attention_cache.layers, here.self_attention_cache.layers, strict=True):
        assert torch.allclose(a.keys, b.keys, atol=1e-8)


def test_a_decoder_prompt_and_several_samples(target):
    decoder = torch.tensor([[1, 9, 8, 9]])
    kwargs = source(1) | {"max_new_tokens": 15, "eos_token_id": None, "decoder_input_ids": decoder}
    plain = target.generate(assistant=False, **kwargs)
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    ours = target.generate(assistant=PromptLookup(1, 3), **kwargs, **sampled)
    assert torch.equal(ours, plain.repeat(2, 1))


def test_a_cache_handed_in_is_used(target):
    config = target.config.get_text_config(decoder=True)
    cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    kwargs = source(1) | {"max_new_tokens": 10, "eos_token_id": None}
    plain = target.generate(assistant=False, **kwargs)
    assert torch.equal(plain, target.generate(assistant="ngram", **kwargs, **{host.CACHE_NAME: cache}))
    assert cache.get_seq_length() == plain.shape[1] - 1


def test_an_encoder_decoder_drafter_is_refused(target):
    with pytest.raises(ValueError, match="encoder-decoder"):
        DraftModel(target)
