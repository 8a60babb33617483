"""Opens the head of a checkpoint for a target."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import host
from hf_specdec.checkpoints import files, names
from hf_specdec.checkpoints.dialects import recognise
from hf_specdec.checkpoints.headers import Stored
from hf_specdec.checkpoints.translate import TargetShape, Translation, translate
from hf_specdec.heads import EagleConfig, EagleHead


def load_head(location: str, target: PreTrainedModel, taps: tuple[int, ...] | None = None) -> EagleHead:
    """Opens a head of the EAGLE family, whoever published it, and binds it to its target.

    Args:
        location: a local folder or a Hub id.
        target: the model the head was trained for.
        taps: indices into the target's `hidden_states` to read instead of those the checkpoint names. Formats disagree
            about whether a layer's id means what enters or what leaves it.

    Returns:
        The head, in evaluation mode, on the target's device and in its dtype.

    Raises:
        ValueError: if the checkpoint is no such head, was made for another target, lacks or exceeds what its settings
            say, or holds values that are no numbers. The message names the file and the key.
    """
    dialect = recognise(location)
    if dialect.family not in ("eagle", "parallel-head"):
        raise ValueError(f"{location} holds a complete language model ({dialect.name}), not a head for hidden states.")
    config, tensors = files.read_config(location), files.read_tensors(location)
    with files.expected_kinds(location):
        found = _without_copies(translate(dialect, location, config, tensors, _shape(target), taps), target)
        head = _filled(found, target.dtype)
    return head.to(target.device).bind(target).eval()


def inspect_head(location: str, target: PreTrainedModel, tensors: dict[str, Stored]) -> EagleConfig:
    """What `load_head` would open, found out from settings and shapes.

    Args:
        location: a local folder or a Hub id.
        target: the model the head was trained for; it may be on the meta device.
        tensors: of the checkpoint, by name. Of those on the meta device, values are not looked at.

    Raises:
        ValueError: as `load_head`.
    """
    with files.expected_kinds(location):
        found = translate(
            recognise(location), location, files.read_config(location), tensors, _shape(target), taps=None
        )
        return _filled(found, torch.float32).config


def _shape(target: PreTrainedModel) -> TargetShape:
    return TargetShape(host.hidden_size(target), host.vocabulary_size(target), host.num_layers(target))


def _without_copies(found: Translation, target: PreTrainedModel) -> Translation:
    """Shares with the target what the checkpoint copied from it."""
    config, tensors = found.config, dict(found.tensors)
    if _is_copy(tensors.get("embed_tokens.weight"), target.get_input_embeddings()):
        del tensors["embed_tokens.weight"]
        config = replace(config, own_embedding=False)
    if _is_copy(tensors.get("lm_head.weight"), target.get_output_embeddings()):
        del tensors["lm_head.weight"]
        config = replace(config, own_lm_head=False)
    return replace(found, config=config, tensors=tensors)


def _is_copy(ours: Tensor | None, module: torch.nn.Module | None) -> bool:
    theirs = getattr(module, "weight", None)
    if ours is None:
        return False
    if not isinstance(theirs, Tensor) or getattr(module, "bias", None) is not None or theirs.device.type == "meta":
        return False
    if theirs.shape != ours.shape or not theirs.is_floating_point():
        return False
    # A few rows first: most tables that differ differ everywhere.
    return all(torch.equal(ours[:rows].to(theirs), theirs[:rows]) for rows in (8, len(ours)))


def _filled(found: Translation, dtype: torch.dtype) -> EagleHead:
    """The head with all its weights, or an error that names those that are missing, left over or of another shape."""
    with torch.device("meta"):
        head = EagleHead(found.config)
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    _check_names(expected, found)
    for name, value in found.tensors.items():
        if expected[name] != value.shape:
            stored = found.origins[name]
            raise ValueError(f"{stored} has shape {stored.shape}; {expected[name]} was expected.")
    weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.tensors.items()}
    for name, value in weights.items():
        # They were, in the checkpoint's own dtype; on the meta device there are none.
        if value.device.type != "meta" and not value.isfinite().all():
            raise ValueError(f"{found.origins[name]} holds numbers that are too large for {dtype}.")
    head.load_state_dict(weights, assign=True)
    return head


def _check_names(expected: dict[str, tuple[int, ...]], found: Translation) -> None:
    file = names.file_names(found.origins.values())
    if missing := sorted(expected.keys() - found.tensors):
        told = [f"{names.expected_name(name, found.origins)} {expected[name]}" for name in missing]
        raise ValueError(f"{file} lacks tensors of a {found.name} head: {', '.join(told)}.")
    if surplus := sorted(found.tensors.keys() - expected):
        told = [f"{found.origins[name].name} {found.origins[name].shape}" for name in surplus]
        raise ValueError(
            f"{file} holds tensors that a {found.name} head with its settings does not have, and they will not be "
            f"dropped: {', '.join(told)}."
        )
