"""One head in a form that all open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from hf_specdec.loading import load_model
from hf_specdec.publishing.export import export
from peers.side import Case


def with_whole_head(case: Case, folder: Path) -> Case:
    """The case with its head written out anew: economize opens none that shares the target's output layer."""
    if case.head is None:
        return case
    target = load_model(case.target, getattr(torch, case.dtype), torch.device("cpu"))
    return replace(case, head=str(export(case.head, folder / "whole-head", "vllm-speculators", target)))
