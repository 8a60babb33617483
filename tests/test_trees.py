"""Draft trees through whole `generate` calls: greedy identity, laws, processors, outputs, caches, fallbacks."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList, StaticCache, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import StaticLayer

import hf_specdec
from hf_specdec import Auto, DraftModel, PromptLookup, Suffix, TokenRecycling, host, scorer
from hf_specdec.accept import Draft
from hf_specdec.state import DecodeState
from tests import test_outputs, test_processors
from tests.models import jittered, prompts, tiny
from tests.reference import assert_follows, target_law
from tests.test_attention import flash_kernels, with_attention
from tests.test_grammar import OutlinesProcessor
from tests.test_law import PROMPT, VOCAB, Counting, first_tokens, small
from tests.test_padding import with_holes
from tests.tokenizers_for_tests import trained_tokenizer
from tests.tree_drafters import Bushy, Mixed, Oracle

FAMILIES = ["llama", "qwen3", "gpt2", "mistral8", "gemma3"]
CACHE = host.CACHE_NAME
LENGTH = 12  # of the prompts
assert flash_kernels  # a fixture


@pytest.fixture(scope="module")
def models():
    return {family: hf_specdec.enable(tiny(family)) for family in FAMILIES}


def greedy(model, text, num_nodes=12, num_rows=None, seed=0, prompt_seed=0, is_deep=False, **kwargs):
    """What comes with trees that hold `text` among other tokens."""
    ids, mask = prompts(num_rows or len(text), seed=prompt_seed)
    kwargs = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0} | kwargs
    oracle = Oracle(text, num_nodes, seed, is_deep=is_deep)
    out = model.generate(ids, assistant=oracle, **kwargs)
    assert all(oracle.takes_trees)
    return out


def plain_text(model, num_rows, seed=0, **kwargs):
    ids, mask = prompts(num_rows, seed=seed)
    kwargs = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0} | kwargs
    return model.generate(ids, assistant=False, **kwargs)


# --- greedy identity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_text_is_the_same(family, num_rows, attention):
    # The host's eager attention casts scores to float32, where float64's lowest number is -inf and padding gives NaN.
    model = tiny(family, dtype=torch.float32 if attention == "eager" else torch.float64)
    model.set_attn_implementation(attention)
    hf_specdec.enable(model)
    plain = plain_text(model, num_rows)
    assert torch.equal(plain, greedy(model, plain))
    assert hf_specdec.last_stats(model).mean_acceptance_length > 1.5


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("family", ["llama", "mistral8"])
def test_greedy_text_is_the_same_with_wide_trees(models, family, num_rows):
    """4 batches of prompts, trees of 60 tokens."""
    for seed in range(4):
        ends = {"eos_token_id": [2, 7, 11] if seed % 2 else None}
        plain = plain_text(models[family], num_rows, seed, **ends)
        ours = greedy(models[family], plain, 60, seed=seed, prompt_seed=seed, is_deep=bool(seed % 2), **ends)
        assert torch.equal(plain, ours)
        assert hf_specdec.last_stats(models[family]).drafted > 40


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("num_nodes", [4, 20, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_matrix(models, family, num_nodes, num_rows):
    """50 prompts of each."""
    model = models[family]
    for seed in range(-(-50 // num_rows)):
        ends = {"eos_token_id": [2, 7, 11] if seed % 2 else None, "max_new_tokens": 40}
        plain = plain_text(model, num_rows, seed, **ends)
        ours = greedy(model, plain, num_nodes, seed=seed, prompt_seed=seed, is_deep=bool(seed % 3), **ends)
        assert torch.equal(plain, ours)


# --- ends in the middle of a path -------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_row_ends_wherever_its_end_stands_on_a_path(models, num_rows):
    """The trees go on behind the end, with what the target would have said."""
    model = models["llama"]
    text, num_cut = plain_text(model, num_rows, eos_token_id=None), 0
    for place in range(1, 20):
        end = int(text[num_rows - 1, LENGTH + place])
        plain = plain_text(model, num_rows, eos_token_id=end)
        assert torch.equal(plain, greedy(model, text, 40, seed=place, is_deep=True, eos_token_id=end))
        stats = hf_specdec.last_stats(model)
        num_cut += stats.accepted + stats.rounds > stats.emitted  # an accepted token was the last of its row
    assert num_cut > 5


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("in_lockstep", [False, True])
def test_the_longest_text_ends_in_the_middle_of_a_path(models, num_rows, in_lockstep):
    model = models["qwen3"]
    text = plain_text(model, num_rows, eos_token_id=None)
    for length in range(1, 20):
        changes = {"logits_processor": [Counting()]} if in_lockstep else {}
        out = greedy(model, text, 40, is_deep=True, max_new_tokens=length, eos_token_id=None, **changes)
        assert torch.equal(out, text[:, : LENGTH + length])


def test_a_tree_is_as_wide_near_the_end_as_before(models):
    """What is left of a row bounds paths, not tokens."""
    model = models["llama"]
    text = plain_text(model, 1, eos_token_id=None, max_new_tokens=4)
    model.generate(prompts(1)[0], assistant=Oracle(text, 40), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert hf_specdec.last_stats(model).drafted > 20


def test_rows_that_ended_leave_the_passes(models):
    model = models["llama"]
    text = plain_text(model, 8, eos_token_id=None)
    ends = sorted({int(row[LENGTH + 3 * place]) for place, row in enumerate(text[:4])})
    plain = plain_text(model, 8, eos_token_id=ends)
    lengths = test_outputs.row_ends(plain, ends)
    assert len(set(lengths)) > 2
    sizes = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    ours = greedy(model, text, 20, is_deep=True, eos_token_id=ends)
    hook.remove()
    assert torch.equal(plain, ours)
    assert sizes[0] == 8 and min(sizes) < 8


@pytest.mark.parametrize("family", ["llama", "mistral8", "gemma3"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("holes", [[4, 5], range(5, 12)])
def test_holes_in_the_users_mask(models, family, num_rows, holes):
    model = models[family]
    ids, mask = with_holes(num_rows, holes=holes)
    kwargs = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(ids, assistant=False, **kwargs)
    assert torch.equal(plain, model.generate(ids, assistant=Oracle(plain, 20, is_deep=True), **kwargs))


# --- what is returned -------------------------------------------------------------------------------------


def both(model, num_rows, num_nodes=20, **changes):
    """Output dicts of plain generation and of one with trees, everything recorded."""
    given = test_outputs.batch(num_rows) | test_outputs.ALL_OUTPUTS | changes
    plain = model.generate(assistant=False, **given)
    ours = model.generate(assistant=Oracle(plain.sequences, num_nodes, is_deep=True), **given)
    assert torch.equal(ours.sequences, plain.sequences)
    assert hf_specdec.last_stats(model).accepted > 0
    return plain, ours


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("in_lockstep", [False, True])
@pytest.mark.parametrize("family", test_outputs.FAMILIES)
def test_every_step_of_the_output_dict_is_plains(models, family, num_rows, in_lockstep):
    processors = {"logits_processor": [test_outputs.Pass()]} if in_lockstep else {}
    plain, ours = both(models[family], num_rows, repetition_penalty=1.2, **processors)
    test_outputs.assert_same_steps(ours, plain, [14] * num_rows)


@pytest.mark.parametrize("in_lockstep", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral8"])
def test_rows_of_the_output_dict_end_on_their_own(models, family, in_lockstep):
    model = models[family]
    emitted = model.generate(assistant=False, **test_outputs.batch(3))[:, LENGTH:]
    ends = [int(emitted[2, 4]), test_outputs.NEVER]
    processors = {"logits_processor": [test_outputs.Pass()]} if in_lockstep else {}
    plain, ours = both(model, 3, eos_token_id=ends, **processors)
    lengths = test_outputs.row_ends(plain.sequences, ends)
    assert min(lengths) < max(lengths)
    test_outputs.assert_same_steps(ours, plain, lengths, zero_fill=not in_lockstep)


@pytest.mark.parametrize("one_ends", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", test_outputs.FAMILIES)
def test_the_returned_cache_is_plains_where_rows_go_on(models, family, num_rows, one_ends):
    model, given = models[family], test_outputs.batch(num_rows)
    ends = [test_outputs.NEVER]
    if one_ends and num_rows > 1:
        emitted = model.generate(assistant=False, **given)[:, LENGTH:].tolist()
        ends += [t for t in emitted[1] if t not in emitted[0] + emitted[2]][:1]
    plain, ours = both(model, num_rows, eos_token_id=ends)
    lengths = test_outputs.row_ends(plain.sequences, ends)
    theirs, mine = plain[CACHE], ours[CACHE]
    assert mine.get_seq_length() == theirs.get_seq_length()
    for layer in range(len(mine.layers)):
        for a, b in zip(test_outputs.slots(mine, layer), test_outputs.slots(theirs, layer), strict=True):
            assert a.shape == b.shape
            for row in (row for row in range(num_rows) if lengths[row] == max(lengths)):
                shown = int(given["attention_mask"][row].sum()) + max(lengths) - 1
                assert test_outputs.close(a[row, :, -shown:], b[row, :, -shown:])


@pytest.mark.parametrize("family", test_outputs.FAMILIES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_several_turns_with_a_cache_of_the_users(models, family, num_rows):
    model = models[family]
    given = test_outputs.rest(test_outputs.batch(num_rows)) | {"eos_token_id": None, "max_new_tokens": 9}
    texts = []
    for has_trees in (False, True):
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        ids, mask = prompts(num_rows)
        for turn in range(3):
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            assistant = Oracle(texts[turn], 20, is_deep=True) if has_trees else False
            ids = model.generate(ids, attention_mask=mask, assistant=assistant, **given, **{CACHE: cache})
            texts.append(ids)
            ids = torch.cat([ids, prompts(num_rows, 3, seed=turn)[0].clamp(min=3)], dim=1)
    assert all(torch.equal(texts[turn], texts[turn + 3]) for turn in range(3))


# --- processors -------------------------------------------------------------------------------------------


def processed(model, num_rows, fresh=dict, **changes):
    given = test_processors.batch(num_rows) | changes
    plain = model.generate(assistant=False, **given, **fresh())
    assert torch.equal(plain, model.generate(assistant=Oracle(plain, 20, is_deep=True), **given, **fresh()))
    return plain


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("setting", test_processors.SETTINGS)
def test_parity_under_the_hosts_processors(models, setting, num_rows):
    processed(models["llama"], num_rows, **test_processors.SETTINGS[setting])


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["Counts", "PenalisesWhatItSaw", "MutatesInPlace", "ComparesRows", "Drawn"])
def test_parity_under_a_users_processor(models, kind, num_rows):
    processed(models["llama"], num_rows, lambda: {"logits_processor": [getattr(test_processors, kind)()]})
    assert hf_specdec.last_stats(models["llama"]).accepted > 0


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("ends_early", [False, True])
def test_a_users_processor_is_shown_what_plain_shows(models, num_rows, ends_early):
    model, given = models["llama"], test_processors.batch(num_rows)
    text = model.generate(assistant=False, **given)
    given["eos_token_id"] = int(text[num_rows - 1, LENGTH + 7]) if ends_early else 4
    shown = []
    for assistant in (False, Oracle(text, 20, is_deep=True)):
        seen = test_processors.Seen()
        model.generate(assistant=assistant, logits_processor=LogitsProcessorList([seen]), **given)
        shown.append(seen)
    plain, ours = shown
    ours.assert_was_shown_what(plain, given["eos_token_id"])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_grammar_walks_the_accepted_path_alone(num_rows):
    tokenizer = trained_tokenizer()
    model = hf_specdec.enable(tiny(vocab=len(tokenizer)))
    tokenizer.padding_side = "left"
    texts = ["apples and the dog", "the quick brown fox jumps over", "Write a short story about"][:num_rows]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    kwargs = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id}

    def text(assistant):
        return model.generate(
            **inputs, assistant=assistant, logits_processor=[OutlinesProcessor(tokenizer, num_rows)], **kwargs
        )

    plain = text(False)
    assert torch.equal(plain, text(Oracle(plain, 20, vocab=len(tokenizer), is_deep=True)))
    assert hf_specdec.last_stats(model).accepted > 0


# --- sampling ---------------------------------------------------------------------------------------------

SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 30, "eos_token_id": None, "pad_token_id": 0}
SAMPLED |= {"max_new_tokens": 30, "seed": 3}


@pytest.mark.parametrize("verification", ["auto", "coupled"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_seed_says_the_text_whatever_the_trees(models, num_rows, verification):
    """Trees are point masses: the text is that of every drafter that copies."""
    model = models["llama"]
    ids, mask = prompts(num_rows)
    kwargs = SAMPLED | {"attention_mask": mask, "verification": verification}
    text = model.generate(ids, assistant=PromptLookup(7, 7), **kwargs)
    drafters = [Oracle(text, 12), Oracle(text, 60, is_deep=True), Oracle(text.flip(1), 30), Bushy(), TokenRecycling()]
    for drafter in drafters:
        assert torch.equal(text, model.generate(ids, assistant=drafter, **kwargs))
    assert drafters[1].stats.mean_acceptance_length > 2
    in_lockstep = kwargs | {"logits_processor": [test_outputs.Pass()]}
    assert torch.equal(text, model.generate(ids, assistant=Oracle(text, 20), **in_lockstep))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["T=1", "T=0.7"])
@pytest.mark.parametrize(
    ("num_rows", "num_samples"),
    [
        (250, 5000),
        (1, 300),
        (3, 600),
        pytest.param(1, 10_000, marks=pytest.mark.slow),
        pytest.param(3, 10_000, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("drafter", [Bushy, Mixed])
def test_law(drafter, num_rows, num_samples, options):
    """Trees alone, and rounds in which rows have a drawn chain, a tree or nothing; sample sizes as named."""
    target = hf_specdec.enable(small(0))
    processors = [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)] if options else []
    samples = first_tokens(target, num_samples // num_rows, num_rows, assistant=drafter(VOCAB), **options)
    assert hf_specdec.last_stats(target).drafted > 0
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList(processors), 3, VOCAB))


@pytest.mark.parametrize("drafter", [Bushy, Mixed])
@pytest.mark.parametrize("num_rows", [4, 250])
def test_law_in_lockstep(drafter, num_rows):
    """5,000 samples of large batches, 1,200 of small ones, where the minimum often cuts in the middle of a path."""
    target = hf_specdec.enable(small(0))
    num_calls = 20 if num_rows == 250 else 300
    samples = first_tokens(target, num_calls, num_rows, assistant=drafter(VOCAB), logits_processor=[Counting()])
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList([Counting()]), 3, VOCAB))


def test_the_host_knows_how_long_prefixes_of_chains_are():
    """Of trees it asks the device, once a pass."""
    ids, mask = prompts(3)
    state = DecodeState(ids, mask, fill=0)
    state.write(torch.full((3, 4), 5))
    chain = scorer._prefixes(state, 3, 1, None)
    assert chain.known_lengths == (chain.ends + chain.num_drafted).tolist() == [13, 14, 15] * 3
    parents = torch.tensor([[-1, -1, 0, 2]]).repeat(3, 1)
    tree = scorer._prefixes(state, 5, 0, Draft(torch.arange(12).view(3, 4), torch.full((3,), 4), parents=parents))
    assert tree.known_lengths is None and tree._lengths == [12, 13, 13, 14, 15] * 3
    assert tree._lengths is tree._lengths


def test_padding_of_a_tree_follows_the_token_before_it():
    """In lockstep a row that has ended is filled column by column: its filling must read what stands before it."""
    draft = Draft.of_copies([[5, 6, 7], []], torch.device("cpu"), [[-1, -1, 0], []])
    assert draft.parents.tolist() == [[-1, -1, 0], [-1, 0, 1]]
    assert draft.widened(5).parents.tolist() == [[-1, -1, 0, 2, 3], [-1, 0, 1, 2, 3]]
    assert torch.equal(draft.seen[1], torch.ones(4, 4, dtype=torch.bool).tril())


def test_law_of_coupled_sampling():
    """20 calls of 250 rows: 5,000 samples."""
    target = hf_specdec.enable(small(0))
    samples = first_tokens(target, 20, 250, assistant=Bushy(VOCAB), verification="coupled", temperature=0.8)
    law = target_law(target, PROMPT, LogitsProcessorList([TemperatureLogitsWarper(0.8)]), 3, VOCAB)
    assert_follows(samples, law)


@pytest.mark.parametrize("family", ["llama", "mistral8"])
@pytest.mark.parametrize("in_lockstep", [False, True])
def test_rows_may_have_a_drawn_chain_a_tree_or_nothing(models, family, in_lockstep):
    model = models[family]
    ids, mask = prompts(3)
    kwargs = {"attention_mask": mask, "max_new_tokens": 30, "eos_token_id": [2, 7], "pad_token_id": 0}
    kwargs |= {"logits_processor": [test_outputs.Pass()]} if in_lockstep else {}
    plain = model.generate(ids, assistant=False, do_sample=False, **kwargs)
    # From one token, so that the text is known although drafts are drawn.
    for how in ({"do_sample": False}, {"do_sample": True, "top_k": 1, "seed": 0}):
        mixed = Mixed(text=plain)
        assert torch.equal(plain, model.generate(ids, assistant=mixed, **kwargs, **how))
        assert any(set(kinds) == {"chain", "tree", "none"} for kinds in mixed.kinds)
        assert mixed.stats.accepted > 0
    sampled = kwargs | {"do_sample": True, "seed": 5}
    texts = [model.generate(ids, assistant=Mixed(), **sampled) for _ in range(2)]
    assert torch.equal(*texts)


def test_trees_may_be_arms_among_others(models):
    model = models["llama"]
    plain = plain_text(model, 3)
    ids, mask = prompts(3)
    kwargs = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    for arms in (
        [Suffix(max_spec_factor=3.0), Oracle(plain, 20), TokenRecycling()],
        [TokenRecycling(), Suffix(max_spec_factor=3.0), DraftModel(jittered(model))],
    ):
        assert torch.equal(plain, model.generate(ids, assistant=Auto(arms), **kwargs))


# --- where trees cannot be masked -------------------------------------------------------------------------


def warned(caplog):
    return [record for record in caplog.records if "Draft trees need" in record.getMessage()]


@pytest.fixture
def fresh_warnings(caplog):
    logging.Logger.warning_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="hf_specdec.loop")
    return caplog


@pytest.mark.parametrize("drafter", ["oracle", "recycling"])
@pytest.mark.parametrize("family", ["llama", "mistral8"])
def test_attention_maps_come_with_chains(family, drafter, fresh_warnings):
    model = hf_specdec.enable(tiny(family, attn_implementation="eager"))
    given = test_outputs.batch(1) | {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 20}
    plain = model.generate(assistant=False, **given)
    assistant = Oracle(plain.sequences, 12, is_deep=True) if drafter == "oracle" else TokenRecycling()
    for _ in range(2):
        ours = model.generate(assistant=assistant, **given)
        assert torch.equal(plain.sequences, ours.sequences)
        for there, here in zip(plain.attentions, ours.attentions, strict=True):
            assert [layer.shape for layer in here] == [layer.shape for layer in there]
            assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(there, here, strict=True))
    assert drafter != "oracle" or not any(assistant.takes_trees)
    assert hf_specdec.last_stats(model).accepted > 0
    assert len(warned(fresh_warnings)) == 1


@pytest.mark.parametrize("kind", ["flash_attention_2", "flex_attention", "the user's static cache", "no positions"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_where_a_tree_cannot_be_masked_chains_are_drafted_and_it_is_said_once(kind, flash_kernels, fresh_warnings):
    if "attention" in kind:
        model = with_attention(kind)
    else:
        model = hf_specdec.enable(tiny("mpt" if kind == "no positions" else "llama"))
    with torch.compiler.set_stance("force_eager"):
        for num_rows in (1, 3):
            ids, mask = prompts(num_rows)
            kwargs = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
            plain = model.generate(ids, assistant=False, **kwargs)
            if "static" in kind:
                if not StaticLayer.is_croppable:
                    pytest.skip("this host rolls no static cache back: it is refused")
                kwargs[CACHE] = StaticCache(config=model.config, max_cache_len=64)
            oracle = Oracle(plain, 12, is_deep=True)
            assert torch.equal(plain, model.generate(ids, assistant=oracle, **kwargs))
            assert oracle.takes_trees == [False] and oracle.stats.accepted > 0
    assert len(warned(fresh_warnings)) == 1


@pytest.mark.parametrize("family", ["llama", "mistral8", "gemma3"])
def test_a_fixed_cache_of_our_own_holds_trees_too(models, family):
    plain = plain_text(models[family], 3)
    fixed = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(plain, greedy(models[family], plain, 20, is_deep=True, **fixed))


def test_nothing_is_said_where_nobody_plants_trees(fresh_warnings):
    model = hf_specdec.enable(tiny("mpt"))
    model.generate(prompts(1)[0], assistant=PromptLookup(), max_new_tokens=8, do_sample=False)
    assert not warned(fresh_warnings)


def test_a_path_is_verified_no_wider_than_it_is_long(models):
    """The prompt's pass, and passes that mask no tree, read the first path of a tree and nothing behind it."""
    model = hf_specdec.enable(tiny("mpt"))
    plain = plain_text(model, 1)
    widths = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    oracle = Oracle(plain, 30)
    model.generate(prompts(1)[0], assistant=oracle, max_new_tokens=24, do_sample=False, pad_token_id=0)
    hook.remove()
    assert max(widths[1:]) < 15
