"""What do match choice, n-gram range and scheduled lengths bring? Replays plain answers; one JSON document last.

    python benchmarks/ablation.py QUESTIONS.jsonl [--target DIR] [--limit 5] [--answers FILE]

Answers once with plain greedy generation (kept in --answers), measures what a target pass costs at every width, then
lets the package's own sessions draft for each answer: a draft counts up to the first token that differs. Time is the
sum of measured costs, shown to the schedule as if it had passed, so settings are compared without the noise of a
shared machine. The prompt's own pass counts as a plain one. The host's rule (n-grams of 2, then 1, the oldest match, 10
tokens) is replayed beside them.

Token recycling learns from the target's probabilities. They are known along the answers only (kept in --successors), so
in a replay refused tokens teach nothing: in truth it drafts somewhat better. A tree's pass counts like a chain's of as
many tokens, and costs beyond the widest measured pass are extrapolated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LogitsProcessorList

from hf_specdec import Auto, PromptLookup, Suffix, TokenRecycling, host
from hf_specdec.accept import Draft
from hf_specdec.checks.bench import clock, read_questions
from hf_specdec.drafters import DraftContext, Drafter, DraftSession
from hf_specdec.drafters.scheduled import scheduled
from hf_specdec.files import write_text
from hf_specdec.loading import encode, load_target, target_name
from hf_specdec.recycling import likeliest
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome

HOST_RULE = "host rule"
LONGEST = 24


@dataclass(frozen=True)
class Setting:
    """A drafter, and whether its lengths are scheduled; `runs_on` is false where copies end with the text."""

    build: Callable[[], Drafter]
    is_scheduled: bool = False
    runs_on: bool = True


def lookup(*window: int, longest: int = 10, prefer: str = "frequent", per_match: int | None = None) -> Callable:
    """Builds a prompt lookup."""
    return lambda: PromptLookup(*window, num_draft_tokens=longest, prefer=prefer, tokens_per_match=per_match)


def suffix(**options: Any) -> Callable:
    """Builds a suffix drafter."""
    return lambda: Suffix(**options)


SETTINGS = {
    HOST_RULE: Setting(lookup(1, 2, prefer="earliest"), runs_on=False),
    "vLLM's prompt lookup, (5, 5)": Setting(lookup(5, 5, prefer="earliest")),
    "fixed 10, (1, 2) newest": Setting(lookup(1, 2, prefer="newest")),
    "fixed 10, (1, 2) frequent": Setting(lookup(1, 2)),
    "fixed 5, (1, 4) frequent": Setting(lookup(1, 4, longest=5)),
    "fixed 10, (1, 4) earliest": Setting(lookup(1, 4, prefer="earliest")),
    "fixed 10, (1, 4) newest": Setting(lookup(1, 4, prefer="newest")),
    "fixed 10, (1, 4) frequent": Setting(lookup(1, 4)),
    "fixed 10, (2, 4) frequent": Setting(lookup(2, 4)),
    "fixed 10, (3, 5) frequent": Setting(lookup(3, 5)),
    "5 a match, (1, 4) frequent, at most 15": Setting(lookup(1, 4, longest=15, per_match=5)),
    "5 a match, (1, 8) frequent, at most 15": Setting(lookup(1, 8, longest=15, per_match=5)),
    "scheduled, (1, 4) newest": Setting(lookup(1, 4, longest=15, prefer="newest"), is_scheduled=True),
    "scheduled, (1, 4) frequent (prompt-lookup)": Setting(lookup(1, 4, longest=15), is_scheduled=True),
    "scheduled, (1, 8) frequent": Setting(lookup(1, 8, longest=15), is_scheduled=True),
    "suffix, factor 1, own text": Setting(suffix(max_cached_requests=0)),
    "suffix, factor 5, own text": Setting(suffix(max_cached_requests=0, max_spec_factor=5.0)),
    "suffix, scheduled, own text": Setting(suffix(max_cached_requests=0), is_scheduled=True),
    "suffix, factor 1": Setting(suffix()),
    "suffix, scheduled (suffix)": Setting(suffix(), is_scheduled=True),
    "suffix chains, factor 1, own text": Setting(suffix(max_cached_requests=0, branches=False)),
    "suffix chains, scheduled, own text": Setting(suffix(max_cached_requests=0, branches=False), is_scheduled=True),
    "suffix chains, factor 1 (vLLM's)": Setting(suffix(branches=False)),
    "suffix chains, scheduled": Setting(suffix(branches=False), is_scheduled=True),
    **{
        f"token recycling, {nodes} nodes": Setting(lambda nodes=nodes: TokenRecycling(num_draft_tokens=nodes))
        for nodes in (4, 8, 16, 32)
    },
    "scheduled, token recycling": Setting(TokenRecycling, is_scheduled=True),
    "auto, suffix and prompt lookup": Setting(lambda: Auto([Suffix(), PromptLookup()]), is_scheduled=True),
    "auto, suffix chains and recycling": Setting(
        lambda: Auto([Suffix(branches=False), TokenRecycling()]), is_scheduled=True
    ),
    "auto, suffix and recycling": Setting(lambda: Auto([Suffix(), TokenRecycling()]), is_scheduled=True),
    "auto, all three": Setting(lambda: Auto([Suffix(), PromptLookup(), TokenRecycling()]), is_scheduled=True),
}
SINGLE = "scheduled, (1, 4) frequent (prompt-lookup)", "suffix, scheduled (suffix)", "scheduled, token recycling"
AUTO = "auto, all three"


def main(argv: list[str] | None = None) -> None:
    """Answers, measures, replays, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--answers", type=Path, default=Path("build/answers.json"))
    parser.add_argument("--costs", type=Path, default=Path("build/costs.json"), help="measured costs, kept")
    parser.add_argument("--successors", type=Path, default=Path("build/successors.json"))
    parser.add_argument("--only", default="", help="settings whose names contain this")
    options = parser.parse_args(argv)
    model, tokenizer = load_target(options.target, options.dtype)
    machine = {"target": target_name(model), "dtype": options.dtype}
    asked = machine | {"questions": options.questions.name, "limit": options.limit, "tokens": options.max_new_tokens}
    answers = kept(options.answers, asked, lambda: answered(model, tokenizer, options))
    costs = kept(options.costs, machine, lambda: pass_costs(model, widths=range(1, LONGEST + 2)))
    known = kept(options.successors, asked, lambda: {i: successors(model, entry) for i, entry in enumerate(answers)})
    for index, entry in enumerate(answers):
        entry["successors"] = known[str(index)]
    needed = {HOST_RULE, AUTO, *SINGLE}
    chosen = {name: setting for name, setting in SETTINGS.items() if options.only in name or name in needed}
    results = {name: compared(model, answers, setting, costs) for name, setting in chosen.items()}
    for result in results.values():
        result["against_host_rule"] = result["speedup"] / results[HOST_RULE]["speedup"]
    Console(width=120).print(table(results))
    for category, speedup in results[AUTO]["by_category"].items():
        best = max(SINGLE, key=lambda name: results[name]["by_category"][category])
        print(f"{category}: {AUTO} is {speedup / results[best]['by_category'][category]:.3f} times as fast as {best}")
    print(json.dumps({"threads": torch.get_num_threads(), "cost_by_width": costs, "settings": results}))


