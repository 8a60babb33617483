"""Caches: which can be rolled back and rearranged, and how."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_specdec.host.encoders import attends_to_encoder

# Slots that a growing cache layer has to spare when it grows: a share of those in use, within limits.
_SPARE_SHARE, _LEAST_SPARE, _MOST_SPARE = 8, 64, 512
# Settings of models whose attention is local in some layers.
_WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size", "window_size")


def windows(cache: Cache) -> list[int | None]:
    """For every layer, how many keys a single query of plain decoding sees at most; `None` without a limit."""
    return [getattr(layer, "sliding_window", None) for layer in _own(cache).layers]


def new_cache(model: Any) -> Cache:
    """An empty growing cache with the model's own layer kinds, ready to be rolled back."""
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    start_recording(cache)
    return EncoderDecoderCache(cache, DynamicCache(config=config)) if attends_to_encoder(model) else cache


class _RoomyLayer(DynamicLayer):
    """Appends in place: the host's layer copies all it holds in every pass, which batches and long texts feel.

    What it shows is the beginning of a longer tensor. Whoever rearranges a layer gives it tensors of its own, which are
    then copied once.
    """

    whole_keys: Tensor | None = None
    whole_values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.whole_keys, self.keys = _appended(self.whole_keys, self.keys, key_states)
        self.whole_values, self.values = _appended(self.whole_values, self.values, value_states)
        return self.keys, self.values

    def reset(self) -> None:
        self.whole_keys = self.whole_values = None
        super().reset()


def _appended(whole: Tensor | None, held: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor with room, and its beginning: what is held, (B, heads, S, d), then the new slots."""
    if held is None or held.numel() == 0:
        held = new[:, :, :0]
    used, end = held.shape[2], held.shape[2] + new.shape[2]
    if whole is None or whole.shape[2] < end or not _is_beginning(held, whole):
        spare = min(max(end // _SPARE_SHARE, _LEAST_SPARE), _MOST_SPARE)
        whole = new.new_empty(*new.shape[:2], end + spare, new.shape[3])
        whole[:, :, :used] = held
    whole[:, :, used:end] = new
    return whole, whole[:, :, :end]


def _is_beginning(held: Tensor, whole: Tensor) -> bool:
    return held.data_ptr() == whole.data_ptr() and held.stride() == whole.stride() and len(held) == len(whole)


class _WindowedLayer(DynamicSlidingWindowLayer):
    """A recording layer that shows a pass no more than its window, also in the second pass before a `crop`.

    Transformers 5.17 shows everything recorded, which no longer fits the mask; newer releases do as here.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]


# Cache layers whose slots can be rearranged row by row.
_RAGGED_LAYERS = (DynamicLayer, _RoomyLayer, DynamicSlidingWindowLayer, _WindowedLayer)


