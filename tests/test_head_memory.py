"""Heads keep the target's states of a long prompt only until they have read them."""

from __future__ import annotations

import gc

import pytest
import torch

import hf_specdec
from hf_specdec import Eagle, ParallelDraft
from hf_specdec.heads import EagleConfig, EagleHead, LayerConfig
from hf_specdec.loop import SpeculativeLoop
from tests.models import tiny

WIDTH, LENGTH, TAPS = 256, 4000, (1, 2, 3)
# The tapped states of the prompt, in float32.
TAPPED = len(TAPS) * LENGTH * WIDTH * 4


@pytest.fixture(scope="module")
def target():
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 4, "initializer_range": 0.05}
    return hf_specdec.enable(tiny(**sizes, max_position_embeddings=8192, dtype=torch.float32))


def drafter(name):
    torch.manual_seed(0)
    config = EagleConfig(
        kind="eagle3",
        hidden_size=WIDTH,
        target_hidden_size=WIDTH,
        vocab_size=64,
        draft_vocab_size=64,
        layers=(LayerConfig(True),),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=WIDTH,
        taps=TAPS,
        own_lm_head=False,
        mask_token_id=3 if name == "p-eagle" else None,
    )
    head = EagleHead(config)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    return ParallelDraft(head, num_draft_tokens=4) if name == "p-eagle" else Eagle(head, num_draft_tokens=4)


def call(target, assistant, num_rows=1):
    prompt = torch.randint(3, 64, (num_rows, LENGTH), generator=torch.Generator().manual_seed(0))
    target.generate(prompt, assistant=assistant, max_new_tokens=24, do_sample=False, eos_token_id=None)


def peak(action):
    """The most bytes of tensors that an action holds at one time, beyond those before it."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = torch.tensor([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(held.cumsum(dim=0).max())


@pytest.mark.parametrize("name", ["eagle3", "p-eagle"])
def test_a_long_prompt_takes_little_more_than_its_tapped_states(name, target):
    """At most 1.4 times those above plain: as they are joined, and then what a layer of the head computes of them."""
    plain = peak(lambda: call(target, False))
    assistant = drafter(name)
    assert peak(lambda: call(target, assistant)) - plain < 1.4 * TAPPED
    assert assistant.stats.drafted > 0


def living():
    """All dense tensors of the process; other tests may have left others."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return [tensor for tensor in tensors if tensor.layout == torch.strided and tensor.device.type == "cpu"]


def stored(tensors):
    """Bytes of tensors, those that share memory counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("name", ["eagle3", "p-eagle"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_between_rounds_only_the_caches_hold_more_than_the_newest_states(name, num_rows, target, monkeypatch):
    held, true_round = [], SpeculativeLoop.round

    def counted(self):
        true_round(self)
        caches = (self.target.cache, self.session.read.reader.cache)
        layers = [layer for cache in caches for layer in cache.layers if layer.keys is not None]
        cached = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        held.append(stored(living()) - stored(cached))

    monkeypatch.setattr(SpeculativeLoop, "round", counted)
    assistant = drafter(name)
    before = stored(living())
    call(target, assistant, num_rows)
    added = [bytes_held - before for bytes_held in held]
    newest = num_rows * 5 * len(TAPS) * WIDTH * 4
    assert TAPPED * num_rows <= added[0] < 1.1 * TAPPED * num_rows
    assert len(added) > 5 and max(added[1:]) < 8 * newest + 2**18, added
