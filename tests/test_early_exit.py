"""Early exit through whole `generate` calls: identity, shared work, a model that stays whole."""

from __future__ import annotations

import pytest
import torch

import hf_specdec
from hf_specdec import Auto, EarlyExit, Suffix, best_exit_layer
from hf_specdec.host import decoder_layers
from tests.models import prompts, tiny

FAMILIES = ["llama", "qwen3", "gpt2", "mistral8", "gemma3", "bloom", "mpt"]


def both(model, drafter, num_rows=1, **kwargs):
    ids, mask = prompts(num_rows)
    kwargs = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False} | kwargs
    plain = model.generate(ids, **kwargs)
    hf_specdec.enable(model)
    return plain, model.generate(ids, assistant=drafter, **kwargs), hf_specdec.last_stats(model)


def with_idle_late_layers(model, exit_layer=1):
    """Makes the layers behind the exit hand on what they are given."""
    with torch.no_grad():
        for layer in decoder_layers(model)[exit_layer:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("length", [4, None])
def test_greedy_text_is_the_same(family, num_rows, length):
    plain, out, _ = both(tiny(family), EarlyExit(1, num_draft_tokens=length), num_rows)
    assert torch.equal(plain, out)


@pytest.mark.parametrize("family", ["llama", "mistral8"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_with_idle_late_layers_everything_is_accepted(family, num_rows):
    plain, out, stats = both(with_idle_late_layers(tiny(family)), EarlyExit(1, num_draft_tokens=4), num_rows)
    assert torch.equal(plain, out)
    assert stats.accepted == stats.drafted > 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_next_to_copies(num_rows):
    plain, out, _ = both(tiny(), Auto([Suffix(), EarlyExit(1)]), num_rows)
    assert torch.equal(plain, out)
    plain, out, _ = both(tiny(), Auto([Suffix(num_draft_tokens=4), EarlyExit(1, num_draft_tokens=4)]), num_rows)
    assert torch.equal(plain, out)


def test_every_layer_reads_every_token_once():
    model = with_idle_late_layers(tiny())
    counts = [0, 0]
    for index, layer in enumerate(decoder_layers(model)):

        def count(module, args, output, index=index):
            counts[index] += output.shape[1]

        layer.self_attn.q_proj.register_forward_hook(count)
    ids, mask = prompts(1)
    hf_specdec.enable(model)
    model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, assistant=EarlyExit(1, 4))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("layer", [0, 1])
def test_the_model_is_whole_after_an_exception(layer):
    model = tiny()
    ids, mask = prompts(1)
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=24)
    hf_specdec.enable(model)
    passes = []

    def fail(module, args, output):
        passes.append(1)
        if len(passes) == 4:
            raise RuntimeError("stop")

    handle = decoder_layers(model)[layer].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        model.generate(ids, attention_mask=mask, max_new_tokens=24, assistant=EarlyExit(1, num_draft_tokens=4))
    handle.remove()
    assert all("forward" not in vars(held) for held in decoder_layers(model))
    assert torch.equal(plain, model.generate(ids, attention_mask=mask, max_new_tokens=24, assistant=False))


def test_the_returned_cache_is_plains():
    plain, out, _ = both(tiny(), EarlyExit(1, num_draft_tokens=4), 3, return_dict_in_generate=True)
    for mine, theirs in zip(out.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape


@pytest.mark.parametrize("exit_layer", [0, -1, 2, True, 1.5])
def test_exit_layers_out_of_range_are_refused(exit_layer):
    with pytest.raises(ValueError, match="exit_layer"):
        both(tiny(), EarlyExit(exit_layer))


@pytest.mark.parametrize("is_enabled", [False, True])
def test_the_best_exit_is_where_the_idle_layers_begin(is_enabled):
    model = with_idle_late_layers(tiny(num_hidden_layers=4), exit_layer=2)
    if is_enabled:
        hf_specdec.enable(model)
    estimate = best_exit_layer(model, prompts(1)[0])
    assert estimate.agreements[2] == estimate.agreements[3] == 1.0 > estimate.agreements[1]
    assert estimate.best == 2
