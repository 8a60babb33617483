"""The command line: parses, calls, and turns errors of users into one line."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from hf_specdec import __version__


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments, those of the process by default.

    Returns:
        The exit code: 0, 1 if a check found errors, 2 for what the user can mend, 130 when interrupted.
    """
    arguments = _parser().parse_args(argv)
    _quiet_host()
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
    _add_demo(commands)
    _add_generate(commands)
    _add_report(commands)
    _add_check(commands)
    _add_bench(commands)
    _add_data(commands)
    _add_train(commands)
    _add_push(commands)
    _add_export(commands)
    return parser


# --- demo -------------------------------------------------------------------------------------------------


def _add_demo(commands: Any) -> None:
    parser = _command(commands, "demo", _run_demo, "answer three prompts, plain and speculative side by side")
    _add_model_options(parser)
    _add_assistant(parser)
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="M", help="most tokens of an answer (160)")


def _run_demo(arguments: argparse.Namespace) -> None:
    from hf_specdec.demo import DemoOptions, run_demo

    run_demo(_options(DemoOptions, arguments))


# --- generate ---------------------------------------------------------------------------------------------


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", _run_generate, "answer one prompt: streams the text, then shows statistics")
    _add_model_options(parser)
    _add_assistant(parser)
    parser.add_argument("--prompt", required=True, help='the prompt; "-" reads it from standard input')
    _add_generation(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write down every round, for hf-specdec report")


def _add_generation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--no-chat-template", action="store_true", help="continue the prompt as it is")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M", help="most tokens to generate (256)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    sampling.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    sampling.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens of mass P")
    sampling.add_argument("--min-p", type=float, metavar="P", help="keep tokens at least P times as likely as the best")
    sampling.add_argument("--seed", type=int, metavar="S", help="makes sampling reproducible")
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument("--num-draft-tokens", type=int, metavar="K", help="longest draft of a round")
    speculation.add_argument("--verification", metavar="RULE", help="auto, token, block or coupled")


