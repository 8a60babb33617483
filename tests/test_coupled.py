"""Coupled sampling: the text is a function of seed, row and target, not of drafter, draft length or batch."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from hf_specdec.noise import Noise
from tests.models import jittered, prompts, tiny
from tests.reference import assert_follows, target_law
from tests.test_law import PROMPT, VOCAB, first_tokens, small

SETTINGS = {"do_sample": True, "temperature": 0.9, "top_k": 30, "eos_token_id": None, "pad_token_id": 0}


def plain_coupled(target, ids, seed, new_tokens, temperature):
    """The slow twin: one token at a time, argmax of scores plus the position's Gumbel noise."""
    noise = Noise(seed, torch.device("cpu"), target.config.vocab_size)
    text = ids.clone()
    for position in range(new_tokens):
        with torch.no_grad():
            scores = target(text).logits[:, -1].float() / temperature
        text = torch.cat([text, (scores + noise.gumbels(0, position)).argmax(-1, keepdim=True)], dim=1)
    return text


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(tiny())


def test_every_drafter_and_draft_length_gives_the_same_text(target):
    ids, mask = prompts(3)
    texts = [
        target.generate(ids, attention_mask=mask, assistant=drafter, verification="coupled", seed=4, max_new_tokens=30,
                        num_draft_tokens=length, **SETTINGS)
        for drafter in (DraftModel(jittered(target)), DraftModel(tiny(seed=8)), PromptLookup(1, 3))
        for length in (1, 3, 8)
    ]  # fmt: skip
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_the_text_is_that_of_plain_coupled_sampling(target):
    ids, _ = prompts(1)
    ours = target.generate(
        ids, assistant="ngram", verification="coupled", seed=9, max_new_tokens=25, **(SETTINGS | {"top_k": 0})
    )
    assert torch.equal(ours, plain_coupled(target, ids, 9, 25, 0.9))


def test_a_row_does_not_depend_on_the_batch_or_on_lockstep(target):
    ids, mask = prompts(3)
    kwargs = {"assistant": jittered(target), "verification": "coupled", "seed": 2, "max_new_tokens": 20, **SETTINGS}
    alone = target.generate(ids[:1], **kwargs)
    among = target.generate(ids, attention_mask=mask, **kwargs)
    lockstep = target.generate(ids, attention_mask=mask, logits_processor=[lambda ids, scores: scores], **kwargs)
    assert torch.equal(alone[0], among[0])
    assert torch.equal(among, lockstep)


def test_a_drafter_equal_to_the_target_is_always_accepted():
    target = hf_specdec.enable(tiny(dtype=torch.float32))
    drafter = DraftModel(target)
    target.generate(prompts(1)[0], assistant=drafter, verification="coupled", seed=0, max_new_tokens=40, **SETTINGS)
    assert drafter.stats.accepted == drafter.stats.drafted > 0


@pytest.mark.parametrize("drafter", [lambda: DraftModel(small(5, layers=1), 3), lambda: PromptLookup(1, 2, 3)])
def test_the_law_is_the_targets(drafter):
    """20 calls of 250 rows: 5,000 samples."""
    model = hf_specdec.enable(small(0))
    samples = first_tokens(model, 20, 250, assistant=drafter(), verification="coupled", temperature=0.8)
    law = target_law(model, PROMPT, LogitsProcessorList([TemperatureLogitsWarper(0.8)]), 3, VOCAB)
    assert_follows(samples, law)
