"""Draft models with another tokenizer change neither a greedy text nor the law of a sampled one.

Tests of a law state their sample size; a correct sampler fails one with probability 1e-6 (reference.FALSE_ALARM).
"""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TopPLogitsWarper,
)

import hf_specdec
from hf_specdec import Auto, DraftModel, Suffix, load_drafter
from hf_specdec.checkpoints import tokenizers
from hf_specdec.drafters import cross_vocabulary, draft_model, drawing
from hf_specdec.drafters.cross_vocabulary import Choice, SharedTokens
from hf_specdec.drafters.translation import Translation, translation_between
from tests.models import tiny
from tests.reference import FALSE_ALARM, assert_follows, p_value, target_law
from tests.second_device import NAME, SecondDevice
from tests.test_bad_input import word_tokenizer
from tests.token_pairs import bytes_only, lettered, overlapping, scripts, small

VOCAB = 20
PROMPT = torch.tensor([[3, 4, 1, 3, 4]])
PLAIN = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 4}
SETTINGS = {
    "T=1": ({}, []),
    "T=0.7": ({"temperature": 0.7, "top_p": 0.9}, [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]),
}
METHODS = ["tli", "slem", None]
GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(small(overlapping(95)[0], seed=0))


def drafter_for(percent, method=None, **options):
    """A draft model that shares this part of the target's tokens, with three padded ids in its output layer."""
    ours, theirs = overlapping(percent)
    model = small(theirs, seed=5, layers=1, padding=3)
    return DraftModel(model, 3, tokenizer=theirs, target_tokenizer=ours, translation=method, **options)


def first_tokens(model, num_calls, num_rows, **kwargs):
    """Samples (num_calls * num_rows, 2); call i is seeded with i."""
    outputs = []
    for seed in range(num_calls):
        out = model.generate(PROMPT.repeat(num_rows, 1), seed=seed, **(PLAIN | kwargs))
        outputs.append(out[:, PROMPT.shape[1] :][:, :2])
    return torch.cat(outputs)


def law_of(target, processors=()):
    return target_law(target, PROMPT, LogitsProcessorList(processors), 2, VOCAB)


# --- the law ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("percent", "setting"), [(95, "T=1"), (60, "T=1"), (5, "T=1"), (60, "T=0.7")])
def test_law_whatever_the_overlap(target, percent, method, setting):
    """6 calls of 250 rows: 1,500 samples (10,000 in the slow suite)."""
    options, processors = SETTINGS[setting]
    drafter = drafter_for(percent, method)
    assert_follows(first_tokens(target, 6, 250, assistant=drafter, **options), law_of(target, processors))
    assert percent == 5 or drafter.stats.accepted > 0  # five of 100 tokens write next to nothing that the target knows


MANY = [(percent, method) for percent in (95, 60, 5, 0) for method in METHODS if (percent, method) != (0, "tli")]


@pytest.mark.slow
@pytest.mark.parametrize(("percent", "method"), MANY)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("verification", ["token", "block"])
def test_law_with_many_samples(target, percent, method, setting, verification):
    """40 calls of 250 rows: 10,000 samples. Without a shared token there is no "tli"."""
    options, processors = SETTINGS[setting]
    options = options | {"verification": verification}
    samples = first_tokens(target, 40, 250, assistant=drafter_for(percent, method), **options)
    assert_follows(samples, law_of(target, processors))


