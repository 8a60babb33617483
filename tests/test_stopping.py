"""Ends inside an accepted block cut tokens, scores, states, stream and statistics where plain `generate` does."""

from __future__ import annotations

import string
import types

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import stopping_criteria as host_criteria

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from tests.models import jittered, prompts, tiny

LETTERS = string.ascii_letters + string.digits[:9]
NEVER = 4  # an id that the models below do not emit
VARIED = {"gemma3": {"seed": 2, "initializer_range": 0.05}}  # with which the family does not repeat one token
ALL_OUTPUTS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(tiny())


@pytest.fixture(scope="module")
def drafters(target):
    return {
        "itself": DraftModel(target, num_draft_tokens=7),
        "similar": DraftModel(jittered(target), num_draft_tokens=7),
        "lookup": PromptLookup(num_draft_tokens=7),
    }


DRAFTERS = ("itself", "similar", "lookup")


class Recording:
    """A streamer that remembers what it was handed."""

    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(value.tolist())

    def end(self):
        self.events.append("end")


class Seen(StoppingCriteria):
    """Remembers what it is shown; ends a row at some token, at some length, or never."""

    def __init__(self, token: int | None = None, length: int | None = None):
        self.token, self.length = token, length
        self.ids, self.scores = [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.ids.append(input_ids.clone())
        self.scores.append(None if scores is None else torch.stack([s.clone() for s in scores], dim=1))
        told = torch.zeros(len(input_ids), dtype=torch.bool)
        if self.token is not None:
            told |= input_ids[:, -1] == self.token
        if self.length is not None:
            told |= torch.tensor(input_ids.shape[1] >= self.length)
        return told


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Every id from 3 to 63 is one letter or digit."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: i for i, letter in enumerate(LETTERS, 3)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def batch(num_rows: int) -> dict:
    ids, mask = prompts(num_rows)
    return {"input_ids": ids, "attention_mask": mask, "do_sample": False, "pad_token_id": 0}


def unstopped(target, num_rows: int, length: int = 24) -> torch.Tensor:
    """What plain decoding would emit, (B, length)."""
    given = batch(num_rows)
    return target.generate(assistant=False, eos_token_id=NEVER, max_new_tokens=length, **given)[:, 12:]


def late_token(emitted: torch.Tensor, row: int = 0, after: int = 6) -> int:
    """A token that a row emits for the first time after some others: the end falls inside a block."""
    seen = emitted[row, :after].tolist()
    return next(token for token in emitted[row, after:].tolist() if token not in seen)


def assert_same_end(target, drafter, given: dict, tolerance: float = 1e-9, **changes) -> hf_specdec.SpecStats:
    """Everything a call leaves behind is cut at the same place as in plain `generate`.

    `changes` are callables that make fresh objects (criteria have a state), or plain values; `tolerance` is for
    families that compute in float32 inside.
    """

    def run(assistant):
        fresh = {name: value() if callable(value) else value for name, value in changes.items()}
        stream = Recording()
        return target.generate(assistant=assistant, streamer=stream, **given, **ALL_OUTPUTS, **fresh), stream

    (plain, plain_stream), (ours, stream) = run(False), run(drafter)
    stats = hf_specdec.last_stats(target)
    assert torch.equal(ours.sequences, plain.sequences)
    assert stream.events == plain_stream.events
    num_steps = plain.sequences.shape[1] - given["input_ids"].shape[1]
    assert len(ours.scores) == len(ours.logits) == len(ours.hidden_states) == num_steps
    assert num_steps == len(plain.scores)
    if len(ours.sequences) == 1:
        for mine, theirs in zip(ours.scores + ours.logits, plain.scores + plain.logits, strict=True):
            assert torch.allclose(mine, theirs, atol=tolerance, rtol=0)
        for mine, theirs in zip(ours.hidden_states, plain.hidden_states, strict=True):
            assert all(torch.allclose(a, b, atol=tolerance, rtol=0) for a, b in zip(mine, theirs, strict=True))
        assert stats.emitted == num_steps
    assert stats.emitted <= stats.rounds + stats.accepted
    return stats


# --- end-of-sequence ids and lengths ----------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("as_list", [False, True])
def test_an_end_of_sequence_id_inside_a_block_ends_the_row_there(target, drafters, drafter, num_rows, as_list):
    emitted = unstopped(target, num_rows)
    end = late_token(emitted)
    ends = [end, late_token(emitted, row=num_rows - 1, after=9)] if as_list else end
    stats = assert_same_end(target, drafters[drafter], batch(num_rows), eos_token_id=ends, max_new_tokens=24)
    first = next(n for n, token in enumerate(emitted[0].tolist(), 1) if token in (ends if as_list else [end]))
    assert 6 < first < 24
    if num_rows == 1:
        assert stats.emitted == first


def test_ends_inside_a_block_are_drafted_but_not_counted_as_accepted_behind_the_end(target, drafters):
    emitted = unstopped(target, 1)
    end = late_token(emitted, after=10)
    stats = assert_same_end(target, drafters["itself"], batch(1), eos_token_id=end, max_new_tokens=24)
    assert 0 < stats.accepted < stats.drafted  # the drafter is never wrong: only the end cut it
    assert stats.emitted == emitted[0].tolist().index(end) + 1


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_that_end_at_different_places_count_only_their_own_tokens(target, drafters, num_rows):
    emitted = unstopped(target, num_rows)
    end = late_token(emitted, row=num_rows - 1, after=4)
    lengths = [row.index(end) + 1 if end in row else 24 for row in emitted.tolist()]
    stats = assert_same_end(target, drafters["itself"], batch(num_rows), eos_token_id=end, max_new_tokens=24)
    assert stats.emitted == sum(lengths)
    assert num_rows == 1 or len(set(lengths)) > 1


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("limit", [{"max_new_tokens": n} for n in (1, 2, 9)] + [{"max_length": 20}])
def test_length_limits_inside_a_block(target, drafters, drafter, num_rows, limit):
    stats = assert_same_end(target, drafters[drafter], batch(num_rows), eos_token_id=NEVER, **limit)
    assert stats.emitted == num_rows * (limit.get("max_new_tokens") or limit["max_length"] - 12)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_without_any_end_of_sequence_id(target, drafters, num_rows):
    for drafter in drafters.values():
        assert_same_end(target, drafter, batch(num_rows), eos_token_id=None, max_new_tokens=9)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_limits_of_a_generation_config_object(target, drafters, num_rows):
    end = late_token(unstopped(target, num_rows))
    config = GenerationConfig(max_new_tokens=15, eos_token_id=[end, 2], pad_token_id=0, do_sample=False)
    given = {name: value for name, value in batch(num_rows).items() if name in ("input_ids", "attention_mask")}
    for drafter in drafters.values():
        assert_same_end(target, drafter, given, generation_config=config)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("own", [16, 30])
def test_a_length_criterion_of_the_user_replaces_the_hosts(target, drafters, num_rows, own):
    def criteria():
        return StoppingCriteriaList([MaxLengthCriteria(own)])

    stats = assert_same_end(
        target, drafters["similar"], batch(num_rows), eos_token_id=NEVER, max_new_tokens=11, stopping_criteria=criteria
    )
    assert stats.emitted == num_rows * (own - 12)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_an_end_of_sequence_criterion_of_the_user_replaces_the_hosts(target, drafters, num_rows):
    emitted = unstopped(target, num_rows)
    end = late_token(emitted)

    def criteria():
        return StoppingCriteriaList([EosTokenCriteria(end)])

    assert_same_end(
        target, drafters["itself"], batch(num_rows), eos_token_id=NEVER, max_new_tokens=24, stopping_criteria=criteria
    )


# --- criteria of the user's own ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_users_criterion_ends_rows_where_it_says(target, drafters, drafter, num_rows):
    token = late_token(unstopped(target, num_rows))

    def criteria():
        return StoppingCriteriaList([Seen(token=token)])

    assert_same_end(
        target, drafters[drafter], batch(num_rows), eos_token_id=NEVER, max_new_tokens=24, stopping_criteria=criteria
    )


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("ends", ["by token", "by length", "never"])
def test_a_users_criterion_sees_every_length_once_and_in_order(target, drafters, drafter, num_rows, ends):
    token = late_token(unstopped(target, num_rows)) if ends == "by token" else None
    shown = []
    for assistant in (False, drafters[drafter]):
        criterion = Seen(token=token, length=19 if ends == "by length" else None)
        target.generate(
            assistant=assistant,
            eos_token_id=NEVER,
            max_new_tokens=15,
            stopping_criteria=StoppingCriteriaList([criterion]),
            **batch(num_rows),
        )
        shown.append(criterion.ids)
    plain, ours = shown
    assert [ids.shape for ids in ours] == [ids.shape for ids in plain]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))
    assert ours[0].shape == (num_rows, 13)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_users_criterion_sees_the_scores_that_plain_shows(target, drafters, drafter, num_rows, recorded):
    shown = []
    for assistant in (False, drafters[drafter]):
        criterion = Seen()
        target.generate(
            assistant=assistant,
            eos_token_id=NEVER,
            max_new_tokens=9,
            repetition_penalty=1.2,
            stopping_criteria=StoppingCriteriaList([criterion]),
            return_dict_in_generate=recorded,
            output_scores=recorded,
            **batch(num_rows),
        )
        shown.append(criterion.scores)
    plain, ours = shown
    assert len(ours) == len(plain) == 9
    for step, (mine, theirs) in enumerate(zip(ours, plain, strict=True), 1):
        assert (mine is None) == (theirs is None) == (not recorded)
        if recorded:
            assert mine.shape == (num_rows, step, 64)
            assert torch.allclose(mine, theirs, atol=1e-9, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_criterion_may_compare_rows(target, drafters, num_rows):
    class StopsTogether(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            odd = (input_ids[:, -1] % 2).sum() == len(input_ids)
            return torch.full((len(input_ids),), bool(odd) and input_ids.shape[1] > 15)

    def criteria():
        return StoppingCriteriaList([StopsTogether()])

    for drafter in drafters.values():
        assert_same_end(
            target, drafter, batch(num_rows), eos_token_id=NEVER, max_new_tokens=24, stopping_criteria=criteria
        )


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_criterion_that_knows_an_end_id_is_still_asked(target, drafters, num_rows, as_tensor):
    """Many criteria keep an `eos_token_id` of their own, and end elsewhere than at its first occurrence."""
    emitted = unstopped(target, num_rows)
    end = int(emitted[0, 2])

    class LongEnoughAndEnd(StoppingCriteria):
        def __init__(self):
            self.eos_token_id = torch.tensor([end]) if as_tensor else end

        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 21)

    def criteria():
        return StoppingCriteriaList([LongEnoughAndEnd()])

    for drafter in drafters.values():
        assert_same_end(
            target, drafter, batch(num_rows), eos_token_id=NEVER, max_new_tokens=24, stopping_criteria=criteria
        )


# --- stop strings and time --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", ["itself", "lookup"])
@pytest.mark.parametrize("place", ["call", "config", "positional config", "model"])
def test_stop_strings_inside_a_block(target, drafters, drafter, num_rows, place):
    emitted = unstopped(target, num_rows)
    stop = ["zebra", "".join(LETTERS[token - 3] for token in emitted[0, 7:9].tolist())]
    given = batch(num_rows) | {"eos_token_id": NEVER, "max_new_tokens": 24, "tokenizer": letter_tokenizer()}
    ids, positional = given.pop("input_ids"), ()
    if place == "call":
        given["stop_strings"] = stop
    elif place == "model":
        target.generation_config.stop_strings = stop
    else:
        config = GenerationConfig(stop_strings=stop)
        positional, given = ((config,), given) if "positional" in place else ((), given | {"generation_config": config})
    try:
        plain = target.generate(ids, *positional, assistant=False, **given)
        ours = target.generate(ids, *positional, assistant=drafters[drafter], **given)
    finally:
        target.generation_config.stop_strings = None
    assert torch.equal(ours, plain)
    assert plain[0, 12:21].tolist() == emitted[0, :9].tolist()
    if num_rows == 1:
        assert plain.shape[1] == 21 and hf_specdec.last_stats(target).emitted == 9


def test_stop_strings_cut_everything(target, drafters):
    stop = "".join(LETTERS[token - 3] for token in unstopped(target, 1)[0, 7:9].tolist())
    stats = assert_same_end(
        target,
        drafters["itself"],
        batch(1),
        stop_strings=[stop],
        tokenizer=letter_tokenizer,
        eos_token_id=NEVER,
        max_new_tokens=24,
    )
    assert stats.emitted == 9


class Clock:
    """A clock that ticks whenever it is read."""

    def __init__(self):
        self.now = 0

    def time(self) -> int:
        self.now += 1
        return self.now


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("ticks", [1, 5, 8])
def test_time_runs_out_inside_a_block(target, drafters, drafter, ticks, monkeypatch):
    def run(assistant):
        monkeypatch.setattr(host_criteria, "time", Clock())
        return target.generate(
            assistant=assistant, eos_token_id=NEVER, max_new_tokens=24, max_time=float(ticks), **batch(1)
        )

    plain = run(False)
    assert plain.shape[1] == 12 + ticks + 1
    assert torch.equal(run(drafters[drafter]), plain)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_no_time_left_means_one_token(target, drafters, num_rows, monkeypatch):
    monkeypatch.setattr(host_criteria, "time", types.SimpleNamespace(time=iter(range(0, 10**6, 1000)).__next__))
    for drafter in drafters.values():
        stats = assert_same_end(target, drafter, batch(num_rows), eos_token_id=NEVER, max_new_tokens=9, max_time=1.0)
        assert stats.emitted == num_rows


# --- other families ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mistral8", "gemma3", "gpt2", "mpt"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_ends_in_other_families(family, num_rows):
    model = hf_specdec.enable(tiny(family, **VARIED.get(family, {})))
    end = late_token(unstopped(model, num_rows), after=3)
    for drafter in (DraftModel(model), PromptLookup()):
        tolerance = 1e-4 if family == "mpt" else 1e-9
        assert_same_end(model, drafter, batch(num_rows), tolerance, eos_token_id=[end, NEVER], max_new_tokens=20)
