"""Drafters' checkpoints as they are published: recognised, checked and opened unchanged."""

from hf_specdec.checkpoints.dialects import Dialect, recognise
from hf_specdec.checkpoints.load import inspect_head, load_head

__all__ = ["Dialect", "inspect_head", "load_head", "recognise"]
