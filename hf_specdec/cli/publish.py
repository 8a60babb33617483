"""`hf-specdec push` and `hf-specdec export`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_specdec.cli.shared import add_model_options, command


def add(commands: Any) -> None:
    """Adds both commands."""
    _add_push(commands)
    _add_export(commands)


def _add_push(commands: Any) -> None:
    parser = command(commands, "push", _run_push, "write the model card of a drafter and publish it on the Hub")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a trained or saved drafter")
    parser.add_argument("repo_id", metavar="ORG/NAME", help="the repository; it is created if it does not exist")
    parser.add_argument("--license", metavar="ID", help="for the card, such as apache-2.0 (what the card said before)")
    parser.add_argument("--revision", metavar="BRANCH", help="a branch instead of main; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--message", metavar="TEXT", help="of the commit")


def _run_push(arguments: argparse.Namespace) -> None:
    from hf_specdec.publishing import push, write_card

    write_card(arguments.folder, arguments.repo_id, arguments.license)
    _note_unknown_target(arguments.folder)
    url = push(
        arguments.folder,
        arguments.repo_id,
        private=arguments.private or None,
        revision=arguments.revision,
        message=arguments.message,
    )
    print(url)


def _note_unknown_target(folder: Path) -> None:
    """Says so if the target is recorded by the name of a folder, under which nobody else finds it."""
    from hf_specdec.checkpoints.files import read_config
    from hf_specdec.provenance import Provenance

    provenance = Provenance.read(read_config(str(folder)), str(folder))
    if provenance is not None and "/" not in provenance.target:
        print(
            f"The target is recorded as {provenance.target!r}, which is no Hub id: say in the card where to find it.",
            file=sys.stderr,
        )


def _add_export(commands: Any) -> None:
    parser = command(commands, "export", _run_export, "write a head in the format of a serving engine")
    parser.add_argument("folder", metavar="DIR_OR_ID", help="a head of the EAGLE family")
    parser.add_argument("--format", required=True, metavar="F", help="vllm-speculators, sglang or safeailab")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a folder that does not exist yet")
    add_model_options(parser)


def _run_export(arguments: argparse.Namespace) -> None:
    from hf_specdec.loading import load_target
    from hf_specdec.publishing import export
    from hf_specdec.publishing.export import refuse_export

    refuse_export(arguments.output, arguments.format)
    target, _ = load_target(arguments.target, arguments.dtype, arguments.device)
    export(arguments.folder, arguments.output, arguments.format, target)
    print(arguments.output)
