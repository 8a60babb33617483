"""The public names."""

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
from hf_specdec.generation import disable, enable, generate, last_stats, speculate
from hf_specdec.hub import load_drafter
from hf_specdec.publishing import push_to_hub, save_pretrained
from hf_specdec.rounds import Trace
from hf_specdec.stats import SpecStats
from hf_specdec.tracing import trace
from hf_specdec.vocabulary import DraftVocabularyLogitsProcessor

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
    "Trace",
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
    "trace",
]
