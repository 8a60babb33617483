"""Eager and compiled passes, by themselves and in plain and speculative generation; prints one JSON document last.

    python benchmarks/compiled.py [--target DIR] [--device cuda] [--rows 1,8] [--widths 1,8] [--max-new-tokens 96]
        [--num-draft-tokens 7] [--output FILE]

First comes a grid of single passes: so many rows, so many tokens a row, behind texts of 128 tokens in a static cache.
Then prompt after prompt is answered (`--max-new-tokens 0` leaves that out). Compiled calls use a static cache and the
host's CompileConfig (on a CPU without CUDA graphs, and by its own switch for other devices). The first call of every
way warms it up and compiles; what it took is reported by itself. After that all ways answer all prompts in turn.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig

import hf_specdec
from hf_specdec import PromptLookup, host
from hf_specdec.cached_model import CachedModel, CompiledPasses
from hf_specdec.checks.bench import clock, environment, publish, rotated
from hf_specdec.cli.shared import whole_numbers
from hf_specdec.loading import encode, load_target

PROMPTS = (
    "Repeat this sentence five times: the quick brown fox jumps over the lazy dog.",
    "Write a Python class Point with x and y, and methods add, subtract and scale.",
    "List the months of the year, each with its number of days, as a JSON object.",
    "Summarise: The committee met on Monday. The committee agreed on the budget. It will meet again on Friday.",
)

NUM_SLOTS = 256  # of the grid's caches; texts fill half of them
NUM_COLD = 3  # passes that compile, are recorded, are replayed for the first time


def main(argv: list[str] | None = None) -> None:
    """Warms up, measures, prints a table and the document."""
    options = parsed(argv)
    model, tokenizer = load_target(options.target, options.dtype, options.device)
    hf_specdec.enable(model)
    document = {"environment": environment(model), "max_new_tokens": options.max_new_tokens}
    document["passes"] = pass_grid(model, options.rows, options.widths, options.repeats)
    Console(width=120).print(table_of_passes(document["passes"]))
    if options.max_new_tokens:
        ways = settings(model, options.num_draft_tokens)
        prompts = [encode(tokenizer, [[{"role": "user", "content": text}]], model.device) for text in PROMPTS]
        document["ways"] = measured(model, ways, prompts, options.max_new_tokens)
        Console(width=120).print(table(document["ways"]))
    publish(document, options.output)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--rows", type=whole_numbers, default=(1, 8))
    parser.add_argument("--widths", type=whole_numbers, default=(1, 8))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(argv)


def compilation(model: Any) -> CompileConfig:
    """How passes are compiled: with graphs of the device on a GPU."""
    is_cuda = model.device.type == "cuda"
    config = CompileConfig(mode="reduce-overhead" if is_cuda else "default", dynamic=False)
    config._compile_all_devices = True
    return config


# --- passes by themselves ---------------------------------------------------------------------------------


def pass_grid(model: Any, rows: tuple[int, ...], widths: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """For every batch size and width: milliseconds of eager and compiled passes, and seconds of the first compiled."""
    grid = []
    for num_rows in rows:
        eager = pass_seconds(model, num_rows, widths, repeats, is_compiled=False)
        compiled = pass_seconds(model, num_rows, widths, repeats, is_compiled=True)
        for width in widths:
            found = {"rows": num_rows, "width": width, "first_compiled_seconds": compiled[width][0]}
            found["eager_milliseconds"] = 1000 * statistics.median(eager[width][NUM_COLD:])
            found["compiled_milliseconds"] = 1000 * statistics.median(compiled[width][NUM_COLD:])
            grid.append(found)
    return grid


@torch.no_grad()
def pass_seconds(
    model: Any, num_rows: int, widths: tuple[int, ...], repeats: int, is_compiled: bool
) -> dict[int, list[float]]:
    """Seconds of passes of every width, each forgotten; the first of each compile, record and warm up."""
    cache = host.new_static_cache(model, NUM_SLOTS)
    config = GenerationConfig(compile_config=compilation(model))
    call = host.compiled_call(model, config, cache) if is_compiled else None
    passes = None if call is None else CompiledPasses(call, widths)
    ids = torch.randint(model.config.vocab_size, (num_rows, NUM_SLOTS // 2), device=model.device)
    reader = CachedModel(model, cache, host.draft_arguments(model), num_rows, model.device, compiled=passes)
    reader.read(ids)
    reader.commit([ids.shape[1]] * num_rows)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _, width in itertools.product(range(repeats + NUM_COLD), widths):
        start = clock(model.device)
        reader.read(ids[:, :width], num_logits=width)
        seconds[width].append(clock(model.device) - start)
        reader.commit([0] * num_rows)
    return seconds


def table_of_passes(grid: list[dict[str, Any]]) -> Table:
    """One line a batch size and width."""
    shown = Table(title="Milliseconds of a pass (medians)")
    for heading in ("rows", "tokens a row", "eager", "compiled", "ratio", "the first compiled, seconds"):
        shown.add_column(heading)
    for found in grid:
        eager, compiled = found["eager_milliseconds"], found["compiled_milliseconds"]
        numbers = [f"{eager:.2f}", f"{compiled:.2f}", f"{eager / compiled:.2f}"]
        numbers.append(f"{found['first_compiled_seconds']:.0f}")
        shown.add_row(str(found["rows"]), str(found["width"]), *numbers)
    return shown


# --- generation -------------------------------------------------------------------------------------------


def settings(model: Any, num_draft_tokens: int) -> dict[str, dict[str, Any]]:
    """Arguments of `generate` for every way."""
    compiled = {"cache_implementation": "static", "compile_config": compilation(model), "max_cache_len": 512}
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
