"""Token recycling: identity, law, what the table holds, how trees grow."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

import hf_specdec
from hf_specdec import Auto, Suffix, TokenRecycling
from hf_specdec.accept import Draft
from hf_specdec.drafters import DraftContext
from hf_specdec.recycling import SuccessorTable, grow, grow_chain, likeliest
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome
from tests.models import prompts, tiny
from tests.reference import assert_follows, target_law
from tests.second_device import NAME, SecondDevice
from tests.test_law import PROMPT, VOCAB, first_tokens, small


def random_table(seed=0, vocabulary=20, top_k=4):
    generator = np.random.default_rng(seed)
    table = SuccessorTable(vocabulary, top_k)
    ids = np.stack([generator.permutation(vocabulary)[:top_k] for _ in range(vocabulary)])
    probs = -np.sort(-generator.dirichlet(np.ones(top_k + 1), vocabulary)[:, :top_k], axis=1)
    table.learn(torch.arange(vocabulary), torch.from_numpy(ids), torch.from_numpy(probs))
    return table


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral8", "gemma3"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("length", [None, 12])
def test_greedy_text_is_the_same(family, num_rows, length):
    """The second call drafts what the first one taught."""
    model = tiny(family)
    ids, mask = prompts(num_rows)
    kwargs = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    plain = model.generate(ids, **kwargs)
    hf_specdec.enable(model)
    drafter = TokenRecycling()
    for _ in range(2):
        out = model.generate(ids, assistant=drafter, num_draft_tokens=length, **kwargs)
        assert torch.equal(plain, out)
    assert hf_specdec.last_stats(model).mean_acceptance_length > 1.1


@pytest.mark.parametrize("length", [None, 6])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["T=1", "T=0.7"])
def test_sampled_law_with_a_table_of_other_calls(options, length):
    """20 calls of 250 rows: 5,000 samples; all calls share one table."""
    target = hf_specdec.enable(small(0))
    processors = [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)] if options else []
    samples = first_tokens(target, 20, 250, assistant=TokenRecycling(), num_draft_tokens=length, **options)
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList(processors), 3, VOCAB))


@pytest.mark.scheduled
@pytest.mark.parametrize("num_rows", [1, 3])
def test_beside_copies_up_to_the_last_token(num_rows):
    """Both in one tree, which must not be wider than the rows have room."""
    target, assistant = hf_specdec.enable(tiny()), Auto([Suffix(), TokenRecycling()])
    for seed, length in product(range(3), (2, 3, 4, 6, 12, 40)):
        ids, mask = prompts(num_rows, seed=seed)
        kwargs = {"attention_mask": mask, "max_new_tokens": length, "eos_token_id": None, "pad_token_id": 0}
        ours = target.generate(ids, assistant=assistant, do_sample=False, **kwargs)
        assert torch.equal(ours, target.generate(ids, assistant=False, do_sample=False, **kwargs))
    assert min(assistant.stats.accepted_by.values()) > 0


def test_a_seed_says_the_text_whatever_the_table_holds():
    target = hf_specdec.enable(small(0))
    drafter = TokenRecycling()
    kwargs = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 40, "seed": 3}
    texts = [target.generate(PROMPT, assistant=drafter, **kwargs) for _ in range(3)]
    texts.append(target.generate(PROMPT, assistant="ngram", **kwargs))
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_calls_that_know_what_others_taught_have_numbers_of_their_own():
    """The table says in which rows something is copied, which must not follow from the numbers that judge there.

    Beside a drafter that draws its drafts, a second call with a seed therefore takes other coins.
    """
    target, other = small(0), small(1)
    drafter = TokenRecycling()

    def stream(model):
        state = DecodeState(torch.tensor([[3, 4]]), None, fill=0)
        return drafter.start(DraftContext(model, True, Scorer(LogitsProcessorList())), state).noise_stream

    assert [stream(target), stream(target), stream(other), stream(target)] == [0, 1, 0, 2]
    drafter.clear()
    assert stream(target) == 0


class Watched(TokenRecycling):
    """Writes down what every round read: texts, drafts and what came of them."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rounds = []

    def start(self, context, state):
        session = super().start(context, state)
        propose, commit, drafts = session.propose, session.commit, []

        def proposing(state, limits, noise):
            draft = propose(state, limits, noise)
            is_first = max(state.num_emitted) == 0  # the host's own pass over the prompt masks no tree
            drafts.append(draft.first_path() if is_first else draft)
            return draft

        def committing(state, outcome, target_pass=None):
            drafted = drafts.pop() if drafts else Draft.empty(len(state.rows))
            appended = zip(state.rows, outcome.appended, strict=True)
            texts = [state.tokens[row][: len(state.tokens[row]) - len(new)] for row, new in appended]
            self.rounds.append((texts, drafted, outcome))
            commit(state, outcome, target_pass)

        session.propose, session.commit = proposing, committing
        return session


