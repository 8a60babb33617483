"""Scores, logits, hidden states and attentions of every emitted token, for the output dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_specdec.verify import TargetPass

Layers = tuple[Tensor, ...]


class Recorder:
    """Collects what the call asked for; rows are put side by side only at the end.

    Where a row had ended before the others, its entries mean nothing: zeros, or, when the batch advances in
    lockstep, what the target said of the filling, as in plain `generate`.

    Args:
        generation_config: says what to record.
        num_rows: B.
        is_encoder_decoder: whether the target is such a model.

    Raises:
        ValueError: if attentions are asked for of several rows, which drafts make ragged, or of an
            encoder-decoder model.
    """

    def __init__(self, generation_config: GenerationConfig, num_rows: int, is_encoder_decoder: bool = False):
        wanted = bool(generation_config.return_dict_in_generate)
        self.scores = _rows(num_rows, wanted and generation_config.output_scores)
        self.logits = _rows(num_rows, wanted and generation_config.output_logits)
        self.states = _rows(num_rows, wanted and generation_config.output_hidden_states)
        self.prompt_states: Layers | None = None
        self.attentions: list[tuple[Any, ...]] | None = [] if wanted and generation_config.output_attentions else None
        if self.attentions is not None and (num_rows > 1 or is_encoder_decoder):
            raise ValueError(
                "output_attentions=True: with an assistant, attentions are returned for one row of a decoder-only "
                "model. Leave it out, or set assistant=False for this call."
            )

    def record(self, row: int, place: int, positions: list[int], target_pass: TargetPass, scores: Tensor) -> None:
        """Keeps some positions of a row, which rode at `place` in the pass; scores (N + 1, V)."""
        for position in positions:
            self.record_one(row, place, position, target_pass, scores[position])

    def record_one(self, row: int, place: int, position: int, target_pass: TargetPass, scores: Tensor) -> None:
        """Keeps one position of a row; scores (V,). What is kept is copied out of the pass's large tensors."""
        if self.scores is not None:
            self.scores[row].append(scores.clone())
        if self.logits is not None:
            self.logits[row].append(target_pass.logits[place, position].clone())
        if self.states is not None:
            layers = target_pass.hidden_states or ()
            self.states[row].append(tuple(layer[place, position].clone() for layer in layers))
            if self.prompt_states is None:
                self.prompt_states = target_pass.prompt_hidden_states
        if self.attentions is not None:
            self._record_attentions(position, target_pass)

    def _record_attentions(self, position: int, target_pass: TargetPass) -> None:
        """What plain `generate` would show: the whole prompt first, then one query over the keys it saw."""
        assert self.attentions is not None
        behind = target_pass.logits.shape[1] - 1 - position  # queries of the pass behind this one
        layers: list[Tensor | None] = []
        for attention, window in zip(target_pass.attentions, target_pass.windows, strict=True):
            if attention is None:  # attention kernels that do not say
                layers.append(None)
                continue
            queries, keys = attention.shape[2] - behind, attention.shape[3] - behind
            first_query = 0 if not self.attentions else queries - 1
            first_key = 0 if not self.attentions or window is None else max(0, keys - window)
            layers.append(attention[:, :, first_query:queries, first_key:keys].clone())
        self.attentions.append(tuple(layers))

    def scores_of(self, row: int) -> list[Tensor] | None:
        """A row's scores so far, one (V,) tensor a token; `None` if they are not recorded."""
        return None if self.scores is None else self.scores[row]

    def columns(self) -> tuple[Tensor, ...] | None:
        """All rows' scores so far, one (B, V) tensor a step; `None` if they are not recorded."""
        return None if self.scores is None else _aligned(self.scores)

    def output(self) -> dict[str, tuple[Any, ...] | None]:
        """The fields of the output dict: one entry a step, rows aligned by position."""
        return {
            "scores": self.columns(),
            "logits": None if self.logits is None else _aligned(self.logits),
            "hidden_states": self._hidden_states(),
            "attentions": None if self.attentions is None else tuple(self.attentions),
        }

    def _hidden_states(self) -> tuple[Layers, ...] | None:
        """The first step holds the whole prompt (B, P, H) a layer, every later one (B, 1, H)."""
        if self.states is None:
            return None
        assert self.prompt_states is not None
        by_layer = [
            _aligned([[layers[index] for layers in row] for row in self.states])
            for index in range(len(self.prompt_states))
        ]
        steps = [tuple(layer[:, None] for layer in step) for step in zip(*by_layer, strict=True)]
        return (self.prompt_states, *steps[1:])


def _rows(num_rows: int, wanted: bool | None) -> list[list[Any]] | None:
    return [[] for _ in range(num_rows)] if wanted else None


def _aligned(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Per-row lists of tensors (X,) -> one tensor (B, X) a step, zeros where a row has ended."""
    blank = torch.zeros_like(rows[0][0])
    steps = range(max(map(len, rows)))
    return tuple(torch.stack([row[step] if step < len(row) else blank for row in rows]) for step in steps)
