"""Asks all peers everything, in turn."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

from hf_specdec.checks.bench import Question, read_questions, rotated
from hf_specdec.checks.report import first_difference
from hf_specdec.loading import encode
from hf_specdec.versions import commit
from peers.environments import chosen
from peers.figures import figures
from peers.heads import with_whole_head
from peers.kept import Kept
from peers.law import judged
from peers.process import Process, started
from peers.side import GENERATE, PLAIN, Case

WARM_UP = Question("warm-up", "warm-up", ("Name a colour, a country and a river.",))
WARM_UP_TOKENS = 16
Asked = dict[str, Any]
Answers = dict[str, Any]


def compared(options: argparse.Namespace, case: Case, console: Console) -> dict[str, Any]:
    """Measures and judges all; returns the document.

    Args:
        options: of the command.
        case: what is the same for all sides.
        console: where progress is shown.
    """
    names = chosen(options.only)
    settings = described(case) | {"questions": options.questions.name, "max_new_tokens": options.max_new_tokens}
    kept = Kept(options.keep, settings)
    document = {"machine": machine(), "settings": settings | {"limit": options.limit}}
    warm_up, *questions = encoded(case.target, [WARM_UP, *read_questions(options.questions, limit=options.limit)])
    with (
        tempfile.TemporaryDirectory() as folder,
        started(names, with_whole_head(case, Path(folder)), options.environments, console) as processes,
    ):
        for process in processes.values():  # first calls are slow
            is_done = all(is_whole(question, process, kept) for question in questions)
            for way in process.ways if not is_done else ():
                process.ask(way=way, prompt=warm_up["prompt"], max_new_tokens=WARM_UP_TOKENS)
        measure(questions, processes, options.max_new_tokens, kept, console)
        peers = {name: summary(questions, process, kept) for name, process in processes.items()}
    laws = judged(names, options, kept, console) if options.law_samples else {}
    return document | {"peers": peers, "figures": figures(questions, peers, kept), "laws": laws}


def machine() -> dict[str, Any]:
    """Where and when; what is installed on a side, the side says."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "commit": commit(), "system": platform.platform(), "processors": os.cpu_count()}


def described(case: Case) -> dict[str, Any]:
    """The case without anybody's folders."""
    names = ("target", "draft_model", "head")
    return asdict(case) | {name: path and Path(path).name for name in names for path in [getattr(case, name)]}


def encoded(target: str, questions: list[Question]) -> list[Asked]:
    """The questions' first turns as token ids, made once for all."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = []
    for question in questions:
        chat = [*question.history, {"role": "user", "content": question.turns[0]}]
        prompt = encode(tokenizer, [chat], torch.device("cpu"))["input_ids"][0].tolist()
        found.append({"question_id": question.question_id, "category": question.category, "prompt": prompt})
    return found


def measure(
    questions: list[Asked], processes: dict[str, Process], max_new_tokens: int, kept: Kept, console: Console
) -> None:
    """Every question, asked of all who have not answered it yet, whoever comes first in its turn."""
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(questions))
        for number, question in enumerate(questions):
            missing = [
                process for process in processes.values() if process.ways and not is_whole(question, process, kept)
            ]
            answers: dict[str, Answers] = {process.name: {} for process in missing}
            ways = [(process.name, way) for process in missing for way in process.ways]
            for name, way in rotated(ways, number) if ways else ():
                progress.update(bar, description=f"{name}: {way}")
                asked = {"way": way, "prompt": question["prompt"], "max_new_tokens": max_new_tokens}
                answers[name][way] = processes[name].ask(**asked)
            for name, given in answers.items():
                kept.put(given, question["question_id"], name)
            progress.advance(bar)
            if not console.is_terminal:  # a log shows no bar
                console.print(f"{number + 1}/{len(questions)} {question['category']}")


def is_whole(question: Asked, process: Process, kept: Kept) -> bool:
    """Whether a peer has answered a question in all its ways."""
    answers = kept.get(question["question_id"], process.name) or {}
    given = {way for way, answer in answers.items() if "error" not in answer}
    return given == set(process.ways)


def summary(questions: list[Asked], process: Process, kept: Kept) -> dict[str, Any]:
    """What a peer is, what stopped it, and where its answers leave those of plain `generate`."""
    differences: dict[str, list[Any]] = {way: [] for way in process.ways}
    host = GENERATE if GENERATE in process.ways else PLAIN
    for question in questions:
        answers = kept.get(question["question_id"], process.name) or {}
        expected = answers.get(host, {}).get("tokens")
        for way in process.ways:
            tokens = answers.get(way, {}).get("tokens")
            if tokens is not None and expected is not None and tokens != expected:
                differences[way].append(difference(question, process, expected, tokens))
    return {
        "error": process.error,
        "environment": process.environment,
        "unusable": process.unusable,
        "differences": {way: found for way, found in differences.items() if found},
    }


def difference(question: Asked, process: Process, expected: list[int], tokens: list[int]) -> dict[str, Any]:
    """Where an answer parts from the expected one, and how far the two best logits are apart there."""
    place = first_difference(expected, tokens)
    pair = [answer[place] if place < len(answer) else None for answer in (expected, tokens)]
    gap = process.ask(text=question["prompt"] + expected[:place]).get("gap")
    return {"question_id": question["question_id"], "position": place, "tokens": pair, "logit_gap": gap}