def test_law_without_a_shared_token(target):
    """2 calls of 250 rows: 500 samples. Nothing can be drafted, and nothing is bent."""
    drafter = drafter_for(0)
    assert_follows(first_tokens(target, 2, 250, assistant=drafter), law_of(target))
    assert drafter.stats.drafted == 0


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("method", ["tli", "slem"])
def test_law_of_single_rows_and_small_batches(target, num_rows, method):
    """120 samples of each, so the first and the second token are looked at by themselves."""
    samples, law = first_tokens(target, 120 // num_rows, num_rows, assistant=drafter_for(60, method)), law_of(target)
    assert_follows(samples[:, :1], law.sum(dim=1))
    assert_follows(samples[:, 1:], law.sum(dim=0))


def test_law_where_several_tokens_have_one_image(monkeypatch):
    """10 calls of 250 rows: 2,500 samples. Masses of drafted ids that spell the same add up."""
    ours, theirs = overlapping(60)
    target = hf_specdec.enable(small(ours, seed=0))
    to_target = cross_vocabulary.SharedTokens.__init__

    def doubled(self, images, num_scored, vocabulary):
        to_target(self, [image % 4 if image >= 0 else image for image in images], num_scored, vocabulary)
        assert not self.is_injective

    monkeypatch.setattr(SharedTokens, "__init__", doubled)
    drafter = DraftModel(small(theirs, seed=5), 3, tokenizer=theirs, target_tokenizer=ours, translation="tli")
    assert_follows(first_tokens(target, 10, 250, assistant=drafter), law_of(target))


@pytest.mark.parametrize("method", METHODS)
def test_law_in_the_middle_of_characters(method):
    """6 calls of 250 rows: 1,500 samples of the first and of the second token, by themselves. The prompt ends in two of
    an emoji's four bytes, and a random target writes bytes that make no characters."""
    ours, theirs = bytes_only(), scripts("scripts")
    target = hf_specdec.enable(small(ours, seed=0, scale=0.3))
    drafter = DraftModel(small(theirs, 5, 1, scale=0.3), 3, tokenizer=theirs, target_tokenizer=ours, translation=method)
    prompt = torch.tensor([ours.encode("你好 😊")[:-2]])
    outputs = [target.generate(prompt.repeat(250, 1), assistant=drafter, seed=seed, **PLAIN) for seed in range(6)]
    samples = torch.cat(outputs)[:, prompt.shape[1] :]
    law = target_law(target, prompt, LogitsProcessorList(), 2, len(ours))
    assert_follows(samples[:, :1], law.sum(dim=1))
    assert_follows(samples[:, 1:2], law.sum(dim=0))
    assert drafter.stats.accepted > 0


class Counting(LogitsProcessor):
    """A processor of the user's own: the loop must judge token by token, rows in lockstep."""

    def __call__(self, input_ids, scores):
        return scores / 0.9


@pytest.mark.parametrize("method", METHODS)
def test_law_in_lockstep(target, method):
    """30 calls of 30 rows: 900 samples."""
    samples = first_tokens(target, 30, 30, assistant=drafter_for(60, method), logits_processor=[Counting()])
    assert_follows(samples, law_of(target, [Counting()]))


def test_the_law_of_a_draft_lies_on_shared_tokens_and_is_that_drawn_from(target):
    drafter, laws = drafter_for(60, "tli"), []
    true_sample, shared = drawing.sample, overlapping(60)

    def watched(law, uniforms):
        laws.append(law)
        return true_sample(law, uniforms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "sample", watched)
        target.generate(PROMPT, assistant=drafter, seed=0, **PLAIN)
    vocabularies = [set(tokenizer.get_vocab()) for tokenizer in shared]
    known = shared[0].convert_tokens_to_ids(sorted(vocabularies[0] & vocabularies[1]))
    others = sorted(set(range(VOCAB)) - set(known))
    assert laws
    for law in laws:
        assert bool((law[:, others] == 0).all()) and bool((law[:, known] > 0).all())
        assert torch.allclose(law.sum(-1), torch.ones(len(law)))


def test_the_harness_rejects_a_draft_told_in_the_wrong_ids(target, monkeypatch):
    """Negative control: the law drawn from, but under permuted ids. 10 calls of 250 rows: 2,500 samples."""
    true_chain = cross_vocabulary.chain

    def permuted(tokens, laws, limits, device):
        known = (laws[0] > 0).any(dim=0).nonzero()[:, 0]
        laws = [law.index_copy(1, known, law[:, known.roll(1)]) for law in laws]
        return true_chain(tokens, laws, limits, device)

    monkeypatch.setattr(cross_vocabulary, "chain", permuted)
    samples = first_tokens(target, 10, 250, assistant=drafter_for(95, "tli"), verification="token")
    assert p_value(samples, law_of(target)) < FALSE_ALARM


def test_the_harness_rejects_written_text_told_as_drawn(target, monkeypatch):
    """Negative control: written text is no draw, from whatever law. 10 calls of 250 rows: 2,500 samples."""
    true_copies = cross_vocabulary.Draft.of_copies.__func__

    class Told(cross_vocabulary.Draft):
        @classmethod
        def of_copies(cls, *args):
            draft = true_copies(cross_vocabulary.Draft, *args)
            law = torch.full((*draft.tokens.shape, VOCAB), 1 / VOCAB)
            return cross_vocabulary.Draft(draft.tokens, draft.lengths, law)

    monkeypatch.setattr(cross_vocabulary, "Draft", Told)
    samples = first_tokens(target, 10, 250, assistant=drafter_for(95, "slem"), verification="token")
    assert p_value(samples, law_of(target)) < FALSE_ALARM


def test_rows_do_not_depend_on_the_batch_around_them(target):
    kwargs = PLAIN | {"max_new_tokens": 30, "seed": 3}
    alone = target.generate(PROMPT, assistant=drafter_for(60), **kwargs)
    among = target.generate(PROMPT.repeat(5, 1), assistant=drafter_for(60), **kwargs)
    assert torch.equal(alone[0], among[0]) and not torch.equal(among[0], among[1])


def test_coupled_samples_are_the_same_whatever_the_drafter(target):
    kwargs = PLAIN | {"max_new_tokens": 20, "seed": 3, "verification": "coupled"}
    texts = [target.generate(PROMPT, assistant=drafter_for(95, method), **kwargs) for method in METHODS]
    assert all(torch.equal(text, texts[0]) for text in texts)


# --- greedy identity --------------------------------------------------------------------------------------


def model_for(tokenizer, family="llama", seed=0):
    return tiny(family, seed=seed, vocab=len(tokenizer))


def batch(tokenizer, num_rows):
    texts = ["Xin chào 😊 các bạn", "the dog", "你好世界。 déjà vu 👩‍👧"][:num_rows]
    tokenizer.padding_side = "left"
    return tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    ("ours", "theirs", "families"),
    [
        ("english", "scripts", ("llama", "llama")),
        ("scripts", "pieces", ("gemma3", "gpt2")),
        ("pieces", "english", ("mistral8", "gemma3")),
        ("scripts", "spaced", ("bloom", "mistral8")),
    ],
)
def test_greedy_texts_of_every_script(ours, theirs, families, num_rows, method):
    """In float64; random targets write broken characters most of the time."""
    ours, theirs = scripts(ours), scripts(theirs)
    target, model = hf_specdec.enable(model_for(ours, families[0])), model_for(theirs, families[1], seed=4)
    inputs = batch(ours, num_rows)
    plain = target.generate(**inputs, assistant=False, **GREEDY)
    drafter = DraftModel(model, 4, tokenizer=theirs, target_tokenizer=ours, translation=method)
    assert torch.equal(target.generate(**inputs, assistant=drafter, **GREEDY), plain)
    assert drafter.stats.drafted > 0


