"""Targets and calls off the beaten track: served like plain, or refused with the reason."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GitConfig,
    GitForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    XLNetConfig,
    XLNetLMHeadModel,
)

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from hf_specdec.drafters import DraftContext
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome
from tests.models import COMMON, jittered, prompts, tiny

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def roped(kind, border, **more):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": border} | more
    return hf_specdec.enable(tiny(max_position_embeddings=border if kind == "dynamic" else 256, rope_parameters=rope))


@pytest.mark.parametrize(
    ("kind", "more"), [("dynamic", {}), ("longrope", {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4})]
)
def test_rope_that_changes_with_the_length_is_served_below_its_border_only(kind, more):
    target = roped(kind, 40, **more)
    ids, mask = prompts(3)
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 28}
    assert torch.equal(target.generate(ids, **kwargs), target.generate(ids, assistant=jittered(target), **kwargs))
    with pytest.raises(ValueError, match=f"{kind} rotary embeddings"):
        target.generate(ids, assistant="ngram", **(kwargs | {"max_new_tokens": 29}))
    embedded = {"inputs_embeds": target.get_input_embeddings()(ids).detach()}
    assert torch.equal(
        target.generate(**embedded, assistant=False, **kwargs), target.generate(**embedded, assistant="ngram", **kwargs)
    )
    with pytest.raises(ValueError, match=f"{kind} rotary embeddings"):
        target.generate(**embedded, assistant="ngram", **(kwargs | {"max_new_tokens": 29}))


def test_one_row_that_starts_beyond_the_border_of_longrope():
    target = roped("longrope", 10, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    ids = prompts(1)[0]
    kwargs = GREEDY | {"max_new_tokens": 25}
    assert torch.equal(target.generate(ids, **kwargs), target.generate(ids, assistant=jittered(target), **kwargs))


@pytest.mark.parametrize("family", ["mistral8", "gemma3", "llama"])
@pytest.mark.parametrize("place", [slice(-2, None), slice(5, 6)])
def test_masks_with_holes_of_the_users_own(family, place):
    target = hf_specdec.enable(tiny(family))
    ids, _ = prompts(3)
    mask = torch.ones_like(ids)
    mask[1:, place] = 0
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 25}
    plain = target.generate(ids, **kwargs)
    for drafter in (jittered(target), PromptLookup(1, 3)):
        assert torch.equal(plain, target.generate(ids, assistant=drafter, **kwargs))


def test_models_that_do_not_read_ahead_are_refused():
    vision = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
    }
    config = GitConfig(vision_config=vision | {"patch_size": 16}, vocab_size=64, hidden_size=24, num_hidden_layers=1)
    with pytest.raises(ValueError, match="GitForCausalLM cannot read several tokens"):
        hf_specdec.enable(GitForCausalLM(config))


@pytest.mark.parametrize("make", ["openai-gpt", "xlnet"])
def test_a_default_assistant_sits_out_models_without_a_cache(make):
    torch.manual_seed(0)
    if make == "xlnet":
        model = XLNetLMHeadModel(XLNetConfig(vocab_size=64, d_model=32, n_layer=1, n_head=2, d_inner=32))
    else:
        model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    kwargs = GREEDY | {"max_new_tokens": 6}
    plain = model.eval().generate(ids, **kwargs)
    hf_specdec.enable(model, assistant="ngram")
    with pytest.raises(ValueError, match="no key-value cache"):
        model.generate(ids, assistant="ngram", **kwargs)
    assert make == "openai-gpt" or torch.equal(plain, model.generate(ids, **kwargs))


def test_prompts_of_another_integer_type():
    target = hf_specdec.enable(tiny())
    ids = prompts(1)[0]
    kwargs = GREEDY | {"max_new_tokens": 12}
    assert torch.equal(target.generate(ids, **kwargs), target.generate(ids.int(), assistant="ngram", **kwargs).long())


def test_compiled_wrappers_are_seen_through():
    target, drafter = tiny(), jittered(tiny())
    compiled = hf_specdec.enable(torch.compile(target))
    ids = prompts(1)[0]
    kwargs = GREEDY | {"max_new_tokens": 12}
    ours = compiled.generate(ids, assistant=torch.compile(drafter), **kwargs)
    assert hf_specdec.last_stats(compiled).drafted > 0
    hf_specdec.disable(compiled)
    assert torch.equal(ours, target.generate(ids, **kwargs))
    assert "generate" not in vars(target)


def test_weights_offloaded_by_accelerate():
    from accelerate import cpu_offload

    target, drafter = hf_specdec.enable(tiny()), jittered(tiny())
    ids, mask = prompts(3)
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 15}
    plain = target.generate(ids, **kwargs)
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.device.type == "meta"
    for assistant in ("ngram", DraftModel(drafter)):
        assert torch.equal(plain, target.generate(ids, assistant=assistant, **kwargs))


def test_a_class_in_place_of_a_drafter_is_told_so():
    with pytest.raises(ValueError, match=r"pass an object, PromptLookup\(\.\.\.\)"):
        hf_specdec.enable(tiny(), assistant=PromptLookup)


def lfm2():
    """Convolution layers keep the last tokens of all rows in one block."""
    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
    return Lfm2ForCausalLM(Lfm2Config(**COMMON | layers, vocab_size=64, block_auto_adjust_ff_dim=False))


def gemma3n():
    """The last layers read the keys of earlier ones."""
    layers = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    sizes = {"hidden_size_per_layer_input": 8, "head_dim": 8, "sliding_window": 6, "intermediate_size": [64] * 4}
    extras = {"altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    vocabularies = {"vocab_size": 64, "vocab_size_per_layer_input": 64, "initializer_range": 0.1}
    return Gemma3nForCausalLM(Gemma3nTextConfig(**COMMON | layers | sizes | extras | vocabularies))


class Unknown(LogitsProcessor):
    """A processor that may have a state, as far as anyone knows: the batch advances in lockstep."""

    def __call__(self, input_ids, scores):
        return scores


@pytest.fixture(params=[lfm2, gemma3n])
def stiff(request):
    """A model whose cache cannot be rearranged row by row (on older hosts, Gemma3n's can)."""
    torch.manual_seed(0)
    return request.param().eval().double()


@pytest.mark.parametrize("ends", [None, [2, 7, 11, 30]])
@pytest.mark.parametrize("is_target", [True, False])
def test_caches_that_cannot_be_rearranged_draft_in_lockstep(stiff, ends, is_target):
    target = hf_specdec.enable(copy.deepcopy(stiff) if is_target else tiny())
    ids, mask = prompts(3)
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 30, "eos_token_id": ends}
    plain = target.generate(ids, **kwargs)
    for drafter in (stiff, jittered(stiff)):
        ours = target.generate(ids, assistant=drafter, logits_processor=LogitsProcessorList([Unknown()]), **kwargs)
        assert torch.equal(plain, ours)
        assert hf_specdec.last_stats(target).drafted > 0


