"""Drafters as files: saved, described, published and exported."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.drafters import Drafter
from hf_specdec.publishing.card import write_card
from hf_specdec.publishing.export import FORMATS, export
from hf_specdec.publishing.pushing import push
from hf_specdec.publishing.saving import save_pretrained

__all__ = ["FORMATS", "export", "push", "push_to_hub", "save_pretrained", "write_card"]


def push_to_hub(
    drafter: Drafter,
    repo_id: str,
    target: PreTrainedModel,
    license: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    message: str | None = None,
    **facts: Any,
) -> str:
    """Publishes a drafter with a model card.

    Args:
        drafter: `Eagle`, `ParallelDraft` or `DraftModel`.
        repo_id: such as "org/name".
        target: the model it drafts for.
        license: for the card, such as "apache-2.0".
        private: see `push`, as are `token`, `revision` and `message`.
        token: of the Hub.
        revision: a branch instead of main.
        message: of the commit.
        facts: what `save_pretrained` records: tokenizer, recipe, data, name.

    Returns:
        The address of the commit.

    Raises:
        ValueError: as `save_pretrained` and `push`.
    """
    with TemporaryDirectory() as work:
        folder = save_pretrained(drafter, Path(work) / "drafter", target, **facts)
        write_card(folder, repo_id, license)
        return push(folder, repo_id, private, token, revision, message)
