"""Compiled passes on static caches: few shapes, no compilation once they are warm, the same text."""

from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig, StaticCache
from transformers.cache_utils import StaticLayer

import hf_specdec
from hf_specdec import DraftModel, PromptLookup, host
from tests.models import jittered, prompts, tiny

K = 6


class Compiler:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, inputs):
        self.num_graphs += 1
        return graph.forward

    def __deepcopy__(self, memo):  # the host copies its settings
        return self


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


def compiled(backend, **kwargs):
    """Arguments of a call whose passes are compiled, each shape by itself."""
    settings = CompileConfig(backend=backend, mode=None, dynamic=False)
    settings._compile_all_devices = True
    return PLAIN | {"compile_config": settings} | kwargs


PLAIN = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
STATIC = {"cache_implementation": "static"}
# With the passes each may need: plain steps, short and full drafts; the draft model's own two.
DRAFTERS = {
    "prompt-lookup": (lambda target: PromptLookup(num_draft_tokens=K), 3),
    "draft-model": (lambda target: DraftModel(jittered(target, 0.05), num_draft_tokens=K), 5),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_width_is_compiled_once(compiler, drafter, num_rows, family):
    target = hf_specdec.enable(tiny(family))
    build, num_widths = DRAFTERS[drafter]
    assistant = build(target)
    for call in range(4):
        ids, mask = prompts(num_rows, longest=12 - call, seed=call)
        plain = target.generate(ids, attention_mask=mask, assistant=False, **PLAIN)
        ours = target.generate(ids, attention_mask=mask, assistant=assistant, **STATIC, **compiled(compiler))
        assert torch.equal(ours, plain)
    assert 2 <= compiler.num_graphs <= num_widths


def test_sampling_and_lockstep(compiler):
    """A stateful processor judges step by step; padding behind a draft is never judged."""
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(3)
    kwargs = compiled(compiler, attention_mask=mask, prefix_allowed_tokens_fn=lambda row, text: list(range(3, 64)))
    plain = target.generate(ids, assistant=False, **kwargs)
    assert torch.equal(target.generate(ids, assistant=PromptLookup(num_draft_tokens=K), **STATIC, **kwargs), plain)
    for rule in ("token", "block"):
        given = {"attention_mask": mask, "do_sample": True, "seed": 5, "verification": rule}
        eager = target.generate(ids, assistant=PromptLookup(num_draft_tokens=K), **(PLAIN | given))
        ours = target.generate(ids, assistant=PromptLookup(num_draft_tokens=K), **STATIC, **compiled(compiler, **given))
        assert torch.equal(ours, eager)
    assert compiler.num_graphs > 0


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="the oldest host cannot roll back a static cache")
@pytest.mark.parametrize("num_rows", [1, 3])
def test_passes_get_narrower_near_the_end_of_the_users_own_cache(compiler, num_rows):
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(num_rows)
    plain = target.generate(ids, attention_mask=mask, assistant=False, **PLAIN)
    cache = StaticCache(config=target.config, max_cache_len=ids.shape[1] + 23)
    kwargs = compiled(compiler, attention_mask=mask) | {host.CACHE_NAME: cache}
    assert torch.equal(target.generate(ids, assistant=PromptLookup(num_draft_tokens=K), **kwargs), plain)
    assert 0 < compiler.num_graphs <= 3


def test_uncompiled_calls_stay_uncompiled(compiler):
    target = hf_specdec.enable(tiny())
    ids, _ = prompts(1)
    target.generate(ids, assistant="ngram", **STATIC, **compiled(compiler, disable_compile=True))
    assert compiler.num_graphs == 0


@pytest.mark.slow
def test_with_the_real_compiler():
    torch._dynamo.reset()
    target = hf_specdec.enable(tiny(dtype=torch.float32))
    for num_rows in (1, 3):
        ids, mask = prompts(num_rows)
        plain = target.generate(ids, attention_mask=mask, assistant=False, **PLAIN)
        kwargs = compiled("inductor", attention_mask=mask)
        for assistant in (PromptLookup(num_draft_tokens=K), DraftModel(jittered(target), num_draft_tokens=K)):
            assert torch.equal(target.generate(ids, assistant=assistant, **STATIC, **kwargs), plain)


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="the oldest host cannot roll back a static cache")
@pytest.mark.parametrize("num_rows", [1, 3])
def test_encoder_decoder_targets(compiler, num_rows):
    from tests.test_encoder_decoder import built, t5

    target = hf_specdec.enable(built(t5))
    ids, mask = prompts(num_rows)
    plain = target.generate(ids, attention_mask=mask, assistant=False, **PLAIN)
    for assistant in (PromptLookup(num_draft_tokens=K), DraftModel(jittered(target), num_draft_tokens=K)):
        kwargs = compiled(compiler, attention_mask=mask)
        assert torch.equal(target.generate(ids, assistant=assistant, **STATIC, **kwargs), plain)
    assert compiler.num_graphs > 0
