"""Is `auto` ever slower than plain generation? Where nothing can be guessed; prints one JSON document last.

    python benchmarks/never_slower.py [--target DIR] [--repeats 4] [--max-new-tokens 128] [--output FILE]

Three hopeless workloads, each plain and with an assistant in turn, in one process:
  random prompts   prompts of random tokens, sampled at temperature 1.2, 1 and 8 rows, assistant="auto"
  useless drafter  a draft model with random weights and a quarter of the target's layers as an arm of Auto, 512 tokens
  the same, alone  the same draft model as the only drafter
A ratio is plain seconds per token over the assistant's; 1.0 means as fast.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec import Auto, DraftModel, PromptLookup, Suffix
from hf_specdec.checks.bench import clock, environment, publish, rotated
from hf_specdec.checks.report import typical
from hf_specdec.loading import encode, load_target

PLAIN, OURS = "plain", "assistant"
STORY = "Tell me a long story about a lighthouse keeper, her dog and the sea."


@dataclass(frozen=True)
class Workload:
    """What is generated, and with which assistant (built once, so that it keeps what it learns)."""

    inputs: dict[str, Any]
    settings: dict[str, Any]
    build: Callable[[], Any]


def main(argv: list[str] | None = None) -> None:
    """Measures all workloads, prints a table and the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    model, tokenizer = load_target(options.target, options.dtype)
    hf_specdec.enable(model)
    described = environment(model)
    results = {}
    for name, workload in workloads(model, tokenizer, options.max_new_tokens).items():
        results[name] = measured(model, workload, options.repeats)
        print(f"{name}: {results[name]['ratio']:.3f}", flush=True)
    Console(width=120).print(table(results))
    document = {"environment": described, "repeats": options.repeats, "workloads": results}
    publish(document, options.output)


def workloads(model: Any, tokenizer: Any, num_tokens: int) -> dict[str, Workload]:
    """All workloads by name."""
    sampled = {"do_sample": True, "temperature": 1.2, "top_k": 0, "max_new_tokens": num_tokens}
    long = {"do_sample": False, "max_new_tokens": 4 * num_tokens, "min_new_tokens": 4 * num_tokens}
    story = encode(tokenizer, [[{"role": "user", "content": STORY}]], model.device)
    useless = random_draft_model(model)
    copies = [Suffix(max_cached_requests=0), PromptLookup()]  # the story comes again, so nothing is remembered
    return {
        "random prompts, 1 row": Workload(random_prompts(model, 1), sampled, Auto),
        "random prompts, 8 rows": Workload(random_prompts(model, 8), sampled, Auto),
        "useless drafter": Workload(story, long, lambda: Auto([*copies, DraftModel(useless)])),
        "useless drafter alone": Workload(story, long, lambda: DraftModel(useless)),
    }


def random_prompts(model: Any, num_rows: int, length: int = 64) -> dict[str, Any]:
    """Prompts of uniformly random tokens."""
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(100, model.config.vocab_size, (num_rows, length), generator=generator).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def random_draft_model(model: Any) -> Any:
    """A model of the target's kind with random weights and a quarter of its layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = max(1, config.num_hidden_layers // 4)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(model.device, model.dtype).eval()


def measured(model: Any, workload: Workload, repeats: int) -> dict[str, Any]:
    """Seconds per token of both, call by call, and the median of their paired ratios."""
    assistants = {PLAIN: False, OURS: workload.build()}
    seconds: dict[str, list[float]] = {name: [] for name in assistants}
    for name, assistant in assistants.items():  # warm-up of the process, not of what an assistant learns
        generated(model, workload, assistant if name == PLAIN else "prompt-lookup", 8, seed=0)
    for repeat in range(repeats):
        for name in rotated(list(assistants), repeat):
            seconds[name].append(generated(model, workload, assistants[name], None, seed=repeat))
    ratios = [plain / ours for plain, ours in zip(seconds[PLAIN], seconds[OURS], strict=True)]
    median, interval = typical([ratios])
    return {"ratio": median, "interval": interval, "ratios": ratios, "seconds_per_token": seconds} | {
        "stats": assistants[OURS].stats.to_dict()
    }


def generated(model: Any, workload: Workload, assistant: Any, max_new_tokens: int | None, seed: int) -> float:
    """Seconds per token of one call."""
    settings = dict(workload.settings)
    if max_new_tokens is not None:
        settings |= {"max_new_tokens": max_new_tokens, "min_new_tokens": None}
    torch.manual_seed(seed)
    start = clock(model.device)
    output = model.generate(**workload.inputs, **settings, assistant=assistant, eos_token_id=None, pad_token_id=0)
    return (clock(model.device) - start) / (output.shape[1] - workload.inputs["input_ids"].shape[1])


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One line a workload."""
    shown = Table(title="Plain seconds per token over the assistant's (1.0: as fast)")
    for heading in ("workload", "median ratio", "95 % interval", "drafted", "accepted"):
        shown.add_column(heading)
    for name, result in results.items():
        low, high = result["interval"]
        counts = (str(result["stats"][key]) for key in ("drafted", "accepted"))
        shown.add_row(name, f"{result['ratio']:.3f}", f"{low:.3f} to {high:.3f}", *counts)
    return shown


if __name__ == "__main__":
    main()
