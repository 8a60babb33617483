"""Every published form of a head opens unchanged, computes what a slow reading of its file computes, and drafts so."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import hf_specdec
from hf_specdec import load_drafter
from hf_specdec.checkpoints import load_head, recognise
from tests import published_heads as published
from tests import reference_heads as reference
from tests.models import prompts, tiny
from tests.published_heads import FORMS, H, V, of

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
COMBINATIONS = [
    dict.fromkeys(chosen, True)
    for count in range(len(NORMS) + 1)
    for chosen in itertools.combinations(NORMS, count)
]  # fmt: skip
OPTIONS = {
    f"{kind}: {', '.join(options) or 'none'}": published.speculators_peagle(**options)
    if kind == "peagle"
    else published.speculators("Eagle3DraftModel", **options)
    for kind in ("eagle3", "peagle")
    for options in COMBINATIONS
}
LENGTH = 3  # tokens of a draft


@pytest.fixture(scope="module")
def targets():
    """By width."""
    return {width: tiny(num_hidden_layers=reference.DEPTH, hidden_size=width) for width in (H, 2 * H)}


def written(form, folder) -> str:
    return reference.write(folder, form.config, form.tensors, pickled=form.is_pickled)


def slow(form, target) -> reference.ReferenceHead:
    tensors = {name: x.double() if x.is_floating_point() else x for name, x in form.tensors.items()}
    embedding, lm_head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    return reference.ReferenceHead(form.config, tensors, embedding, lm_head)


def by_form(forms):
    return pytest.mark.parametrize("form", forms.values(), ids=list(forms))


def agree(ours, expected):
    # Frequencies of long contexts are float32, whose last digit depends on the order of the steps to them.
    torch.testing.assert_close(ours, torch.stack(expected), atol=1e-6, rtol=1e-6)


@by_form(FORMS | OPTIONS)
@torch.no_grad()
def test_every_form_says_what_its_file_says(form, targets, tmp_path):
    """States of the target in two passes, and then either two states fed back or two masked slots."""
    target, location = targets[form.target_hidden_size], written(form, tmp_path)
    found = recognise(location)
    head, plain = load_head(location, target), slow(form, target)
    assert (found.name, head.config.taps) == (form.dialect, form.taps)
    assert found.mask_token_id == (published.MASK if form.is_parallel else None)
    tokens = torch.tensor([5, 17, 40, 33, 8, 21])
    features = torch.randn(4, form.target_hidden_size * max(1, len(form.taps)), dtype=torch.float64)
    hidden = [plain.combined(feature) for feature in features]
    if form.is_parallel:
        tokens[4:] = published.MASK
    cache, said = DynamicCache(), []

    def read(start, stop, states):
        made = head(tokens[None, start:stop], states[None], torch.arange(start, stop)[None], None, cache)[0]
        said.append(head.logits(made))
        return head.feedback(made[-1:])

    read(0, 2, head.combine(features[:2]))
    fed = read(2, 4, head.combine(features[2:]))
    for index in (4, 5):
        fed = read(index, index + 1, head.masked_hidden()[None] if form.is_parallel else fed)
        last = plain.states(tokens[:index].tolist(), hidden, list(range(index)), torch.ones(index, index).tril())[-1]
        hidden.append(plain.masked() if form.is_parallel else plain.feedback(last))
    expected = plain.states(tokens.tolist(), hidden, list(range(6)), torch.ones(6, 6).tril())
    agree(torch.cat(said), [plain.logits(state) for state in expected])


def from_scratch(form, plain, target, text: list[int]) -> list[int]:
    """What a head drafts behind a text by the slow reading, from the target's own states."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    taps = form.taps or (target.config.num_hidden_layers,)
    features = torch.cat([states[tap][0] for tap in taps], dim=-1)[:-1]
    hidden, tokens, drafted = [plain.combined(feature) for feature in features], text[1:], []
    offsets = form.tensors.get("d2t", torch.zeros(V, dtype=torch.long))
    while len(drafted) < LENGTH:
        width = len(tokens)
        last = plain.states(tokens, hidden, list(range(width)), torch.ones(width, width).tril())[-1]
        best = int(plain.logits(last).argmax())
        drafted.append(best + int(offsets[best]))
        tokens = [*tokens, published.MASK if form.is_parallel else drafted[-1]]
        hidden = [*hidden, plain.masked() if form.is_parallel else plain.feedback(last)]
    return drafted


def drafts(location, target, max_new_tokens=6) -> list[tuple[list[int], list[int]]]:
    """The text before every draft, and the draft."""
    ids, _ = prompts(1, longest=6)
    drafter = load_drafter(location, target)
    with hf_specdec.trace() as traces:
        hf_specdec.enable(target).generate(
            ids, assistant=drafter, num_draft_tokens=LENGTH, max_new_tokens=max_new_tokens, do_sample=False
        )
    text, found = list(traces[0].prompts[0]), []
    for turn in traces[0].rounds:
        row = turn.rows[0]
        if row.drafted:
            found.append((list(text), row.drafted))
        text += row.emitted
    return found


@by_form(FORMS)
@torch.no_grad()
def test_every_form_drafts_what_its_file_says(form, targets, tmp_path):
    """With the target's own states: a hidden state too low, a token too early or an id of the head would show."""
    target = targets[form.target_hidden_size]
    found, plain = drafts(written(form, tmp_path), target), slow(form, target)
    assert found and len(found[0][1]) == LENGTH
    for text, drafted in found:
        assert drafted == from_scratch(form, plain, target, text)[: len(drafted)]


