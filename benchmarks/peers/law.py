"""Whom do samples follow? Short texts of a tiny Llama against their law by enumeration."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from hf_specdec.checkpoints.write import write_head
from hf_specdec.heads import EagleHead
from hf_specdec.training.recipes.heads import head_config, initialise
from peers.heads import with_whole_head
from peers.kept import Kept
from peers.process import Process, started
from peers.side import GENERATE, PLAIN, Case
from tests.models import small
from tests.reference import p_value, target_law

PROMPT = [3, 4, 5, 3, 4]
VOCABULARY, LENGTH = 8, 3
ROUNDS = {"num_copied": 3, "num_drafted": 3}
# Temperature and top_p of every test.
DRAWS = {"T=1": (1.0, 1.0), "T=0.7, top_p=0.9": (0.7, 0.9)}
SEEDS_A_REQUEST = 100


def judged(names: list[str], options: argparse.Namespace, kept: Kept, console: Console) -> dict[str, Any]:
    """The tests of all peers: by peer, way and draw.

    Args:
        names: of the peers.
        options: `law_samples` and `environments` are read.
        kept: where finished tests are.
        console: where progress is shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        case, laws = tiny_case(Path(folder)), {}
        with started(names, case, options.environments, console) as processes:
            for name, process in processes.items():
                laws[name] = tests_of(process, options.law_samples, kept, console)
    return laws


def tiny_case(folder: Path) -> Case:
    """A target, a draft model and a head, whose laws have visible differences."""
    target, draft_model = small(0), small(5, layers=1)
    for model, name in ((target, "target"), (draft_model, "draft-model")):
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        model.save_pretrained(folder / name)
    torch.manual_seed(0)
    head = initialise(EagleHead(head_config(target, VOCABULARY)), target, torch.arange(VOCABULARY))
    (folder / "head").mkdir()
    write_head(head, folder / "head")
    folders = {"target": folder / "target", "draft_model": folder / "draft-model", "head": folder / "head"}
    case = Case(**{name: str(path) for name, path in folders.items()}, dtype="float32", threads=1, **ROUNDS)
    return with_whole_head(case, folder)


def tests_of(process: Process, num_samples: int, kept: Kept, console: Console) -> dict[str, Any]:
    """One peer's tests; plain ways are nobody's claim."""
    if process.error is not None:
        return {"error": process.error}
    results: dict[str, Any] = {way: {"error": error} for way, error in process.unusable.items()}
    for way in [way for way in process.ways if way not in (PLAIN, GENERATE)]:
        results[way] = {}
        for draw in DRAWS:
            key = "law", process.name, way, draw, num_samples
            if (found := kept.get(*key)) is None:
                found = tested(process, way, draw, num_samples, console)
                if "error" not in found:
                    kept.put(found, *key)
            results[way][draw] = found
    return results


def tested(process: Process, way: str, draw: str, num_samples: int, console: Console) -> dict[str, Any]:
    """Samples with the seeds 0, 1, 2, ..., and the p-value of their first tokens."""
    temperature, top_p = DRAWS[draw]
    asked = {"way": way, "prompt": PROMPT, "max_new_tokens": LENGTH + 1, "temperature": temperature, "top_p": top_p}
    samples: list[list[int]] = []
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{process.name}: {way}, {draw}", total=num_samples)
        while len(samples) < num_samples:
            seeds = range(len(samples), min(len(samples) + SEEDS_A_REQUEST, num_samples))
            answer = process.ask(**asked, seeds=list(seeds))
            if "error" in answer:
                return answer
            samples += [sample[:LENGTH] for sample in answer["samples"]]
            progress.update(bar, completed=len(samples))
    if not console.is_terminal:
        console.print(f"{process.name}: {way}, {draw}")
    return verdict(torch.tensor(samples), law_of(temperature, top_p))


def law_of(temperature: float, top_p: float) -> Tensor:
    """The probability of every text."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)])
    return target_law(small(0), torch.tensor([PROMPT]), processors, LENGTH, VOCABULARY)


def verdict(samples: Tensor, law: Tensor) -> dict[str, Any]:
    """The p-value, which is 0 if a text without probability was written."""
    impossible = int((law[tuple(samples.T)] == 0).sum())
    return {"samples": len(samples), "impossible": impossible, "p_value": 0.0 if impossible else p_value(samples, law)}
