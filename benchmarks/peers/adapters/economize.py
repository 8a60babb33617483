"""economize: plain decoding, prompt lookup, a draft model and an EAGLE-3 head, all in its own loop.

The loop is called as `decode`, which its `generate` calls too. A cycle is one exact token and the drafted ones. A head
is kept in float32 unless told otherwise; here it computes in the target's dtype, as others do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import economize
import torch
from economize.techniques.draft_model import DraftModelConfig
from economize.techniques.lookup import LookupConfig

from peers.side import GENERATE, PLAIN, Case, Generate, Sampling, Side, device, ends_of, generating, opened


def side(case: Case) -> Side:
    """Every technique has a wrapper of its own around the one target, which it leaves as it is."""
    target = opened(case.target, case)
    ways = {
        PLAIN: lambda: decoding(economize.apply(target), target, 0),
        GENERATE: lambda: generating(target),
        "lookup": lambda: decoding(economize.apply(target, LookupConfig()), target, case.num_copied),
    }
    if case.draft_model is not None:
        config = DraftModelConfig(model=case.draft_model)
        ways["draft-model"] = lambda: decoding(economize.apply(target, config), target, case.num_drafted)
    if case.head is not None:
        ways["eagle3"] = lambda: decoding(with_head(target, case.head), target, case.num_drafted)
    return Side(target, ways, ("economize",))


def with_head(target: Any, folder: str) -> Any:
    """It reads heads of one layer without further norms, and drops a head's own embeddings for the target's."""
    checkpoint = economize.read_checkpoint(folder)
    checkpoint.configs = [replace(config, param_dtype="model") for config in checkpoint.configs]
    return economize.attach(target, checkpoint)


def decoding(model: Any, target: Any, num_drafted: int) -> Generate:
    """Answers by its own loop."""
    ends = ends_of(target) or None

    def generate(prompt: list[int], num_tokens: int, sampling: Sampling | None) -> list[int]:
        how = {"decoding": economize.DecodeConfig(cycle_length=1 + num_drafted)}
        if sampling is not None:
            rule = "rejection" if num_drafted else None
            how = {"decoding": economize.DecodeConfig(cycle_length=1 + num_drafted, verifier=rule)}
            how["selector"] = economize.TopPSampler(sampling.temperature, sampling.top_p, sampling.seed)
        ids = torch.tensor(prompt, device=device())
        return model.decode(ids, num_tokens, stop=ends, **how).tokens.tolist()

    return generate
