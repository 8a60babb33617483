"""Suffix: what it remembers, for whom, and that none of it changes what is said."""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
from safetensors.numpy import load_file
from transformers import LogitsProcessor, LogitsProcessorList

import hf_specdec
from hf_specdec import Auto, DraftModel, Suffix
from hf_specdec.drafters import DraftContext
from hf_specdec.history import FILE_NAME
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome
from tests.models import prompts, tiny
from tests.reference import assert_follows, target_law
from tests.test_law import PLAIN, PROMPT, VOCAB, small
from tests.tokenizers_for_tests import trained_tokenizer

SETTINGS = {"do_sample": False, "pad_token_id": 0}
_names = itertools.count()


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(tiny())


@pytest.fixture
def name():
    """A namespace nobody else uses."""
    return f"test-{next(_names)}"


def answers(target, assistant, num_rows, prompt=0, **changes):
    ids, mask = prompts(num_rows, seed=prompt)
    kwargs = SETTINGS | {"attention_mask": mask, "max_new_tokens": 30, "eos_token_id": [2, 7, 11]} | changes
    return target.generate(ids, assistant=assistant, **kwargs)


def remembered(drafter, folder):
    """The remembered outputs as lists."""
    drafter.save(folder)
    saved = load_file(folder / FILE_NAME)
    ends = saved["lengths"].cumsum()
    return [saved["tokens"][end - length : end].tolist() for end, length in zip(ends, saved["lengths"], strict=True)]


def outputs_up_to_ends(sequences, ends):
    found = []
    for row in sequences[:, prompts(1)[0].shape[1] :].tolist():
        stop = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        found.append(row[:stop])
    return found


class Session:
    """A session over given texts, asked directly."""

    def __init__(self, drafter, *texts, vocab=64, takes_trees=False):
        self.state = DecodeState(torch.tensor([[0] * len(texts[0])] * len(texts)), None, fill=0)
        self.state.tokens = [list(text) for text in texts]
        context = DraftContext(tiny(vocab=vocab), False, Scorer(LogitsProcessorList()), takes_trees=takes_trees)
        self.session = drafter.start(context, self.state)

    def propose(self, *limits):
        draft = self.session.propose(self.state, list(limits), None)
        return [row[:length] for row, length in zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)]


def state_of(text):
    return DecodeState(torch.tensor([text]), None, fill=0)


class TestExactness:
    @pytest.mark.parametrize("num_rows", [1, 3, 8])
    @pytest.mark.parametrize("family", ["llama", "mistral8", "mpt"])
    def test_greedy_output_is_plain_output_with_a_warm_memory(self, family, num_rows):
        target = hf_specdec.enable(tiny(family))
        drafter = Suffix(max_spec_factor=3.0)
        for prompt in (0, 1, 0, 2, 1):
            assert torch.equal(answers(target, False, num_rows, prompt), answers(target, drafter, num_rows, prompt))
        assert drafter.cached_requests == 5 * num_rows

    def test_outputs_that_have_been_seen_are_drafted(self, target):
        drafter, forgetful = Suffix(), Suffix(max_cached_requests=0)
        for assistant in (drafter, forgetful):
            for _ in range(2):
                answers(target, assistant, 1, eos_token_id=None)
        assert drafter.stats.accepted > forgetful.stats.accepted + 5
        assert (forgetful.cached_requests, forgetful.cached_tokens, forgetful.num_bytes) == (0, 0, 0)

    def test_law_of_calls_that_repeat_a_seed(self):
        """250 seeds, each used twice on one memory: 250 samples of the second calls.

        The second call drafts what the first one said; were it judged by the numbers that made it, the law would bend.
        """
        target, samples = hf_specdec.enable(small(0)), []
        for seed in range(250):
            drafter = Suffix(max_spec_factor=3.0, num_draft_tokens=3)
            for _ in range(2):
                output = target.generate(PROMPT, assistant=drafter, seed=seed, **PLAIN)
            samples.append(output[:, PROMPT.shape[1] :][:, :3])
        assert_follows(torch.cat(samples), target_law(target, PROMPT, LogitsProcessorList(), 3, VOCAB))

    def test_a_seed_says_the_text_whatever_is_remembered(self, target):
        sampled = {"do_sample": True, "seed": 3, "temperature": 2.0}
        drafter = Suffix()
        for more in ({}, {"verification": "coupled"}):
            texts = [answers(target, drafter, 3, **more, **sampled) for _ in range(3)]
            assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
        assert drafter.stats.accepted > 0

    def test_law_beside_drawn_drafts_in_calls_that_repeat_a_seed(self):
        """250 seeds, each used twice on one memory: 250 samples of the second calls, by copies and a draft model."""
        target, samples = hf_specdec.enable(small(0)), []
        for seed in range(250):
            drafter = Auto([Suffix(max_spec_factor=3.0), DraftModel(small(5, layers=1))], num_draft_tokens=3)
            for _ in range(2):
                output = target.generate(PROMPT, assistant=drafter, seed=seed, **PLAIN)
            samples.append(output[:, PROMPT.shape[1] :][:, :3])
        assert_follows(torch.cat(samples), target_law(target, PROMPT, LogitsProcessorList(), 3, VOCAB))

    def test_calls_after_loading_use_new_random_numbers(self, tmp_path):
        drafter = Suffix()
        streams = [Session(drafter, [1, 2]).session.noise_stream for _ in range(3)]
        drafter.save(tmp_path)
        loaded = Suffix().load(tmp_path)
        assert [*streams, Session(loaded, [1, 2]).session.noise_stream] == [0, 1, 2, 3]
        assert Session(Suffix(max_cached_requests=0), [1, 2]).session.noise_stream == 0

    def test_drafts_are_a_function_of_what_happened(self, target):
        runs = []
        for _ in range(2):
            drafter = Suffix()
            for prompt in (0, 1, 0):
                answers(target, drafter, 3, prompt)
            runs.append((drafter.stats.drafted, drafter.stats.drafted_at, drafter.stats.accepted_at))
        assert runs[0] == runs[1]