def _run_generate(arguments: argparse.Namespace) -> None:
    from contextlib import nullcontext

    from transformers import TextStreamer

    import hf_specdec
    from hf_specdec.loading import load_target

    settings = _generation_settings(arguments)
    if arguments.trace is not None:
        _refuse_homeless(arguments.trace)
    model, tokenizer = load_target(arguments.target, arguments.dtype, arguments.device)
    settings["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    tracing: Any = nullcontext([]) if arguments.trace is None else hf_specdec.trace()
    with tracing as traces:
        _generate(arguments, model, tokenizer, [arguments.prompt], settings)
    print(f"\n{hf_specdec.last_stats(model)}", file=sys.stderr)
    for trace in traces:
        _recorded(arguments, model, tokenizer, trace).save(arguments.trace)


def _generate(arguments: argparse.Namespace, model: Any, tokenizer: Any, prompts: list[str], settings: Any) -> None:
    """One call for all prompts."""
    import torch

    import hf_specdec
    from hf_specdec.loading import encode

    hf_specdec.enable(model)
    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    chats = [_chat(arguments, prompt) for prompt in prompts]
    model.generate(
        **encode(tokenizer, chats, model.device, use_template=not arguments.no_chat_template),
        **settings,
        assistant=arguments.assistant,
        max_new_tokens=arguments.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )


def _generation_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings of the host's sampling and of ours."""
    return _sampling(arguments) | _given(arguments, "num_draft_tokens", "verification")


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The host's sampling settings."""
    settings = _given(arguments, "top_k", "top_p", "min_p")
    if arguments.temperature > 0:
        return settings | {"do_sample": True, "temperature": arguments.temperature}
    if arguments.temperature < 0:
        raise ValueError(f"--temperature {arguments.temperature} must be at least 0 (0 is greedy).")
    if settings:
        raise ValueError(
            "--top-k, --top-p and --min-p need sampling: give a --temperature above 0 too, or leave them out."
        )
    return {"do_sample": False}


def _chat(arguments: argparse.Namespace, prompt: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return [*system, {"role": "user", "content": sys.stdin.read() if prompt == "-" else prompt}]


# --- report -----------------------------------------------------------------------------------------------


def _add_report(commands: Any) -> None:
    parser = _command(commands, "report", _run_report, "one HTML page of a call: who produced every token, by round")
    parser.add_argument(
        "recorded", nargs="?", type=Path, metavar="RUN.json", help="of generate --trace; else give a --prompt"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page (report.html)"
    )
    calling = parser.add_argument_group("to make a call now")
    calling.add_argument("--prompt", action="append", default=[], help='may be repeated, for a batch; "-" reads one')
    calling.add_argument("--save-run", type=Path, metavar="FILE", help="also write what RUN.json is read from")
    _add_model_options(parser)
    _add_assistant(parser, default="auto")
    _add_generation(parser)


def _run_report(arguments: argparse.Namespace) -> None:
    from hf_specdec.pages import Run, write_page

    if (arguments.recorded is None) == (not arguments.prompt):
        raise ValueError("give either a RUN.json that was recorded, or a --prompt to make a call with.")
    for path in filter(None, (arguments.output, arguments.save_run)):
        _refuse_homeless(path)
    run = _traced(arguments) if arguments.recorded is None else Run.load(arguments.recorded)
    if arguments.save_run is not None:
        run.save(arguments.save_run)
    print(write_page(run, arguments.output))


def _traced(arguments: argparse.Namespace) -> Any:
    """Makes the call that is to be shown."""
    import hf_specdec
    from hf_specdec.loading import load_target

    settings = _generation_settings(arguments)
    model, tokenizer = load_target(arguments.target, arguments.dtype, arguments.device)
    with hf_specdec.trace() as traces:
        _generate(arguments, model, tokenizer, arguments.prompt, settings)
    return _recorded(arguments, model, tokenizer, traces[0])


def _recorded(arguments: argparse.Namespace, model: Any, tokenizer: Any, trace: Any) -> Any:
    """A traced call with what is known about it."""
    from datetime import datetime, timezone

    import hf_specdec
    from hf_specdec.loading import target_name
    from hf_specdec.pages import Run
    from hf_specdec.versions import versions

    named = ("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "num_draft_tokens", "verification")
    about = {
        "target": target_name(model),
        "assistant": arguments.assistant,
        "numbers": f"{arguments.dtype} on {model.device}",
        "settings": ", ".join(f"{name} {value}" for name, value in _given(arguments, *named).items()),
        "made": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "with": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    check = hf_specdec.check(model, arguments.assistant, tokenizer=tokenizer, batch=len(trace.prompts))
    return Run.of(trace, tokenizer, about, check)


def _refuse_homeless(path: Path) -> None:
    """Raises `ValueError` before a long call if its result could not be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: it is a folder, or lies in none that exists. Name another file.")


# --- check ------------------------------------------------------------------------------------------------


def _add_check(commands: Any) -> None:
    parser = _command(commands, "check", _run_check, "does this drafter fit this target? without loading weights")
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
    _add_placement(measuring)


def _run_check(arguments: argparse.Namespace) -> int:
    import json

    from rich.console import Console

    from hf_specdec import check
    from hf_specdec.checks.show import show

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


# --- bench ------------------------------------------------------------------------------------------------


def _add_bench(commands: Any) -> None:
    parser = _command(commands, "bench", _run_bench, "compare ways of generating on one's own questions")
    parser.add_argument(
        "--target",
        action="append",
        metavar="DIR_OR_ID",
        help="a folder or Hub id (the demo model); may be repeated",
    )
    _add_placement(parser)
    parser.add_argument(
        "--questions",
        required=True,
        metavar="FILE",
        help="JSON lines (question_id, category, turns; or prompt; or messages), or hub:NAME[:SPLIT]",
    )
    parser.add_argument(
        "--variants",
        type=_names,
        default=("plain", "host-prompt-lookup", "prompt-lookup"),
        metavar="A,B,...",
        help="plain (always runs), host-prompt-lookup, prompt-lookup, draft-model=DIR, ...; a wrong name lists all",
    )
    parser.add_argument("--categories", type=_names, metavar="A,B,...", help="categories to ask (all)")
    parser.add_argument("--limit", type=int, metavar="N", help="questions of each category (all)")
    parser.add_argument("--turns", default="first", metavar="WHICH", help="first (the default) or all turns")
    parser.add_argument(
        "--batch-size", type=_whole_numbers, default=(1,), metavar="B,...", help="questions answered together (1)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="M", help="most tokens of an answer (128)")
    parser.add_argument(
        "--temperature", type=_numbers, default=(0.0,), metavar="T,...", help="0 is greedy (the default)"
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
    from hf_specdec.pictures import require_matplotlib

    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 120  # a log has no width of its own
    several = {"target": "targets", "batch_size": "batch_sizes", "temperature": "temperatures"}
    told = {several.get(name, name): getattr(arguments, name) for name in BenchOptions.__dataclass_fields__}
    settings = combinations(**told | {"targets": arguments.target or [None]})
    if arguments.plots is not None:
        require_matplotlib()  # before the run, which may be long
    document = run_bench(settings, console, arguments.output, arguments.profile)
    if arguments.plots is not None:
        draw_plots(document, arguments.plots, console)
    publish(document)


# --- data -------------------------------------------------------------------------------------------------


def _add_data(commands: Any) -> None:
    parser = _command(commands, "data", _run_data, "make training data: prompts, answered by the target itself")
    _add_model_options(parser)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="the data folder; what it holds grows"
    )
    parser.add_argument("--tokens", type=int, default=1_000_000, metavar="N", help="answer tokens in all (1000000)")
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines, or hub:NAME (the target writes all prompts)")
    parser.add_argument("--turns", default="last", metavar="WHICH", help="of conversations: last (the default) or all")
    parser.add_argument("--self-written", type=float, metavar="S", help="share of prompts the target writes itself")
    parser.add_argument(
        "--themes", type=Path, metavar="FILE", help="JSON lines: system, beginnings (the package's own)"
    )
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="evaluation prompts that must not be trained on")
    parser.add_argument("--batch-size", type=int, default=64, metavar="B", help="texts written together (64)")
    parser.add_argument("--max-new-tokens", type=int, default=320, metavar="M", help="most tokens of an answer (320)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of all that is drawn (0)")


def _run_data(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from hf_specdec.training.answers import DataOptions, make_data

    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 200
    make_data(_options(DataOptions, arguments), console)


# --- train ------------------------------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    parser = _command(commands, "train", _run_train, "train a drafter for a target; killed at any moment, it goes on")
    parser.add_argument("kind", metavar="KIND", help="eagle3, p-eagle, pard or draft")
    _add_model_options(parser)
    parser.add_argument("--data", required=True, metavar="DIR", help="a folder made by hf-specdec data; it may grow")
    parser.add_argument("--output", required=True, metavar="DIR", help="for the best drafter, the log and the state")
    ends = parser.add_argument_group("when it ends (at least one)")
    ends.add_argument("--time-budget", type=_seconds, metavar="T", help="such as 90s, 60m or 5h, over all resumed runs")
    ends.add_argument("--max-steps", type=int, metavar="N", help="steps of the optimiser")
    ends.add_argument("--epochs", type=int, metavar="N", help="passes over the data")
    drafter = parser.add_argument_group("the drafter")
    drafter.add_argument("--init-from", metavar="DIR", help="begin with the weights of another training of this kind")
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
        return float(text.rstrip("smh")) * units[text[-1]] if text[-1:] in units else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write for example 90s, 60m or 5h") from error


# --- push and export --------------------------------------------------------------------------------------


def _add_push(commands: Any) -> None:
    parser = _command(commands, "push", _run_push, "write the model card of a drafter and publish it on the Hub")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a trained or saved drafter")
    parser.add_argument("repo_id", metavar="ORG/NAME", help="the repository; it is created if it does not exist")
    parser.add_argument("--license", metavar="ID", help="for the card, such as apache-2.0 (what the card said before)")
    parser.add_argument("--revision", metavar="BRANCH", help="a branch instead of main; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--message", metavar="TEXT", help="of the commit")


def _run_push(arguments: argparse.Namespace) -> None:
    from hf_specdec.publishing import push, write_card

    write_card(arguments.folder, arguments.repo_id, arguments.license)
    url = push(
        arguments.folder,
        arguments.repo_id,
        private=arguments.private or None,
        revision=arguments.revision,
        message=arguments.message,
    )
    print(url)


def _add_export(commands: Any) -> None:
    parser = _command(commands, "export", _run_export, "write a head in the format of a serving engine")
    parser.add_argument("folder", metavar="DIR_OR_ID", help="a head of the EAGLE family")
    parser.add_argument("--format", required=True, metavar="F", help="vllm-speculators, sglang or safeailab")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a folder that does not exist yet")
    _add_model_options(parser)


def _run_export(arguments: argparse.Namespace) -> None:
    from hf_specdec.loading import load_target
    from hf_specdec.publishing import export

    target, _ = load_target(arguments.target, arguments.dtype, arguments.device)
    export(arguments.folder, arguments.output, arguments.format, target)
    print(arguments.output)


# --- what commands share ----------------------------------------------------------------------------------


def _command(commands: Any, name: str, run: Any, purpose: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    parser.set_defaults(run=run)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="DIR_OR_ID", help="a folder or Hub id (the embedded demo model)")
    _add_placement(parser)


def _add_placement(parser: Any) -> None:
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (the default), float32 or float16")
    parser.add_argument("--device", help="such as cpu or cuda (an accelerator if there is one)")


def _add_assistant(parser: argparse.ArgumentParser, default: str = "prompt-lookup") -> None:
    parser.add_argument("--assistant", default=default, help=f"a strategy's name, a folder or a Hub id ({default})")


def _options(kind: Any, arguments: argparse.Namespace) -> Any:
    """The options of a command from the arguments of the same names."""
    return kind(**{name: getattr(arguments, name) for name in kind.__dataclass_fields__})


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the named arguments that were given."""
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Numbers such as "1,8"."""
    return _listed(int, text, "whole numbers, such as 1,8")


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers such as "0,0.7"."""
    return _listed(float, text, "numbers, such as 0,0.7")


def _listed(kind: Any, text: str, expected: str) -> tuple[Any, ...]:
    try:
        return tuple(map(kind, _names(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {expected}") from error


def _quiet_host() -> None:
    """Keeps the host's loading bars and hints off the terminal: the commands have their own."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
