"""Processes that share a model's weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled


def is_synced(model: Any, synced_gpus: bool | None) -> bool:
    """Whether every pass is made by all processes together; left open, it is decided as plain `generate` does."""
    if synced_gpus is not None:
        return synced_gpus
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    num_processes = torch.distributed.get_world_size() if is_distributed else 1
    return num_processes > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def is_sharded(model: Any) -> bool:
    """Whether processes share a model's weights, so that all must take part in each of its passes."""
    is_split = any(hasattr(weight, "ds_id") or hasattr(weight, "placements") for weight in model.parameters())
    return is_split or is_fsdp_managed_module(model)


def anyone_goes_on(model: Any, has_ended: bool, is_synced: bool, device: torch.device) -> bool:
    """Whether this process, or, if they are synced, any process, has not ended yet: then all ask each other."""
    return model._has_unfinished_sequences(has_ended, is_synced, device=device)
