"""What cannot be served exactly is refused before any work, and the message says what to do instead."""

from __future__ import annotations

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForCausalLM,
    BatchEncoding,
    BertConfig,
    BertModel,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer, StaticLayer

import hf_specdec
from hf_specdec import DraftModel, DraftVocabularyLogitsProcessor, ParallelDraft, PromptLookup, host
from tests.models import jittered, prompts, tiny

CACHE = host.CACHE_NAME
GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(tiny())


class Passes:
    """Counts forward passes and how many tokens each of them read."""

    def __init__(self, model):
        self.widths = []
        self.handle = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.widths.append(kwargs["input_ids"].shape[1])

    def __enter__(self) -> list[int]:
        return self.widths

    def __exit__(self, *error):
        self.handle.remove()


def refusal(model, ids=None, **given) -> str:
    """The message of a call that must be refused before the model has read anything."""
    ids = prompts(1)[0] if ids is None else ids
    with Passes(model) as widths, pytest.raises(ValueError) as caught:
        model.generate(ids, **(GREEDY | given))
    assert widths == []
    return str(caught.value)


def word_tokenizer(num_words: int, first: str = "t") -> PreTrainedTokenizerFast:
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"{first}{i}": i for i in range(3, num_words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).eval()


def bert() -> BertModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=64, **sizes)).eval()


def mamba() -> MambaForCausalLM:
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)).eval()


# --- assistants -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no-such-strategy", "", "a/b/c", "/no/such/folder", "prompt_lookup"])
def test_unknown_names(target, name):
    message = refusal(target, assistant=name)
    assert repr(name) in message and "prompt-lookup" in message and "folder" in message


def test_a_hub_id_that_cannot_be_opened(target):
    assert "'no-org/no-repo'" in refusal(target, assistant="no-org/no-repo")


def test_a_folder_without_a_model(target, tmp_path):
    assert str(tmp_path) in refusal(target, assistant=str(tmp_path))


@pytest.mark.parametrize("assistant", [3, True, 0.5, object(), [PromptLookup()], torch.nn.Linear(2, 2)])
def test_assistants_of_another_type(target, assistant):
    message = refusal(target, assistant=assistant)
    assert type(assistant).__name__ in message and "prompt-lookup" in message
    with pytest.raises(ValueError, match=type(assistant).__name__):
        hf_specdec.enable(tiny(), assistant)


def test_an_encoder_decoder_model_cannot_draft_for_a_decoder(target):
    message = refusal(target, assistant=t5())
    assert "T5ForConditionalGeneration" in message and "prompt-lookup" in message


@pytest.mark.parametrize("make", [bert, mamba])
def test_models_that_cannot_draft(target, make):
    drafter = make()
    assert type(drafter).__name__ in refusal(target, assistant=drafter)
    with pytest.raises(ValueError, match=type(drafter).__name__):
        DraftModel(drafter)


@pytest.mark.parametrize("make", [bert, mamba])
def test_models_that_cannot_be_served(make):
    model = make()
    before = dict(model.__dict__)
    with pytest.raises(ValueError, match=type(model).__name__):
        hf_specdec.enable(model)
    assert model.__dict__ == before


@pytest.mark.parametrize("make", [mamba])
def test_models_that_cannot_be_served_without_enable(make):
    model = make()
    with pytest.raises(ValueError, match=type(model).__name__):
        model.generate(prompts(1)[0], custom_generate=hf_specdec.speculate("ngram"), max_new_tokens=3)


def test_things_that_are_no_models():
    for thing in (torch.nn.Linear(2, 2), tiny().model):
        with pytest.raises(ValueError, match=type(thing).__name__):
            hf_specdec.enable(thing)
    with pytest.raises(ValueError, match="Linear"):
        DraftModel(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="str cannot generate text"):
        hf_specdec.generate("gpt2", assistant="suffix")
    with pytest.raises(ValueError, match="not enabled"):
        hf_specdec.last_stats("gpt2")
    assert hf_specdec.disable("gpt2") == "gpt2"


# --- vocabularies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [48, 80])
def test_a_drafter_for_another_vocabulary(target, size):
    drafter = tiny(vocab=size)
    with Passes(drafter) as widths:
        for assistant in (drafter, DraftModel(drafter), DraftModel(drafter, tokenizer=word_tokenizer(48))):
            message = refusal(target, assistant=assistant)
            assert str(size) in message and "64" in message and "tokenizer=" in message
    assert widths == []


