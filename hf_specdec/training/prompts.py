"""Prompts to train on: written by the target itself, or read from a file or a data set of the Hub."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_specdec.rows import FIELDS, Conversation, conversation_of, file_rows, parsed, read_rows, users_texts_of
from hf_specdec.training.examples import readable
from hf_specdec.training.themes import COMPLETE_ABOUT_TEXT, OPEN_ABOUT_TEXT, Theme
from hf_specdec.training.writing import write

_PLACE = "HF-SPECDEC-PLACE"
_MAX_PROMPT_TOKENS = 160  # that the target writes
_TEMPERATURE, _TOP_P = 0.8, 0.95
_SHARE_ABOUT_TEXTS, _SHARE_ABOUT_PASSAGES = 0.25, 0.5  # of its own, and of the user's
_SHARE_WITHOUT_BEGINNING = 0.25
_MIN_PASSAGE, _MAX_PASSAGE = 300, 1600  # characters
_MIN_PROMPT, _MAX_PROMPT = 12, 4000
_MIN_COMMON = 40  # characters a prompt and an evaluation prompt share when one holds the other


# --- written by the target --------------------------------------------------------------------------------


@dataclass
class PromptWriter:
    """Lets a target write prompts: it continues the open user turn of its own chat template (arXiv 2406.08464).

    Args:
        model: the target.
        tokenizer: its tokenizer.
        themes: what to write about.
        ends: ids that end a text.
        batch_size: prompts written together.
        passages: texts of the user that prompts may be about; without any, the target's own.

    Raises:
        ValueError: if the tokenizer has no chat template, or the template no open user turn.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    themes: Sequence[Theme]
    ends: frozenset[int]
    batch_size: int
    passages: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.ends = self.ends | user_turn_ends(self.tokenizer)
        open_turn(self.tokenizer, "")

    def write(self, count: int, seed: str, own_texts: Sequence[str]) -> list[str]:
        """Writes up to `count` prompts; junk is dropped.

        Args:
            count: how many to try.
            seed: decides everything that is drawn.
            own_texts: what the target has answered so far.
        """
        chance = random.Random(seed)
        generator = torch.Generator().manual_seed(chance.getrandbits(62))
        usable = [text for text in self.passages or own_texts if len(text) >= _MIN_PASSAGE]
        share = _SHARE_ABOUT_PASSAGES if self.passages else _SHARE_ABOUT_TEXTS
        prompts: list[str] = []
        openings: list[tuple[str, str]] = []
        for _ in range(count):
            is_about_text = usable and chance.random() < share
            system, text, is_complete = _about_text(usable, chance) if is_about_text else self._themed(chance)
            if is_complete:
                prompts.append(text)
            else:
                openings.append((system, text))
        openings.sort(key=lambda opening: (len(opening[0]) + len(opening[1]), opening))
        for start in range(0, len(openings), self.batch_size):
            prompts += self._continued(openings[start : start + self.batch_size], generator)
        chance.shuffle(prompts)
        return [prompt for prompt in prompts if not is_junk(prompt)]

    def _themed(self, chance: random.Random) -> tuple[str, str, bool]:
        theme = chance.choice(self.themes)
        is_free = not theme.beginnings or chance.random() < _SHARE_WITHOUT_BEGINNING
        return theme.system, "" if is_free else chance.choice(theme.beginnings), False

    def _continued(self, openings: list[tuple[str, str]], generator: torch.Generator) -> list[str]:
        """The openings with what the target wrote behind them, where it came to an end."""
        ids = [self._ids(open_turn(self.tokenizer, system) + text) for system, text in openings]
        written = write(self.model, ids, [_TEMPERATURE] * len(ids), _MAX_PROMPT_TOKENS, self.ends, generator, _TOP_P)
        texts = [str(self.tokenizer.decode(w.tokens, skip_special_tokens=True)) for w in written]
        ended = zip(openings, texts, written, strict=True)
        return [(beginning + text).strip() for (_, beginning), text, w in ended if w.finished]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _about_text(passages: Sequence[str], chance: random.Random) -> tuple[str, str, bool]:
    passage = shortened(chance.choice(passages))
    is_complete = chance.random() < 0.5
    return (
        "",
        chance.choice(COMPLETE_ABOUT_TEXT if is_complete else OPEN_ABOUT_TEXT).replace("{}", passage),
        is_complete,
    )


def shortened(text: str) -> str:
    """A text cut behind a sentence, if it is long."""
    text = text.strip()
    if len(text) <= _MAX_PASSAGE:
        return text
    end = max(text.rfind(mark, 0, _MAX_PASSAGE) for mark in (". ", ".\n"))
    return text[: end + 1] if end > 0 else text[:_MAX_PASSAGE]


def open_turn(tokenizer: PreTrainedTokenizerBase, system: str) -> str:
    """A chat template's text up to where the user begins to write.

    Raises:
        ValueError: if the tokenizer has no chat template, or the template changes what the user writes.
    """
    return _around_user_turn(tokenizer, system)[0]


def user_turn_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The special token that ends a user's turn, if it is one."""
    behind = tokenizer(_around_user_turn(tokenizer, "")[1], add_special_tokens=False)["input_ids"][:1]
    return frozenset(behind) & frozenset(tokenizer.all_special_ids)


