"""This package and its peers: who accepts how much, how fast, and exactly? Prints one JSON document last.

    python benchmarks/peers --make-environments ENVIRONMENTS [--only PEER]
    python benchmarks/peers --environments ENVIRONMENTS --target DIR --questions QUESTIONS.jsonl
        [--draft-model DIR] [--head DIR] [--only PEER] [--limit 5] [--max-new-tokens 128] [--dtype bfloat16]
        [--num-copied 10] [--num-drafted 4] [--threads 2] [--law-samples 2000] [--keep FILE] [--output FILE]

Every peer lives in an environment of its own (ENVIRONMENTS/env-PEER, made from adapters/PEER.txt), since they want
different versions, and is a process of this very command, which loads its models once and then answers one line with
one line. All stay, and answer every question one after the other in rotating order, so that whatever else slows the
machine down meets all of them. What cannot run says why in its line, and stops nobody else.

A peer is compared with its own generation without drafts, in its own environment. A pass of the target is a call of its
first layer, counted alike on all sides; the prompt's passes count too. Answers are compared with those of Transformers'
plain `generate` in the peer's environment; in bfloat16 they part where two tokens are nearly as likely, as a pass over
several tokens rounds differently. Drafters that remember answers begin with none, and keep what they see.

Then every peer samples short texts from a tiny Llama with a vocabulary of eight, and a chi-square test compares them
with the law of such texts by enumeration: a correct sampler is below 1e-6 once in a million tests.

With `--keep` a run that was broken off goes on where it was: a peer's answers to a question are kept together.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

FEWEST_SAMPLES = 300
FOLDER = Path(__file__).resolve().parent
# In place of this folder those of `peers` and of `tests`.
sys.path[:] = [str(FOLDER.parent), str(FOLDER.parents[1]), *(path for path in sys.path if path != str(FOLDER))]

from peers.side import Case, serve  # noqa: E402


def main(argv: list[str] | None = None) -> None:
    """Compares and prints; or makes environments; or serves one side."""
    options = parsed(argv)
    if options.side is not None:
        return serve(options.side, Case(**json.loads(options.case)))
    from peers.environments import make_environments

    if options.make_environments is not None:
        return make_environments(options.make_environments, options.only)
    from rich.console import Console

    from hf_specdec.checks.bench import publish
    from hf_specdec.cli.shared import quiet_host
    from peers.comparison import compared
    from peers.figures import table

    quiet_host()
    document = compared(options, case_of(options), Console(stderr=True))
    Console(width=150).print(table(document))
    publish(document, options.output)


def case_of(options: argparse.Namespace) -> Case:
    """What is the same for all sides."""
    return Case(**{field.name: getattr(options, field.name) for field in fields(Case)})


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder of the target")
    parser.add_argument("--questions", type=Path, help="JSON lines in Spec-Bench's form")
    parser.add_argument("--draft-model", help="folder of a smaller model with the target's tokenizer")
    parser.add_argument("--head", help="folder of an EAGLE-3 head for the target")
    parser.add_argument("--environments", type=Path, help="where the environments of peers are")
    parser.add_argument("--make-environments", type=Path, metavar="ENVIRONMENTS", help="makes those that are missing")
    parser.add_argument("--only", action="append", metavar="PEER", help="this peer (may be given several times)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-copied", type=int, default=10, help="most tokens of a copied draft")
    parser.add_argument("--num-drafted", type=int, default=4, help="tokens that a draft model or a head drafts")
    parser.add_argument("--threads", type=int, help="of every side")
    parser.add_argument("--limit", type=int, help="questions of each category")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--law-samples", type=int, default=2000, help="samples of each test; 0 leaves them out")
    parser.add_argument("--keep", type=Path, help="file of finished answers, to go on from")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.side and not options.make_environments and not (options.target and options.questions):
        parser.error("--target and --questions are needed.")
    if 0 < options.law_samples < FEWEST_SAMPLES:
        parser.error(f"--law-samples: fewer than {FEWEST_SAMPLES} show nothing; give 0 to leave the tests out.")
    return options


if __name__ == "__main__":
    main()
