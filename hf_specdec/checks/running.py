"""Answers questions with all variants, and measures what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.checks.documents import environment
from hf_specdec.checks.questions import Question, grouped
from hf_specdec.checks.report import PLAIN, Batch, Run, Turn, first_difference, summary
from hf_specdec.checks.resuming import KeptSetting
from hf_specdec.checks.settings import BenchOptions
from hf_specdec.checks.variants import Arguments, build_variant
from hf_specdec.drafters import Drafter
from hf_specdec.host import num_layers
from hf_specdec.loading import Chat, encode, load_target
from hf_specdec.stats import SpecStats

_WARM_UP = Question("warm-up", "warm-up", ("Name a colour, a country and a river.",))
_WARM_UP_TOKENS = 16


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
        self.variants = {name: build_variant(name, self.model) for name in options.names} | (others or {})
        self.ends = set() if options.past_ends else _end_ids(self.model)
        self.num_layers, self.target_passes = num_layers(self.model), 0
        self.model.register_forward_pre_hook(self._count_pass)

    def document(
        self,
        questions: list[Question],
        console: Console | None = None,
        warm_up: list[Question] | None = None,
        kept: KeptSetting | None = None,
    ) -> dict[str, Any]:
        """Measures, and returns the whole result.

        Args:
            questions: to answer.
            console: where to show progress; `None` shows nothing.
            warm_up: see `measure`.
            kept: what an earlier run has finished, and where to keep what this one does.

        Returns:
            See `run_bench`.

        Raises:
            ValueError: if the earlier run began in other surroundings.
        """
        described = environment(self.model)  # before the run: files may change while it lasts
        finished: list[Batch] = []
        if kept is not None:
            described, finished = kept.begin(described)
        batches = self.measure(questions, console, warm_up, finished, kept.keep if kept is not None else None)
        document = {
            "environment": described,
            "options": self.options.published(),
            "variants": {name: self._figures(batches, name) for name in self.variants},
            "batches": [_batch_entry(batch) for batch in batches],
        }
        resumed_at = [] if kept is None else [number for number in kept.resumed_at if number < len(batches)]
        return document | ({"resumed_at": resumed_at} if resumed_at else {})

    def measure(
        self,
        questions: list[Question],
        console: Console | None = None,
        warm_up: list[Question] | None = None,
        finished: Sequence[Batch] = (),
        keep: Callable[[int, Batch], None] | None = None,
    ) -> list[Batch]:
        """Answers all questions with all variants, in rotating order, after a warm-up.

        Args:
            questions: to answer.
            console: where to show progress: a bar on a terminal, a line a group in a log.
            warm_up: asked together and briefly before the clock runs, for the sake of first calls; by default a
                question of our own, since drafters remember what they have seen.
            finished: the first groups, if an earlier run has answered them.
            keep: what to do with every finished group, by its number.
        """
        groups = list(grouped(questions, self.options.batch_size))
        batches = list(finished)
        for name in self.variants if len(batches) < len(groups) else ():
            self.ask(name, warm_up or [_WARM_UP] * len(groups[0]), _WARM_UP_TOKENS, "first")
        with _progress(console) as progress:
            num_runs = len(self.variants)
            bar = progress.add_task("", total=len(groups) * num_runs, completed=len(batches) * num_runs)
            for number, group in list(enumerate(groups))[len(batches) :]:
                runs = {}
                for name in rotated(list(self.variants), number):
                    progress.update(bar, description=f"{group[0].category}: {name}")
                    torch.manual_seed(self.options.seed + number)
                    runs[name] = self.ask(name, group, self.options.max_new_tokens, self.options.turns)
                    progress.advance(bar)
                batches.append(Batch(group[0].category, [question.question_id for question in group], runs))
                if keep is not None:
                    keep(number, batches[-1])
                if console is not None and not console.is_terminal:
                    console.print(f"{number + 1}/{len(groups)} {group[0].category}", markup=False)  # a log shows no bar
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
        if run.stats is not None:  # they know passes of some layers too, which the target's hook never sees
            run.rounds, run.target_passes = run.stats.rounds, run.stats.target_passes
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

    def _figures(self, batches: list[Batch], name: str) -> dict[str, Any]:
        """All figures of a variant."""
        is_greedy = self.options.temperature == 0
        figures = summary(batches, name, is_greedy)
        if is_greedy and name != PLAIN:
            figures["differences"] = [found for batch in batches for found in self.differences(batch, name)]
        if figures["profile"] is not None:
            figures["profile"]["round_seconds"] = self._round_seconds(name)
        return figures

    def _round_seconds(self, name: str) -> list[dict[str, Any]]:
        """The seconds of rounds by width, as far as the drafter has measured them to choose its lengths."""
        drafter = self.variants[name]().get("assistant")
        if not isinstance(drafter, Drafter):
            return []
        return [
            {
                "payer": payer,
                "rows": load.num_rows,
                "text_tokens": round(2 ** (load.size / 2)),
                "seconds": {str(width): list(seconds) for width, seconds in sorted(measured.measured.items())},
            }
            for (payer, load), measured in drafter.experience_with(self.model).round_seconds.items()
        ]

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
        start = clock(self.model.device)
        output = self.model.generate(**inputs, **arguments)
        run.seconds += clock(self.model.device) - start
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
        # The host's early exit drafts with the target itself, whose config then names fewer layers.
        self.target_passes += num_layers(self.model) == self.num_layers


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


def clock(device: torch.device) -> float:
    """The time when all that was asked of the device is done, in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _batch_entry(batch: Batch) -> dict[str, Any]:
    runs = {
        name: {"tokens": run.tokens, "seconds": run.seconds, "rounds": run.rounds} for name, run in batch.runs.items()
    }
    return {"category": batch.category, "question_ids": batch.question_ids, "runs": runs}


def _progress(console: Console | None) -> Any:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=console is None or not console.is_terminal)
