"""Eager and compiled passes, plain and speculative, on one prompt after the other; prints one JSON document last.

    python benchmarks/compiled.py [--target DIR] [--max-new-tokens 96] [--num-draft-tokens 7] [--output FILE]

Compiled calls use a static cache and the host's CompileConfig (on a CPU without CUDA graphs, and by its own switch
for other devices). The first call of every way warms it up and compiles; what it took is reported by itself. After that
all ways answer all prompts in turn.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters
from transformers import CompileConfig

import hf_specdec
from hf_specdec import PromptLookup
from hf_specdec.checks.bench import clock, environment, publish, rotated
from hf_specdec.loading import encode, load_target

PROMPTS = (
    "Repeat this sentence five times: the quick brown fox jumps over the lazy dog.",
    "Write a Python class Point with x and y, and methods add, subtract and scale.",
    "List the months of the year, each with its number of days, as a JSON object.",
    "Summarise: The committee met on Monday. The committee agreed on the budget. It will meet again on Friday.",
)


def main(argv: list[str] | None = None) -> None:
    """Warms up, measures, prints a table and the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    model, tokenizer = load_target(options.target, options.dtype)
    hf_specdec.enable(model)
    described = environment(model)
    ways = settings(model, options.num_draft_tokens)
    prompts = [encode(tokenizer, [[{"role": "user", "content": text}]], model.device) for text in PROMPTS]
    results = measured(model, ways, prompts, options.max_new_tokens)
    Console(width=120).print(table(results))
    document = {"environment": described, "max_new_tokens": options.max_new_tokens, "ways": results}
    publish(document, options.output)


def settings(model: Any, num_draft_tokens: int) -> dict[str, dict[str, Any]]:
    """Arguments of `generate` for every way."""
    is_cuda = model.device.type == "cuda"
    config = CompileConfig(mode="reduce-overhead" if is_cuda else "default", dynamic=False)
    config._compile_all_devices = True
    compiled = {"cache_implementation": "static", "compile_config": config, "max_cache_len": 512}
    drafted = {"assistant": PromptLookup(), "num_draft_tokens": num_draft_tokens}
    return {
        "eager, plain": {"assistant": False},
        "eager, speculative": drafted,
        "compiled, plain": {"assistant": False} | compiled,
        "compiled, speculative": drafted | compiled,
    }


def measured(model: Any, ways: dict[str, dict], prompts: list[dict], num_tokens: int) -> dict[str, dict[str, Any]]:
    """For every way: seconds of its warm-up, seconds per token of every prompt, graphs compiled after the warm-up."""
    results: dict[str, dict[str, Any]] = {name: {"seconds_per_token": [], "graphs_afterwards": 0} for name in ways}
    for name, arguments in ways.items():
        start = clock(model.device)
        for prompt in prompts[:2]:
            model.generate(**prompt, **arguments, do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
        results[name]["warm_up_seconds"] = clock(model.device) - start
        print(f"{name}: warm-up {results[name]['warm_up_seconds']:.0f} s", flush=True)
    for number, prompt in enumerate(prompts * 2):
        for name in rotated(list(ways), number):
            graphs, start = counters["stats"]["unique_graphs"], clock(model.device)
            output = model.generate(**prompt, **ways[name], do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
            new = output.shape[1] - prompt["input_ids"].shape[1]
            results[name]["seconds_per_token"].append((clock(model.device) - start) / new)
            results[name]["graphs_afterwards"] += counters["stats"]["unique_graphs"] - graphs
    plain = results["eager, plain"]["seconds_per_token"]
    for result in results.values():
        pairs = zip(plain, result["seconds_per_token"], strict=True)
        result["speedup"] = statistics.median(base / own for base, own in pairs)
    return results


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One line a way."""
    shown = Table(title="Speed-up against eager plain generation (median of paired ratios)")
    for heading in ("way", "speed-up", "milliseconds a token", "warm-up, seconds", "compiled afterwards"):
        shown.add_column(heading)
    for name, result in results.items():
        milliseconds = 1000 * statistics.median(result["seconds_per_token"])
        shown.add_row(
            name,
            f"{result['speedup']:.2f}",
            f"{milliseconds:.1f}",
            f"{result['warm_up_seconds']:.0f}",
            str(result["graphs_afterwards"]),
        )
    return shown


if __name__ == "__main__":
    main()
