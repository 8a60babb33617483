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

# Generations of successors that one read of another device brings: 1 + k + k * k entries.
_GENERATIONS = 3
# Logits whose maximum is looked at before they are.
_BLOCK = 128
# Numbers that stay in a core's cache between two operations on them.
_CACHED = 2**17


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


def grow(root: int, successors: Callable[[int], Successors], total: int, least: float = 0.0) -> Tree:
    """The `total` likeliest nodes, best first: a node's chance is its probability times its parent's chance.

    Args:
        root: the text's last token.
        successors: of a token, the likeliest first, each at most 1.
        total: most nodes.
        least: chance below which no node is wanted.
    """
    tree = Tree([], [], [])
    found = [successors(root)]  # of the text's last token, then of every node
    ahead: list[tuple[float, int, int, int]] = []  # minus the chance, order of arrival, parent, rank

    def offer(parent: int, rank: int, chance: float) -> None:
        if rank < len(found[parent + 1][0]):
            chance *= found[parent + 1][1][rank]
            if chance >= least:
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


def grow_chain(root: int, successors: Callable[[int], Successors], total: int, least: float = 0.0) -> Tree:
    """The likeliest successor, its likeliest successor, and so on; arguments as in `grow`."""

    def first(token: int) -> Successors:
        ids, probs = successors(token)
        return ids[:1], probs[:1]

    return grow(root, first, total, least)


class SuccessorTable:
    """The likeliest successors of every token, as the target saw them when it last read the token.

    One tensor of eight bytes a token of the vocabulary and rank, where the target's logits are: learning reads nothing
    back. Several threads may share one table.

    Args:
        vocabulary: V, ids there are.
        top_k: successors to keep of every token.
        device: where the table is kept.
    """

    def __init__(self, vocabulary: int, top_k: int, device: torch.device | str = "cpu"):
        # Ids, and the bits of their probabilities: 0 for unknown. The last entry takes what must not be learned.
        with torch.inference_mode(False):  # it outlives the call
            entries = torch.zeros(vocabulary + 1, 2, min(top_k, vocabulary), dtype=torch.int32, device=device)
        self._hold(entries)
        self._num_readers = 0
        self._lock = threading.Lock()

    def _hold(self, entries: Tensor) -> None:
        self.entries = entries
        self.vocabulary = len(entries) - 1
        # On the host single entries are read through numpy: a tensor takes far longer to look one up.
        self._on_host = entries.numpy() if entries.device.type == "cpu" else None

    @property
    def device(self) -> torch.device:
        """Where the table is kept."""
        return self.entries.device

    @property
    def num_bytes(self) -> int:
        """Memory that is held."""
        return self.entries.numel() * self.entries.element_size()

    def next_reader(self) -> int:
        """A number that none of those had who have read the table, or taught it; from 0."""
        with self._lock:
            self._num_readers += 1
            return self._num_readers - 1

    def move(self, device: torch.device) -> None:
        """Brings the table to a device; nothing happens if it is there."""
        with self._lock:
            if device != self.device:
                with torch.inference_mode(False):
                    self._hold(self.entries.to(device))

    def successors(self, token: int) -> Successors:
        """The known successors of a token and their probabilities, the likeliest first."""
        if not 0 <= token < self.vocabulary:
            return [], []
        with self._lock:
            entry = self.entries[token].cpu().numpy() if self._on_host is None else self._on_host[token]
            ids, probs = entry[0].tolist(), entry[1].view(np.float32).tolist()
        return _known(ids, probs)

    def reader(self, tokens: list[int]) -> Callable[[int], Successors]:
        """Tells the successors of tokens as they are now: of these, of their successors, and so on."""
        return self.successors if self.device.type == "cpu" else _Reader(self, tokens)

    def generations(self, tokens: list[int], count: int) -> dict[int, Successors]:
        """Successors of tokens, of those, and so on, in one read of the device."""
        tokens = [token for token in tokens if 0 <= token < self.vocabulary]
        latest = torch.tensor(tokens, dtype=torch.long, device=self.device)
        owners, entries = [], []
        with self._lock:
            for _ in range(count):
                owners.append(latest)
                entries.append(self.entries[latest])  # (n, 2, k)
                latest = entries[-1][:, 0].flatten().long()
            found = torch.cat([torch.cat(owners).int()[:, None], torch.cat(entries).flatten(1)], dim=1).cpu()
        names, ids, probs = found.split([1, self.entries.shape[2], self.entries.shape[2]], dim=1)
        known = zip(names[:, 0].tolist(), ids.tolist(), probs.contiguous().view(torch.float32).tolist(), strict=True)
        return {name: _known(*entry) for name, *entry in known}

    def learn(self, tokens: Tensor, ids: Tensor, probs: Tensor) -> None:
        """Replaces what is known of some tokens; of one that stands there twice, the later entry counts.

        Args:
            tokens: that were read, shape (n,); those outside the vocabulary are passed over.
            ids: their successors, shape (n, k).
            probs: of the successors, falling, shape (n, k).
        """
        is_repeated = (tokens[:, None] == tokens).triu(1).any(dim=1)
        is_strange = (tokens < 0) | (tokens >= self.vocabulary)
        places = torch.where(is_repeated | is_strange, self.vocabulary, tokens)
        entries = torch.stack([ids.int(), probs.float().view(torch.int32)], dim=1)
        with self._lock:
            self.entries[places] = entries


class _Reader:
    """Successors that are read from another device several generations at once, and kept."""

    def __init__(self, table: SuccessorTable, tokens: list[int]):
        self.table = table
        self.known = table.generations(tokens, _GENERATIONS)

    def __call__(self, token: int) -> Successors:
        if token not in self.known:
            self.known = {token: ([], [])} | self.table.generations([token], _GENERATIONS) | self.known
        return self.known[token]


def _known(ids: list[int], probs: list[float]) -> Successors:
    """Without the ranks of which nothing is known."""
    count = sum(prob > 0 for prob in probs)
    return ids[:count], probs[:count]


def likeliest(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The most probable tokens at every position, ids and probabilities, from (n, V) to (n, k)."""
    top_k = min(top_k, logits.shape[1])
    values, ids = _highest(logits, top_k)
    return ids, (values - values[:, :1]).exp() / _mass(logits, values[:, :1])


def _highest(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """`topk`: the highest tokens stand in the blocks with the highest maxima, so only those are sorted."""
    num_blocks = logits.shape[1] // _BLOCK
    if num_blocks <= top_k:
        values, ids = logits.topk(top_k, dim=1)
        return values, ids
    rest = torch.arange(num_blocks * _BLOCK, logits.shape[1], device=logits.device)
    blocks = logits[:, : num_blocks * _BLOCK].unflatten(1, (num_blocks, _BLOCK))
    chosen = blocks.amax(dim=2).topk(top_k, dim=1).indices
    ids = (chosen[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    ids = torch.cat([ids, rest.expand(len(ids), -1)], dim=1)
    values, places = logits.gather(1, ids).topk(top_k, dim=1)
    return values, ids.gather(1, places)


def _mass(logits: Tensor, highest: Tensor) -> Tensor:
    """The sum of all tokens' weights, (n, 1), where the highest one, (n, 1), weighs 1."""
    size = max(1, _CACHED // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    pieces = zip(logits.split(size), highest.split(size), strict=True)
    return torch.cat([(piece - top).exp_().sum(dim=1, keepdim=True) for piece, top in pieces])