def respelled(model, ours, theirs):
    """The same model for a tokenizer with the same tokens under other ids."""
    order = [ours.convert_tokens_to_ids(token) for token in theirs.convert_ids_to_tokens(range(len(theirs)))]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        tables = {id(w): w for w in (copied.get_input_embeddings().weight, copied.get_output_embeddings().weight)}
        for weight in tables.values():  # one, where they are tied
            weight.copy_(weight[order].clone())
    return copied


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_target_itself_under_other_ids_is_accepted_without_fail(method, num_rows, family):
    """Equal sizes are no equal maps; verification hides a wrong map, acceptance does not."""
    ours, theirs = bytes_only(), bytes_only(-1)
    assert len(ours) == len(theirs)
    target = hf_specdec.enable(model_for(ours, family))
    drafter = DraftModel(respelled(target, ours, theirs), 4, tokenizer=theirs, translation=method)
    inputs = batch(ours, num_rows)
    plain = target.generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, assistant=drafter, tokenizer=ours, **GREEDY), plain)
    assert drafter.stats.accepted == drafter.stats.drafted > 0
    assert drafter.stats.target_passes < 12


def test_finished_rows_leave_and_the_schedule_may_rest(target):
    ours, theirs = scripts("english"), scripts("scripts")
    target = hf_specdec.enable(model_for(ours))
    inputs, settings = batch(ours, 3), GREEDY | {"eos_token_id": list(range(0, 300, 9))}
    plain = target.generate(**inputs, **settings)
    for method in METHODS:
        drafter = DraftModel(model_for(theirs), tokenizer=theirs, target_tokenizer=ours, translation=method)
        assert torch.equal(target.generate(**inputs, assistant=drafter, **settings), plain)
        both = Auto([Suffix(), drafter])
        assert torch.equal(target.generate(**inputs, assistant=both, **settings), plain)


