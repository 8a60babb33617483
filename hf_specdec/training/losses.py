"""Cross entropy between a target's laws and a drafter's, both over one frozen output layer, without their scores.

With rows w_v of the layer, scores z_v = w_v s and the target's law p, the loss is log sum exp z - s E_p and its
gradient E_q - E_p, where E_p is the mean row under p and E_q that under the drafter's law. E_p is made once for a
position, however many steps learn from it, and scores live in small blocks only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Positions that are scored together: their scores fit a processor's cache.
_CHUNK = 128


class _CrossEntropy(torch.autograd.Function):
    """The gradient is made in the forward pass, where the scores are at hand."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, means: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(states), dtype=torch.promote_types(states.dtype, torch.float32), device=states.device)
        is_best = torch.empty(len(states), dtype=torch.bool, device=states.device)
        gradient = torch.empty_like(states)
        for start in range(0, len(states), _CHUNK):
            rows = slice(start, start + _CHUNK)
            logits = states[rows] @ weight.T
            best = logits.amax(dim=-1)
            is_best[rows] = logits.gather(1, labels[rows, None])[:, 0] == best
            law = logits.softmax(dim=-1)
            # The best score less the logarithm of its probability is log sum exp.
            losses[rows] = best.to(losses) - law.amax(dim=-1).to(losses).log()
            gradient[rows] = law @ weight
        losses -= (states.to(losses) * means.to(losses)).sum(dim=-1)
        ctx.save_for_backward(gradient.sub_(means))
        ctx.mark_non_differentiable(is_best)
        return losses, is_best

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None].to(gradient), None, None, None


def cross_entropy(states: Tensor, weight: Tensor, means: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of drafters' laws against a target's, and whether labels are scored best.

    Args:
        states: what the output layer reads, shape (N, H).
        weight: its rows, shape (D, H), as `centred` makes them; frozen.
        means: `mean_rows` of the target's laws at these positions, shape (N, H).
        labels: ids among the rows, shape (N,).

    Returns:
        Losses and booleans, shape (N,).
    """
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    return _CrossEntropy.apply(states.to(dtype), weight.to(dtype), means.to(dtype), labels)


@torch.no_grad()
def mean_rows(states: Tensor, weight: Tensor) -> Tensor:
    """The mean row of an output layer under the law it gives at every state; shape (S, H) -> (S, H)."""
    weight = weight.to(states.dtype)
    return torch.cat([(chunk @ weight.T).softmax(dim=-1) @ weight for chunk in states.split(_CHUNK)])


@torch.no_grad()
def centred(weight: Tensor) -> Tensor:
    """Rows less their mean, which changes no law and leaves more digits to what differs."""
    fine = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return (fine - fine.mean(dim=0)).to(weight.dtype)
