"""Token recycling: identity, law, what the table holds, how trees grow."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

import hf_specdec
from hf_specdec import TokenRecycling
from hf_specdec.drafters import DraftContext
from hf_specdec.recycling import SuccessorTable, grow, grow_chain, likeliest
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState
from tests.models import prompts, tiny
from tests.reference import assert_follows, target_law
from tests.test_law import PROMPT, VOCAB, first_tokens, small


def random_table(seed=0, vocabulary=20, top_k=4):
    generator = np.random.default_rng(seed)
    table = SuccessorTable(vocabulary, top_k)
    ids = np.stack([generator.permutation(vocabulary)[:top_k] for _ in range(vocabulary)])
    probs = -np.sort(-generator.dirichlet(np.ones(top_k + 1), vocabulary)[:, :top_k], axis=1)
    table.learn(np.arange(vocabulary), ids, probs)
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


def test_a_seed_says_the_text_whatever_the_table_holds():
    target = hf_specdec.enable(small(0))
    drafter = TokenRecycling()
    kwargs = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 40, "seed": 3}
    texts = [target.generate(PROMPT, assistant=drafter, **kwargs) for _ in range(3)]
    texts.append(target.generate(PROMPT, assistant="ngram", **kwargs))
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_the_table_holds_what_the_target_last_thought_of_every_token_it_read():
    model = tiny(dtype=torch.float64)
    ids, _ = prompts(1)
    hf_specdec.enable(model)
    drafter = TokenRecycling(top_k=5)
    # The prompt's last token alone was read with logits; the newest token never was.
    text = model.generate(ids, assistant=drafter, max_new_tokens=20, num_draft_tokens=1, eos_token_id=None)[0]
    table, read = drafter.table_of(model), text[ids.shape[1] - 1 : -1].tolist()
    logits = model(text[None]).logits[0].detach().float()
    refused = {int(t) for t in np.nonzero(table.probs[:, 0])[0]} - set(read)
    assert int(text[-1]) in set(read) | refused or table.successors(int(text[-1])) == ([], [])
    expected_ids, expected_probs = likeliest(logits, 5)
    exact = 0
    for token in set(read):
        place = ids.shape[1] - 1 + len(read) - 1 - read[::-1].index(token)
        found, probs = table.successors(token)
        exact += found == expected_ids[place].tolist() and np.allclose(probs, expected_probs[place], atol=1e-5)
    assert exact >= len(set(read)) - 2  # a refused token may have been read later than the text's


def test_the_newest_entry_of_a_token_counts_and_strange_ids_are_passed_over():
    table = SuccessorTable(10, 2)
    table.learn(np.array([3, 3, -1, 99]), np.array([[1, 2], [4, 5], [6, 7], [8, 9]]), np.array([[0.5, 0.2]] * 4))
    assert table.successors(3)[0] == [4, 5]
    assert table.successors(99) == table.successors(-1) == table.successors(9) == ([], [])
    assert table.num_bytes == 10 * 2 * 8


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
    assert len(drafter.table_of(two).ids) == 32
    drafter.table_of(one).learn(np.array([1]), np.array([[2] * 8]), np.array([[0.1] * 8]))
    for copied in (pickle.loads(pickle.dumps(drafter)), copy.deepcopy(drafter)):
        assert copied.table_of(one).successors(1) == ([], [])
    drafter.clear()
    assert drafter.table_of(one).successors(1) == ([], [])


@pytest.mark.parametrize("takes_trees", [True, False])
def test_trees_are_drafted_where_they_can_be_verified(takes_trees):
    target, drafter = tiny(), TokenRecycling()
    for token, successor in product(range(64), range(1)):
        drafter.table_of(target).learn(np.array([token]), np.array([[successor, 5] + [6] * 6]), np.array([[0.5] * 8]))
    state = DecodeState(torch.tensor([[3, 4]]), None, fill=0)
    context = DraftContext(target, False, Scorer(LogitsProcessorList()), takes_trees=takes_trees)
    [copied] = drafter.start(context, state).copies(state, [6])
    assert (copied.parents is not None) == takes_trees


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 1.5}, {"num_draft_tokens": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TokenRecycling(**options)
