"""`hf-specdec generate`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_specdec.cli.calling import add_generation, generate, generation_settings, recorded
from hf_specdec.cli.shared import add_assistant, add_model_options, command


def add(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "generate", _run_generate, "answer one prompt: streams the text, then shows statistics")
    add_model_options(parser)
    add_assistant(parser)
    parser.add_argument("--prompt", required=True, help='the prompt; "-" reads it from standard input')
    add_generation(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write down every round, for hf-specdec report")


def _run_generate(arguments: argparse.Namespace) -> None:
    from contextlib import nullcontext

    from transformers import TextStreamer

    import hf_specdec
    from hf_specdec.files import refuse_homeless
    from hf_specdec.loading import load_target

    settings = generation_settings(arguments)
    if arguments.trace is not None:
        refuse_homeless(arguments.trace)
    model, tokenizer = load_target(arguments.target, arguments.dtype, arguments.device)
    settings["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    tracing: Any = nullcontext([]) if arguments.trace is None else hf_specdec.trace()
    with tracing as traces:
        generate(arguments, model, tokenizer, [arguments.prompt], settings)
    print(f"\n{hf_specdec.last_stats(model)}", file=sys.stderr)
    for trace in traces:
        recorded(arguments, model, tokenizer, trace).save(arguments.trace)