def _own(cache: Cache) -> Cache:
    """The part of a cache that holds generated tokens: cross-attention to an encoder never changes."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _layers(cache: Cache) -> list[Any]:
    """The self-attention layers that hold keys and values."""
    return [layer for layer in _own(cache).layers if getattr(layer, "keys", None) is not None]


def is_sliding(cache: Cache) -> bool:
    """Whether any layer forgets what leaves its window."""
    return any(getattr(layer, "is_sliding", False) for layer in _own(cache).layers)


def can_be_ragged(cache: Cache) -> bool:
    """Whether rows may keep different numbers of slots: the cache can be rearranged row by row.

    A fixed cache needs room for it, which only one of our own is known to have (`with_room`).
    """
    if isinstance(cache, _RoomyStaticCache):
        return True
    return not isinstance(cache, EncoderDecoderCache) and all(type(layer) in _RAGGED_LAYERS for layer in cache.layers)


def with_room(model: Any, cache: Any, max_length: int, num_ahead: int) -> Any:
    """A fixed cache that the host has just made, replaced by one with room for drafts in all rows; others stay.

    Passes are as wide as the widest draft and rows that have ended ride along, so the widest pass must fit behind
    the longest text. Sliding layers keep everything: their ring buffers cannot be rolled back, and their masks do
    the forgetting.

    Args:
        model: the target.
        cache: what the host prepared.
        max_length: tokens the longest text may get.
        num_ahead: tokens of the widest pass.

    Raises:
        ValueError: if the cache is one that an earlier call has made and returned, and too small for the text.
    """
    if type(cache) is _RoomyStaticCache and (slots := capacity(cache)) is not None and slots < max_length - 1:
        raise ValueError(
            f"The static cache that an earlier call has returned holds {slots} tokens, and the text may reach "
            f"{max_length}. Lower max_new_tokens, or do not set cache_implementation: the default cache grows."
        )
    is_ours_to_replace = type(cache) is StaticCache and not getattr(cache, "_is_user_defined", False)
    if not is_ours_to_replace or cache.offloading:
        return cache
    config = model.config.get_text_config(decoder=True)
    if {type(layer) for layer in cache.layers} - {StaticLayer, StaticSlidingWindowLayer}:
        return cache
    # The host makes a cache no smaller than the last one, so that compiled passes meet the same shapes again.
    longest = max(max_length, *(layer.max_cache_len + 1 for layer in cache.layers))
    return _RoomyStaticCache(config, longest + num_ahead)


def new_static_cache(model: Any, num_slots: int) -> Cache:
    """An empty fixed cache of plain layers, which can be rolled back and rearranged."""
    return _RoomyStaticCache(model.config.get_text_config(decoder=True), num_slots)


class _RoomyStaticCache(StaticCache):
    """A static cache of plain layers only."""

    def __init__(self, config: Any, max_cache_len: int):
        super().__init__(config=config, max_cache_len=max_cache_len)
        self.layers = [_CroppableStaticLayer(max_cache_len=max_cache_len) for _ in self.layers]


class _CroppableStaticLayer(StaticLayer):
    """A static layer that can be rolled back on every supported host: the oldest cannot do it by itself."""

    is_croppable = True

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length.sub_(abs(tokens_to_remove))  # in place: compiled passes know its address


def is_fixed(cache: Cache) -> bool:
    """Whether the cache was allocated once, so that its rows stay."""
    return bool(cache.is_compileable)


def counts_slots(model: Any, cache: Cache) -> bool:
    """Whether a hole would shift what some layer sees, so that holes must be closed at once.

    A model with local attention masks by slots even on a cache that keeps everything.
    """
    config = model.config.get_text_config(decoder=True)
    return is_sliding(cache) or is_fixed(cache) or any(getattr(config, name, None) for name in _WINDOW_SETTINGS)


def capacity(cache: Cache) -> int | None:
    """Slots a fixed cache has; `None` for a growing one."""
    if not is_fixed(cache):
        return None
    return min(layer.get_max_length() for layer in _own(cache).layers if layer.get_max_length() > 0)


def num_slots(cache: Cache) -> int:
    """Slots filled so far."""
    return int(cache.get_seq_length())


def refuse_cache(cache: Any, is_filled: bool) -> None:
    """Raises `ValueError` for a cache that cannot be rolled back.

    Args:
        cache: what the model keeps its past in.
        is_filled: whether the prompt has been read. Some layers know only then (a recurrent state appears with
            the first tokens); of others the class tells before any work.
    """
    if cache is None:
        raise ValueError(
            "The model has no key-value cache, without which a draft cannot be verified. "
            "Call generate() with assistant=False."
        )
    if not isinstance(cache, Cache):
        raise ValueError(
            f"The model keeps its past in a {type(cache).__name__}, which cannot be rolled back after a refused draft. "
            "Call generate() with assistant=False."
        )
    stuck = sorted(
        {type(layer).__name__ for layer in _own(cache).layers if not (layer if is_filled else type(layer)).is_croppable}
    )
    if stuck:
        raise ValueError(
            f"{type(cache).__name__} with {', '.join(stuck)} cannot be rolled back after a refused draft. "
            'Use the default cache (cache_implementation="dynamic"), or assistant=False for this call.'
        )


def refuse_reading_ahead(cache: Cache) -> None:
    """Raises `ValueError` for a cache whose first layers cannot get ahead of the others."""
    if getattr(cache, "offloading", False):
        raise ValueError(
            "An offloaded cache brings in the layers of whole passes one by one, so EarlyExit cannot read ahead with "
            'the first ones. Use the default cache (cache_implementation="dynamic"), or another drafter.'
        )
    known = {*_RAGGED_LAYERS, *_FORGET_NOTHING, StaticSlidingWindowLayer}
    others = {type(layer) for layer in _own(cache).layers} - known
    if others:
        names = ", ".join(sorted(other.__name__ for other in others))
        raise ValueError(
            f"EarlyExit reads ahead with the first layers, which caches of {names} are not known to allow. Use another "
            "drafter."
        )


def start_recording(cache: Cache) -> None:
    """Makes sliding layers keep what a rollback may need until the next `crop`, and others append in place."""
    cache.activate_past_recording()
    own = _own(cache)
    for layer in own.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.__class__ = _WindowedLayer
        elif type(layer) is DynamicLayer and not own.offloading:
            layer.__class__ = _RoomyLayer


def stop_recording(cache: Cache) -> None:
    """Leaves layers as plain `generate` does: sliding ones within their window, none recording or with room."""
    crop(cache, 0)
    for layer in _own(cache).layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False
        if type(layer) is _WindowedLayer:
            layer.__class__ = DynamicSlidingWindowLayer  # type: ignore[assignment]
        elif type(layer) is _RoomyLayer:
            layer.whole_keys = layer.whole_values = None
            layer.__class__ = DynamicLayer  # type: ignore[assignment]


def crop(cache: Cache, num_slots_to_drop: int) -> None:
    """Drops the newest slots of all rows. Zero still trims sliding layers to their window."""
    layers: list[Any] = _own(cache).layers
    for layer in layers:
        # The oldest host makes a decoder's cache with a layer for every encoder layer, and cannot crop those left over.
        if not (isinstance(layer, DynamicLayer) and layer.keys is None):
            layer.crop(-num_slots_to_drop)


def truncate(cache: Cache, num_slots: int) -> None:
    """Brings every layer back to `num_slots` slots, also where a pass stopped between two layers."""
    for layer in _layers(cache):
        surplus = int(layer.get_seq_length()) - num_slots
        if surplus > 0:
            layer.crop(-surplus)


def behind(cache: Cache, num_layers: int) -> Cache:
    """A view of a cache whose first layers are ahead, for passes of the layers behind them.

    The host asks the first layer of a kind how much has been read. In place of those that are ahead stand others of
    their kind, or, where nobody will ask, any.
    """
    view: Any = copy.copy(cache)
    rest = cache.layers[num_layers:]
    view.layers = [_alike(layer, rest) for layer in cache.layers[:num_layers]] + rest
    return view


def _alike(layer: Any, others: list[Any]) -> Any:
    """The first that is of a layer's kind, if any is, else the first."""
    return next((other for other in others if type(other) is type(layer)), others[0])


