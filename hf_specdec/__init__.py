"""Exact speculative decoding for Hugging Face Transformers: `model.generate(assistant=...)`, only faster."""

from hf_specdec.candidates import as_candidate_generator
from hf_specdec.checks.compat import check
from hf_specdec.checks.findings import CompatReport, Finding
from hf_specdec.drafters import (
    Auto,
    DraftModel,
    DraftTree,
    Eagle,
    EarlyExit,
    ExitEstimate,
    ParallelDraft,
    PromptLookup,
    Suffix,
    TokenRecycling,
    best_exit_layer,
)
from hf_specdec.drafters.base import FILES
from hf_specdec.generation import RESOLVERS, disable, enable, generate, last_stats, speculate
from hf_specdec.hub import drafter_from, load_drafter
from hf_specdec.publishing import push_to_hub, save_pretrained
from hf_specdec.stats import SpecStats
from hf_specdec.vocabulary import DraftVocabularyLogitsProcessor

RESOLVERS.append(drafter_from)
FILES.update(save=save_pretrained, push=push_to_hub, load=load_drafter)

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "CompatReport",
    "DraftModel",
    "DraftTree",
    "DraftVocabularyLogitsProcessor",
    "Eagle",
    "EarlyExit",
    "ExitEstimate",
    "Finding",
    "ParallelDraft",
    "PromptLookup",
    "SpecStats",
    "Suffix",
    "TokenRecycling",
    "as_candidate_generator",
    "best_exit_layer",
    "check",
    "disable",
    "enable",
    "generate",
    "last_stats",
    "load_drafter",
    "push_to_hub",
    "save_pretrained",
    "speculate",
]
