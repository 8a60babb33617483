"""A model in two halves: its first layers with the norm and the head, and all layers behind them.

The halves are views, modules that share everything with the model but some of its layers. The model itself is never
touched, so that other threads may run it meanwhile and nothing has to be put back.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec import host


class Halves:
    """A model cut behind one of its layers.

    What the first layers hand on in passes of `first` and `lead` is kept until `forget`. A pass of `rest` over the same
    tokens goes on from there.

    Args:
        model: its decoder's layers are a list.
        exit_layer: how many of them are the first ones.

    Attributes:
        first: the first layers, the norm and the head.
        lead: the same without the head; all its logits are zero.
        rest: the layers behind the first ones, the norm and the head.

    Raises:
        ValueError: if the layers are no list, or the forward of the model cannot be run in part.
    """

    def __init__(self, model: Any, exit_layer: int):
        layers, head = list(host.decoder_layers(model)), model.get_output_embeddings()
        last, hush = layers[exit_layer - 1], functools.partial(_hush, host.vocabulary_size(model))
        self.exit_layer, self._between = exit_layer, _Between()
        skipped = {layer: _stand_in(layer, self._between.skip) for layer in layers[exit_layer:]}
        self.first = _view(model, {last: _stand_in(last, functools.partial(self._between.leave, last))} | skipped)
        self.lead = self.first if head is None else _view(self.first, {head: _stand_in(head, hush)})
        self.rest = _view(model, {layer: _stand_in(layer, self._between.enter) for layer in layers[:exit_layer]})

    def check(self, shapes: list[torch.Size]) -> None:
        """Raises `ValueError` unless `rest` can go on from the passes that were made.

        Args:
            shapes: of the tokens of every pass, (B, W).
        """
        outputs = self._between.outputs
        is_once = len(outputs) == len(shapes)
        if not is_once or not all(_is_states(out, shape) for out, shape in zip(outputs, shapes, strict=True)):
            raise ValueError(
                f"{type(self.first).__name__} runs its layers more than once in a pass, or they hand on more than "
                "states to each other, so it cannot be run in part. Use another drafter than EarlyExit."
            )

    def forget(self) -> None:
        """Drops what the first layers have handed on."""
        self._between.outputs = []


class _Between:
    """What the first layers hand on to the rest.

    The stand-ins hold this and not the halves, which hold them: in a cycle the model's weights would outlive the call
    until the garbage collector comes by.
    """

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def leave(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In place of the last of the first layers: keeps what it says."""
        self.outputs.append(layer(*args, **kwargs))
        return self.outputs[-1]

    def skip(self, *args: Any, **kwargs: Any) -> Any:
        """In place of a layer behind it: changes nothing."""
        return self.outputs[-1]

    def enter(self, *args: Any, **kwargs: Any) -> Any:
        """In place of a layer that has been run: what all of them said."""
        if len(self.outputs) > 1:
            self.outputs = [_joined(self.outputs)]
        return self.outputs[0]


def _hush(vocabulary: int, states: Tensor) -> Tensor:
    """In place of the head: zeros for logits."""
    return states.new_zeros(*states.shape[:-1], vocabulary)


def _is_states(output: Any, shape: torch.Size) -> bool:
    """Whether a layer has handed on states (B, W, ...), and nothing behind them but attention maps (B, heads, W, K)."""
    states, *others = (output,) if isinstance(output, Tensor) else output
    maps = [other for other in others if other is not None]
    return states.shape[:2] == shape and all(m.dim() == 4 and m.is_floating_point() for m in maps)


def _joined(outputs: list[Any]) -> Any:
    """What a layer handed on in several passes, as one pass would: states, alone or in front of maps nobody reads."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, dim=1)
    return torch.cat([output[0] for output in outputs], dim=1), *[None for _ in outputs[0][1:]]


def _view(module: nn.Module, replaced: dict[nn.Module, nn.Module]) -> Any:
    """The module with some of those below it replaced: itself, or a twin of all that hold a replaced one."""
    if module in replaced:
        return replaced[module]
    held = dict(module.named_children())
    seen = {name: _view(child, replaced) for name, child in held.items()}
    if all(seen[name] is held[name] for name in held):
        return module
    twin = module.__class__.__new__(module.__class__)
    own = vars(module)
    bound = {name: _rebound(own[name], module, twin) for name in ("forward", "_old_forward") if name in own}
    vars(twin).update(own | bound, _modules=own["_modules"] | seen, _compiled_call_impl=None)
    return twin


def _rebound(call: Any, module: nn.Module, twin: nn.Module) -> Any:
    """A forward of the module's own (compiled, patched, or of accelerate's hooks) as one of its twin, uncompiled."""
    call = getattr(call, "_torchdynamo_orig_callable", call)
    if isinstance(call, types.MethodType) and call.__self__ is module:
        return types.MethodType(call.__func__, twin)
    if isinstance(call, functools.partial) and call.args and call.args[0] is module:
        return functools.update_wrapper(functools.partial(call.func, twin, *call.args[1:], **call.keywords), call)
    raise ValueError(
        f"{type(module).__name__}.forward was replaced by {call!r:.80}, so the model cannot be run in part. "
        "Bind it as a method (types.MethodType), take it back, or use another drafter than EarlyExit."
    )


def _stand_in(layer: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A twin of a layer, or of the head, that does something else, unseen by its hooks."""
    twin = layer.__class__.__new__(layer.__class__)
    hooks: dict[str, Any] = {"_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict()}
    vars(twin).update(vars(layer), forward=forward, _compiled_call_impl=None, **hooks)
    return twin
