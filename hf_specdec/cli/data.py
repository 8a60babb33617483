"""`hf-specdec data`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_specdec.cli.shared import add_model_options, command, options


def add(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "data", _run_data, "make training data: prompts, answered by the target itself")
    add_model_options(parser)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="the data folder; what it holds grows"
    )
    parser.add_argument("--tokens", type=int, default=1_000_000, metavar="N", help="answer tokens in all (1000000)")
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines, or hub:NAME (the target writes all prompts)")
    parser.add_argument("--turns", default="last", metavar="WHICH", help="of conversations: last (the default) or all")
    parser.add_argument("--self-written", type=float, metavar="S", help="share of prompts the target writes itself")
    parser.add_argument(
        "--themes", type=Path, metavar="FILE", help="JSON lines: system, beginnings (the package's own)"
    )
    parser.add_argument("--passages", type=Path, metavar="FILE", help="JSON lines: text, that prompts may be about")
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="evaluation prompts that must not be trained on")
    parser.add_argument("--batch-size", type=int, default=64, metavar="B", help="texts written together (64)")
    parser.add_argument("--max-new-tokens", type=int, default=320, metavar="M", help="most tokens of an answer (320)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of all that is drawn (0)")


def _run_data(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from hf_specdec.training.answers import DataOptions, make_data

    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 200
    make_data(options(DataOptions, arguments), console)
    target = f"--target {arguments.target} " if arguments.target else ""
    console.print("Let a drafter learn from them:", highlight=False)
    console.print(
        f"  hf-specdec train eagle3 {target}--data {arguments.output} --output DRAFTER --time-budget 60m",
        highlight=False,
        soft_wrap=True,
    )