def keep_rows(cache: Cache, rows: Tensor) -> None:
    """Keeps some rows of a growing cache, in the given order. Its layers may lie on different devices."""
    for layer in _layers(cache):
        index = rows.to(layer.keys.device)
        if layer.keys.shape[-2]:
            layer.batch_select_indices(index)
        else:  # rolled back to nothing: the host leaves the rows of such a layer as they are
            layer.keys, layer.values = layer.keys[index], layer.values[index]


def gather_slots(cache: Cache, index: Tensor, num_slots_before: int) -> None:
    """Rearranges the slots of every row.

    Args:
        cache: a cache with `num_slots_before` slots, sliding layers recording.
        index: for every row and new slot, the old slot it comes from, shape (B, S_new). A sliding layer
            keeps the last window of it; old slots it no longer holds may only be asked for where they are
            masked.
        num_slots_before: S, needed because a sliding layer stores only the end of it.
    """
    new = index.shape[1]
    for layer in _layers(cache):
        if is_fixed(cache):
            layer.keys[:, :, :new] = _take(layer.keys, index)
            layer.values[:, :, :new] = _take(layer.values, index)
            layer.cumulative_length.fill_(new)
            continue
        stored = layer.keys.shape[-2]
        visible = min(new, layer.sliding_window - 1) if layer.is_sliding else new
        source = (index[:, new - visible :] - (num_slots_before - stored)).clamp(min=0)
        layer.keys = _take(layer.keys, source)
        layer.values = _take(layer.values, source)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = new


def reorder_newest(cache: Cache, order: Tensor, num_slots_before: int) -> None:
    """Rearranges the newest slots of every row.

    Args:
        cache: a cache with `num_slots_before` slots, sliding layers recording.
        order: which of the newest W slots stands where, shape (B, W).
        num_slots_before: S.
    """
    width = order.shape[1]
    for layer in _layers(cache):
        end = num_slots_before if is_fixed(cache) else layer.keys.shape[-2]
        newest = slice(end - width, end)
        layer.keys[:, :, newest] = _take(layer.keys[:, :, newest], order)
        layer.values[:, :, newest] = _take(layer.values[:, :, newest], order)


def _take(states: Tensor, index: Tensor) -> Tensor:
    """(B, heads, S, d) at slots (B, S_new) -> (B, heads, S_new, d)."""
    expanded = index.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, expanded)


_FORGET_NOTHING = (DynamicLayer, _RoomyLayer, StaticLayer, _CroppableStaticLayer)


def forgets_nothing(cache: Cache) -> bool:
    """Whether a cache can be rolled back from the first pass on, since it keeps whatever it was given."""
    return all(type(layer) in _FORGET_NOTHING for layer in _own(cache).layers)
