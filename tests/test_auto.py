"""Several drafters in one call: exact whatever is chosen, in its text or its law; and what users see of it."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import hf_specdec
from hf_specdec import Auto, DraftModel, EarlyExit, PromptLookup, Suffix
from hf_specdec.drafters import draft_model
from hf_specdec.drafters import scheduled as scheduling
from hf_specdec.options import SpeculationOptions
from tests.models import jittered, prompts, tiny
from tests.reference import FALSE_ALARM, assert_follows, p_value, target_law
from tests.test_compiled import STATIC, compiled, compiler  # noqa: F401 - a fixture
from tests.test_law import PLAIN, PROMPT, VOCAB, small

SETTINGS = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture
def random_choices(monkeypatch):
    """Widths and drafters by lot, so that nothing rests on what is fast."""
    generator = torch.Generator().manual_seed(3)

    def drawn(count):
        return int(torch.randint(count, (), generator=generator))

    monkeypatch.setattr(scheduling, "best_width", lambda tokens, seconds: (drawn(len(tokens)), float(drawn(1000))))
    monkeypatch.setattr(scheduling.Keep, "is_resting", lambda keep: drawn(4) == 0)
    monkeypatch.setattr(
        scheduling, "_better", lambda held, new: held if not new.rates or (held is not None and drawn(2)) else new
    )


def answer(target, assistant, num_rows, seed=0, new_tokens=40, **changes):
    ids, mask = prompts(num_rows, seed=seed)
    kwargs = SETTINGS | {"attention_mask": mask, "max_new_tokens": new_tokens, "eos_token_id": [2, 7, 11]} | changes
    return target.generate(ids, assistant=assistant, **kwargs)


def two_models_and_copies(target):
    return Auto([jittered(target), PromptLookup(), Suffix(), DraftModel(tiny(seed=9, num_hidden_layers=1))])


DRAFTERS = {
    "prompt-lookup": lambda target: PromptLookup(),
    "suffix": lambda target: Suffix(),
    "draft-model": lambda target: DraftModel(jittered(target)),
    "copies": lambda target: Auto([PromptLookup(), Suffix()]),
    "two models and copies": two_models_and_copies,
    "early exit and others": lambda target: Auto([Suffix(), EarlyExit(1), jittered(target), PromptLookup()]),
}


# --- exactness --------------------------------------------------------------------------------------------


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral8", "mpt"])
def test_greedy_text_is_plain_whatever_is_chosen(family, drafter):
    target = hf_specdec.enable(tiny(family))
    assistant = DRAFTERS[drafter](target)
    for seed, num_rows in enumerate([1, 3, 8, 3]):  # the last finds a warm memory
        changes = {"seed": seed % 3, "eos_token_id": None if seed % 2 else [2, 7, 11]}
        plain = answer(target, False, num_rows, **changes)
        assert torch.equal(answer(target, assistant, num_rows, **changes), plain)
    assert assistant.stats.drafted > 0


@pytest.mark.scheduled
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_plain_as_users_get_it(drafter):
    target = hf_specdec.enable(tiny())
    assistant = DRAFTERS[drafter](target)
    for num_rows, new_tokens in ((1, 1), (3, 2), (1, 60), (3, 60), (8, 60)):
        plain = answer(target, False, num_rows, new_tokens=new_tokens)
        assert torch.equal(answer(target, assistant, num_rows, new_tokens=new_tokens), plain)


class Counting(LogitsProcessor):
    """A processor of the user's own: rows are judged token by token, in lockstep."""

    def __call__(self, input_ids, scores):
        return scores / 0.9


LAWS = {"token": {"verification": "token"}, "block": {"verification": "block"}, "lockstep": {}}
MIXTURES = {
    "lookup": lambda: Auto([PromptLookup(1, 2), DraftModel(small(5, layers=1))]),
    "suffix": lambda: Auto([Suffix(), DraftModel(small(5, layers=1))]),
    "two models": lambda: Auto([DraftModel(small(5, layers=1), 3), DraftModel(small(6, layers=1), 2)]),
}


