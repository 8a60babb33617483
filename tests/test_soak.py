"""Many calls, several threads, long texts: nothing piles up."""

from __future__ import annotations

import gc
import resource
import threading

import pytest
import torch

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from hf_specdec.drafters.prompt_lookup import NgramIndex
from tests.models import jittered, prompts, tiny

OPTIONS = [
    {},
    {"do_sample": True, "seed": 3},
    {"return_dict_in_generate": True, "output_scores": True},
    {"repetition_penalty": 1.2},
    {"logits_processor": [lambda ids, scores: scores]},
    {"do_sample": True, "verification": "coupled", "seed": 1},
    {"cache_implementation": "static"},
]


def one_call(target, drafters, number, **more):
    ids, mask = prompts(1 + number % 3, 6 + number % 5, seed=number % 17)
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    kwargs |= OPTIONS[number % len(OPTIONS)] | more
    return target.generate(ids, assistant=drafters[number % len(drafters)], **kwargs)


@pytest.mark.slow
def test_five_thousand_calls_leave_memory_flat():
    """Peak memory may grow by 30 MiB after the first thousand calls (allocator noise), not by a leak a call."""
    target = hf_specdec.enable(tiny(dtype=torch.float32))
    drafters = [DraftModel(jittered(target)), PromptLookup(1, 3), "ngram"]
    peaks = []
    for number in range(5_000):
        one_call(target, drafters, number)
        if number in (999, 4_999):
            gc.collect()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    assert peaks[1] - peaks[0] < 30


def test_two_models_in_two_threads_share_a_drafter():
    shared = DraftModel(jittered(tiny(dtype=torch.float32)), num_draft_tokens=3)
    lookup = PromptLookup(1, 3)
    targets = [hf_specdec.enable(tiny(seed=seed, dtype=torch.float32)) for seed in (0, 4)]
    expected = [[one_call(t, [False], n * len(OPTIONS)).tolist() for n in range(6)] for t in targets]
    found: list[list] = [[], []]

    def work(which):
        for n in range(6):
            found[which].append(one_call(targets[which], [shared, lookup], n * len(OPTIONS)).tolist())

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert shared.stats.calls + lookup.stats.calls == 12


def test_a_lookup_index_grows_linearly():
    """100,000 tokens in steps: every n-gram is entered once, so work and memory are linear in the text."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(50, (100_000,), generator=generator).tolist()
    index = NgramIndex(1, 4, "frequent")
    for length in range(1_000, 100_001, 1_000):
        assert len(index.copy(text[:length], 8).tokens) == 8
        assert index.num_bytes <= max(100 * length, 50_000)


@pytest.mark.slow
def test_a_prompt_of_32k_tokens():
    target = hf_specdec.enable(tiny(dtype=torch.float32, max_position_embeddings=40_000))
    ids = torch.randint(3, 64, (1, 32_000), generator=torch.Generator().manual_seed(0))
    kwargs = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "prefill_chunk_size": 2_000}
    plain = target.generate(ids, assistant=False, **kwargs)
    for assistant in (PromptLookup(), DraftModel(jittered(target))):
        assert torch.equal(plain, target.generate(ids, assistant=assistant, **kwargs))