@pytest.mark.parametrize("known", ["both to the drafter", "the target's to the call"])
def test_a_drafter_with_another_tokenizer(target, known):
    ours, theirs = word_tokenizer(64), word_tokenizer(64, first="x")
    if known == "both to the drafter":
        message = refusal(target, assistant=DraftModel(tiny(seed=1), tokenizer=theirs, target_tokenizer=ours))
    else:
        message = refusal(target, assistant=DraftModel(tiny(seed=1), tokenizer=theirs), tokenizer=ours)
    assert "tokenizer" in message and ("'x" in message or "'t" in message)


@pytest.mark.parametrize("drafter_size", [60, 70])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_one_tokenizer_with_differently_padded_heads(drafter_size, do_sample, num_rows):
    """Padded ids are real mass in the target's law, but no draft may contain them."""
    tokenizer = word_tokenizer(56)
    model, small = hf_specdec.enable(tiny()), tiny(vocab=drafter_size, seed=0)
    with torch.no_grad():  # the target emits padded ids, and the drafter would love to propose them
        model.lm_head.weight[56:] *= 2
        small.lm_head.weight[56:] *= 4
    proposed = []
    drafter = DraftModel(small, tokenizer=tokenizer, target_tokenizer=tokenizer)
    start = drafter.start

    def watched(context, state):
        session = start(context, state)
        propose = session.propose

        def recorded(*args):
            draft = propose(*args)
            proposed.extend(draft.tokens[draft.valid].tolist())
            if draft.probs is not None:
                assert draft.probs.shape[-1] == 64 and not draft.probs[..., 56:].any()
                assert torch.allclose(draft.probs.sum(dim=-1), torch.ones(()))
            return draft

        session.propose = recorded
        return session

    drafter.start = watched
    ids, mask = prompts(num_rows, vocab=56)
    given = GREEDY | {"attention_mask": mask, "max_new_tokens": 30, "do_sample": do_sample, "top_k": 0}
    ours = model.generate(ids, assistant=drafter, seed=0, **given)
    assert len(proposed) > 20 and max(proposed) < 56
    assert (ours[:, 12:] >= 60).any()  # ids the smaller of the two models does not have
    if not do_sample:
        assert torch.equal(ours, model.generate(ids, assistant=False, **given))
    by_call = model.generate(
        ids, assistant=DraftModel(small, tokenizer=tokenizer), tokenizer=copy.deepcopy(tokenizer), seed=0, **given
    )
    assert torch.equal(by_call, ours)


@pytest.mark.parametrize("allowed", [[], [-1, 3]])
def test_draft_vocabularies_that_make_no_sense(allowed):
    with pytest.raises(ValueError, match="id"):
        DraftVocabularyLogitsProcessor(torch.tensor(allowed, dtype=torch.long))


@pytest.mark.parametrize(
    "allowed",
    [[3, 4], torch.ones(2, 3, dtype=torch.bool), torch.ones(3), 5],
    ids=["a list", "two rows", "no integers", "a number"],
)
def test_draft_vocabularies_that_are_no_ids(allowed):
    with pytest.raises(ValueError, match="allowed must be a tensor of ids"):
        DraftVocabularyLogitsProcessor(allowed)


def test_a_draft_vocabulary_below_nothing():
    with pytest.raises(ValueError, match="No id is allowed"):
        DraftVocabularyLogitsProcessor.below(-1)


def test_a_draft_vocabulary_beyond_the_scores():
    with pytest.raises(ValueError, match="70"):
        DraftVocabularyLogitsProcessor(torch.tensor([3, 70]))(torch.zeros(1, 1).long(), torch.zeros(1, 64))


def test_a_drafter_that_was_never_loaded(target):
    drafter = tiny(seed=1).to("meta")
    for assistant in (drafter, DraftModel(drafter)):
        message = refusal(target, assistant=assistant)
        assert "meta" in message and "from_pretrained" in message


# --- settings of the call ---------------------------------------------------------------------------------

