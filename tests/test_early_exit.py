"""Early exit through whole `generate` calls: identity, law, shared work, a model that is never touched."""

from __future__ import annotations

import copy
import gc
import threading
import types
import weakref

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import StaticLayer

import hf_specdec
from hf_specdec import Auto, DraftModel, EarlyExit, Suffix, best_exit_layer, halves, host, loop
from hf_specdec.drafters import early_exit
from hf_specdec.drafters.base import checked
from hf_specdec.halves import Halves
from hf_specdec.host import decoder_layers
from tests.models import jittered, prompts, tiny
from tests.reference import assert_follows, target_law
from tests.second_device import NAME, SecondDevice
from tests.test_attention import flash_kernels, with_attention  # noqa: F401 - a fixture
from tests.test_auto import random_choices  # noqa: F401 - a fixture
from tests.test_law import PLAIN, PROMPT, VOCAB, first_tokens, small
from tests.test_unusual_targets import gemma3n, lfm2

GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": [2, 7, 13], "pad_token_id": 0}
# Family, changes, exit layer: windows in the first layers, in the last, in both; models without positions of their own.
CUTS = {
    "llama": ("llama", {"num_hidden_layers": 4}, 2),
    "qwen3": ("qwen3", {"num_hidden_layers": 3}, 2),
    "mistral": ("mistral4", {"num_hidden_layers": 3}, 1),
    "gemma3": ("gemma3", {}, 2),
    "gemma3, windows first": ("gemma3", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}, 2),
    "gemma3, windows last": ("gemma3", {"layer_types": ["full_attention"] + ["sliding_attention"] * 2}, 1),
    "gpt2": ("gpt2", {}, 1),
    "bloom": ("bloom", {"seed": 1}, 1),
    "mpt": ("mpt", {}, 1),
}


@pytest.fixture(params=CUTS)
def cut(request):
    """An enabled target and an exit layer."""
    family, changes, exit_layer = CUTS[request.param]
    return hf_specdec.enable(tiny(family, **changes)), exit_layer