# --- one head, two dialects -------------------------------------------------------------------------------


def as_speculators_eagle3(form) -> published.Form:
    """A head of the research format under the names and settings of the speculators library."""
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in form.tensors.items()}
    made = published.speculators("Eagle3DraftModel", tensors=tensors)
    return with_layer_settings(made, form)


def as_speculators_peagle(form) -> published.Form:
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in form.tensors.items()}
    made = published.speculators("PEagleDraftModel", "peagle", tensors, mask_token_id=published.MASK)
    return with_layer_settings(made, form)


def with_layer_settings(made, form) -> published.Form:
    layer = {**form.config, "architectures": None}
    return replace(made, config=made.config | {"transformer_layer_config": layer})


PAIRS = {
    "EAGLE-1": (FORMS["yuhuili/EAGLE-LLaMA3-Instruct-8B"], published.old_speculators),
    "EAGLE-1 with a bias": (FORMS["yuhuili/EAGLE-Qwen2"], published.old_speculators),
    "EAGLE-1 with norms": (FORMS["EAGLE-1 with extra norms"], published.old_speculators),
    "EAGLE-3": (FORMS["nebius/EAGLE3-gpt-oss-20b"], as_speculators_eagle3),
    "P-EAGLE": (FORMS["PeagleLlama"], as_speculators_peagle),
    "P-EAGLE with biases": (FORMS["amazon/GPT-OSS-20B-P-EAGLE"], as_speculators_peagle),
}


@pytest.mark.parametrize(("form", "rewritten"), PAIRS.values(), ids=list(PAIRS))
def test_a_head_drafts_the_same_in_another_dialect(form, rewritten, targets, tmp_path):
    other = rewritten(form)
    first, second = (drafts(written(x, tmp_path / x.dialect), targets[H], 24) for x in (form, other))
    assert other.dialect != form.dialect and other.dialect.startswith("speculators")
    assert first == second and len(first) > 5 and len({tuple(drafted) for _, drafted in first}) > 1


# --- PARD -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_pard_model_opens_unchanged_and_drafts_from_one_pass(targets, tmp_path):
    """A complete model with the id of its mask in its settings."""
    target, model = targets[H], tiny(seed=3)
    model.config.update({"pard_token": published.MASK, "spd_type": "pard"})
    model.save_pretrained(tmp_path)
    found = drafts(str(tmp_path), target)
    assert found and len(found[0][1]) == LENGTH
    for text, drafted in found:
        read = torch.tensor([text + [published.MASK] * (LENGTH - 1)])
        expected = model(read).logits[0, -LENGTH:].argmax(dim=-1).tolist()
        assert drafted == expected[: len(drafted)]


# --- files of which a tensor does not fit -----------------------------------------------------------------


CHANGES = {
    "missing": lambda x: None,
    "no dimension": lambda x: x.flatten()[0],
    "one more row": lambda x: torch.cat([x, x[:1]]),
    "one column less": lambda x: x[..., :-1],
    "one more dimension": lambda x: x[None],
    "not a number": lambda x: x / 0,
}


def may_change(form, name, change) -> bool:
    """Whether a head opens although this was done to a tensor."""
    if change == "not a number":
        return not form.tensors[name].is_floating_point()
    if change == "one more dimension":
        return name == "mask_hidden"
    if change != "missing":
        return False
    if form.dialect == "deepspec":
        return False
    lacks_ids = name in ("d2t", "t2d") and {"d2t", "t2d"} <= set(form.tensors)
    is_whole = name == "lm_head.weight" and len(form.tensors[name]) == V
    shares_table = name == "embed_tokens.weight" and form.target_hidden_size == H
    return lacks_ids or is_whole or shares_table or name == "fc.bias"


@pytest.mark.parametrize("change", CHANGES)
@by_form(FORMS)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(form, change, targets, tmp_path):
    """Whichever it is. Where shapes contradict each other, either may be named, with the shape that was found."""
    location, file = None, "pytorch_model.bin" if form.is_pickled else "model.safetensors"
    for name, value in form.tensors.items():
        if may_change(form, name, change):
            continue
        changed = CHANGES[change](value)
        tensors = {key: x for key, x in (form.tensors | {name: changed}).items() if x is not None}
        location = reference.write(tmp_path, form.config, tensors, pickled=form.is_pickled)
        with pytest.raises(ValueError, match=file) as raised:
            load_head(location, targets[form.target_hidden_size])
        said = str(raised.value)
        assert f"{location}/{file}" in said, (name, said)
        if change == "missing" or "dimension" in change or change == "not a number":
            assert name in said, said
        else:
            assert any(f"{other}" in said and str(tuple(x.shape)) in said for other, x in tensors.items()), (name, said)
    assert location is not None


def test_a_vocabulary_that_was_never_cut_may_have_empty_maps(targets, tmp_path):
    """As research code stores them: zeros that it throws away when both vocabularies have one size."""
    form = FORMS["yuhuili/EAGLE3-LLaMA3.1"]
    maps = {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.zeros(V, dtype=torch.bool)}
    whole = form.tensors | of({"lm_head.weight": (V, H)}, 1) | maps
    head = load_head(reference.write(tmp_path, form.config | {"draft_vocab_size": V}, whole), targets[H])
    assert torch.equal(head.draft_ids, torch.arange(V))
    maps["t2d"][3] = True
    with pytest.raises(ValueError, match=r"model\.safetensors: d2t and t2d name different ids"):
        load_head(reference.write(tmp_path, form.config, whole | maps), targets[H])