def first_tokens(model, num_calls, num_rows, **kwargs):
    """Samples (num_calls * num_rows, 3) of calls without a seed, so that lengths are measured."""
    torch.manual_seed(11)
    ids = PROMPT.repeat(num_rows, 1)
    outputs = [model.generate(ids, **(PLAIN | kwargs)) for _ in range(num_calls)]
    return torch.cat(outputs)[:, PROMPT.shape[1] :][:, :3]


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(small(0))


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("law", LAWS)
def test_sampled_law_whatever_is_chosen(target, mixture, law):
    """20 calls of 250 rows: 5,000 samples."""
    processors = [Counting()] if law == "lockstep" else []
    assistant = MIXTURES[mixture]()
    samples = first_tokens(target, 20, 250, assistant=assistant, logits_processor=processors, **LAWS[law])
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList(processors), 3, VOCAB))
    assert len(assistant.stats.drafted_by) == 2


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
@pytest.mark.parametrize("processors", [[], [Counting()]], ids=["ragged", "lockstep"])
def test_sampled_law_of_small_batches(target, processors):
    """300 calls of 4 rows: 1,200 samples."""
    samples = first_tokens(target, 300, 4, assistant=MIXTURES["lookup"](), logits_processor=processors)
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList(processors), 3, VOCAB))


@pytest.mark.scheduled
def test_the_harness_rejects_a_schedule_that_looks_at_drafted_tokens(target, monkeypatch):
    """Negative control: a draft is cut before a token that its law gave little mass. 20 calls of 250 rows.

    Drafts are as long as can be: where few are made, the error hides among plain rounds.
    """
    monkeypatch.setattr(scheduling, "best_width", lambda tokens, seconds: (len(tokens) - 1, float(len(tokens))))
    true_propose = draft_model._DraftModelSession.propose

    def looking(self, state, limits, noise):
        draft = true_propose(self, state, limits, noise)
        if draft.probs is None:
            return draft
        mass = draft.probs.gather(2, draft.tokens[..., None])[..., 0]
        likely = (mass > 0.3).long().cumprod(dim=1).sum(dim=1)
        return type(draft)(draft.tokens, torch.minimum(draft.lengths, likely), draft.probs)

    monkeypatch.setattr(draft_model._DraftModelSession, "propose", looking)
    samples = first_tokens(target, 20, 250, assistant=MIXTURES["two models"](), verification="token")
    assert p_value(samples, target_law(target, PROMPT, LogitsProcessorList(), 3, VOCAB)) < FALSE_ALARM


@pytest.mark.scheduled
def test_what_a_call_taught_may_depend_on_its_numbers(target, monkeypatch):
    """The global generator may repeat its seed. 25 pairs of calls of 200 rows: 5,000 samples of the second calls.

    Here what is taught is taken to the extreme: a first token that was accepted before is not drafted again.
    """
    accepted = {}

    def forgetful(self, state, outcome):
        if max(state.num_emitted) <= 6:
            for row, count, drafted in zip(state.rows, outcome.accepted, outcome.drafted, strict=True):
                accepted.setdefault(row, count > 0 and drafted > 0)

    def limited(self, state, limits):
        if max(state.num_emitted) > 0 or not accepted:
            return limits
        return [0 if accepted.get(row) else limit for row, limit in zip(state.rows, limits, strict=True)]

    monkeypatch.setattr(draft_model._DraftModelSession, "within_context", limited)
    monkeypatch.setattr(ScheduledSpy, "commit_hook", forgetful)
    monkeypatch.setattr(scheduling.ScheduledSession, "commit", ScheduledSpy.commit)
    monkeypatch.setattr(scheduling, "best_width", lambda tokens, seconds: (len(tokens) - 1, float(len(tokens))))
    outputs = []
    for seed in range(25):
        accepted.clear()
        assistant = DraftModel(small(5, layers=1))
        for _ in range(2):
            torch.manual_seed(seed)
            out = target.generate(PROMPT.repeat(200, 1), assistant=assistant, verification="token", **PLAIN)
        outputs.append(out[:, PROMPT.shape[1] :][:, :3])
    assert_follows(torch.cat(outputs), target_law(target, PROMPT, LogitsProcessorList(), 3, VOCAB))


