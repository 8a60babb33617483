"""Our drafters drive the host's own assisted decoding."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from hf_specdec import DraftModel, Eagle, PromptLookup, as_candidate_generator
from tests.models import jittered, tiny
from tests.reference import assert_follows, target_law
from tests.test_heads import initialised
from tests.test_heads import small as eagle_config
from tests.test_law import PLAIN, PROMPT, VOCAB, small

X = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 7, 8]])


def host_generates(target, drafter, ids, **kwargs):
    """Runs the host's loop with our candidates in place of its own."""
    target._get_candidate_generator = lambda **host: as_candidate_generator(
        drafter, target, host["generation_config"], host["logits_processor"]
    )
    try:
        return target.generate(ids, prompt_lookup_num_tokens=3, **kwargs)  # any assisted mode gets there
    finally:
        del target._get_candidate_generator


@pytest.mark.parametrize("family", ["llama", "mistral8"])
def test_greedy_equals_plain(family):
    target = tiny(family)
    kwargs = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(X, **kwargs)
    for drafter in (DraftModel(jittered(target)), PromptLookup(1, 3)):
        assert torch.equal(plain, host_generates(target, drafter, X, **kwargs))


def test_a_perfect_drafter_is_always_accepted():
    target = tiny(dtype=torch.float32)
    passes = []
    hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
    twin = tiny(dtype=torch.float32)
    host_generates(target, DraftModel(twin, num_draft_tokens=4), X, max_new_tokens=20, eos_token_id=None)
    hook.remove()
    assert len(passes) == 4


@pytest.mark.parametrize(
    "drafter", [DraftModel(small(5, layers=1), num_draft_tokens=3), PromptLookup(1, 2)], ids=["drawn", "copied"]
)
def test_sampling_follows_the_law(drafter):
    """400 samples."""
    target = small(0)
    samples = []
    for seed in range(400):
        torch.manual_seed(seed)
        out = host_generates(target, drafter, PROMPT, temperature=0.8, **PLAIN)
        samples.append(out[:, PROMPT.shape[1] :][:, :3])
    law = target_law(target, PROMPT, LogitsProcessorList([TemperatureLogitsWarper(0.8)]), 3, VOCAB)
    assert_follows(torch.cat(samples), law)


def test_drafters_that_read_the_targets_states_are_refused():
    target = tiny()
    with pytest.raises(ValueError, match="hidden states"):
        as_candidate_generator(Eagle(initialised(eagle_config(taps=(0, 1, 2)))), target, target.generation_config)


@pytest.mark.parametrize("given", ["suffix", tiny()], ids=["name", "model"])
def test_what_is_no_drafter_is_refused(given):
    with pytest.raises(ValueError, match=f"must be a drafter such as .*, not {type(given).__name__}"):
        as_candidate_generator(given, tiny(), tiny().generation_config)
