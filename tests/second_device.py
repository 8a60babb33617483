"""A second device for machines with one: it computes on the CPU, but refuses tensors that were not moved to it."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "lazy"  # torch knows the name and this build has no kernel for it, so a call that escapes us fails
_MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
_TAKE_INDICES = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}  # of the CPU too


class Elsewhere(torch.Tensor):
    """A tensor on the second device; `inner` holds its numbers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        shape = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=NAME, **shape)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside SecondDevice()")


class _FromLists(TorchFunctionMode):
    """`torch.tensor`, `tolist` and `in` work where no dispatch mode sees them: on the CPU, moved after or before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == NAME:
            return func(*args, **(kwargs | {"device": "cpu"})).to(NAME)
        if func is torch.Tensor.tolist and isinstance(args[0], Elsewhere):
            return args[0].cpu().tolist()
        if func is torch.Tensor.__contains__ and isinstance(args[0], Elsewhere):
            return args[1] in args[0].cpu()
        return func(*args, **kwargs)


class SecondDevice(TorchDispatchMode):
    """While entered, the second device exists; `moves` counts copies by (from, to)."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: Counter[tuple[str, str]] = Counter()
        self._from_lists = _FromLists()
        # Older hosts ask whether autocasting is on, which torch knows of real devices only.
        self._no_autocast = mock.patch.object(torch, "is_autocast_enabled", return_value=False)

    def __enter__(self) -> SecondDevice:
        self._no_autocast.start()
        self._from_lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._from_lists.__exit__(*error)
        self._no_autocast.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result_device = self._result_device(func, tensors, kwargs)
        if result_device == "cpu" and not any(isinstance(t, Elsewhere) for t in tensors):
            return func(*args, **kwargs)
        _refuse_mixed(func, tensors)
        if func in _MOVES:
            self.moves[tensors[-1].device.type, result_device] += 1
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if result_device == "cpu":
            return result
        known = {id(t.inner): t for t in tensors if isinstance(t, Elsewhere)}
        return tree_map(lambda value: _wrapped(value, known), result)

    @staticmethod
    def _result_device(func: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> str:
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"]).type
        if func in _MOVES:
            return tensors[0].device.type
        return NAME if any(isinstance(t, Elsewhere) for t in tensors) else "cpu"

    def take(self, model: torch.nn.Module) -> Any:
        """Brings a model's weights and buffers to the second device."""
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = torch.nn.Parameter(Elsewhere(weight.data), requires_grad=False)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else Elsewhere(buffer)
        return model


def _refuse_mixed(func: Any, tensors: list[torch.Tensor]) -> None:
    if func in _MOVES or (func in _TAKE_INDICES and isinstance(tensors[0], Elsewhere)):
        return
    strangers = [tuple(t.shape) for t in tensors if not isinstance(t, Elsewhere) and t.dim() > 0]
    if strangers:
        raise RuntimeError(f"{func} mixes the second device with tensors {strangers} on the CPU")


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Elsewhere) else value


def _wrapped(value: Any, known: dict[int, Elsewhere]) -> Any:
    """The tensor of the second device that holds a result: an argument's own, where it was changed in place."""
    if not isinstance(value, torch.Tensor):
        return value
    return known[id(value)] if id(value) in known else Elsewhere(value)
