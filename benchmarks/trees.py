"""What does a tree cost? Passes over trees and chains, and drafting with a head; prints one JSON document last.

    python benchmarks/trees.py [--target DIR] [--rows 1] [--contexts 128,1024] [--repeats 15] [--output FILE]

Passes of the target over 16 drafted tokens as a tree and as a chain, over 60 as a tree, over one and over none, and
over one as it would be if Transformers' sdpa copied the cache for every head (`host.heads_in_groups`). Then what a head
as wide as the target (EAGLE-3, one layer, random weights: only seconds are measured; it drafts a quarter of the
vocabulary, as published heads do) takes for a step of a chain and for a whole tree of 60 tokens in 7 levels. All take
turns, so that a busy machine meets all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from transformers import LogitsProcessorList

from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.cached_model import CachedModel
from hf_specdec.checks.bench import clock, environment, publish
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.eagle import DraftTree, Eagle
from hf_specdec.heads import EagleConfig, EagleHead, LayerConfig
from hf_specdec.loading import load_target
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.verify import TargetPass

ONE, UNGROUPED = "pass over a chain of 1", "the same, the cache copied for every head"
CHAIN, TREE, WIDE_TREE, NONE = (
    "pass over a chain of 16",
    "pass over a tree of 16",
    "pass over a tree of 60",
    "plain pass",
)
HEAD_STEP, HEAD_CHAIN, HEAD_TREE = "head: a step of a chain", "head: a chain of 8", "head: a tree of 60"
CHAIN_LENGTH = 8


def main(argv: list[str] | None = None) -> None:
    """Measures, prints a table and the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--contexts", default="128,1024")
    parser.add_argument("--draft-vocabulary", type=float, default=0.25, help="share of the ids that the head drafts")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    model, _ = load_target(options.target, options.dtype, options.device)
    results = {}
    for context in map(int, options.contexts.split(",")):
        results[str(context)] = milliseconds(model, context, options)
    Console(width=120).print(table(results))
    publish(
        {
            "environment": environment(model),
            "rows": options.rows,
            "draft_vocabulary": options.draft_vocabulary,
            "milliseconds": results,
        },
        options.output,
    )


