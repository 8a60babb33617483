"""The command line: parses, calls, and turns errors of users into one line."""

from __future__ import annotations

import argparse
import os
import sys

from hf_specdec import __version__
from hf_specdec.cli import bench, check, data, demo, generate, publish, report, train
from hf_specdec.cli.shared import quiet_host


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments, those of the process by default.

    Returns:
        The exit code: 0, 1 if a check found errors, 2 for what the user can mend, 130 when interrupted.
    """
    arguments = _parser().parse_args(argv)
    quiet_host()
    try:
        return arguments.run(arguments) or 0
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FileNotFoundError as error:
        print(f"hf-specdec {arguments.command}: there is no file {error.filename!r}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"hf-specdec {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-specdec", description="Exact speculative decoding for Transformers.")
    parser.add_argument("--version", action="version", version=f"hf-specdec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, generate, report, check, bench, data, train, publish):
        command.add(commands)
    return parser
