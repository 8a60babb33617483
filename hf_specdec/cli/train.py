"""`hf-specdec train`."""

from __future__ import annotations

import argparse
from typing import Any

from hf_specdec.cli.shared import add_model_options, command


def add(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "train", _run_train, "train a drafter for a target; killed at any moment, it goes on")
    parser.add_argument("kind", metavar="KIND", help="eagle3, p-eagle, pard or draft")
    add_model_options(parser)
    parser.add_argument("--data", required=True, metavar="DIR", help="a folder made by hf-specdec data; it may grow")
    parser.add_argument("--output", required=True, metavar="DIR", help="for the best drafter, the log and the state")
    ends = parser.add_argument_group("when it ends (at least one)")
    ends.add_argument("--time-budget", type=_seconds, metavar="T", help="such as 90s, 60m or 5h, over all resumed runs")
    ends.add_argument("--max-steps", type=int, metavar="N", help="steps of the optimiser")
    ends.add_argument("--epochs", type=int, metavar="N", help="passes over the data")
    drafter = parser.add_argument_group("the drafter")
    drafter.add_argument("--init-from", metavar="DIR_OR_ID", help="begin with the weights of such a drafter")
    drafter.add_argument("--depth", type=int, default=7, metavar="K", help="tokens ahead it learns to draft (7)")
    drafter.add_argument("--decay", type=float, default=0.8, metavar="W", help="weight of a step after the one before")
    drafter.add_argument("--num-layers", type=int, default=1, metavar="N", help="its decoder layers (1)")
    drafter.add_argument("--draft-vocab-size", type=int, metavar="N", help="ids it can draft (by --coverage)")
    drafter.add_argument("--coverage", type=float, default=0.995, metavar="S", help="share of answer tokens (0.995)")
    drafter.add_argument("--seed", type=int, default=0, metavar="S", help="of weights and order (0)")
    learning = parser.add_argument_group("how it learns")
    learning.add_argument("--learning-rate", type=float, metavar="R", help="the highest (0.008 or 0.0003, by kind)")
    learning.add_argument("--optimizer", metavar="NAME", help="muon (for heads) or adamw (for models), by kind")
    learning.add_argument("--warmup-steps", type=int, default=30, metavar="N", help="while the rate rises (30)")
    learning.add_argument("--decay-share", type=float, default=0.3, metavar="S", help="at the end, as it falls (0.3)")
    learning.add_argument("--weight-decay", type=float, default=0.01, metavar="D", help="of matrices (0.01)")
    learning.add_argument("--max-grad-norm", type=float, default=1.0, metavar="L", help="gradients at most (1.0)")
    learning.add_argument("--batch-tokens", type=int, default=2048, metavar="N", help="answer tokens of a batch (2048)")
    learning.add_argument("--batches-per-step", type=int, default=2, metavar="N", help="batches of a step (2)")
    learning.add_argument(
        "--evaluate-every", type=_seconds, default=300.0, metavar="T", help="between evaluations (5m)"
    )
    learning.add_argument("--held-out-share", type=float, default=0.03, metavar="S", help="of the prompts (0.03)")
    learning.add_argument("--save-every", type=_seconds, default=60.0, metavar="T", help="between states on disk (1m)")
    learning.add_argument("--cache", metavar="DIR", help="for the target's hidden states (OUTPUT/features)")
    learning.add_argument(
        "--cache-gigabytes", type=float, default=16.0, metavar="G", help="most disk for them; 0: none"
    )


def _run_train(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from hf_specdec.training.console import ConsoleReport
    from hf_specdec.training.loop import train
    from hf_specdec.training.options import TrainOptions
    from hf_specdec.training.recipes import RecipeOptions

    told = vars(arguments)
    recipe = {name: told[name] for name in RecipeOptions.__dataclass_fields__ if name in told}
    options = {name: told[name] for name in TrainOptions.__dataclass_fields__ if name in told}
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 200
    with ConsoleReport(console) as report:
        train(TrainOptions(**options, recipe=RecipeOptions(**recipe)), report)
    target = f"--target {arguments.target} " if arguments.target else ""
    console.print(f"The best drafter is in {arguments.output}; try it:", highlight=False)
    console.print(
        f"  hf-specdec generate {target}--assistant {arguments.output} --prompt ...", highlight=False, soft_wrap=True
    )


def _seconds(text: str) -> float:
    """A time such as "90s", "60m" or "5h"; a number alone means seconds."""
    units = {"s": 1, "m": 60, "h": 3600}
    try:
        return float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write for example 90s, 60m or 5h") from error