@pytest.mark.scheduled
def test_measured_lengths_and_methods(target):
    ours, theirs = scripts("english"), scripts("scripts")
    target = hf_specdec.enable(model_for(ours))
    drafter = DraftModel(model_for(theirs), tokenizer=theirs, target_tokenizer=ours)
    settings = GREEDY | {"max_new_tokens": 60}
    inputs = batch(ours, 3)
    plain = target.generate(**inputs, **settings)
    for _ in range(3):
        assert torch.equal(target.generate(**inputs, assistant=drafter, **settings), plain)


def test_a_short_context_ends_the_drafts_and_the_draft_model_is_left_alone():
    ours, theirs = scripts("english"), scripts("scripts")
    target = hf_specdec.enable(model_for(ours))
    model = tiny("gpt2", vocab=len(theirs), max_position_embeddings=30)
    before = copy.deepcopy(model.state_dict())
    inputs = batch(ours, 3)
    plain = target.generate(**inputs, **GREEDY)
    for method in METHODS:
        drafter = DraftModel(model, tokenizer=theirs, target_tokenizer=ours, translation=method)
        assert torch.equal(target.generate(**inputs, assistant=drafter, **GREEDY), plain)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("better", "other"), [("tli", "slem"), ("slem", "tli")])
def test_the_better_method_drafts_more(better, other, do_sample):
    choice = Choice(("tli", "slem"), do_sample)
    used = []
    for _ in range(60):
        choice.decide()
        used.append(choice.method)
        choice.learn(3 if choice.method == better else 1, 4)
    assert used.count(better) > 40 and used.count(other) > 1  # the other one is tried after 16 rounds at the latest


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_method_that_was_measured_to_be_better_begins(do_sample):
    """Written text stayed more often in the pairs of benchmarks/README.md."""
    choice = Choice(("tli", "slem"), do_sample)
    choice.decide()
    assert choice.method == "slem"


# --- how it is asked for ----------------------------------------------------------------------------------


def test_the_hosts_names_for_tokenizers():
    ours, theirs = scripts("english"), scripts("scripts")
    target, model = hf_specdec.enable(model_for(ours)), model_for(theirs)
    inputs = batch(ours, 1)
    plain = target.generate(**inputs, **GREEDY)
    for assistant in (model, DraftModel(model), DraftModel(model, tokenizer=theirs)):
        given = {} if getattr(assistant, "tokenizer", None) else {"assistant_tokenizer": theirs}
        out = target.generate(**inputs, assistant=assistant, tokenizer=ours, **given, **GREEDY)
        assert torch.equal(out, plain)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["330", "420", "tokenizer=", "target_tokenizer="]),
        ({"assistant_tokenizer": "scripts"}, ["tokenizer="]),
        ({"assistant_tokenizer": 3, "tokenizer": "english"}, ["int", "tokenizers"]),
        ({"assistant_tokenizer": "scripts", "tokenizer": object()}, ["object", "tokenizers"]),
        ({"assistant": "suffix", "assistant_tokenizer": "scripts"}, ["assistant_tokenizer=", "suffix", "DraftModel("]),
    ],
)
def test_what_is_missing_is_said(given, words):
    target, model = hf_specdec.enable(tiny(vocab=330)), tiny(vocab=420)
    given = {k: scripts(v) if v in ("scripts", "english") else v for k, v in given.items()}
    with pytest.raises(ValueError) as caught:
        target.generate(torch.tensor([[5, 6]]), **({"assistant": model} | given), **GREEDY)
    assert all(word in str(caught.value) for word in words)


def test_what_cannot_be_translated_is_refused(target):
    ours, theirs = overlapping(0)
    with pytest.raises(ValueError, match="share no token"):
        target.generate(PROMPT, assistant=drafter_for(0, "tli"), **PLAIN)
    with pytest.raises(ValueError, match="translation='words'"):
        drafter_for(60, "words")
    with pytest.raises(ValueError, match="not int"):
        DraftModel(small(theirs, 1), tokenizer=3)
    words = DraftModel(tiny(vocab=20), tokenizer=word_tokenizer(20), target_tokenizer=ours)
    with pytest.raises(ValueError, match="which bytes they spell"):
        target.generate(PROMPT, assistant=words, **PLAIN)


