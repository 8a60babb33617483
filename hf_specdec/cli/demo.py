"""`hf-specdec demo`."""

from __future__ import annotations

import argparse
from typing import Any

from hf_specdec.cli.shared import add_assistant, add_model_options, command, options


def add(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "demo", _run_demo, "answer three prompts, plain and speculative side by side")
    add_model_options(parser)
    add_assistant(parser)
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="M", help="most tokens of an answer (160)")


def _run_demo(arguments: argparse.Namespace) -> None:
    from hf_specdec.demo import DemoOptions, run_demo

    run_demo(options(DemoOptions, arguments))
