"""`hf-specdec report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_specdec.cli.calling import add_generation, generate, generation_settings, recorded
from hf_specdec.cli.shared import add_assistant, add_model_options, command, told

# What `hf-specdec report` reads itself; all else is about a call that is to be made.
_OF_THE_PAGE = {"command", "recorded", "output", "save_run"}


def add(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "report", _run_report, "one HTML page of a call: who produced every token, by round")
    parser.add_argument(
        "recorded", nargs="?", type=Path, metavar="RUN.json", help="of generate --trace; else give a --prompt"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page (report.html)"
    )
    calling = parser.add_argument_group("to make a call now")
    calling.add_argument("--prompt", action="append", default=[], help='may be repeated, for a batch; "-" reads one')
    calling.add_argument("--save-run", type=Path, metavar="FILE", help="also write what RUN.json is read from")
    add_model_options(parser)
    add_assistant(parser)
    add_generation(parser)


def _run_report(arguments: argparse.Namespace) -> None:
    from hf_specdec.files import refuse_homeless
    from hf_specdec.pages import Run, write_page

    if (arguments.recorded is None) == (not arguments.prompt):
        raise ValueError("give either a RUN.json that was recorded, or a --prompt to make a call with.")
    if arguments.recorded is not None:
        _refuse_options_of_a_call(arguments)
    named = [path.resolve() for path in (arguments.recorded, arguments.output, arguments.save_run) if path is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"{arguments.output} is named twice; the page and the recorded run need files of their own.")
    for path in filter(None, (arguments.output, arguments.save_run)):
        refuse_homeless(path)
    run = _traced(arguments) if arguments.recorded is None else Run.load(arguments.recorded)
    if arguments.save_run is not None:
        run.save(arguments.save_run)
    print(write_page(run, arguments.output))


def _refuse_options_of_a_call(arguments: argparse.Namespace) -> None:
    if unused := [option for name, option in told(arguments).items() if name not in _OF_THE_PAGE]:
        raise ValueError(
            f"{arguments.recorded} holds a call that was made already, so {', '.join(unused)} would say nothing. Leave "
            "that out, or give a --prompt instead of the file."
        )


def _traced(arguments: argparse.Namespace) -> Any:
    """Makes the call that is to be shown."""
    import hf_specdec
    from hf_specdec.loading import load_target

    settings = generation_settings(arguments)
    model, tokenizer = load_target(arguments.target, arguments.dtype, arguments.device)
    with hf_specdec.trace() as traces:
        generate(arguments, model, tokenizer, arguments.prompt, settings)
    return recorded(arguments, model, tokenizer, traces[0])
