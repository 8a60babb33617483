"""Encoder-decoder targets: the decoder's text is plain generate's, batches advance in lockstep.

Draft models run an encoder of their own, or read what the target's said.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_specdec
from hf_specdec import DraftModel, PromptLookup, host
from tests.models import jittered, prompts, tiny
from tests.reference import assert_follows

IDS = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "bos_token_id": 1}


def t5(**changes):
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16} | changes
    return T5ForConditionalGeneration(T5Config(vocab_size=64, initializer_factor=3.0, **sizes, **IDS))


def bart(**changes):
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128} | changes
    config = BartConfig(vocab_size=64, init_std=0.5, forced_eos_token_id=None, **layers, **sizes, **IDS)
    return BartForConditionalGeneration(config)


FAMILIES = {T5ForConditionalGeneration: t5, BartForConditionalGeneration: bart}


def built(make, seed=0, **changes):
    torch.manual_seed(seed)
    model = make(**changes).eval().double()
    model.generation_config.update(do_sample=False, forced_bos_token_id=None)
    return model


def smaller(target):
    """A narrow model of the target's family, with an encoder of its own."""
    return built(FAMILIES[type(target)], seed=3, d_model=16)


def with_encoder_of(target):
    """A model of the target's family with a decoder of its own on the target's very encoder."""
    model = jittered(target)
    model.base_model.encoder = target.get_encoder()
    return model


@pytest.fixture(scope="module", params=[t5, bart], ids=["t5", "bart"])
def target(request):
    return hf_specdec.enable(built(request.param))


def source(num_rows):
    ids, mask = prompts(num_rows)
    return {"input_ids": ids, "attention_mask": mask}


DRAFTERS = {
    "lookup": lambda target: PromptLookup(1, 3),
    "decoder": lambda target: DraftModel(tiny(seed=3)),
    "its own encoder": lambda target: DraftModel(smaller(target)),
    "a close copy": lambda target: DraftModel(jittered(target)),
    "the same encoder": lambda target: DraftModel(with_encoder_of(target)),
    "told to share": lambda target: DraftModel(jittered(target), shares_encoder=True),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("ends", [None, [2, 7, 11, 30]])
def test_greedy_identity(target, drafter, num_rows, ends):
    kwargs = source(num_rows) | {"max_new_tokens": 30, "eos_token_id": ends}
    plain = target.generate(assistant=False, **kwargs)
    assert torch.equal(plain, target.generate(assistant=DRAFTERS[drafter](target), **kwargs))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_output_dicts_agree(target, num_rows):
    fields = ["output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate"]
    kwargs = source(num_rows) | {"max_new_tokens": 12, "eos_token_id": None} | dict.fromkeys(fields, True)
    plain, ours = (target.generate(assistant=assistant, **kwargs) for assistant in (False, PromptLookup(1, 3)))
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("scores", "logits"):
        for there, here in zip(plain[name], ours[name], strict=True):
            assert torch.allclose(there, here, atol=1e-6)
    for there, here in zip(plain.decoder_hidden_states, ours.decoder_hidden_states, strict=True):
        assert all(torch.allclose(a, b, atol=1e-8) for a, b in zip(there, here, strict=True))
    assert len(ours.encoder_hidden_states) == len(plain.encoder_hidden_states)
    there, here = plain[host.CACHE_NAME], ours[host.CACHE_NAME]
    assert isinstance(here, EncoderDecoderCache)
    assert here.get_seq_length() == there.get_seq_length()
    for a, b in zip(there.self_attention_cache.layers, here.self_attention_cache.layers, strict=True):
        assert torch.allclose(a.keys, b.keys, atol=1e-8)


def test_a_decoder_prompt_and_several_samples(target):
    decoder = torch.tensor([[1, 9, 8, 9]])
    kwargs = source(1) | {"max_new_tokens": 15, "eos_token_id": None, "decoder_input_ids": decoder}
    plain = target.generate(assistant=False, **kwargs)
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    ours = target.generate(assistant=PromptLookup(1, 3), **kwargs, **sampled)
    assert torch.equal(ours, plain.repeat(2, 1))


def test_a_cache_handed_in_is_used(target):
    config = target.config.get_text_config(decoder=True)
    cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    kwargs = source(1) | {"max_new_tokens": 10, "eos_token_id": None}
    plain = target.generate(assistant=False, **kwargs)
    assert torch.equal(plain, target.generate(assistant="ngram", **kwargs, **{host.CACHE_NAME: cache}))
    assert cache.get_seq_length() == plain.shape[1] - 1


class Calls:
    """Counts the passes of a module and keeps their first dimension."""

    def __init__(self, module):
        self.batches = []
        self.hook = module.register_forward_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs, output):
        self.batches.append(len(output[0]))


def greedy(**more):
    return {"max_new_tokens": 20, "eos_token_id": None} | more


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_twin_with_its_own_encoder_is_always_accepted(target, num_rows):
    """Only a draft model that reads the same input, mask included, agrees everywhere."""
    twin = hf_specdec.disable(copy.deepcopy(target))
    theirs, own = Calls(target.get_encoder()), Calls(twin.get_encoder())
    target.generate(assistant=twin, **source(num_rows), **greedy())
    assert hf_specdec.last_stats(target).acceptance_rate == 1
    assert theirs.batches == own.batches == [num_rows]  # once each, not once a round
    theirs.hook.remove()


