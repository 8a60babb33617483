"""`hf-specdec bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_specdec.cli.shared import add_placement, command, names, numbers, whole_numbers


def add(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "bench", _run_bench, "compare ways of generating on one's own questions")
    parser.add_argument(
        "--target",
        action="append",
        metavar="DIR_OR_ID",
        help="a folder or Hub id (the demo model); may be repeated",
    )
    add_placement(parser)
    parser.add_argument(
        "--questions",
        required=True,
        metavar="FILE",
        help="JSON lines (question_id, category, turns; or prompt; or messages), or hub:NAME[:SPLIT]",
    )
    parser.add_argument(
        "--variants",
        type=names,
        default=("plain", "host-prompt-lookup", "prompt-lookup"),
        metavar="A,B,...",
        help="plain (always runs), host-prompt-lookup, prompt-lookup, draft-model=DIR, ...; a wrong name lists all",
    )
    parser.add_argument("--categories", type=names, metavar="A,B,...", help="categories to ask (all)")
    parser.add_argument("--limit", type=int, metavar="N", help="questions of each category (all)")
    parser.add_argument("--turns", default="first", metavar="WHICH", help="first (the default) or all turns")
    parser.add_argument(
        "--batch-size", type=whole_numbers, default=(1,), metavar="B,...", help="questions answered together (1)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="M", help="most tokens of an answer (128)")
    parser.add_argument(
        "--temperature", type=numbers, default=(0.0,), metavar="T,...", help="0 is greedy (the default)"
    )
    parser.add_argument("--num-draft-tokens", type=int, metavar="K", help="longest draft (each strategy's own)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the first question (0)")
    parser.add_argument("--past-ends", action="store_true", help="all variants write --max-new-tokens, past any end")
    shown = parser.add_argument_group("what is shown and written")
    shown.add_argument("--profile", action="store_true", help="also a table of seconds by phase and tokens by drafter")
    shown.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the JSON document to a file; a killed run then goes on"
    )
    shown.add_argument("--plots", type=Path, metavar="DIR", help="also draw the figures, as PNG files")


def _run_bench(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from hf_specdec.checks.bench import BenchOptions, combinations, publish, run_bench
    from hf_specdec.checks.plots import draw_plots

    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 120  # a log has no width of its own
    several = {"target": "targets", "batch_size": "batch_sizes", "temperature": "temperatures"}
    told = {several.get(name, name): getattr(arguments, name) for name in BenchOptions.__dataclass_fields__}
    settings = combinations(**told | {"targets": arguments.target or [None]})
    if arguments.plots is not None:
        _refuse_plots(arguments.plots)
    document = run_bench(settings, console, arguments.output, arguments.profile)
    if arguments.output is not None and sys.stdout.isatty():  # it would push the tables off the screen
        console.print(f"The whole document is in {arguments.output}", highlight=False)
    else:
        publish(document)
    if arguments.plots is not None:
        draw_plots(document, arguments.plots, console)


def _refuse_plots(folder: Path) -> None:
    """Raises `ValueError` before a run, which may be long, if nothing could be drawn behind it."""
    from hf_specdec.pictures import require_matplotlib

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--plots {folder} is a file; name a folder.")
    require_matplotlib()
