"""What went wrong for others, each with the value it must have here.

Kinds of failure reported for Transformers' assisted decoding, vLLM, SGLang, EAGLE and others. Those that are a matter
of the acceptance law alone are in test_accept.py (negative controls) and test_law.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor, LogitsProcessorList, MistralConfig

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from hf_specdec.drafters.prompt_lookup import NgramIndex
from tests.models import jittered, prompts, tiny

X = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 7, 8]])
K = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(tiny(dtype=torch.float32))


@pytest.fixture(scope="module")
def drafter(target):
    return jittered(target)


def widths(model, call) -> list[int]:
    """Tokens every target pass saw."""
    seen: list[int] = []
    hook = model.register_forward_pre_hook(lambda m, a, k: seen.append(k["input_ids"].shape[1]), with_kwargs=True)
    try:
        call()
    finally:
        hook.remove()
    return seen


def test_a_batch_is_served_and_equals_its_rows(target, drafter):
    ids, mask = prompts(3)
    batch = target.generate(ids, attention_mask=mask, assistant=drafter, **K)
    for row in range(3):
        alone = target.generate(ids[row : row + 1, mask[row].argmax() :], **K)
        assert torch.equal(batch[row, ids.shape[1] :], alone[0, -30:])


def test_several_samples_of_one_prompt(target, drafter):
    out = target.generate(X, assistant=drafter, num_return_sequences=2, seed=0, **(K | {"do_sample": True}))
    assert out.shape == (2, 39)


def test_an_end_inside_an_accepted_block_ends_the_text(target):
    plain = target.generate(X, **K)[0].tolist()
    end = plain[9 + 4]
    kwargs = K | {"eos_token_id": [end, 63]}
    for assistant in ("ngram", target):
        assert torch.equal(target.generate(X, assistant=assistant, **kwargs), target.generate(X, **kwargs))


@pytest.mark.parametrize("budget", [1, 2, 20])
@pytest.mark.parametrize("length", [1, 9])
def test_no_end_id_short_prompts_and_small_budgets(target, drafter, budget, length):
    kwargs = K | {"max_new_tokens": budget}
    for assistant in ("ngram", drafter):
        plain = target.generate(X[:, :length], **kwargs)
        assert torch.equal(plain, target.generate(X[:, :length], assistant=assistant, **kwargs))


def test_a_draft_never_runs_past_positions_or_a_static_cache(target):
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 5, 6, 7, 8]])
    torch.manual_seed(0)
    learned = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)).eval()
    kwargs = {"max_length": 16, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    hf_specdec.enable(learned)
    assert torch.equal(learned.generate(ids, **kwargs), learned.generate(ids, assistant=PromptLookup(), **kwargs))
    static = kwargs | {"cache_implementation": "static"}
    assert torch.equal(target.generate(ids, **static), target.generate(ids, assistant=PromptLookup(), **static))


def test_static_caches_and_windows(target, drafter):
    plain = target.generate(X, **K)
    assert torch.equal(plain, target.generate(X, assistant=drafter, cache_implementation="static", **K))


@pytest.mark.parametrize("window", [4, 8, 16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_text_grows_past_the_window_while_drafts_are_refused(window, attention):
    model = hf_specdec.enable(tiny(f"mistral{window}", seed=3, attn_implementation=attention))
    assert isinstance(model.config, MistralConfig)
    assert torch.equal(model.generate(X, **K), model.generate(X, assistant=jittered(model), **K))


@pytest.mark.parametrize("name", ["num_draft_tokens", "num_assistant_tokens"])
def test_the_draft_length_of_a_call_is_obeyed(target, drafter, name):
    seen = widths(target, lambda: target.generate(X, assistant=drafter, **{name: 2}, **K))
    assert seen[0] == 9 + 2
    assert set(seen[1:-2]) == {3}
    assert drafter.generation_config.num_assistant_tokens in (None, 20)


class Log(LogitsProcessor):
    """Writes down the prefix lengths it is shown."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        return scores


def test_a_users_processor_sees_each_length_once(target, drafter):
    for assistant in (False, "ngram", drafter):
        log = Log()
        target.generate(X, assistant=assistant, logits_processor=LogitsProcessorList([log]), **K)
        assert log.lengths == list(range(9, 39))


