"""How often do the rules accept drawn drafts? Token, block and coupled verification; prints one JSON document last.

    python benchmarks/verification.py [--target DIR] [--noise 0.1,0.3] [--num-draft-tokens 5] [--output FILE]

The draft model is the target with noise added to its weights (so many parts of each weight's own size), sampling is at
temperature 1. Only acceptance is compared, so a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hf_specdec
from hf_specdec import DraftModel
from hf_specdec.checks.bench import environment, publish
from hf_specdec.loading import encode, load_target

RULES = ("token", "block", "coupled")
PROMPTS = (
    "Tell me about the history of tea.",
    "Write a letter to a landlord about a leaking tap.",
    "How does a bicycle stay upright?",
    "Describe a walk through an old harbour town.",
    "Give me three ideas for a birthday party.",
    "Explain recursion to a child.",
    "What should I pack for a week in the mountains?",
    "Invent a myth about the moon.",
)


def main(argv: list[str] | None = None) -> None:
    """Measures all rules with all draft models, prints a table and the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--noise", default="0.1,0.3")
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    model, tokenizer = load_target(options.target, options.dtype)
    inputs = encode(tokenizer, [[{"role": "user", "content": text}] for text in PROMPTS], model.device)
    results = {}
    for noise in map(float, options.noise.split(",")):
        draft_model = noisy(model, noise)
        for rule in RULES:
            results[f"{noise:g}, {rule}"] = measured(model, draft_model, inputs, rule, options)
            print(f"{noise:g}, {rule}: {results[f'{noise:g}, {rule}']}", flush=True)
    Console(width=120).print(table(results))
    document = {"environment": environment(model), "results": results}
    publish(document, options.output)


def noisy(model: Any, scale: float) -> Any:
    """A copy of a model with noise in its weight matrices, relative to each one's standard deviation."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in copied.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight.add_(noise * weight.float().std().to(weight.dtype) * scale)
    return copied


def measured(model: Any, draft_model: Any, inputs: dict, rule: str, options: argparse.Namespace) -> dict[str, float]:
    """Acceptance of one rule over all prompts in one batch."""
    drafter = DraftModel(draft_model, num_draft_tokens=options.num_draft_tokens)
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 0, "verification": rule}
    assistant = hf_specdec.speculate(drafter, seed=settings.pop("seed"), verification=settings.pop("verification"))
    model.generate(
        **inputs, **settings, max_new_tokens=options.max_new_tokens, pad_token_id=0, custom_generate=assistant
    )
    stats = drafter.stats
    return {
        "first_position": stats.acceptance_by_position[0] or 0.0,
        "acceptance_length": stats.mean_acceptance_length or 0.0,
        "rounds": stats.rounds,
    }


def table(results: dict[str, dict[str, float]]) -> Table:
    """One line a draft model and rule."""
    shown = Table(title="Drawn drafts, temperature 1")
    for heading in ("noise, rule", "first token accepted", "tokens a round", "rounds"):
        shown.add_column(heading)
    for name, result in results.items():
        first, length = f"{result['first_position']:.3f}", f"{result['acceptance_length']:.2f}"
        shown.add_row(name, first, length, str(result["rounds"]))
    return shown


if __name__ == "__main__":
    main()
