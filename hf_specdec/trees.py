"""Growing draft trees level by level: pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# What follows some tokens: log-probabilities and ids of the most probable ones, best first, (..., k) each.
Children = tuple[Tensor, Tensor]
# Reads a level's beam: its tokens (A, K), the places of their parents in the beam before (A, K) and its depth, from 1;
# returns what follows each, (A, K, k).
Step = Callable[[Tensor, Tensor, int], Children]


def most_probable(logits: Tensor, count: int) -> Children:
    """The most probable ids of each law; `count` of them, or all if there are fewer.

    Args:
        logits: (..., V), -inf for what cannot be drafted.
        count: at least 1.
    """
    values, ids = logits.float().log_softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
    return values, ids


def grow(first: Children, step: Step, depth: int, top_k: int, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """The most probable tokens of a tree whose levels are beams. EAGLE-2, arXiv 2406.16858.

    Args:
        first: what follows the text, (A, k).
        step: what follows a beam.
        depth: levels, at least 1.
        top_k: width of a beam, at least 1.
        total: tokens to keep at most.

    Returns:
        Tokens, parents and scores (sums of log-probabilities, float32), shape (A, M) each with M <= total, best first;
        a parent (-1: the text) stands before its children. What scores -inf stands last and is to be left out.
    """
    scores, tokens = _sound(first[0]), first[1]
    parents = torch.full_like(tokens, -1)
    pool = [(tokens, parents, scores)]
    beam = tokens
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # of the beam's tokens in the pool
    before, num_pooled = parents.clamp(min=0), tokens.shape[1]
    for level in range(1, depth):
        children, ids = step(beam, before, level)  # (A, K, k)
        num_children = ids.shape[2]
        children = (scores[:, :, None] + _sound(children)).flatten(1)
        ids, owners = ids.flatten(1), places[:, :, None].expand_as(ids).flatten(1)
        pool.append((ids, owners, children))
        scores, chosen = _best(children, top_k)
        before, beam = chosen // num_children, ids.gather(1, chosen)
        places = num_pooled + chosen
        num_pooled += ids.shape[1]
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*pool, strict=True))
    return _kept(tokens, parents, scores, total)


def _sound(logprobs: Tensor) -> Tensor:
    """What is no number, of a head that has overflowed, is impossible: it must not stand before its parent."""
    return logprobs.float().clamp(max=0).masked_fill(logprobs.isnan(), -torch.inf)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best entries of the last dimension and where they are; of equal ones the earlier."""
    values, index = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], index[..., :count]


def _kept(tokens: Tensor, parents: Tensor, scores: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best of a pool in which no score exceeds its parent's, and levels stand in order: parents come first."""
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    parents = parents.gather(1, order)
    parents = torch.where(parents < 0, -1, rank.gather(1, parents.clamp(min=0)))
    return tokens.gather(1, order)[:, :total], parents[:, :total], scores[:, :total]
