"""Encoder-decoder models: what the encoder reads, and what the decoder is handed."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor

from hf_specdec.host.models import device_of


def attends_to_encoder(model: Any) -> bool:
    """Whether the decoder looks at what an encoder says: its own, or one whose outputs it is handed."""
    return model.config.is_encoder_decoder or "encoder_outputs" in inspect.signature(model.forward).parameters


def encoder_width(model: Any) -> int | None:
    """Width of the encoder outputs that a decoder attends to, as far as its config says."""
    return getattr(model.config, "hidden_size", None)


def encoder_input(model: Any) -> tuple[str, int | None]:
    """What a model's encoder reads, and how many bands it has if these are spectra."""
    return model.get_encoder().main_input_name, getattr(model.config, "num_mel_bins", None)


def is_raw_input(model: Any, inputs: Tensor) -> bool:
    """Whether these are what an encoder reads first: not embeddings, nor the ids that `generate` makes up.

    Where only encoder outputs were passed, these ids are all negative.
    """
    if model.get_encoder().main_input_name != "input_ids":
        return inputs.is_floating_point()
    return not inputs.is_floating_point() and bool((inputs >= 0).all())


def encode(model: Any, inputs: Tensor, mask: Tensor | None, num_rows: int) -> Any:
    """What a model's own encoder says.

    Args:
        model: an encoder-decoder model.
        inputs: what `generate` was given, before it is repeated for several samples each; shape (B / n, ...).
        mask: over the inputs, repeated already, shape (B, ...), or `None`.
        num_rows: B.
    """
    encoder, repeats = model.get_encoder(), num_rows // len(inputs)
    inputs = inputs.to(device_of(model) or inputs.device)
    arguments = {encoder.main_input_name: inputs.to(model.dtype) if inputs.is_floating_point() else inputs}
    if mask is not None and "attention_mask" in inspect.signature(encoder.forward).parameters:
        arguments["attention_mask"] = mask[::repeats].to(inputs.device)
    outputs = encoder(**arguments, return_dict=True)
    _, expanded = model._expand_inputs_for_generation(repeats, is_encoder_decoder=True, encoder_outputs=outputs)
    return expanded["encoder_outputs"]


def encoder_outputs_of(kwargs: dict[str, Any], model: Any) -> Any:
    """What the target's encoder said, for a decoder that may sit elsewhere and compute in another dtype."""
    outputs = kwargs["encoder_outputs"]
    states = outputs[0].to(device=device_of(model) or outputs[0].device, dtype=model.dtype)
    if states is not outputs[0]:
        outputs = copy.copy(outputs)
        outputs["last_hidden_state"] = states
    return outputs


def encoder_arguments(model: Any, outputs: Any, mask: Tensor | None) -> dict[str, Any]:
    """Arguments with which a decoder attends to an encoder; a bare decoder takes no mask over it."""
    arguments = {"encoder_outputs": outputs}
    if mask is not None and model.config.is_encoder_decoder:
        arguments["attention_mask"] = mask.to(outputs[0].device)
    return arguments