class TestDrafting:
    def test_the_better_of_own_text_and_past_wins_and_own_text_on_ties(self):
        drafter = Suffix()
        drafter.history.add([9, 1, 2, 30, 31, 32])
        assert Session(drafter, [1, 2, 20, 21, 1, 2]).propose(9) == [[20, 21]]
        assert Session(drafter, [1, 2, 20, 21, 9, 1, 2]).propose(9) == [[30, 31, 32]]

    def test_confidence_grows_with_matches_and_agreement(self):
        session = Session(Suffix(), [1, 5, 1, 6, 1], [3, 3, 3, 3, 3], [1, 2, 9, 1])
        divided, long, short = session.session.copies(session.state, [4, 2, 4])
        assert (divided.tokens, long.tokens, short.tokens) == ([6], [3, 3], [2])
        assert 0 < divided.confidences[0] < short.confidences[0] < long.confidences[0] <= long.confidences[1] < 1

    def test_longest_drafts(self, target):
        assert Suffix(max_tree_depth=7).default_num_draft_tokens == 7
        for drafter, longest in ((Suffix(max_tree_depth=5, max_spec_factor=9.0), 5), (Suffix(num_draft_tokens=2), 2)):
            for _ in range(3):
                answers(target, drafter, 1, eos_token_id=None)
            assert len(drafter.stats.drafted_at) == longest

    def test_ids_outside_the_vocabulary_are_never_drafted(self):
        """Ids of images and the like stand in prompts only."""
        session = Session(Suffix(max_spec_factor=9.0), [5, 64, 6, 5, -200, 6, 5], [5, 2**40, 8, 5, 9, 5, 9])
        assert session.propose(4, 1) == [[], [5]]

    def test_the_name_is_registered(self, target):
        assert torch.equal(answers(target, "suffix", 3), answers(target, False, 3))


def paths(copied):
    """Every path of a copy, with the confidence of its last token."""
    found = [()]
    for place, (token, parent) in enumerate(zip(copied.tokens, copied.parents, strict=True)):
        assert parent < place
        found.append((*found[parent + 1], token))
    return dict(zip(found[1:], copied.confidences, strict=True))


