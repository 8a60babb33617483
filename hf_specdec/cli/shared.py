"""What commands share."""

from __future__ import annotations

import argparse
from typing import Any


def command(commands: Any, name: str, run: Any, purpose: str) -> argparse.ArgumentParser:
    """A new command: its parser, and what runs it with the parsed arguments, the parser itself among them."""
    parser = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which target, and where."""
    parser.add_argument("--target", metavar="DIR_OR_ID", help="a folder or Hub id (the embedded demo model)")
    add_placement(parser)


def add_placement(parser: Any) -> None:
    """Where, and in which dtype."""
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (the default), float32 or float16")
    parser.add_argument("--device", help="such as cpu or cuda (an accelerator if there is one)")


def add_assistant(parser: argparse.ArgumentParser) -> None:
    """Who drafts."""
    parser.add_argument("--assistant", default="auto", help="a strategy's name, a folder or a Hub id (auto)")


def options(kind: Any, arguments: argparse.Namespace) -> Any:
    """The options of a command from the arguments of the same names."""
    return kind(**{name: getattr(arguments, name) for name in kind.__dataclass_fields__})


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the named arguments that were given."""
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def told(arguments: argparse.Namespace) -> dict[str, str]:
    """The arguments that are not what they are without being given, each as the user writes it."""
    parser = arguments.parser
    changed = [name for name, value in vars(arguments).items() if value != parser.get_default(name)]
    return {name: f"--{name.replace('_', '-')}" for name in changed}


def names(text: str) -> tuple[str, ...]:
    """Names such as "a,b"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def whole_numbers(text: str) -> tuple[int, ...]:
    """Numbers such as "1,8"."""
    return _listed(int, text, "whole numbers, such as 1,8")


def numbers(text: str) -> tuple[float, ...]:
    """Numbers such as "0,0.7"."""
    return _listed(float, text, "numbers, such as 0,0.7")


def _listed(kind: Any, text: str, expected: str) -> tuple[Any, ...]:
    try:
        return tuple(map(kind, names(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {expected}") from error


def quiet_host() -> None:
    """Keeps the host's loading bars and hints off the terminal: the commands have their own."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
