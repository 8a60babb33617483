"""Padding, holes in a prompt's mask, ids without an output: what is not the text's own must stay where it is."""

from __future__ import annotations

import pytest
import torch
from transformers import BartConfig, BartForCausalLM, LogitsProcessor

import hf_specdec
from hf_specdec import Auto, DraftModel, PromptLookup, Suffix, host
from tests.models import jittered, prompts, tiny

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def bart(max_positions=128):
    """A decoder that takes no position ids: it counts the slots of its cache."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_ffn_dim": 64, "decoder_layers": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=64, init_std=0.5, max_position_embeddings=max_positions, **sizes, is_decoder=True)
    model = BartForCausalLM(config).eval().double()
    model.generation_config.forced_eos_token_id = None
    return model


def padded(ids, num_padded):
    mask = torch.ones_like(ids)
    mask[:, :num_padded] = 0
    return ids, mask


def with_holes(num_rows, length=14, holes=range(5, 12)):
    ids, _ = prompts(num_rows, longest=length)
    ids[ids == 0] = 9
    mask = torch.ones_like(ids)
    mask[:, list(holes)] = 0
    return ids, mask


class Unknown(LogitsProcessor):
    """May have a state, as far as anyone knows."""

    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_counts_slots_keeps_its_padding(seed):
    target = hf_specdec.enable(bart())
    ids, mask = padded(prompts(1, seed=seed)[0], 8)
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 30}
    plain = target.generate(ids, assistant=False, **kwargs)
    for assistant in (PromptLookup(), DraftModel(jittered(target))):
        assert torch.equal(target.generate(ids, assistant=assistant, **kwargs), plain)


@pytest.mark.parametrize("as_bool", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_windows_count_the_holes_of_the_users_mask(num_rows, as_bool):
    target = hf_specdec.enable(tiny("mistral8"))
    ids, mask = with_holes(num_rows)
    kwargs = GREEDY | {"attention_mask": mask.bool() if as_bool else mask, "max_new_tokens": 30}
    plain = target.generate(ids, assistant=False, **kwargs)
    for assistant in (PromptLookup(num_draft_tokens=4), DraftModel(jittered(target))):
        assert torch.equal(target.generate(ids, assistant=assistant, **kwargs), plain)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_returned_cache_has_the_holes_where_the_mask_has_them(num_rows):
    target = hf_specdec.enable(tiny())
    ids, mask = with_holes(num_rows, holes=[4, 5])
    kwargs = GREEDY | {"return_dict_in_generate": True, "max_new_tokens": 12}
    texts = []
    for assistant in (False, DraftModel(jittered(target))):
        first = target.generate(ids, attention_mask=mask, assistant=assistant, **kwargs)
        longer = torch.cat([first.sequences, torch.full((num_rows, 3), 7)], dim=1)
        more = torch.cat([mask, mask.new_ones(num_rows, longer.shape[1] - mask.shape[1])], dim=1)
        given = {"attention_mask": more, host.CACHE_NAME: first[host.CACHE_NAME]}
        texts.append(target.generate(longer, assistant=False, **given, **kwargs).sequences)
    assert torch.equal(*texts)


@pytest.mark.parametrize("changes", [{}, {"logits_processor": [Unknown()]}])
def test_a_padded_row_alone_returns_plains_cache_and_attentions(changes):
    target = hf_specdec.enable(tiny(attn_implementation="eager", dtype=torch.float32))
    ids, mask = padded(prompts(1, longest=14)[0], 8)
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 20, "return_dict_in_generate": True}
    kwargs |= {"output_attentions": True} | changes
    plain = target.generate(ids, assistant=False, **kwargs)
    ours = target.generate(ids, assistant=PromptLookup(1, 2), **kwargs)
    assert int(ours[host.CACHE_NAME].get_seq_length()) == int(plain[host.CACHE_NAME].get_seq_length()) == 33
    for number, steps in enumerate(zip(ours.attentions, plain.attentions, strict=True)):
        first = 8 if number == 0 else 0  # what padding attends to means nothing
        pairs = ((a[:, :, first:], b[:, :, first:]) for a, b in zip(*steps, strict=True))
        assert all(torch.allclose(*pair, atol=1e-5) for pair in pairs)


def test_a_model_that_counts_slots_is_not_led_past_its_context():
    for seed in range(6):
        target = hf_specdec.enable(bart(max_positions=30))
        ids, mask = padded(prompts(1, longest=24, seed=seed)[0], 5)
        kwargs = GREEDY | {"attention_mask": mask, "max_length": 30}
        plain = target.generate(ids, assistant=False, **kwargs)
        kwargs["max_length"] = 60
        kwargs["eos_token_id"] = int(plain[0, 28])  # ends before the context does, if nothing reads ahead
        for assistant in (PromptLookup(), DraftModel(jittered(target), num_draft_tokens=12)):
            ours = target.generate(ids, assistant=assistant, **kwargs)
            assert torch.equal(ours, plain[:, : ours.shape[1]])


@pytest.mark.parametrize("assistant", [PromptLookup(), PromptLookup(on_device=True), Suffix(), Auto()])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_ids_that_stand_for_images_are_never_drafted(assistant, num_rows):
    """The model reads ids behind its output layer's; they are in the prompt, and their neighbours come again."""
    target = tiny(vocab=64)
    target.lm_head = torch.nn.Linear(32, 60, bias=False, dtype=torch.float64)
    hf_specdec.enable(target)
    ids = torch.tensor([[5, 6, 62, 63, 62, 63, 5, 6, 62, 63, 5, 6]]).repeat(num_rows, 1)
    kwargs = GREEDY | {"max_new_tokens": 20}
    plain = target.generate(ids, assistant=False, **kwargs)
    assert torch.equal(target.generate(ids, assistant=assistant, num_draft_tokens=6, **kwargs), plain)


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("assistant", ["prompt-lookup", "suffix", "token-recycling", "auto", "early-exit", DraftModel])
def test_a_row_of_which_the_mask_leaves_nothing(assistant, length):
    target = hf_specdec.enable(tiny())
    ids = torch.arange(5, 5 + 3 * length).view(3, length)
    mask = torch.ones_like(ids)
    mask[1] = 0
    drafter = DraftModel(jittered(target)) if assistant is DraftModel else assistant
    texts = [
        target.generate(ids, attention_mask=mask, assistant=chosen, max_new_tokens=20, **GREEDY)
        for chosen in (False, drafter)
    ]
    assert torch.equal(*texts)
