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
    try:
        quiet_host()
        return arguments.run(arguments) or 0
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"hf-specdec {arguments.command}: {_reason(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nhf-specdec {arguments.command}: interrupted{_what_remains(arguments)}", file=sys.stderr)
        return 130


def _reason(error: Exception) -> str:
    """An error in one line; those of the system in words."""
    name = getattr(error, "filename", None)
    if name is not None and isinstance(error, FileNotFoundError):
        return f"there is no file {name!r}"
    if name is not None and isinstance(error, IsADirectoryError):
        return f"{name!r} is a folder; a file is wanted here"
    if name is not None and isinstance(error, FileExistsError):
        return f"{name!r} is a file; a folder is wanted here"
    return " ".join(str(error).split())


def _what_remains(arguments: argparse.Namespace) -> str:
    """What a user who has stopped a long command wants to know."""
    if arguments.command in ("data", "train") or (arguments.command == "bench" and arguments.output is not None):
        return "; the same command goes on where it was"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-specdec", description="Exact speculative decoding for Transformers.")
    parser.add_argument("--version", action="version", version=f"hf-specdec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, generate, report, check, bench, data, train, publish):
        command.add(commands)
    return parser