SETTINGS = {
    "num_beams": ({"num_beams": 4}, ["num_beams=4", "num_beams=1"]),
    "sampled beams": ({"num_beams": 2, "do_sample": True}, ["num_beams=2"]),
    "use_cache": ({"use_cache": False}, ["use_cache=False"]),
    "paged": ({"cache_implementation": "paged"}, ["paged", "assistant=False"]),
    "host prompt lookup": ({"prompt_lookup_num_tokens": 3}, ["prompt_lookup_num_tokens=3", "prompt-lookup"]),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, ["penalty_alpha=0.6"]),
    "DoLa": ({"dola_layers": "high"}, ["dola_layers"]),
    "no draft": ({"num_draft_tokens": 0}, ["num_draft_tokens=0", "at least 1"]),
    "negative draft": ({"num_draft_tokens": -3}, ["num_draft_tokens=-3"]),
    "half a token": ({"num_draft_tokens": 1.5}, ["num_draft_tokens=1.5", "integer"]),
    "true": ({"num_draft_tokens": True}, ["num_draft_tokens=True"]),
    "text": ({"num_draft_tokens": "4"}, ["num_draft_tokens='4'"]),
    "alias": ({"num_assistant_tokens": 0}, ["0", "at least 1"]),
    "both names": (
        {"num_draft_tokens": 3, "num_assistant_tokens": 4},
        ["num_draft_tokens=3", "num_assistant_tokens=4"],
    ),
    "negative temperature": ({"draft_temperature": -1.0}, ["draft_temperature=-1.0", "at least 0"]),
    "infinite temperature": ({"draft_temperature": float("inf")}, ["draft_temperature=inf"]),
    "temperature that is none": ({"draft_temperature": float("nan")}, ["draft_temperature=nan"]),
    "temperature as text": ({"draft_temperature": "hot"}, ["draft_temperature='hot'"]),
    "verification": ({"verification": "tree"}, ["'tree'", "block", "token", "auto"]),
    "seed": ({"seed": 1.5}, ["seed=1.5", "integer"]),
    "generator": ({"generator": 3}, ["generator", "int"]),
    "seed and generator": ({"seed": 1, "generator": torch.Generator()}, ["seed=", "generator="]),
    "unknown option": ({"num_draft_tokenz": 3}, ["num_draft_tokenz"]),
    "no new tokens": ({"max_new_tokens": 0}, ["max_new_tokens"]),
    "negative new tokens": ({"max_new_tokens": -2}, ["max_new_tokens"]),
    "no length left": ({"max_new_tokens": None, "max_length": 12}, ["12"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_be_served(target, case):
    given, words = SETTINGS[case]
    message = refusal(target, assistant=PromptLookup(), **given)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "given", [{"num_beams": 3}, {"cache_implementation": "paged"}, {"prompt_lookup_num_tokens": 3}]
)
@pytest.mark.parametrize("place", ["keyword", "positional", "model"])
def test_settings_of_a_generation_config_object_are_refused_alike(given, place):
    model = hf_specdec.enable(tiny())
    (name, value), config = *given.items(), GenerationConfig(**given)
    calls = {
        "keyword": lambda ids: model.generate(ids, generation_config=config, assistant=PromptLookup()),
        "positional": lambda ids: model.generate(ids, config, assistant=PromptLookup()),
        "model": lambda ids: model.generate(ids, assistant=PromptLookup()),
    }
    if place == "model":
        setattr(model.generation_config, name, value)
    with Passes(model) as widths, pytest.raises(ValueError, match=name):
        calls[place](prompts(1)[0])
    assert widths == []


def test_another_way_of_decoding_beside_the_assistant(target):
    other = tiny(seed=1)
    message = refusal(target, assistant=PromptLookup(), assistant_model=other)
    assert "assistant=" in message and "assistant_model=" in message
    message = refusal(target, assistant=PromptLookup(), custom_generate=hf_specdec.speculate("ngram"))
    assert "assistant=" in message and "custom_generate=" in message


def test_stop_strings_without_a_tokenizer(target):
    assert "tokenizer" in refusal(target, assistant=PromptLookup(), stop_strings=["t5"])
    model = tiny()
    call = hf_specdec.speculate("ngram")
    with Passes(model) as widths, pytest.raises(ValueError, match="tokenizer"):
        model.generate(
            prompts(1)[0], custom_generate=call, stop_strings=["t5"], tokenizer=word_tokenizer(64), max_new_tokens=3
        )
    assert widths == []


@pytest.mark.parametrize("num_rows", [1, 2])
def test_empty_prompts(target, num_rows):
    message = refusal(target, ids=torch.empty(num_rows, 0, dtype=torch.long), assistant=PromptLookup())
    assert "empty" in message


@pytest.mark.parametrize("prompt", ["text", [[3, 4]], BatchEncoding({"input_ids": torch.tensor([[3, 4]])})], ids=type)
def test_prompts_that_are_no_tensors(target, prompt):
    message = refusal(target, prompt, assistant="ngram")
    assert f"not {type(prompt).__name__}" in message and "generate(**tokenizer(" in message


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4)])
def test_prompts_that_are_no_batch(target, shape):
    message = refusal(target, torch.full(shape, 5), assistant="ngram")
    assert str(shape) in message and "ids[None]" in message


