"""Which target a file was made for: shapes that must agree, and weights that tell copies from strangers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec import host

_NUM_ROWS = 32
_NUM_COLUMNS = 16

# Signs of unrelated weights agree in one half; of fine-tuned and quantised copies in far more than this share.
_ALIKE = 0.75


@dataclass(frozen=True)
class TargetFingerprint:
    """What identifies a target, whatever its dtype and device.

    Attributes:
        vocabulary_size: ids it scores.
        hidden_size: width of its hidden states.
        num_layers: decoder layers.
        signs: of some embedding weights, as hexadecimal digits: rounding to another dtype does not change them. Empty
            if the weights cannot be read here: offloaded, sharded or packed.
    """

    vocabulary_size: int
    hidden_size: int
    num_layers: int
    signs: str

    @classmethod
    def of(cls, target: Any) -> TargetFingerprint:
        """The fingerprint of a model with a language-model head."""
        weight = target.get_input_embeddings().weight
        return cls(host.vocabulary_size(target), host.hidden_size(target), host.num_layers(target), _signs(weight))

    @classmethod
    def from_dict(cls, fields: Any) -> TargetFingerprint:
        """Reads what `to_dict` gave.

        Raises:
            ValueError: if it is something else.
        """
        if not isinstance(fields, dict) or set(fields) != set(cls.__dataclass_fields__):
            raise ValueError(f"A target's fingerprint has {', '.join(cls.__dataclass_fields__)}; found {fields!r}.")
        if not isinstance(fields["signs"], str) or set(fields["signs"]) - set("0123456789abcdef"):
            raise ValueError(f"A target's fingerprint has signs in hexadecimal digits; found {fields['signs']!r}.")
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    def difference(self, other: TargetFingerprint) -> str | None:
        """Says in words which shape differs, or that the weights are unrelated; `None` for a copy, exact or not."""
        for name in ("vocabulary_size", "hidden_size", "num_layers"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} is {getattr(self, name)} there and {getattr(other, name)} here"
        if self.agreement(other) < _ALIKE:
            return "the weights are unrelated"
        return None

    def agreement(self, other: TargetFingerprint) -> float:
        """The share of signs that agree: 1 for the same weights or unknown ones, about one half for strangers."""
        if not (self.signs and other.signs):
            return 1.0
        if len(self.signs) != len(other.signs):
            return 0.0
        num_bits = 4 * len(self.signs)
        return 1 - (int(self.signs, 16) ^ int(other.signs, 16)).bit_count() / num_bits


def _signs(weight: Tensor) -> str:
    """Signs of weights that are spread over a matrix, four a digit."""
    is_readable = weight.device.type != "meta" and weight.is_floating_point() and weight.dim() == 2 and weight.numel()
    if not is_readable:
        return ""
    # In so many digits whatever the default dtype is: the same places in every process.
    rows, columns = (
        torch.linspace(0, size - 1, count, dtype=torch.float32, device="cpu").long().to(weight.device)
        for size, count in zip(weight.shape, (_NUM_ROWS, _NUM_COLUMNS), strict=True)
    )
    sample = weight.detach()[rows][:, columns]
    bits = "".join("1" if positive else "0" for positive in (sample > 0).flatten().tolist())
    return f"{int(bits, 2):0{len(bits) // 4}x}"
