"""Logits processors say what they say in plain `generate`, and see no prefix that plain would not show them."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from tests.models import jittered, prompts, tiny

DRAFTERS = ("itself", "similar", "lookup")


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(tiny())


@pytest.fixture(scope="module")
def drafters(target):
    return {
        "itself": DraftModel(target, num_draft_tokens=5),
        "similar": DraftModel(jittered(target), num_draft_tokens=3),
        "lookup": PromptLookup(),
    }


def batch(num_rows: int) -> dict:
    ids, mask = prompts(num_rows)
    given = {"input_ids": ids, "attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    return given | {"max_new_tokens": 11, "eos_token_id": None}


@functools.cache
def plain_ids(target, num_rows: int) -> torch.Tensor:
    """What the model says without any processor."""
    return target.generate(assistant=False, **batch(num_rows))


def assert_parity(target, drafter, num_rows: int, fresh=dict, must_draft=True, **changes) -> torch.Tensor:
    """Plain and speculative ids are equal, and not what they would be without the processor under test.

    `fresh` makes arguments with a state anew for every call.
    """
    given = batch(num_rows) | changes
    plain = target.generate(assistant=False, **given, **fresh())
    ours = target.generate(assistant=drafter, **given, **fresh())
    assert hf_specdec.last_stats(target).drafted > 0 or not must_draft
    assert torch.equal(ours, plain)
    without = plain_ids(target, num_rows)
    assert plain.shape != without.shape or not torch.equal(plain, without)
    return plain


# --- the host's own ---------------------------------------------------------------------------------------

SETTINGS = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "forced_eos_token_id": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "forced_eos_token_id list": {"forced_eos_token_id": [9, 2], "eos_token_id": [9, 2]},
    "bad_words_ids": {"bad_words_ids": [[47], [10, 53], [38, 38]], "eos_token_id": 2},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [19, 10, 30, 18]},
    "min_length": {"min_length": 21, "eos_token_id": [19, 10, 30, 18]},
    "suppress_tokens": {"suppress_tokens": [18, 38, 53]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [47, 61, 6]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 2.5), "eos_token_id": 7},
    "sequence_bias": {"sequence_bias": [[[38], -9.0], [[10, 53], -9.0], [[30, 52], 4.0]]},
    "guidance_scale": {"guidance_scale": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 4.0},
    "encoder_no_repeat_ngram_size": {"encoder_repetition_penalty": 4.0, "encoder_no_repeat_ngram_size": 2},
    "remove_invalid_values and renormalize_logits": {
        "remove_invalid_values": True,
        "renormalize_logits": True,
        "repetition_penalty": 1.3,
    },
    "several at once": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [38],
        "min_new_tokens": 9,
        "eos_token_id": [19, 10, 30],
        "forced_eos_token_id": 10,
    },
}


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", ["similar", "lookup"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_parity_under_the_hosts_processors(target, drafters, drafter, setting, num_rows):
    assert_parity(target, drafters[drafter], num_rows, **SETTINGS[setting])


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("setting", ["repetition_penalty", "bad_words_ids", "guidance_scale"])
def test_greedy_parity_when_a_generation_config_object_asks(target, drafters, setting, num_rows):
    given = batch(num_rows)
    ids, mask = given.pop("input_ids"), given.pop("attention_mask")
    config = GenerationConfig(**(given | SETTINGS[setting]))
    plain = target.generate(ids, attention_mask=mask, generation_config=config, assistant=False)
    for drafter in (drafters["similar"], drafters["lookup"]):
        assert torch.equal(
            target.generate(ids, attention_mask=mask, generation_config=config, assistant=drafter), plain
        )


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", ["similar", "lookup"])
def test_greedy_parity_under_guidance_with_a_negative_prompt(target, drafters, drafter, num_rows):
    negative, negative_mask = prompts(num_rows, 7, seed=5)
    assert_parity(
        target,
        drafters[drafter],
        num_rows,
        guidance_scale=2.5,
        negative_prompt_ids=negative,
        negative_prompt_attention_mask=negative_mask,
    )


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_parity_under_a_prefix_constraint(target, drafters, drafter, num_rows):
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [token for token in range(3, 64) if (token + row + int(ids[-1])) % 3 == 0]

    plain = assert_parity(target, drafters[drafter], num_rows, prefix_allowed_tokens_fn=allowed)
    for row, tokens in enumerate(plain.tolist()):
        assert all((b + row + a) % 3 == 0 for a, b in itertools.pairwise(tokens[11:]))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_prefix_constraint_sees_what_plain_shows(target, drafters, num_rows):
    def run(assistant) -> list:
        seen = []

        def allowed(row, ids):
            seen.append((row, ids.tolist()))
            return list(range(5, 60))

        target.generate(assistant=assistant, prefix_allowed_tokens_fn=allowed, **batch(num_rows))
        return seen

    plain = run(False)
    assert len(plain) == 11 * num_rows
    for drafter in drafters.values():
        assert run(drafter) == plain


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_penalty_that_ignores_the_prompt(target, drafters, num_rows):
    def processors():
        return {
            "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=12)])
        }

    for drafter in drafters.values():
        assert_parity(target, drafter, num_rows, processors)


@pytest.mark.parametrize("num_rows", [3])
def test_a_penalty_that_ignores_a_prompt_of_its_own_length_in_every_row(target, drafters, num_rows):
    lengths = torch.tensor([12, 9, 4])[:num_rows]
    try:
        RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=lengths)
    except ValueError:
        pytest.skip("this Transformers takes one length for all rows")

    def processors():
        return {
            "logits_processor": LogitsProcessorList(
                [RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=lengths)]
            )
        }

    emitted = target.generate(assistant=False, **batch(num_rows), **processors())[:, 12:].tolist()
    for drafter in drafters.values():
        # A row leaves the batch early: the others must keep their own lengths.
        assert_parity(target, drafter, num_rows, processors, eos_token_id=[emitted[0][3], 2])


# --- processors of the user's own -------------------------------------------------------------------------


class Counts(LogitsProcessor):
    """Bans a range that depends on how often it has been called: one call too many changes everything."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        first = 3 + 7 * (self.calls % 8)
        scores = scores.clone()
        scores[:, first : first + 12] = -torch.inf
        return scores