def with_idle_late_layers(model, exit_layer=1):
    """Makes the layers behind the exit hand on what they are given."""
    with torch.no_grad():
        for layer in decoder_layers(model)[exit_layer:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def rows_for(target, num_rows):
    """Ragged prompts, or full ones where plain overflows on padding in float64."""
    ids, mask = prompts(num_rows)
    if target.config.model_type == "bloom" or target.config._attn_implementation == "eager":
        ids, mask = torch.where(mask.bool(), ids, 5), torch.ones_like(mask)
    return {"input_ids": ids, "attention_mask": mask}


def assert_identical(target, drafter, num_rows=1, **changes):
    """Greedy text is plain's, and something was drafted."""
    kwargs = GREEDY | rows_for(target, num_rows) | changes
    plain = target.generate(assistant=False, **kwargs)
    ours = target.generate(assistant=drafter, **kwargs)
    assert hf_specdec.last_stats(target).drafted > 0
    assert torch.equal(*(out if isinstance(out, torch.Tensor) else out.sequences for out in (plain, ours)))
    return plain, ours


class Unknown(LogitsProcessor):
    """A processor that may have a state, as far as anyone knows: the batch advances in lockstep."""

    def __call__(self, input_ids, scores):
        return scores


# --- identity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3, 6])
def test_greedy_text_is_plains(cut, num_rows):
    target, exit_layer = cut
    for length, ends in ((1, None), (4, None), (4, GREEDY["eos_token_id"])):
        assert_identical(target, EarlyExit(exit_layer, num_draft_tokens=length), num_rows, eos_token_id=ends)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_text_is_plains_in_lockstep(cut, num_rows):
    target, exit_layer = cut
    processors = LogitsProcessorList([Unknown()])
    assert_identical(target, EarlyExit(exit_layer, 4), num_rows, logits_processor=processors)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_processors_that_read_the_text(cut, num_rows):
    target, exit_layer = cut
    assert_identical(target, EarlyExit(exit_layer, 4), num_rows, repetition_penalty=1.4, no_repeat_ngram_size=2)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_everything_is_accepted_where_the_other_layers_do_nothing(num_rows):
    for family in ("llama", "mistral8"):
        target = hf_specdec.enable(with_idle_late_layers(tiny(family)))
        assert_identical(target, EarlyExit(1, num_draft_tokens=4), num_rows, eos_token_id=None)
        stats = hf_specdec.last_stats(target)
        assert stats.accepted == stats.drafted > 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_returned_caches_are_plains(cut, num_rows):
    target, exit_layer = cut
    plain, ours = assert_identical(target, EarlyExit(exit_layer, 4), num_rows, return_dict_in_generate=True)
    for mine, theirs in zip(ours[host.CACHE_NAME].layers, plain[host.CACHE_NAME].layers, strict=True):
        assert type(mine) is type(theirs)
        assert mine.keys.shape == theirs.keys.shape
        if num_rows == 1:  # behind the ends of a batch, plain's slots hold filling
            assert torch.allclose(mine.keys, theirs.keys) and torch.allclose(mine.values, theirs.values)


@pytest.mark.parametrize("family", ["llama", "mistral4", "gemma3"])
def test_a_cache_of_the_users_own_goes_on(family):
    target = hf_specdec.enable(tiny(family))
    texts = []
    for assistant in (False, EarlyExit(1, 4)):
        cache = DynamicCache(config=target.config)
        text = target.generate(prompts(1)[0], assistant=assistant, **GREEDY, **{host.CACHE_NAME: cache})
        again = torch.cat([text, torch.tensor([[5, 6, 7, 5, 6]])], dim=1)
        texts.append(target.generate(again, assistant=assistant, **GREEDY, **{host.CACHE_NAME: cache}))
    assert torch.equal(*texts)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_outputs_of_all_layers_are_plains(cut, num_rows):
    """Then the target's pass runs all layers."""
    target, exit_layer = cut
    flags = dict.fromkeys(("return_dict_in_generate", "output_hidden_states", "output_logits", "output_scores"), True)
    flags["eos_token_id"] = None
    plain, ours = assert_identical(target, EarlyExit(exit_layer, 4), num_rows, **flags)
    for mine, theirs in zip(ours.logits, plain.logits, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    for mine, theirs in zip(ours.hidden_states, plain.hidden_states, strict=True):  # Bloom and MPT round to float32
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, theirs, strict=True))


