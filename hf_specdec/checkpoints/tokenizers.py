"""Tokenizers beside the weights of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from hf_specdec.checkpoints.connection import UnreachableError
from hf_specdec.checkpoints.files import fetch

_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")

logger = logging.get_logger(__name__)


def tokenizer_at(location: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or repository; `None` if it has none, or (with a warning) none that can be reached.

    Raises:
        ValueError: if it cannot be opened.
    """
    if not _has_tokenizer(location):
        return None
    try:
        return AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code)
    except (OSError, KeyError, ValueError, ImportError) as error:
        raise ValueError(f"The tokenizer of {location} could not be opened: {error}") from error


def _has_tokenizer(location: str) -> bool:
    unreachable = None
    for name in _FILES:
        try:
            if fetch(location, name) is not None:
                return True
        except UnreachableError as reason:
            unreachable = reason
    if unreachable is not None:
        logger.warning_once(f"{location}: no tokenizer is known, so its vocabulary is not compared. {unreachable}")
    return False


def tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer from where a model was loaded; `None` if it is not there.

    Raises:
        ValueError: if it cannot be opened.
    """
    location = model.name_or_path or ""
    is_somewhere = location and (Path(location).is_dir() or location.count("/") == 1)
    return tokenizer_at(location) if is_somewhere else None


def tokenizers_of(drafter: PreTrainedModel, target: PreTrainedModel) -> tuple[Any, Any]:
    """The tokenizers of two models, `None` for what is not there; what cannot be opened is warned of."""
    found = []
    for model in (drafter, target):
        try:
            found.append(tokenizer_of(model))
        except ValueError as reason:
            logger.warning_once(f"Without it, ids are taken for those of one vocabulary. {reason}")
            found.append(None)
    return found[0], found[1]
