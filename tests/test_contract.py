"""What every drafter must do, whatever its strategy. A new drafter adds one line to `DRAFTERS`."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import hf_specdec.drafters as registry
from hf_specdec.accept import Draft
from hf_specdec.drafters import (
    Auto,
    DraftContext,
    Drafter,
    DraftModel,
    Eagle,
    ParallelDraft,
    PromptLookup,
    Suffix,
    TokenRecycling,
)
from hf_specdec.noise import Noise
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome
from tests.models import jittered, prompts, tiny
from tests.test_heads import initialised, small


def warmed(drafter, target):
    """Token recycling that knows successors of every token."""
    following = (torch.arange(64)[:, None] + torch.tensor([7, 11, 30])) % 64
    drafter.table_of(target).learn(torch.arange(64), following, torch.tensor([[0.5, 0.3, 0.1]] * 64))
    return drafter


DRAFTERS = {
    DraftModel: lambda target: DraftModel(jittered(target), num_draft_tokens=4),
    Eagle: lambda target: Eagle(initialised(small(taps=(0, 1, 2))).float(), num_draft_tokens=4),
    ParallelDraft: lambda target: ParallelDraft(jittered(target), mask_token_id=3, num_draft_tokens=4),
    PromptLookup: lambda target: PromptLookup(1, 3, num_draft_tokens=4),
    Suffix: lambda target: Suffix(max_spec_factor=2.0, num_draft_tokens=4),
    TokenRecycling: lambda target: warmed(TokenRecycling(4, top_k=3), target),
    Auto: lambda target: Auto([Suffix(num_draft_tokens=4), DraftModel(jittered(target), num_draft_tokens=4)]),
}


def test_every_registered_drafter_is_in_the_contract():
    classes = {value for value in vars(registry).values() if inspect.isclass(value) and issubclass(value, Drafter)}
    assert set(registry.NAMED.values()) | classes - {Drafter} == set(DRAFTERS)


@pytest.fixture(params=DRAFTERS, ids=lambda c: c.name)
def drafter_class(request):
    return request.param


class Bench:
    """A drafter at work on three ragged rows."""

    def __init__(self, drafter_class, do_sample=False, num_rows=3):
        self.target = tiny(dtype=torch.float32)
        self.drafter = DRAFTERS[drafter_class](self.target)
        ids, mask = prompts(num_rows)
        self.state = DecodeState(ids, mask, fill=0)
        scorer = Scorer(LogitsProcessorList([TemperatureLogitsWarper(0.7)] if do_sample else []))
        self.noise = Noise(0, torch.device("cpu")) if do_sample else None
        self.session = self.drafter.start(DraftContext(self.target, do_sample, scorer), self.state)

    def propose(self, limits):
        noise = self.noise and self.noise.round(self.state.rows, self.state.num_emitted, max(limits))
        return self.session.propose(self.state, limits, noise)

    def accept(self, draft, counts, next_token=5):
        appended = [[*draft.tokens[place, :count].tolist(), next_token] for place, count in enumerate(counts)]
        self.state.append(appended)
        emitted, finished = [len(tokens) for tokens in appended], [False] * len(counts)
        outcome = Outcome(appended, emitted, draft.lengths.tolist(), counts, finished)
        self.state.commit(outcome)
        self.session.commit(self.state, outcome)


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafts_respect_limits_and_shapes(drafter_class, do_sample):
    bench = Bench(drafter_class, do_sample)
    for limits in ([4, 2, 0], [0, 0, 3], [1, 4, 4]):
        draft = bench.propose(limits)
        assert draft.tokens.shape[0] == 3
        assert draft.width <= max(limits)
        assert all(0 <= length <= limit for length, limit in zip(draft.lengths.tolist(), limits, strict=True))
        assert bool(((draft.tokens >= 0) & (draft.tokens < 64)).all())
        if draft.probs is not None:
            assert do_sample
            assert draft.probs.shape == (3, draft.width, 64)
            assert torch.allclose(draft.probs.sum(-1), torch.ones(3, draft.width), atol=1e-5)
            assert bool((draft.probs.gather(2, draft.tokens[..., None]) > 0).all())
        bench.accept(draft, [min(1, n) for n in draft.lengths.tolist()])


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_session_in_the_middle_drafts_like_a_fresh_one(drafter_class, do_sample):
    """Whatever was accepted, refused, left out or dropped, the next draft depends on the rows' tokens alone."""
    bench = Bench(drafter_class, do_sample)
    for counts in ([4, 0, 1], [0, 4, 2], [], [4, 4, 4], [], [], [3, 0, 0]):
        draft = bench.propose([4, 4, 4]) if counts else Draft.empty(3)  # a round in which nobody is asked
        counts = counts or [0, 0, 0]
        bench.accept(draft, [min(c, n) for c, n in zip(counts, draft.lengths.tolist(), strict=True)], next_token=7)
    kept = bench.state.rows = [0, 2]
    bench.session.keep_rows(kept)
    here = bench.propose([4, 4])
    for place, row in enumerate(kept):
        fresh = Bench(drafter_class, do_sample, num_rows=1)
        fresh.state = DecodeState(torch.tensor([bench.state.tokens[row]]), None, fill=0)
        scorer = Scorer(LogitsProcessorList([TemperatureLogitsWarper(0.7)] if do_sample else []))
        fresh.session = fresh.drafter.start(DraftContext(fresh.target, do_sample, scorer), fresh.state)
        noise = bench.noise and bench.noise.round([row], [bench.state.lengths[row] - bench.state.prompt_length], 4)
        alone = fresh.session.propose(fresh.state, [4], noise)
        length = int(here.lengths[place])
        assert length == int(alone.lengths[0])
        assert here.tokens[place, :length].tolist() == alone.tokens[0, :length].tolist()


def test_drafting_leaves_the_target_alone(drafter_class):
    bench = Bench(drafter_class)
    before = copy.deepcopy(bench.target.state_dict())
    bench.accept(bench.propose([4, 4, 4]), [0, 0, 0])
    assert all(torch.equal(value, before[name]) for name, value in bench.target.state_dict().items())


def test_a_drafter_serves_two_calls_at_once(drafter_class):
    one, two = Bench(drafter_class), Bench(drafter_class)
    two.session = one.drafter.start(DraftContext(one.target, False, Scorer(LogitsProcessorList())), two.state)
    first = one.propose([4, 4, 4])
    one.accept(first, [0, 0, 0])
    assert torch.equal(two.propose([4, 4, 4]).tokens, first.tokens)


def test_bad_lengths_are_refused(drafter_class):
    models = {DraftModel: tiny, ParallelDraft: tiny, Eagle: lambda: initialised(small())}
    needed = [models[drafter_class]()] if drafter_class in models else []
    needed += [3] if drafter_class is ParallelDraft else []
    with pytest.raises(ValueError, match="num_draft_tokens=0"):
        drafter_class(*needed, num_draft_tokens=0)