class PenalisesWhatItSaw(LogitsProcessor):
    """Keeps counters per row that grow with every newest token it is shown."""

    def __init__(self):
        self.counts = None

    def __call__(self, input_ids, scores):
        if self.counts is None:
            self.counts = torch.zeros_like(scores)
        self.counts.scatter_add_(1, input_ids[:, -1:], torch.ones_like(scores[:, :1]))
        return scores - 1.5 * self.counts


class MutatesInPlace(LogitsProcessor):
    """Writes into the scores it was given, depending on the newest token."""

    def __call__(self, input_ids, scores):
        scores[:, 18:39] = -torch.inf
        scores.scatter_(1, (input_ids[:, -1:] + 1) % 64, -torch.inf)
        return scores


class ComparesRows(LogitsProcessor):
    """Depends on the whole batch."""

    def __call__(self, input_ids, scores):
        return scores.roll(int(input_ids[:, -1].sum()) % 5, dims=1)


class Drawn(LogitsProcessor):
    """Uses random numbers of its own, one draw a call."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, input_ids, scores):
        return scores + 3 * torch.rand(scores.shape, generator=self.generator)


class LikeTheHosts(RepetitionPenaltyLogitsProcessor):
    """A subclass of a known processor is a processor of the user's own."""

    def __init__(self):
        super().__init__(1.3)
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = super().__call__(input_ids, scores)
        return scores.roll(self.calls % 3, dims=1)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", ["similar", "lookup"])
@pytest.mark.parametrize("kind", [Counts, PenalisesWhatItSaw, MutatesInPlace, ComparesRows, Drawn, LikeTheHosts])
def test_greedy_parity_under_a_users_processor(target, drafters, drafter, kind, num_rows):
    assert_parity(target, drafters[drafter], num_rows, lambda: {"logits_processor": LogitsProcessorList([kind()])})


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", [Counts, MutatesInPlace])
def test_a_users_processor_between_the_hosts(target, drafters, kind, num_rows):
    settings = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "eos_token_id": [30, 2], "min_new_tokens": 7}
    for drafter in (drafters["similar"], drafters["lookup"]):
        assert_parity(
            target, drafter, num_rows, lambda: {"logits_processor": LogitsProcessorList([kind()])}, **settings
        )


