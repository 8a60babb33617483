"""Drafters' checkpoints as they are published: recognised, checked and opened unchanged."""

from hf_specdec.checkpoints.dialects import Dialect, recognise
from hf_specdec.checkpoints.load import load_head

__all__ = ["Dialect", "load_head", "recognise"]