def kept(path: Path, facts: dict[str, Any], make: Callable[[], Any]) -> Any:
    """What a file holds, made and written if there is none.

    Args:
        path: of the file.
        facts: what it depends on.
        make: makes it.

    Raises:
        ValueError: if what it holds was made with other facts.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"made_with": facts, "found": make()}))
    document = json.loads(path.read_text())
    if document["made_with"] != facts:
        raise ValueError(f"{path} was made with {document['made_with']}, not with {facts}; remove it or name another.")
    return document["found"]


def answered(model: Any, tokenizer: Any, options: argparse.Namespace) -> list[dict]:
    """Plain greedy answers: category, prompt and answer ids."""
    answers = []
    for question in read_questions(options.questions, limit=options.limit):
        inputs = encode(tokenizer, [[{"role": "user", "content": question.turns[0]}]], model.device)
        output = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)[0].tolist()
        length = inputs["input_ids"].shape[1]
        answers.append({"category": question.category, "prompt": output[:length], "answer": output[length:]})
        print(f"{len(answers)} answers", flush=True)
    return answers


@torch.no_grad()
def successors(model: Any, entry: dict, top_k: int = 8) -> list:
    """Ids and probabilities of what the target thought likeliest before every token of an answer."""
    text = torch.tensor([entry["prompt"] + entry["answer"]], device=model.device)
    logits = model(text, logits_to_keep=len(entry["answer"]) + 1).logits[0].float()
    ids, probs = likeliest(logits, top_k)
    return [ids.tolist(), probs.round(decimals=4).tolist()]


@torch.no_grad()
def pass_costs(model: Any, widths: range, context: int = 300, repeats: int = 15) -> list[float]:
    """Median seconds of a pass over `width` tokens behind a context, relative to one token; widths interleaved."""
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, context, dtype=torch.long, device=model.device), **{host.CACHE_NAME: cache})
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(repeats):
        for width in widths:
            tokens = torch.zeros(1, width, dtype=torch.long, device=model.device)
            start = clock(model.device)
            model(tokens, **{host.CACHE_NAME: cache})
            seconds[width].append(clock(model.device) - start)
            cache.crop(-width)
    medians = [statistics.median(seconds[width]) for width in widths]
    return [value / medians[0] for value in medians]


def compared(model: Any, answers: list[dict], setting: Setting, costs: list[float]) -> dict[str, Any]:
    """Geometric mean over categories of the replayed speed-up, tokens a pass, and share of rounds with a draft."""
    drafter = setting.build()
    by_category: dict[str, list[Replay]] = {}
    for entry in answers:
        replay = Replay(model, drafter, setting, costs, entry)
        by_category.setdefault(entry["category"], []).append(replay.run())
    speedups = {
        category: sum(run.tokens for run in runs) / sum(run.clock for run in runs)
        for category, runs in by_category.items()
    }
    every = [run for runs in by_category.values() for run in runs]
    rounds = sum(run.rounds for run in every)
    return {
        "speedup": math.exp(statistics.fmean(map(math.log, speedups.values()))),
        "by_category": speedups,
        "acceptance_length": sum(run.tokens for run in every) / rounds,
        "coverage": sum(run.rounds_with_draft for run in every) / rounds,
        "seconds_per_token": sum(run.clock for run in every) / sum(run.tokens for run in every),
        "draft_length": sum(run.drafted for run in every) / max(1, sum(run.rounds_with_draft for run in every)),
    }


class Replay:
    """An answer that is known in advance, drafted round by round on a clock of measured costs."""

    def __init__(self, model: Any, drafter: Drafter, setting: Setting, costs: list[float], entry: dict):
        self.costs, self.answer, self.runs_on = costs, entry["answer"], setting.runs_on
        self.clock, self.rounds, self.rounds_with_draft, self.tokens, self.drafted = 0.0, 0, 0, 0, 0
        self.state = DecodeState(torch.tensor([entry["prompt"]]), None, fill=0)
        self.successors, self.vocabulary = entry["successors"], host.vocabulary_size(model)
        scorer = Scorer(LogitsProcessorList())
        context = DraftContext(model, False, scorer, is_scheduled=setting.is_scheduled, takes_trees=True)
        self.session = started(drafter, context, self.state)
        self.reads_logits = any(isinstance(arm, TokenRecycling) for arm in drafter.arms)
        self.longest = drafter.options.num_draft_tokens or drafter.default_num_draft_tokens

    def run(self) -> Replay:
        """Goes through the whole answer."""
        with mock.patch("hf_specdec.drafters.scheduled.time.perf_counter", side_effect=lambda: self.clock):
            for draft in self._drafts():
                self._advance(draft, self._path(draft))
        return self

    def _path(self, draft: Draft) -> list[int]:
        """Which drafted tokens the answer goes on with."""
        path, wanted = [], self.answer[self.tokens :]
        for place, (token, parent) in enumerate(
            zip(draft.tokens[0].tolist(), draft.known_parents()[0].tolist(), strict=True)
        ):
            if parent == (path[-1] if path else -1) and token == wanted[len(path)]:
                path.append(place)
        return path

    def _drafts(self) -> Iterator[Draft]:
        while self.tokens < len(self.answer):
            limit = min(self.longest, len(self.answer) - self.tokens - 1)
            draft = self.session.propose(self.state, [limit], None) if limit else Draft.empty(1)
            if not self.rounds:
                draft = draft.first_path()
                draft = Draft.of_copies([draft.tokens[0, : int(draft.lengths[0])].tolist()], self.state.device)
            tokens = draft.tokens[0].tolist()
            yield (
                draft
                if self.runs_on
                else Draft.of_copies([tokens[: self._copied_from_text(tokens)]], torch.device("cpu"))
            )

    def _advance(self, draft: Draft, path: list[int]) -> None:
        first, accepted = self.tokens, len(path)
        new = self.answer[first : first + accepted + 1]
        self.clock += self._cost(draft.width) if self.rounds else self.costs[0]
        self.rounds += 1
        self.rounds_with_draft += bool(draft.width)
        self.drafted += draft.width
        self.tokens += len(new)
        positions = None if draft.parents is None else [[0, *(place + 1 for place in path)]]
        outcome = Outcome([new], [len(new)], [draft.width], [accepted], [self.tokens == len(self.answer)], positions)
        read = [self.state.tokens[0][-1], *new[:-1]]
        self.state.append([new])
        self.state.commit(outcome)
        self.session.commit(self.state, outcome, self._target_pass(first, read, outcome, draft.width))

    def _cost(self, width: int) -> float:
        """Of a pass, by the draft's width; beyond what was measured as if it went on as in its second half."""
        last, half = len(self.costs) - 1, len(self.costs) // 2
        slope = (self.costs[last] - self.costs[half]) / (last - half)
        return self.costs[min(width, last)] + max(0, width - last) * slope

    def _target_pass(self, first: int, read: list[int], outcome: Outcome, width: int) -> Any:
        """What is known of the target's pass: logits with the right likeliest tokens along the path."""
        count = len(read)
        follows = (outcome.positions or [list(range(count))])[0][:count]
        ids = torch.tensor(self.successors[0][first : first + count])
        probs = torch.tensor(self.successors[1][first : first + count])
        rest = (1 - probs.sum(dim=1, keepdim=True)).clamp(min=1e-4) / self.vocabulary
        along = rest.log().repeat(1, self.vocabulary).scatter(1, ids, probs.clamp(min=1e-9).log())
        tokens, logits = torch.full((1, width + 1), -1), torch.zeros(1, width + 1, 1)
        if not self.reads_logits:
            return SimpleNamespace(tokens=tokens, logits=logits)
        logits = logits.repeat(1, 1, self.vocabulary)
        tokens[0, follows], logits[0, follows] = torch.tensor(read), along
        return SimpleNamespace(tokens=tokens, logits=logits)

    def _copied_from_text(self, draft: list[int]) -> int:
        """How much of a copy of the oldest match of two tokens, or one, lies in the text itself."""
        text = self.state.tokens[0]
        for size in (2, 1):
            ends = (end for end in range(size, len(text)) if text[end - size : end] == text[-size:])
            if (end := next(ends, None)) is not None:
                return min(len(draft), len(text) - end)
        return len(draft)


def started(drafter: Drafter, context: DraftContext, state: DecodeState) -> DraftSession:
    """The drafter's session, as the loop starts it."""
    if not context.is_scheduled:
        return drafter.start(context, state)
    return scheduled(drafter.arms, context, state, drafter.experience_with(context.target))


def table(results: dict[str, dict[str, float]]) -> Table:
    """One line a setting."""
    shown = Table(title="Replayed")
    for heading in ("setting", "speed-up", "against host", "tokens a pass", "rounds with draft", "drafted a draft"):
        shown.add_column(heading)
    for name, result in results.items():
        figures = (result[key] for key in ("speedup", "against_host_rule", "acceptance_length"))
        cells = [*(f"{value:.3f}" for value in figures), f"{result['coverage']:.0%}", f"{result['draft_length']:.1f}"]
        shown.add_row(name, *cells)
    return shown


if __name__ == "__main__":
    main()
