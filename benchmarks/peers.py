"""An EAGLE-3 head here and in `economize`: who accepts how much, and how fast? Prints one JSON document last.

    python benchmarks/peers.py --target DIR --head DIR --questions QUESTIONS.jsonl --python-of-peer ENV/bin/python
        [--dtype bfloat16] [--num-draft-tokens 4] [--limit 5] [--max-new-tokens 128] [--output FILE]

The same target, head and prompts, greedy, one chain of `--num-draft-tokens` tokens a round on either side. The peer
lives in an environment of its own, since it wants other versions; to make one:

    python -m venv ENV && ENV/bin/pip install torch economize==0.3.2 "transformers<=5.19"

Either side is a process of this very script (`--side`), which loads its models once and then answers one line with one
line. Both stay, and answer every question one after the other in rotating order, so that whatever else slows the
machine down meets both. A pass of the target is a call of its first layer, counted alike on both sides; the prompt's
pass is one. The peer keeps a head in float32 unless told otherwise; here it computes in the target's dtype, as ours
does. It reads heads of one layer without further norms, and drops a head's own embeddings in favour of the target's.
Without `--python-of-peer` only plain generation and ours are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

PLAIN, OURS, PEER = "plain", "hf_specdec", "economize"
SIDES = {PLAIN: "ours", OURS: "ours", PEER: "peer"}
WARM_UP_TOKENS = 16
Answer = dict[str, Any]
Generate = Callable[[Tensor, int], list[int]]


def main(argv: list[str] | None = None) -> None:
    """Measures both sides and prints a table and the document; or serves one side."""
    options = parsed(argv)
    if options.side is not None:
        return serve(options)
    from rich.console import Console

    from hf_specdec.checks.bench import publish

    document = compared(options)
    Console(width=120).print(table(document["sides"], document.get("ours_over_peer")))
    publish(document, options.output)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--head", required=True, help="folder of an EAGLE-3 head for it")
    parser.add_argument("--questions", type=Path, help="JSON lines in Spec-Bench's form")
    parser.add_argument("--python-of-peer", help="interpreter that has economize")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--limit", type=int, help="questions of each category")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side is None and options.questions is None:
        parser.error("--questions is needed")
    return options


# --- one side: reads a question a line, writes an answer a line -------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """Answers until the input ends; the first line says in which environment."""
    torch.set_grad_enabled(False)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    target = open_target(options)
    ways, environment = (our_ways if options.side == "ours" else peer_ways)(target, options)
    reply(answers, environment)
    passes = count_passes(target)
    for line in sys.stdin:
        asked = json.loads(line)
        reply(answers, timed(ways[asked["way"]], asked, passes, target.device))


def reply(stream: Any, answer: Answer) -> None:
    """One line, sent at once."""
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


def open_target(options: argparse.Namespace) -> Any:
    """The target, with no settings of generation but its ends: the peer's own loop knows no others."""
    dtype = getattr(torch, options.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).to(device).eval()
    ends = ends_of(target)
    target.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0)
    return target


