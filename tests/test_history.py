"""`TokenHistory` proposes what a slow scan of plain lists proposes, forgets what it must, and survives its files."""

from __future__ import annotations

import itertools
import math
import os
import random
import threading

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_specdec import chains
from hf_specdec import history as module
from hf_specdec.history import ANCHORS, FILE_NAME, GAP, NOTHING, CopyRule, Proposal, TokenHistory
from hf_specdec.vocabulary import Vocabulary, tokenizer_fingerprint

RULE = CopyRule(min_token_prob=0.0)


class SlowHistory:
    """The slow twin: lists of tokens, scanned from end to end."""

    def __init__(self, max_depth, max_requests=None, max_tokens=None):
        self.max_depth, self.max_requests, self.max_tokens = max_depth, max_requests, max_tokens
        self.requests = []

    def add(self, tokens):
        tokens = tokens[-self.max_tokens :] if self.max_tokens else tokens
        if tokens:
            self.requests.append([])
            self.extend(tokens)

    def extend(self, tokens):
        self.requests = self.requests or [[]]
        self.requests[-1] += tokens
        while len(self.requests) > (self.max_requests or math.inf) or (
            len(self.requests) > 1 and sum(map(len, self.requests)) > (self.max_tokens or math.inf)
        ):
            self.requests.pop(0)

    def propose(self, tail, limit, rule, most_voters):
        runs_on = tail is None
        tail = (self.requests[-1] if self.requests else []) if runs_on else tail
        tail = tail[-self.max_depth :]
        best = NOTHING
        for length in range(len(tail), 0, -1):
            if GAP in tail[-length:]:
                continue
            anchor = next(k for k in ANCHORS if k <= length)
            newest = list(itertools.islice(self.endings(tail[-anchor:]), most_voters))
            voters = [(text, end) for text, end in newest if text[max(0, end - length) : end] == tail[-length:]]
            proposal = self.copied(voters, length, rule.budget(length, limit), rule.min_token_prob, runs_on)
            if proposal.score > best.score:
                best = proposal
        return best

    def paths(self, tail, limit, rule, most_voters):
        """All that the voters of the best chain say: of every path, how many got there, and how many before it."""
        best = self.propose(tail, limit, rule, most_voters)
        runs_on = tail is None
        ending = ((self.requests[-1] if self.requests else []) if runs_on else tail)[-self.max_depth :]
        ending = ending[len(ending) - best.match_length :]
        anchor = next(k for k in ANCHORS if k <= best.match_length)
        newest = itertools.islice(self.endings(ending[-anchor:]), most_voters)
        voters = [(text, end) for text, end in newest if text[max(0, end - len(ending)) : end] == ending]
        budget, found = rule.budget(best.match_length, limit), {(): len(voters)}
        for text, end in voters:
            full = list(text)
            while runs_on and text is self.requests[-1] and len(full) < end + budget:
                full.append(full[end + len(full) - len(text)])
            for length in range(1, budget + 1):
                path = tuple(full[end : end + length])
                if len(path) == length and GAP not in path:
                    found[path] = found.get(path, 0) + 1
        return found

    def endings(self, gram):
        """(request, place behind the n-gram) wherever a token follows it, newest first."""
        for text in reversed(self.requests):
            for end in range(len(text) - 1, len(gram) - 1, -1):
                if text[end - len(gram) : end] == gram and text[end] != GAP:
                    yield text, end

    def copied(self, voters, length, budget, min_prob, runs_on):
        num_matches, tokens, probs, product, score = len(voters), [], [], 1.0, 0.0
        while voters and len(tokens) < budget:
            nexts = []
            for text, end in voters:
                full = text + tokens if runs_on and text is self.requests[-1] else text
                place = end + len(tokens)
                nexts.append(full[place] if place < len(full) and full[place] != GAP else None)
            counted = [token for token in nexts if token is not None]
            if not counted:
                break
            token = max(counted, key=counted.count)  # of equals the first, which is the newest
            product *= counted.count(token) / len(nexts)
            if product < min_prob:
                break
            tokens.append(token)
            probs.append(counted.count(token) / len(nexts))
            score += product
            voters = [voter for voter, follower in zip(voters, nexts, strict=True) if follower == token]
        return Proposal(tokens, probs, num_matches, length, score) if tokens else NOTHING


