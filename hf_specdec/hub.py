"""Folders and Hub ids as assistants."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import host
from hf_specdec.checkpoints import load_head, recognise
from hf_specdec.checkpoints.files import read_config, snapshot
from hf_specdec.checkpoints.tokenizers import tokenizers_of
from hf_specdec.drafters import Drafter, DraftModel, DraftTree, Eagle, ParallelDraft
from hf_specdec.provenance import Provenance


def drafter_from(location: str, target: PreTrainedModel) -> Drafter:
    """Opens a folder or a Hub repository as a drafter for a target, on the target's device and in its dtype.

    Args:
        location: a local folder, or a Hub id such as "org/name".
        target: the model it is to draft for.

    Raises:
        ValueError: if it holds no drafter that fits the target; for an encoder-decoder target, no model of its kind.
    """
    if target.config.is_encoder_decoder:  # nothing but a model can draft for one
        return _draft_model(_language_model(location, target), target)
    try:
        return load_drafter(location, target)
    except ValueError as reason:
        raise ValueError(f"assistant={location!r} cannot be opened. {reason}") from reason


def may_be_drafter(location: str) -> bool:
    """Whether something is a folder, or may be a Hub id."""
    return bool(location) and (Path(location).is_dir() or _looks_like_hub_id(location))


def load_drafter(
    location: str | os.PathLike[str],
    target: PreTrainedModel,
    taps: tuple[int, ...] | None = None,
    tree: DraftTree | None = None,
    revision: str | None = None,
) -> Drafter:
    """Opens whatever drafter a folder or a Hub repository holds, on the target's device and in its dtype.

    Args:
        location: a local folder or a Hub id: a head of the EAGLE family (EAGLE-1, EAGLE-3, HASS), a P-EAGLE head, a
            PARD model, or any complete language model, of the target's tokenizer or of another one. Tokenizers are
            looked for beside the weights of both. "org/name@revision" names a branch, tag or commit.
        target: the model it is to draft for.
        taps: for heads over several hidden states, indices into the target's `hidden_states` to read instead of those
            the checkpoint names: published formats disagree about what a layer's number means.
        tree: for heads that draft one token after the other, how to draft trees; `None` for chains.
        revision: of a Hub repository, instead of one named in `location`.

    Returns:
        `Eagle`, `ParallelDraft` or `DraftModel`.

    Raises:
        ValueError: if it is no known or supported drafter, was made for another target, or has no use for an option.
    """
    if not isinstance(location, str | os.PathLike):
        raise ValueError(f"location={location!r} must be a folder or a Hub id, not {type(location).__name__}.")
    location = _at_revision(os.fspath(location), revision)
    dialect = recognise(location)
    if (provenance := Provenance.read(read_config(location), location)) is not None:
        provenance.check(target, location)
    if tree is not None and dialect.family != "eagle":
        raise ValueError(f"tree={tree}: only heads that draft one token after the other grow trees, not {location}.")
    if dialect.family == "eagle":
        return Eagle(load_head(location, target, taps), tree=tree)
    if dialect.family == "parallel-head":
        return ParallelDraft(load_head(location, target, taps))
    if taps is not None:
        raise ValueError(f"taps={taps}: {location} holds a model of its own, which reads no hidden states.")
    model = _language_model(location, target)
    if dialect.family == "parallel-model":
        return _parallel_draft(model, dialect.mask_token_id, target)
    return _draft_model(model, target)


def _draft_model(model: PreTrainedModel, target: PreTrainedModel) -> DraftModel:
    """With the tokenizers beside the weights of both, unless the two attend to an encoder and score as many ids."""
    if host.attends_to_encoder(model) and _score_alike(model, target):
        return DraftModel(model)
    ours, theirs = tokenizers_of(model, target)
    return DraftModel(model, tokenizer=ours, target_tokenizer=theirs)


def _parallel_draft(model: PreTrainedModel, mask_token_id: int | None, target: PreTrainedModel) -> ParallelDraft:
    """With tokenizers only where sizes differ: a mask token of its own makes no other vocabulary."""
    ours, theirs = (None, None) if _score_alike(model, target) else tokenizers_of(model, target)
    return ParallelDraft(model, mask_token_id, tokenizer=ours, target_tokenizer=theirs)


def _score_alike(model: PreTrainedModel, target: PreTrainedModel) -> bool:
    return host.vocabulary_size(model) == host.vocabulary_size(target)


def _language_model(location: str, target: PreTrainedModel) -> PreTrainedModel:
    try:
        model, found = _kind(location, target).from_pretrained(location, dtype=target.dtype, output_loading_info=True)
    except (HTTPError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{location} could not be opened as a language model: {error}") from error
    if missing := sorted(found["missing_keys"]):  # which the host fills with random numbers
        raise ValueError(f"{location} lacks weights of a {type(model).__name__}: {', '.join(missing[:5])}.")
    return model.to(target.device).eval()


def _kind(location: str, target: PreTrainedModel) -> Any:
    """The class to open a location with: a decoder, or with its encoder what is of an encoder-decoder target's kind."""
    if not target.config.is_encoder_decoder:
        return AutoModelForCausalLM
    is_same_kind = read_config(location).get("model_type") == target.config.model_type
    return type(target) if is_same_kind else AutoModelForCausalLM


def _at_revision(location: str, revision: str | None) -> str:
    """A Hub repository at a revision as a local folder; everything else as it is."""
    if Path(location).is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r}: {location} is a folder, which has no revisions.")
        return location
    name, _, named = location.partition("@")
    if revision and named and revision != named:
        raise ValueError(f"{location} and revision={revision!r} name different revisions; give one.")
    wanted = revision or named
    return snapshot(name, wanted) if wanted else location


def _looks_like_hub_id(location: str) -> bool:
    parts = location.partition("@")[0].split("/")
    return len(parts) == 2 and all(part and part not in {".", ".."} for part in parts)
