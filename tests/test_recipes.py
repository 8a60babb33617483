"""What drafters learn from is what they do when they draft, and learning makes them draft well."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from transformers import DynamicCache

import hf_specdec
from hf_specdec import load_drafter
from hf_specdec.heads import EagleHead
from hf_specdec.provenance import Provenance, stamp
from hf_specdec.publishing import push, write_card
from hf_specdec.training import evaluate
from hf_specdec.training.examples import Example
from hf_specdec.training.features import FeatureStore
from hf_specdec.training.losses import centred, cross_entropy, mean_rows
from hf_specdec.training.recipes import RECIPES, RecipeOptions
from hf_specdec.training.recipes.conditional_drop import draw_slots, keep_all, unused_id
from hf_specdec.training.recipes.eagle3 import Eagle3
from hf_specdec.training.recipes.heads import frequent_ids, head_config, initialise
from hf_specdec.training.recipes.students import chosen_layers
from tests.models import tiny
from tests.training_data import KINDS, answered, overfitted


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=8)


@pytest.fixture(scope="module")
def examples(target):
    return answered(target, 6)


# --- losses -----------------------------------------------------------------------------------------------


def test_the_loss_and_its_gradient_are_those_of_whole_laws():
    generator = torch.Generator().manual_seed(0)
    states, last = (torch.randn(300, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    rows, labels = torch.randn(50, 16, generator=generator, dtype=torch.float64), torch.arange(300) % 50
    states.requires_grad_(True)
    laws = (last @ rows.T).softmax(dim=-1)
    expected = torch.nn.functional.cross_entropy(states @ rows.T, laws, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum() * 0.3, states)
    weight = centred(rows)
    found, is_best = cross_entropy(states, weight, mean_rows(last, weight), labels)
    # The mean row shifts all scores of a position alike: both losses count from where their scores begin.
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum() * 0.3, states)[0], gradient)
    assert torch.equal(is_best, (states @ rows.T).argmax(dim=-1) == labels)


def test_frequent_ids_cover_the_share_or_fill_up_with_low_ids(examples):
    counts = torch.bincount(torch.tensor([token for example in examples for token in example.answer]), minlength=64)
    ids = frequent_ids(examples, 64, 0.8)
    assert counts[ids].sum() >= 0.8 * counts.sum() > counts[ids].sum() - counts[ids].min()
    most = frequent_ids(examples, 64, 0.8, 60)
    assert len(most) == 60 and (most.diff() > 0).all() and set(counts.nonzero()[:, 0].tolist()) <= set(most.tolist())
    asked = [Example((60, 60, 61), (3,), 0.0, "self", True)]
    assert frequent_ids(asked, 64, 0.8, 4).tolist() == [0, 3, 60, 61]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_first_weights_say_what_the_target_says_behind_what_is_tapped(family):
    """A head over what enters the last layer that ignores embeddings has the target's own law."""
    target = tiny(family, num_hidden_layers=8) if family != "gemma3" else tiny(family)
    depth = target.config.num_hidden_layers
    if family == "gemma3":  # its layers have more norms than a head: the attention's part must fit all the same
        assert initialise(EagleHead(head_config(target, 64)), target, torch.arange(64)).fc.weight.isfinite().all()
        return
    config = dataclasses.replace(head_config(target, 64), taps=(depth - 1,))
    head = initialise(EagleHead(config).to(torch.float64), target, torch.arange(64)).bind(target)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(head.layers[0].self_attn, name).weight[:, : config.hidden_size] = 0
    tokens = torch.randint(3, 64, (1, 9))
    output = target(tokens, output_hidden_states=True)
    hidden = head.combine(output.hidden_states[depth - 1])
    laws = head.logits(head(tokens, hidden, torch.arange(9)[None])).softmax(dim=-1)
    torch.testing.assert_close(laws, output.logits.softmax(dim=-1), rtol=1e-4, atol=1e-5)


# --- training is drafting ---------------------------------------------------------------------------------