def slow_table(model, rounds, top_k):
    """What a table must hold: of every pass the positions to learn from, one plain forward pass over its prefix each.

    A position follows the row's text and the drafted tokens it hangs on. Of a token that one pass has read several
    times the last one counts: positions that stayed behind the 16 foremost that were refused.
    """
    table = {}
    for texts, draft, outcome in rounds:
        refused, stayed = [], []
        for place, text in enumerate(texts):
            if outcome.emitted[place] == 0:
                continue
            paths = [[]]
            for index in range(int(draft.lengths[place])):
                paths.append([*paths[draft.known_parents()[place, index] + 1], int(draft.tokens[place, index])])
            said = outcome.appended[place][: outcome.emitted[place]]
            for position, path in enumerate(paths):
                stays = path == said[: len(path)] and len(path) < len(said)
                (stayed if stays else refused).append((position, place, text + path))
            refused += [(position, place, []) for position in range(len(paths), draft.width + 1)]
        for _, _, prefix in [*sorted(refused)[: max(0, 16 - len(stayed))], *stayed]:
            if not prefix:
                continue  # padding takes a place, and teaches nothing
            logits = model(torch.tensor([prefix])).logits[0, -1].detach().float()
            top = logits.softmax(dim=0).topk(top_k)
            table[prefix[-1]] = top.indices.tolist(), top.values.tolist()
    return table


@pytest.mark.parametrize("family", ["llama", "mpt"])  # trees and ragged rows; chains in lockstep
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("length", [1, 7])
def test_the_table_is_what_plain_passes_over_the_text_say(num_rows, length, family):
    """Exactly: of every token that was read, as it was read last; and of no other token."""
    # MPT's own mask makes NaN of padding in float64.
    model = hf_specdec.enable(tiny(family, dtype=torch.float64 if family == "llama" else torch.float32))
    drafter = Watched(top_k=5)
    for seed in range(3):
        ids, mask = prompts(num_rows, seed=seed)
        kwargs = {"attention_mask": mask, "max_new_tokens": 25, "eos_token_id": [2, 7]}
        model.generate(ids, assistant=drafter, num_draft_tokens=length, do_sample=False, **kwargs)
    assert drafter.stats.accepted > 0
    expected, table = slow_table(model, drafter.rounds, 5), drafter.table_of(model)
    for token in range(64):
        (ids, probs), (expected_ids, expected_probs) = table.successors(token), expected.get(token, ([], []))
        assert ids == expected_ids
        assert probs == pytest.approx(expected_probs, rel=1e-4)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_table_outlives_inference_mode(is_first):
    model, drafter = hf_specdec.enable(tiny()), TokenRecycling()
    ids, mask = prompts(2)
    kwargs = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False}
    plain = model.generate(ids, assistant=False, **kwargs)
    for is_inside in (is_first, not is_first, is_first):
        with torch.inference_mode(is_inside):
            assert torch.equal(model.generate(ids, assistant=drafter, **kwargs), plain)


def test_the_newest_entry_of_a_token_counts_and_strange_ids_are_passed_over():
    table = SuccessorTable(10, 2)
    ids = torch.tensor([[1, 2], [4, 5], [6, 7], [8, 9], [8, 9]])
    table.learn(torch.tensor([3, 3, -1, 99, 10]), ids, torch.tensor([[0.5, 0.2]] * 5))
    assert table.successors(3)[0] == [4, 5]
    assert table.successors(99) == table.successors(-1) == table.successors(9) == table.successors(10) == ([], [])
    assert table.num_bytes == (10 + 1) * 2 * 8


@pytest.mark.parametrize("vocabulary", [3, 5, 128, 640, 1000, 1280, 5000])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_the_likeliest_are_those_of_a_sort(vocabulary, num_rows):
    logits = torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 4
    ids, probs = likeliest(logits, 5)
    values, places = logits.double().softmax(dim=1).sort(dim=1, descending=True)
    assert torch.equal(ids, places[:, :5])
    assert torch.allclose(probs.double(), values[:, :5], rtol=1e-5, atol=1e-12)


def test_probabilities_of_extreme_logits():
    logits = torch.full((1, 2000), -1e30)
    logits[0, [1999, 3]] = torch.tensor([1e30, 9e29])
    ids, probs = likeliest(logits, 2)
    assert ids.tolist() == [[1999, 3]] and probs.tolist() == [[1.0, 0.0]]


