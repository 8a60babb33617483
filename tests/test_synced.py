"""synced_gpus: processes that share the target's weights make all its passes together, whoever ends first."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import StaticCache

import hf_specdec
from hf_specdec import Auto, DraftModel, EarlyExit, PromptLookup, host
from tests.models import jittered, prompts, tiny
from tests.synced_worker import CASES

IDS = prompts(1)[0]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What both processes report of every case."""
    folder = tmp_path_factory.mktemp("synced")
    command = [sys.executable, "-m", "tests.synced_worker"]
    workers = [subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE) for rank in range(2)]
    try:
        errors = [worker.communicate(timeout=300)[1].decode() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], errors[0][-3000:] + errors[1][-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_processes_pass_together_until_all_have_ended(results, case):
    first, second = (result[case] for result in results)
    assert first["is_plain"] and second["is_plain"]
    assert first["passes"] == second["passes"] >= max(first["rounds"], second["rounds"]) > 0


def test_some_process_waited_for_the_other(results):
    rounds = [[result[case]["rounds"] for result in results] for case in CASES]
    assert any(first < second for first, second in rounds) and any(first > second > 0 for first, second in rounds)


def test_a_sharded_drafter_is_refused():
    target = hf_specdec.enable(tiny())
    drafter = jittered(target)
    drafter.lm_head.weight.ds_id = 0  # DeepSpeed numbers the weights that it spreads over processes
    assert torch.equal(
        target.generate(IDS, assistant=drafter, max_new_tokens=6), target.generate(IDS, max_new_tokens=6)
    )
    with pytest.raises(ValueError, match="drafter LlamaForCausalLM is sharded"):
        target.generate(IDS, assistant=drafter, synced_gpus=True)
    fully_sharded = jittered(target)
    fully_sharded._is_fsdp_managed_module = True
    with pytest.raises(ValueError, match="drafter LlamaForCausalLM is sharded"):
        target.generate(IDS, assistant=DraftModel(fully_sharded), synced_gpus=True)
    with pytest.raises(ValueError, match="drafter LlamaForCausalLM is sharded"):
        target.generate(IDS, assistant=Auto([PromptLookup(), drafter]), synced_gpus=True)
    with pytest.raises(ValueError, match="EarlyExit drafts with the target's own layers"):
        target.generate(IDS, assistant=Auto([PromptLookup(), EarlyExit(1)]), synced_gpus=True)


def test_processors_that_make_passes_of_their_own_are_refused():
    target = hf_specdec.enable(tiny())
    with pytest.raises(ValueError, match=r"guidance_scale=1\.5 makes passes of its own"):
        target.generate(IDS, assistant="ngram", synced_gpus=True, guidance_scale=1.5)


def test_a_fixed_cache_without_room_for_waiting_is_refused():
    target = hf_specdec.enable(tiny())
    cache = StaticCache(config=target.config, max_cache_len=20)
    if not cache.layers[0].is_croppable:
        pytest.skip("this Transformers cannot roll a user's static cache back")
    with pytest.raises(ValueError, match="fixed cache of 20 slots"):
        target.generate(IDS, assistant="ngram", synced_gpus=True, max_length=21, **{host.CACHE_NAME: cache})


def test_whether_processes_are_synced_is_decided_as_plain_generate_does(monkeypatch):
    model = tiny()
    assert not host.is_synced(model, None) and host.is_synced(model, True)
    monkeypatch.setattr(host.processes, "is_deepspeed_zero3_enabled", lambda: True)
    assert not host.is_synced(model, None)  # a single process
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert host.is_synced(model, None) and not host.is_synced(model, False)
