"""Every strategy on a GPU, where there is one; the same tests run on the CPU, so that they are known to work."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import LogitsProcessorList

import hf_specdec
from hf_specdec import Auto, DraftModel, EarlyExit, ParallelDraft, PromptLookup, Suffix, TokenRecycling
from tests import test_eagle as heads
from tests.models import jittered, prompts, tiny
from tests.reference import assert_follows, target_law
from tests.test_identity import FAMILIES, SETTINGS
from tests.test_law import PLAIN, PROMPT, VOCAB, small

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def on_device(drafter, device):
    """A head or model that drafts, where the target is."""
    (drafter.head if isinstance(drafter, hf_specdec.Eagle) else drafter.model).to(device)
    return drafter


DRAFTERS = {
    "draft-model": lambda target: DraftModel(jittered(target), num_draft_tokens=4),
    "prompt-lookup": lambda target: PromptLookup(1, 3),
    "prompt-lookup on the device": lambda target: PromptLookup(1, 3, on_device=True),
    "suffix": lambda target: Suffix(max_spec_factor=3.0),
    "suffix chains": lambda target: Suffix(max_spec_factor=3.0, branches=False),
    "token-recycling": lambda target: TokenRecycling(num_draft_tokens=60),
    "early-exit": lambda target: EarlyExit(1, num_draft_tokens=4),
    "pard": lambda target: ParallelDraft(jittered(target), mask_token_id=3, num_draft_tokens=4),
    "auto": lambda target: Auto([Suffix(max_spec_factor=3.0), TokenRecycling(), jittered(target)]),
}
HEADS = {name: lambda target, build=build: on_device(build(), target.device) for name, build in heads.DRAFTERS.items()}


@functools.cache
def target_on(device, family="llama"):
    return hf_specdec.enable(tiny(family, num_hidden_layers=3).to(device))


def assert_as_plain(target, assistant, num_rows, **settings):
    ids, mask = (x.to(target.device) for x in prompts(num_rows))
    kwargs = SETTINGS | {"attention_mask": mask, "max_new_tokens": 30, "eos_token_id": [2, 7, 11]} | settings
    plain = target.generate(ids, assistant=False, **kwargs)
    for _ in range(2):  # with what the first call left in memories
        assert torch.equal(plain, target.generate(ids, assistant=assistant, **kwargs))
    assert assistant.stats.drafted > 0


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", [*DRAFTERS, *HEADS])
def test_greedy_text_is_plains(drafter, num_rows, device):
    target = target_on(device)
    assert_as_plain(target, (DRAFTERS | HEADS)[drafter](target), num_rows)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_families(family, device):
    target = target_on(device, family)
    for drafter in ("prompt-lookup", "draft-model", "token-recycling"):
        assert_as_plain(target, DRAFTERS[drafter](target), 3)


@pytest.mark.parametrize("drafter", ["draft-model", "prompt-lookup", "suffix chains"])
def test_static_caches(drafter, device):
    target = target_on(device)
    # Compiled passes have tests of their own.
    assert_as_plain(target, DRAFTERS[drafter](target), 3, cache_implementation="static", disable_compile=True)


LAWS = {
    "draft-model": lambda: DraftModel(small(5, layers=1), num_draft_tokens=3),
    "eagle3": lambda: heads.law_drafter("eagle3"),
    "eagle3-tree": lambda: heads.law_drafter("eagle3-tree"),
    "p-eagle": lambda: heads.law_drafter("p-eagle"),
    "token-recycling": TokenRecycling,
    "early-exit": lambda: EarlyExit(1, num_draft_tokens=3),
}


@pytest.mark.parametrize("drafter", LAWS)
def test_law(drafter, device):
    """Of 5,000 samples on a GPU, 20 calls of 250 rows; of 500 on the CPU, where other tests take more."""
    cpu = small(0, layers=3)
    law = target_law(cpu, PROMPT, LogitsProcessorList(), 3, VOCAB)
    target, assistant = hf_specdec.enable(cpu.to(device)), LAWS[drafter]()
    if hasattr(assistant, "head") or hasattr(assistant, "model"):
        on_device(assistant, device)
    ids = PROMPT.repeat(250, 1).to(device)
    outputs = [
        target.generate(ids, assistant=assistant, seed=seed, **PLAIN) for seed in range(2 if device == "cpu" else 20)
    ]
    assert_follows(torch.cat(outputs)[:, PROMPT.shape[1] :][:, :3].cpu(), law)
