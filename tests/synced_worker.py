"""One of two processes that make every pass of their targets together, as under ZeRO-3: run by test_synced.py.

    python -m tests.synced_worker RANK FOLDER

Every pass takes part in a collective, so one that the other process does not make is noticed: it waits for ever, or
meets the collective in which processes ask each other whether to go on.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import BartConfig, BartForConditionalGeneration

import hf_specdec
from hf_specdec import DraftModel, host
from tests.models import jittered, prompts, tiny

COMMON = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 24}
MARK = 100.0


def bart() -> Any:
    torch.manual_seed(0)
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = BartConfig(vocab_size=64, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, init_std=0.3, **sizes)
    return BartForConditionalGeneration(config).eval().double()


def draft_model(target: Any) -> DraftModel:
    return DraftModel(jittered(target))


# name: how the target is made, the assistant, and what differs from COMMON, for both processes and for each.
CASES: dict[str, tuple[Any, Any, dict, tuple[dict, dict]]] = {
    "prompt lookup": (tiny, "ngram", {}, ({"rows": 1}, {"rows": 3, "eos_token_id": [2, 7, 11]})),
    "a draft model": (tiny, draft_model, {}, ({"rows": 3, "max_new_tokens": 9}, {"rows": 1})),
    "one token": (tiny, "ngram", {}, ({"max_new_tokens": 1}, {})),
    "equal processes": (tiny, "ngram", {"max_new_tokens": 1}, ({}, {})),
    "a sliding window": (lambda: tiny("gemma3"), "ngram", {}, ({"rows": 3}, {"rows": 3, "max_new_tokens": 4})),
    "a static cache": (tiny, "ngram", {"cache_implementation": "static"}, ({"rows": 3, "max_new_tokens": 3}, {})),
    "returned caches": (
        tiny,
        "ngram",
        {"return_dict_in_generate": True, "eos_token_id": [2, 7, 11]},
        ({"rows": 3}, {"rows": 1}),
    ),
    "an encoder": (bart, "ngram", {"eos_token_id": 2}, ({"rows": 1}, {"rows": 3, "max_new_tokens": 6})),
    "the last position": (
        lambda: tiny("gpt2", max_position_embeddings=20),
        "ngram",
        {},
        ({"max_new_tokens": 9}, {"longest": 3, "max_new_tokens": 18}),
    ),
    "a plain process": (tiny, "ngram", {}, ({"assistant": False, "max_new_tokens": 12}, {"rows": 3})),
    "a plain process that goes on": (tiny, "ngram", {}, ({"assistant": False}, {"max_new_tokens": 5})),
    "left to the model": (tiny, "ngram", {"synced_gpus": None}, ({"max_new_tokens": 6}, {})),
    "fully sharded": (tiny, draft_model, {"is_sharded": True}, ({"rows": 3, "max_new_tokens": 6}, {"rows": 1})),
}


def shard(target: Any) -> None:
    """Spreads the weights over both processes."""
    for layer in target.model.layers:
        fully_shard(layer)
    fully_shard(target)
    assert host.is_sharded(target)


def run(name: str, rank: int) -> dict[str, Any]:
    """One case in this process: its passes, and whether its texts are those of plain `generate`."""
    make, assistant, shared, own = CASES[name]
    settings = COMMON | shared | own[rank]
    target = hf_specdec.enable(make())
    ids, mask = prompts(settings.pop("rows", 1), settings.pop("longest", 12), seed=rank)
    kwargs = settings | {"attention_mask": mask}
    chosen = kwargs.pop("assistant", assistant(target) if callable(assistant) else assistant)
    kwargs.pop("synced_gpus", None)
    is_sharded = kwargs.pop("is_sharded", False)
    plain = target.generate(ids, assistant=False, **kwargs)
    if is_sharded:
        shard(target)
    passes = []

    def meet(*_: Any) -> None:
        mark = torch.tensor(MARK)
        dist.all_reduce(mark)
        assert mark.item() == 2 * MARK, f"{name}: process {rank} passes alone in pass {len(passes)}"
        passes.append(1)

    target.register_forward_pre_hook(meet)
    target._is_fsdp_managed_module = "synced_gpus" in shared
    ours = target.generate(ids, assistant=chosen, synced_gpus=shared.get("synced_gpus", True), **kwargs)
    texts = [output if torch.is_tensor(output) else output.sequences for output in (plain, ours)]
    rounds = 0 if chosen is False else hf_specdec.last_stats(target).target_passes
    return {"passes": len(passes), "rounds": rounds, "is_plain": torch.equal(*texts)}


def main(rank: int, folder: Path) -> None:
    """Runs all cases; a result file a process."""
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=timeout, rank=rank, world_size=2)
    torch.set_num_threads(1)
    results = {name: run(name, rank) for name in CASES}
    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
