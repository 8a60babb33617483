"""The ids of a head with a vocabulary of its own, on the target's."""

from __future__ import annotations

import torch
from torch import Tensor


def draft_ids(offsets: Tensor | None, members: Tensor | None, num_ids: int, vocabulary: int, location: str) -> Tensor:
    """The target's id of every id of the head, ascending; shape (num_ids,), int64.

    Args:
        offsets: `d2t`, what to add to an id of the head, shape (num_ids,); may be missing.
        members: `t2d`, which of the target's ids the head has, shape (vocabulary,); may be missing.
        num_ids: rows of the head's output layer.
        vocabulary: ids of the target.
        location: for messages.

    Raises:
        ValueError: if both are missing and the vocabularies differ, or they contradict the shapes or each other.
    """
    if offsets is None and members is None:
        if num_ids != vocabulary:
            raise ValueError(
                f"{location}: lm_head.weight scores {num_ids} ids of {vocabulary}, and neither d2t nor t2d says which."
            )
        return torch.arange(vocabulary)
    if offsets is None:
        assert members is not None
        ids = _members(members, vocabulary, location)
        if len(ids) != num_ids:
            raise ValueError(f"{location}: t2d names {len(ids)} ids; lm_head.weight scores {num_ids}.")
        return ids
    ids = _from_offsets(offsets, num_ids, vocabulary, location)
    if members is not None and not torch.equal(_members(members, vocabulary, location), ids):
        raise ValueError(f"{location}: d2t and t2d name different ids.")
    return ids


def _members(members: Tensor, vocabulary: int, location: str) -> Tensor:
    if members.shape != (vocabulary,):
        raise ValueError(f"{location}: t2d has shape {tuple(members.shape)}; the target has {vocabulary} ids.")
    if not ((members == 0) | (members == 1)).all():
        raise ValueError(f"{location}: t2d must say of every id yes or no.")
    return members.nonzero()[:, 0]


def _from_offsets(offsets: Tensor, num_ids: int, vocabulary: int, location: str) -> Tensor:
    if offsets.shape != (num_ids,):
        raise ValueError(f"{location}: d2t has shape {tuple(offsets.shape)}; lm_head.weight scores {num_ids} ids.")
    offsets = offsets.long()
    ids = torch.arange(num_ids) + offsets
    if _ascends(ids, vocabulary):
        return ids
    if _ascends(offsets, vocabulary):
        raise ValueError(f"{location}: d2t holds the target's ids themselves; it must hold offsets (id - position).")
    raise ValueError(f"{location}: d2t does not lead to ascending ids below {vocabulary}.")


def _ascends(ids: Tensor, vocabulary: int) -> bool:
    return bool((ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < vocabulary)
