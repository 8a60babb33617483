"""What the host hands to a decoding method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_specdec import host
from hf_specdec.cached_model import CompiledPasses


@dataclass(frozen=True)
class Request:
    """One call, as the host has prepared it.

    Attributes:
        input_ids: prompts, padded on the left, shape (B, P).
        processors: all logits processors, in order.
        criteria: all stopping criteria.
        config: the generation config, special tokens prepared.
        arguments: arguments of the model's forward pass, the cache among them.
        encoder_inputs: what an encoder-decoder model's encoder read, before it was repeated for several samples.
    """

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    arguments: dict[str, Any]
    encoder_inputs: Tensor | None = None

    @property
    def cache(self) -> Any:
        """The cache the host prepared or the user passed."""
        return self.arguments.get(host.CACHE_NAME)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompts, embedded ones and padding included."""
        embedded = self.arguments.get("inputs_embeds")
        return self.input_ids.shape[1] if embedded is None else max(self.input_ids.shape[1], embedded.shape[1])

    @property
    def max_length(self) -> int:
        """Tokens a row may come to, embedded ones included."""
        embedded = self.arguments.get("inputs_embeds")
        return self.config.max_length + (0 if embedded is None else embedded.shape[1])

    def with_room(self, model: PreTrainedModel, num_draft_tokens: int) -> Request:
        """The request with a cache in which drafts have room."""
        cache = host.with_room(model, self.cache, self.max_length, num_draft_tokens + 1)
        return replace(self, arguments=self.arguments | {host.CACHE_NAME: cache})

    def refuse_full_cache(self) -> None:
        """Raises `ValueError` if a process could not make another pass when its own rows have ended."""
        slots = host.capacity(self.cache)
        if slots is not None and slots < self.max_length:
            raise ValueError(
                "Under synced_gpus=True a process whose texts have ended makes passes with the others, and the fixed "
                f"cache of {slots} slots is full by then. Give it {self.max_length} slots, or use the default cache."
            )

    def compiled_passes(self, model: PreTrainedModel, num_draft_tokens: int) -> CompiledPasses | None:
        """The target's compiled pass, where plain `generate` would compile: plain steps, short and full drafts."""
        call = host.compiled_call(model, self.config, self.cache)
        if call is None:
            return None
        widths = {1, num_draft_tokens // 4 + 1, num_draft_tokens + 1}
        return CompiledPasses(call, tuple(sorted(widths)))
