"""What tokens look like where they stand: pieces that make up the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hf_specdec.rounds import RowRound, Trace

# Tokens in front that decide how one reads: spaces, and characters of several tokens.
_NUM_CONTEXT = 8
_BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Pieces:
    """The text of one row's round.

    A token that holds a part of a character only has an empty piece: the token that completes it has the character.

    Attributes:
        drafted: of every drafted token, behind those that it follows.
        emitted: of every token that the row gained.
    """

    drafted: list[str]
    emitted: list[str]


def prompt_texts(trace: Trace, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Every row's prompt as text, special tokens included."""
    decode = _decoder(tokenizer)
    return [decode(prompt) for prompt in trace.prompts]


def pieces_of(trace: Trace, tokenizer: PreTrainedTokenizerBase) -> list[list[Pieces]]:
    """The texts of all rounds and of the rows in them, in the trace's order."""
    decode = _decoder(tokenizer)
    context = [prompt[-_NUM_CONTEXT:] for prompt in trace.prompts]
    found = []
    for turn in trace.rounds:
        found.append([_round_pieces(part, context[part.row], decode) for part in turn.rows])
        for part in turn.rows:
            context[part.row] = [*context[part.row], *part.emitted][-_NUM_CONTEXT:]
    return found


def _round_pieces(part: RowRound, context: list[int], decode: Callable[[list[int]], str]) -> Pieces:
    paths: list[list[int]] = []  # what stands in front of every drafted token, and the token
    for token, parent in zip(part.drafted, part.known_parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else context), token])
    drafted = [_piece(path, decode) for path in paths]
    texts = [[*context, *part.emitted[: count + 1]] for count in range(len(part.emitted))]
    return Pieces(drafted, [_piece(text, decode) for text in texts])


def _piece(tokens: list[int], decode: Callable[[list[int]], str]) -> str:
    """What the last token adds to the text; empty if it leaves a character unfinished."""
    before, text = decode(tokens[-_NUM_CONTEXT - 1 : -1]), decode(tokens[-_NUM_CONTEXT - 1 :])
    return "" if text.endswith(_BROKEN) else text[len(before.rstrip(_BROKEN)) :]


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    def decode(tokens: list[int]) -> str:
        text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # one list, one text
        return text

    return decode
