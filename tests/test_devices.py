"""Drafters on another device than the target, and targets spread over several."""

from __future__ import annotations

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import DynamicCache, EtaLogitsWarper, LogitsProcessorList

import hf_specdec
from hf_specdec import DraftModel, host
from hf_specdec.scorer import Scorer
from tests.models import jittered, prompts, tiny
from tests.second_device import NAME, SecondDevice
from tests.test_encoder_decoder import built, t5

GREEDY = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": [2, 7, 11], "pad_token_id": 0}
SAMPLED = GREEDY | {"do_sample": True, "seed": 3}
# How the call decodes, and how often a round brings something to the target: tokens, with their laws when it samples,
# or the logits of every drafted token where a processor reads the text.
CALLS = {
    "greedy": (GREEDY, 1),
    "greedy with a processor of scores": (GREEDY | {"suppress_tokens": [4, 20]}, 1),
    "greedy with a processor of text": (GREEDY | {"repetition_penalty": 1.3}, 5),
    "sampled": (SAMPLED | {"temperature": 0.8, "top_k": 20, "suppress_tokens": [4, 20], "eta_cutoff": 0.01}, 2),
    "sampled with a processor of text": (SAMPLED | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, 5),
    "coupled": (SAMPLED | {"verification": "coupled", "top_p": 0.9}, 1),
}


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("call", CALLS)
def test_a_drafter_on_another_device_drafts_the_same(call, num_rows):
    settings, most_moves = CALLS[call]
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(num_rows)
    kwargs = settings | {"attention_mask": mask}
    near = DraftModel(jittered(target))
    expected = target.generate(ids, assistant=near, **kwargs)
    with torch.no_grad(), SecondDevice() as device:
        far = DraftModel(device.take(jittered(target)))
        ours = target.generate(ids, assistant=far, **kwargs)
    assert torch.equal(expected, ours)
    assert far.stats.accepted == near.stats.accepted > 0
    assert 0 < device.moves[NAME, "cpu"] <= most_moves * far.stats.target_passes
    assert call != "greedy" or torch.equal(ours, target.generate(ids, assistant=False, **kwargs))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral4"])
def test_every_cache_of_a_drafter_on_another_device(family):
    target = hf_specdec.enable(tiny(family))
    ids, mask = prompts(4)
    kwargs = GREEDY | {"attention_mask": mask}
    plain = target.generate(ids, **kwargs)
    with torch.no_grad(), SecondDevice() as device:
        ours = target.generate(ids, assistant=device.take(jittered(target)), num_draft_tokens=3, **kwargs)
    assert torch.equal(plain, ours)
    assert hf_specdec.last_stats(target).accepted > 0


@pytest.mark.parametrize("shares_encoder", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_an_encoder_decoder_drafter_on_another_device(num_rows, shares_encoder):
    target = hf_specdec.enable(built(t5))
    ids, mask = prompts(num_rows)
    kwargs = GREEDY | {"attention_mask": mask}
    plain = target.generate(ids, **kwargs)
    with torch.no_grad(), SecondDevice() as device:
        drafter = DraftModel(device.take(jittered(target)), shares_encoder=shares_encoder)
        assert torch.equal(target.generate(ids, assistant=drafter, **kwargs), plain)
    assert drafter.stats.accepted > 0


@pytest.mark.parametrize("family", ["llama", "mistral4", "gemma3"])
def test_a_target_spread_over_two_devices(family):
    """As device_map="auto" leaves it: a hook of accelerate brings every layer its input and its output back."""
    target = hf_specdec.enable(tiny(family))
    drafters = ["ngram", DraftModel(jittered(target))]
    ids, mask = prompts(4)
    kwargs = GREEDY | {"attention_mask": mask}
    plain = target.generate(ids, **kwargs)
    with torch.no_grad(), SecondDevice() as device:
        last = device.take(target.model.layers[-1])
        add_hook_to_module(last, AlignDevicesHook(execution_device=NAME, io_same_device=True))
        for drafter in drafters:
            output = target.generate(ids, assistant=drafter, return_dict_in_generate=True, **kwargs)
            assert torch.equal(plain, output.sequences)
    layers = (output.get("cache") or output.get("past_key_values")).layers
    assert [layer.keys.device.type for layer in layers] == ["cpu"] * (len(layers) - 1) + [NAME]


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_rows_leave_a_target_spread_over_two_devices(implementation):
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(4)
    kwargs = GREEDY | {"attention_mask": mask, "cache_implementation": implementation}
    plain = target.generate(ids, **kwargs)
    with torch.no_grad(), SecondDevice() as device:
        last = device.take(target.model.layers[-1])
        add_hook_to_module(last, AlignDevicesHook(execution_device=NAME, io_same_device=True))
        assert torch.equal(plain, target.generate(ids, assistant="ngram", **kwargs))


def test_rows_are_named_to_every_layer_on_its_own_device():
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4, 8), layer)
    keys = [layer.keys for layer in cache.layers]
    with SecondDevice():
        cache.layers[1].keys, cache.layers[1].values = (x.to(NAME) for x in (keys[1], cache.layers[1].values))
        host.keep_rows(cache, torch.tensor([2, 0], device=NAME))
        kept = [layer.keys.to("cpu") for layer in cache.layers]
    assert all(torch.equal(new, old[[2, 0]]) for new, old in zip(kept, keys, strict=True))


def test_processors_follow_a_drafter_to_its_device():
    processor = EtaLogitsWarper(0.01)
    assert Scorer(LogitsProcessorList([processor])).on(torch.device("meta")).processors[0].epsilon.device.type == "meta"
    assert processor.epsilon.device.type == "cpu"


def test_the_second_device_notices_tensors_that_were_not_moved():
    with SecondDevice(), pytest.raises(RuntimeError, match="mixes the second device"):
        torch.zeros(2, device=NAME) + torch.zeros(2)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("drafter_device", ["cpu", "cuda:0", "cuda:1"])
def test_drafters_beside_a_target_on_cuda(call, drafter_device):
    if drafter_device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    settings, _ = CALLS[call]
    target = hf_specdec.enable(tiny().to("cuda:0"))
    ids, mask = (x.to("cuda:0") for x in prompts(3))
    kwargs = settings | {"attention_mask": mask}
    drafter = DraftModel(jittered(tiny()).to(drafter_device))
    ours = target.generate(ids, assistant=drafter, **kwargs)
    assert drafter.stats.accepted > 0
    if not settings["do_sample"]:
        assert torch.equal(ours, target.generate(ids, assistant=False, **kwargs))
