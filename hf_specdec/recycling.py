"""What a target thought could follow each token, and the trees that grow from it."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Ids that may follow a token, the likeliest first, and how likely each is.
Successors = tuple[list[int], list[float]]


class Tree(NamedTuple):
    """Drafted tokens, none before the one it follows.

    Attributes:
        tokens: ids.
        confidences: how likely each is to follow its parent.
        parents: which token each one follows, -1 for the text.
    """

    tokens: list[int]
    confidences: list[float]
    parents: list[int]


def grow(root: int, successors: Callable[[int], Successors], total: int) -> Tree:
    """The `total` likeliest nodes, best first: a node's chance is its probability times its parent's chance.

    Args:
        root: the text's last token.
        successors: of a token, the likeliest first, each at most 1.
        total: most nodes.
    """
    tree = Tree([], [], [])
    found = [successors(root)]  # of the text's last token, then of every node
    ahead: list[tuple[float, int, int, int]] = []  # minus the chance, order of arrival, parent, rank

    def offer(parent: int, rank: int, chance: float) -> None:
        if rank < len(found[parent + 1][0]):
            chance *= found[parent + 1][1][rank]
            heapq.heappush(ahead, (-chance, len(tree.tokens), parent, rank))

    chances = [1.0]
    offer(-1, 0, 1.0)
    while ahead and len(tree.tokens) < total:
        chance, _, parent, rank = heapq.heappop(ahead)
        ids, probs = found[parent + 1]
        place = len(tree.tokens)
        tree.tokens.append(ids[rank])
        tree.confidences.append(probs[rank])
        tree.parents.append(parent)
        chances.append(-chance)
        found.append(successors(ids[rank]))
        offer(place, 0, -chance)
        offer(parent, rank + 1, chances[parent + 1])
    return tree


def grow_chain(root: int, successors: Callable[[int], Successors], total: int) -> Tree:
    """The likeliest successor, its likeliest successor, and so on; arguments as in `grow`."""

    def first(token: int) -> Successors:
        ids, probs = successors(token)
        return ids[:1], probs[:1]

    return grow(root, first, total)


class SuccessorTable:
    """The likeliest successors of every token, as the target saw them when it last read the token.

    Takes eight bytes a token of the vocabulary and rank. Several threads may share one table.

    Args:
        vocabulary: V, ids there are.
        top_k: successors to keep of every token.
    """

    def __init__(self, vocabulary: int, top_k: int):
        self.ids = np.zeros((vocabulary, min(top_k, vocabulary)), dtype=np.int32)
        self.probs = np.zeros(self.ids.shape, dtype=np.float32)  # 0: unknown
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory that is held."""
        return self.ids.nbytes + self.probs.nbytes

    def successors(self, token: int) -> Successors:
        """The known successors of a token and their probabilities, the likeliest first."""
        if not 0 <= token < len(self.ids):
            return [], []
        with self._lock:
            ids, probs = self.ids[token].tolist(), self.probs[token].tolist()
        while probs and probs[-1] <= 0:
            ids.pop()
            probs.pop()
        return ids, probs

    def learn(self, tokens: np.ndarray, ids: np.ndarray, probs: np.ndarray) -> None:
        """Replaces what is known of some tokens; of one that stands there twice, the later entry counts.

        Args:
            tokens: that were read, shape (n,); those outside the vocabulary are passed over.
            ids: their successors, shape (n, k).
            probs: of the successors, falling, shape (n, k).
        """
        known = (tokens >= 0) & (tokens < len(self.ids))
        tokens, ids, probs = tokens[known], ids[known], probs[known]
        newest, places = np.unique(tokens[::-1], return_index=True)
        with self._lock:
            self.ids[newest], self.probs[newest] = ids[::-1][places], probs[::-1][places]


def likeliest(logits: Tensor, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The most probable tokens at every position, ids and probabilities, from (..., V) to (..., k) on the host."""
    top = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    probs = (top.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
    read = torch.stack([top.indices.double(), probs.double()]).cpu().numpy()  # one read of the device
    return read[0].astype(np.int64), read[1].clip(0, 1).astype(np.float32)