class TestOnAnotherDevice:
    def test_a_table_elsewhere_holds_and_drafts_the_same(self):
        """Learning reads nothing back; drafting reads the successors, and never a whole vocabulary."""
        generator = torch.Generator().manual_seed(0)
        near, far = SuccessorTable(50, 4), None
        with SecondDevice() as device:
            far = SuccessorTable(50, 4, NAME)
            for _ in range(3):
                tokens = torch.randint(-1, 52, (30,), generator=generator)
                logits = torch.randn(30, 50, generator=generator)
                near.learn(tokens, *likeliest(logits, 4))
                moved = tokens.to(NAME), logits.to(NAME)
                device.moves.clear()
                far.learn(moved[0], *likeliest(moved[1], 4))
                assert device.moves[NAME, "cpu"] == 0
            for root in range(50):
                device.moves.clear()
                assert grow(root, far.reader([root]), 12) == grow(root, near.reader([root]), 12)
                assert 1 <= device.moves[NAME, "cpu"] <= 12
            assert all(far.successors(token) == near.successors(token) for token in range(-1, 52))
            far.move(torch.device("cpu"))
            assert torch.equal(far.entries[:-1], near.entries[:-1])

    @pytest.mark.parametrize("takes_trees", [True, False])
    def test_a_session_keeps_its_table_where_the_text_is(self, takes_trees):
        target, drafters = tiny(), [TokenRecycling(top_k=3), TokenRecycling(top_k=3)]
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 64, (2, 5), generator=generator)
        logits = torch.randn(2, 5, 64, generator=generator)
        outcome = Outcome([[1, 2], [5]], [2, 1], [4, 4], [1, 0], [False, False])
        copies = []
        with SecondDevice() as device:
            for drafter, name in zip(drafters, ["cpu", NAME], strict=True):
                state = DecodeState(torch.tensor([[3, 4], [5, 6]]).to(name), None, fill=0)
                context = DraftContext(target, False, Scorer(LogitsProcessorList()), takes_trees=takes_trees)
                session = drafter.start(context, state)
                session.commit(state, outcome, SimpleNamespace(tokens=tokens.to(name), logits=logits.to(name)))
                state.tokens = [[int(tokens[0, 2])], [int(tokens[1, 0])]]
                device.moves.clear()
                copies.append(session.copies(state, [6, 6]))
                assert drafter.table_of(target).device.type == name
            assert device.moves[NAME, "cpu"] <= 7  # one for all rows, then where a tree goes deeper
        assert copies[0] == copies[1] != []


@pytest.mark.parametrize("total", [1, 2, 7, 24])
@pytest.mark.parametrize("seed", range(5))
def test_growing_takes_the_likeliest_nodes(seed, total):
    table = random_table(seed)
    tree = grow(3, table.successors, total)
    chances = {-1: 1.0}
    for place, (confidence, parent) in enumerate(zip(tree.confidences, tree.parents, strict=True)):
        assert parent < place
        chances[place] = chances[parent] * confidence
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree.tokens) == total
    grown = [chances[place] for place in range(total)]
    assert grown == sorted(grown, reverse=True)
    assert np.allclose(grown, _all_chances(table, 3, 1.0, depth=6)[:total])


def _all_chances(table, token, chance, depth):
    """Chances of all paths from a token, the largest first; slow."""
    found = []
    for successor, prob in zip(*table.successors(token), strict=True):
        found.append(chance * prob)
        if depth > 1 and chance * prob > 1e-3:
            found.extend(_all_chances(table, successor, chance * prob, depth - 1))
    return sorted(found, reverse=True)


def test_chains_follow_the_likeliest_successor():
    table = random_table()
    chain = grow_chain(3, table.successors, 5)
    last = 3
    for token in chain.tokens:
        assert token == table.successors(last)[0][0]
        last = token
    assert chain.parents == [-1, 0, 1, 2, 3]


def test_tables_belong_to_targets_and_are_not_copied():
    drafter, one, two = TokenRecycling(), tiny(), tiny(vocab=32)
    assert drafter.table_of(one) is drafter.table_of(one) is not drafter.table_of(two)
    assert drafter.table_of(two).vocabulary == 32
    drafter.table_of(one).learn(torch.tensor([1]), torch.tensor([[2] * 8]), torch.tensor([[0.1] * 8]))
    for copied in (pickle.loads(pickle.dumps(drafter)), copy.deepcopy(drafter)):
        assert copied.table_of(one).successors(1) == ([], [])
    drafter.clear()
    assert drafter.table_of(one).successors(1) == ([], [])


@pytest.mark.parametrize("takes_trees", [True, False])
def test_trees_are_drafted_where_they_can_be_verified(takes_trees):
    target, drafter = tiny(), TokenRecycling()
    following = torch.arange(64)[:, None] + torch.arange(8)
    drafter.table_of(target).learn(torch.arange(64), following % 64, torch.tensor([[0.5] * 8] * 64))
    state = DecodeState(torch.tensor([[3, 4]]), None, fill=0)
    context = DraftContext(target, False, Scorer(LogitsProcessorList()), takes_trees=takes_trees)
    [copied] = drafter.start(context, state).copies(state, [6])
    assert (copied.parents is not None) == takes_trees


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 1.5}, {"num_draft_tokens": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TokenRecycling(**options)
