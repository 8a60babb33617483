"""What every drafter must do, whatever its strategy. A new drafter adds one line to `DRAFTERS`."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import hf_specdec.drafters as registry
from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.cached_model import CachedModel
from hf_specdec.drafters import (
    Auto,
    DraftContext,
    Drafter,
    DraftModel,
    DraftTree,
    Eagle,
    EarlyExit,
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
    EarlyExit: lambda target: EarlyExit(1, num_draft_tokens=4),
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


def reader_of(target, state):
    """The target, which has read all rows but for their last tokens."""
    arguments = host.draft_arguments(target)
    reader = CachedModel(target, host.new_cache(target), arguments, len(state.rows), state.device)
    rows = [state.tokens[row][:-1] for row in state.rows]
    widths = [len(row) for row in rows]
    reader.read(torch.tensor([[0] * (max(widths) - len(row)) + row for row in rows]), widths=widths)
    reader.commit(widths)
    return reader


class Bench:
    """A drafter at work on three ragged rows.

    Args:
        drafter_class: whose.
        do_sample: whether the call samples.
        texts: prompts and their mask; made up if left out. If its session looks at the target's states, the newest
            token of every row comes with the prompt's pass, as in a call.
        takes_trees: whether trees can be verified.
    """

    def __init__(self, drafter_class, do_sample=False, texts=None, takes_trees=False):
        self.target = tiny(dtype=torch.float32)
        self.drafter = DRAFTERS[drafter_class](self.target)
        self.do_sample, self.takes_trees = do_sample, takes_trees
        self.noise = Noise(0, torch.device("cpu")) if do_sample else None
        self.start(*(texts or prompts(3)))

    def start(self, ids, mask=None):
        self.begin(ids, mask)
        if self.session.taps:
            self.begin(ids[:, :-1], None if mask is None else mask[:, :-1])
            assert self.propose([4] * len(ids)).width == 0  # there is nothing to draft from
            self.accept(Draft.empty(len(ids)), [0] * len(ids), ids[:, -1].tolist())

    def begin(self, ids, mask):
        self.state = DecodeState(ids, mask, fill=0)
        self.reader = reader_of(self.target, self.state)
        scorer = Scorer(LogitsProcessorList([TemperatureLogitsWarper(0.7)] if self.do_sample else []))
        context = DraftContext(self.target, self.do_sample, scorer, takes_trees=self.takes_trees, reader=self.reader)
        self.session = self.drafter.start(context, self.state)

    def target_pass(self, draft):
        """The states that a session taps; the text was read without a cache, row by row."""
        longest = self.state.prompt_length - 1
        states, prompt = ({tap: [] for tap in self.session.taps} for _ in range(2))
        for place, row in enumerate(self.state.rows):
            text = torch.tensor(self.state.tokens[row])
            paths = [draft.tokens[place][seen[1:]] for seen in draft.seen[place]]
            read = [self.hidden_states(torch.cat([text, path])) for path in paths]
            for tap in self.session.taps:
                states[tap].append(torch.stack([layers[tap][-1] for layers in read]))
                before = read[0][tap][:-1][-longest:]
                prompt[tap].append(torch.nn.functional.pad(before, (0, 0, longest - len(before), 0)))
        states, prompt = ({tap: torch.stack(rows) for tap, rows in found.items()} for found in (states, prompt))
        return SimpleNamespace(states=states, prompt_states=prompt)

    def hidden_states(self, ids):
        with torch.no_grad():
            return [layer[0] for layer in self.target(ids[None], output_hidden_states=True).hidden_states]

    @torch.no_grad()
    def propose(self, limits):
        noise = self.noise and self.noise.round(self.state.rows, self.state.num_emitted, max(limits))
        return self.session.propose(self.state, limits, noise)

    @torch.no_grad()
    def accept(self, draft, counts, next_tokens=5):
        """Keeps the first tokens of every row's draft, or of a tree those on its first path."""
        target_pass = self.target_pass(draft) if self.session.taps else None
        path = draft.first_path() if draft.parents is not None else draft
        next_tokens = next_tokens if isinstance(next_tokens, list) else [next_tokens] * len(counts)
        kept = [path.tokens[place, :count].tolist() for place, count in enumerate(counts)]
        appended = [[*tokens, token] for tokens, token in zip(kept, next_tokens, strict=True)]
        positions = None if draft.parents is None else [_positions(draft, place, n) for place, n in enumerate(counts)]
        if draft.is_read_ahead:
            self.reader.read_rest()
        else:
            seen = None if draft.parents is None else draft.seen
            self.reader.read(torch.cat([self.state.last_tokens(), draft.tokens], dim=1), seen=seen)
        self.reader.commit([len(tokens) for tokens in appended], positions)
        self.state.append(appended)
        emitted, finished = [len(tokens) for tokens in appended], [False] * len(counts)
        outcome = Outcome(appended, emitted, draft.lengths.tolist(), counts, finished, positions)
        self.state.commit(outcome)
        self.session.commit(self.state, outcome, target_pass)


