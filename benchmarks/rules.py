"""What judging a draft costs at a large vocabulary, beside the pass that judges it: one JSON document last.

    python benchmarks/rules.py [--vocabulary 151936] [--rows 1,16] [--num-draft-tokens 5] [--shape 8b] [--device cuda]
        [--output FILE]

Timed is everything between the target's logits and the round's outcome, its one read of the device included: greedy
drafts, drafts that are the drafter's only proposals under sampling, and drafts drawn from a law under the token and the
block rule. The pass is that of a random-weight model of a known shape (`benchmarks/overhead.py`).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from overhead import SHAPES, numbers, pass_seconds, successor_model
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_specdec.accept import Draft
from hf_specdec.checks.bench import clock, environment, publish
from hf_specdec.judge import Judge
from hf_specdec.noise import Noise
from hf_specdec.recording import Recorder
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState
from hf_specdec.stopping import Stopping

# By name: whether the call samples, its rule, whether the draft was drawn from a law.
WAYS = {
    "greedy": (False, "token", False),
    "sampled, copies": (True, "block", False),
    "sampled, token rule": (True, "token", True),
    "sampled, block rule": (True, "block", True),
}


def main(argv: list[str] | None = None) -> None:
    """Measures all ways at all batch sizes, prints a table and the document."""
    options = parsed(argv)
    device = torch.device(options.device)
    model = successor_model(options.shape, options.dtype, options.device)
    results = {}
    for rows in options.rows:
        ids = torch.randint(model.config.vocab_size, (rows, 128), device=device)
        seconds = pass_seconds(model, ids, [options.num_draft_tokens], options.repeats)[options.num_draft_tokens]
        for name, way in WAYS.items():
            judging = judging_seconds(rows, *way, options, device)
            results[f"{rows} rows, {name}"] = {
                "milliseconds": 1000 * judging,
                "milliseconds_a_pass": 1000 * seconds,
                "share_of_the_pass": judging / seconds,
            }
    Console(width=120).print(table(results))
    publish({"environment": environment(model), "vocabulary": options.vocabulary, "results": results}, options.output)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--rows", type=numbers(int), default=[1, 16])
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(argv)


@torch.inference_mode()
def judging_seconds(
    rows: int, do_sample: bool, rule: str, is_drawn: bool, options: argparse.Namespace, device: torch.device
) -> float:
    """Median seconds from logits to the outcome."""
    vocabulary, width = options.vocabulary, options.num_draft_tokens
    state = DecodeState(torch.ones(rows, 8, dtype=torch.long, device=device), None, fill=0)
    logits = torch.randn(rows, width + 1, vocabulary, device=device)
    laws = (logits[:, :width] + torch.randn(rows, width, vocabulary, device=device)).softmax(dim=-1)
    tokens = torch.stack([torch.multinomial(law, 1)[:, 0] for law in laws.unbind(dim=1)], dim=1)
    lengths = torch.full((rows,), width, device=device)
    draft = Draft(tokens, lengths, laws if is_drawn else None)
    nothing = GenerationConfig()
    judge = Judge(
        do_sample,
        rule,
        Scorer(LogitsProcessorList()),
        Stopping(StoppingCriteriaList()),
        Recorder(nothing, rows),
    )
    seconds = []
    for number in range(10 * options.repeats + 2):
        target_pass: Any = SimpleNamespace(logits=logits.clone())
        noise = Noise(number, device).round(list(range(rows)), [0] * rows, width) if do_sample else None
        now = clock(device)
        judge.all_at_once(state, draft, target_pass, noise)
        if number >= 2:
            seconds.append(clock(device) - now)
    return statistics.median(seconds)


def table(results: dict[str, dict[str, float]]) -> Table:
    """One line a way and batch size."""
    shown = Table(title="Judging a draft")
    for heading in ("", "milliseconds", "the pass, ms", "share"):
        shown.add_column(heading)
    for name, result in results.items():
        shown.add_row(
            name,
            f"{result['milliseconds']:.2f}",
            f"{result['milliseconds_a_pass']:.1f}",
            f"{result['share_of_the_pass']:.1%}",
        )
    return shown


if __name__ == "__main__":
    main()