def test_caches_that_cannot_be_rearranged_are_refused_where_rows_are_ragged():
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(3)
    with pytest.raises(ValueError, match="cannot draft for several rows: its cache"):
        target.generate(ids, attention_mask=mask, assistant=lfm2().double(), **GREEDY)


def test_a_stiff_cache_in_the_middle_of_lockstep_drafts_like_a_fresh_one(stiff):
    """Rows of a batch draft what each would draft alone, whatever was accepted before."""
    ids, mask = prompts(3)

    def start(state):
        return DraftModel(stiff).start(
            DraftContext(stiff, False, Scorer(LogitsProcessorList()), in_lockstep=True), state
        )

    state = DecodeState(ids, mask, fill=0)
    session = start(state)
    for kept, finished in ((2, False), (0, False), (4, False), (1, True), (4, True)):
        draft = session.propose(state, [4, 4, 0 if finished else 4], None)
        appended = [[*row[:kept], 5] for row in draft.tokens.tolist()]
        state.append(appended)
        accepted = [kept, kept, 0 if finished else kept]
        outcome = Outcome(appended, [kept + 1] * 3, draft.lengths.tolist(), accepted, [False, False, finished])
        state.commit(outcome)
        session.commit(state, outcome)
    here = session.propose(state, [4, 4, 0], None)
    for row in (0, 1):
        alone = DecodeState(torch.tensor([state.tokens[row]]), None, fill=0)
        assert start(alone).propose(alone, [4], None).tokens.tolist() == [here.tokens[row].tolist()]


REMOTE_CODE = '''
from transformers import LlamaConfig, LlamaForCausalLM


class ShiftedConfig(LlamaConfig):
    model_type = "shifted"


class ShiftedForCausalLM(LlamaForCausalLM):
    """Its embeddings depend on an argument that its own preparation adds to every pass."""

    config_class = ShiftedConfig

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        CUT
        inputs["shift"] = inputs["input_ids"] % 3
        return inputs

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, shift=None, **kwargs):
        embeddings = self.get_input_embeddings()(input_ids)
        if shift is not None:
            embeddings = embeddings * (1 + 0.5 * shift[..., None])
        known = {"attention_mask": attention_mask, "position_ids": position_ids}
        return super().forward(inputs_embeds=embeddings, **known, **kwargs)
'''