@pytest.mark.parametrize("shape", [(3, 5), (2, 12)])
def test_masks_that_do_not_cover_the_prompts(target, shape):
    for mask in (torch.ones(shape, dtype=torch.long), torch.arange(shape[1]).clamp(max=1).expand(shape)):
        message = refusal(target, prompts(3)[0], attention_mask=mask, assistant="ngram")
    assert f"attention_mask has shape {shape}" in message and "(3, 12)" in message


def test_no_prompt_at_all_starts_from_the_first_token_as_in_plain(target):
    plain = target.generate(assistant=False, **GREEDY)
    for assistant in (PromptLookup(), DraftModel(jittered(target))):
        assert torch.equal(target.generate(assistant=assistant, **GREEDY), plain)


@pytest.mark.parametrize(
    "refused", [{"no_such_option": 1}, {"num_draft_tokens": 0}, {"seed": 1, "generator": torch.Generator()}]
)
def test_options_are_checked_where_they_are_given(refused):
    model = tiny()
    for place in (lambda: hf_specdec.enable(model, **refused), lambda: hf_specdec.speculate("ngram", **refused)):
        with pytest.raises(ValueError) as caught:
            place()
        assert next(iter(refused)) in str(caught.value)
    with pytest.raises(ValueError, match="num_draft_tokens"):  # the message lists what is allowed
        hf_specdec.enable(model, no_such_option=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_ngram": 0}, ["min_ngram=0", "at least 1"]),
        ({"max_ngram": -1}, ["-1"]),
        ({"min_ngram": 4, "max_ngram": 2}, ["min_ngram=4", "max_ngram=2"]),
        ({"min_ngram": 1.5, "max_ngram": 3}, ["min_ngram=1.5"]),
        ({"num_draft_tokens": 0}, ["num_draft_tokens=0"]),
        ({"prefer": "best"}, ["'best'", "earliest", "newest", "frequent"]),
    ],
)
def test_prompt_lookup_checks_its_arguments(given, words):
    with pytest.raises(ValueError) as caught:
        PromptLookup(**given)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("given", "word"),
    [({"num_draft_tokens": 0}, "num_draft_tokens=0"), ({"draft_temperature": -0.5}, "draft_temperature=-0.5")],
)
def test_a_draft_model_checks_its_arguments(given, word):
    with pytest.raises(ValueError, match=word):
        DraftModel(tiny(), **given)


# --- caches -----------------------------------------------------------------------------------------------


class Stuck(DynamicLayer):
    """A layer that cannot give back what it has read."""

    is_croppable = False


def stuck_cache(config) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers = [Stuck() for _ in range(config.num_hidden_layers)]
    return cache


def test_a_cache_that_cannot_be_rolled_back(target):
    message = refusal(target, assistant=PromptLookup(), **{CACHE: stuck_cache(target.config)})
    assert "Stuck" in message and "rolled back" in message and "assistant=False" in message


def test_a_quantized_cache_cannot_be_rolled_back(target):
    given = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    message = refusal(target, assistant=PromptLookup(), **given)
    assert "quantised" in message and "rolled back" in message


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("drafter", ["itself", "similar", "lookup"])
@pytest.mark.parametrize("length", [13, 14, 27])
def test_a_static_cache_is_never_overfilled(target, drafter, num_rows, length):
    assistant = {"itself": DraftModel(target, 8), "similar": DraftModel(jittered(target), 8), "lookup": PromptLookup()}
    ids, mask = prompts(num_rows)
    given = GREEDY | {"attention_mask": mask, "max_new_tokens": None, "max_length": length}
    plain = target.generate(ids, assistant=False, **given)
    static = target.generate(ids, assistant=assistant[drafter], cache_implementation="static", **given)
    assert torch.equal(static, plain) and static.shape[1] == length