def _positions(draft, place, count):
    """Positions of the pass along the first path of a row's tree, the last token's first."""
    found = [0]
    parents = draft.parents[place, : int(draft.lengths[place])].tolist()
    while len(found) <= count:
        found.append(parents.index(found[-1] - 1) + 1)
    return found


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafts_respect_limits_and_shapes(drafter_class, do_sample):
    bench = Bench(drafter_class, do_sample)
    for limits in ([4, 2, 0], [0, 0, 3], [1, 4, 4]):
        draft = bench.propose(limits)
        assert draft.tokens.shape[0] == 3
        assert not drafter_class.reads_states or draft.width > 0
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
        bench.accept(draft, [min(c, n) for c, n in zip(counts, draft.lengths.tolist(), strict=True)], 7)
    kept = bench.state.rows = [0, 2]
    bench.reader.keep_rows(kept)
    bench.session.keep_rows(kept)
    here = bench.propose([4, 4])
    for place, row in enumerate(kept):
        fresh = Bench(drafter_class, do_sample, (torch.tensor([bench.state.tokens[row]]),))
        noise = bench.noise and bench.noise.round([row], [bench.state.lengths[row] - bench.state.prompt_length], 4)
        alone = fresh.session.propose(fresh.state, [4], noise)
        length = int(here.lengths[place])
        assert length == int(alone.lengths[0])
        assert here.tokens[place, :length].tolist() == alone.tokens[0, :length].tolist()


def test_trees_in_the_middle_grow_like_fresh_ones():
    """After paths of trees, chains and rounds without a draft, the next tree depends on the rows' texts alone."""
    DRAFTERS[_TreeEagle] = lambda target: Eagle(initialised(small(taps=(0, 1, 2))).float(), tree=DraftTree(4, 3, 14))
    try:
        bench = Bench(_TreeEagle, takes_trees=True)
        for counts in ([3, 0, 1], [0, 2, 2], [], [1, 1, 3], [], [2, 0, 0]):
            draft = bench.propose([14, 14, 14]) if counts else Draft.empty(3)
            bench.accept(draft, [min(c, 2) for c in counts] or [0, 0, 0], 7)
        bench.state.rows = [0, 2]
        bench.reader.keep_rows([0, 2])
        bench.session.keep_rows([0, 2])
        here = bench.propose([14, 14])
        assert here.parents is not None
        for place, row in enumerate([0, 2]):
            fresh = Bench(_TreeEagle, False, (torch.tensor([bench.state.tokens[row]]),), takes_trees=True)
            alone = fresh.propose([14])
            assert here.lengths[place] == alone.lengths[0] == 14
            assert here.tokens[place].tolist() == alone.tokens[0].tolist()
            assert here.parents[place].tolist() == alone.parents[0].tolist()
    finally:
        del DRAFTERS[_TreeEagle]


class _TreeEagle(Eagle):
    """Names trees of heads in the table above."""


def test_drafting_leaves_the_target_alone(drafter_class):
    bench = Bench(drafter_class)
    before = copy.deepcopy(bench.target.state_dict())
    bench.accept(bench.propose([4, 4, 4]), [0, 0, 0])
    assert all(torch.equal(value, before[name]) for name, value in bench.target.state_dict().items())


def test_a_drafter_serves_two_calls_at_once(drafter_class):
    one, two = Bench(drafter_class), Bench(drafter_class)
    two.drafter, two.target = one.drafter, one.target
    two.start(*prompts(3))
    first = one.propose([4, 4, 4])
    one.accept(first, [0, 0, 0])
    assert torch.equal(two.propose([4, 4, 4]).tokens, first.tokens)


def test_bad_lengths_are_refused(drafter_class):
    models = {DraftModel: tiny, ParallelDraft: tiny, Eagle: lambda: initialised(small())}
    needed = [models[drafter_class]()] if drafter_class in models else []
    needed += [3] if drafter_class is ParallelDraft else []
    with pytest.raises(ValueError, match="num_draft_tokens=0"):
        drafter_class(*needed, num_draft_tokens=0)