def from_remote_code(folder, monkeypatch, cut=""):
    """A model whose folder brings its own code."""
    import transformers.dynamic_module_utils as loading
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(loading, "HF_MODULES_CACHE", str(folder / "modules"))
    path = folder / ("cut" if cut else "shifted")
    tiny().save_pretrained(path)
    (path / "modeling_shifted.py").write_text(REMOTE_CODE.replace("CUT", cut or "pass"))
    config = json.loads((path / "config.json").read_text())
    own = {"AutoConfig": "ShiftedConfig", "AutoModelForCausalLM": "ShiftedForCausalLM"}
    config |= {"model_type": "shifted", "auto_map": {auto: f"modeling_shifted.{name}" for auto, name in own.items()}}
    (path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float64)
    assert type(model).__module__.startswith("transformers_modules")
    return hf_specdec.enable(model.eval())


@pytest.mark.parametrize("num_rows", [1, 3])
def test_remote_code_that_prepares_its_own_inputs(num_rows, tmp_path, monkeypatch):
    target = from_remote_code(tmp_path, monkeypatch)
    ids, mask = prompts(num_rows)
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 20}
    plain = target.generate(ids, **kwargs)
    assert not torch.equal(plain, tiny().generate(ids, **kwargs))
    for drafter in (DraftModel(target), DraftModel(jittered(tiny())), PromptLookup(1, 3)):
        assert torch.equal(plain, target.generate(ids, assistant=drafter, **kwargs))
        assert drafter.stats.drafted > 0


def test_remote_code_that_feeds_one_token_a_pass_is_refused(tmp_path, monkeypatch):
    """As preparations of older days do: behind a cache, whatever came before the last token must have been read."""
    cut = 'inputs["input_ids"] = inputs["input_ids"][:, -1:] if input_ids.shape[1] < 8 else inputs["input_ids"]'
    target = from_remote_code(tmp_path, monkeypatch, cut)
    with pytest.raises(ValueError, match=r"ShiftedForCausalLM\.prepare_inputs_for_generation feeds 1 of"):
        target.generate(prompts(1)[0], assistant=PromptLookup(1, 3), **GREEDY, max_new_tokens=20)


def dispatched(model, folder, devices):
    """The model spread over devices: embeddings and the first layer, the second layer, the rest."""
    from accelerate import dispatch_model

    parts = [
        ["model.embed_tokens", "model.rotary_emb", "model.layers.0"],
        ["model.layers.1"],
        ["model.norm", "lm_head"],
    ]
    places = {name: device for names, device in zip(parts, devices, strict=True) for name in names}
    main = next(device for device in devices if device != "disk")
    return dispatch_model(model, places, main_device=main, offload_dir=folder)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_device_map_over_cpu_and_disk(num_rows, tmp_path):
    plain_model = tiny()
    target = hf_specdec.enable(dispatched(tiny(), tmp_path, ["cpu", "disk", "cpu"]))
    assert set(target.hf_device_map.values()) == {"cpu", "disk"}
    ids, mask = prompts(num_rows)
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 15}
    plain = plain_model.generate(ids, **kwargs)
    for assistant in ("ngram", DraftModel(jittered(plain_model))):
        assert torch.equal(plain, target.generate(ids, assistant=assistant, **kwargs))


def test_a_drafter_with_a_device_map(tmp_path):
    target = hf_specdec.enable(tiny())
    drafter = DraftModel(dispatched(jittered(target), tmp_path, ["cpu", "disk", "cpu"]))
    ids, mask = prompts(3)
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 15}
    assert torch.equal(target.generate(ids, **kwargs), target.generate(ids, assistant=drafter, **kwargs))
    assert drafter.stats.accepted > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("devices", [["cuda:0", "cpu", "cuda:0"], ["cuda:0", "cuda:1", "cuda:1"]])
def test_a_device_map_over_accelerators(devices, tmp_path):
    if "cuda:1" in devices and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    target = hf_specdec.enable(dispatched(tiny(), tmp_path, devices))
    ids, mask = (x.to("cuda:0") for x in prompts(3))
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 15}
    plain = target.generate(ids, **kwargs)
    for assistant in ("ngram", DraftModel(jittered(tiny())), DraftModel(jittered(tiny()).to("cuda:0"))):
        assert torch.equal(plain, target.generate(ids, assistant=assistant, **kwargs))
