"""This package: copies of a fixed length as the peers', and its drafters as they come."""

from __future__ import annotations

from typing import Any

import hf_specdec
from peers.side import PLAIN, Case, Generate, Sampling, Side, generating, opened


def side(case: Case) -> Side:
    """Everything is called by name, as users do."""
    target = hf_specdec.enable(opened(case.target, case))
    ways = {
        PLAIN: lambda: generating(target, assistant=False),
        "lookup": lambda: assisted(target, hf_specdec.PromptLookup(), num_draft_tokens=case.num_copied),
        "suffix": lambda: assisted(target, hf_specdec.Suffix()),
        "token-recycling": lambda: assisted(target, hf_specdec.TokenRecycling()),
        "auto": lambda: assisted(target, hf_specdec.Auto()),
    }
    if case.draft_model is not None:
        ways["draft-model"] = lambda: assisted(
            target, hf_specdec.DraftModel(opened(case.draft_model, case)), num_draft_tokens=case.num_drafted
        )
    if case.head is not None:
        ways["eagle3"] = lambda: assisted(
            target, hf_specdec.load_drafter(case.head, target=target), num_draft_tokens=case.num_drafted
        )
    return Side(target, ways, ("hf_specdec",))


def assisted(target: Any, drafter: Any, **arguments: Any) -> Generate:
    """One drafter for all answers. A seed given as such leaves the global random state alone."""

    def generate(prompt: list[int], num_tokens: int, sampling: Sampling | None) -> list[int]:
        seed = {} if sampling is None else {"seed": sampling.seed}
        return generating(target, assistant=drafter, **arguments, **seed)(prompt, num_tokens, sampling)

    return generate
