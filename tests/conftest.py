"""Shared set-up: one thread, quiet host, the host's deprecation warnings are errors."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

import hf_specdec
from hf_specdec.options import SpeculationOptions
from tests.models import tiny


@pytest.fixture(autouse=True)
def _few_threads():
    torch.set_num_threads(1)


@pytest.fixture
def llama():
    """An enabled tiny target."""
    return hf_specdec.enable(tiny())


@pytest.fixture(autouse=True)
def full_drafts(request, monkeypatch):
    """Drafts as long as can be: tiny models verify no faster than they draft, so measured lengths would be zero.

    Tests of the schedule itself are marked `scheduled`; there, lengths are what users get.
    """
    if request.node.get_closest_marker("scheduled") is None:
        monkeypatch.setattr(SpeculationOptions, "is_scheduled", lambda self, is_drawn: False)
