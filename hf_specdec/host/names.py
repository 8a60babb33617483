"""Words of the host that differ between its releases."""

from __future__ import annotations

import inspect

from transformers import GenerationMixin

# Transformers 5.24 hands caches around as `cache`; older releases say `past_key_values`.
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
