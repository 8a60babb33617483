"""The output dict and the cache handed back are those of plain `generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_specdec
from hf_specdec import DraftModel, PromptLookup, TokenRecycling, host
from tests.models import jittered, prompts, tiny

NEVER = 4  # an id that the models below do not emit
CACHE = host.CACHE_NAME
ALL_OUTPUTS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}
DRAFTERS = ("itself", "similar", "lookup")
FAMILIES = ("llama", "mistral8", "gemma3", "gpt2")
VARIED = {"gemma3": {"seed": 2, "initializer_range": 0.05}}  # with which the family does not repeat one token


@pytest.fixture(scope="module")
def families():
    return {family: hf_specdec.enable(tiny(family, **VARIED.get(family, {}))) for family in FAMILIES}


@pytest.fixture(scope="module")
def llama(families):
    return families["llama"]


def drafter_of(kind: str, model):
    if kind == "lookup":
        return PromptLookup()
    return DraftModel(model if kind == "itself" else jittered(model), num_draft_tokens=4)


class Pass(LogitsProcessor):
    """Changes nothing, but nobody can know: rows advance in lockstep."""

    def __call__(self, input_ids, scores):
        return scores


def batch(num_rows: int) -> dict:
    ids, mask = prompts(num_rows)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "do_sample": False,
        "pad_token_id": 0,
        "max_new_tokens": 14,
        "eos_token_id": NEVER,
    }


def both(model, kind: str, **given):
    """Output dicts of plain and speculative generation."""
    plain = model.generate(assistant=False, return_dict_in_generate=True, **given)
    ours = model.generate(assistant=drafter_of(kind, model), return_dict_in_generate=True, **given)
    assert torch.equal(ours.sequences, plain.sequences)
    assert hf_specdec.last_stats(model).drafted > 0
    return plain, ours


def both_with(model, kind: str, num_rows: int, **changes):
    """The same for a batch, with everything recorded."""
    asked = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    return both(model, kind, **(batch(num_rows) | asked | changes))


def close(ours, plain, tolerance: float = 1e-9) -> bool:
    return ours.shape == plain.shape and ours.dtype == plain.dtype and torch.allclose(ours, plain, 0, tolerance)


def row_ends(sequences: torch.Tensor, ends: list[int], prompt_length: int = 12) -> list[int]:
    """Tokens every row emitted, its end-of-sequence token included."""
    emitted = sequences[:, prompt_length:].tolist()
    return [next((n for n, t in enumerate(row, 1) if t in ends), len(row)) for row in emitted]


def assert_same_steps(ours, plain, lengths: list[int], zero_fill: bool = True) -> None:
    """Scores, logits and states of unfinished rows, step by step; float32 logits, as the host casts them."""
    for name in ("scores", "logits"):
        mine, theirs = getattr(ours, name), getattr(plain, name)
        assert isinstance(mine, tuple) and len(mine) == len(theirs) == max(lengths)
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype == torch.float32
            for row, length in enumerate(lengths):
                if step < length:
                    # Equal up to the rounding of float64 in front of the cast to float32.
                    assert torch.allclose(a[row], b[row], rtol=2e-7, atol=1e-9)
                elif zero_fill:
                    assert not a[row].any()
    mine, theirs = ours.hidden_states, plain.hidden_states
    assert isinstance(mine, tuple) and len(mine) == len(theirs)
    for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert isinstance(a, tuple) and len(a) == len(b)
        for mine_layer, their_layer in zip(a, b, strict=True):
            assert mine_layer.shape == their_layer.shape and mine_layer.dtype == their_layer.dtype
            for row, length in enumerate(lengths):
                if step < length:
                    assert torch.allclose(mine_layer[row], their_layer[row], rtol=0, atol=1e-9)
                elif zero_fill:
                    assert not mine_layer[row].any()


# --- scores, logits, hidden states ------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["similar", "lookup"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_the_output_dict_is_plains(families, family, kind, num_rows):
    plain, ours = both_with(families[family], kind, num_rows, repetition_penalty=1.2)
    assert type(ours) is type(plain)
    assert_same_steps(ours, plain, [14] * num_rows)


@pytest.mark.parametrize("kind", ["similar", "lookup"])
@pytest.mark.parametrize("family", ["llama", "mistral8"])
@pytest.mark.parametrize("row", [0, 2])
def test_entries_of_finished_rows_are_zeros(families, family, kind, row):
    model = families[family]
    emitted = model.generate(assistant=False, **batch(3))[:, 12:]
    ends = [int(emitted[row, 4]), NEVER]
    plain, ours = both_with(model, kind, 3, eos_token_id=ends)
    lengths = row_ends(plain.sequences, ends)
    assert min(lengths) < max(lengths)
    assert_same_steps(ours, plain, lengths)


@pytest.mark.parametrize("kind", ["similar", "lookup"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_steps_judged_one_by_one_are_recorded_alike(llama, kind, num_rows):
    emitted = llama.generate(assistant=False, **batch(num_rows))[:, 12:]
    ends = [int(emitted[num_rows - 1, 4]), NEVER]
    processors = LogitsProcessorList([Pass()])
    plain, ours = both_with(llama, kind, num_rows, eos_token_id=ends, logits_processor=processors)
    assert_same_steps(ours, plain, row_ends(plain.sequences, ends), zero_fill=False)


@pytest.mark.parametrize("asked", ["output_scores", "output_logits", "output_hidden_states", None])
def test_only_what_was_asked_for_is_recorded(llama, asked):
    plain, ours = both(llama, "similar", **batch(1), **({asked: True} if asked else {}))
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert (getattr(ours, name) is None) == (getattr(plain, name) is None), name
    assert not hasattr(plain, "stats") and ours.stats.emitted == 14
    assert [key for key in ours if key != "stats"] == list(plain)


@pytest.mark.parametrize("family", ["llama", "mistral8", "gemma3"])
@pytest.mark.parametrize("assistant", ["ngram", "good"])
def test_attention_maps_of_one_row_are_plains(family, assistant):
    model = hf_specdec.enable(tiny(family, attn_implementation="eager"))
    given = batch(1) | {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 20}
    plain = model.generate(assistant=False, **given).attentions
    ours = model.generate(assistant=jittered(model) if assistant == "good" else assistant, **given).attentions
    assert len(ours) == len(plain)
    for there, here in zip(plain, ours, strict=True):
        assert [layer.shape for layer in here] == [layer.shape for layer in there]
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(there, here, strict=True))


def test_attention_maps_of_a_batch_are_refused_rather_than_left_out():
    model = hf_specdec.enable(tiny(attn_implementation="eager"))
    given = batch(3) | {"return_dict_in_generate": True, "output_attentions": True}
    assert model.generate(assistant=False, **given).attentions is not None
    with pytest.raises(ValueError, match="output_attentions=True"):
        model.generate(assistant=PromptLookup(), **given)


def test_outputs_without_a_dict_are_plain_ids(llama):
    given = batch(2) | {"output_scores": True, "output_hidden_states": True}
    plain = llama.generate(assistant=False, **given)
    ours = llama.generate(assistant=PromptLookup(), **given)
    assert type(ours) is torch.Tensor and torch.equal(ours, plain)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_generation_config_object_may_ask(llama, num_rows):
    ids, mask = prompts(num_rows)
    config = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, **ALL_OUTPUTS)
    given = {"input_ids": ids, "attention_mask": mask, "generation_config": config}
    plain = llama.generate(assistant=False, **given)
    ours = llama.generate(assistant=PromptLookup(), **given)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same_steps(ours, plain, row_ends(plain.sequences, [2]))


def test_sampled_scores_belong_to_the_sampled_tokens(llama):
    given = batch(2) | {"do_sample": True, "top_k": 5, "seed": 3}
    ours = llama.generate(
        assistant=drafter_of("similar", llama), return_dict_in_generate=True, output_scores=True, **given
    )
    for step, scores in enumerate(ours.scores):
        assert (torch.isfinite(scores).sum(dim=1) == 5).all()
        assert torch.isfinite(scores.gather(1, ours.sequences[:, 12 + step, None])).all()
    # The same text read by the model alone.
    logits = llama(ours.sequences, attention_mask=torch.nn.functional.pad(prompts(2)[1], (0, 14), value=1)).logits
    kept = ours.scores[5][0].isfinite()
    assert torch.allclose(ours.scores[5][0][kept], logits[0, 12 + 4].float()[kept], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_prompts_given_as_embeddings(llama, kind, num_rows):
    given = batch(num_rows)
    embeddings = llama.get_input_embeddings()(given.pop("input_ids"))
    plain = llama.generate(inputs_embeds=embeddings, assistant=False, **given, **ALL_OUTPUTS)
    ours = llama.generate(inputs_embeds=embeddings, assistant=drafter_of(kind, llama), **given, **ALL_OUTPUTS)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same_steps(ours, plain, [14] * num_rows)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "mistral8"])
def test_prompts_read_in_chunks(families, family, num_rows):
    plain, ours = both_with(families[family], "similar", num_rows, prefill_chunk_size=5)
    assert_same_steps(ours, plain, [14] * num_rows)


# --- the cache handed back --------------------------------------------------------------------------------


def slots(cache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.layers[layer].keys, cache.layers[layer].values


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("kind", ["similar", "lookup"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_of_one_row_is_plains(families, family, kind, length):
    given = batch(1) | {"max_new_tokens": length}
    model = families[family]
    plain = model.generate(assistant=False, return_dict_in_generate=True, **given)
    ours = model.generate(assistant=drafter_of(kind, model), return_dict_in_generate=True, **given)
    mine, theirs = ours[CACHE], plain[CACHE]
    assert type(mine) is type(theirs) and len(mine.layers) == len(theirs.layers)
    assert mine.get_seq_length() == theirs.get_seq_length() == 12 + length - 1
    for layer in range(len(mine.layers)):
        assert type(mine.layers[layer]) is type(theirs.layers[layer])
        for a, b in zip(slots(mine, layer), slots(theirs, layer), strict=True):
            assert close(a, b)
        for name in ("record_past", "cumulative_length"):
            assert getattr(mine.layers[layer], name, None) == getattr(theirs.layers[layer], name, None)


@pytest.mark.parametrize("kind", ["similar", "lookup"])
@pytest.mark.parametrize("one_ends", [False, True])
@pytest.mark.parametrize(("family", "lockstep"), [*((family, False) for family in FAMILIES), ("mistral8", True)])
def test_the_cache_of_a_batch_is_plains_where_rows_go_on(families, family, kind, one_ends, lockstep):
    model = families[family]
    given = batch(3) | ({"logits_processor": LogitsProcessorList([Pass()])} if lockstep else {})
    if one_ends:
        emitted = model.generate(assistant=False, **given)[:, 12:].tolist()
        first = next(t for t in emitted[1] if t not in emitted[0] + emitted[2])
        given |= {"eos_token_id": [first, NEVER]}
    plain, ours = both(model, kind, **given)
    lengths = row_ends(plain.sequences, [given["eos_token_id"]] if not one_ends else given["eos_token_id"])
    goes_on = [row for row, length in enumerate(lengths) if length == max(lengths)]
    assert len(goes_on) == (2 if one_ends else 3)
    mine, theirs = ours[CACHE], plain[CACHE]
    assert mine.get_seq_length() == theirs.get_seq_length()
    for layer in range(len(mine.layers)):
        for a, b in zip(slots(mine, layer), slots(theirs, layer), strict=True):
            assert a.shape == b.shape
            for row in goes_on:
                shown = int(given["attention_mask"][row].sum()) + max(lengths) - 1  # slots that are no padding
                assert close(a[row, :, -shown:], b[row, :, -shown:])
            if a.shape[2] == 12 + max(lengths) - 1:  # the layer keeps everything: rows that ended, to their last token
                for row in {0, 1, 2}.difference(goes_on):
                    own = slice(12 - int(given["attention_mask"][row].sum()), 12 + lengths[row])
                    assert close(a[row, :, own], b[row, :, own])


def second_turn(model, assistant, first, more: torch.Tensor, given: dict, mask: torch.Tensor | None, only_new: bool):
    ids = torch.cat([first.sequences, more], dim=1)
    if mask is not None:
        mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    new = ids.shape[1] - first[CACHE].get_seq_length()
    return model.generate(
        ids[:, -new:] if only_new else ids,
        attention_mask=mask,
        assistant=assistant,
        return_dict_in_generate=True,
        **{CACHE: first[CACHE]},
        **{name: value for name, value in given.items() if name not in ("input_ids", "attention_mask")},
    )


@pytest.mark.parametrize("kind", ["similar", "lookup"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_second_turn_goes_on_from_the_returned_cache(families, family, kind, num_rows):
    model = families[family]
    given = batch(num_rows)
    more = prompts(num_rows, 5, seed=9)[0].clamp(min=3)
    mask = torch.nn.functional.pad(given["attention_mask"], (0, 14), value=1)
    turns = []
    for assistant in (False, drafter_of(kind, model)):
        first = model.generate(assistant=assistant, return_dict_in_generate=True, **given)
        turns.append(second_turn(model, assistant, first, more, given, mask, only_new=False))
    plain, ours = turns
    assert torch.equal(ours.sequences, plain.sequences)
    assert plain.sequences.shape[1] == 12 + 14 + 5 + 14
    assert ours[CACHE].get_seq_length() == plain[CACHE].get_seq_length()
    # Reading everything anew says the same.
    anew = model.generate(plain.sequences[:, :-14], attention_mask=mask_of(mask, more), assistant=False, **rest(given))
    assert torch.equal(anew, plain.sequences)


def mask_of(mask: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return torch.cat([mask, torch.ones_like(more)], dim=1)


def rest(given: dict) -> dict:
    return {name: value for name, value in given.items() if name not in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", ["llama", "mistral8"])
def test_a_second_turn_may_be_given_only_the_new_tokens(families, family, kind):
    model = families[family]
    given, more = batch(1), prompts(1, 5, seed=9)[0]
    mask = torch.ones(1, 26, dtype=torch.long)
    turns = []
    for assistant in (False, drafter_of(kind, model)):
        first = model.generate(assistant=assistant, return_dict_in_generate=True, **given)
        turns.append(second_turn(model, assistant, first, more, given, mask, only_new=True))
    assert torch.equal(turns[1].sequences, turns[0].sequences)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_second_turn_after_rows_have_ended(llama, kind):
    """The mask hides the filling behind ended rows; their end-of-sequence token is part of the text."""
    given = batch(3)
    emitted = llama.generate(assistant=False, **given)[:, 12:].tolist()
    ends = [next(t for t in emitted[1] if t not in emitted[0] + emitted[2]), NEVER]
    given |= {"eos_token_id": ends}
    more = prompts(3, 5, seed=9)[0].clamp(min=3)
    turns = []
    for assistant in (False, drafter_of(kind, llama)):
        first = llama.generate(assistant=assistant, return_dict_in_generate=True, **given)
        lengths = torch.tensor(row_ends(first.sequences, ends))
        shown = torch.arange(first.sequences.shape[1] - 12) < lengths[:, None]
        mask = torch.cat([given["attention_mask"], shown.long()], dim=1)
        assert lengths.min() < lengths.max()
        turns.append(second_turn(llama, assistant, first, more, given, mask, only_new=False))
    plain, ours = turns
    # Nothing but the text decides: reading it anew says the same.
    anew = llama.generate(plain.sequences[:, :-14], attention_mask=mask_of(mask, more), assistant=False, **rest(given))
    assert torch.equal(anew, plain.sequences)
    assert torch.equal(ours.sequences, plain.sequences)


@pytest.mark.parametrize("kind", ["similar", "lookup"])
@pytest.mark.parametrize(("family", "with_config"), [*((family, True) for family in FAMILIES), ("mistral8", False)])
def test_a_cache_of_the_user_is_filled_as_plain_fills_it(families, family, kind, with_config):
    model = families[family]
    given = batch(1)
    text = config = model.config.get_text_config(decoder=True)
    caches = [DynamicCache(config=text) if with_config else DynamicCache() for _ in range(2)]
    plain, ours = (
        model.generate(assistant=assistant, **given, **{CACHE: cache})
        for assistant, cache in zip((False, drafter_of(kind, model)), caches, strict=True)
    )
    assert torch.equal(ours, plain)
    theirs, mine = caches
    assert mine.get_seq_length() == theirs.get_seq_length() == 25
    for layer in range(config.num_hidden_layers):
        for a, b in zip(slots(mine, layer), slots(theirs, layer), strict=True):
            assert close(a, b)
    # A third text, drafted or not, goes on from either.
    ids = torch.cat([plain, prompts(1, 4, seed=3)[0]], dim=1)
    ends = [model.generate(ids, assistant=False, **rest(given), **{CACHE: cache}) for cache in (theirs, mine)]
    assert torch.equal(*ends)


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_end_in_lockstep_are_read_to_their_ends(seed):
    """A row may end with a token of the target's own while others go on; a second turn then sees that token."""
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(3, seed=seed)
    ends = list(range(2, 40, 3))
    kwargs = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    kwargs |= {"return_dict_in_generate": True, "encoder_no_repeat_ngram_size": 2}  # judged token by token

    def two_turns(assistant):
        first = target.generate(ids, attention_mask=mask, assistant=assistant, **kwargs)
        new = first.sequences[:, ids.shape[1] :]
        has_ended = torch.isin(new, torch.tensor(ends)).long().cumsum(dim=1)
        is_text = torch.nn.functional.pad(has_ended, (1, 0))[:, :-1] == 0
        text = torch.cat([first.sequences, torch.tensor([[9, 10, 12]] * 3)], dim=1)
        seen = torch.cat([mask, is_text.long(), torch.ones(3, 3, dtype=torch.long)], dim=1)
        cache = {CACHE: first[CACHE]}
        return target.generate(text, attention_mask=seen, assistant=assistant, **cache, **kwargs).sequences

    plain = two_turns(False)
    for drafter in (DraftModel(jittered(target, 0.02), num_draft_tokens=5), TokenRecycling(8)):
        assert torch.equal(two_turns(drafter), plain)