class ScheduledSpy:
    """`ScheduledSession.commit` with an onlooker."""

    commit_hook = None
    true_commit = scheduling.ScheduledSession.commit

    @staticmethod
    def commit(session, state, outcome, target_pass=None):
        ScheduledSpy.commit_hook(session, state, outcome)
        ScheduledSpy.true_commit(session, state, outcome, target_pass)


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
def test_coupled_text_is_the_same_whatever_is_chosen(target):
    kwargs = PLAIN | {"max_new_tokens": 30, "seed": 4, "verification": "coupled"}
    texts = [target.generate(PROMPT.repeat(3, 1), assistant=build(), **kwargs) for build in MIXTURES.values()] + [
        target.generate(PROMPT.repeat(3, 1), assistant=PromptLookup(), num_draft_tokens=2, **kwargs)
    ]
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
def test_copies_change_no_sampled_text(target):
    """The seed alone says the text: whatever the lengths, the history or the schedule."""
    warm, kwargs = Suffix(), PLAIN | {"max_new_tokens": 40, "seed": 3}
    assistants = [PromptLookup(), warm, warm, Auto([PromptLookup(), warm]), Auto()]
    texts = [
        target.generate(PROMPT.repeat(3, 1), assistant=assistant, num_draft_tokens=length, **kwargs)
        for assistant in assistants
        for length in (None, 1, 7)
    ]
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert all(assistant.stats.drafted > 0 for assistant in assistants)


# --- the call ---------------------------------------------------------------------------------------------


@pytest.mark.scheduled
@pytest.mark.parametrize("given", ["seed", "generator"])
def test_a_seed_says_the_text_of_drawn_drafts_however_long_anything_takes(target, given, monkeypatch):
    def text(assistant):
        source = 5 if given == "seed" else torch.Generator().manual_seed(5)
        kwargs = PLAIN | {"max_new_tokens": 30, given: source}
        return target.generate(PROMPT.repeat(2, 1), assistant=assistant, **kwargs).tolist()

    drafter = DraftModel(small(5, layers=1))
    first = text(drafter)
    clock = iter(torch.rand(100_000, generator=torch.Generator().manual_seed(1)).cumsum(0).tolist())
    monkeypatch.setattr(scheduling.time, "perf_counter", lambda: next(clock))
    assert text(drafter) == first
    assert text(Auto([PromptLookup(), drafter])) == text(Auto([PromptLookup(), drafter]))


@pytest.mark.parametrize("bad", [[], (), "suffix", Suffix, 5, {"a": 1}])
def test_what_is_no_list_is_refused(bad):
    with pytest.raises(ValueError, match="needs a list of drafters"):
        Auto(bad)


@pytest.mark.parametrize(
    ("bad", "message"), [("suffix", "the name 'suffix'; pass an object"), (Suffix, "Suffix\\(...\\)"), (None, "None")]
)
def test_what_is_no_drafter_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        Auto([PromptLookup(), bad])


def test_a_drafter_that_does_not_fit_is_refused(target):
    with pytest.raises(ValueError, match="vocabulary"):
        target.generate(PROMPT, assistant=Auto([PromptLookup(), tiny(vocab=32)]), **PLAIN)


def test_nested_ones_are_one_list(target):
    inner = Auto([Suffix(), PromptLookup()])
    assert [arm.name for arm in Auto([inner, small(5)]).arms] == ["suffix", "prompt-lookup", "draft-model"]
    with pytest.raises(ValueError, match="outer one"):
        Auto([Auto(num_draft_tokens=3)])


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
@pytest.mark.parametrize("num_rows", [1, 4])
def test_statistics_add_up_by_drafter(num_rows):
    target = hf_specdec.enable(tiny())
    assistant = two_models_and_copies(target)
    for seed in range(6):
        answer(target, assistant, num_rows, seed=seed)
        stats = hf_specdec.last_stats(target)
        assert sum(stats.drafted_by.values()) == stats.drafted
        assert sum(stats.accepted_by.values()) == stats.accepted
    assert set(assistant.stats.drafted_by) == {"draft-model", "prompt-lookup", "suffix", "draft-model-2"}
    assert sum(assistant.stats.drafted_by.values()) == assistant.stats.drafted


