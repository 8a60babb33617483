"""Whole `generate` calls follow the target's law: chi-square on the first three tokens.

Every test states its sample size; a correct sampler fails one with probability 1e-6 (reference.FALSE_ALARM).
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hf_specdec
from hf_specdec import DraftModel, EarlyExit, PromptLookup, Suffix
from hf_specdec.noise import Noise
from tests.models import small
from tests.reference import FALSE_ALARM, assert_follows, p_value, target_law

VOCAB = 8
PROMPT = torch.tensor([[3, 4, 5, 3, 4]])
PLAIN = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 4}
SETTINGS = {
    "T=1": ({}, []),
    "all warpers": (
        {"temperature": 0.8, "top_k": 6, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(6),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.02),
        ],
    ),
}


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(small(0))


DRAFTERS = {
    "draft-model": lambda: DraftModel(small(5, layers=1), num_draft_tokens=3),
    "draft-model T=2": lambda: DraftModel(small(5, layers=1), num_draft_tokens=3, draft_temperature=2.0),
    "greedy draft-model": lambda: DraftModel(small(5, layers=1), num_draft_tokens=3, draft_temperature=0),
    "early-exit": lambda: EarlyExit(1, num_draft_tokens=3),
    "prompt-lookup": lambda: PromptLookup(1, 2, num_draft_tokens=3),
    "suffix": lambda: Suffix(max_spec_factor=3.0, num_draft_tokens=3),
}


def first_tokens(model, num_calls, num_rows, **kwargs):
    """Samples (num_calls * num_rows, 3); call i is seeded with i."""
    outputs = []
    for seed in range(num_calls):
        out = model.generate(PROMPT.repeat(num_rows, 1), seed=seed, **(PLAIN | kwargs))
        outputs.append(out[:, PROMPT.shape[1] :][:, :3])
    return torch.cat(outputs)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_law_of_large_batches(target, drafter, setting, verification):
    """20 calls of 250 rows: 5,000 samples."""
    options, processors = SETTINGS[setting]
    samples = first_tokens(target, 20, 250, assistant=DRAFTERS[drafter](), verification=verification, **options)
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList(processors), 3, VOCAB))


@pytest.mark.parametrize("drafter", ["draft-model", "prompt-lookup"])
@pytest.mark.parametrize("num_rows", [1, pytest.param(4, id="batch4")])
def test_law_of_single_rows_and_batches_of_four(target, drafter, num_rows):
    """600 samples of each (10,000 in the slow suite)."""
    samples = first_tokens(target, 600 // num_rows, num_rows, assistant=DRAFTERS[drafter]())
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList(), 3, VOCAB))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_law_with_many_samples(target, drafter, num_rows, setting):
    """10,000 samples."""
    options, processors = SETTINGS[setting]
    samples = first_tokens(target, 10_000 // num_rows, num_rows, assistant=DRAFTERS[drafter](), **options)
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList(processors), 3, VOCAB))


class Counting(LogitsProcessor):
    """A processor of the user's own: the loop must judge token by token, rows in lockstep."""

    def __call__(self, input_ids, scores):
        return scores / 0.9


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_law_in_lockstep(target, drafter):
    """20 calls of 250 rows: 5,000 samples. Rows cut short by the batch's minimum must not bend the law."""
    samples = first_tokens(target, 20, 250, assistant=DRAFTERS[drafter](), logits_processor=[Counting()])
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList([Counting()]), 3, VOCAB))


def test_law_in_lockstep_of_small_batches(target):
    """500 calls of 4 rows: 2,000 samples; with 4 rows the minimum often cuts in the middle of a draft."""
    samples = first_tokens(target, 500, 4, assistant=DRAFTERS["draft-model"](), logits_processor=[Counting()])
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList([Counting()]), 3, VOCAB))


def test_the_harness_rejects_a_coin_that_drew_the_draft(target, monkeypatch):
    """Negative control: coin and draft from one random number. 20 calls of 250 rows: 5,000 samples."""
    from hf_specdec import loop

    class Shared(loop.Noise):
        def round(self, *args):
            noise = super().round(*args)
            return type(noise)(noise.finals, noise.draws, noise.draws)

    monkeypatch.setattr(loop, "Noise", Shared)
    samples = first_tokens(target, 20, 250, assistant=DRAFTERS["draft-model"](), verification="token")
    law = target_law(target, PROMPT, LogitsProcessorList(), 3, VOCAB)
    assert p_value(samples, law) < FALSE_ALARM


def test_the_harness_rejects_a_wrongly_reported_draft(target, monkeypatch):
    """Negative control: the draft is drawn at T=2 and reported at T=1. 20 calls of 250 rows: 5,000 samples."""
    from hf_specdec.drafters import drawing

    true_sample = drawing.sample
    monkeypatch.setattr(drawing, "sample", lambda law, uniforms: true_sample(law.sqrt(), uniforms))
    samples = first_tokens(target, 20, 250, assistant=DRAFTERS["draft-model"](), verification="token")
    law = target_law(target, PROMPT, LogitsProcessorList(), 3, VOCAB)
    assert p_value(samples, law) < FALSE_ALARM


def test_rows_do_not_depend_on_the_batch_around_them(target):
    """The same seed gives row 0 the same text alone and beside others."""
    kwargs = PLAIN | {"max_new_tokens": 20}
    alone = target.generate(PROMPT, assistant=DRAFTERS["draft-model"](), seed=3, **kwargs)
    among = target.generate(PROMPT.repeat(5, 1), assistant=DRAFTERS["draft-model"](), seed=3, **kwargs)
    assert torch.equal(alone[0], among[0])
    assert not torch.equal(among[0], among[1])


def test_copies_change_no_sampled_text(target):
    """Samples belong to a row and a position: whatever was copied, and however far, the seed alone says the text."""
    kwargs = PLAIN | {"max_new_tokens": 40, "seed": 3}
    texts = [
        target.generate(PROMPT.repeat(3, 1), assistant=assistant, num_draft_tokens=length, **kwargs)
        for assistant in (PromptLookup(1, 3), PromptLookup(1, 1, prefer="newest"), PromptLookup(7, 7))
        for length in (None, 1, 6)
    ]
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.parametrize("start", [0, 1, 2, 5, 64])
def test_the_number_of_a_position_is_the_same_from_wherever_one_looks(start):
    noise = Noise(7, torch.device("cpu"))
    whole = noise.round([2], [0], 80).finals[0]
    assert torch.equal(noise.round([2], [start], 9).finals[0], whole[start : start + 10])
    assert len(set(whole.tolist())) == 81


def test_seeds_generators_and_the_global_state(target):
    def text(**kwargs):
        return target.generate(PROMPT, assistant="ngram", **(PLAIN | {"max_new_tokens": 12}), **kwargs)[0].tolist()

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text(generator=torch.Generator().manual_seed(5)) == text(generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    first = text()
    torch.manual_seed(0)
    assert text() == first
    state = torch.get_rng_state()
    text(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
