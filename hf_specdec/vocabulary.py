"""Which ids a drafter may propose: those the target knows, in the target's own meaning."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase


class DraftVocabularyLogitsProcessor(LogitsProcessor):
    """A Transformers logits processor that leaves a draft only some ids and renormalises over them.

    Applied before drawing, the restricted law is the one that was really drawn from, so verification stays
    exact; the target's own law is never restricted.

    Args:
        allowed: ids that may be drafted, shape (K,), or a boolean mask over the drafter's vocabulary.

    Raises:
        ValueError: if they are no ids, none is allowed, or one is negative.
    """

    reads_scores_only = True

    def __init__(self, allowed: Tensor):
        if not isinstance(allowed, Tensor) or allowed.dim() != 1 or allowed.is_floating_point():
            shown = f"{allowed.dtype} of shape {tuple(allowed.shape)}" if isinstance(allowed, Tensor) else repr(allowed)
            raise ValueError(f"allowed must be a tensor of ids (K,) or a mask over all ids (V,), not {shown:.80}.")
        ids = allowed.nonzero()[:, 0] if allowed.dtype == torch.bool else allowed.unique()
        if len(ids) == 0:
            raise ValueError("No id is allowed in the draft; pass at least one id of the target's vocabulary.")
        if ids[0] < 0:
            raise ValueError(f"Draft ids must not be negative, but {int(ids[0])} was passed.")
        self.allowed = ids

    @classmethod
    def below(cls, limit: int) -> DraftVocabularyLogitsProcessor:
        """Allows all ids smaller than `limit`: what a padded output layer needs.

        Raises:
            ValueError: if that is none.
        """
        return cls(torch.arange(max(0, limit)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) with minus infinity outside the allowed ids, log-normalised inside them."""
        if self.allowed[-1] >= scores.shape[-1]:
            raise ValueError(
                f"Draft id {int(self.allowed[-1])} is outside the drafter's {scores.shape[-1]} scored ids."
            )
        self.allowed = self.allowed.to(scores.device)
        kept = scores[:, self.allowed].log_softmax(dim=-1)
        return torch.full_like(scores, -torch.inf).index_copy(1, self.allowed, kept)


def differing_tokens(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> list[str]:
    """Tokens that two tokenizers do not give the same id, sorted; the newest pairs are remembered."""
    return list(_differing(first, second, len(first), len(second)))


@lru_cache(maxsize=4)
def _differing(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase, *sizes: int) -> tuple[str, ...]:
    return tuple(sorted({token for token, _ in first.get_vocab().items() ^ second.get_vocab().items()}))


def agreeing_ids(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> list[int] | None:
    """Ids that mean the same to both, sorted, if nothing but added tokens differs; else `None`.

    Added tokens are cut out before anything is merged, so such tokenizers have one map of ordinary text.
    """
    added = {token.content for tokenizer in (first, second) for token in tokenizer.added_tokens_decoder.values()}
    if not added.issuperset(differing_tokens(first, second)):
        return None
    return sorted(index for _, index in first.get_vocab().items() & second.get_vocab().items())


@dataclass(frozen=True)
class Vocabulary:
    """What token ids belong to, as far as it is known.

    Attributes:
        size: number of ids the target scores.
        fingerprint: of the tokenizer, see `tokenizer_fingerprint`.
    """

    size: int | None = None
    fingerprint: str | None = None

    def merged(self, other: Vocabulary) -> Vocabulary:
        """All that both know.

        Raises:
            ValueError: if they contradict each other.
        """
        if self.size and other.size and self.size != other.size:
            raise ValueError(
                f"The history holds ids of a vocabulary of {self.size}, and this is one of {other.size}: the same id "
                "may mean something else. Use one history for every vocabulary."
            )
        if self.fingerprint and other.fingerprint and self.fingerprint != other.fingerprint:
            raise ValueError(
                f"The history belongs to the tokenizer with fingerprint {self.fingerprint[:12]}..., not to "
                f"{other.fingerprint[:12]}...: the same id may mean something else. Use one history per tokenizer."
            )
        return Vocabulary(self.size or other.size, self.fingerprint or other.fingerprint)

    def to_metadata(self) -> dict[str, str]:
        """The known parts as strings, for a file's header."""
        known = {"vocabulary_size": self.size, "tokenizer_fingerprint": self.fingerprint}
        return {name: str(value) for name, value in known.items() if value is not None}

    @classmethod
    def from_metadata(cls, metadata: dict[str, str]) -> Vocabulary:
        """Reads what `to_metadata` wrote.

        Raises:
            ValueError: if the size is no positive number.
        """
        size = read_count(metadata, "vocabulary_size", minimum=1) if "vocabulary_size" in metadata else None
        return cls(size, metadata.get("tokenizer_fingerprint"))


def read_count(metadata: dict[str, str], name: str, minimum: int) -> int:
    """An integer of a file's header; `ValueError` if there is none or it is too small."""
    value = metadata.get(name, "")
    if not (value.isascii() and value.isdecimal() and int(value) >= minimum):
        raise ValueError(f"{name}={value!r} in the file's header must be an integer of at least {minimum}.")
    return int(value)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all tokens and their ids, added tokens included: equal for tokenizers that give the same ids."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True).encode()).hexdigest()