def test_attentions_are_plains():
    target = hf_specdec.enable(with_attention("eager", num_hidden_layers=4))
    flags = {"return_dict_in_generate": True, "output_attentions": True, "eos_token_id": None}
    plain, ours = assert_identical(target, EarlyExit(2, 4), **flags)
    for mine, theirs in zip(ours.attentions, plain.attentions, strict=True):
        assert all(torch.allclose(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_model_that_always_records():
    target = hf_specdec.enable(tiny(num_hidden_layers=4))
    target.config.output_hidden_states = True
    assert_identical(target, EarlyExit(2, 4), return_dict_in_generate=True, eos_token_id=None)
    assert len(target(prompts(1)[0]).hidden_states) == 5  # the host's hooks stand once on every layer


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
@pytest.mark.parametrize("family", ["llama", "mistral4", "gemma3"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_kinds_of_caches(implementation, family, num_rows):
    target = hf_specdec.enable(tiny(family))
    assert_identical(target, EarlyExit(1, 4), num_rows, cache_implementation=implementation)


@pytest.mark.skipif(not StaticLayer.is_croppable, reason="the oldest host cannot roll such a cache back")
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_static_cache_of_the_users_own(num_rows):
    target = hf_specdec.enable(tiny())
    texts = []
    for assistant in (False, EarlyExit(1, 4)):
        cache = {host.CACHE_NAME: StaticCache(config=target.config, max_cache_len=64)}
        texts.append(target.generate(assistant=assistant, **GREEDY | rows_for(target, num_rows) | cache))
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", "flex_attention"])
@pytest.mark.parametrize("family", ["llama", "mistral8", "gemma3"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kinds_of_attention(flash_kernels, name, family):  # noqa: F811
    target = with_attention(name, family)
    with torch.compiler.set_stance("force_eager"):
        for num_rows in (1, 3):
            assert_identical(target, EarlyExit(1, 4), num_rows)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_by_name_a_quarter_of_the_layers_drafts(num_rows):
    target = hf_specdec.enable(with_idle_late_layers(tiny(num_hidden_layers=8), exit_layer=2))
    assert_identical(target, "early-exit", num_rows, eos_token_id=None)
    stats = hf_specdec.last_stats(target)
    assert stats.accepted == stats.drafted


def test_the_end_of_the_context():
    target = hf_specdec.enable(tiny(max_position_embeddings=32))
    assert_identical(target, EarlyExit(1, 4), max_new_tokens=20, eos_token_id=None)


# --- slot by slot -----------------------------------------------------------------------------------------


class FirstLayers:
    """The first layers of a model with its norm and its head, as a model of its own that has no cache."""

    def __init__(self, model, exit_layer):
        self.model = copy.deepcopy(model)
        layers = decoder_layers(self.model)
        del layers[exit_layer:]
        layers[-1].register_forward_hook(self._keep)

    def _keep(self, module, args, output):
        self.states = output if isinstance(output, torch.Tensor) else output[0]

    def __call__(self, text, drafted):
        """Best ids and states of the text's last token and of every drafted one."""
        logits = self.model(torch.tensor([text + drafted]), use_cache=False).logits
        first = len(text) - 1
        return logits[0, first:].argmax(dim=-1).tolist(), self.states[0, first:]


@pytest.fixture
def compared(monkeypatch):
    """Runs a call; counts drafts and handed on states (of rows in a round), and those that are other than alone."""
    true_propose = early_exit._EarlyExitSession.propose

    def run(target, exit_layer, num_rows):
        alone, expected = FirstLayers(target, exit_layer), []
        counts = {"drafts": 0, "other drafts": 0, "states": 0, "other states": 0}

        def propose(self, state, limits, noise):
            expected.clear()
            draft = true_propose(self, state, limits, noise)
            for place, row in enumerate(state.rows):
                drafted = draft.tokens[place, : int(draft.lengths[place])].tolist()
                ids, states = alone(state.tokens[row], drafted)
                if drafted:
                    counts["drafts"] += 1
                    counts["other drafts"] += ids[:-1] != drafted
                    expected.append((place, states))
            return draft

        def compare(module, args, kwargs):
            """What enters the first of the other layers, in a round."""
            entering = args[0] if args else kwargs["hidden_states"]
            for place, states in expected:
                counts["states"] += 1
                counts["other states"] += not torch.allclose(entering[place, : len(states)], states, atol=1e-5)
            expected.clear()

        monkeypatch.setattr(early_exit._EarlyExitSession, "propose", propose)
        handle = decoder_layers(target)[exit_layer].register_forward_pre_hook(compare, with_kwargs=True)
        changes = {"assistant": EarlyExit(exit_layer, num_draft_tokens=4), "eos_token_id": None}
        target.generate(**GREEDY | rows_for(target, num_rows) | changes)
        handle.remove()
        return counts

    return run


@pytest.mark.parametrize("num_rows", [1, 3])
def test_drafts_and_handed_on_states_are_those_of_the_first_layers_alone(cut, num_rows, compared):
    counts = compared(*cut, num_rows)
    assert counts["drafts"] == counts["states"] >= 4 * num_rows
    assert counts["other drafts"] == counts["other states"] == 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_an_exit_one_layer_off_is_noticed(shift, compared, monkeypatch):
    """Negative control: the text is the target's all the same."""
    exit_of = EarlyExit.exit_of
    monkeypatch.setattr(EarlyExit, "exit_of", lambda self, target: exit_of(self, target) + shift)
    counts = compared(hf_specdec.enable(tiny(num_hidden_layers=4)), 2, 3)
    assert counts["other drafts"] > counts["drafts"] / 2


def test_states_of_one_layer_earlier_are_noticed(compared, monkeypatch):
    """Negative control: what enters the last of the first layers is handed on, not what it says."""

    def leave(self, layer, *args, **kwargs):
        layer(*args, **kwargs)
        self.outputs.append(args[0])
        return args[0]

    monkeypatch.setattr(halves._Between, "leave", leave)
    counts = compared(hf_specdec.enable(tiny(num_hidden_layers=4)), 2, 3)
    assert counts["other states"] == counts["states"] > 0


# --- the law ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
@pytest.mark.parametrize(
    ("num_rows", "num_samples"),
    [
        (250, 5000),
        (1, 300),
        (3, 300),
        pytest.param(1, 6000, marks=pytest.mark.slow),
        pytest.param(3, 6000, marks=pytest.mark.slow),
    ],
)
def test_the_law_is_the_targets(num_rows, num_samples, verification, temperature, top_p):
    """Sample sizes as named; a correct sampler fails one with probability 1e-6 (reference.FALSE_ALARM)."""
    target = hf_specdec.enable(small(0, layers=3))
    options = {"temperature": temperature, "top_p": top_p, "verification": verification}
    drafter = EarlyExit(1, num_draft_tokens=3)
    samples = first_tokens(target, num_samples // num_rows, num_rows, assistant=drafter, **options)
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)])
    assert_follows(samples, target_law(target, PROMPT, processors, 3, VOCAB))
    assert 0 < drafter.stats.accepted < drafter.stats.drafted


def test_coupled_text_is_the_same_with_any_drafter():
    target = hf_specdec.enable(small(0, layers=3))
    kwargs = PLAIN | {"max_new_tokens": 30, "seed": 5, "verification": "coupled"}
    drafters = [EarlyExit(1, 3), EarlyExit(2, 5), Suffix(num_draft_tokens=3), Auto([Suffix(), EarlyExit(2)])]
    texts = [target.generate(PROMPT.repeat(3, 1), assistant=drafter, **kwargs) for drafter in drafters]
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_an_exit_equal_to_the_target_is_always_accepted():
    target = hf_specdec.enable(with_idle_late_layers(small(0, layers=3)))
    for verification in ("token", "block", "coupled"):
        options = {"assistant": EarlyExit(1, 3), "verification": verification, "seed": 1}
        target.generate(PROMPT.repeat(3, 1), **(PLAIN | {"max_new_tokens": 30}), **options)
        stats = hf_specdec.last_stats(target)
        assert stats.accepted == stats.drafted > 0


# --- shared work ------------------------------------------------------------------------------------------


def tokens_read(target, drafter, num_rows=1, **changes):
    """How many tokens of a row every layer has read in a call."""
    counts = [0] * len(decoder_layers(target))

    def count(index, output):
        counts[index] += (output if isinstance(output, torch.Tensor) else output[0]).shape[1]

    handles = [
        layer.register_forward_hook(lambda module, args, output, index=index: count(index, output))
        for index, layer in enumerate(decoder_layers(target))
    ]
    target.generate(assistant=drafter, **GREEDY | rows_for(target, num_rows) | {"eos_token_id": None} | changes)
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize("num_rows", [1, 3])
def test_every_layer_reads_every_token_once(cut, num_rows):
    target, exit_layer = cut
    counts = tokens_read(target, EarlyExit(exit_layer, 4), num_rows)
    stats = hf_specdec.last_stats(target)
    assert len(set(counts)) == 1
    if num_rows == 1:  # the prompt, and in every round the row's last token and the draft
        assert counts[0] == prompts(1)[0].shape[1] + stats.target_passes - 1 + stats.drafted


def test_where_hidden_states_are_wanted_the_first_layers_read_twice():
    target = hf_specdec.enable(tiny(num_hidden_layers=3))
    wanted = {"return_dict_in_generate": True, "output_hidden_states": True}
    counts = tokens_read(target, EarlyExit(1, 4), **wanted)
    assert counts[0] > counts[1] == counts[2] == tokens_read(target, EarlyExit(1, 4))[2]


# --- among others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3])
def test_next_to_other_drafters(cut, num_rows):
    target, exit_layer = cut
    for others in ([Suffix()], [DraftModel(jittered(target))]):
        for drafter in (Auto([*others, EarlyExit(exit_layer)]), Auto([EarlyExit(exit_layer), *others])):
            assert_identical(target, drafter, num_rows)
        assert_identical(target, drafter, num_rows, logits_processor=LogitsProcessorList([Unknown()]))


@pytest.fixture
def rounds(monkeypatch):
    """Who drafts in every round."""
    seen = []

    def noting(draft, limits, vocabulary):
        seen.append({name for name in draft.arms or [] if name})
        return checked(draft, limits, vocabulary)

    monkeypatch.setattr(loop, "checked", noting)
    return seen


@pytest.mark.parametrize("others", [lambda _: Suffix(), lambda target: DraftModel(jittered(target))])
def test_in_a_round_it_drafts_for_all_rows_or_for_none(rounds, others):
    """At fixed lengths: what is copied for one row waits where another row needs the first layers."""
    target = hf_specdec.enable(tiny(num_hidden_layers=3))
    counts = tokens_read(target, Auto([others(target), EarlyExit(1)], num_draft_tokens=4), 3, max_new_tokens=40)
    assert len(set(counts)) == 1
    assert {"early-exit"} in rounds or isinstance(others(target), DraftModel)
    assert all(arms == {"early-exit"} for arms in rounds if "early-exit" in arms)


@pytest.mark.scheduled
@pytest.mark.usefixtures("random_choices")
def test_no_plan_joins_it_with_copies(rounds):
    target = hf_specdec.enable(tiny(num_hidden_layers=3))
    drafter = Auto([Suffix(), EarlyExit(1), EarlyExit(2)])
    counts = tokens_read(target, drafter, 3, max_new_tokens=60)
    assert len(set(counts)) == 1
    assert all(len(arms) == 1 for arms in rounds if arms)
    assert len({name for arms in rounds for name in arms}) == 3


# --- the model is never touched ---------------------------------------------------------------------------


def attributes(model):
    return [(name, key, id(value)) for name, module in model.named_modules() for key, value in vars(module).items()]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_model_is_whole_during_a_call_and_after_an_exception(place):
    target = hf_specdec.enable(tiny(num_hidden_layers=3))
    ids, mask = prompts(1)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    passes, before = [], None

    def fail(module, args, output):
        assert attributes(target) == before
        passes.append(1)
        if len(passes) == 7:
            raise RuntimeError("stop")

    handle = decoder_layers(target)[place].mlp.register_forward_hook(fail)
    cache = DynamicCache(config=target.config)
    before = attributes(target)
    with pytest.raises(RuntimeError, match="stop"):
        target.generate(ids, attention_mask=mask, assistant=EarlyExit(1, 2), **GREEDY, **{host.CACHE_NAME: cache})
    handle.remove()
    lengths = {layer.get_seq_length() for layer in cache.layers}
    assert len(lengths) == 1  # what the first layers had read ahead is gone
    assert torch.equal(plain, target.generate(ids, attention_mask=mask, assistant=False, **GREEDY))


def test_threads_do_not_disturb_each_other():
    target = hf_specdec.enable(tiny(num_hidden_layers=4))
    ids, mask = prompts(3)
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 40, "eos_token_id": None}
    plain = target.generate(ids, assistant=False, **kwargs)
    texts, start = [], threading.Barrier(4)

    def work(assistant):
        start.wait()
        texts.extend(target.generate(ids, assistant=assistant, **kwargs) for _ in range(3))

    threads = [threading.Thread(target=work, args=(a,)) for a in (False, EarlyExit(1, 4), EarlyExit(3, 4), "suffix")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 12
    assert all(torch.equal(plain, text) for text in texts)


def test_hooks_of_the_user_see_every_layer_and_may_change_it():
    target = hf_specdec.enable(tiny(num_hidden_layers=3))
    for layer in decoder_layers(target):
        layer.register_forward_hook(lambda module, args, output: output * 1.1)
    assert_identical(target, EarlyExit(1, 4), 3)


# --- models that were changed -----------------------------------------------------------------------------


def test_weights_offloaded_by_accelerate():
    from accelerate import cpu_offload

    target = hf_specdec.enable(tiny(num_hidden_layers=3))
    cpu_offload(target, execution_device=torch.device("cpu"))
    counts = tokens_read(target, EarlyExit(1, 4), 3)
    assert len(set(counts)) == 1


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_a_target_spread_over_two_devices(exit_layer):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    target = hf_specdec.enable(tiny(num_hidden_layers=3))
    ids, mask = prompts(3)
    kwargs = GREEDY | {"attention_mask": mask}
    plain = target.generate(ids, **kwargs)
    with torch.no_grad(), SecondDevice() as device:
        for layer in target.model.layers[1:]:
            add_hook_to_module(device.take(layer), AlignDevicesHook(execution_device=NAME, io_same_device=True))
        assert torch.equal(plain, target.generate(ids, assistant=EarlyExit(exit_layer, 4), **kwargs))


def test_a_compiled_or_bound_forward_is_run_in_part():
    for replace in (torch.compile, lambda call: types.MethodType(call.__func__, call.__self__)):
        target = hf_specdec.enable(tiny(num_hidden_layers=3))
        target.forward = replace(target.forward)
        with torch.compiler.set_stance("force_eager"):
            assert len(set(tokens_read(target, EarlyExit(1, 4), 3))) == 1


def test_modules_compiled_in_place():
    target = hf_specdec.enable(tiny(num_hidden_layers=3))
    target.compile()
    for layer in decoder_layers(target):
        layer.compile()
    with torch.compiler.set_stance("force_eager"):
        assert len(set(tokens_read(target, EarlyExit(1, 4), 3))) == 1


# --- refusals ---------------------------------------------------------------------------------------------


def refusal(target, drafter, **changes):
    with pytest.raises(ValueError) as caught:
        hf_specdec.enable(target).generate(prompts(1)[0], assistant=drafter, **GREEDY | changes)
    return str(caught.value)


@pytest.mark.parametrize("exit_layer", [0, -1, True, 1.5, "2"])
def test_exit_layers_that_are_none(exit_layer):
    with pytest.raises(ValueError, match=r"exit_layer=.* must be an integer of at least 1"):
        EarlyExit(exit_layer)


def test_exit_layers_that_leave_none_to_verify():
    assert "exit_layer=2: LlamaForCausalLM has 2 layers" in refusal(tiny(), EarlyExit(2))
    assert "Choose fewer than 2" in refusal(tiny(), EarlyExit(7))
    assert "use another drafter" in refusal(tiny(num_hidden_layers=1), EarlyExit())


def test_layers_that_read_each_others_keys():
    assert "num_kv_shared_layers" in refusal(gemma3n().double(), EarlyExit(1))


def test_layers_that_keep_other_things_than_keys():
    assert "LinearAttentionLayer are not known" in refusal(lfm2().eval().double(), EarlyExit(1))


@pytest.mark.parametrize("kind", ["repeats layers", "hands on more", "hands on states"])
def test_layers_that_depend_on_more_than_states(kind):
    model, ids = tiny(num_hidden_layers=3), prompts(1)[0]
    if kind == "repeats layers":
        decoder_layers(model).__class__ = TwiceOver
    if kind == "hands on more":
        for layer in decoder_layers(model):
            layer.register_forward_pre_hook(lambda module, args: args[0][:1] if isinstance(args[0], tuple) else args)
            layer.register_forward_hook(lambda module, args, output: (output, torch.zeros(1, dtype=torch.long)))
        model.model.norm.register_forward_pre_hook(lambda module, args: args[0][:1])
    halves = Halves(model, 1)
    halves.first(ids, use_cache=False)
    if kind == "hands on states":
        return halves.check([ids.shape])
    with pytest.raises(ValueError, match="cannot be run in part"):
        halves.check([ids.shape])


class TwiceOver(torch.nn.ModuleList):
    """Goes through its layers twice."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return [*found, *found] if isinstance(index, slice) else found


def test_encoder_decoder_targets():
    from tests.test_encoder_decoder import built, t5

    assert "has an encoder" in refusal(built(t5), EarlyExit(1))


def test_a_forward_that_cannot_be_run_in_part():
    target = tiny()
    whole = target.forward
    target.forward = lambda *args, **kwargs: whole(*args, **kwargs)
    assert "forward was replaced" in refusal(target, EarlyExit(1))


def test_offloaded_caches():
    cache = DynamicCache(config=tiny().config)
    cache.offloading = True
    with pytest.raises(ValueError, match=r"offloaded cache.*dynamic"):
        host.refuse_reading_ahead(cache)


def test_processes_that_share_the_weights():
    assert "synced_gpus" in refusal(tiny(), EarlyExit(1), synced_gpus=True)


def test_the_hosts_own_loop():
    with pytest.raises(ValueError, match="early-exit drafts from the target's"):
        hf_specdec.as_candidate_generator(EarlyExit(1), tiny(), tiny().generation_config)


# --- the best exit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_enabled", [False, True])
def test_the_best_exit_is_where_the_idle_layers_begin(is_enabled):
    target = with_idle_late_layers(tiny(num_hidden_layers=8), exit_layer=2)
    if is_enabled:
        hf_specdec.enable(target, assistant="suffix")
    ids, mask = prompts(3)
    estimate = best_exit_layer(target, ids, mask)
    assert estimate.agreements[2] == estimate.agreements[3] == 1.0 > estimate.agreements[1]
    assert estimate.best == 2
    assert estimate.speedups[2] > 1 > estimate.speedups[1]
    assert set(estimate.speedups) == set(range(1, 8))


@pytest.mark.parametrize("given", [{"num_draft_tokens": 0}, {"max_new_tokens": 0}, {"input_ids": prompts(1)[0][0]}])
def test_an_estimate_checks_its_arguments(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        best_exit_layer(**({"model": tiny(), "input_ids": prompts(1)[0]} | given))


def test_a_call_keeps_nothing_of_the_model():
    """Whoever deletes a model has its memory back at once, without the garbage collector."""
    target, drafter = tiny(num_hidden_layers=4), EarlyExit(1)
    gc.disable()
    try:
        hf_specdec.generate(target, prompts(1)[0], assistant=drafter, max_new_tokens=8)
        weights = [weakref.ref(weight) for weight in target.parameters()]
        assert drafter.stats.drafted > 0
        del target
        assert not any(weight() is not None for weight in weights)
    finally:
        gc.enable()


def test_the_halves_make_a_whole():
    """Without a cache, and for every exit: the rest behind the first layers is the model."""
    for family in ("llama", "gemma3", "gpt2", "bloom"):
        model, ids = tiny(family), prompts(1)[0]
        for exit_layer in range(1, len(decoder_layers(model))):
            halves = Halves(model, exit_layer)
            assert not halves.lead(ids, use_cache=False).logits.any()
            assert torch.equal(halves.rest(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