def shaken(head, scale=0.3):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * scale)
    return head


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}, {"norm_output": True, "fc_norm": True}])
def test_states_of_training_time_test_are_those_of_drafting_with_a_cache(family, changes):
    target = tiny(family, num_hidden_layers=8)
    examples = [*answered(target, 4), *answered(target, 1, length=2), *answered(target, 1, length=1)]
    ids = frequent_ids(examples, 64, 0.9)
    head = EagleHead(head_config(target, len(ids), **changes)).to(torch.float64)
    shaken(initialise(head, target, ids)).bind(target)
    recipe = Eagle3(target, head, RecipeOptions(depth=5))
    texts = FeatureStore(target, recipe.taps).texts(examples)
    rows = recipe.rows(texts)
    steps = [states.split(rows.num_chains) for _, states in recipe.steps(rows)]
    for number, text in enumerate(texts):
        for chain in range(rows.num_chains[number]):
            drafted = drafted_states(head, text, text.prompt_length + chain, 5)
            trained = torch.stack([states[number][chain] for states in steps[: len(drafted)]])
            torch.testing.assert_close(torch.stack(drafted), trained, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_chains_that_are_drawn_read_what_they_would_read_among_all(target, examples):
    recipe = RECIPES["eagle3"].new(target, examples, RecipeOptions(depth=4, decay=0.6))
    rows = recipe.rows(FeatureStore(target, recipe.taps).texts([*examples, *answered(target, 1, length=1)]))
    every = [states for _, states in recipe.steps(rows)]
    drawn = list(recipe.steps(rows, torch.Generator().manual_seed(3)))
    for step, (chains, states) in enumerate(drawn):
        torch.testing.assert_close(states, every[step][chains])
        if step:
            assert rows.is_text[chains, step].all()
            going_on = int(rows.is_text[drawn[step - 1][0], step].sum())
            assert len(chains) == math.ceil(0.6 * going_on) < len(drawn[step - 1][0])


def drafted_states(head, text, place, depth):
    """States of a head that has read a text up to a place, and then drafts the text itself."""
    cache, found = DynamicCache(), []
    hidden = head.combine(text.taps[None, :place])
    states = head(text.tokens[None, 1 : place + 1], hidden, torch.arange(place)[None], None, cache)[:, -1:]
    for step in range(depth):
        found.append(states[0, 0])
        following = place + 1 + step
        if following >= len(text.tokens):
            break
        fed = head.feedback(states)
        states = head(text.tokens[None, following : following + 1], fed, torch.tensor([[place + step]]), None, cache)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_agreement_is_what_a_drafter_drafts_in_generate(kind, target, examples, tmp_path):
    recipe, texts, _ = overfitted(kind, target, examples, steps=15)
    recipe.save(tmp_path)
    # What is on disk is rounded; the recipe counts with the same weights.
    drafter = load_drafter(str(tmp_path), target)
    with torch.no_grad():
        for weight in filter(lambda weight: weight.requires_grad, recipe.module.parameters()):
            weight.copy_(weight.bfloat16())
    counted = evaluate.total(map(evaluate.count, recipe.agreement(texts)))
    tokens = rounds = 0
    enabled = hf_specdec.enable(target)
    for example in examples:
        prompt = torch.tensor([example.prompt])
        length = len(example.answer)
        arguments = {"max_new_tokens": length, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        output = enabled.generate(prompt, assistant=drafter, num_draft_tokens=evaluate.CHAIN, **arguments)
        assert tuple(output[0, prompt.shape[1] :].tolist()) == example.answer
        stats = hf_specdec.last_stats(enabled)
        rounds += stats.rounds
        tokens += length
    hf_specdec.disable(target)
    drafts_first = kind in ("pard", "draft")  # they draft behind the prompt itself, heads only behind the first token
    if not drafts_first:
        assert (counted.tokens, counted.rounds) == (tokens - len(examples), rounds - len(examples))
    else:
        assert counted.tokens == tokens - len(examples) and counted.length > 1


# --- learning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_a_batch_by_heart_and_drafts_it_fetched_from_a_hub(kind, target, examples, tmp_path, hub):
    untrained = RECIPES[kind].new(target, examples, KINDS[kind])
    texts = FeatureStore(target, untrained.taps).texts(examples)
    before = evaluate.total(map(evaluate.count, untrained.agreement(texts)))
    recipe, texts, losses = overfitted(kind, target, examples)
    after = evaluate.total(map(evaluate.count, recipe.agreement(texts)))
    assert losses[-1] < losses[0]
    assert after.length > max(2.0, before.length + 0.5), (before, after)
    (tmp_path / "made").mkdir()
    recipe.save(tmp_path / "made")
    stamp(tmp_path / "made", Provenance.of(kind, target, "org/tiny", recipe=recipe.describe()))
    name = f"org/tiny-{kind}"
    write_card(tmp_path / "made", name)
    push(tmp_path / "made", name)
    drafter = load_drafter(name, target)
    drafter.check(target)
    enabled = hf_specdec.enable(target)
    for example in examples:
        prompt = torch.tensor([example.prompt])
        arguments = {"max_new_tokens": len(example.answer), "eos_token_id": None, "pad_token_id": 0}
        output = enabled.generate(prompt, assistant=drafter, **arguments)
        assert tuple(output[0, prompt.shape[1] :].tolist()) == example.answer
    hf_specdec.disable(target)
    assert drafter.stats.mean_acceptance_length > 1.5


def test_the_target_itself_is_never_changed(target, examples):
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    for kind in KINDS:
        overfitted(kind, target, examples[:2], steps=2)
    assert all(torch.equal(before[name], weight) for name, weight in target.state_dict().items())


# --- conditional drop -------------------------------------------------------------------------------------


def test_slots_are_fewer_the_further_ahead_and_never_without_those_before():
    slots = draw_slots(torch.arange(5, 105), 6, 0.7, 0.3, seed=3)
    kept = [set(slots.places[slots.depths == depth].tolist()) for depth in range(1, 6)]
    assert [len(places) for places in kept] == [70, 49, 34, 30, 30]
    assert all(deeper <= places for places, deeper in itertools.pairwise(kept))
    again, other = draw_slots(torch.arange(5, 105), 6, 0.7, 0.3, 3), draw_slots(torch.arange(5, 105), 6, 0.7, 0.3, 4)
    assert torch.equal(again.places, slots.places) and not torch.equal(other.places, slots.places)


def test_slots_see_their_place_and_their_own_chain_only():
    slots = keep_all(torch.tensor([1, 2]), 3)
    sees = slots.mask(3)[0, 0].int().tolist()
    assert slots.places.tolist() == [1, 2, 1, 2] and slots.depths.tolist() == [1, 1, 2, 2]
    assert sees == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 0, 1],
    ]


def test_the_mask_is_an_id_no_text_holds():
    assert unused_id({0, 1, 3}, 5) == 2
    with pytest.raises(ValueError, match="none is left"):
        unused_id({0, 1}, 2)


def test_students_begin_with_layers_from_first_to_last():
    assert chosen_layers(30, 4) == [0, 10, 19, 29] and chosen_layers(8, 1) == [0]
    with pytest.raises(ValueError, match="fewer layers"):
        chosen_layers(4, 4)