class Seen(LogitsProcessor):
    """Remembers every prefix and all scores."""

    def __init__(self):
        self.ids, self.scores = [], []

    def __call__(self, input_ids, scores):
        self.ids.append(input_ids.clone())
        self.scores.append(scores.clone())
        return scores

    def assert_was_shown_what(self, plain, end):
        """The same prefixes, and the same scores in rows that have not ended; prompts are 12 tokens long."""
        assert len(self.ids) == len(plain.ids)
        assert all(torch.equal(a, b) for a, b in zip(self.ids, plain.ids, strict=True))
        ended = torch.zeros(len(self.ids[0]), dtype=torch.bool)
        for ids, a, b in zip(plain.ids, self.scores, plain.scores, strict=True):
            ended |= (ids[:, 12:] == end).any(dim=1)
            assert a.shape == b.shape and a.dtype == b.dtype
            assert torch.allclose(a[~ended], b[~ended], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_users_processor_sees_every_prefix_of_the_output_once_and_in_order(
    target, drafters, drafter, num_rows, do_sample
):
    seen = Seen()
    output = target.generate(
        assistant=drafters[drafter],
        logits_processor=LogitsProcessorList([seen]),
        **(batch(num_rows) | {"do_sample": do_sample, "top_k": 0}),
    )
    assert [ids.shape for ids in seen.ids] == [(num_rows, length) for length in range(12, 23)]
    assert all(torch.equal(ids, output[:, : ids.shape[1]]) for ids in seen.ids)
    assert hf_specdec.last_stats(target).drafted > 0


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("ends_early", [False, True])
def test_a_users_processor_is_shown_what_plain_shows(target, drafters, drafter, num_rows, ends_early):
    given = batch(num_rows)
    emitted = target.generate(assistant=False, **given)[:, 12:].tolist()
    given["eos_token_id"] = emitted[num_rows - 1][7] if ends_early else 4
    shown = []
    for assistant in (False, drafters[drafter]):
        seen = Seen()
        target.generate(
            assistant=assistant, logits_processor=LogitsProcessorList([seen]), repetition_penalty=1.1, **given
        )
        shown.append(seen)
    plain, ours = shown
    ours.assert_was_shown_what(plain, given["eos_token_id"])


def test_a_users_warper_takes_the_place_of_the_hosts(target, drafters):
    """The host drops its own temperature when the user passes one; the drafter must not bring it back."""
    for drafter in drafters.values():
        given = batch(1) | {"do_sample": True, "temperature": 50.0, "top_k": 0}
        warper = LogitsProcessorList([TemperatureLogitsWarper(1e-4)])
        ours = target.generate(assistant=drafter, logits_processor=warper, **given)
        assert torch.equal(ours, target.generate(assistant=False, **batch(1)))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_banned_tokens_are_never_sampled(target, drafters, drafter, num_rows):
    class Ban(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, 20:40] = -torch.inf
            return scores

    sampled = {"do_sample": True, "top_k": 0, "min_p": 0.01, "temperature": 1.5, "max_new_tokens": 24}
    for how in ({"logits_processor": LogitsProcessorList([Ban()])}, {"suppress_tokens": list(range(20, 40))}):
        emitted = target.generate(assistant=drafters[drafter], seed=5, **(batch(num_rows) | sampled), **how)[:, 12:]
        assert not ((emitted >= 20) & (emitted < 40)).any()
        assert len(emitted.unique()) > 10


@pytest.mark.parametrize("family", ["mistral8", "gpt2", "mpt"])
@pytest.mark.parametrize("num_rows", [2])
def test_other_families_under_stateful_and_stateless_processors(family, num_rows):
    model = hf_specdec.enable(tiny(family))
    for drafter, must_draft in ((DraftModel(jittered(model)), True), (PromptLookup(), False)):
        assert_parity(model, drafter, num_rows, must_draft=must_draft, repetition_penalty=1.7)
        assert_parity(
            model, drafter, num_rows, lambda: {"logits_processor": LogitsProcessorList([Counts()])}, must_draft
        )
