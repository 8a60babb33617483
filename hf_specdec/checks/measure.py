"""A few measured rounds: what drafting and verifying take, and whether it will pay."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import host
from hf_specdec.checks.findings import Measurement
from hf_specdec.drafters import Drafter
from hf_specdec.generation import speculate
from hf_specdec.loading import encode
from hf_specdec.schedule import RoundSeconds, best_width, expected_tokens
from hf_specdec.stats import SpecStats

LENGTHS = (1, 2, 4, 8)
_NEW_TOKENS = 33
_REPEATS = 2
_STEPS = 40
_QUESTIONS = (
    "Write a short story about a lighthouse keeper who finds an old logbook.",
    "Explain step by step how a bicycle stays upright.",
    "List five rivers of Europe, each with one sentence about it.",
    "Write a Python function that counts the words in a text, then describe it.",
)


def measure(target: PreTrainedModel, drafter: Drafter, tokenizer: Any = None, batch: int = 1) -> Measurement:
    """Generates briefly, plain and with drafts of several lengths, and compares.

    Args:
        target: the target, with its weights.
        drafter: the drafter.
        tokenizer: the target's; without it the prompts are made of arbitrary ids, and acceptance means little.
        batch: rows generated together.

    Raises:
        ValueError: if the drafter cannot serve the target.
    """
    inputs = _prompts(target, tokenizer, batch)
    plain = _plain_seconds(target, inputs)
    by_length = {length: _rounds(target, drafter, inputs, length) for length in LENGTHS}
    is_queued = inputs["input_ids"].device.type != "cpu"
    seconds = {length: _seconds(stats, is_queued) for length, stats in by_length.items()}
    line = RoundSeconds(slope=0.1)
    for length in LENGTHS * _REPEATS:  # a single measurement of a width might not count
        line.add(length, seconds[length]["round"])
    longest = by_length[LENGTHS[-1]]
    acceptance = longest.acceptance_by_position

    def at(width: int) -> float:
        return line.at(width, plain) if width else plain

    width, speed = best_width(expected_tokens([_survival(acceptance)], [1.0], in_lockstep=False), at)
    speedup = speed * plain
    needed = _break_even(at)
    return Measurement(
        batch=batch,
        prompt_tokens=inputs["input_ids"].shape[1],
        plain_seconds=plain,
        verify_seconds={length + 1: seconds[length]["verify"] for length in LENGTHS},
        draft_seconds=seconds[LENGTHS[-1]]["draft"] / LENGTHS[-1],
        round_seconds={length: seconds[length]["round"] for length in LENGTHS},
        acceptance=acceptance,
        break_even=needed,
        num_draft_tokens=width,
        speedup=speedup,
        verdict=_verdict(width, speedup, longest.acceptance_rate, needed),
    )


def _prompts(target: PreTrainedModel, tokenizer: Any, batch: int) -> dict[str, Tensor]:
    device = host.device_of(target) or torch.device("cpu")
    if tokenizer is None:
        size = host.vocabulary_size(target)
        return {"input_ids": (torch.arange(32, device=device) * 7 % size).repeat(batch, 1)}
    chats = [[{"role": "user", "content": _QUESTIONS[row % len(_QUESTIONS)]}] for row in range(batch)]
    tokenizer = copy.deepcopy(tokenizer)  # the caller's own keeps its side
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return encode(tokenizer, chats, device)


def _generate(target: PreTrainedModel, inputs: dict[str, Tensor], num_tokens: int, **arguments: Any) -> float:
    """Seconds of a greedy call that writes so many tokens, past any end."""
    start = time.perf_counter()
    settings = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain: Any = type(target)
    with torch.no_grad():
        output = plain.generate(target, **inputs, **settings, **arguments)
        output[0, -1].item()  # waits for the device
    return time.perf_counter() - start


def _plain_seconds(target: PreTrainedModel, inputs: dict[str, Tensor]) -> float:
    """Of one token, the prompt's pass left out."""
    _generate(target, inputs, 2)
    long = min(_generate(target, inputs, _NEW_TOKENS) for _ in range(_REPEATS))
    short = min(_generate(target, inputs, 1) for _ in range(_REPEATS))
    return max(long - short, 1e-9) / (_NEW_TOKENS - 1)


def _rounds(target: PreTrainedModel, drafter: Drafter, inputs: dict[str, Tensor], length: int) -> SpecStats:
    """The faster one of several runs with drafts of a length."""
    runs = []
    for _ in range(_REPEATS):
        call = speculate(drafter, num_draft_tokens=length)
        _generate(target, inputs, _NEW_TOKENS, custom_generate=call)
        runs.append(call.stats)
    return min(runs, key=lambda stats: sum(stats.seconds.values()) - stats.seconds["prefill"])


def _seconds(stats: SpecStats, is_queued: bool) -> dict[str, float]:
    """Seconds of a round, and of its parts; where passes are queued, waiting for them counts as verifying."""
    passes = max(1, stats.target_passes - stats.calls)
    draft, verify = stats.seconds["draft"], stats.seconds["verify"] + is_queued * stats.seconds["accept"]
    whole = sum(stats.seconds.values()) - stats.seconds["prefill"]
    return {"draft": draft / passes, "verify": verify / passes, "round": whole / passes}


def _survival(acceptance: list[float | None]) -> list[float]:
    """Probabilities that the first 1, 2, ... drafted tokens all stay."""
    survival, product = [], 1.0
    for rate in acceptance:
        product *= rate or 0.0
        survival.append(product)
    return survival


def _break_even(seconds: Any) -> float | None:
    """The lowest rate, the same at all positions, at which some draft length is as fast as plain generation."""

    def pays(rate: float) -> bool:
        tokens = expected_tokens([[rate**count for count in range(1, LENGTHS[-1] + 1)]], [1.0], in_lockstep=False)
        return any(tokens[width] / seconds(width) >= 1 / seconds(0) for width in range(1, len(tokens)))

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _verdict(width: int, speedup: float, rate: float | None, needed: float | None) -> str:
    stay = "nothing was drafted" if rate is None else f"{rate:.0%} of the drafted tokens stayed"
    if needed is None:
        return f"It will not pay: rounds with drafts are too slow here, even if every drafted token stayed ({stay})."
    if width == 0:
        return f"It will not pay on text like this: {stay}, and about {needed:.0%} would have to."
    return (
        f"It will pay: {stay} where about {needed:.0%} would do; drafting {width} tokens a round should be "
        f"{speedup:.2f} times as fast as plain generation."
    )
