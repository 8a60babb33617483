"""How far a drafter's law is from the target's, without ever holding all scores at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Positions that are scored together: their scores fit a processor's cache.
_CHUNK = 128


class _SoftCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, where the scores are at hand."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, laws: Tensor) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(states), dtype=torch.promote_types(states.dtype, torch.float32), device=states.device)
        best = torch.empty(len(states), dtype=torch.long, device=states.device)
        by_state = torch.empty_like(states)
        by_weight = torch.zeros_like(weight) if weight.requires_grad else None
        for start in range(0, len(states), _CHUNK):
            rows = slice(start, start + _CHUNK)
            logits = states[rows] @ weight.T
            best[rows] = logits.argmax(dim=-1)
            losses[rows] = logits.logsumexp(dim=-1).to(losses.dtype) - (laws[rows] * logits).sum(dim=-1)
            error = logits.softmax(dim=-1).sub_(laws[rows])
            by_state[rows] = error @ weight
            if by_weight is not None:
                by_weight += error.T @ states[rows]
        ctx.save_for_backward(by_state, by_weight)
        ctx.mark_non_differentiable(best)
        return losses, best

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None]:
        by_state, by_weight = ctx.saved_tensors
        # Losses are summed before they are differentiated, so every one has the same factor.
        return by_state * grad[:, None].to(by_state), None if by_weight is None else by_weight * grad[0].to(by_weight), None


def soft_cross_entropy(states: Tensor, weight: Tensor, laws: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy between the target's laws and those of `states @ weight.T`.

    The losses may only be used through their sum: the gradient of `weight` knows one factor for all.

    Args:
        states: what the output layer reads, shape (N, H).
        weight: of the output layer, shape (D, H); its gradient is only made if it is wanted.
        laws: probabilities of the target, shape (N, D).

    Returns:
        Losses, shape (N,), and the ids scored best, shape (N,).
    """
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    return _SoftCrossEntropy.apply(states.to(dtype), weight.to(dtype), laws.to(dtype))