class TestTrees:
    def test_own_text_and_earlier_outputs_stand_in_one_tree(self):
        drafter = Suffix(max_spec_factor=9.0)
        drafter.history.add([1, 2, 30, 31])
        drafter.history.add([1, 2, 20, 32])
        text = [1, 2, 20, 21, 22, 23, 24, 25, 26, 1, 2]
        [copied] = Session(drafter, text, takes_trees=True).session.copies(state_of(text), [6])
        assert set(paths(copied)) == {(20,), (20, 21), (20, 21, 22), (20, 21, 22, 23), (20, 32), (30,)}
        assert 1 > paths(copied)[20,] > paths(copied)[30,] > 0
        for forgetful, takes_trees in ((Suffix(max_spec_factor=9.0, branches=False), True), (drafter, False)):
            [chain] = Session(forgetful, text, takes_trees=takes_trees).session.copies(state_of(text), [6])
            assert (chain.tokens, chain.parents) == ([20, 21, 22, 23, 24, 25], None)

    def test_votes_of_one_memory_branch(self):
        drafter = Suffix(max_cached_requests=0, max_spec_factor=9.0)
        text = [1, 5, 8, 1, 6, 9, 1, 6, 7, 1]
        [copied] = Session(drafter, text, takes_trees=True).session.copies(state_of(text), [5])
        assert list(paths(copied)) == [(6,), (5,), (6, 7), (6, 9), (5, 8)]

    @pytest.mark.parametrize("seed", range(5))
    def test_where_one_continuation_is_known_drafts_are_the_chain(self, seed):
        """In a round of distinct tokens every one has one successor, wherever parts of it are met."""
        whole = 3 * torch.randperm(60, generator=torch.Generator().manual_seed(seed))[:40].tolist()
        drafters = [Suffix(max_spec_factor=9.0, branches=branches) for branches in (True, False)]
        for drafter in drafters:
            drafter.history.add(whole[10:70])
            drafter.history.add(whole[5:30])
        for start, end in ((20, 30), (0, 7), (38, 45), (0, 90), (7, 120), (30, 75)):
            text = [61, 62, *whole[start:end]]
            trees, chains = (
                Session(drafter, text, takes_trees=True).session.copies(state_of(text), [24]) for drafter in drafters
            )
            assert trees == chains and trees[0].parents is None and trees[0].tokens

    @pytest.mark.parametrize("num_rows", [1, 4])
    @pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral8", "gemma3", "mpt"])
    def test_greedy_output_is_plain_output(self, family, num_rows):
        """Memories of other answers to the same prompts disagree with what is said; so do the row's own repetitions."""
        # MPT's own mask makes NaN of padding in float64.
        target = hf_specdec.enable(tiny(family, dtype=torch.float32 if family == "mpt" else torch.float64))
        drafter, others = Suffix(max_spec_factor=4.0, min_token_prob=0.0), {"do_sample": True, "temperature": 3.0}
        for seed in range(3):
            answers(target, drafter, num_rows, 0, seed=seed, **others)
            for length in (None, 7):
                changes = {"eos_token_id": None, "max_new_tokens": 40}
                ours = answers(target, drafter, num_rows, 0, num_draft_tokens=length, **changes)
                assert torch.equal(ours, answers(target, False, num_rows, 0, **changes))
        assert drafter.stats.accepted > 0

    def test_trees_are_really_drafted_and_pay(self, target):
        tree, chain = Suffix(max_spec_factor=4.0), Suffix(max_spec_factor=4.0, branches=False)
        for drafter in (tree, chain):
            for prompt in (0, 1, 2, 0, 1, 2):
                answers(target, drafter, 3, prompt, eos_token_id=None, num_draft_tokens=12, max_new_tokens=60)
        assert tree.stats.rounds < chain.stats.rounds

    @pytest.mark.parametrize("wrong", [None, "yes", 2])
    def test_bad_options(self, wrong):
        with pytest.raises(ValueError, match="branches="):
            Suffix(branches=wrong)


