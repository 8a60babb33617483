"""`hf-specdec demo`: three prompts, answered plainly and speculatively in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase, TextStreamer

import hf_specdec
from hf_specdec.checks.bench import logit_gap
from hf_specdec.checks.report import first_difference
from hf_specdec.generation import refuse_unknown_name
from hf_specdec.loading import encode, load_target
from hf_specdec.options import check_count
from hf_specdec.stats import SpecStats

_WARM_UP_TOKENS = 8

_LIGHTHOUSE = """\
The lighthouse at Kestrel Point was built in 1871, after three merchant ships had been lost on the reef in a \
single winter. Its first keeper, Marta Lindqvist, lived there for thirty-four years. Every evening she carried \
two cans of oil up the hundred and twelve steps, trimmed the wick and wound the clockwork that turned the \
lens. In her logbook she wrote down the weather, the ships that passed and, from her second year on, the \
birds. Thousands of them flew against the glass on foggy nights in spring and autumn, and she began to count \
the species that she found on the gallery in the morning.

When a professor from the university visited the lighthouse in 1889, he saw that the logbook was the longest \
record of bird migration on the whole coast. He asked Lindqvist to send him a copy every year, and she did so \
until she retired in 1905. Her counts showed that some birds now pass Kestrel Point almost three weeks earlier \
than they did in her time, which is one of the oldest pieces of evidence for the effect of warmer springs on \
migration.

The lamp was electrified in 1926 and automated in 1968, when the last keeper left the tower. Today the \
lighthouse is a small museum. Visitors can climb the steps, look at the lens and read the logbook, which lies \
open under glass at the page for the first of May 1889: "Fog. Four ships. Nineteen birds, one of them new to \
me."
"""

_FUNCTION = """\
def report(orders):
    total = 0
    count = 0
    for o in orders:
        if o["status"] == "paid":
            total = total + o["price"] * o["quantity"]
            count = count + 1
    if count == 0:
        return "No paid orders."
    average = total / count
    return f"{count} paid orders, {total:.2f} in total, {average:.2f} on average."
"""

PROMPTS = (
    ("Summary", f"Summarize the following text in a few sentences.\n\n{_LIGHTHOUSE}"),
    (
        "Code edit",
        f"Here is a Python function:\n\n```python\n{_FUNCTION}```\n\n"
        "Rewrite the whole function with the name `summarize_orders` instead of `report`.",
    ),
    ("Open question", "Why do people enjoy listening to music? Give three reasons."),
)


@dataclass(frozen=True)
class DemoOptions:
    """What to show.

    Args:
        target: a folder or Hub id; `None` is the embedded demo model.
        assistant: a strategy's name, a folder or a Hub id.
        dtype: "bfloat16", "float32" or "float16".
        device: such as "cpu" or "cuda"; `None` is the accelerator if there is one.
        max_new_tokens: most tokens of an answer.

    Raises:
        ValueError: if `max_new_tokens` is not positive, or `assistant` can be no drafter.
    """

    target: str | None = None
    assistant: str = "auto"
    dtype: str = "bfloat16"
    device: str | None = None
    max_new_tokens: int = 160

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        refuse_unknown_name(self.assistant)


@dataclass(frozen=True)
class Answer:
    """One way's answer: token ids, seconds, and statistics if it was speculative."""

    tokens: list[int]
    seconds: float
    stats: SpecStats | None

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return len(self.tokens) / self.seconds


@dataclass(frozen=True)
class Comparison:
    """Both answers to one prompt.

    Attributes:
        in_float32: what the same prompt gave in float32, if that was asked for because the answers part.
    """

    title: str
    prompt: list[int]
    plain: Answer
    speculative: Answer
    in_float32: Comparison | None = None

    @property
    def parting(self) -> int | None:
        """Index of the first token that differs; `None` if the answers are identical."""
        return first_difference(self.plain.tokens, self.speculative.tokens)


