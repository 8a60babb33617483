"""What a round costs beside its pass: an oracle drafter of set acceptance on a target of random weights.

    python benchmarks/overhead.py [--shape 8b] [--rows 1,8,32] [--draft-tokens 4,8] [--acceptance 0.6,0.8]
        [--max-new-tokens 128] [--device cuda] [--dtype bfloat16] [--compiled] [--output FILE]

The target has the shape of a known model and says every token's successor, however its passes round, so an oracle can
draft what is right with a probability that is set. Compared with each other in rotating order: plain generation, rounds
of ours, and for one row the host's own assisted loop with the same oracle; with `--compiled`, also plain generation and
rounds of ours over compiled passes. Printed beside them is the time of the passes alone, so that the rest is what the
loop costs. Prints one JSON document last.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig

import hf_specdec
from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.cached_model import CachedModel
from hf_specdec.candidates import as_candidate_generator
from hf_specdec.checks.bench import clock, environment, publish, rotated
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.noise import RoundNoise
from hf_specdec.options import SpeculationOptions
from hf_specdec.state import DecodeState

# Hidden size, layers, heads, heads of keys and values, width of the MLP, vocabulary.
SHAPES = {
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "135m": (576, 30, 9, 3, 1536, 49152),
    "tiny": (64, 2, 4, 2, 128, 512),
}
PROMPT_TOKENS = 128
PLAIN, OURS, HOST = "plain", "rounds", "host's loop"
COMPILED = " (compiled)"


def main(argv: list[str] | None = None) -> None:
    """Measures every combination, prints a table and the document."""
    options = parsed(argv)
    model = successor_model(options.shape, options.dtype, options.device)
    hf_specdec.enable(model)
    results = {}
    for rows, num_drafted, acceptance in itertools.product(options.rows, options.draft_tokens, options.acceptance):
        name = f"{rows} rows, {num_drafted} drafted, acceptance {acceptance:g}"
        results[name] = measured(model, rows, num_drafted, acceptance, options)
        print(f"{name}: {results[name]}", flush=True)
    Console(width=140).print(table(results))
    publish({"environment": environment(model), "shape": options.shape, "results": results}, options.output)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=numbers(int), default=[1, 8, 32])
    parser.add_argument("--draft-tokens", type=numbers(int), default=[4, 8])
    parser.add_argument("--acceptance", type=numbers(float), default=[0.6, 0.8])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(argv)


def numbers(kind: type) -> Any:
    """Reads numbers that are separated by commas."""
    return lambda text: [kind(part) for part in text.split(",")]


# --- the target and the oracle ----------------------------------------------------------------------------


def successor_model(shape: str, dtype: str, device: str) -> Any:
    """A Llama of random weights that says token i + 1 behind token i, by far more than any rounding.

    Its layers work as hard as any, but add little to the embedding, and the output layer is the embedding moved by one.
    """
    hidden, layers, heads, shared, inner, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight.normal_()
        model.get_output_embeddings().weight.copy_(embeddings.roll(1, dims=0))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
    return model


class Oracle(Drafter):
    """Drafts successors, each right with a set probability."""

    name = "oracle"

    def __init__(self, num_drafted: int, acceptance: float, vocabulary: int):
        super().__init__(SpeculationOptions(num_draft_tokens=num_drafted))
        self.acceptance, self.vocabulary = acceptance, vocabulary

    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        return _Session(self)


class _Session(DraftSession):
    def __init__(self, oracle: Oracle):
        self.oracle, self.generator = oracle, torch.Generator().manual_seed(0)

    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        coins = torch.rand(len(limits), max(limits), generator=self.generator).tolist()
        copies = []
        for row, limit, row_coins in zip(state.rows, limits, coins, strict=True):
            last = state.tokens[row][-1]
            steps = (place + 1 + (coin >= self.oracle.acceptance) for place, coin in enumerate(row_coins[:limit]))
            copies.append([(last + step) % self.oracle.vocabulary for step in steps])
        return Draft.of_copies(copies, state.device)


# --- measuring --------------------------------------------------------------------------------------------


def measured(model: Any, rows: int, num_drafted: int, acceptance: float, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a token of every way, what the loop adds to a pass, tokens a round."""
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (rows, PROMPT_TOKENS), device=model.device)
    drafter = Oracle(num_drafted, acceptance, vocabulary)
    ways = arguments_of_ways(drafter, rows, options)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 1):
        for name in rotated(list(ways), repeat):
            taken = timed(model, ids, name, drafter, ways[name], options.max_new_tokens)
            if repeat > 0:  # the first one warms up, and compiles
                seconds[name].append(taken)
            if name == OURS:
                stats = hf_specdec.last_stats(model)
    passes = pass_seconds(model, ids, [0, num_drafted], options.repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    per_round = medians[OURS] / stats.target_passes
    return {
        "milliseconds_a_token": {name: 1000 * value / options.max_new_tokens for name, value in medians.items()},
        "speedup": {name: medians[PLAIN] / value for name, value in medians.items()},
        "tokens_a_round": stats.emitted / stats.rounds,
        "passes": stats.target_passes,
        "milliseconds_a_round": 1000 * per_round,
        "milliseconds_a_pass": 1000 * passes[num_drafted],
        "milliseconds_a_plain_pass": 1000 * passes[0],
        "overhead_of_a_round": per_round / passes[num_drafted] - 1,
    }


def arguments_of_ways(drafter: Drafter, rows: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What each way adds to the arguments of `generate`."""
    drafted = {"assistant": drafter}
    ways: dict[str, dict[str, Any]] = {PLAIN: {"assistant": False}, OURS: drafted}
    if rows == 1:
        ways[HOST] = {"assistant": False, "prompt_lookup_num_tokens": 1}  # whose candidates the oracle replaces
    if options.compiled:
        is_cuda = options.device.startswith("cuda")
        config = CompileConfig(mode="reduce-overhead" if is_cuda else "default", dynamic=False)
        config._compile_all_devices = True
        compiled = {"cache_implementation": "static", "compile_config": config}
        ways |= {PLAIN + COMPILED: {"assistant": False} | compiled, OURS + COMPILED: drafted | compiled}
    return ways


def timed(model: Any, ids: Tensor, name: str, drafter: Drafter, arguments: dict[str, Any], num_tokens: int) -> float:
    """Seconds of a call, whose text is checked."""

    def candidates(*args: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        return as_candidate_generator(drafter, model, generation_config or args[0])

    with mock.patch.object(model, "_get_candidate_generator", candidates):
        now = clock(model.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **arguments,
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        taken = clock(model.device) - now
    expected = (ids[:, -1:] + torch.arange(1, num_tokens + 1, device=ids.device)) % model.config.vocab_size
    if not torch.equal(output[:, ids.shape[1] :], expected):
        raise AssertionError(f"{name} did not say what the target says.")
    return taken


@torch.inference_mode()
def pass_seconds(model: Any, ids: Tensor, num_drafted: list[int], repeats: int) -> dict[int, float]:
    """Seconds of uncompiled passes over the last token and so many drafted ones behind a text, each forgotten."""
    reader = CachedModel(model, host.new_cache(model), host.draft_arguments(model), len(ids), ids.device)
    reader.read(ids)
    reader.commit([ids.shape[1]] * len(ids))
    seconds: dict[int, list[float]] = {width: [] for width in num_drafted}
    for repeat in range(10 * repeats + 2):
        for width in num_drafted:
            now = clock(model.device)
            reader.read(ids[:, : width + 1], num_logits=width + 1)
            taken = clock(model.device) - now
            reader.commit([0] * len(ids))
            if repeat >= 2:
                seconds[width].append(taken)
    return {width: statistics.median(values) for width, values in seconds.items()}


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One line a combination."""
    shown = Table(title="Milliseconds a token (speed-up), and what a round costs beside its pass")
    names = list(dict.fromkeys(way for result in results.values() for way in result["milliseconds_a_token"]))
    for heading in ("", *names, "tokens a round", "a round, ms", "its pass, ms", "overhead"):
        shown.add_column(heading)
    for name, result in results.items():
        tokens, speedup = result["milliseconds_a_token"], result["speedup"]
        shown.add_row(
            name,
            *(f"{tokens[way]:.1f} ({speedup[way]:.2f})" if way in tokens else "" for way in names),
            f"{result['tokens_a_round']:.2f}",
            f"{result['milliseconds_a_round']:.2f}",
            f"{result['milliseconds_a_pass']:.2f}",
            f"{result['overhead_of_a_round']:.1%}",
        )
    return shown


if __name__ == "__main__":
    main()
