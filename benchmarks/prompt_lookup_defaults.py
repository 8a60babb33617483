"""Which settings of PromptLookup pay? Replays plain answers with every setting; prints one JSON document last.

    python benchmarks/prompt_lookup_defaults.py QUESTIONS.jsonl [--target DIR] [--limit 5] [--answers FILE]

Answers once with plain greedy generation (kept in --answers), measures what a target pass costs at every width, then
replays each answer with the package's own n-gram index: a draft counts up to the first token that differs. Time is
the sum of the passes' measured costs, so settings are compared without the noise of a shared machine. The prompt's own
pass counts as one pass of width 1 for all settings; the host's rule (n-grams of 2, then 1, the oldest match, 10 tokens)
is replayed beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from hf_specdec import host
from hf_specdec.checks.bench import read_questions
from hf_specdec.drafters.prompt_lookup import NgramIndex
from hf_specdec.loading import encode, load_target

# name -> min n-gram, max n-gram, which match, longest draft, tokens per matched token, copies may run into themselves
SETTINGS = {
    "host rule": (1, 2, "earliest", 10, None, False),
    "vLLM default (5, 5)": (5, 5, "earliest", 10, None, True),
    "fixed 10, (1, 2) newest": (1, 2, "newest", 10, None, True),
    "fixed 10, (1, 2) frequent": (1, 2, "frequent", 10, None, True),
    "fixed 5, (1, 4) frequent": (1, 4, "frequent", 5, None, True),
    "fixed 10, (1, 4) earliest": (1, 4, "earliest", 10, None, True),
    "fixed 10, (1, 4) newest": (1, 4, "newest", 10, None, True),
    "fixed 10, (1, 4) frequent": (1, 4, "frequent", 10, None, True),
    "fixed 10, (2, 4) frequent": (2, 4, "frequent", 10, None, True),
    "fixed 10, (3, 5) frequent": (3, 5, "frequent", 10, None, True),
    "3 a match, (1, 4) frequent, at most 15": (1, 4, "frequent", 15, 3, True),
    "5 a match, (1, 4) earliest, at most 15": (1, 4, "earliest", 15, 5, True),
    "5 a match, (1, 4) newest, at most 15": (1, 4, "newest", 15, 5, True),
    "5 a match, (1, 4) frequent, at most 15 (default)": (1, 4, "frequent", 15, 5, True),
    "5 a match, (1, 8) frequent, at most 15": (1, 8, "frequent", 15, 5, True),
}


def main() -> None:
    """Answers, measures, replays, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--answers", type=Path, default=Path("build/answers.json"))
    options = parser.parse_args()
    model, tokenizer = load_target(options.target, options.dtype)
    answers = answered(model, tokenizer, options)
    costs = pass_costs(model, widths=range(1, 17))
    results = {name: compared(answers, setting, costs) for name, setting in SETTINGS.items()}
    host = results["host rule"]["speedup"]
    for name, result in results.items():
        result["against_host_rule"] = result["speedup"] / host
        print(f"{name:50} {result['speedup']:.3f} ({result['against_host_rule']:.3f})  tau {result['tau']:.2f}")
    print(json.dumps({"threads": torch.get_num_threads(), "cost_by_width": costs, "settings": results}))


def answered(model, tokenizer, options) -> list[dict]:
    """Plain greedy answers: category, prompt and answer ids; read from the file when it is there."""
    if options.answers.exists():
        return json.loads(options.answers.read_text())
    answers = []
    for question in read_questions(options.questions, limit=options.limit):
        inputs = encode(tokenizer, [[{"role": "user", "content": question.turns[0]}]], model.device)
        output = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)[0].tolist()
        length = inputs["input_ids"].shape[1]
        answers.append({"category": question.category, "prompt": output[:length], "answer": output[length:]})
        print(f"{len(answers)} answers", flush=True)
    options.answers.parent.mkdir(parents=True, exist_ok=True)
    options.answers.write_text(json.dumps(answers))
    return answers


@torch.no_grad()
def pass_costs(model, widths: range, context: int = 300, repeats: int = 15) -> list[float]:
    """Median seconds of a pass over `width` tokens behind a context, relative to one token; widths interleaved."""
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, context, dtype=torch.long, device=model.device), **{host.CACHE_NAME: cache})
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(repeats):
        for width in widths:
            tokens = torch.zeros(1, width, dtype=torch.long, device=model.device)
            start = time.perf_counter()
            model(tokens, **{host.CACHE_NAME: cache})
            seconds[width].append(time.perf_counter() - start)
            cache.crop(-width)
    medians = [statistics.median(seconds[width]) for width in widths]
    return [value / medians[0] for value in medians]


def compared(answers: list[dict], setting: tuple, costs: list[float]) -> dict[str, float]:
    """Geometric mean over categories of the replayed speed-up, and tokens a pass."""
    by_category: dict[str, list[tuple[int, int, float]]] = {}
    for entry in answers:
        by_category.setdefault(entry["category"], []).append(replayed(entry["prompt"], entry["answer"], setting, costs))
    speedups = [sum(tokens for tokens, *_ in runs) / sum(cost for *_, cost in runs) for runs in by_category.values()]
    tokens, passes = (sum(run[i] for runs in by_category.values() for run in runs) for i in (0, 1))
    return {"speedup": math.exp(statistics.fmean(map(math.log, speedups))), "tau": tokens / passes}


def replayed(prompt: list[int], answer: list[int], setting: tuple, costs: list[float]) -> tuple[int, int, float]:
    """Tokens, passes and cost of an answer that is known in advance."""
    smallest, largest, prefer, longest, per_match, runs_on = setting
    index = NgramIndex(smallest, largest, prefer, per_match)
    text, done, passes, cost = list(prompt), 0, 0, 0.0
    while done < len(answer):
        draft = index.copy(text, min(longest, len(answer) - done - 1)).tokens
        if not runs_on:
            draft = draft[: _copied_from_text(index, text, draft)]
        accepted = next((i for i, token in enumerate(draft) if token != answer[done + i]), len(draft))
        new = answer[done : done + accepted + 1]
        cost += costs[len(draft)] if passes else costs[0]
        text, done, passes = text + new, done + len(new), passes + 1
    return done, passes, cost


def _copied_from_text(index: NgramIndex, text: list[int], draft: list[int]) -> int:
    """How much of a copy of the oldest match lies in the text itself."""
    for table in index.text.tables:
        if draft and (places := table.matches(text[-table.length :])):
            return min(len(draft), index.text.size - places[-1])
    return len(draft)


if __name__ == "__main__":
    main()
