"""flashspec: n-gram lookup, a draft model, and the two together as it combines them by default.

It has no generation without drafts, so plain is Transformers' `generate`, as in its own benchmarks. An engine holds its
settings of sampling, and a drafter its temperature, so both are made anew for every sampled answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import ArmSpec, HuggingFaceDrafter, NgramDrafter, TargetModel

from peers.side import PLAIN, Case, Generate, Sampling, Side, device, ends_of, generating, opened

Parts = Callable[[float], "tuple[list[Any], list[ArmSpec] | None]"]


def side(case: Case) -> Side:
    """A way is a list of drafters, and the arm that says who drafts how far."""
    target = opened(case.target, case)
    ways = {
        PLAIN: lambda: generating(target),
        "lookup": lambda: speculating(target, case, lambda _: ([NgramDrafter()], [ArmSpec(0, case.num_copied)])),
    }
    if case.draft_model is not None:
        draft_model = opened(case.draft_model, case)

        def drafting(temperature: float) -> Any:
            settings = {"dtype": getattr(torch, case.dtype), "temperature": temperature, "model": draft_model}
            return HuggingFaceDrafter(str(case.draft_model), device(), **settings)

        fixed = [ArmSpec(0, case.num_drafted)]
        ways["draft-model"] = lambda: speculating(target, case, lambda heat: ([drafting(heat)], fixed))
        ways["auto"] = lambda: speculating(target, case, lambda heat: ([drafting(heat)], None))
    return Side(target, ways, ("flashspec",))


def speculating(target: Any, case: Case, parts: Parts) -> Generate:
    """Answers by its engine."""
    wrapped = TargetModel(case.target, torch.device(device()), getattr(torch, case.dtype), model=target)
    ends = tuple(ends_of(target))

    def engine(sampling: Sampling | None) -> SpeculativeEngine:
        drawn = SamplingConfig(temperature=0.0)
        if sampling is not None:
            drawn = SamplingConfig(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed)
        drafters, arms = parts(drawn.temperature)
        settings = {"device": device(), "dtype": case.dtype, "eos_token_ids": ends, "sampling": drawn}
        if arms is not None:
            settings["bandit"] = BanditConfig(n_arms=1)
        return SpeculativeEngine(FlashSpecConfig(**settings), drafters, wrapped, arms=arms)

    greedy = engine(None)

    def generate(prompt: list[int], num_tokens: int, sampling: Sampling | None) -> list[int]:
        used = greedy if sampling is None else engine(sampling)
        ids = torch.tensor([prompt], device=device())
        result = used.generate(ids, max_new_tokens=num_tokens)
        return result.output_ids[0, : result.n_tokens_generated].tolist()

    return generate