def same(ours, slow):
    assert ours[0] == slow[0]
    assert ours[1] == pytest.approx(slow[1])
    assert ours[2:4] == slow[2:4]
    assert ours.score == pytest.approx(slow.score)


def some_tokens(chance, alphabet, length, gaps=False):
    ids = range(-1 if gaps else 0, alphabet)
    tokens = [chance.choice(ids) for _ in range(length)]
    if chance.random() < 0.4:  # text that repeats itself
        tokens = (tokens[: max(1, length // 3)] * 4)[:length]
    return tokens


def random_rule(chance):
    return CopyRule(
        chance.choice([0.5, 1.0, 3.0]), chance.choice([-1.0, 0.0, 2.0]), chance.choice([0.0, 0.1, 0.5, 1.0])
    )


@pytest.mark.parametrize("most_voters", [3, 64])
@pytest.mark.parametrize("seed", range(8))
def test_a_lookup_finds_what_a_scan_finds(seed, most_voters, monkeypatch):
    """Whole and growing requests, forgetting and moving down, added token by token and in bulk."""
    monkeypatch.setattr(module, "MOST_VOTERS", most_voters)
    monkeypatch.setattr(module, "_SMALLEST_CAPACITY", 16)  # so that storage grows and moves often
    chance = random.Random(seed)
    for case in range(40):
        alphabet, depth = chance.choice([1, 2, 3, 8]), chance.choice([1, 2, 5, 12, 24])
        limits = chance.choice([None, 1, 3, 10]), chance.choice([None, 5, 40, 200])
        ours, slow = TokenHistory(depth, *limits), SlowHistory(depth, *limits)
        monkeypatch.setattr(module, "BULK", chance.choice([1, 4, 10**9]))
        monkeypatch.setattr(chains, "_CHUNK", chance.choice([1, 7, 10**9]))
        for _ in range(15):
            tokens = some_tokens(chance, alphabet, chance.choice([0, 1, 1, 2, 9, 50]), gaps=case % 4 == 0)
            for history in (ours, slow):
                history.extend(tokens) if len(tokens) < 3 and tokens else history.add(tokens)
            assert ours.num_requests == len(slow.requests)
            assert ours.num_tokens == sum(map(len, slow.requests))
            rule, limit = random_rule(chance), chance.choice([0, 1, 4, 24])
            for tail in (None, some_tokens(chance, alphabet, chance.choice([1, 3, 30]), gaps=case % 4 == 0)):
                same(ours.propose(tail, limit, rule), slow.propose(tail, limit, rule, most_voters))


def running_share(known, path):
    """The share of all voters that a path has, multiplied step by step as it is drafted."""
    steps = (known[path[: length + 1]] / known[path[:length]] for length in range(len(path)))
    return math.prod(steps)


def paths_of(proposal):
    """The paths of a tree, or a chain, in order, with the share of each among those that got to the one it follows."""
    paths, parents = [()], proposal.parents or range(-1, len(proposal.tokens) - 1)
    for place, (token, parent) in enumerate(zip(proposal.tokens, parents, strict=True)):
        assert parent < place
        paths.append((*paths[parent + 1], token))
    return dict(zip(paths[1:], proposal.probs, strict=True))


@pytest.mark.parametrize("most_voters", [3, 64])
@pytest.mark.parametrize("seed", range(8))
def test_branches_are_what_most_voters_got_to(seed, most_voters, monkeypatch):
    """All paths of the voters are enumerated; the tree holds the likeliest ones, and is the chain where that is all."""
    monkeypatch.setattr(module, "MOST_VOTERS", most_voters)
    chance, num_trees = random.Random(seed), 0
    for case in range(60):
        alphabet, depth = chance.choice([1, 2, 3, 8]), chance.choice([1, 2, 5, 12])
        ours, slow = TokenHistory(depth), SlowHistory(depth)
        for _ in range(6):
            tokens = some_tokens(chance, alphabet, chance.choice([1, 9, 50]), gaps=case % 4 == 0)
            for history in (ours, slow):
                history.extend(tokens) if len(tokens) < 3 else history.add(tokens)
            rule, limit = random_rule(chance), chance.choice([1, 4, 12])
            for tail in (None, some_tokens(chance, alphabet, chance.choice([1, 3, 30]))):
                chain, tree = (ours.propose(tail, limit, rule, branches) for branches in (False, True))
                assert tree[2:5] == chain[2:5]
                if not chain.tokens:
                    assert tree == chain
                    continue
                known = slow.paths(tail, limit, rule, most_voters)
                shares = {path: count / known[()] for path, count in known.items() if path}
                allowed = {p: share for p, share in shares.items() if running_share(known, p) >= rule.min_token_prob}
                total = min(rule.budget(chain.match_length, limit), len(allowed))
                paths = paths_of(tree)
                assert len(paths) == len(tree.tokens) == total  # none stands there twice
                assert paths == pytest.approx({path: known[path] / known[path[:-1]] for path in paths})
                grown = [shares[path] for path in paths]
                assert grown == sorted(allowed.values(), reverse=True)[:total]
                is_line = all(path == chosen[: len(path)] for path in paths for chosen in [max(paths, key=len)])
                assert (tree.parents is None) == is_line
                if is_line:
                    assert tree == chain
                num_trees += not is_line
    assert num_trees > 20


def test_how_tokens_arrive_does_not_matter():
    chance = random.Random(3)
    tokens = some_tokens(chance, 4, 3000)
    bulk, single, mixed = TokenHistory(), TokenHistory(), TokenHistory()
    bulk.add(np.array(tokens))
    for token in tokens:
        single.extend([token])
    for start in range(0, 3000, 150):
        mixed.extend(tokens[start : start + 140])
        mixed.extend(tokens[start + 140 : start + 150])
    for _ in range(50):
        tail = some_tokens(chance, 4, 20)
        assert bulk.propose(tail, 20, RULE) == single.propose(tail, 20, RULE) == mixed.propose(tail, 20, RULE)
    tail = None
    assert bulk.propose(tail, 20, RULE) == single.propose(tail, 20, RULE) == mixed.propose(tail, 20, RULE) != NOTHING


def filled(*requests, **settings):
    history = TokenHistory(**settings)
    for request in requests:
        history.add(request)
    return history


def test_the_most_frequent_continuation_wins_and_the_newest_among_equals():
    assert filled([1, 5], [1, 6], [1, 5]).propose([1], 1, RULE).tokens == [5]
    assert filled([1, 5], [1, 6]).propose([1], 1, RULE).tokens == [6]
    assert filled([1, 5], [1, 6], [1, 5]).propose([1], 1, RULE).probs == [2 / 3]


def test_longer_matches_win_ties_and_are_copied_further():
    proposal = filled([9, 1, 5, 7, 7], [8, 1, 6]).propose([9, 1], 9, RULE)
    assert proposal == Proposal([5, 7], [1.0, 1.0], 1, 2, 2.0)
    assert filled([9, 1, 5, 7, 8]).propose([9, 1], 9, CopyRule(max_spec_factor=0.5, max_spec_offset=2)).tokens == [
        5,
        7,
        8,
    ]


def test_copying_ends_where_it_gets_unlikely():
    history = filled([1, 2, 5], [1, 2, 6], [1, 3, 7], [1, 3, 8])
    wide = {"max_spec_factor": 5.0}
    assert history.propose([1], 9, CopyRule(min_token_prob=0.3, **wide)).tokens == [3]
    assert history.propose([1], 9, CopyRule(min_token_prob=0.25, **wide)).tokens == [3, 8]
    assert history.propose([1], 9, CopyRule(min_token_prob=0.6, **wide)) == NOTHING


def test_nothing_is_copied_across_requests():
    assert filled([1, 2], [3, 4]).propose([2], 5, RULE) == NOTHING
    assert filled([1, 2], [3, 4]).propose([1], 5, CopyRule(max_spec_factor=4.0)).tokens == [2]
    assert filled([1, 2], [3, 4, 9]).propose([2, 3], 5, RULE).match_length == 1


def test_a_copy_of_its_own_end_runs_on():
    history = filled([7, 5, 6, 5, 6])
    assert history.propose(None, 5, CopyRule(max_spec_factor=3.0)).tokens == [5, 6, 5, 6, 5]
    assert history.propose([5, 6], 5, CopyRule(max_spec_factor=3.0)).tokens == [5, 6]


def test_forgotten_requests_vote_no_more():
    history = filled([1, 5], [1, 5], [1, 6], max_requests=3)
    assert history.propose([1], 1, RULE).tokens == [5]
    history.add([1, 6])
    assert history.propose([1], 1, RULE).probs == [2 / 3]
    history.add([1, 6])
    assert history.propose([1], 1, RULE) == Proposal([6], [1.0], 3, 1, 1.0)
    assert (history.num_requests, history.num_tokens) == (3, 6)


def test_a_request_longer_than_everything_is_cut_to_its_end():
    history = filled([1, 2], list(range(100)), max_tokens=10)
    assert (history.num_requests, history.num_tokens) == (1, 10)
    assert history.propose([91], 5, RULE).tokens == [92]
    assert history.propose([88], 5, RULE) == NOTHING


def test_memory_stays_bounded_whatever_is_added():
    history, chance, most = TokenHistory(max_tokens=2000, max_requests=50), random.Random(0), 0
    for _ in range(3000):
        history.add(some_tokens(chance, 50, chance.choice([1, 10, 80])))
        most = max(most, history.num_bytes)
    assert history.num_requests == 50
    assert most <= 8192 * 28 + 8 * 50
    history.clear()
    assert (history.num_tokens, history.num_requests) == (0, 0)
    assert history.num_bytes == TokenHistory().num_bytes
    assert history.propose([1, 2, 3], 5, RULE) == NOTHING


def test_ten_thousand_requests_of_one_token():
    history = TokenHistory(max_requests=10_000)
    for number in range(30_000):
        history.add([number % 7])
    assert history.num_requests == history.num_tokens == 10_000
    assert history.num_bytes < 2_000_000
    assert history.propose([1, 2, 3], 24, RULE) == NOTHING
    history.extend([5])
    assert history.propose([29_999 % 7], 24, RULE).tokens == [5]


def test_a_lookup_follows_a_bounded_number_of_links(monkeypatch):
    """Whatever the history's size: a text of one token has the longest chains there are."""
    history = filled([1] * 200_000)
    table = history._text.tables[-1]
    assert len(table.candidates([1], history._oldest, module._MOST_VISITED)) == 128
    assert history.propose(None, 24, RULE) == Proposal([1] * 24, [1.0] * 24, 64, 24, 24.0)


def test_threads_share_a_history():
    history, failures = TokenHistory(max_requests=20, max_tokens=3000), []

    def work(seed):
        chance = random.Random(seed)
        try:
            for _ in range(300):
                history.add([seed * 10 + chance.randrange(3) for _ in range(chance.choice([2, 20, 100]))])
                tokens = history.propose([seed * 10, seed * 10 + 1], 8, RULE).tokens
                assert all(token // 10 == seed for token in tokens)
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert history.num_requests <= 20


class TestFiles:
    def history(self):
        chance = random.Random(1)
        requests = [some_tokens(chance, 6, length) for length in (1, 5, 90, 200, 3)]
        history = filled(*requests, max_requests=4)
        history.claim(Vocabulary(6, "abc"))
        return history

    def test_a_loaded_history_proposes_the_same(self, tmp_path):
        saved, loaded, chance = self.history(), filled([5, 5, 5]), random.Random(0)
        saved.save(tmp_path / "new" / "folder")
        loaded.load(tmp_path / "new" / "folder")
        assert (loaded.num_requests, loaded.num_tokens, loaded.vocabulary) == (4, 298, Vocabulary(6, "abc"))
        for _ in range(100):
            tail = some_tokens(chance, 6, 12)
            assert loaded.propose(tail, 24, RULE) == saved.propose(tail, 24, RULE)
            for history in (saved, loaded):
                history.extend(tail)
            assert loaded.propose(None, 24, RULE) == saved.propose(None, 24, RULE)

    def test_an_empty_history(self, tmp_path):
        TokenHistory().save(tmp_path)
        loaded = filled([1, 2])
        loaded.load(tmp_path)
        assert loaded.num_requests == 0

    def test_a_loaded_request_is_cut_as_an_added_one(self, tmp_path):
        whole, short = TokenHistory(), TokenHistory(max_tokens=5)
        for tokens in (range(3), range(10, 30)):
            whole.add(list(tokens))
        whole.save(tmp_path)
        short.load(tmp_path)
        added = TokenHistory(max_tokens=5)
        added.add(list(range(10, 30)))
        assert (short.num_tokens, short.num_requests) == (added.num_tokens, added.num_requests) == (5, 1)
        assert short.propose([26, 27], 8, RULE).tokens == added.propose([26, 27], 8, RULE).tokens == [28, 29]

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "taken").write_text("")
        with pytest.raises(ValueError, match="is a file"):
            TokenHistory().save(tmp_path / "taken")

    def test_limits_hold_for_loaded_requests(self, tmp_path):
        self.history().save(tmp_path)
        small = TokenHistory(max_requests=2)
        small.load(tmp_path)
        assert (small.num_requests, small.num_tokens) == (2, 203)

    @pytest.mark.parametrize("culprit", ["os.replace", "save_file"])
    def test_an_interrupted_save_leaves_the_old_one(self, tmp_path, monkeypatch, culprit):
        filled([1, 2, 3]).save(tmp_path)

        def fails(*args):
            if culprit == "save_file":
                args[1].write_bytes(b"half")
            raise KeyboardInterrupt

        monkeypatch.setattr(os if culprit == "os.replace" else module, culprit.split(".")[-1], fails)
        with pytest.raises(KeyboardInterrupt):
            self.history().save(tmp_path)
        monkeypatch.undo()
        loaded = TokenHistory()
        loaded.load(tmp_path)
        assert loaded.propose([1], 1, RULE).tokens == [2]
        assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]

    def refused(self, folder, message, **claim):
        history = filled([1, 2, 3])
        history.claim(Vocabulary(**claim))
        with pytest.raises(ValueError, match=message):
            history.load(folder)
        assert history.propose([1], 1, RULE).tokens == [2]  # as it was
        assert history.vocabulary == Vocabulary(**claim)

    def test_no_file(self, tmp_path):
        self.refused(tmp_path, "does not exist")

    @pytest.mark.parametrize("length", [0, 4, 100, -1])
    def test_a_truncated_file(self, tmp_path, length):
        self.history().save(tmp_path)
        path = tmp_path / FILE_NAME
        path.write_bytes(path.read_bytes()[:length])
        self.refused(tmp_path, "damaged or no safetensors file")

    def test_other_vocabularies(self, tmp_path):
        self.history().save(tmp_path)
        self.refused(tmp_path, "vocabulary of 7.*6", size=7)
        self.refused(tmp_path, "fingerprint def", fingerprint="def")

    def rewritten(self, folder, tensors=None, **metadata):
        self.history().save(folder)
        path = folder / FILE_NAME
        with safe_open(path, framework="numpy") as file:
            header = file.metadata()
        save_file(load_file(path) | (tensors or {}), path, header | metadata)

    def test_another_version(self, tmp_path):
        self.rewritten(tmp_path, version="9")
        self.refused(tmp_path, "has version 9 and this release reads version 1")

    def test_a_foreign_file(self, tmp_path):
        save_file({"weight": np.zeros(3)}, tmp_path / FILE_NAME)
        self.refused(tmp_path, "no history of this package")

    @pytest.mark.parametrize("size", ["0", "-3", "many"])
    def test_a_bad_vocabulary_size(self, tmp_path, size):
        self.rewritten(tmp_path, vocabulary_size=size)
        self.refused(tmp_path, "vocabulary_size=")

    @pytest.mark.parametrize("token", [6, -2, 2**31 - 1])
    def test_ids_out_of_range(self, tmp_path, token):
        tokens = np.zeros(298, np.int32)
        tokens[7] = token
        self.rewritten(tmp_path, {"tokens": tokens})
        self.refused(tmp_path, f"token id {token}, outside the vocabulary of 6")

    @pytest.mark.parametrize(
        "tensors",
        [
            {"lengths": np.array([298, 1], np.int64)},
            {"lengths": np.array([299, -1], np.int64)},
            {"lengths": np.array([[298]], np.int64)},
            {"lengths": np.array([298.0])},
            {"tokens": np.zeros(298, np.int64)},
            {"tokens": np.zeros((298, 1), np.int32)},
        ],
    )
    def test_wrong_shapes(self, tmp_path, tensors):
        self.rewritten(tmp_path, tensors)
        self.refused(tmp_path, "is damaged")


def word_tokenizer(words):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(dict(zip(words, range(9), strict=False))))
    )