def test_a_model_without_positions_drafts_for_single_rows_only():
    ours, theirs = scripts("english"), scripts("scripts")
    target, model = hf_specdec.enable(model_for(ours)), model_for(theirs, "bloom")
    drafter = DraftModel(model, tokenizer=theirs, target_tokenizer=ours)
    plain = target.generate(**batch(ours, 1), **GREEDY)
    assert torch.equal(target.generate(**batch(ours, 1), assistant=drafter, **GREEDY), plain)
    with pytest.raises(ValueError, match="one row at a time"):
        target.generate(**batch(ours, 3), assistant=drafter, **GREEDY)


def test_one_tokenizer_stays_one_map():
    """Equal maps draft as ever, from the same object or another one."""
    ours = lettered(list("abcdefgh"))
    target = hf_specdec.enable(small(ours, 0))
    drafter = DraftModel(small(ours, 1), 3, tokenizer=lettered(list("abcdefgh")), target_tokenizer=ours)
    target.generate(PROMPT, assistant=drafter, **PLAIN)
    assert drafter._pairs[target].tokenizer is ours and drafter._pairs[target].translation is None


def test_what_is_learned_of_a_named_drafter_outlives_the_call():
    ours, theirs = scripts("english"), scripts("scripts")
    target, drafter = hf_specdec.enable(model_for(ours)), DraftModel(model_for(theirs))
    named = drafter.with_tokenizer(theirs)
    assert drafter.with_tokenizer(theirs) is named and named.with_tokenizer(theirs) is named
    assert drafter.tokenizer is None and named.stats is drafter.stats
    for _ in range(2):
        target.generate(**batch(ours, 1), assistant=drafter, tokenizer=ours, assistant_tokenizer=theirs, **GREEDY)
    assert drafter.stats.calls == 2 and named._pairs[target].translation is not None


def test_a_calls_tokenizer_counts_more_than_the_drafters():
    """Greedy texts cannot tell, so what is compared is looked at."""
    ours, others, theirs = scripts("english"), scripts("pieces"), scripts("scripts")
    target = hf_specdec.enable(model_for(ours))
    drafter = DraftModel(model_for(theirs), tokenizer=theirs, target_tokenizer=others)
    target.generate(**batch(ours, 1), assistant=drafter, tokenizer=ours, **GREEDY)
    assert drafter._pairs[target].tokenizer is ours


# --- folders ----------------------------------------------------------------------------------------------


def saved(folder, model, tokenizer=None):
    """A folder with a model and perhaps its tokenizer."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def opened(folder):
    """A target from a folder, which it remembers."""
    return hf_specdec.enable(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_folders_bring_their_tokenizers(tmp_path, num_rows):
    ours, theirs = scripts("scripts"), scripts("pieces")
    target = opened(saved(tmp_path / "target", model_for(ours), ours))
    folder = saved(tmp_path / "drafter", model_for(theirs, "gemma3", seed=4), theirs)
    inputs = batch(ours, num_rows)
    plain = target.generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, assistant=folder, **GREEDY), plain)
    assert hf_specdec.last_stats(target).drafted > 0
    drafter = load_drafter(folder, target=target)
    assert torch.equal(target.generate(**inputs, assistant=drafter, **GREEDY), plain)
    assert drafter._pairs[target].translation is not None


@pytest.mark.parametrize(("has_ours", "has_theirs"), [(True, False), (False, True), (False, False)])
def test_folders_without_tokenizers_want_them_named(tmp_path, has_ours, has_theirs):
    ours, theirs = scripts("scripts"), scripts("pieces")
    target = opened(saved(tmp_path / "target", model_for(ours), ours if has_ours else None))
    folder = saved(tmp_path / "drafter", model_for(theirs), theirs if has_theirs else None)
    with pytest.raises(ValueError, match=r"DraftModel\(model, tokenizer=.*assistant_tokenizer="):
        target.generate(**batch(ours, 1), assistant=folder, **GREEDY)
    given = {"tokenizer": ours, "assistant_tokenizer": theirs}
    plain = target.generate(**batch(ours, 1), **GREEDY)
    assert torch.equal(target.generate(**batch(ours, 1), assistant=folder, **given, **GREEDY), plain)


def test_a_tokenizer_that_cannot_be_opened_is_warned_of_and_sizes_are_compared(tmp_path, monkeypatch):
    ours = scripts("scripts")
    target = opened(saved(tmp_path / "target", model_for(ours), ours))
    folder = saved(tmp_path / "drafter", model_for(ours, seed=4), ours)
    (tmp_path / "drafter" / "tokenizer.json").write_text("{")
    said = []
    monkeypatch.setattr(tokenizers.logger, "warning_once", said.append)
    plain = target.generate(**batch(ours, 1), **GREEDY)
    assert torch.equal(target.generate(**batch(ours, 1), assistant=folder, **GREEDY), plain)
    assert len(said) == 1 and folder in said[0] and "could not be opened" in said[0]


PADDED = [(24, 22), (22, 24), (20, 24), (24, 20)]  # ids that target and drafter score; the tokenizer has 20


@pytest.mark.parametrize(("num_ours", "num_theirs"), PADDED)
def test_law_of_padded_pairs_from_folders(tmp_path, monkeypatch, num_ours, num_theirs):
    """6 calls of 250 rows: 1,500 samples. The target's padded ids keep their mass, and nobody proposes one."""
    tokenizer = overlapping(95)[0]
    target = opened(saved(tmp_path / "target", small(tokenizer, 0, padding=num_ours - 20), tokenizer)).float()
    folder = saved(tmp_path / "drafter", small(tokenizer, 5, layers=1, padding=num_theirs - 20), tokenizer)
    true_chain, proposed = draft_model.chain, []

    def watched(tokens, laws, limits, device):
        proposed.extend(int(token.max()) for token in tokens)
        assert all(law.shape[-1] == num_ours and bool((law[:, 20:] == 0).all()) for law in laws)
        return true_chain(tokens, laws, limits, device)

    monkeypatch.setattr(draft_model, "chain", watched)
    law = target_law(target, PROMPT, LogitsProcessorList(), 2, num_ours)
    samples = first_tokens(target, 6, 250, assistant=folder)
    assert_follows(samples, law)
    assert max(proposed) < 20 and hf_specdec.last_stats(target).accepted > 0
    assert num_ours == 20 or int((samples >= 20).sum()) > 0


