"""Prompt lookup by tensor operations drafts what the index on the host drafts, and reads nothing back."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LogitsProcessorList

import hf_specdec
from hf_specdec import Auto, DraftModel, PromptLookup
from hf_specdec.drafters import DraftContext
from hf_specdec.drafters.base import CopySession
from hf_specdec.drafters.lookup_on_device import DeviceLookupSession
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome
from tests.models import jittered, prompts, tiny
from tests.test_prompt_lookup import PREFERENCES, repetitive

WINDOWS = [(1, 1), (1, 4), (2, 3), (5, 5), (3, 12)]


TARGET = tiny()


def context(target=None, **changes):
    return DraftContext(target or TARGET, False, Scorer(LogitsProcessorList()), **changes)


def random_batch(chance, num_rows, longest, alphabet):
    """Prompts with padding on the left, anywhere, or none; now and then with ids that are no tokens."""
    kind = chance.choice(["whole", "left", "holes"])
    ids = torch.tensor([repetitive(chance, alphabet, longest) for _ in range(num_rows)]).view(num_rows, longest)
    if kind == "whole":
        return ids, None
    mask = torch.ones_like(ids)
    for row in range(num_rows):
        if kind == "left":
            mask[row, : chance.randrange(longest)] = 0
        else:
            mask[row] = torch.tensor([chance.random() < 0.7 for _ in range(longest)])
    if chance.random() < 0.3:
        ids[ids == 1] = -1
    return ids, mask


def append(state, chance, alphabet):
    """A round's outcome: some tokens, another number in every row; drafts that were refused lie behind the ends."""
    state.write(torch.randint(alphabet, (len(state.rows), 5), generator=torch.Generator().manual_seed(0)))
    new = [repetitive(chance, alphabet, chance.randrange(1, 6)) for _ in state.rows]
    state.append(new)
    counts = [len(tokens) for tokens in new]
    state.commit(Outcome(new, counts, [0] * len(new), [0] * len(new), [False] * len(new)))


def assert_same(host, device, state, limits):
    ours, theirs = (session.propose(state, limits, None) for session in (device, host))
    assert ours.lengths.tolist() == theirs.lengths.tolist()
    for place, length in enumerate(theirs.lengths.tolist()):
        assert ours.tokens[place, :length].tolist() == theirs.tokens[place, :length].tolist()
    assert ours.width <= max(limits)


@pytest.mark.parametrize("prefer", PREFERENCES)
@pytest.mark.parametrize("window", WINDOWS)
def test_tensors_draft_what_the_index_drafts(prefer, window):
    chance = random.Random(0)
    for case in range(40):
        num_rows, alphabet = chance.choice([1, 2, 5]), chance.choice([1, 2, 3, 8, 100])
        ids, mask = random_batch(chance, num_rows, chance.choice([1, 2, 7, 30, 120]), alphabet)
        state = DecodeState(ids, mask, fill=0)
        per_match, is_scheduled = chance.choice([None, 1, 5]), case % 2 == 0
        host, device = (
            PromptLookup(*window, prefer=prefer, tokens_per_match=per_match, on_device=on_device).start(
                context(is_scheduled=is_scheduled), state
            )
            for on_device in (False, True)
        )
        assert isinstance(device, DeviceLookupSession)
        for _ in range(6):
            assert_same(host, device, state, [chance.choice([0, 1, 9]) for _ in state.rows])
            append(state, chance, alphabet)
            if len(state.rows) > 1 and chance.random() < 0.2:
                places = sorted(chance.sample(range(len(state.rows)), len(state.rows) - 1))
                state.rows = [state.rows[place] for place in places]
                host.keep_rows(places)
                device.keep_rows(places)


def test_rows_without_any_token():
    state = DecodeState(torch.zeros(2, 0, dtype=torch.long), torch.ones(2, 7), fill=0)
    session = PromptLookup(on_device=True).start(context(), state)
    assert session.propose(state, [3, 3], None).lengths.tolist() == [0, 0]
    masked = DecodeState(torch.ones(2, 3, dtype=torch.long), torch.tensor([[0, 0, 0], [1, 1, 1]]), fill=0)
    session = PromptLookup(on_device=True).start(context(), masked)
    assert session.propose(masked, [3, 3], None).lengths.tolist() == [0, 3]


