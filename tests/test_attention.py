"""Attention implementations: each gives plain's text, or is refused by its name."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_specdec
from hf_specdec import DraftModel, PromptLookup, host
from hf_specdec.host import attention
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


# --- sdpa, with keys read once for all heads that share them ------------------------------------------------


@pytest.fixture
def grouped_passes(monkeypatch):
    """Shapes of the queries that were laid end to end."""
    seen, true_sdpa = [], torch.nn.functional.scaled_dot_product_attention
    true_function = attention._sdpa_by_groups

    def watching(module, query, key, value, mask, **kwargs):
        def sdpa(queries, *rest, **settings):
            if query.shape[2] > 1 and queries.shape != query.shape:
                seen.append(tuple(query.shape))
            return true_sdpa(queries, *rest, **settings)

        with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", sdpa):
            return true_function(module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(attention, "_sdpa_by_groups", watching)
    return seen


@pytest.mark.parametrize("width", [1, 2, 5, 17, 65])
@pytest.mark.parametrize(("num_heads", "num_shared"), [(4, 4), (4, 2), (9, 3), (6, 1)])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "by head"])
def test_grouped_heads_attend_like_the_hosts(num_heads, num_shared, width, kind):
    generator = torch.Generator().manual_seed(width)
    query = torch.randn(3, num_heads, width, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 3, num_shared, 70, 8, generator=generator, dtype=torch.float64)
    seen = torch.rand(3, num_heads if kind == "by head" else 1, width, 70, generator=generator) < 0.7
    seen[..., 0] = True
    mask = {"none": None, "float": torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e9)}.get(
        kind, seen
    )
    module = torch.nn.Module()
    module.num_key_value_groups = num_heads // num_shared
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    with host.heads_in_groups():
        found, weights = AttentionInterface()["sdpa"](module, query, key, value, mask, scaling=0.3)
        ours, _ = attention._sdpa_by_groups(module, query, key, value, mask, scaling=0.3)
    assert weights is None and found.shape == expected.shape
    assert torch.allclose(ours, expected, rtol=0, atol=1e-12)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rounds_group_heads_and_leave_the_hosts_table_as_it_was(grouped_passes, num_rows):
    target = hf_specdec.enable(tiny())
    assert_identical(target, num_rows)
    assert grouped_passes and all(2 <= width <= 64 for _, _, width, _ in grouped_passes)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert host.attends_by_mask(target)


def test_a_failing_pass_leaves_the_hosts_table_as_it_was(monkeypatch):
    target = hf_specdec.enable(tiny())
    passes = []

    def failing(*_, **__):
        passes.append(ALL_ATTENTION_FUNCTIONS["sdpa"])
        if len(passes) == 3:
            raise RuntimeError("out of memory")

    target.register_forward_pre_hook(failing)
    ids, mask = prompts(2)
    with pytest.raises(RuntimeError, match="out of memory"):
        target.generate(ids, attention_mask=mask, assistant=PromptLookup(), **GREEDY)
    assert passes[0] is sdpa_attention_forward and passes[2] is attention._sdpa_by_groups
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_grouping_ends_with_the_last_thread_and_is_seen_by_none_but_its_own(grouped_passes):
    inside, outside = threading.Barrier(3), threading.Barrier(3)
    query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 6, 8)
    module, mask = torch.nn.Module(), torch.ones(1, 1, 2, 6, dtype=torch.bool)
    module.num_key_value_groups = 2

    def working():
        with host.heads_in_groups():
            inside.wait()
            outside.wait()

    threads = [threading.Thread(target=working) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert function is attention._sdpa_by_groups
    function(module, query, key, key, mask)  # this thread's passes are the host's own
    assert not grouped_passes
    outside.wait()
    for thread in threads:
        thread.join()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_an_sdpa_of_the_users_own_is_left_alone():
    calls = []

    def own(*args, **kwargs):
        calls.append(args[1].shape[2])
        return sdpa_attention_forward(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    try:
        assert_identical(hf_specdec.enable(tiny()), 1)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own and max(calls) > 1
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


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
