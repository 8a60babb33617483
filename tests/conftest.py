"""Shared set-up: one thread, quiet host, the host's deprecation warnings are errors."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import huggingface_hub.constants
import pytest
import torch

import hf_specdec
from hf_specdec.options import SpeculationOptions
from tests.hub_server import HubServer
from tests.models import tiny


@pytest.fixture(autouse=True)
def _few_threads():
    torch.set_num_threads(1)


@pytest.fixture
def llama():
    """An enabled tiny target."""
    return hf_specdec.enable(tiny())


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process uses, with a cache of its own."""
    with HubServer() as server:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


@pytest.fixture(autouse=True)
def full_drafts(request, monkeypatch):
    """Drafts as long as can be: tiny models verify no faster than they draft, so measured lengths would be zero.

    Tests of the schedule itself are marked `scheduled`; there, lengths are what users get.
    """
    if request.node.get_closest_marker("scheduled") is None:
        monkeypatch.setattr(SpeculationOptions, "is_scheduled", lambda self, is_drawn: False)