@pytest.mark.parametrize("num_rows", [1, 2])
def test_rows_that_end_in_a_static_cache(target, num_rows):
    ids, mask = prompts(num_rows)
    given = GREEDY | {"attention_mask": mask, "max_new_tokens": 20}
    end = int(target.generate(ids, assistant=False, **given)[0, 12 + 6])
    given |= {"eos_token_id": end}
    plain = target.generate(ids, assistant=False, cache_implementation="static", **given)
    for assistant in (DraftModel(target, 8), PromptLookup()):
        assert torch.equal(target.generate(ids, assistant=assistant, cache_implementation="static", **given), plain)


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="the oldest host cannot roll back a static cache")
def test_a_static_cache_of_the_user_with_more_room(target):
    ids = prompts(1)[0]
    plain = target.generate(ids, assistant=False, **GREEDY)
    for assistant in (DraftModel(target, 8), PromptLookup()):
        cache = StaticCache(config=target.config, max_cache_len=40)
        ours = target.generate(ids, assistant=assistant, **GREEDY, **{CACHE: cache})
        assert torch.equal(ours, plain) and int(cache.get_seq_length()) == 23


@pytest.mark.parametrize("length", [8, 30])
def test_a_static_sliding_cache_is_served(length):
    """The host's own cannot be rolled back once the text has left the window; the loop uses one that can."""
    model = hf_specdec.enable(tiny("mistral16"))
    ids = prompts(1, 5)[0]
    given = GREEDY | {"max_new_tokens": length, "cache_implementation": "static"}
    plain = model.generate(ids, assistant=False, **given)
    assert torch.equal(model.generate(ids, assistant=DraftModel(model), **given), plain)


def test_a_static_sliding_cache_of_the_user_is_refused_where_it_cannot_be_rolled_back():
    model = hf_specdec.enable(tiny("mistral16"))
    cache = StaticCache(config=model.config, max_cache_len=40)
    given = GREEDY | {"max_new_tokens": 30, host.CACHE_NAME: cache}
    with pytest.raises(ValueError, match="rolled back"):
        model.generate(prompts(1, 5)[0], assistant=DraftModel(model), **given)


# --- drafts stay within every limit -----------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", ["itself", "similar", "lookup"])
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_a_draft_never_runs_past_learned_positions(drafter, num_rows, spare):
    model = hf_specdec.enable(tiny("gpt2", max_position_embeddings=24))
    assistant = {
        "itself": DraftModel(model, 8),
        "similar": DraftModel(jittered(model), 8),
        "lookup": PromptLookup(1, 3),
    }
    ids, mask = prompts(num_rows)
    ids[0] = torch.tensor([5, 6, 7, 8] * 3)
    given = GREEDY | {"attention_mask": mask, "max_new_tokens": None, "max_length": 24 - spare}
    plain = model.generate(ids, assistant=False, **given)
    assert torch.equal(model.generate(ids, assistant=assistant[drafter], **given), plain)
    assert plain.shape[1] == 24 - spare


def test_a_draft_never_runs_past_learned_positions_behind_a_cache():
    """With a filled cache and only the new tokens given, lengths alone do not tell the positions."""
    model = hf_specdec.enable(tiny("gpt2", max_position_embeddings=24))
    ids = torch.tensor([[5, 6, 7, 8] * 4])
    texts = []
    for assistant in (False, DraftModel(model, 8), PromptLookup(1, 3)):
        cache = DynamicCache(config=model.config)
        model(ids[:, :12], use_cache=True, **{CACHE: cache})
        given = GREEDY | {"max_new_tokens": 8, "attention_mask": torch.ones_like(ids)}
        texts.append(model.generate(ids[:, 12:], assistant=assistant, **given, **{CACHE: cache}))
    assert texts[0].shape[1] == 4 + 8
    assert torch.equal(texts[1], texts[0]) and torch.equal(texts[2], texts[0])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_drafter_with_fewer_positions_than_the_target(target, num_rows):
    small = tiny("gpt2", max_position_embeddings=16)
    ids, mask = prompts(num_rows)
    given = GREEDY | {"attention_mask": mask, "max_new_tokens": 25}
    drafter = DraftModel(small)
    assert torch.equal(target.generate(ids, assistant=drafter, **given), target.generate(ids, assistant=False, **given))
    assert drafter.stats.drafted > 0