def ends_of(target: Any) -> list[int]:
    """Ids that end an answer."""
    ends = target.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def our_ways(target: Any, options: argparse.Namespace) -> tuple[dict[str, Generate], Answer]:
    """Plain generation and ours."""
    import hf_specdec
    from hf_specdec.checks.bench import environment

    hf_specdec.enable(target)
    drafter = hf_specdec.load_drafter(options.head, target=target)

    def generate(prompt: Tensor, num_tokens: int, **settings: Any) -> list[int]:
        settings |= {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": num_tokens}
        return target.generate(prompt, **settings)[0, prompt.shape[1] :].tolist()

    def plain(prompt: Tensor, num_tokens: int) -> list[int]:
        return generate(prompt, num_tokens, assistant=False)

    def ours(prompt: Tensor, num_tokens: int) -> list[int]:
        return generate(prompt, num_tokens, assistant=drafter, num_draft_tokens=options.num_draft_tokens)

    return {PLAIN: plain, OURS: ours}, environment(target)


def peer_ways(target: Any, options: argparse.Namespace) -> tuple[dict[str, Generate], Answer]:
    """The peer's own loop; its cycle is one exact token and the drafted ones."""
    import economize

    checkpoint = economize.read_checkpoint(options.head)
    checkpoint.configs = [replace(config, param_dtype="model") for config in checkpoint.configs]
    model = economize.attach(target, checkpoint)
    decoding = economize.DecodeConfig(cycle_length=1 + options.num_draft_tokens)
    ends = ends_of(target) or None

    def decode(prompt: Tensor, num_tokens: int) -> list[int]:
        return model.decode(prompt, num_tokens, decoding=decoding, stop=ends).tokens.tolist()

    versions = {module.__name__: module.__version__ for module in (economize, torch, transformers)}
    return {PEER: decode}, versions | {"threads": torch.get_num_threads()}


def count_passes(target: Any) -> list[None]:
    """A list that grows by one with every pass of the target: a call of its first layer, whoever makes it."""
    passes: list[None] = []
    target.get_decoder().layers[0].register_forward_pre_hook(lambda *_: passes.append(None))
    return passes


def timed(generate: Generate, asked: Answer, passes: list[None], device: torch.device) -> Answer:
    """One answer and what it cost."""
    prompt = torch.tensor([asked["prompt"]], device=device)
    passes.clear()
    start = time.perf_counter()
    tokens = generate(prompt, asked["max_new_tokens"])  # a list: whatever was queued on a device is done
    return {"tokens": tokens, "seconds": time.perf_counter() - start, "target_passes": len(passes)}


# --- the comparison ---------------------------------------------------------------------------------------


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """Asks both sides everything; returns the document."""
    questions = encoded(options)
    ways = [way for way in SIDES if SIDES[way] == "ours" or options.python_of_peer]
    with started(options, "ours", sys.executable) as ours, started(options, "peer", options.python_of_peer) as peer:
        sides = {"ours": ours, "peer": peer}
        environments = {name: heard(side) for name, side in sides.items() if side is not None}
        for way in ways:  # first calls are slow
            ask(sides[SIDES[way]], way, questions[0]["prompt"], WARM_UP_TOKENS)
        answers = [answered(question, number, ways, sides, options) for number, question in enumerate(questions)]
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    totals = {way: total([answer[way] for answer in answers]) for way in ways}
    document = {"environments": environments, "options": given, "sides": totals, "questions": answers}
    return document | ({"ours_over_peer": paired(answers)} if PEER in ways else {})


def encoded(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The questions' first turns as token ids, made once for both sides."""
    from transformers import AutoTokenizer

    from hf_specdec.checks.bench import read_questions
    from hf_specdec.loading import encode

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    found = []
    for question in read_questions(options.questions, limit=options.limit):
        chat = [*question.history, {"role": "user", "content": question.turns[0]}]
        prompt = encode(tokenizer, [chat], torch.device("cpu"))["input_ids"][0].tolist()
        found.append({"question_id": question.question_id, "category": question.category, "prompt": prompt})
    return found


@contextmanager
def started(options: argparse.Namespace, side: str, python: str | None) -> Iterator[subprocess.Popen[str] | None]:
    """One side's process, ended with the block; `None` where there is no interpreter for it."""
    if python is None:
        yield None
        return
    command = [python, __file__, "--side", side, "--target", options.target, "--head", options.head]
    command += ["--dtype", options.dtype, "--num-draft-tokens", str(options.num_draft_tokens)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()


def ask(side: subprocess.Popen[str], way: str, prompt: list[int], num_tokens: int) -> Answer:
    """One line there and one line back."""
    reply(side.stdin, {"way": way, "prompt": prompt, "max_new_tokens": num_tokens})
    return heard(side)


def heard(side: subprocess.Popen[str]) -> Answer:
    """The next line of a side."""
    line = side.stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(side.args)} ended early; its error is above.")
    return json.loads(line)


def answered(
    question: dict[str, Any], number: int, ways: list[str], sides: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """One question, asked of all, whoever comes first in its turn."""
    first = number % len(ways)
    order = ways[first:] + ways[:first]
    answers = {way: ask(sides[SIDES[way]], way, question["prompt"], options.max_new_tokens) for way in order}
    kept = {name: question[name] for name in ("question_id", "category")} | {"prompt": len(question["prompt"])}
    same = {way: answers[way]["tokens"] == answers[PLAIN]["tokens"] for way in ways}
    counts = {way: answers[way] | {"tokens": len(answers[way]["tokens"]), "as_plain": same[way]} for way in ways}
    return kept | counts


def total(answers: list[Answer]) -> dict[str, Any]:
    """Sums, and the rates that follow from them."""
    tokens, passes, seconds = (sum(answer[key] for answer in answers) for key in ("tokens", "target_passes", "seconds"))
    return {
        "tokens": tokens,
        "target_passes": passes,
        "seconds": seconds,
        "tokens_per_pass": tokens / passes,
        "tokens_per_second": tokens / seconds,
        "as_plain": sum(answer["as_plain"] for answer in answers),
    }


def paired(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Ours over the peer's, question by question: tokens per second and per pass, medians within categories."""
    from hf_specdec.checks.report import typical

    result = {}
    for name, cost in (("tokens_per_second", "seconds"), ("tokens_per_pass", "target_passes")):
        groups: dict[str, list[float]] = {}
        for answer in answers:
            ours, peer = (answer[way]["tokens"] / answer[way][cost] for way in (OURS, PEER))
            groups.setdefault(answer["category"], []).append(ours / peer)
        ratio, interval = typical(list(groups.values()))
        result[name] = {"ratio": ratio, "interval": interval}
    return result


def table(sides: dict[str, Any], ratios: dict[str, Any] | None) -> Any:
    """One line a way."""
    from rich.table import Table

    shown = Table(title="One head, two libraries")
    for heading in ("", "tokens a target pass", "tokens a second", "answers as plain", "answers' tokens"):
        shown.add_column(heading)
    for way, side in sides.items():
        rates = (f"{side[key]:.2f}" for key in ("tokens_per_pass", "tokens_per_second"))
        shown.add_row(way, *rates, str(side["as_plain"]), str(side["tokens"]))
    if ratios is not None:
        texts = (described(ratios[name]) for name in ("tokens_per_pass", "tokens_per_second"))
        shown.add_row("ours over the peer's", *texts, "", "")
    return shown


def described(ratio: dict[str, Any]) -> str:
    """A ratio and its interval."""
    low, high = ratio["interval"]
    return f"{ratio['ratio']:.3f} ({low:.3f}-{high:.3f})"


if __name__ == "__main__":
    main()