def test_fixed_lengths_take_the_first_that_has_anything_to_say():
    target = hf_specdec.enable(tiny())
    model = DraftModel(jittered(target))
    for order, used in (
        ([PromptLookup(), model], {"prompt-lookup", "draft-model"}),
        ([model, PromptLookup()], {"draft-model"}),
    ):
        answer(target, Auto(order), 3, num_draft_tokens=4, eos_token_id=None)
        stats = hf_specdec.last_stats(target)
        assert len(stats.drafted_at) == 4
        assert set(stats.drafted_by) == used  # a draft model always has


@pytest.mark.scheduled
def test_by_name_and_as_a_default():
    target = hf_specdec.enable(tiny(), assistant="auto")
    plain = answer(target, False, 3)
    for changes in ({}, {"num_draft_tokens": 4}, {"num_draft_tokens": 1}):
        assert torch.equal(answer(target, None, 3, **changes), plain)
        assert len(hf_specdec.last_stats(target).drafted_at) <= changes.get("num_draft_tokens", 24)
        assert set(hf_specdec.last_stats(target).drafted_by) <= {"suffix", "prompt-lookup", "token-recycling"}
    assert torch.equal(answer(target, "auto", 3), plain)


def test_when_lengths_are_measured(monkeypatch):
    monkeypatch.undo()
    options = SpeculationOptions
    assert options().is_scheduled(True) and options().is_scheduled(False)
    assert options(seed=1).is_scheduled(False) and not options(seed=1).is_scheduled(True)
    assert not options(generator=torch.Generator()).is_scheduled(True)
    assert options(seed=1, verification="coupled").is_scheduled(True)
    assert not options(num_draft_tokens=4, verification="coupled").is_scheduled(False)


@pytest.mark.scheduled
def test_a_call_with_a_length_is_fixed_and_one_without_is_not():
    target = hf_specdec.enable(tiny())
    drafter = DraftModel(jittered(target))
    answer(target, drafter, 1, eos_token_id=None, num_draft_tokens=4)
    fixed = hf_specdec.last_stats(target)
    assert fixed.coverage > 0.9 and len(fixed.drafted_at) == 4
    answer(target, drafter, 1, eos_token_id=None, new_tokens=150)  # a tiny target is no slower than its drafter
    assert hf_specdec.last_stats(target).coverage < 0.5


# --- unusual calls ----------------------------------------------------------------------------------------


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
def test_behind_the_end_of_a_drafters_context_others_go_on():
    target = hf_specdec.enable(tiny())
    short = DraftModel(tiny(seed=9, max_position_embeddings=24))
    plain = answer(target, False, 3, new_tokens=80, eos_token_id=None)
    for changes in ({}, {"num_draft_tokens": 5}):
        assistant = Auto([short, PromptLookup()])
        text = answer(target, assistant, 3, new_tokens=80, eos_token_id=None, **changes)
        assert torch.equal(text, plain)
        assert assistant.stats.drafted_by["prompt-lookup"] > 0


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
def test_copies_longer_than_the_draft_models_longest_draft():
    """They ride beside its drafts in one round; each keeps to its own length."""
    target = hf_specdec.enable(tiny(dtype=torch.float64))
    assistant = Auto([PromptLookup(2, 4), DraftModel(jittered(target, 0.01), num_draft_tokens=2)])
    for seed in range(6):
        changes = {"seed": seed, "eos_token_id": None, "new_tokens": 60}
        assert torch.equal(answer(target, assistant, 4, **changes), answer(target, False, 4, **changes))
    assert len(assistant.stats.drafted_at) > 2


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_draft_model_keeps_in_step_with_rounds_of_others(num_rows):
    """A model equal to the target is never refused, whoever drafted before or beside it."""
    target = hf_specdec.enable(tiny(dtype=torch.float32))
    assistant = Auto([PromptLookup(), DraftModel(target)])
    for seed in range(4):
        answer(target, assistant, num_rows, seed=seed, eos_token_id=None)
    drafted, accepted = assistant.stats.drafted_by, assistant.stats.accepted_by
    assert accepted["draft-model"] == drafted["draft-model"] > 0
    assert accepted["prompt-lookup"] < drafted["prompt-lookup"]


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_compiled_static_caches(compiler, num_rows, do_sample):  # noqa: F811
    """Finished rows ride along; the schedule's widths are padded to the compiled ones."""
    target = hf_specdec.enable(tiny())
    assistant = two_models_and_copies(target)
    for call in range(3):
        ids, mask = prompts(num_rows, longest=12 - call, seed=call)
        given = {"attention_mask": mask, "eos_token_id": [2, 7, 11, 20, 30]}
        if do_sample:
            given |= {"do_sample": True, "seed": call, "verification": "coupled"}
        kwargs = SETTINGS | {"max_new_tokens": 24} | given
        expected = target.generate(ids, assistant="ngram" if do_sample else False, **kwargs)
        ours = target.generate(ids, assistant=assistant, **STATIC, **compiled(compiler, **given))
        assert torch.equal(ours, expected)
    assert 2 <= compiler.num_graphs <= 3 + 2 * 2  # three widths of the target, two of each draft model


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
@pytest.mark.parametrize("num_rows", [1, 3])
def test_encoder_decoder_targets(num_rows):
    from tests.test_encoder_decoder import built, source, t5

    target = hf_specdec.enable(built(t5))
    assistant = Auto([PromptLookup(), jittered(target), DraftModel(tiny(seed=3))])
    kwargs = source(num_rows) | {"max_new_tokens": 30, "eos_token_id": [2, 7, 11, 30]}
    plain = target.generate(assistant=False, **kwargs)
    for _ in range(3):
        assert torch.equal(target.generate(assistant=assistant, **kwargs), plain)
    assert len(assistant.stats.drafted_by) >= 2


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
@pytest.mark.parametrize("num_rows", [1, 3])
def test_whisper_segments(num_rows):
    from tests.test_whisper import FRAMES, audio, whisper

    target = hf_specdec.enable(whisper())
    assistant = Auto([PromptLookup(), jittered(whisper())])
    kwargs = audio(num_rows, 2 * FRAMES) | {"return_timestamps": True}
    plain = target.generate(assistant=False, **kwargs)
    assert torch.equal(target.generate(assistant=assistant, **kwargs), plain)
    assert len(assistant.stats.drafted_by) == 2


