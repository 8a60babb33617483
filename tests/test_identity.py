"""Greedy speculative decoding emits plain greedy decoding's tokens, in float64, row by row."""

from __future__ import annotations

import itertools

import pytest
import torch

import hf_specdec
from hf_specdec import Auto, DraftModel, PromptLookup, Suffix
from tests.models import jittered, prompts, tiny

FAMILIES = ["llama", "qwen3", "mistral4", "mistral8", "mistral64", "gemma3", "gpt2"]
DRAFTERS = {
    "good draft-model": lambda target: DraftModel(jittered(target)),
    "poor draft-model": lambda target: DraftModel(tiny(seed=9, num_hidden_layers=1)),
    "prompt-lookup": lambda target: PromptLookup(1, 3),
    "prompt-lookup on the device": lambda target: PromptLookup(1, 3, on_device=True),
    "suffix": lambda target: Suffix(max_spec_factor=3.0),
    "auto": lambda target: Auto([Suffix(max_spec_factor=3.0), PromptLookup(1, 3), jittered(target)]),
}
SETTINGS = {"do_sample": False, "pad_token_id": 0}


def assert_identical(target, drafter, num_rows, *, num_draft_tokens=None, new_tokens=24, eos=None, seed=0):
    ids, mask = prompts(num_rows, seed=seed)
    kwargs = {"attention_mask": mask, "max_new_tokens": new_tokens, "eos_token_id": eos, **SETTINGS}
    plain = target.generate(ids, assistant=False, **kwargs)
    ours = target.generate(ids, assistant=drafter, num_draft_tokens=num_draft_tokens, **kwargs)
    assert torch.equal(plain, ours)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return hf_specdec.enable(tiny(request.param))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_every_family_with_every_drafter(target, drafter, num_rows):
    assert_identical(target, DRAFTERS[drafter](target), num_rows, eos=[2, 7, 11])
    assert_identical(target, DRAFTERS[drafter](target), num_rows, num_draft_tokens=3, new_tokens=17, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_the_full_matrix(target, drafter, num_rows, num_draft_tokens):
    """50 prompts of each."""
    built = DRAFTERS[drafter](target)
    for seed in range(-(-50 // num_rows)):
        eos = None if seed % 2 else [2, 7, 11]
        assert_identical(target, built, num_rows, num_draft_tokens=num_draft_tokens, new_tokens=40, eos=eos, seed=seed)


@pytest.mark.parametrize("family", ["mpt", "bloom"])
def test_models_without_position_ids_advance_in_lockstep(family):
    target = hf_specdec.enable(tiny(family))
    for num_rows in (1, 3):
        assert_identical(target, DraftModel(jittered(target)), num_rows, eos=[2, 7, 11])
        assert_identical(target, PromptLookup(1, 3), num_rows)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention):
    target = hf_specdec.enable(tiny("mistral8", attn_implementation=attention))
    assert target.config._attn_implementation == attention
    for num_rows in (1, 3):
        assert_identical(target, DraftModel(jittered(target)), num_rows)


def test_num_return_sequences():
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(2)
    kwargs = SETTINGS | {"attention_mask": mask, "max_new_tokens": 20}
    plain = target.generate(ids, num_return_sequences=1, **kwargs).repeat_interleave(3, 0)
    sampled = kwargs | {"do_sample": True, "top_k": 1}  # sampling from one token, so that the text is known
    ours = target.generate(ids, num_return_sequences=3, assistant="ngram", **sampled)
    assert torch.equal(plain, ours)


def test_prompts_of_one_token_and_budgets_of_one_token():
    target = hf_specdec.enable(tiny())
    for assistant, length, budget in itertools.product(["ngram", jittered(target)], [1, 5], [1, 2, 20]):
        ids = torch.arange(5, 5 + length)[None]
        kwargs = SETTINGS | {"max_new_tokens": budget, "eos_token_id": None}
        assert torch.equal(target.generate(ids, **kwargs), target.generate(ids, assistant=assistant, **kwargs))


def test_a_long_ragged_generation_compacts_its_cache():
    target = hf_specdec.enable(tiny(max_position_embeddings=1024))
    assert_identical(target, DraftModel(jittered(target, 0.02)), 6, new_tokens=200, num_draft_tokens=6)


class TestADrafterEqualToTheTarget:
    """Verification hides a drafter's bugs; acceptance does not."""

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("num_rows", [1, 3])
    def test_greedy_accepts_every_token_at_every_position(self, family, num_rows):
        target = hf_specdec.enable(tiny(family, dtype=torch.float32))
        ids, mask = prompts(num_rows)
        drafter = DraftModel(target, num_draft_tokens=4)
        kwargs = SETTINGS | {"attention_mask": mask, "max_new_tokens": 40, "eos_token_id": None}
        target.generate(ids, assistant=drafter, **kwargs)
        assert drafter.stats.accepted == drafter.stats.drafted > 0
        assert drafter.stats.acceptance_by_position == [1.0] * len(drafter.stats.drafted_at)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    @pytest.mark.parametrize("verification", ["token", "block"])
    def test_sampling_refuses_only_by_rounding(self, family, verification, monkeypatch):
        from hf_specdec import accept

        ratios = []
        true_ratios = accept._acceptance_ratios

        def recorded(draft, target_probs):
            result = true_ratios(draft, target_probs)
            ratios.extend(result[draft.valid].tolist())
            return result

        monkeypatch.setattr(accept, "_acceptance_ratios", recorded)
        target = hf_specdec.enable(tiny(family, dtype=torch.float32))
        ids, mask = prompts(3)
        warpers = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}
        kwargs = {"attention_mask": mask, "max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0}
        target.generate(ids, assistant=target, verification=verification, seed=0, **kwargs, **warpers)
        assert len(ratios) > 100
        assert min(ratios) >= 1 - 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_drafter_in_another_dtype(dtype):
    target = hf_specdec.enable(tiny())
    assert_identical(target, DraftModel(jittered(target).to(dtype)), 3)
