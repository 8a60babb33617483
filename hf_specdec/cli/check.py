"""`hf-specdec check`."""

from __future__ import annotations

import argparse
from typing import Any

from hf_specdec.cli.shared import add_placement, command, told


def add(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "check", _run_check, "does this drafter fit this target? without loading weights")
    parser.add_argument("target", metavar="TARGET", help="a folder or Hub id")
    parser.add_argument("drafter", metavar="DRAFTER", help="a folder, a Hub id or a strategy's name")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens texts are to get (as many as the target reads)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows generated together (1)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let code of the repositories run")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--measure", action="store_true", help="load both and measure a few rounds: will it pay?")
    add_placement(measuring)


def _run_check(arguments: argparse.Namespace) -> int:
    import json

    from rich.console import Console

    from hf_specdec import check
    from hf_specdec.checks.show import show

    unused = [option for name, option in told(arguments).items() if name in ("dtype", "device")]
    if unused and not arguments.measure:
        raise ValueError(f"{', '.join(unused)} says how to measure; give --measure too, or leave that out.")
    given = ("context", "batch", "measure", "dtype", "device", "trust_remote_code")
    report = check(arguments.target, arguments.drafter, **{name: getattr(arguments, name) for name in given})
    if arguments.json:
        print(json.dumps(report.to_dict()))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 120  # a log has no width of its own
        show(report, console)
    return 1 if report.errors else 0
