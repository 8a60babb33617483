"""Drafting strategies: one file each, and one line each in the registry."""

from hf_specdec.drafters.auto import Auto
from hf_specdec.drafters.base import Copy, CopySession, DraftContext, Drafter, DraftSession
from hf_specdec.drafters.draft_model import DraftModel
from hf_specdec.drafters.eagle import DraftTree, Eagle
from hf_specdec.drafters.early_exit import EarlyExit, ExitEstimate, best_exit_layer
from hf_specdec.drafters.parallel import ParallelDraft
from hf_specdec.drafters.prompt_lookup import PromptLookup
from hf_specdec.drafters.suffix import Suffix
from hf_specdec.drafters.token_recycling import TokenRecycling

# Strategies that need nothing but their name: `generate(assistant="prompt-lookup")`.
NAMED: dict[str, type[Drafter]] = {
    "prompt-lookup": PromptLookup,
    "ngram": PromptLookup,
    "suffix": Suffix,
    "token-recycling": TokenRecycling,
    "early-exit": EarlyExit,
    "auto": Auto,
}

__all__ = [
    "NAMED",
    "Auto",
    "Copy",
    "CopySession",
    "DraftContext",
    "DraftModel",
    "DraftSession",
    "DraftTree",
    "Drafter",
    "Eagle",
    "EarlyExit",
    "ExitEstimate",
    "ParallelDraft",
    "PromptLookup",
    "Suffix",
    "TokenRecycling",
    "best_exit_layer",
]