@pytest.mark.parametrize("kind", ["similar", "lookup"])
@pytest.mark.parametrize("family", ["llama", "mistral8", "gemma3"])
def test_many_turns_with_one_cache(families, family, kind):
    model = families[family]
    texts = []
    for assistant in (False, drafter_of(kind, model)):
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        ids = prompts(1)[0]
        for turn in range(4):
            given = rest(batch(1)) | {"max_new_tokens": 5 + turn}
            ids = model.generate(ids, assistant=assistant, **given, **{CACHE: cache})
            ids = torch.cat([ids, prompts(1, 3, seed=turn)[0]], dim=1)
        texts.append(ids)
    assert torch.equal(*texts)


@pytest.mark.parametrize("family", ["llama", "mistral8"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_an_exception_leaves_no_unverified_token_in_a_users_cache(family, num_rows):
    target = hf_specdec.enable(tiny(family))
    ids, mask = prompts(num_rows)
    cache = DynamicCache(config=target.config)
    calls = []

    def fails_late(input_ids, scores, **kwargs):
        calls.append(input_ids.shape[1])
        if len(calls) == 6:
            raise RuntimeError("user code")
        return torch.zeros(len(input_ids), dtype=torch.bool)

    kwargs = {"attention_mask": mask, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    with pytest.raises(RuntimeError, match="user code"):
        target.generate(ids, assistant=target, stopping_criteria=[fails_late], **(kwargs | {host.CACHE_NAME: cache}))
    text = target.generate(ids, assistant=False, **kwargs)
    length = cache.get_seq_length()
    assert 12 <= length <= 12 + 6
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    more = {"attention_mask": torch.ones_like(text) * 1, "max_new_tokens": 5}
    more["attention_mask"][:, :12] = mask
    again = target.generate(text, assistant=False, **(kwargs | more | {host.CACHE_NAME: cache}))
    fresh = target.generate(text, assistant=False, **(kwargs | more))
    assert torch.equal(again, fresh)


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_padded_cache_is_returned_as_plain_leaves_it(num_rows, implementation):
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(3)
    ids, mask = ids[-num_rows:], mask[-num_rows:]
    ids = torch.nn.functional.pad(ids, (30, 0))  # so much padding that the cache is compacted on the way
    mask = torch.nn.functional.pad(mask, (30, 0))
    kwargs = {"attention_mask": mask, "max_new_tokens": 15, "eos_token_id": None, "pad_token_id": 0}
    kwargs |= {"cache_implementation": implementation, "return_dict_in_generate": True}
    plain = target.generate(ids, assistant=False, **kwargs)
    ours = target.generate(ids, assistant=jittered(target), **kwargs)
    assert torch.equal(plain.sequences, ours.sequences)
    length = ids.shape[1] + 14
    for there, here in zip(plain[host.CACHE_NAME].layers, ours[host.CACHE_NAME].layers, strict=True):
        assert int(here.get_seq_length()) == int(there.get_seq_length()) == length
        first = (mask == 0).sum(dim=1)
        for row in range(num_rows):
            assert torch.allclose(here.keys[row, :, first[row] : length], there.keys[row, :, first[row] : length])


@pytest.mark.parametrize("family", ["mistral8", "gemma3"])
def test_a_users_cache_without_a_config_keeps_windows_right_in_a_batch(family):
    target = hf_specdec.enable(tiny(family))
    ids, mask = prompts(3)
    kwargs = {"attention_mask": mask, "max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(ids, assistant=False, **(kwargs | {host.CACHE_NAME: DynamicCache()}))
    for assistant in (jittered(target), PromptLookup(1, 3)):
        ours = target.generate(ids, assistant=assistant, **(kwargs | {host.CACHE_NAME: DynamicCache()}))
        assert torch.equal(plain, ours)


def test_an_interrupt_inside_a_pass_leaves_a_users_cache_whole():
    target = hf_specdec.enable(tiny())
    ids, _ = prompts(1)
    cache = DynamicCache(config=target.config)
    passes = []

    def interrupt(*_):
        passes.append(1)
        if len(passes) == 4:
            raise KeyboardInterrupt

    hook = target.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    kwargs = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    with pytest.raises(KeyboardInterrupt):
        target.generate(ids, assistant="ngram", **(kwargs | {host.CACHE_NAME: cache}))
    hook.remove()
    text = target.generate(ids, assistant=False, **kwargs)
    assert {layer.get_seq_length() for layer in cache.layers} == {cache.get_seq_length()}
    more = kwargs | {"max_new_tokens": 5, host.CACHE_NAME: cache}
    assert torch.equal(
        target.generate(text, assistant=False, **more),
        target.generate(text, assistant=False, **(kwargs | {"max_new_tokens": 5})),
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral8", "gemma3"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_static_caches_serve_ragged_rows_and_windows(family, num_rows):
    target = hf_specdec.enable(tiny(family))
    ids, mask = prompts(num_rows)
    kwargs = {"attention_mask": mask, "max_new_tokens": 40, "eos_token_id": [2, 7], "pad_token_id": 0}
    kwargs["cache_implementation"] = "static"
    plain = target.generate(ids, assistant=False, **kwargs)
    for drafter in (DraftModel(target, num_draft_tokens=5), DraftModel(jittered(target)), PromptLookup(1, 3)):
        assert torch.equal(plain, target.generate(ids, assistant=drafter, **kwargs))
        assert target.generate(ids, assistant=drafter, **(kwargs | {"max_new_tokens": 5})).shape[1] <= 17


def test_a_returned_static_cache_that_is_too_small_is_refused():
    target = hf_specdec.enable(tiny("mistral8"))
    ids, mask = prompts(3)
    kwargs = {"max_new_tokens": 10, "eos_token_id": None, "return_dict_in_generate": True, "assistant": PromptLookup()}
    first = target.generate(ids, attention_mask=mask, cache_implementation="static", **kwargs)
    text = torch.cat([first.sequences, torch.tensor([[5, 6], [7, 8], [9, 10]])], dim=1)
    given = {CACHE: first[CACHE], "attention_mask": torch.ones_like(text)}
    with pytest.raises(ValueError, match="earlier call has returned holds"):
        target.generate(text, **given, **(kwargs | {"max_new_tokens": 40}))


def test_rows_of_a_static_cache_do_not_wait_for_each_other():
    target = hf_specdec.enable(tiny(dtype=torch.float32))
    ids, mask = prompts(4)
    kwargs = {"attention_mask": mask, "max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0}
    rounds = {}
    for implementation in ("dynamic", "static"):
        target.generate(ids, assistant=jittered(target), cache_implementation=implementation, **kwargs)
        rounds[implementation] = hf_specdec.last_stats(target).rounds
    assert rounds["static"] == rounds["dynamic"]
