"""The decoder's layers one by one: what they say on the way, whether some can run alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_specdec.host.models import num_layers


def decoder_layers(model: Any) -> Any:
    """The decoder's layers, in order.

    Raises:
        ValueError: if they are no list.
    """
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers(model):
            return module
    raise ValueError(
        f"{type(model).__name__} does not keep its layers in a list, so their outputs cannot be read. Use a drafter "
        "that needs none (prompt lookup, suffix, a draft model)."
    )


def refuse_halves(model: Any) -> None:
    """Raises `ValueError` if the layers of a model take more from each other than their states."""
    if getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        raise ValueError(
            f"The last layers of {type(model).__name__} read the keys of earlier ones (num_kv_shared_layers), so they "
            "cannot be run alone. Use another drafter than EarlyExit."
        )


@contextmanager
def tapped(model: Any, taps: Iterable[int]) -> Iterator[dict[int, list[Tensor]]]:
    """Collects some hidden states of the passes made inside by this thread, without keeping the others.

    Args:
        model: the target.
        taps: indices into what `output_hidden_states=True` returns: 0 for the embeddings, i for what enters layer
            i, and the number of layers for the decoder's output.

    Yields:
        For every tap one tensor (B, W, H) a pass, in order.
    """
    found: dict[int, list[Tensor]] = {tap: [] for tap in taps}
    handles, thread = [], threading.get_ident()
    try:
        for tap, states in found.items():
            if tap == num_layers(model):
                hook = functools.partial(_keep_output, states, thread)
                handles.append(model.get_decoder().register_forward_hook(hook))
            else:
                hook = functools.partial(_keep_input, states, thread)
                handles.append(decoder_layers(model)[tap].register_forward_pre_hook(hook, with_kwargs=True))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _keep_input(states: list[Tensor], thread: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if threading.get_ident() == thread:
        states.append(args[0] if args else kwargs["hidden_states"])


def _keep_output(states: list[Tensor], thread: int, module: Any, args: tuple[Any, ...], output: Any) -> None:
    if threading.get_ident() == thread:
        states.append(output[0])