def test_guidance_with_a_cache_of_its_own(target, drafter):
    plain = target.generate(X, guidance_scale=1.7, **K)
    for assistant in ("ngram", drafter):
        assert torch.equal(plain, target.generate(X, assistant=assistant, guidance_scale=1.7, **K))


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"forced_eos_token_id": 2},
        {"bad_words_ids": [[5], [6, 7]]},
        {"min_new_tokens": 10, "eos_token_id": 19},
    ],
)
def test_processors_that_read_the_prefix(target, drafter, setting):
    kwargs = K | setting
    plain = target.generate(X, **kwargs)
    for assistant in ("ngram", drafter):
        assert torch.equal(plain, target.generate(X, assistant=assistant, **kwargs))


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2])
def test_copies_do_not_depend_on_token_ids_under_top_p(target, top_p):
    sampling = {"do_sample": True, "top_k": 0, "top_p": top_p, "max_new_tokens": 6, "eos_token_id": None}
    for first in range(4, 60, 8):
        ids = torch.tensor([[first, first + 1, first + 2, first + 3] * 6])
        call = lambda ids=ids: target.generate(ids, assistant=PromptLookup(2, 2), num_draft_tokens=4, **sampling)  # noqa: E731
        assert widths(target, call)[0] == 24 + 4


class Ban(LogitsProcessor):
    """Forbids a range of ids."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 20:40] = -torch.inf
        return scores


@pytest.mark.parametrize("num_rows", [1, 4])
def test_bans_hold_at_every_verified_position(target, drafter, num_rows):
    kwargs = K | {"do_sample": True, "top_k": 0, "min_p": 0.05, "logits_processor": [Ban()]}
    for assistant in ("ngram", drafter):
        out = target.generate(X.repeat(num_rows, 1), assistant=assistant, seed=0, **kwargs)[:, 9:]
        assert not bool(((out >= 20) & (out < 40)).any())


def test_the_longest_and_best_supported_match_is_copied():
    text = [7, 8, 1, 1, 1, 7, 8, 2, 2, 2, 7, 8]
    assert NgramIndex(1, 4, "frequent").copy(text, 3).tokens == [2, 2, 2]


def test_after_full_acceptance_the_draft_cache_is_completed(target):
    """Another model of the same weights stays at full acceptance over many rounds."""
    drafter = DraftModel(copy.deepcopy(target), num_draft_tokens=3)
    target.generate(X, assistant=drafter, **(K | {"max_new_tokens": 60}))
    assert drafter.stats.accepted == drafter.stats.drafted > 30


def test_beams_and_no_cache_are_refused_not_ignored(target, drafter):
    for setting in ({"num_beams": 2}, {"use_cache": False}):
        for assistant in ("ngram", drafter):
            with pytest.raises(ValueError, match=next(iter(setting))):
                target.generate(X, assistant=assistant, **setting, **K)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_drafter_in_half_precision(target, drafter, dtype):
    half = copy.deepcopy(drafter).to(dtype)
    assert torch.equal(target.generate(X, **K), target.generate(X, assistant=half, **K))
    target.generate(X, assistant=half, seed=0, **(K | {"do_sample": True}))


def test_nothing_drafted_divides_nothing_by_zero(target):
    target.generate(torch.tensor([[5, 6]]), assistant=PromptLookup(5, 5), **(K | {"max_new_tokens": 3}))
    stats = hf_specdec.last_stats(target)
    assert (stats.drafted, stats.acceptance_rate, stats.mean_acceptance_length) == (0, None, 1.0)


def test_models_are_left_as_they_were_also_when_a_call_fails(target, drafter):
    before = [copy.deepcopy(m.generation_config.to_dict()) for m in (target, drafter)]
    vocabulary = drafter.get_output_embeddings().weight.shape

    def fails(input_ids, scores):
        raise RuntimeError("user code")

    with pytest.raises(RuntimeError, match="user code"):
        target.generate(X, assistant=drafter, logits_processor=[fails], **K)
    assert [m.generation_config.to_dict() for m in (target, drafter)] == before
    assert drafter.get_output_embeddings().weight.shape == vocabulary