def run_demo(options: DemoOptions, console: Console | None = None) -> list[Comparison]:
    """Answers all prompts both ways and shows text, speed and statistics.

    Args:
        options: what to show.
        console: where to; standard output by default. On a terminal both answers stand side by side.

    Raises:
        ValueError: if target or assistant cannot be had, or do not fit each other.
    """
    console = console or Console(highlight=False)
    model, tokenizer = load_target(options.target, options.dtype, options.device)
    hf_specdec.enable(model)
    demo = Demo(model, tokenizer, options)
    with console.status("Warming up"):
        demo.warm_up()
    name = options.target or "SmolLM2-135M-Instruct"
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count != 1 else ''}" if model.device.type == "cpu" else ""
    console.print(
        f"{name} in {options.dtype} on {model.device}{threads}; plain generation against {options.assistant!r}."
    )
    comparisons = [demo.compare(*prompt, console) for prompt in PROMPTS]
    if options.target is None and options.dtype != "float32":  # other targets may be too large to be widened
        comparisons = demo.repeat_parted(comparisons, console)
    console.rule("Result")
    console.print(_table(comparisons))
    console.print(_all_stats(comparisons), soft_wrap=True)
    return comparisons


class Demo:
    """An enabled model that answers prompts both ways."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, options: DemoOptions):
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.assistants = {"plain": False, "speculative": options.assistant}

    def warm_up(self) -> None:
        """Generates a few tokens both ways, so that neither pays for what is done only once."""
        inputs = self._inputs("Hello, hello, hello!")
        for assistant in self.assistants.values():
            self._answer(inputs, assistant, _WARM_UP_TOKENS, lambda text: None)

    def compare(self, title: str, prompt: str, console: Console) -> Comparison:
        """Answers one prompt both ways, shows the text as it arrives, and says whether the answers are identical."""
        console.rule(title)
        console.print(Text(prompt.rstrip(), style="dim"))
        with _view(console) as view:
            comparison = self._answered(title, self._inputs(prompt), view)
        console.print(self._verdict(comparison))
        return comparison

    def repeat_parted(self, comparisons: list[Comparison], console: Console) -> list[Comparison]:
        """Answers the prompts whose answers part once more in float32, which leaves hardly a tie to rounding."""
        parted = [comparison for comparison in comparisons if comparison.parting is not None]
        if not parted:
            return comparisons
        console.rule("The answers that part, once more in float32")
        self.model.float()
        self.options = replace(self.options, dtype="float32")
        again = {}
        for comparison in parted:
            ids = torch.tensor([comparison.prompt], device=self.model.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            with console.status(comparison.title):
                again[comparison.title] = self._answered(comparison.title, inputs, _Nowhere())
            console.print(Text(f"{comparison.title}: ").append_text(self._verdict(again[comparison.title])))
        return [replace(comparison, in_float32=again.get(comparison.title)) for comparison in comparisons]

    def _answered(self, title: str, inputs: dict[str, torch.Tensor], view: _View) -> Comparison:
        answers = {}
        for way, assistant in self.assistants.items():
            view.begin(way)
            answers[way] = self._answer(inputs, assistant, self.options.max_new_tokens, view.write)
            view.end(f"{len(answers[way].tokens)} tokens, {answers[way].speed:.1f} tokens/s")
        prompt = inputs["input_ids"][0].tolist()
        return Comparison(title, prompt, plain=answers["plain"], speculative=answers["speculative"])

    def _inputs(self, prompt: str) -> dict[str, torch.Tensor]:
        return encode(self.tokenizer, [[{"role": "user", "content": prompt}]], self.model.device)

    def _answer(
        self, inputs: dict[str, torch.Tensor], assistant: Any, max_new_tokens: int, write: Callable[[str], None]
    ) -> Answer:
        start = time.perf_counter()
        output = self.model.generate(
            **inputs,
            assistant=assistant,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=_Streamer(self.tokenizer, write),
            pad_token_id=self.tokenizer.pad_token_id,
        )
        tokens = output[0, inputs["input_ids"].shape[1] :].tolist()  # waits for the device
        return Answer(tokens, time.perf_counter() - start, hf_specdec.last_stats(self.model))

    def _verdict(self, comparison: Comparison) -> Text:
        """Whether the answers are identical, and if not, where they part and how close the choice was."""
        position = comparison.parting
        if position is None:
            return Text(f"Identical: both gave the same {len(comparison.plain.tokens)} tokens.", style="green")
        gap = logit_gap(self.model, comparison.prompt + comparison.plain.tokens[:position])
        apart = f"{gap:.2g} apart" if gap else "equal"
        found = f"The answers part at token {position + 1}, where the two best logits are {apart}."
        if self.options.dtype == "float32":
            return Text(
                f"{found} Rounding may decide ties, but only ties: anything above 1e-3 is a bug.", style="yellow"
            )
        reason = f" Rounding to {self.options.dtype} decides such near ties, and rounds a pass over several tokens "
        return Text(f"{found}{reason}differently than a pass over one. --dtype float32 avoids it.", style="yellow")


class _Streamer(TextStreamer):
    """Hands every finished piece of text to a function."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