class TestWhatIsRemembered:
    @pytest.mark.parametrize("family", ["llama", "mpt"])  # mpt advances in lockstep: ended rows go on with filling
    def test_outputs_up_to_their_ends_each_once(self, family, tmp_path):
        target, drafter, ends = hf_specdec.enable(tiny(family)), Suffix(), list(range(0, 64, 7))
        expected = []
        for prompt in (0, 0, 1, 1, 2, 2):  # the second time whole drafts are kept, and rows end inside them
            expected += outputs_up_to_ends(answers(target, drafter, 4, prompt, eos_token_id=ends), ends)
        assert len({len(output) for output in expected}) > 2  # rows did end at different times
        assert sorted(remembered(drafter, tmp_path)) == sorted(expected)

    def test_filling_is_not(self, tmp_path):
        """In lockstep a row that has ended is filled up to the length of the others, in the same round and later."""
        drafter = Suffix()
        session = Session(drafter, [1, 2, 3], [4, 5, 6])
        for appended, emitted, finished in (
            ([[7, 8, 0], [9, 8, 7]], [2, 3], [True, False]),
            ([[0, 0], [6, 5]], [0, 2], [True, True]),
        ):
            outcome = Outcome(appended, emitted, [0, 0], [0, 0], finished)
            session.state.commit(outcome)
            session.session.commit(session.state, outcome)
        assert remembered(drafter, tmp_path) == [[7, 8], [9, 8, 7, 6, 5]]

    def test_rows_that_ride_to_the_end_are_remembered_once(self, target):
        drafter = Suffix()
        answers(target, drafter, 4, return_dict_in_generate=True)
        assert drafter.cached_requests == 4

    def test_prompts_are_not(self, target, tmp_path):
        drafter = Suffix()
        output = answers(target, drafter, 1, max_new_tokens=1)
        assert remembered(drafter, tmp_path) == [output[0, -1:].tolist()]

    def test_the_oldest_are_forgotten(self, target, tmp_path):
        drafter = Suffix(max_cached_requests=2)
        outputs = [outputs_up_to_ends(answers(target, drafter, 1, prompt), [2, 7, 11])[0] for prompt in range(4)]
        assert remembered(drafter, tmp_path) == outputs[2:]
        drafter = Suffix(max_cached_tokens=7)
        answers(target, drafter, 3, eos_token_id=None)
        assert (drafter.cached_requests, drafter.cached_tokens) == (1, 7)

    def test_unfinished_rows_are_not_remembered(self, target):
        class FailsLater(LogitsProcessor):
            def __call__(self, input_ids, scores):
                if input_ids.shape[1] > 15:
                    raise RuntimeError("enough")
                return scores

        drafter = Suffix()
        with pytest.raises(RuntimeError, match="enough"):
            answers(target, drafter, 2, logits_processor=[FailsLater()], eos_token_id=None)
        assert drafter.cached_requests == 0

    def test_clear(self, target):
        drafter = Suffix()
        answers(target, drafter, 3)
        assert drafter.cached_tokens > 0
        drafter.clear()
        assert (drafter.cached_requests, drafter.cached_tokens) == (0, 0)

    def test_copies_of_a_target_share_the_drafter(self):
        target, drafter = tiny(), Suffix()
        target.drafter = drafter
        assert copy.deepcopy(target).drafter is drafter

    def test_threads_share_a_drafter(self, target):
        drafter, plain = Suffix(), [answers(target, False, 3, prompt) for prompt in range(4)]
        targets, wrong = [hf_specdec.enable(tiny()) for _ in plain], []

        def work(prompt):
            for _ in range(3):
                if not torch.equal(answers(targets[prompt], drafter, 3, prompt), plain[prompt]):
                    wrong.append(prompt)

        threads = [threading.Thread(target=work, args=(prompt,)) for prompt in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert drafter.cached_requests == 4 * 3 * 3


class TestNamespaces:
    def test_drafters_of_one_namespace_share_their_memory(self, target, name):
        one, two = Suffix(namespace=name), Suffix(namespace=name, num_draft_tokens=4)
        answers(target, one, 3)
        assert two.cached_requests == one.cached_requests == 3
        two.clear()
        assert one.cached_requests == 0

    def test_nothing_crosses_namespaces(self, target, name):
        """Whatever another tenant does in between, the drafts are those of a process without it."""

        def counts(drafter, before_each):
            for prompt in (0, 0, 1, 0):
                before_each(prompt)
                answers(target, drafter, 2, prompt)
            return drafter.stats.drafted, drafter.stats.drafted_at, drafter.stats.accepted_at, drafter.cached_tokens

        alone = counts(Suffix(), lambda prompt: None)
        others = [Suffix(namespace=f"{name}-other"), Suffix()]
        beside = counts(Suffix(namespace=name), lambda prompt: [answers(target, other, 2, prompt) for other in others])
        assert beside == alone
        shared = counts(Suffix(namespace=f"{name}-other"), lambda prompt: None)
        assert shared != alone  # the property can fail

    def test_other_settings_are_refused(self, name):
        Suffix(namespace=name)
        for settings in ({"max_tree_depth": 8}, {"max_cached_requests": 5}, {"min_token_prob": 0.2}):
            with pytest.raises(ValueError, match=f"namespace='{name}' is in use with other settings"):
                Suffix(namespace=name, **settings)

    @pytest.mark.parametrize("wrong", ["", 3, True])
    def test_bad_names(self, wrong):
        with pytest.raises(ValueError, match="namespace="):
            Suffix(namespace=wrong)


class TestVocabularies:
    def test_a_memory_belongs_to_one_vocabulary(self, target):
        drafter = Suffix()
        answers(target, drafter, 1)
        other = hf_specdec.enable(tiny(vocab=32))
        with pytest.raises(ValueError, match=r"vocabulary of 64.*32"):
            other.generate(torch.tensor([[5, 6, 5]]), assistant=drafter, max_new_tokens=5)
        assert torch.equal(answers(target, drafter, 1), answers(target, False, 1))
        free = Suffix(max_cached_requests=0)
        for model in (target, other):
            model.generate(torch.tensor([[5, 6, 5]]), assistant=free, max_new_tokens=5)

    def test_a_memory_belongs_to_one_tokenizer(self, target, name, tmp_path):
        ours, theirs = trained_tokenizer(), trained_tokenizer()
        theirs.add_tokens(["another"])
        drafter = Suffix(namespace=name, tokenizer=ours)
        drafter.check(target, trained_tokenizer())
        with pytest.raises(ValueError, match="belongs to the tokenizer"):
            drafter.check(target, theirs)
        with pytest.raises(ValueError, match="belongs to the tokenizer"):
            Suffix(namespace=name, tokenizer=theirs)
        drafter.save(tmp_path)
        with pytest.raises(ValueError, match="belongs to the tokenizer"):
            Suffix(tokenizer=theirs).load(tmp_path)
        assert Suffix(tokenizer=ours).load(tmp_path).cached_requests == 0

    def test_a_tokenizer_must_be_one(self):
        with pytest.raises(ValueError, match="tokenizer= must be a Transformers tokenizer, not str"):
            Suffix(tokenizer="gpt2")


class TestFiles:
    def test_a_loaded_drafter_drafts_the_same(self, target, tmp_path):
        saved = Suffix()
        for prompt in range(3):
            answers(target, saved, 3, prompt)
        saved.save(tmp_path)
        loaded = Suffix().load(tmp_path)
        saved.stats.reset()
        for drafter in (saved, loaded):
            answers(target, drafter, 3, 1)
        assert loaded.stats.accepted_at == saved.stats.accepted_at != []
        assert loaded.cached_tokens == saved.cached_tokens

    def test_saved_outputs_of_another_vocabulary_are_refused(self, target, tmp_path):
        drafter = Suffix()
        answers(target, drafter, 1)
        drafter.save(tmp_path)
        loaded = Suffix().load(tmp_path)
        with pytest.raises(ValueError, match="vocabulary of 64"):
            loaded.check(tiny(vocab=32))

    def test_without_a_memory_there_is_nothing_to_save(self, tmp_path):
        for call in (Suffix(max_cached_requests=0).save, Suffix(max_cached_requests=0).load):
            with pytest.raises(ValueError, match="max_cached_requests=0"):
                call(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tree_depth": 0}, "max_tree_depth=0"),
        ({"max_tree_depth": True}, "max_tree_depth=True"),
        ({"max_cached_requests": -1}, "max_cached_requests=-1"),
        ({"max_cached_tokens": 0}, "max_cached_tokens=0"),
        ({"max_cached_tokens": 1.5}, "max_cached_tokens=1.5"),
        ({"max_spec_factor": -0.5}, "max_spec_factor=-0.5"),
        ({"max_spec_offset": float("nan")}, "max_spec_offset=nan"),
        ({"min_token_prob": 1.01}, "min_token_prob=1.01"),
        ({"min_token_prob": True}, "min_token_prob=True"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
    ],
)
def test_bad_options_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Suffix(**settings)