def test_a_fingerprint_tells_tokenizers_apart():
    one, same_words = word_tokenizer(["a", "b", "c"]), word_tokenizer(["a", "b", "c"])
    swapped, more = word_tokenizer(["b", "a", "c"]), word_tokenizer(["a", "b", "c"])
    more.add_tokens(["d"])
    prints = [tokenizer_fingerprint(tokenizer) for tokenizer in (one, same_words, swapped, more)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_depth": 0}, "max_depth=0"),
        ({"max_depth": True}, "max_depth=True"),
        ({"max_requests": -1}, "max_requests=-1"),
        ({"max_requests": 0}, "max_requests=0"),
        ({"max_tokens": 2.5}, "max_tokens=2.5"),
        ({"max_tokens": float("nan")}, "max_tokens=nan"),
    ],
)
def test_bad_sizes_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenHistory(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_token_prob": -0.1}, "min_token_prob=-0.1 must be a finite number of at least 0 and of at most 1"),
        ({"min_token_prob": 1.1}, "min_token_prob=1.1"),
        ({"min_token_prob": float("nan")}, "min_token_prob=nan"),
        ({"min_token_prob": True}, "min_token_prob=True"),
        ({"min_token_prob": "0.1"}, "min_token_prob='0.1'"),
        ({"max_spec_factor": -1}, "max_spec_factor=-1 must be a finite number of at least 0"),
        ({"max_spec_factor": float("inf")}, "max_spec_factor=inf"),
        ({"max_spec_offset": float("nan")}, "max_spec_offset=nan must be a finite number\\."),
        ({"max_spec_offset": False}, "max_spec_offset=False"),
    ],
)
def test_bad_rules_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CopyRule(**settings)


@pytest.mark.parametrize("tokens", [[-2], [1, 2**31], [1] * 100 + [2**31], [1] * 100 + [-2], [1.5], [0.5] * 100, [[1]]])
def test_bad_ids_are_refused_and_leave_no_trace(tokens):
    history = filled([1, 2])
    with pytest.raises(ValueError, match=r"Token id|flat lists"):
        history.add(tokens)
    assert (history.num_requests, history.num_tokens) == (1, 2)


@pytest.mark.parametrize("tokens", [[3, 10], [3] * 100 + [10]])
def test_ids_outside_a_known_vocabulary_are_refused(tokens):
    history = TokenHistory()
    history.claim(Vocabulary(10))
    with pytest.raises(ValueError, match="Token id 10 cannot be stored: ids must be at least 0 and below 10"):
        history.add(tokens)