# --- objects ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda drafter: pickle.loads(pickle.dumps(drafter))])
@pytest.mark.parametrize("build", [PromptLookup, Suffix, Auto, lambda: Auto([PromptLookup(), Suffix(), tiny()])])
@pytest.mark.scheduled
def test_copies_of_drafters_work(copied, build):
    target = hf_specdec.enable(tiny())
    drafter = build()
    plain = answer(target, False, 2)
    answer(target, drafter, 2)
    again = copied(drafter)
    assert again.stats == drafter.stats
    assert torch.equal(answer(target, again, 2), plain)
    assert [arm.name for arm in again.arms] == [arm.name for arm in drafter.arms]


def test_a_pickled_suffix_forgets_and_joins_its_namespace(target):
    own, shared = Suffix(max_tree_depth=7), Suffix(namespace="pickled")
    for drafter in (own, shared):
        target.generate(PROMPT, assistant=drafter, **PLAIN)
    assert own.cached_requests == shared.cached_requests == 1
    again = pickle.loads(pickle.dumps(own))
    assert (again.cached_requests, again.settings) == (0, own.settings)
    assert pickle.loads(pickle.dumps(shared)).history is shared.history
    assert pickle.loads(pickle.dumps(Suffix(max_cached_requests=0))).history is None
    assert copy.deepcopy(own) is own


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
def test_two_threads_with_one_object():
    target = hf_specdec.enable(tiny())
    assistant = Auto([PromptLookup(), Suffix(), jittered(target)])
    plain = {seed: answer(target, False, 3, seed=seed) for seed in range(6)}
    wrong = []

    def work(seeds):
        for seed in seeds:
            try:
                if not torch.equal(answer(target, assistant, 3, seed=seed), plain[seed]):
                    wrong.append(seed)
            except Exception as error:  # reported by the main thread
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seeds,)) for seeds in (range(6), reversed(range(6)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert assistant.stats.calls == 12


def test_a_call_says_how_long_its_arms_draft():
    target = hf_specdec.enable(tiny())
    for assistant, longest in ((Auto([jittered(target, 0.0)]), 8), (Auto([DraftModel(jittered(target, 0.0), 3)]), 3)):
        answer(target, assistant, 1, num_draft_tokens=8)
        assert len(hf_specdec.last_stats(target).drafted_at) == longest