@pytest.mark.parametrize("family", ["llama", "mistral8", "bloom"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("prefer", PREFERENCES)
def test_greedy_identity(family, num_rows, prefer):
    target = hf_specdec.enable(tiny(family))
    ids, mask = prompts(num_rows)
    kwargs = {"attention_mask": mask, "max_new_tokens": 40, "eos_token_id": [2, 7, 11], "pad_token_id": 0}
    plain = target.generate(ids, assistant=False, **kwargs)
    drafts = []
    for on_device in (False, True):
        drafter = PromptLookup(prefer=prefer, on_device=on_device)
        assert torch.equal(plain, target.generate(ids, assistant=drafter, **kwargs))
        drafts.append((drafter.stats.drafted, drafter.stats.accepted))
    assert drafts[0] == drafts[1]


@pytest.mark.scheduled
@pytest.mark.parametrize("num_rows", [1, 3])
def test_identity_where_lengths_follow_the_record(num_rows):
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(num_rows)
    kwargs = {"attention_mask": mask, "max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(ids, assistant=False, **kwargs)
    lookup = PromptLookup(on_device=True)
    for assistant in (lookup, lookup, Auto([PromptLookup(on_device=True), DraftModel(jittered(target))])):
        assert torch.equal(plain, target.generate(ids, assistant=assistant, **kwargs))


def test_texts_are_found_wherever_tensors_are_made_by_default():
    """As under `torch.set_default_device("cuda")`: what the host sends must begin on the host."""
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(3)
    given = {"attention_mask": mask, "max_new_tokens": 8, "eos_token_id": None}
    with torch.device("meta"):
        out = target.generate(ids, assistant=PromptLookup(on_device=True), **given)
    assert torch.equal(out, target.generate(ids, assistant=False, **given))


def test_tokens_that_were_promised_and_not_found_count_as_refused():
    from hf_specdec.drafters.scheduled import scheduled
    from hf_specdec.schedule import Experience

    state = DecodeState(torch.tensor([[1, 2, 3, 4]]), None, fill=0)
    experience = Experience()
    session = scheduled((PromptLookup(on_device=True),), context(is_scheduled=True), state, experience)
    draft = session.propose(state, [4], None)
    assert draft.width > 0
    assert draft.lengths.tolist() == [0]
    state.append([[5]])
    outcome = Outcome([[5]], [1], [0], [0], [False])
    state.commit(outcome)
    session.commit(state, outcome)
    first, second, *_ = experience.acceptance_of("prompt-lookup").by_position
    fresh = Experience().acceptance_of("prompt-lookup").of_positions(2)
    assert first.value < fresh[0].value and second.value == fresh[1].value


class TestWhoLooksUpWhere:
    def session(self, device, num_rows=16, **changes):
        state = DecodeState(torch.zeros(num_rows, 4, dtype=torch.long), None, fill=0)
        state.sequences = state.sequences.to(device)
        return PromptLookup().start(context(**changes), state)

    def test_the_host_looks_up_what_lives_on_it(self):
        assert isinstance(self.session("cpu"), CopySession)

    def test_a_device_looks_up_what_lives_there(self):
        assert isinstance(self.session("meta"), DeviceLookupSession)
        assert isinstance(self.session("meta", num_rows=15), CopySession)  # the index is faster for few rows

    def test_among_several_drafters_copies_are_compared_on_the_host(self):
        assert isinstance(self.session("meta", is_alone=False), CopySession)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnCuda:
    @pytest.mark.parametrize("prefer", PREFERENCES)
    @pytest.mark.parametrize("window", WINDOWS)
    def test_the_same_drafts_without_waiting_for_the_device(self, prefer, window):
        chance = random.Random(0)
        for _ in range(10):
            ids, mask = random_batch(chance, 4, 200, alphabet=5)
            state = DecodeState(ids.cuda(), None if mask is None else mask.cuda(), fill=0)
            host, device = (
                PromptLookup(*window, prefer=prefer, on_device=on_device).start(context(), state)
                for on_device in (False, None)
            )
            limits = [15, 0, 3, 15]
            expected = host.propose(state, limits, None)
            torch.cuda.set_sync_debug_mode("error")
            try:
                draft = device.propose(state, limits, None)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert draft.lengths.tolist() == expected.lengths.tolist()
            assert torch.equal(draft.tokens[:, : expected.width], expected.tokens)
