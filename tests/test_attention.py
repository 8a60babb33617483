"""Attention implementations: each gives plain's text, or is refused by its name."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_specdec
from hf_specdec import DraftModel, PromptLookup, host
from tests.models import jittered, prompts, tiny

GREEDY = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": [2, 7, 11], "pad_token_id": 0}


def assert_identical(target, num_rows, **changes):
    ids, mask = prompts(num_rows)
    kwargs = GREEDY | {"attention_mask": mask} | changes
    plain = target.generate(ids, assistant=False, **kwargs)
    for drafter in (DraftModel(jittered(target)), DraftModel(target), PromptLookup(1, 3)):
        assert torch.equal(plain, target.generate(ids, assistant=drafter, **kwargs))
        assert drafter.stats.drafted > 0


def with_attention(name: str, family: str = "llama", **changes):
    """A target whose attention was switched without asking whether this machine has it."""
    target = tiny(family, **changes)
    target.config._attn_implementation = name
    return hf_specdec.enable(target)


# --- flash attention --------------------------------------------------------------------------------------


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """What the kernels compute, (B, L, heads, d): causal from the lower right corner, windows likewise."""
    ahead = k.shape[1] - q.shape[1]
    distance = torch.arange(q.shape[1])[:, None] + ahead - torch.arange(k.shape[1])
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window_size[0] >= 0:
        seen = seen & (distance <= window_size[0])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
):  # fmt: skip
    """The same for texts laid end to end, (tokens, heads, d)."""
    outputs = []
    for row in range(len(cu_seqlens_q) - 1):
        of_q = slice(cu_seqlens_q[row], cu_seqlens_q[row + 1])
        of_k = slice(cu_seqlens_k[row], cu_seqlens_k[row + 1])
        own = (q[None, of_q], k[None, of_k], v[None, of_k])
        outputs.append(flash_attn_func(*own, dropout_p, softmax_scale, causal, window_size)[0])
    return torch.cat(outputs)


@pytest.fixture
def flash_kernels(monkeypatch):
    """Kernels in plain torch below the host's own path of flash attention: its masks, unpadding and windows."""
    module = modeling_flash_attention_utils
    padding = (module._pad_input, module._unpad_input)
    kernels = (flash_attn_func, flash_attn_varlen_func, None, *padding)
    monkeypatch.setattr(module, "_loaded_implementation", None)
    monkeypatch.setattr(module, "_lazy_imports", lambda *_, **__: kernels)


@pytest.mark.parametrize("family", ["llama", "mistral8", "gemma3"])
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_flash_attention_gathers_what_holes_leave(flash_kernels, name, family):
    target = with_attention(name, family)
    for num_rows in (1, 3):
        assert_identical(target, num_rows)
    expected = hf_specdec.enable(tiny(family))
    ids, mask = prompts(3)
    texts = [m.generate(ids, attention_mask=mask, assistant=False, **GREEDY) for m in (target, expected)]
    assert torch.equal(*texts)  # so the kernels above compute attention


def test_flash_attention_reads_a_static_cache(flash_kernels):
    assert_identical(with_attention("flash_attention_2"), 3, cache_implementation="static")


def test_kernels_from_the_hub_go_the_way_of_flash_attention(flash_kernels):
    """So the host registers them when it has loaded one; loading needs the Hub."""
    name = "someone/flash-kernel"
    AttentionInterface.register(name, AttentionInterface()["flash_attention_2"])
    AttentionMaskInterface.register(name, AttentionMaskInterface()["flash_attention_2"])
    target = with_attention(name)
    assert host.attends_by_mask(target)
    assert_identical(target, 3)


# --- flex attention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral8"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(family, num_rows):
    """Not compiled: compiled flex attention knows no float64."""
    with torch.compiler.set_stance("force_eager"):
        assert_identical(with_attention("flex_attention", family), num_rows)


# --- functions of the user's own --------------------------------------------------------------------------


def counts_slots(module, query, key, value, attention_mask, **kwargs):
    """Looks at the slots that precede a token, masked or not: the further back, the less."""
    slots = torch.arange(key.shape[2], dtype=query.dtype)
    mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
    return sdpa_attention_forward(module, query, key, value, mask + (slots / 8).sin(), **kwargs)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_attention_of_the_users_own_sees_the_slots_that_plain_shows_it(num_rows):
    AttentionInterface.register("counts-slots", counts_slots)
    AttentionMaskInterface.register("counts-slots", lambda *args, **kwargs: sdpa_mask(*args, **_unskipped(kwargs)))
    target = with_attention("counts-slots")
    assert not host.attends_by_mask(target)
    ids, mask = prompts(num_rows)
    kwargs = GREEDY | {"attention_mask": mask, "max_new_tokens": 40, "eos_token_id": None}
    plain = target.generate(ids, assistant=False, **kwargs)
    for drafter in (DraftModel(jittered(target)), PromptLookup(1, 3)):
        assert torch.equal(plain, target.generate(ids, assistant=drafter, **kwargs))


def _unskipped(arguments):
    return arguments | {"allow_is_causal_skip": False}


def test_attention_without_a_mask_function_is_refused():
    AttentionInterface.register("maskless", sdpa_attention_forward)
    target = tiny()
    target.config._attn_implementation = "maskless"
    with pytest.raises(ValueError, match=r"attn_implementation='maskless' has no mask function.*register"):
        hf_specdec.enable(target)
    with pytest.raises(ValueError, match="maskless"):
        DraftModel(target)


@pytest.mark.parametrize("name", ["paged|eager", "paged|sdpa", "paged|flash_attention_2"])
def test_attention_of_continuous_batching_is_refused(name):
    target = hf_specdec.enable(tiny())
    target.config._attn_implementation = name
    with pytest.raises(ValueError, match=r"continuous batching.*set_attn_implementation"):
        target.generate(prompts(1)[0], assistant="ngram", **GREEDY)
