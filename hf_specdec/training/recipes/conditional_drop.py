"""Slots for unknown tokens, fewer the further ahead (conditional drop: PARD, arXiv 2504.18583; P-EAGLE, 2602.01469).

Behind a known place stand slots 1, 2, ... of its chain, each holding the mask. A slot sees what its place sees and the
slots of its chain before it. A slot is only kept if those before it are, so every chain is whole as far as it goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.training.recipes.base import Losses


@dataclass(frozen=True)
class Slots:
    """The slots of one text.

    Attributes:
        places: where each slot's chain begins, among the known places, shape (M,).
        depths: of each slot, from 1 on, shape (M,).
    """

    places: Tensor
    depths: Tensor

    def mask(self, num_known: int) -> Tensor:
        """Who sees whom: known places first, then slots; shape (1, 1, W, W), boolean."""
        places = torch.cat([torch.arange(num_known, device=self.places.device), self.places])
        depths = torch.cat([places.new_zeros(num_known), self.depths])
        sees_text = (depths == 0) & (places <= places[:, None])
        sees_own = (depths > 0) & (places == places[:, None]) & (depths <= depths[:, None])
        return (sees_text | sees_own)[None, None]


def summed(parts: Iterable[tuple[Tensor, Tensor, Tensor]], depth: int, total: Tensor) -> Losses:
    """Sums of losses, and counts by depth.

    Args:
        parts: of every text the losses of its slots, whether the text's token was best, and their depths from 0 on.
        depth: how many depths there are.
        total: where the sum begins, of no dimensions: a zero of the right kind and place.
    """
    hits, seen = torch.zeros(depth, dtype=torch.long), torch.zeros(depth, dtype=torch.long)
    for losses, is_best, depths in parts:
        total = total + losses.sum()
        hits += torch.bincount(depths[is_best].cpu(), minlength=depth)
        seen += torch.bincount(depths.cpu(), minlength=depth)
    return Losses(total, int(seen.sum()), tuple(hits.tolist()), tuple(seen.tolist()))


def keep_all(places: Tensor, depth: int) -> Slots:
    """Whole chains behind all places."""
    depths = torch.arange(1, depth, device=places.device)
    return Slots(places.repeat(len(depths)), depths.repeat_interleave(len(places)))


def draw_slots(places: Tensor, depth: int, rate: float, least: float, seed: int) -> Slots:
    """Keeps a share of the slots at every depth, among those whose chain has got so far.

    Args:
        places: where chains may begin, shape (A,).
        depth: tokens a chain predicts, the one at its place included.
        rate: of the places, `rate ** d` keep their slot at depth d.
        least: but at least this share.
        seed: of what is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    kept, depths, going_on = [places[:0]], [places[:0]], places
    for ahead in range(1, depth):
        count = min(len(going_on), round(max(rate**ahead, least) * len(places)))
        chosen = torch.randperm(len(going_on), generator=generator)[:count].sort().values
        going_on = going_on[chosen.to(places.device)]
        kept.append(going_on)
        depths.append(torch.full_like(going_on, ahead))
    return Slots(torch.cat(kept), torch.cat(depths))


def unused_id(seen: set[int], vocabulary: int) -> int:
    """An id to stand for what is not known: the first that no text holds.

    Raises:
        ValueError: if texts hold every id.
    """
    found = next((token for token in range(vocabulary) if token not in seen), None)
    if found is None:
        raise ValueError(f"The data hold all {vocabulary} ids, so none is left to stand for unknown tokens.")
    return found
