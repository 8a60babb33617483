"""`hf-specdec data`: prompts, answered by the target itself, as a folder of training data.

The work is done in rounds of a few batches, one shard each. What a round does follows from the seed and the shards
before it, so a run that is killed goes on where the last whole shard ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from hf_specdec import host
from hf_specdec.fingerprints import TargetFingerprint
from hf_specdec.loading import Chat, load_target, target_name
from hf_specdec.options import check_count
from hf_specdec.rows import HUB_PREFIX, TURNS, Conversation
from hf_specdec.training.examples import (
    RECORD_NAME,
    Example,
    conversation_name,
    next_index,
    read_examples,
    read_record,
    remove_parts,
    shard_paths,
    show_left_out,
    write_record,
    write_shard,
)
from hf_specdec.training.prompts import (
    HeldOut,
    PromptWriter,
    normalised,
    read_passages,
    read_prompts,
    users_texts,
)
from hf_specdec.training.themes import THEMES, read_themes
from hf_specdec.training.writing import Written, write
from hf_specdec.vocabulary import tokenizer_fingerprint

_SHARE_GREEDY = 0.5
_TEMPERATURES = (0.7, 0.8, 0.9, 1.0)
_MAX_PROMPT_TOKENS = 1024
# Prompts of like length are written together, since every row of a batch is as long as its longest.
_BATCHES_PER_ROUND = 4
_FILES = ("held_out", "passages", "prompts")  # of which the record keeps the names


@dataclass(frozen=True)
class DataOptions:
    """What training data to make.

    Args:
        target: a folder or Hub id; `None` is the embedded demo model.
        output: the data folder; if it holds data already, they grow.
        tokens: answer tokens wanted in all.
        prompts: a file of JSON lines, or `hub:NAME`; `None`: the target writes all prompts itself.
        turns: which turns of conversations are answered: "last" or "all", see `read_prompts`.
        self_written: share of the prompts that the target writes itself; by default all, with `prompts` none.
        themes: a file of JSON lines, see `read_themes`; `None` takes those of the package.
        passages: a file of JSON lines with texts that half of the self-written prompts are about, see `read_passages`;
            `None`: a quarter are about what the target has answered before.
        held_out: a file of evaluation prompts that must not be trained on.
        batch_size: texts written together.
        max_new_tokens: where answers are cut.
        seed: of all that is drawn.
        dtype: "bfloat16", "float32" or "float16".
        device: such as "cpu" or "cuda"; `None` is the accelerator if there is one.

    Raises:
        ValueError: if a value is out of range.
    """

    target: str | None
    output: Path
    tokens: int = 1_000_000
    prompts: str | None = None
    turns: str = "last"
    self_written: float | None = None
    themes: Path | None = None
    passages: Path | None = None
    held_out: Path | None = None
    batch_size: int = 64
    max_new_tokens: int = 320
    seed: int = 0
    dtype: str = "bfloat16"
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size", "max_new_tokens"):
            check_count(name, getattr(self, name))
        if self.self_written is not None and not 0 <= self.self_written <= 1:
            raise ValueError(f"self_written={self.self_written} must be between 0 and 1.")
        if self.prompts is None and self.self_written not in (None, 1):
            raise ValueError(f"self_written={self.self_written} needs --prompts for the other share.")
        steering = [name for name in ("themes", "passages") if getattr(self, name) is not None]
        if steering and self.share_written == 0:
            raise ValueError(f"{steering[0]} steers prompts that the target writes itself; give --self-written too.")
        if self.turns not in TURNS:
            raise ValueError(f"turns={self.turns!r} is unknown; use one of {', '.join(TURNS)}.")
        if self.prompts is None and self.turns != "last":
            raise ValueError(f"turns={self.turns!r} needs --prompts: what the target asks itself has one turn.")

    @property
    def share_written(self) -> float:
        """The share of the prompts that the target writes itself."""
        if self.self_written is not None:
            return self.self_written
        return 1.0 if self.prompts is None else 0.0


def make_data(options: DataOptions, console: Console | None = None) -> dict[str, Any]:
    """Makes a folder of training data, or goes on with one.

    Args:
        options: what to make.
        console: where progress is shown; standard error by default.

    Returns:
        The record that is in `data.json` too.

    Raises:
        ValueError: if a file cannot be read, the folder holds data of another target, or there is nothing to ask.
    """
    console = console or Console(stderr=True)
    model, tokenizer = load_target(options.target, options.dtype, options.device)
    maker = DataMaker(options, model, tokenizer)
    return maker.run(console)


@dataclass(frozen=True)
class Asked:
    """A conversation up to where the target has to answer.

    Attributes:
        chat: the messages so far.
        ids: the same, as the target reads them.
        later: what is said between its further answers.
        source: see `Example`.
        conversation: see `Example`.
    """

    chat: Chat
    ids: list[int]
    later: Conversation
    source: str
    conversation: str | None = None


class DataMaker:
    """A target at work on a data folder."""

    def __init__(self, options: DataOptions, model: Any, tokenizer: PreTrainedTokenizerBase):
        self.options, self.model, self.tokenizer = options, model, tokenizer
        self.ends = end_ids(model, tokenizer)
        self.held_out = HeldOut(options.held_out)
        self.writer = None
        if options.share_written > 0:
            themes = THEMES if options.themes is None else read_themes(options.themes)
            passages = [] if options.passages is None else read_passages(options.passages)
            self.writer = PromptWriter(model, tokenizer, themes, self.ends, options.batch_size, passages)
        self.longest = longest_prompt(model, options.max_new_tokens)
        options.output.mkdir(parents=True, exist_ok=True)
        self.record = self._opened_record()
        remove_parts(options.output)
        self.examples = read_examples(options.output) if shard_paths(options.output) else []
        self.seen = {normalised(self._text(example.prompt)) for example in self.examples}
        self._refuse_held_out_answers()
        self.unusable: list[str] = []
        self.given = self._given_prompts()
        self.num_before = self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Answer tokens so far."""
        return sum(len(example.answer) for example in self.examples)

    def run(self, console: Console) -> dict[str, Any]:
        """Makes rounds until there are tokens enough, or nothing is left to ask."""
        start = time.monotonic()
        if self.options.prompts is not None:
            console.print(f"{len(self.given)} prompts of {self.options.prompts} to ask", highlight=False)
        if not self.examples:
            console.print(
                f"A round of {self.options.batch_size * _BATCHES_PER_ROUND} prompts is a shard, and a line here; for a "
                "quick trial give a smaller --batch-size.",
                highlight=False,
            )
        while self.num_tokens < self.options.tokens:
            index = next_index(self.options.output)
            with console.status(f"Shard {index}: the target writes prompts and answers"):  # minutes, maybe
                asked = self._asked(index)
                answered = self._answered(asked, index)
            if not asked:
                console.print(self._why_nothing_is_asked())
                break
            write_shard(self.options.output, index, answered)
            self.examples += answered
            self._write_record()
            console.print(self._progress(time.monotonic() - start), highlight=False)
        self.held_out.show()
        if not self.examples:
            raise ValueError(f"There is nothing to ask, so {self.options.output} holds no answers.")
        console.print(f"{self.options.output}: {len(self.examples)} answers, {self.num_tokens} tokens", highlight=False)
        return self._write_record()

    def _why_nothing_is_asked(self) -> str:
        if self.writer is None:
            return "All prompts are answered; more data need more prompts, or --self-written."
        return (
            "None of the prompts that the target wrote in this round is usable: they are unfinished, repeated, "
            "repetitive or held out. Give --prompts, other --themes or another --seed."
        )

    def _progress(self, seconds: float) -> str:
        speed = (self.num_tokens - self.num_before) / seconds
        left = max(0, self.options.tokens - self.num_tokens) / speed
        return (
            f"{len(self.examples)} answers, {self.num_tokens} of {self.options.tokens} tokens, {speed:.0f} tokens/s, "
            f"{left / 3600:.1f} h left"
        )

    def _refuse_held_out_answers(self) -> None:
        """Raises `ValueError` if the folder already holds what is to be kept out of it."""
        found = [text for text in self.seen if any(held_out in text for held_out in self.held_out.long_texts)]
        if found:
            raise ValueError(
                f"{self.options.output} already holds answers to {len(found)} prompts that occur in "
                f"{self.options.held_out}, such as {found[0][:60]!r}. Give another --output."
            )

    # --- prompts of a round ---

    def _asked(self, index: int) -> list[Asked]:
        """What the round asks."""
        count, share = self.options.batch_size * _BATCHES_PER_ROUND, self.options.share_written
        written: list[Asked] = []
        if self.writer is not None:
            own_texts = [self._text(e.answer, skip_special_tokens=True) for e in self.examples if e.finished]
            texts = self.writer.write(max(1, round(count * share)), f"{self.options.seed} {index}", own_texts)
            written = self._fresh([[[{"role": "user", "content": text}]] for text in texts], "self")
        # Where nothing usable was written the others go on: the next round writes others.
        wanted = round(len(written) * (1 - share) / share) if written else round(count * (1 - share))
        given: list[Asked] = []
        while self.given and len(given) < wanted:
            given.append(self.given.pop())
        return written + given

    def _given_prompts(self) -> list[Asked]:
        """The user's conversations that are not answered yet, the next one last."""
        if self.options.prompts is None or self.options.share_written == 1:
            return []
        source = "hub" if self.options.prompts.startswith(HUB_PREFIX) else "file"
        conversations = read_prompts(self.options.prompts, self.options.turns)
        random.Random(self.options.seed).shuffle(conversations)
        fresh = self._fresh(conversations, source)
        self.held_out.show()
        show_left_out(self.unusable, self.options.prompts, "unusable prompts")
        return fresh[::-1]

    def _fresh(self, conversations: Sequence[Conversation], source: str) -> list[Asked]:
        """Conversations whose first turn was not asked before, and of which nothing is held out."""
        fresh = []
        for first, *later in conversations:
            try:
                asked = self._turn(first, later, source)
            except ValueError as error:
                self.unusable.append(f"{first[-1]['content'][:60]!r}: {error}")
                continue
            key = normalised(self._text(asked.ids))
            if key in self.seen or any(map(self.held_out.refuses, users_texts([first, *later]))):
                continue
            self.seen.add(key)
            fresh.append(asked)
        return fresh

    def _turn(self, chat: Chat, later: Conversation, source: str) -> Asked:
        """A conversation as the target reads it, up to where its answer begins.

        Raises:
            ValueError: if it is too long, or the chat template refuses it.
        """
        if self.tokenizer.chat_template is None:
            ids = self.tokenizer("\n\n".join(message["content"] for message in chat))["input_ids"]
        else:
            try:
                text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            except TemplateError as error:
                raise ValueError(f"the chat template refuses it: {error}") from error
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not 0 < len(ids) <= self.longest:
            raise ValueError(f"it has {len(ids)} tokens; prompts may have {self.longest}")
        return Asked(chat, ids, later, source)

    def _text(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    # --- answers of a round ---

    def _answered(self, asked: list[Asked], index: int) -> list[Example]:
        """The round's conversations with answers: one example a turn, whose prompt holds the turns before it."""
        chance = random.Random(f"{self.options.seed} {index} answers")
        generator = torch.Generator().manual_seed(chance.getrandbits(62))
        heated = [(a, 0.0 if chance.random() < _SHARE_GREEDY else chance.choice(_TEMPERATURES)) for a in asked]
        answered: list[Example] = []
        while heated:
            heated.sort(key=lambda pair: len(pair[0].ids))
            going_on = []
            for start in range(0, len(heated), self.options.batch_size):
                batch = heated[start : start + self.options.batch_size]
                prompts, heat = [one.ids for one, _ in batch], [temperature for _, temperature in batch]
                texts = write(self.model, prompts, heat, self.options.max_new_tokens, self.ends, generator)
                for (one, temperature), text in zip(batch, texts, strict=True):
                    example = _example(one, text, temperature)
                    answered.append(example)
                    going_on += [(turn, temperature) for turn in self._next_turn(one, example)]
            heated = going_on
        chance.shuffle(answered)  # a reader of few shards sees all lengths
        return answered

    def _next_turn(self, asked: Asked, answer: Example) -> list[Asked]:
        """How a conversation goes on behind an answer; nothing where it ends, or the answer was cut."""
        text = self._text(answer.answer, skip_special_tokens=True).strip()
        if not (asked.later and answer.finished and text):
            return []
        said, *later = asked.later
        try:
            turn = self._turn([*asked.chat, {"role": "assistant", "content": text}, *said], later, asked.source)
        except ValueError:  # too long by now
            return []
        return [replace(turn, conversation=asked.conversation or conversation_name(asked.ids))]

    # --- the record ---

    def _opened_record(self) -> dict[str, Any]:
        """What the folder says about itself, or what it will say."""
        own = {
            "target": target_name(self.model),
            "target_fingerprint": TargetFingerprint.of(self.model).to_dict(),
            "tokenizer_fingerprint": tokenizer_fingerprint(self.tokenizer),
        }
        if not (self.options.output / RECORD_NAME).exists() and not shard_paths(self.options.output):
            write_record(self.options.output, own)  # before there is any answer that might be taken for another's
            return own
        found = read_record(self.options.output)
        try:
            made_for = TargetFingerprint.from_dict(found.get("target_fingerprint"))
        except ValueError as error:
            raise ValueError(f"{self.options.output / RECORD_NAME}: {error}") from error
        difference = made_for.difference(TargetFingerprint.of(self.model))
        if found.get("tokenizer_fingerprint") != own["tokenizer_fingerprint"]:
            difference = "the tokenizer is another one"
        if difference:
            raise ValueError(
                f"{self.options.output} holds answers of {found.get('target')!r}, not of this target: {difference}. "
                "Give another --output."
            )
        return found | {"target": own["target"]}

    def _write_record(self) -> dict[str, Any]:
        settings = {
            name: value
            for name, value in asdict(self.options).items()
            if name not in {"target", "output", "device", "tokens", "themes", *_FILES}
        }
        settings |= {name: _name(getattr(self.options, name)) for name in _FILES}
        sources = [example.source for example in self.examples]
        counts = {
            "examples": len(self.examples),
            "answer_tokens": self.num_tokens,
            "prompt_tokens": sum(len(example.prompt) for example in self.examples),
            "greedy": sum(example.temperature == 0 for example in self.examples),
            "finished": sum(example.finished for example in self.examples),
            "by_source": {source: sources.count(source) for source in sorted(set(sources))},
        }
        self.record |= {"settings": settings, "counts": counts}
        write_record(self.options.output, self.record)
        return self.record


def _example(asked: Asked, text: Written, temperature: float) -> Example:
    prompt, answer = tuple(asked.ids), tuple(text.tokens)
    return Example(prompt, answer, temperature, asked.source, text.finished, asked.conversation)


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end an answer: those of the model's generation config and the tokenizer's own.

    Raises:
        ValueError: if there is none.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    found = frozenset(token for token in [*ids, tokenizer.eos_token_id] if token is not None)
    if not found:
        raise ValueError("Neither the target nor its tokenizer names a token that ends a text (eos_token_id).")
    return found


def longest_prompt(model: Any, max_new_tokens: int) -> int:
    """How many tokens a prompt may have.

    Raises:
        ValueError: if answers leave no room for one in what the model can read.
    """
    limit = host.max_positions(model)
    if limit is not None and limit <= max_new_tokens:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt: the target reads {limit} tokens."
        )
    return _MAX_PROMPT_TOKENS if limit is None else min(_MAX_PROMPT_TOKENS, limit - max_new_tokens)


def _name(path: Any) -> str | None:
    """A file's name without its folders; a data set's id as it is."""
    if path is None or str(path).startswith(HUB_PREFIX):
        return path
    return Path(path).name
