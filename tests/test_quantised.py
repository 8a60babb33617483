"""Quantised targets: those that round every token by itself give plain's text, the others are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig
from transformers.integrations.bitnet import AutoBitLinear

import hf_specdec
from hf_specdec import DraftModel
from tests.models import jittered, prompts, tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")

GREEDY = {"do_sample": False, "max_new_tokens": 25, "eos_token_id": [2, 7], "pad_token_id": 0}


def small(dtype=torch.float32):
    return tiny(hidden_size=64, intermediate_size=128, dtype=dtype)


def assert_identical(target, drafter):
    for num_rows in (1, 3):
        ids, mask = prompts(num_rows)
        kwargs = GREEDY | {"attention_mask": mask}
        plain = target.generate(ids, assistant=False, **kwargs)
        for assistant in ("ngram", DraftModel(target), drafter):
            assert torch.equal(plain, target.generate(ids, assistant=assistant, **kwargs))


def loaded(config, folder, **more):
    small().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32, **more).eval()


def test_ternary_weights_and_8_bit_activations():
    """BitNet's layers need nothing but torch. In float64: rounding activations magnifies smaller differences."""
    target = small(torch.float64)
    for name, layer in list(target.model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
            quantised = AutoBitLinear(**sizes, bias=False, dtype=torch.float64, online_quant=True)
            quantised.weight = layer.weight
            target.model.set_submodule(name, quantised)
    with torch.compiler.set_stance("force_eager"):
        assert not torch.equal(target(prompts(1)[0]).logits, small(torch.float64)(prompts(1)[0]).logits)
        assert_identical(hf_specdec.enable(target), jittered(small(torch.float64)))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quanto(weights, tmp_path):
    pytest.importorskip("optimum.quanto")
    target = hf_specdec.enable(loaded(QuantoConfig(weights=weights), tmp_path))
    assert_identical(target, jittered(small()))


def test_torchao(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    target = hf_specdec.enable(loaded(TorchAoConfig(quantization.Int8WeightOnlyConfig()), tmp_path))
    assert_identical(target, jittered(small()))


@pytest.mark.parametrize("options", [{"load_in_4bit": True}, {"load_in_8bit": True, "llm_int8_threshold": 0.0}])
def test_bitsandbytes(options, tmp_path):
    pytest.importorskip("bitsandbytes")
    target = hf_specdec.enable(loaded(BitsAndBytesConfig(**options), tmp_path, device_map="cpu"))
    assert_identical(target, jittered(small()))


def test_a_quantised_drafter_of_any_kind():
    target = hf_specdec.enable(tiny())
    drafter = torch.ao.quantization.quantize_dynamic(tiny(dtype=torch.float32), {torch.nn.Linear}, dtype=torch.qint8)
    ids, mask = prompts(3)
    kwargs = GREEDY | {"attention_mask": mask}
    assert torch.equal(target.generate(ids, **kwargs), target.generate(ids, assistant=drafter, **kwargs))


def test_activations_rounded_on_the_scale_of_a_whole_pass_are_refused():
    target = torch.ao.quantization.quantize_dynamic(small(), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"dynamic quantisation rounds all tokens.*assistant=False"):
        hf_specdec.enable(target)


def test_outliers_sought_in_a_whole_pass_are_refused():
    target = hf_specdec.enable(small())
    target.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match=r"llm_int8_threshold=6\.0.*llm_int8_threshold=0\.0"):
        target.generate(prompts(1)[0], assistant="ngram", **GREEDY)
