"""One side of the comparison: a process in a peer's own environment, which answers a line with a line.

Nothing here or in an adapter imports more than torch, Transformers and the peer: versions differ from side to side.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

PLAIN, GENERATE = "plain", "generate"


@dataclass(frozen=True)
class Case:
    """What is compared, the same for all sides.

    Attributes:
        target: its folder.
        draft_model: folder of a smaller model with the same tokenizer, if there is one.
        head: folder of an EAGLE-3 head for the target, if there is one.
        dtype: name of the dtype of all weights.
        num_copied: most tokens of a draft that is copied from text.
        num_drafted: tokens of a draft that a draft model or a head makes.
        threads: for every side; `None` leaves it to torch.
    """

    target: str
    draft_model: str | None = None
    head: str | None = None
    dtype: str = "bfloat16"
    num_copied: int = 10
    num_drafted: int = 4
    threads: int | None = None


@dataclass(frozen=True)
class Sampling:
    """How to draw; where this is `None` instead, answers are greedy."""

    temperature: float
    top_p: float
    seed: int


Generate = Callable[[list[int], int, "Sampling | None"], list[int]]


@dataclass
class Side:
    """What an adapter's `side(case)` returns.

    Attributes:
        target: the model whose passes are counted.
        ways: what this side can do: for every name what makes the function that takes a prompt, a number of tokens and
            how to draw, and returns the answer. `PLAIN` is the library's own generation without drafts, which speeds
            are compared with; where that is not Transformers' `generate`, the latter is `GENERATE`.
        packages: whose versions are of interest.
    """

    target: Any
    ways: dict[str, Callable[[], Generate]]
    packages: tuple[str, ...]


# --- for the adapters -------------------------------------------------------------------------------------


def opened(folder: str, case: Case) -> Any:
    """A model, with no settings of generation but its ends: not every library's own loop knows others."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, case.dtype)).to(device()).eval()
    ends = ends_of(model)
    model.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0)
    return model


def device() -> str:
    """Where all sides compute."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def ends_of(model: Any) -> list[int]:
    """Ids that end an answer."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def generating(model: Any, **assistance: Any) -> Generate:
    """Answers by `generate`, plain or with what is added to its arguments."""

    def generate(prompt: list[int], num_tokens: int, sampling: Sampling | None) -> list[int]:
        ids = torch.tensor([prompt], device=model.device)
        arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": num_tokens} | assistance
        if sampling is None:
            arguments["do_sample"] = False
        else:
            torch.manual_seed(sampling.seed)
            arguments |= {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        return model.generate(ids, **arguments)[0, len(prompt) :].tolist()

    return generate


# --- the process ------------------------------------------------------------------------------------------


def serve(name: str, case: Case) -> None:
    """Answers until the input ends; the first line says what this side can do, and in which environment."""
    torch.set_grad_enabled(False)
    logging.disable_progress_bar()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    if case.threads is not None:
        torch.set_num_threads(case.threads)
    with failures() as failed:
        side = importlib.import_module(f"peers.adapters.{name}").side(case)
    if failed:
        return reply(answers, failed)
    ways, unusable = usable(side)
    reply(answers, {"environment": environment(side), "ways": list(side.ways), "unusable": unusable})
    passes = count_passes(side.target)
    for line in sys.stdin:
        asked, answer = json.loads(line), {}
        with failures() as failed:
            answer = answered(side, ways, passes, asked)
        reply(answers, failed or answer)


@contextmanager
def failures() -> Iterator[dict[str, str]]:
    """Keeps the message of an exception, whatever a peer raises, under "error"."""
    failed: dict[str, str] = {}
    try:
        yield failed
    except Exception as error:
        traceback.print_exc()
        failed["error"] = f"{type(error).__name__}: {error}"[:500]


def usable(side: Side) -> tuple[dict[str, Generate], dict[str, str]]:
    """The functions that could be made, and why the others could not."""
    ways, unusable = {}, {}
    for way, make in side.ways.items():
        with failures() as failed:
            ways[way] = make()
        if failed:
            unusable[way] = failed["error"]
    return ways, unusable


def answered(side: Side, ways: dict[str, Generate], passes: list[None], asked: dict[str, Any]) -> dict[str, Any]:
    """One request: how sure a text's next token is, samples for many seeds, or one greedy answer and what it cost."""
    if "text" in asked:
        logits = side.target(torch.tensor([asked["text"]], device=side.target.device)).logits[0, -1]
        first, second = logits.float().topk(2).values.tolist()
        return {"gap": first - second}
    generate, prompt, num_tokens = ways[asked["way"]], asked["prompt"], asked["max_new_tokens"]
    if "seeds" in asked:
        draw = {name: asked[name] for name in ("temperature", "top_p")}
        return {"samples": [generate(prompt, num_tokens, Sampling(**draw, seed=seed)) for seed in asked["seeds"]]}
    passes.clear()
    start = time.perf_counter()
    tokens = generate(prompt, num_tokens, None)  # a list: whatever was queued on a device is done
    seconds = time.perf_counter() - start
    return {"tokens": up_to_end(tokens, ends_of(side.target)), "seconds": seconds, "target_passes": len(passes)}


def up_to_end(tokens: list[int], ends: list[int]) -> list[int]:
    """The tokens up to the first that ends an answer, which is kept."""
    end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]


def count_passes(target: Any) -> list[None]:
    """A list that grows by one with every pass of the target: a call of its first layer, whoever makes it."""
    passes: list[None] = []
    target.get_decoder().layers[0].register_forward_pre_hook(lambda *_: passes.append(None))
    return passes


def environment(side: Side) -> dict[str, Any]:
    """What is installed on this side."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    for name in side.packages:  # one that is not installed but lies on the path says its version itself
        module = sys.modules.get(name.replace("-", "_"))
        found[name] = getattr(module, "__version__", None) or importlib.metadata.version(name)
    return found | {"python": platform.python_version(), "threads": torch.get_num_threads(), "device": device()}


def reply(stream: TextIO, answer: dict[str, Any]) -> None:
    """One line, sent at once."""
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