def _around_user_turn(tokenizer: PreTrainedTokenizerBase, system: str) -> tuple[str, str]:
    if tokenizer.chat_template is None:
        raise ValueError(
            "The target's tokenizer has no chat template, so it cannot write prompts itself. Give prompts with "
            "--prompts, or a tokenizer with a chat template."
        )
    chat = [{"role": "system", "content": system}] if system else []
    try:
        text = str(tokenizer.apply_chat_template([*chat, {"role": "user", "content": _PLACE}], tokenize=False))
    except TemplateError as error:
        if system:  # some templates know no system messages
            return _around_user_turn(tokenizer, "")
        raise ValueError(
            f"The chat template refuses a user's message: {error}. Give prompts with --prompts."
        ) from error
    if text.count(_PLACE) != 1:
        raise ValueError("The chat template does not show the user's message once, so its turn cannot be left open.")
    before, behind = text.split(_PLACE)
    return before, behind


def is_junk(text: str) -> bool:
    """Whether a prompt is not worth answering: empty, very short or long, broken or repetitive."""
    if not _MIN_PROMPT <= len(text) <= _MAX_PROMPT or "\ufffd" in text:
        return True
    words = text.lower().split()
    pieces = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    if len(pieces) >= 12 and len(set(pieces)) < 0.7 * len(pieces):
        return True
    return len(words) < 2 or max(map(len, words)) > 80 or sum(c.isalpha() for c in text) < 0.4 * len(text)


# --- given by the user ------------------------------------------------------------------------------------


def read_prompts(location: str, turns: str = "last") -> list[Conversation]:
    """Reads conversations, each up to a user's message that the target is to answer.

    Args:
        location: a file of JSON lines with `prompt`, `turns` (what a user says, one text after the other), `messages`
            or ShareGPT's `conversations`, or `hub:NAME` or `hub:NAME:SPLIT`, a data set of the Hub with such columns.
        turns: "last": the last message of a user is asked, behind all before it as they are; of `turns` the first.
            "all": every turn of the user is asked in order, the target's own answers taking the place of those given.

    Raises:
        ValueError: if it cannot be read, or no line holds a prompt.
    """
    found = readable(read_rows(location), lambda row: conversation_of(row, turns), location)
    if not found:
        raise ValueError(f"{location} holds no prompts; every line needs {FIELDS}.")
    return found


def read_passages(path: str | os.PathLike[str]) -> list[str]:
    """Reads texts that prompts may be about from JSON lines with `text`. Broken and short ones are shown and left out.

    Raises:
        ValueError: if no line holds a text that is long enough.
    """
    found = readable(file_rows(str(path)), _passage, str(path))
    if not found:
        raise ValueError(f'{path} holds no passages; every line is {{"text": "..."}} with {_MIN_PASSAGE} characters.')
    return found


def _passage(row: Any) -> str:
    text = parsed(row).get("text")
    if not isinstance(text, str) or len(text.strip()) < _MIN_PASSAGE:
        raise ValueError(f"`text` must be a text of {_MIN_PASSAGE} characters or more")
    text.encode()  # half a surrogate pair is no text
    return text


# --- kept out of training ---------------------------------------------------------------------------------


@dataclass
class HeldOut:
    """Prompts for evaluation, which must not be trained on.

    Args:
        path: of a file of JSON lines like those of `read_prompts`; `None` holds nothing out. All turns count.

    Attributes:
        refused: prompts that were found in it.

    Raises:
        ValueError: if a line cannot be read, since what it holds could not be kept out.
    """

    path: str | os.PathLike[str] | None
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts: set[str] = set()
        for number, line in [] if self.path is None else file_rows(str(self.path)):
            try:
                self.texts |= {normalised(text) for text in users_texts_of(line)}
            except ValueError as error:
                raise ValueError(
                    f"{self.path}, line {number}: {error}. What cannot be read cannot be kept out of the data: mend "
                    "the line or remove it."
                ) from error
        self.texts.discard("")
        self.long_texts = [text for text in self.texts if len(text) >= _MIN_COMMON]
        if self.path is not None and not self.texts:
            raise ValueError(f"{self.path} holds no prompts; every line needs {FIELDS}.")

    def refuses(self, prompt: str) -> bool:
        """Whether a prompt is one of them, or holds or is held by one."""
        own = normalised(prompt)
        is_inside = len(own) >= _MIN_COMMON and any(own in text for text in self.long_texts)
        if own in self.texts or is_inside or any(text in own for text in self.long_texts):
            self.refused.append(prompt)
            return True
        return False

    def show(self) -> None:
        """Says on standard error how many prompts were refused since the last time, and the first of them."""
        if self.refused:
            shown = "\n".join(f"  {prompt[:100]!r}" for prompt in self.refused[:3])
            print(f"{len(self.refused)} prompts occur in {self.path} and are left out:\n{shown}", file=sys.stderr)
            self.refused.clear()


def normalised(text: str) -> str:
    """Lower case, letters and digits only, single blanks: how prompts are compared."""
    return " ".join(re.findall(r"\w+", text.lower()))


def users_texts(conversation: Conversation) -> list[str]:
    """All that the user says in a conversation."""
    return [message["content"] for turn in conversation for message in turn if message["role"] == "user"]