def test_samples_share_one_run_of_the_drafts_encoder(target):
    twin = hf_specdec.disable(copy.deepcopy(target))
    calls = Calls(twin.get_encoder())
    kwargs = source(2) | greedy(do_sample=True, top_k=1)
    drafter = DraftModel(twin)
    ours = target.generate(assistant=drafter, num_return_sequences=3, **kwargs)
    assert torch.equal(ours, target.generate(assistant=False, **kwargs).repeat_interleave(3, dim=0))
    assert drafter.stats.acceptance_rate == 1
    assert calls.batches == [2]


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_shared_encoder_runs_once(target, num_rows, is_told):
    twin = hf_specdec.disable(copy.deepcopy(target))
    if not is_told:
        twin.base_model.encoder = target.get_encoder()
    calls, unused = Calls(target.get_encoder()), Calls(twin.get_encoder())
    target.generate(assistant=DraftModel(twin, shares_encoder=is_told or None), **source(num_rows), **greedy())
    assert hf_specdec.last_stats(target).acceptance_rate == 1
    assert calls.batches == [num_rows]
    assert unused.batches == ([] if is_told else [num_rows])  # the same module: seen by both hooks
    calls.hook.remove()
    unused.hook.remove()


def test_a_shared_encoder_serves_where_only_its_outputs_are_passed(target):
    kwargs = source(3)
    outputs = target.get_encoder()(**kwargs)
    twin = hf_specdec.disable(copy.deepcopy(target))
    ready = {"encoder_outputs": outputs, "attention_mask": kwargs["attention_mask"]} | greedy()
    drafter = DraftModel(twin, shares_encoder=True)
    assert torch.equal(target.generate(assistant=drafter, **ready), target.generate(assistant=False, **ready))
    assert drafter.stats.acceptance_rate == 1
    with pytest.raises(ValueError, match="raw input of the target's encoder"):
        target.generate(assistant=twin, **ready)


def test_embeddings_cannot_be_read_by_another_encoder(target):
    kwargs = source(1)
    embedded = {"inputs_embeds": target.get_input_embeddings()(kwargs["input_ids"])} | greedy()
    plain = target.generate(assistant=False, **embedded)
    assert torch.equal(plain, target.generate(assistant="ngram", **embedded))
    with pytest.raises(ValueError, match="raw input of the target's encoder"):
        target.generate(assistant=smaller(target), **embedded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shares", [None, True])
def test_a_draft_model_of_another_dtype(target, dtype, shares):
    twin = hf_specdec.disable(copy.deepcopy(target)).to(dtype)
    plain = target.generate(assistant=False, **source(3), **greedy())
    ours = target.generate(assistant=DraftModel(twin, shares_encoder=shares), **source(3), **greedy())
    assert torch.equal(plain, ours)
    assert hf_specdec.last_stats(target).acceptance_rate > 0.3


def test_ragged_decoder_prompts_and_a_short_context():
    """Padding counts towards BART's positions, which end before the text does."""
    target = hf_specdec.enable(built(bart))
    ids, mask = prompts(3, seed=4)
    kwargs = source(3) | greedy(decoder_input_ids=ids, decoder_attention_mask=mask, max_new_tokens=40)
    plain = target.generate(assistant=False, **kwargs)
    for length in (128, 30):
        drafter = built(bart, max_position_embeddings=length)
        assert torch.equal(plain, target.generate(assistant=drafter, **kwargs))
    assert 0 < hf_specdec.last_stats(target).coverage < 0.6


def law_of_two_tokens(target, given, top_k, temperature):
    """The joint law of the first two tokens, shape (V, V)."""

    def conditional(prefix):
        logits = target(decoder_input_ids=torch.tensor([[1, *prefix]]), **given).logits[0, -1].float() / temperature
        kept = logits >= logits.topk(top_k).values[-1]
        return logits.masked_fill(~kept, -torch.inf).softmax(dim=-1)

    first = conditional(())
    return torch.stack([p * conditional((i,)) if p else torch.zeros_like(first) for i, p in enumerate(first)])


@torch.no_grad()
def test_sampled_text_follows_the_targets_law(target):
    """75 calls of 32 rows: 2,400 samples of the first two tokens."""
    kwargs = {"do_sample": True, "top_k": 3, "max_new_tokens": 3, "eos_token_id": None, "temperature": 5.0}
    drafter = DraftModel(jittered(target, scale=0.1), num_draft_tokens=2)
    calls = [
        target.generate(assistant=drafter, num_return_sequences=32, seed=seed, **source(1), **kwargs)
        for seed in range(75)
    ]
    assert_follows(torch.cat(calls)[:, 1:3], law_of_two_tokens(target, source(1), top_k=3, temperature=5.0))
    assert 0 < drafter.stats.acceptance_rate < 1


def test_what_does_not_fit_is_refused(target):
    decoder = hf_specdec.enable(tiny())
    with pytest.raises(ValueError, match="is a decoder-only model"):
        decoder.generate(prompts(1)[0], assistant=smaller(target))
    with pytest.raises(ValueError, match=r"of width 16, and those of the target .* are 32 wide"):
        target.generate(assistant=DraftModel(smaller(target), shares_encoder=True), **source(1))
    with pytest.raises(ValueError, match="attends to no encoder"):
        DraftModel(tiny(), shares_encoder=True)
    with pytest.raises(ValueError, match="shares_encoder='yes'"):
        DraftModel(smaller(target), shares_encoder="yes")


def test_folders_are_opened_with_their_encoder(target, tmp_path):
    smaller(target).save_pretrained(tmp_path / "same kind")
    tiny(seed=3).save_pretrained(tmp_path / "decoder")
    plain = target.generate(assistant=False, **source(3), **greedy())
    for name in ("same kind", "decoder"):
        assert torch.equal(plain, target.generate(assistant=str(tmp_path / name), **source(3), **greedy()))
        assert hf_specdec.last_stats(target).drafted > 0
