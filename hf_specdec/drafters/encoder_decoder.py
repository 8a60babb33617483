"""What the decoder of a draft model attends to, where the target is an encoder-decoder model.

A draft model with an encoder of its own runs it once a call, over what the target's encoder read. One that shares
the target's encoder (distil-whisper: the teacher's encoder under a shallow decoder) is handed what that said.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_specdec import host
from hf_specdec.drafters.base import DraftContext


def shares_encoder(model: PreTrainedModel, target: PreTrainedModel, wanted: bool | None) -> bool:
    """Whether the draft model reads the target's encoder outputs.

    Args:
        model: the draft model, whose decoder attends to an encoder.
        target: an encoder-decoder model.
        wanted: the answer, if the user gave one. Else it is yes for a bare decoder (`WhisperForCausalLM`), and
            where both models hold the very same encoder module; weights are not compared.
    """
    if wanted is not None:
        return wanted
    return not model.config.is_encoder_decoder or model.get_encoder() is target.get_encoder()


def refuse_option(model: PreTrainedModel, wanted: bool | None) -> None:
    """Raises `ValueError` if `shares_encoder=` asks for what the model cannot do with any target."""
    if wanted is not None and not isinstance(wanted, bool):
        raise ValueError(f"shares_encoder={wanted!r} must be True, False or None (found out for every target).")
    if wanted and not host.attends_to_encoder(model):
        raise ValueError(
            f"shares_encoder=True: {type(model).__name__} attends to no encoder's outputs. Leave the option out, or "
            "draft with an encoder-decoder model."
        )
    if wanted is False and host.attends_to_encoder(model) and not model.config.is_encoder_decoder:
        raise ValueError(
            f"shares_encoder=False: {type(model).__name__} has no encoder of its own. Leave the option out."
        )


def refuse_target(model: PreTrainedModel, target: PreTrainedModel, wanted: bool | None) -> None:
    """Raises `ValueError` if a draft model that attends to an encoder cannot be fed for this target."""
    name, other = type(model).__name__, type(target).__name__
    if not target.config.is_encoder_decoder:
        raise ValueError(
            f"{name} attends to an encoder, and the target {other} is a decoder-only model. "
            'Draft with a decoder-only model, or use assistant="prompt-lookup".'
        )
    if shares_encoder(model, target, wanted):
        own, theirs = host.encoder_width(model), host.encoder_width(target)
        if None not in (own, theirs) and own != theirs:
            raise ValueError(
                f"{name} reads encoder outputs of width {own}, and those of the target {other} are {theirs} wide. Pass "
                "an encoder-decoder model with shares_encoder=False, which runs its own encoder."
            )
    elif host.encoder_input(model) != host.encoder_input(target):
        raise ValueError(
            f"The encoder of {name} reads {_named(model)}, and that of the target {other} reads {_named(target)}. "
            "Draft with a model whose encoder reads the same, or with a decoder-only model."
        )


def encoder_arguments(model: PreTrainedModel, context: DraftContext, wanted: bool | None) -> dict[str, Any]:
    """Arguments of every pass of the draft model's decoder; its own encoder, if that is needed, runs here.

    Raises:
        ValueError: if the call gives the target's encoder no raw input that another encoder could read.
    """
    given, mask = context.arguments, context.arguments.get("attention_mask")
    if shares_encoder(model, context.target, wanted):
        return host.encoder_arguments(model, host.encoder_outputs_of(given, model), mask)
    inputs = context.encoder_inputs
    if inputs is None or not host.is_raw_input(context.target, inputs):
        raise ValueError(
            f"{type(model).__name__} has an encoder of its own, which needs the raw input of the target's encoder; "
            "this call hands over embeddings or encoder outputs. Pass the raw input, or draft with a model that shares "
            "the target's encoder: DraftModel(model, shares_encoder=True)."
        )
    num_rows = len(given["encoder_outputs"][0])
    return host.encoder_arguments(model, host.encode(model, inputs, mask, num_rows), mask)


def _named(model: PreTrainedModel) -> str:
    name, bands = host.encoder_input(model)
    return name if bands is None else f"{name} with {bands} bands"