@pytest.mark.parametrize(("num_ours", "num_theirs"), [(440, 424), (424, 440), (420, 440)])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_texts_of_padded_pairs_from_folders(tmp_path, num_ours, num_theirs, num_rows):
    """A random target emits padded ids often, which the drafter then has to read."""
    tokenizer = scripts("scripts")
    target = opened(saved(tmp_path / "target", tiny(vocab=num_ours), tokenizer))
    folder = saved(tmp_path / "drafter", tiny(seed=4, vocab=num_theirs), tokenizer)
    inputs, settings = batch(tokenizer, num_rows), GREEDY | {"max_new_tokens": 40}
    plain = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, assistant=folder, **settings), plain)
    assert hf_specdec.last_stats(target).drafted > 0


@pytest.mark.parametrize("where", ["ours", "theirs", "both"])
def test_law_where_only_added_tokens_differ(tmp_path, monkeypatch, where):
    """6 calls of 250 rows: 1,500 samples. One map, but some of the ids 20 to 22 are not the other's."""
    ours, theirs = overlapping(95)[0], overlapping(95)[0]
    ours.add_tokens({"theirs": [], "ours": ["<x>", "<y>"], "both": ["<x>", "<y>", "<z>"]}[where])
    theirs.add_tokens({"ours": [], "theirs": ["<x>", "<y>"], "both": ["<y>", "<x>", "<z>"]}[where])
    target = opened(saved(tmp_path / "target", small(ours, 0), ours)).float()
    folder = saved(tmp_path / "drafter", small(theirs, 5, layers=1), theirs)
    true_chain, others = draft_model.chain, {"both": [20, 21]}.get(where, range(20, len(ours)))

    def watched(tokens, laws, limits, device):
        assert all(law.shape[-1] == len(ours) and bool((law[:, list(others)] == 0).all()) for law in laws)
        return true_chain(tokens, laws, limits, device)

    monkeypatch.setattr(draft_model, "chain", watched)
    law = target_law(target, PROMPT, LogitsProcessorList(), 2, len(ours))
    assert_follows(first_tokens(target, 6, 250, assistant=folder), law)
    assert hf_specdec.last_stats(target).accepted > 0


# --- what belongs to the user -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 600])
@pytest.mark.parametrize("method", METHODS)
def test_a_tokenizer_may_know_more_or_fewer_tokens_than_its_model(size, method):
    ours, theirs = scripts("english"), scripts("pieces")
    target = hf_specdec.enable(model_for(ours))
    drafter = DraftModel(tiny(vocab=size), 4, tokenizer=theirs, target_tokenizer=ours, translation=method)
    plain = target.generate(**batch(ours, 3), **GREEDY)
    assert torch.equal(target.generate(**batch(ours, 3), assistant=drafter, **GREEDY), plain)


