"""`hf-specdec bench`: how much faster is which way of generating, on one's own questions and machine?

All variants answer every question in one process, in rotating order, so that whatever else slows the machine
down meets all of them; speed-ups are paired, question by question.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import Auto, DraftModel, DraftTree, PromptLookup, Suffix, TokenRecycling, load_drafter
from hf_specdec.checks.report import HOST_LOOKUP, PLAIN, Batch, Run, Turn, first_difference, summary, table
from hf_specdec.loading import Chat, encode, load_model, load_target
from hf_specdec.options import check_count
from hf_specdec.stats import SpecStats
from hf_specdec.versions import commit

TURNS = ("first", "all")
_TREE = DraftTree(depth=5, top_k=4, total_tokens=16)
_WARM_UP_TOKENS = 16

# What a variant adds to the arguments of `generate`. A name that ends in "=" is followed by a folder or Hub id, that of
# token recycling by the number of nodes of every tree.
Builder = Callable[[PreTrainedModel, str], dict[str, Any]]
Arguments = Callable[[], dict[str, Any]]
VARIANTS: dict[str, Builder] = {
    PLAIN: lambda target, folder: {},
    HOST_LOOKUP: lambda target, folder: {"prompt_lookup_num_tokens": 10},
    "host-draft-model=": lambda target, folder: {"assistant_model": load_model(folder, target.dtype, target.device)},
    "prompt-lookup": lambda target, folder: {"assistant": PromptLookup()},
    "suffix": lambda target, folder: {"assistant": Suffix()},
    "suffix-chains": lambda target, folder: {"assistant": Suffix(branches=False)},
    "token-recycling": lambda target, folder: {"assistant": TokenRecycling()},
    "token-recycling=": lambda target, nodes: {"assistant": TokenRecycling(int(nodes))},
    "auto": lambda target, folder: {"assistant": Auto()},
    "draft-model=": lambda target, folder: {"assistant": DraftModel(load_model(folder, target.dtype, target.device))},
    "drafter=": lambda target, folder: {"assistant": load_drafter(folder, target)},
    "drafter-tree=": lambda target, folder: {"assistant": load_drafter(folder, target, tree=_TREE)},
    "auto=": lambda target, folder: {"assistant": Auto([Suffix(), TokenRecycling(), load_drafter(folder, target)])},
}


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Args:
        questions: file in Spec-Bench's form: JSON lines with `question_id`, `category` and `turns`.
        target: a folder or Hub id; `None` is the embedded demo model.
        variants: names from `VARIANTS`, those that end in "=" followed by a folder or Hub id ("token-recycling=16": by
            the nodes of its trees). Plain generation always runs, as everything is compared with it.
        dtype: "bfloat16", "float32" or "float16".
        device: such as "cpu" or "cuda"; `None` is the accelerator if there is one.
        categories: which to ask; `None` means all.
        limit: how many questions of each category, from the first; `None` means all.
        turns: "first" asks only the first turn of every question; "all" asks every turn, each after the
            variant's own earlier answers.
        batch_size: questions of one category that are answered together. Transformers' own assisted
            generation can only do one.
        max_new_tokens: most tokens of an answer.
        temperature: 0 is greedy. Other sampling settings stay those of the model's generation config.
        num_draft_tokens: longest draft of our variants; `None` leaves it to each strategy.
        seed: of the first question; every variant answers a question from the same seed.
        past_ends: whether answers go on past the end-of-sequence ids: all variants then write as many tokens, and
            batches stay full.

    Raises:
        ValueError: if a value is out of range or a variant is unknown.
    """

    questions: str
    target: str | None = None
    variants: tuple[str, ...] = (PLAIN, HOST_LOOKUP, "prompt-lookup")
    dtype: str = "bfloat16"
    device: str | None = None
    categories: tuple[str, ...] | None = None
    limit: int | None = None
    turns: str = "first"
    batch_size: int = 1
    max_new_tokens: int = 128
    temperature: float = 0.0
    num_draft_tokens: int | None = None
    seed: int = 0
    past_ends: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_new_tokens"):
            check_count(name, getattr(self, name))
        for name in ("limit", "num_draft_tokens"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be a finite number of at least 0 (0 is greedy).")
        if self.turns not in TURNS:
            raise ValueError(f"turns={self.turns!r} is unknown; use one of {', '.join(TURNS)}.")
        self._check_variants()

    def _check_variants(self) -> None:
        for spelling in self.variants:
            _split(spelling)
        if len(set(self.variants)) < len(self.variants):
            raise ValueError(f"variants={','.join(self.variants)} names one twice; name each once.")
        of_host = [spelling for spelling in self.variants if spelling.startswith("host-")]
        if self.batch_size > 1 and of_host:
            raise ValueError(
                f"{', '.join(of_host)}: Transformers' own assisted generation serves one question at a time, and "
                f"batch_size={self.batch_size}. Leave these variants out, or set batch_size=1."
            )

    @property
    def names(self) -> list[str]:
        """All variants that run, plain first."""
        return [PLAIN, *(name for name in self.variants if name != PLAIN)]


@dataclass(frozen=True)
class Question:
    """One question in one or more turns, `history` being the messages of the conversation before the first."""

    question_id: Any
    category: str
    turns: tuple[str, ...]
    history: tuple[dict[str, str], ...] = ()


_WARM_UP = Question("warm-up", "warm-up", ("Name a colour, a country and a river.",))


def run_bench(options: BenchOptions, console: Console | None = None) -> dict[str, Any]:
    """Measures all variants and returns the whole result, ready for JSON.

    Args:
        options: what to measure.
        console: where to show progress and the table; `None` shows nothing.

    Returns:
        `environment`, `options`, `variants` (see `report.summary`; with `differences` from plain where greedy
        outputs part) and `batches` (what every batch took, in the order in which the variants ran).

    Raises:
        ValueError: if a file, model or category does not exist or does not fit.
    """
    questions = read_questions(Path(options.questions), options.categories, options.limit)
    document = Bench(options).document(questions, console)
    if console is not None:
        console.print(table(document))
    return document


class Bench:
    """A target, its tokenizer and all variants, loaded and ready to be measured.

    Args:
        options: what to measure.
        others: variants beside those that the options name: what each adds to the arguments of `generate`, asked
            anew for every call, so that a drafter may be a fresh one every time or remember earlier calls.
    """

    def __init__(self, options: BenchOptions, others: dict[str, Arguments] | None = None):
        self.options = options
        self.model, self.tokenizer = load_target(options.target, options.dtype, options.device)
        hf_specdec.enable(self.model)
        self.variants = {name: _build(name, self.model) for name in options.names} | (others or {})
        self.ends = set() if options.past_ends else _end_ids(self.model)
        self.target_passes = 0
        self.model.register_forward_pre_hook(self._count_pass)

    def document(
        self, questions: list[Question], console: Console | None = None, warm_up: list[Question] | None = None
    ) -> dict[str, Any]:
        """Measures, and returns the whole result; see `measure` for the arguments and `run_bench` for the result."""
        described = environment(self.model)  # before the run: files may change while it lasts
        batches = self.measure(questions, console, warm_up)
        is_greedy = self.options.temperature == 0
        variants = {name: summary(batches, name, is_greedy) for name in self.variants}
        for name in [name for name in variants if name != PLAIN] if is_greedy else ():
            variants[name]["differences"] = [found for batch in batches for found in self.differences(batch, name)]
        return {
            "environment": described,
            "options": asdict(self.options) | {"questions": Path(self.options.questions).name},  # not whose folder
            "variants": variants,
            "batches": [_batch_entry(batch) for batch in batches],
        }

    def measure(
        self, questions: list[Question], console: Console | None = None, warm_up: list[Question] | None = None
    ) -> list[Batch]:
        """Answers all questions with all variants, in rotating order, after a warm-up.

        Args:
            questions: to answer.
            console: where to show progress.
            warm_up: asked together and briefly before the clock runs, for the sake of first calls; by default a
                question of our own, since drafters remember what they have seen.
        """
        groups = list(_grouped(questions, self.options.batch_size))
        for name in self.variants:
            self.ask(name, warm_up or [_WARM_UP] * len(groups[0]), _WARM_UP_TOKENS, "first")
        batches = []
        with _progress(console) as progress:
            bar = progress.add_task("", total=len(groups) * len(self.variants))
            for number, group in enumerate(groups):
                runs = {}
                for name in rotated(list(self.variants), number):
                    progress.update(bar, description=f"{group[0].category}: {name}")
                    torch.manual_seed(self.options.seed + number)
                    runs[name] = self.ask(name, group, self.options.max_new_tokens, self.options.turns)
                    progress.advance(bar)
                batches.append(Batch(group[0].category, [question.question_id for question in group], runs))
                if console is not None and not console.is_terminal:
                    console.print(f"{number + 1}/{len(groups)} {group[0].category}")  # a log shows no bar
        return batches

    def ask(self, name: str, group: list[Question], max_new_tokens: int, turns: str) -> Run:
        """One variant's answers to questions that are asked together, turn by turn.

        Args:
            name: the variant.
            group: the questions.
            max_new_tokens: most tokens of an answer.
            turns: one of `TURNS`.
        """
        answered: list[list[Turn]] = [[] for _ in group]
        run = Run(answered, seconds=0.0, target_passes=0, rounds=0, stats=None)
        for turn in range(max(len(question.turns) for question in group) if turns == "all" else 1):
            rows = [row for row, question in enumerate(group) if turn < len(question.turns)]
            chats = [self._chat(group[row], answered[row]) for row in rows]
            for row, answer in zip(rows, self._generate(name, chats, max_new_tokens, run), strict=True):
                answered[row].append(answer)
        if run.stats is not None:
            run.rounds = run.stats.rounds
        else:  # plain generation with a batch: a finished row rides along, but takes no part
            run.rounds = run.tokens if name == PLAIN else run.target_passes
        return run

    def differences(self, batch: Batch, name: str) -> list[dict[str, Any]]:
        """Where a variant's answers leave plain's, and how far the two best logits are apart there.

        Args:
            batch: questions that both have answered.
            name: the variant.

        Returns:
            For every question that differs: `question_id`, `turn`, `position` (from 0, in the answer), both
            `tokens` (plain's first), and `logit_gap` of one plain pass over the text before them.
        """
        runs = zip(batch.question_ids, batch.runs[PLAIN].turns, batch.runs[name].turns, strict=True)
        return [found for which, plain, other in runs if (found := self._difference(which, plain, other))]

    def _difference(self, question_id: Any, plain: list[Turn], other: list[Turn]) -> dict[str, Any] | None:
        for number, (ours, theirs) in enumerate(zip(plain, other, strict=True)):
            position = first_difference(ours.answer, theirs.answer)
            if position is not None:
                return {
                    "question_id": question_id,
                    "turn": number,
                    "position": position,
                    "tokens": [ours.answer[position], theirs.answer[position]],
                    "logit_gap": logit_gap(self.model, ours.prompt + ours.answer[:position]),
                }
        return None

    def _chat(self, question: Question, answered: list[Turn]) -> Chat:
        """The conversation up to the turn that is to be answered next."""
        chat: Chat = [*question.history]
        for asked, turn in zip(question.turns, answered, strict=False):
            text = str(self.tokenizer.decode(turn.answer, skip_special_tokens=True))
            chat += [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
        return [*chat, {"role": "user", "content": question.turns[len(answered)]}]

    def _generate(self, name: str, chats: list[Chat], max_new_tokens: int, run: Run) -> list[Turn]:
        """One timed call of `generate`; what it cost is added to the run."""
        inputs = encode(self.tokenizer, chats, self.model.device)
        arguments = self._arguments(name) | {"max_new_tokens": max_new_tokens}
        passes_before = self.target_passes
        start = _now(self.model)
        output = self.model.generate(**inputs, **arguments)
        run.seconds += _now(self.model) - start
        run.target_passes += self.target_passes - passes_before
        if (stats := hf_specdec.last_stats(self.model)) is not None:
            run.stats = run.stats or SpecStats()
            run.stats.merge(stats)
        return _turns(inputs, output, self.ends)

    def _arguments(self, name: str) -> dict[str, Any]:
        options, arguments = self.options, dict(self.variants[name]())
        if "assistant" in arguments and options.num_draft_tokens is not None:
            arguments["num_draft_tokens"] = options.num_draft_tokens
        if options.temperature > 0:
            arguments["temperature"] = options.temperature
        if options.past_ends:
            arguments["eos_token_id"] = None
        return arguments | {"do_sample": options.temperature > 0, "pad_token_id": self.tokenizer.pad_token_id}

    def _count_pass(self, *_: Any) -> None:
        self.target_passes += 1


def rotated(names: list[str], number: int) -> list[str]:
    """The variants in the order in which they answer question `number`: each comes first in its turn."""
    first = number % len(names)
    return names[first:] + names[:first]


def logit_gap(model: Any, text: list[int]) -> float:
    """How far the two best next tokens of a text are apart, in one plain pass of the target."""
    tokens = torch.tensor([text], device=model.device)
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        assistant=False,
    )
    best = output.logits[0][0].float().topk(2).values
    return float(best[0] - best[1])


def read_questions(path: Path, categories: tuple[str, ...] | None = None, limit: int | None = None) -> list[Question]:
    """Reads questions in Spec-Bench's form, the first `limit` of every wanted category.

    Raises:
        ValueError: if a line is no question, or a category has none.
    """
    kept: dict[str, list[Question]] = {category: [] for category in categories or ()}
    known: set[str] = set()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                question = _parse(line, f"{path}, line {number}")
                known.add(question.category)
                if categories is None or question.category in kept:
                    kept.setdefault(question.category, []).append(question)
    if missing := [category for category, questions in kept.items() if not questions]:
        raise ValueError(f"{path} has no questions of {', '.join(missing)}; it has {', '.join(sorted(known))}.")
    if not kept:
        raise ValueError(f"{path} has no questions; every line must be one JSON object.")
    return [question for questions in kept.values() for question in questions[:limit]]


def write_json(document: dict[str, Any], path: Path) -> None:
    """Writes a document so that the file is either whole or not there."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def publish(document: dict[str, Any], output: Path | None = None) -> None:
    """Prints a document as one line, the last of a benchmark, and keeps it in a file if one is named."""
    if output is not None:
        write_json(document, output)
    print(json.dumps(document))


def environment(model: PreTrainedModel) -> dict[str, Any]:
    """What the figures depend on beside the options."""
    accelerated = model.device.type == "cuda"
    return {
        "hf_specdec": hf_specdec.__version__,
        "commit": commit(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(model.device) if accelerated else str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "target": model.config.name_or_path and Path(model.config.name_or_path).name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _split(spelling: str) -> tuple[str, str]:
    """A variant's name in the registry, and what follows it: a folder, or a number of nodes."""
    name, equals, folder = spelling.partition("=")
    if name + equals not in VARIANTS or (equals and not folder):
        followed = {known: "NODES" if known == "token-recycling=" else "DIR" for known in VARIANTS if known[-1] == "="}
        allowed = ", ".join(known + followed.get(known, "") for known in VARIANTS)
        raise ValueError(f"variant {spelling!r} is unknown; use {allowed}.")
    if name + equals == "token-recycling=" and not (folder.isdecimal() and int(folder)):
        raise ValueError(f"variant {spelling!r}: say how many nodes its trees have, such as token-recycling=16.")
    return name + equals, folder


def _build(spelling: str, target: PreTrainedModel) -> Arguments:
    """The variant's arguments, built once for all calls."""
    name, folder = _split(spelling)
    built = VARIANTS[name](target, folder)
    return lambda: built


def _parse(line: str, where: str) -> Question:
    try:
        fields = json.loads(line)
        question = Question(fields["question_id"], fields["category"], tuple(fields["turns"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where} is no question: {error!r}. Every line needs question_id, category and turns (a list of texts)."
        ) from error
    if not question.turns or not all(isinstance(turn, str) for turn in question.turns):
        raise ValueError(f"{where}: turns must be a list of at least one text.")
    return question


def _grouped(questions: list[Question], size: int) -> Iterator[list[Question]]:
    """Questions of one category, `size` at a time."""
    for category in dict.fromkeys(question.category for question in questions):
        same = [question for question in questions if question.category == category]
        yield from (same[start : start + size] for start in range(0, len(same), size))


def _turns(inputs: dict[str, Tensor], output: Tensor, ends: set[int]) -> list[Turn]:
    """Prompts without padding and answers up to their end."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    answers = output[:, ids.shape[1] :].tolist()
    prompts = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
    return [Turn(prompt, _up_to_end(answer, ends)) for prompt, answer in zip(prompts, answers, strict=True)]


def _up_to_end(answer: list[int], ends: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(answer) if token in ends), len(answer))
    return answer[: end + 1]


def _end_ids(model: PreTrainedModel) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def _now(model: PreTrainedModel) -> float:
    """The time when all that was asked of the device is done."""
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)
    return time.perf_counter()


def _batch_entry(batch: Batch) -> dict[str, Any]:
    runs = {
        name: {"tokens": run.tokens, "seconds": run.seconds, "rounds": run.rounds} for name, run in batch.runs.items()
    }
    return {"category": batch.category, "question_ids": batch.question_ids, "runs": runs}


def _progress(console: Console | None) -> Any:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=console is None)


def _cpu() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
