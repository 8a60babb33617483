"""What a prompt may come with: embeddings, token types, positions of the user's own, healing."""

from __future__ import annotations

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from tests.models import jittered, prompts, tiny

GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": [2, 7, 11], "pad_token_id": 0}


def assert_identical(target, **given):
    """For every drafter; returns plain's text."""
    plain = target.generate(assistant=False, **GREEDY, **given)
    for drafter in (DraftModel(jittered(target)), PromptLookup(1, 3)):
        assert torch.equal(plain, target.generate(assistant=drafter, **GREEDY, **given))
        assert drafter.stats.rounds > 0
    return plain


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "mistral8", "gpt2"])
@pytest.mark.parametrize("with_ids", [False, True])
def test_prompts_given_as_embeddings(family, with_ids, num_rows):
    """With ids beside them, the text begins with the ids."""
    target = hf_specdec.enable(tiny(family))
    ids, mask = prompts(num_rows)
    read = target.get_input_embeddings()
    embeddings = (read(ids) + read((ids + 5) % 64)).detach()
    given = {"inputs_embeds": embeddings, "attention_mask": mask} | ({"input_ids": ids} if with_ids else {})
    plain = assert_identical(target, **given)
    assert not torch.equal(plain[:, -5:], target.generate(ids, attention_mask=mask, **GREEDY)[:, -5:])


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("ignored", [None, 14])
def test_repetition_penalties_pass_over_the_same_tokens(num_rows, ignored):
    """Behind embeddings alone as many of the new tokens as the row has padding; or so many as the user says."""
    target = hf_specdec.enable(tiny())
    for seed in range(4):
        ids, mask = prompts(num_rows, seed=seed)
        given = {"input_ids": ids}
        if ignored is None:
            given = {"inputs_embeds": target.get_input_embeddings()(ids), "repetition_penalty": 1.5}
        else:
            given["logits_processor"] = [RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=ignored)]
        assert_identical(target, attention_mask=mask, **given)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_token_types(num_rows):
    """A generated token has the type of the prompt's last."""
    target = hf_specdec.enable(tiny("gpt2"))
    ids, mask = prompts(num_rows)
    types = torch.full_like(ids, 40)
    types[:, :7] = 30
    plain = assert_identical(target, input_ids=ids, attention_mask=mask, token_type_ids=types)
    assert not torch.equal(plain, target.generate(ids, attention_mask=mask, **GREEDY))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral8"])
def test_positions_of_the_users_own(family, num_rows):
    target = hf_specdec.enable(tiny(family))
    ids, mask = prompts(num_rows)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0) * 2 + torch.arange(num_rows)[:, None]
    plain = assert_identical(target, input_ids=ids, attention_mask=mask, position_ids=positions)
    assert not torch.equal(plain, target.generate(ids, attention_mask=mask, **GREEDY))


def test_healed_tokens_in_a_batch():
    from tests.tokenizers_for_tests import trained_tokenizer

    tokenizer = trained_tokenizer()
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    target = hf_specdec.enable(tiny(vocab=len(tokenizer)))
    encoded = tokenizer(["the quick bro", "a", "the lazy dog and the quick"], return_tensors="pt", padding=True)
    given = {"attention_mask": encoded.attention_mask, "token_healing": True, "tokenizer": tokenizer}
    assert_identical(target, input_ids=encoded.input_ids, **given)