@pytest.mark.parametrize("method", METHODS)
def test_wrong_tokenizers_cost_drafts_and_nothing_else(method):
    """Each has the other's, and the target is of a third size."""
    ours, theirs = scripts("english"), scripts("pieces")
    target = hf_specdec.enable(tiny(vocab=350))
    drafter = DraftModel(model_for(theirs), 4, tokenizer=ours, target_tokenizer=theirs, translation=method)
    plain = target.generate(**batch(ours, 3), **GREEDY)
    assert torch.equal(target.generate(**batch(ours, 3), assistant=drafter, **GREEDY), plain)


def test_tokenizers_keep_their_padding_and_truncation():
    """Another thread may be tokenizing with them; a call that reset their padding in between would break its batch."""
    ours, theirs = scripts("english"), scripts("pieces")
    target, model = hf_specdec.enable(model_for(ours)), model_for(theirs)
    translation_between(ours, theirs)
    inputs = batch(ours, 3)
    for tokenizer in (ours, theirs):
        tokenizer("the dog", padding="max_length", truncation=True, max_length=2)
    before = [tokenizer.backend_tokenizer.to_str() for tokenizer in (ours, theirs)]
    plain = target.generate(**inputs, **GREEDY)
    for method in METHODS:
        drafter = DraftModel(model, 4, tokenizer=theirs, target_tokenizer=ours, translation=method)
        assert torch.equal(target.generate(**inputs, assistant=drafter, **GREEDY), plain)
    assert [tokenizer.backend_tokenizer.to_str() for tokenizer in (ours, theirs)] == before


def test_the_draft_model_goes_on_as_a_target_of_its_own():
    ours, theirs = scripts("english"), scripts("pieces")
    target, model = hf_specdec.enable(model_for(ours)), hf_specdec.enable(model_for(theirs, seed=4))
    inputs = theirs("the dog sleeps", return_tensors="pt", return_token_type_ids=False)
    plain, settings, names = model.generate(**inputs, **GREEDY), model.config.to_dict(), set(model.__dict__)
    drafter = DraftModel(model, 4, tokenizer=theirs, target_tokenizer=ours)
    target.generate(**batch(ours, 3), assistant=drafter, **GREEDY)
    assert model.config.to_dict() == settings and set(model.__dict__) == names
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    back = DraftModel(target, 4, tokenizer=ours, target_tokenizer=theirs)
    assert torch.equal(model.generate(**inputs, assistant=back, **GREEDY), plain)


def test_copies_and_pickles_of_a_drafter_draft():
    ours, theirs = scripts("english"), scripts("pieces")
    target = hf_specdec.enable(model_for(ours))
    drafter = DraftModel(model_for(theirs, seed=4), 4, tokenizer=theirs, target_tokenizer=ours)
    plain = target.generate(**batch(ours, 3), assistant=drafter, **GREEDY)
    for other in (copy.copy(drafter), pickle.loads(pickle.dumps(drafter)), copy.deepcopy(drafter)):
        assert torch.equal(target.generate(**batch(ours, 3), assistant=other, **GREEDY), plain)
        assert other._pairs[target].translation is not None
    assert copy.deepcopy(drafter) is drafter


def test_one_drafter_serves_two_targets_in_two_threads():
    tokenizers_, theirs = [scripts("english"), scripts("scripts")], scripts("pieces")
    targets = [hf_specdec.enable(model_for(tokenizer)) for tokenizer in tokenizers_]
    drafter = DraftModel(model_for(theirs, seed=4), 4, tokenizer=theirs)
    inputs = [batch(tokenizer, 3) for tokenizer in tokenizers_]
    plain = [target.generate(**given, **GREEDY) for target, given in zip(targets, inputs, strict=True)]

    def work(index):
        known = {"assistant": drafter, "tokenizer": tokenizers_[index]}
        return [targets[index].generate(**inputs[index], **known, **GREEDY) for _ in range(3)]

    with ThreadPoolExecutor() as threads:
        for index, texts in enumerate(threads.map(work, range(2))):
            assert all(torch.equal(text, plain[index]) for text in texts)


