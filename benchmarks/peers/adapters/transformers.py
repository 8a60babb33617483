"""Transformers' own assisted generation: prompt lookup, and a draft model at a fixed length and as it comes."""

from __future__ import annotations

from typing import Any

from peers.side import PLAIN, Case, Generate, Side, generating, opened


def side(case: Case) -> Side:
    """`draft-model-default` adapts the length of its drafts and ends them early, as the defaults have it."""
    target = opened(case.target, case)
    ways = {
        PLAIN: lambda: generating(target),
        "lookup": lambda: generating(target, prompt_lookup_num_tokens=case.num_copied),
    }
    if case.draft_model is not None:
        fixed = {
            "num_assistant_tokens": case.num_drafted,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        ways["draft-model"] = lambda: with_draft_model(target, case, fixed)
        ways["draft-model-default"] = lambda: with_draft_model(target, case, {})
    return Side(target, ways, ("transformers",))


def with_draft_model(target: Any, case: Case, settings: dict[str, Any]) -> Generate:
    """The settings are read from the draft model's own."""
    draft_model = opened(str(case.draft_model), case)
    draft_model.generation_config.update(**settings)
    return generating(target, assistant_model=draft_model)
