"""Logits processors: what each is known to read."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

# Logits processors that read nothing but the scores.
_SCORES_ONLY = {
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    )
}
# Logits processors that are a function of a row's own prefix and scores: the same prefix, the same result.
_PREFIX_ONLY = {
    getattr(logits_process, name)
    for name in (
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensAtBeginLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
    )
}
# Of these, the ones that read which tokens a prefix holds, not in which order or how often.
_TOKEN_SET = {logits_process.RepetitionPenaltyLogitsProcessor}


def reads_scores_only(processor: LogitsProcessor) -> bool:
    """Whether a processor is known to look at nothing but the scores (ours say so themselves)."""
    return type(processor) in _SCORES_ONLY or getattr(processor, "reads_scores_only", False)


def reads_token_set(processor: LogitsProcessor) -> bool:
    """Whether a processor is known to read a prefix as a set of tokens, so that repeating one changes nothing."""
    return type(processor) in _TOKEN_SET


def num_ignored(processor: LogitsProcessor) -> int:
    """Tokens at the front of a row that a processor passes over: the most of any row."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    return int(ignored.max()) if isinstance(ignored, Tensor) else ignored or 0


def is_stateless(processor: LogitsProcessor) -> bool:
    """Whether a processor is known to be a function of a row's own prefix and scores."""
    return reads_scores_only(processor) or type(processor) in _PREFIX_ONLY


def for_rows(processor: LogitsProcessor, rows: Tensor) -> LogitsProcessor:
    """The processor for some rows of the batch, in the given order: some hold one number a row."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    selected: Any = copy.copy(processor)
    selected.prompt_ignore_length = ignored.to(rows.device)[rows]
    return selected


def on_device(processor: LogitsProcessor, device: torch.device) -> LogitsProcessor:
    """A copy of a processor with its tensors on a device."""
    moved: Any = copy.copy(processor)
    vars(moved).update({name: value.to(device) for name, value in vars(processor).items() if isinstance(value, Tensor)})
    return moved


def with_temperature(processors: LogitsProcessorList, temperature: float) -> LogitsProcessorList:
    """The processors with their temperature replaced."""
    warper = logits_process.TemperatureLogitsWarper
    first_truncation = next((i for i, p in enumerate(processors) if reads_scores_only(p)), len(processors))
    place = next((i for i, p in enumerate(processors) if isinstance(p, warper)), first_truncation)
    others = [p for p in processors if not isinstance(p, warper)]
    return LogitsProcessorList([*others[:place], warper(float(temperature)), *others[place:]])