@pytest.mark.parametrize("kind", [DraftModel, lambda model: ParallelDraft(model, 3)], ids=["draft", "parallel"])
def test_a_drafter_that_counts_padding_among_its_few_positions(kind):
    target, (ids, mask) = hf_specdec.enable(tiny("mpt")), prompts(3)
    ids[0, :6] = mask[0, :6] = 0  # every row is padded
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    config = BartConfig(vocab_size=64, max_position_embeddings=20, is_decoder=True, is_encoder_decoder=False, **sizes)
    drafter = kind(BartForCausalLM(config).eval())
    given = GREEDY | {"attention_mask": mask, "max_new_tokens": 16}
    assert torch.equal(target.generate(ids, assistant=drafter, **given), target.generate(ids, assistant=False, **given))
    assert drafter.stats.drafted > 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_draft_never_runs_past_the_last_token(target, num_rows):
    """One row of a pass is the newest token; behind the drafted ones there is room for the target's own."""
    ids, mask = prompts(num_rows)
    for length in (1, 2, 3, 6, 9):
        with Passes(target) as widths:
            target.generate(
                ids,
                attention_mask=mask,
                assistant=DraftModel(jittered(target), 8),
                **(GREEDY | {"max_new_tokens": length}),
            )
        # Had everything been accepted, no pass would have emitted a token too many.
        assert widths[0] <= 12 + length - 1 and all(width <= length - 1 for width in widths[1:])
        assert hf_specdec.last_stats(target).emitted == num_rows * length


def test_a_target_may_be_longer_than_its_config_says(target):
    """Rotary positions have no end: plain goes on there, and so does the assistant, if only without drafts."""
    model = hf_specdec.enable(tiny(max_position_embeddings=16))
    ids = prompts(1)[0]
    given = GREEDY | {"max_new_tokens": 20}
    plain = model.generate(ids, assistant=False, **given)
    for assistant in (DraftModel(jittered(model)), PromptLookup()):
        assert torch.equal(model.generate(ids, assistant=assistant, **given), plain)


def test_a_bias_works_with_differently_padded_heads():
    target, drafter = hf_specdec.enable(tiny(vocab=64)), tiny(seed=5, vocab=60)
    tokenizer = trained_tokenizer_of(60)
    assistant = DraftModel(drafter, tokenizer=tokenizer, target_tokenizer=tokenizer)
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    kwargs = {"max_new_tokens": 15, "eos_token_id": None, "sequence_bias": [[[7], 2.0], [[5, 6], -3.0]]}
    assert torch.equal(target.generate(ids, **kwargs), target.generate(ids, assistant=assistant, **kwargs))
    target.generate(ids, assistant=assistant, do_sample=True, seed=0, **kwargs)


def trained_tokenizer_of(size):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def test_a_misspelt_option_is_an_error_for_a_default_assistant_too():
    target = hf_specdec.enable(tiny(), assistant="ngram")
    with pytest.raises(ValueError, match="num_draft_tokens=0"):
        target.generate(torch.tensor([[5, 6]]), num_draft_tokens=0)


class Broken(LogitsProcessor):
    """Returns scores that are no law from the third token on."""

    def __init__(self, value):
        self.value = value

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, self.value) if input_ids.shape[1] > 7 else scores


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_scores_that_are_no_law_are_an_error_as_in_plain(target, value, num_rows):
    kwargs = {"do_sample": True, "max_new_tokens": 8, "eos_token_id": None, "logits_processor": [Broken(value)]}
    ids = torch.tensor([[5, 6, 7, 5, 6]]).repeat(num_rows, 1)
    with pytest.raises(RuntimeError):
        target.generate(ids, assistant=False, **kwargs)
    with pytest.raises(ValueError, match="no probability law"):
        target.generate(ids, assistant=PromptLookup(1, 2), **kwargs)


def test_a_drafter_that_has_gone_mad_only_slows_the_text(target):
    mad = tiny(seed=9)
    with torch.no_grad():
        mad.lm_head.weight.fill_(float("nan"))
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    kwargs = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(target.generate(ids, assistant=mad, **kwargs), target.generate(ids, assistant=False, **kwargs))
    sampled = kwargs | {"do_sample": True, "seed": 0}
    out = target.generate(ids, assistant=mad, **sampled)
    assert torch.equal(out, target.generate(ids, assistant=PromptLookup(7, 7), **sampled))  # no draft is ever judged