@torch.no_grad()
def milliseconds(model: Any, context: int, options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of everything behind a text of so many tokens."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(host.vocabulary_size(model), (options.rows, context), generator=generator).to(model.device)
    target = Target(model, text)
    share = options.draft_vocabulary
    chain = Drafting(model, text, None, share)
    tree = Drafting(model, text, DraftTree(depth=7, top_k=10, total_tokens=60), share)
    timed = {
        NONE: lambda: target.read(0),
        ONE: lambda: target.read(1),
        UNGROUPED: lambda: ungrouped(target),
        CHAIN: lambda: target.read(16),
        TREE: lambda: target.read(16, binary_tree(16)),
        WIDE_TREE: lambda: target.read(60, binary_tree(60)),
        HEAD_CHAIN: lambda: chain.draft(CHAIN_LENGTH),
        HEAD_TREE: lambda: tree.draft(60),
    }
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(options.repeats + 2):
        for name, work in timed.items():
            taken = seconds_of(work, model.device)
            if repeat >= 2:  # the first ones warm up
                seconds[name].append(taken)
    medians = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    return medians | {HEAD_STEP: medians[HEAD_CHAIN] / CHAIN_LENGTH}


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """How long something takes, queued work included."""
    start = clock(device)
    work()
    return clock(device) - start


def binary_tree(size: int) -> list[int]:
    """Parents of a tree in which every token has two children."""
    return [(index - 2) // 2 if index > 1 else -1 for index in range(size)]


def ungrouped(target: Target) -> None:
    """A pass over one drafted token by the host's own sdpa."""
    with mock.patch.object(host, "heads_in_groups", contextlib.nullcontext):
        target.read(1)


class Target:
    """Passes of a target behind a text, each forgotten at once."""

    def __init__(self, model: Any, text: torch.Tensor):
        self.text = text
        self.model = CachedModel(model, host.new_cache(model), host.draft_arguments(model), len(text), text.device)
        self.model.read(text[:, :-1])
        self.model.commit([text.shape[1] - 1] * len(text))

    def read(self, num_drafted: int, parents: list[int] | None = None) -> None:
        """One pass over the last token and so many drafted ones."""
        tokens = self.text[:, -1:].expand(-1, num_drafted + 1)
        seen = None
        if parents is not None:
            drafted = tokens[:, 1:]
            lengths = torch.full((len(drafted),), num_drafted, device=drafted.device)
            seen = Draft(drafted, lengths, parents=torch.tensor([parents] * len(drafted), device=drafted.device)).seen
        self.model.read(tokens, num_logits=num_drafted + 1, seen=seen)
        self.model.commit([0] * len(tokens))


class Drafting:
    """Rounds of a head of the target's size, behind a text it has read."""

    def __init__(self, model: Any, text: torch.Tensor, tree: DraftTree | None, share: float):
        head = random_head(model, share)
        self.state = DecodeState(text, None, fill=0)
        context = DraftContext(target=model, do_sample=False, scorer=Scorer(LogitsProcessorList()), takes_trees=True)
        self.session = Eagle(head, num_draft_tokens=CHAIN_LENGTH, tree=tree).start(context, self.state)
        self.num_rows, self.width = len(text), host.hidden_size(model)
        prompt = {tap: self._states(model, text.shape[1] - 1) for tap in self.session.taps}
        self._commit(self._pass(model, prompt))
        self.later = self._pass(model, {})

    def draft(self, limit: int) -> None:
        """One draft, and a round in which nothing of it stayed."""
        self.session.propose(self.state, [limit] * self.num_rows, None)
        self._commit(self.later)

    def _commit(self, target_pass: TargetPass) -> None:
        rows = range(self.num_rows)
        ones, zeros = [1 for _ in rows], [0 for _ in rows]
        outcome = Outcome([[1] for _ in rows], ones, zeros, zeros, [False for _ in rows])
        self.state.append(outcome.appended)
        self.state.commit(outcome)
        self.session.commit(self.state, outcome, target_pass)

    def _pass(self, model: Any, prompt: dict[int, torch.Tensor]) -> TargetPass:
        made = TargetPass.__new__(TargetPass)  # what a head reads of a pass, and no more
        made.prompt_states = prompt
        made.states = {tap: self._states(model, 1) for tap in self.session.taps}
        return made

    def _states(self, model: Any, count: int) -> torch.Tensor:
        return torch.randn(self.num_rows, count, self.width, device=model.device, dtype=model.dtype)


def random_head(model: Any, share: float) -> EagleHead:
    """An EAGLE-3 head whose layer is as large as one of the target's, over three of its states and some of its ids."""
    config = model.config.get_text_config(decoder=True)
    depth, vocabulary = host.num_layers(model), host.vocabulary_size(model)
    num_drafted = max(1, int(share * vocabulary))
    head = EagleHead(
        EagleConfig(
            kind="eagle3",
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            vocab_size=vocabulary,
            draft_vocab_size=num_drafted,
            layers=(LayerConfig(reads_tokens=True),),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            taps=(0, depth // 2, depth),  # low, middle and high
            own_lm_head=True,
        )
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in head.parameters():
            random = torch.randn(weight.shape, generator=generator) * 0.02
            weight.copy_(random if weight.dim() > 1 else torch.ones_like(weight))
    head.draft_ids.copy_(torch.linspace(0, vocabulary - 1, num_drafted).long())
    return head.to(model.device, model.dtype)


def table(results: dict[str, dict[str, float]]) -> Table:
    """One line a measurement, and its share of a plain pass."""
    shown = Table(title="Milliseconds (share of a plain pass)")
    for heading in ("", *(f"{context} tokens" for context in results)):
        shown.add_column(heading)
    for name in next(iter(results.values())):
        shown.add_row(name, *(f"{found[name]:.2f} ({found[name] / found[NONE]:.2f})" for found in results.values()))
    return shown


if __name__ == "__main__":
    main()
