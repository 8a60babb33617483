"""Prompt lookup proposes what a slow scan of the text proposes."""

from __future__ import annotations

import random

import pytest

from hf_specdec import chains
from hf_specdec.drafters import prompt_lookup as module
from hf_specdec.drafters.base import Copy
from hf_specdec.drafters.prompt_lookup import NgramIndex, PromptLookup
from hf_specdec.schedule import copy_confidence

PREFERENCES = ["earliest", "newest", "frequent"]


def scan(text, smallest, largest, prefer, limit):
    """The slow twin: looks at every place of the text, for the longest tail first."""
    for size in range(largest, smallest - 1, -1):
        tail = text[len(text) - size :]
        starts = [end for end in range(size, len(text)) if text[end - size : end] == tail and len(text) > size]
        if not starts:
            continue
        # Of all matches, only the newest vote.
        starts = starts[:1] if prefer == "earliest" else starts[-1 if prefer == "newest" else -64 :]
        drafted, confidences = [], []
        for step in range(limit):
            successors = [(text + drafted)[start + step] for start in starts]
            token = max(reversed(successors), key=successors.count)
            confidences.append(copy_confidence(successors.count(token), len(successors), size + step))
            starts = [s for s, successor in zip(starts, successors, strict=True) if successor == token]
            drafted.append(token)
        return Copy(drafted, confidences)
    return Copy([], [])


def repetitive(chance, alphabet, length):
    """Random tokens; half of the time, some of them several times over."""
    tokens = [chance.randrange(alphabet) for _ in range(length)]
    return (tokens[: max(1, length // 3)] * 4)[:length] if chance.random() < 0.5 else tokens


@pytest.mark.parametrize("prefer", PREFERENCES)
@pytest.mark.parametrize("window", [(1, 1), (1, 4), (2, 3), (5, 5)])
def test_the_index_proposes_what_a_scan_proposes(prefer, window):
    chance = random.Random(0)
    for alphabet in (1, 2, 3, 8, 100):
        index, text = NgramIndex(*window, prefer), []
        for _ in range(80):
            text.extend(repetitive(chance, alphabet, chance.choice([1, 1, 1, 2, 5])))
            if sum(text[-3:]) % 3 == 1:
                continue  # rounds in which this row is not asked
            assert index.copy(text, 6) == scan(text, *window, prefer, 6)


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_whatever_is_read_in_bulk_and_whatever_token_by_token(prefer, monkeypatch):
    chance = random.Random(1)
    for _ in range(100):
        monkeypatch.setattr(module, "BULK", chance.choice([1, 7, 10**9]))
        monkeypatch.setattr(chains, "_CHUNK", chance.choice([3, 40, 10**9]))
        smallest = chance.choice([1, 2, 3])
        window = smallest, smallest + chance.randrange(4)
        alphabet = chance.choice([2, 5, 40, 50_000])
        index, text = NgramIndex(*window, prefer), []
        for _ in range(8):
            text.extend(repetitive(chance, alphabet, chance.choice([1, 3, 100])))
            assert index.copy(text, 9) == scan(text, *window, prefer, 9)


@pytest.mark.parametrize("prefer", PREFERENCES)
@pytest.mark.parametrize("bulk", [1, 10**9])
def test_collisions_of_hashes_change_nothing(prefer, bulk, monkeypatch):
    """With a multiplier of 0 all n-grams have one hash."""
    monkeypatch.setattr(module, "BULK", bulk)
    monkeypatch.setattr(chains, "_MULTIPLIER", 0)
    test_the_index_proposes_what_a_scan_proposes(prefer, (1, 4))


def test_ids_that_stand_for_images_are_neither_matched_nor_drafted():
    index = NgramIndex(1, 4, "frequent")
    assert index.copy([-1, 5, -1], 3) == Copy([], [])
    assert index.copy([-1, 5, -1, 5, 6, 5, -1, 5], 3).tokens == [6, 5]


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_a_long_text_takes_little_memory(prefer):
    chance = random.Random(0)
    text = [chance.randrange(1000) for _ in range(100_000)]
    index = NgramIndex(1, 4, prefer)
    index.copy(text, 0)
    assert index.num_bytes < 60 * len(text)
    assert index.copy(text, 10) == scan(text, 1, 4, prefer, 10)


def test_which_match_is_copied():
    text = [7, 8, 1, 7, 8, 2, 7, 8, 1, 7, 8, 3, 7, 8]
    drafts = {prefer: NgramIndex(2, 2, prefer).copy(text, 1).tokens for prefer in PREFERENCES}
    assert drafts == {"earliest": [1], "newest": [3], "frequent": [1]}


def test_a_copy_may_run_into_itself():
    assert NgramIndex(1, 2, "newest").copy([5, 6, 5, 6], 5).tokens == [5, 6, 5, 6, 5]


def test_longer_matches_are_copied_further():
    index = NgramIndex(1, 3, "newest", tokens_per_match=2)
    assert len(index.copy([1, 2, 3, 9, 8, 7, 6, 1, 2, 3], 20).tokens) == 6
    assert len(NgramIndex(1, 3, "newest", tokens_per_match=2).copy([4, 9, 8, 7, 6, 5, 4], 20).tokens) == 2


def test_texts_too_short_to_repeat():
    for text in ([], [1], [1, 2]):
        assert NgramIndex(1, 4, "frequent").copy(text, 5).tokens == []
    assert NgramIndex(1, 4, "frequent").copy([1, 1], 0).tokens == []


def test_one_window_sets_both():
    assert (PromptLookup(min_ngram=3).min_ngram, PromptLookup(min_ngram=3).max_ngram) == (3, 3)
    assert (PromptLookup(max_ngram=2).min_ngram, PromptLookup(max_ngram=2).max_ngram) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_ngram": 0}, "min_ngram=0"),
        ({"max_ngram": 0}, "max_ngram=0"),
        ({"max_ngram": -2}, "=-2"),
        ({"min_ngram": 4, "max_ngram": 2}, "min_ngram=4 exceeds max_ngram=2"),
        ({"prefer": "oldest"}, "prefer='oldest'"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"tokens_per_match": 0}, "tokens_per_match=0"),
        ({"min_ngram": 1.5}, "min_ngram=1.5"),
        ({"on_device": "cuda"}, "on_device='cuda'"),
    ],
)
def test_bad_options_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PromptLookup(**arguments)
