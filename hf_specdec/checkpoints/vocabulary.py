"""The ids of a head with a vocabulary of its own, on the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec.checkpoints.headers import Stored


def draft_ids(offsets: Stored | None, members: Stored | None, num_ids: int, vocabulary: int, output: str) -> Tensor:
    """The target's id of every id of the head, ascending; shape (num_ids,), int64.

    Args:
        offsets: `d2t`, what to add to an id of the head, shape (num_ids,); may be missing.
        members: `t2d`, which of the target's ids the head has, shape (vocabulary,); may be missing. Of a head that has
            them all it may also be empty, as it is before a vocabulary is cut.
        num_ids: rows of the head's output layer.
        vocabulary: ids of the target.
        output: where the output layer lies, for messages.

    Raises:
        ValueError: if both are missing and the vocabularies differ, or they contradict the shapes or each other.
    """
    known = None if members is None else _members(members, vocabulary)
    if known is not None and num_ids == vocabulary and len(known) == 0:
        known = None
    if offsets is not None:
        ids = _from_offsets(offsets, num_ids, vocabulary)
        if known is not None and not torch.equal(known, ids):
            raise ValueError(f"{offsets} and {members and members.name} name different ids.")
        return ids
    if known is None and num_ids != vocabulary:
        raise ValueError(f"{output} scores {num_ids} ids of {vocabulary}, and neither d2t nor t2d says which.")
    if known is not None and len(known) != num_ids:
        raise ValueError(f"{members} names {len(known)} ids; {output} scores {num_ids}.")
    return torch.arange(vocabulary) if known is None else known


def _members(members: Stored, vocabulary: int) -> Tensor:
    if members.shape != (vocabulary,):
        raise ValueError(f"{members} has shape {members.shape}; {(vocabulary,)} was expected, the ids of the target.")
    if not ((members.value == 0) | (members.value == 1)).all():
        raise ValueError(f"{members} must say of every id yes or no.")
    return members.value.nonzero()[:, 0]


def _from_offsets(offsets: Stored, num_ids: int, vocabulary: int) -> Tensor:
    if offsets.shape != (num_ids,):
        raise ValueError(f"{offsets} has shape {offsets.shape}; {(num_ids,)} was expected, the rows of lm_head.weight.")
    numbers = offsets.value.long()
    ids = torch.arange(num_ids) + numbers
    if _ascends(ids, vocabulary):
        return ids
    if _ascends(numbers, vocabulary):
        raise ValueError(f"{offsets} holds the target's ids themselves; it must hold offsets (id - position).")
    raise ValueError(f"{offsets} does not lead to ascending ids below {vocabulary}.")


def _ascends(ids: Tensor, vocabulary: int) -> bool:
    return len(ids) > 0 and bool((ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < vocabulary)