def test_an_encoder_decoder_target_is_drafted_for_in_other_tokens():
    ours, theirs = scripts("english"), scripts("pieces")
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16}
    target = hf_specdec.enable(T5ForConditionalGeneration(T5Config(vocab_size=len(ours), **sizes, **ids)).eval())
    target = target.double()
    for num_rows in (1, 3):
        inputs = batch(ours, num_rows)
        plain = target.generate(**inputs, **GREEDY)
        for method in METHODS:
            drafter = DraftModel(model_for(theirs), 4, tokenizer=theirs, target_tokenizer=ours, translation=method)
            assert torch.equal(target.generate(**inputs, assistant=drafter, **GREEDY), plain)
            assert drafter.stats.drafted > 0


@pytest.mark.parametrize("method", METHODS)
def test_everything_that_generate_returns(method):
    """Scores, logits, streams and caches, where rows end at different lengths."""
    ours, theirs = scripts("english"), scripts("pieces")
    target = hf_specdec.enable(model_for(ours))
    drafter = DraftModel(model_for(theirs, seed=4), 4, tokenizer=theirs, target_tokenizer=ours, translation=method)
    settings = GREEDY | {"return_dict_in_generate": True, "output_logits": True, "repetition_penalty": 1.2}
    settings |= {"eos_token_id": list(range(0, 330, 23)), "output_scores": True}
    inputs = batch(ours, 3)
    plain, out = target.generate(**inputs, **settings), target.generate(**inputs, assistant=drafter, **settings)
    assert torch.equal(out.sequences, plain.sequences)
    assert len(out.scores) == len(plain.scores) == len(out.logits)
    live = (plain.sequences[:, inputs["input_ids"].shape[1] :] != 0).long().cumprod(1).bool()
    for step, (ours_at, theirs_at) in enumerate(zip(out.scores, plain.scores, strict=True)):
        assert torch.allclose(ours_at[live[:, step]], theirs_at[live[:, step]])
    assert out.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
    streamer = TextIteratorStreamer(ours)
    target.generate(**batch(ours, 1), assistant=drafter, streamer=streamer, **GREEDY)
    assert "".join(streamer) == ours.decode(target.generate(**batch(ours, 1), **GREEDY)[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"do_sample": True, "seed": 3, "top_k": 20},
        {"do_sample": True, "seed": 3, "repetition_penalty": 1.3},
    ],
)
def test_a_drafter_on_another_device_drafts_the_same(method, settings):
    ours, theirs = bytes_only(), bytes_only(-1)
    target = hf_specdec.enable(model_for(ours))
    model, settings = respelled(target, ours, theirs), GREEDY | settings
    near = DraftModel(model, 4, tokenizer=theirs, target_tokenizer=ours, translation=method)
    expected = target.generate(**batch(ours, 3), assistant=near, **settings)
    with torch.no_grad(), SecondDevice() as device:
        far = DraftModel(device.take(model), 4, tokenizer=theirs, target_tokenizer=ours, translation=method)
        assert torch.equal(target.generate(**batch(ours, 3), assistant=far, **settings), expected)
    assert far.stats.accepted == near.stats.accepted > 0
    assert device.moves[NAME, "cpu"] <= 5 * far.stats.target_passes


# --- which method -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("better", ["tli", "slem"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_method_whose_drafts_stay_is_used(monkeypatch, better, num_rows):
    """A drafter that knows the target by heart, spoiled under one of the two methods."""
    ours, theirs = bytes_only(), bytes_only(-1)
    target = hf_specdec.enable(model_for(ours))
    if better == "tli":
        monkeypatch.setattr(Translation, "written", lambda self, tokens, context, limit: [5] * limit)
    else:
        of_target = SharedTokens.of_target
        monkeypatch.setattr(SharedTokens, "of_target", lambda self, logits: of_target(self, -logits))
    used = []
    decide = Choice.decide

    def watched(self):
        decide(self)
        used.append(self.method)

    monkeypatch.setattr(Choice, "decide", watched)
    drafter = DraftModel(respelled(target, ours, theirs), 4, tokenizer=theirs, target_tokenizer=ours)
    inputs, settings = batch(ours, num_rows), GREEDY | {"max_new_tokens": 80}
    plain = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, assistant=drafter, **settings), plain)
    assert used.count(better) > 0.8 * len(used)
    assert drafter.stats.accepted > 0.7 * drafter.stats.drafted
