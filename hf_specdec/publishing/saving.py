"""Saves drafters that have weights, in a format that other engines' loaders know, with where they come from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.checkpoints import load_head
from hf_specdec.checkpoints.write import write_head
from hf_specdec.drafters import Drafter, DraftModel, Eagle, ParallelDraft
from hf_specdec.heads import EagleHead
from hf_specdec.loading import target_name
from hf_specdec.provenance import Provenance, filling, stamp


def save_pretrained(
    drafter: Drafter,
    folder: str | Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    recipe: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    name: str | None = None,
) -> Path:
    """Writes a drafter's settings and weights, which `load_drafter` opens again.

    Args:
        drafter: `Eagle`, `ParallelDraft` or `DraftModel`.
        folder: is made if it does not exist; appears whole.
        target: the model it drafts for. What the drafter shares with it is not written.
        tokenizer: the target's, to be remembered by its fingerprint.
        recipe: how the drafter was trained, for the record.
        data: what it was trained on, for the record.
        name: the target's Hub id, if it was opened from a folder of another name.

    Returns:
        The folder.

    Raises:
        ValueError: if the drafter has no weights, or does not fit the target.
    """
    kind = kind_of(drafter)
    drafter.check(target, tokenizer)
    provenance = Provenance.of(kind, target, name or target_name(target), tokenizer, recipe, data)
    with filling(Path(folder)) as part:
        _write(drafter, part, target)
        stamp(part, provenance)
    return Path(folder)


def kind_of(drafter: Drafter) -> str:
    """What a drafter with weights is called where it is recorded.

    Raises:
        ValueError: if it has none.
    """
    if isinstance(drafter, Eagle):
        return drafter.head.config.kind
    if isinstance(drafter, ParallelDraft):
        return "p-eagle" if isinstance(drafter.model, EagleHead) else "pard"
    if isinstance(drafter, DraftModel):
        return "draft"
    raise ValueError(
        f"{type(drafter).__name__} has no weights to save; Eagle, ParallelDraft and DraftModel have. (Suffix keeps "
        "what it has learned with its own `save`.)"
    )


def _write(drafter: Drafter, folder: Path, target: PreTrainedModel) -> None:
    head = drafter.head if isinstance(drafter, Eagle) else getattr(drafter, "model", None)
    if isinstance(head, EagleHead):
        write_head(head, folder, head.dtype)
        _check_written(head, folder, target)
        return
    model: Any = head
    model.save_pretrained(folder)
    if getattr(drafter, "tokenizer", None) is not None:
        drafter.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    if isinstance(drafter, ParallelDraft):
        path = folder / "config.json"
        marks = {"spd_type": "pard", "pard_token": drafter.mask_token_id}
        path.write_text(json.dumps(json.loads(path.read_text()) | marks, indent=2) + "\n", encoding="utf-8")


def _check_written(head: EagleHead, folder: Path, target: PreTrainedModel) -> None:
    """Raises `ValueError` for a head with options that are read from others' files and have no place in ours."""
    try:
        found = asdict(load_head(str(folder), target).config)
    except ValueError as error:
        reason = str(error).replace(str(folder), "it")
        raise ValueError(
            f"This head cannot be saved, as its settings are read from other formats only: {reason}"
        ) from error
    ours = asdict(head.config)
    if lost := sorted(name for name in ours if found[name] != ours[name]):
        settings = ", ".join(f"{name}={ours[name]}" for name in lost)
        raise ValueError(f"This head cannot be saved: its settings {settings} are read from other formats only.")