class _View(Protocol):
    """Where two answers are shown while they are written."""

    def begin(self, way: str) -> None:
        """An answer begins."""

    def write(self, text: str) -> None:
        """It goes on."""

    def end(self, note: str) -> None:
        """It is complete."""


class _Nowhere:
    """Shows nothing."""

    def begin(self, way: str) -> None: ...

    def write(self, text: str) -> None: ...

    def end(self, note: str) -> None: ...


class _OneAfterTheOther:
    """Shows answers below each other: for files and pipes."""

    def __init__(self, console: Console):
        self.console = console

    def begin(self, way: str) -> None:
        self.console.print(f"\n--- {way} ---", markup=False)

    def write(self, text: str) -> None:
        self.console.out(text, end="", highlight=False)
        self.console.file.flush()

    def end(self, note: str) -> None:
        self.console.print(f"\n--- {note} ---", markup=False)


class _SideBySide:
    """Shows answers in panels that fill while text arrives: for terminals."""

    def __init__(self, live: Live, width: int):
        self.live, self.width = live, width
        self.panels: list[Panel] = []
        self.text = Text()

    def begin(self, way: str) -> None:
        self.text = Text()
        self.panels.append(Panel(self.text, title=way, width=self.width))
        self.live.update(Columns(self.panels, padding=0))

    def write(self, text: str) -> None:
        self.text.append(text)

    def end(self, note: str) -> None:
        self.panels[-1].subtitle = note
        self.live.refresh()


@contextmanager
def _view(console: Console) -> Iterator[_View]:
    if not console.is_terminal:
        yield _OneAfterTheOther(console)
        return
    with Live(console=console, refresh_per_second=8) as live:
        yield _SideBySide(live, console.width // 2)


def _table(comparisons: list[Comparison]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = "plain, speculative: tokens a second; per round: tokens; accepted: of drafted"
    for heading in ("", "plain", "speculative", "speed-up", "per round", "accepted", "identical"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for comparison in comparisons:
        plain, speculative, stats = comparison.plain, comparison.speculative, comparison.speculative.stats
        assert stats is not None
        table.add_row(
            comparison.title,
            f"{plain.speed:.1f}",
            f"{speculative.speed:.1f}",
            f"{speculative.speed / plain.speed:.2f}",
            f"{stats.mean_acceptance_length:.2f}",
            f"{stats.accepted}/{stats.drafted}",
            _identical(comparison),
        )
    return table


def _identical(comparison: Comparison) -> str:
    if comparison.in_float32 is not None and comparison.in_float32.parting is None:
        return "in float32"
    return "yes" if comparison.parting is None else f"first {comparison.parting}"


def _all_stats(comparisons: list[Comparison]) -> Text:
    total = SpecStats()
    for comparison in comparisons:
        assert comparison.speculative.stats is not None
        total.merge(comparison.speculative.stats)
    return Text(f"Speculative generation, all prompts together:\n{total}")
