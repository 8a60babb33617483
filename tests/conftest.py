"""Shared set-up: one thread, quiet host, the host's deprecation warnings are errors."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

import hf_specdec
from tests.models import tiny


@pytest.fixture(autouse=True)
def _few_threads():
    torch.set_num_threads(1)


@pytest.fixture
def llama():
    """An enabled tiny target."""
    return hf_specdec.enable(tiny())
