"""Text in the tokens of two tokenizers: what their tokens spell, which ones they share, one's text in the other's.

Tokens are compared by the bytes they spell (the space marks of byte-level BPE and of SentencePiece are one and the same
space), special tokens by name or by role (a start is a start, an end is an end). The target's tokens are never spelled
anew: only what a draft model reads, and what it has written, is translated.
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

# Where a word begins behind one space: no tokenizer merges across it, so text may be cut there.
_WORD_START = re.compile(rb"(?<=\S) (?=\S)")
# More open text than this is cut between two tokens, even inside a word: some scripts put no spaces.
_MOST_OPEN, _LEAST_OPEN = 64, 32
# Bytes that are no whole characters, and text.
_PARTS = re.compile("([\udc80-\udcff]+)|([^\udc80-\udcff]+)")
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_ROLES = ("eos_token", "bos_token", "pad_token")


class Spelling:
    """A tokenizer seen as what its tokens spell.

    Args:
        tokenizer: byte-level BPE, or one that marks spaces as SentencePiece does.

    Attributes:
        pieces: the bytes of every id; `None` for special tokens, which spell nothing.
        ids: the id of every piece; of several the one that is no mere byte, and then the first.
        names: of every special id, its text and its roles.
        named: the special id of every name.
        prefix: special tokens that the tokenizer puts in front of a text.

    Raises:
        ValueError: if it is no tokenizer, or its tokens do not spell the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        refuse_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.names = _special_names(tokenizer)
        self.named = {name: index for index, names in reversed(self.names.items()) for name in reversed(names)}
        self.pieces, byte_ids = _pieces(tokenizer, self.names)
        whole = [i for i, piece in enumerate(self.pieces) if piece and i not in byte_ids]
        self.ids = {self.pieces[i]: i for i in [*sorted(byte_ids, reverse=True), *reversed(whole)]}
        self.prefix = [i for i in tokenizer.encode("") if i != tokenizer.eos_token_id or i == tokenizer.bos_token_id]

    def piece(self, token: int) -> bytes | None:
        """What a token spells; `None` if it is special or unknown."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else None

    def spelled(self, tokens: list[int]) -> bytes:
        """What tokens spell together."""
        return b"".join(self.piece(token) or b"" for token in tokens)

    def encode(self, data: bytes) -> list[int]:
        """Bytes as tokens: whole characters as the tokenizer does it, broken ones byte by byte where it can."""
        tokens: list[int] = []
        for broken, text in _PARTS.findall(data.decode("utf-8", "surrogateescape")):
            tokens += self._text(text) if text else self._bytes(broken.encode("utf-8", "surrogateescape"))
        return tokens

    @cached_property
    def _backend(self) -> Tokenizer | None:
        """A copy of a fast tokenizer: the user's calls change its padding, in other threads too, and ours would."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        copied = Tokenizer.from_str(backend.to_str())
        copied.no_padding()
        copied.no_truncation()
        copied.encode_special_tokens = True
        return copied

    def _text(self, text: str) -> list[int]:
        if self._backend is not None:
            tokens = list(self._backend.encode(text, add_special_tokens=False).ids)
        else:
            tokens = list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        if tokens and self.spelled(tokens) == b" " + text.encode():  # a space in front, which the text has not
            tokens[:1] = self._bytes(self.spelled(tokens[:1])[1:])
        return tokens

    def _bytes(self, data: bytes) -> list[int]:
        """Bytes that the tokenizer would not write so: the longest tokens first."""
        tokens = []
        while data:
            size = next((n for n in range(len(data), 0, -1) if data[:n] in self.ids), None)
            if size is not None:
                tokens.append(self.ids[data[:size]])
            data = data[size or 1 :]  # a byte without a token has no image
        return tokens


class Translation:
    """Two tokenizers side by side.

    Args:
        target: what the target's tokens spell.
        draft: what the draft model's tokens spell.

    Attributes:
        to_target: for every id of the draft model the id of the target that spells the same, or -1. Several may have
            the same image.
    """

    def __init__(self, target: Spelling, draft: Spelling):
        self.target, self.draft = target, draft
        self.to_target = [self._image(draft, target, token) for token in range(len(draft.pieces))]

    @property
    def num_shared(self) -> int:
        """Ids of the draft model that have an image."""
        return sum(image >= 0 for image in self.to_target)

    def special_to_draft(self, token: int) -> int | None:
        """The draft model's token for a special one of the target; `None` if it has none."""
        image = self._image(self.target, self.draft, token)
        return None if image < 0 else image

    def written(self, tokens: list[int], context: list[int], limit: int) -> list[int]:
        """What a draft model wrote, in the target's tokens: at most `limit` of them.

        Args:
            tokens: of the draft model, in order. A special one ends the text; its image, if there is one, comes last.
            context: the target's tokens in front, the last of which may leave a character unfinished.
            limit: most tokens wanted.
        """
        data, last = bytearray(), -1
        for token in tokens:
            piece = self.draft.piece(token)
            if piece is None:
                last = self.to_target[token] if token < len(self.to_target) else -1
                break
            data += piece
        written = self._behind(_unfinished(self.target.spelled(context[-4:])), bytes(data))
        return [*written, *([last] if last >= 0 else [])][:limit]

    def _behind(self, begun: bytes, data: bytes) -> list[int]:
        """The target's tokens of bytes that may go on with a character that others have begun."""
        if begun and data:
            tokens, length = self.target.encode(begun + data), 0
            for place, token in enumerate(tokens):
                if length == len(begun):
                    return tokens[place:]
                length += len(self.target.piece(token) or b"")
        return self.target.encode(data)

    @staticmethod
    def _image(source: Spelling, other: Spelling, token: int) -> int:
        if names := source.names.get(token):
            return next((other.named[name] for name in names if name in other.named), -1)
        piece = source.piece(token)
        return other.ids.get(piece, -1) if piece else -1


class Reading:
    """A row's text in the draft model's tokens, which grows with the row.

    Special tokens of the target become those of the draft model with the same name or role. Those it lacks are left
    out, and so are bytes it has no token for. The text begins with what the draft model's tokenizer puts in front of
    every text, once.

    Attributes:
        settled: tokens that stay as they are, whatever follows.
        open: bytes of the last word, whose tokens may change when it goes on.
        num_read: tokens of the target in the reading.
    """

    def __init__(self, translation: Translation):
        self.translation = translation
        self.settled = list(translation.draft.prefix)
        self.open = b""
        self.num_read = 0
        self._ids: list[int] | None = None

    @property
    def ids(self) -> list[int]:
        """The whole text; at least one token."""
        if self._ids is None:
            self._ids = [*self.settled, *self.translation.draft.encode(self.open)] or [0]
        return self._ids

    def extend(self, tokens: list[int]) -> None:
        """Reads on: tokens of the target that follow those read before."""
        if not tokens:
            return
        self._ids = None
        self.num_read += len(tokens)
        for token in tokens:
            piece = self.translation.target.piece(token)
            if piece is None:
                self._add_special(self.translation.special_to_draft(token))
            else:
                self.open += piece
        self._settle(max((match.start() for match in _WORD_START.finditer(self.open)), default=0))
        if len(self.open) > _MOST_OPEN:
            self._settle(self._cut())

    def _add_special(self, image: int | None) -> None:
        self._settle(len(self.open))
        is_in_front = self.settled == self.translation.draft.prefix
        if image is not None and not (is_in_front and image in self.settled):
            self.settled.append(image)

    def _settle(self, size: int) -> None:
        if size:
            self.settled += self.translation.draft.encode(self.open[:size])
            self.open = self.open[size:]

    def _cut(self) -> int:
        """The end of a token, and of a character, that leaves some bytes open."""
        draft, end, cut = self.translation.draft, 0, 0
        for token in draft.encode(self.open):
            end += len(draft.piece(token) or b"")
            if end > len(self.open) - _LEAST_OPEN:
                break
            if self.open[end] & 0xC0 != 0x80:
                cut = end
        return cut


def refuse_tokenizer(tokenizer: Any) -> None:
    """Raises `ValueError` for what cannot say which tokens it has."""
    if not all(hasattr(tokenizer, name) for name in ("get_vocab", "encode", "decode")):
        raise ValueError(
            f"tokenizer= and target_tokenizer= must be Transformers tokenizers, not {type(tokenizer).__name__}."
        )


def translation_between(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> Translation:
    """What two tokenizers share; the newest pairs are remembered.

    Raises:
        ValueError: if one of them does not say what its tokens spell.
    """
    return _translation(target, draft, len(target), len(draft))


@lru_cache(maxsize=4)
def _translation(target: Any, draft: Any, *sizes: int) -> Translation:
    return Translation(Spelling(target), Spelling(draft))


def _special_names(tokenizer: Any) -> dict[int, list[str]]:
    """Of every special id its text, and behind it the roles it plays."""
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)) | added
    names = {index: [text] for index, text in sorted(special.items())}
    for role in _ROLES:
        index = getattr(tokenizer, f"{role}_id", None)
        if index in names:
            names[index].append(f"({role})")
    return names


def _pieces(tokenizer: Any, special: dict[int, list[str]]) -> tuple[list[bytes | None], set[int]]:
    """What every id spells, and which ids are nothing but a byte."""
    vocabulary = tokenizer.get_vocab()
    pieces: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    marks, byte_ids = _byte_marks() if _is_byte_level(tokenizer) else None, set()
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    for token, index in vocabulary.items():
        if index in special:
            continue
        if index in added:
            pieces[index] = added[index].encode()
        elif marks is not None:
            is_marked = all(mark in marks for mark in token)
            pieces[index] = bytes(marks[mark] for mark in token) if is_marked else token.encode()
        elif byte := _BYTE_TOKEN.fullmatch(token):
            pieces[index] = bytes([int(byte[1], 16)])
            byte_ids.add(index)
        else:
            pieces[index] = token.replace("▁", " ").encode()
    return pieces, byte_ids


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether tokens are bytes under other names; if not, "▁" must be their space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python: only SentencePiece's tell by their tokens
        described = "".join(token for token in tokenizer.get_vocab() if token.startswith("▁"))
    else:
        described = "" if backend.decoder is None else backend.decoder.__getstate__().decode()
    if '"ByteLevel"' in described:
        return True
    if "▁" not in described:
        raise ValueError(
            f"The tokens of {type(tokenizer).__name__} do not say which bytes they spell: neither byte-level BPE nor "
            "SentencePiece. Between different tokenizers, both must be one of these; else use a drafter that shares "
            "the target's vocabulary."
        )
    return False


def _byte_marks() -> dict[str, int]:
    """Byte-level BPE's characters for bytes: printable ones are themselves, the others lie behind U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _unfinished(data: bytes) -> bytes:
    """The bytes of a character that has begun at the end and wants more; empty if there is none."""
    for size in range(1, min(4, len(data) + 1)):
        first = data[-size]
        if first & 0xC0 != 0x80:
            wanted = 2 if first & 0xE0 == 0xC0 else 3 if first & 0xF0 == 0xE0 else 4 if first & 0xF8 == 0xF0 else 1
            return data[-size:] if wanted > size else b""
    return b""
