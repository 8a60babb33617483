"""Several drafters, each used where it pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.drafters.draft_model import DraftModel
from hf_specdec.drafters.prompt_lookup import PromptLookup
from hf_specdec.drafters.scheduled import scheduled
from hf_specdec.drafters.suffix import Suffix
from hf_specdec.drafters.token_recycling import TokenRecycling
from hf_specdec.options import SpeculationOptions
from hf_specdec.state import DecodeState


class Auto(Drafter):
    """Chooses among drafters, row by row and round by round, and drafts nothing where nothing pays.

    Copies (suffixes, prompt lookup, token recycling) cost next to nothing, so all are looked at; where the target
    can verify trees they are drafted in one. A drafter with passes of its own is asked where it promises more tokens a
    second. With a given `num_draft_tokens`, and in sampling with a seed beside a drafter that draws, lengths are not
    measured: the first drafter that has anything to say drafts as far as it can, so list them in the order of trust.

    Args:
        drafters: drafters or smaller models; by default a `Suffix` of its own, a `PromptLookup`, and for text that
            copies nothing a `TokenRecycling`.
        num_draft_tokens: longest draft of those that name no length of their own.

    Raises:
        ValueError: if one of them is no drafter, or the list is empty.
    """

    name = "auto"

    def __init__(
        self, drafters: Sequence[Drafter | PreTrainedModel] | None = None, num_draft_tokens: int | None = None
    ):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens))
        given = [Suffix(), PromptLookup(), TokenRecycling()] if drafters is None else drafters
        if not isinstance(given, list | tuple) or not given:
            raise ValueError(
                f"Auto needs a list of drafters, such as Auto([Suffix(), small_model]), not {drafters!r:.80}."
            )
        self.drafters = tuple(map(_drafter, given))

    @property
    def default_num_draft_tokens(self) -> int:  # type: ignore[override]
        """The longest that any of its drafters drafts."""
        return max(arm.options.num_draft_tokens or arm.default_num_draft_tokens for arm in self.arms)

    @property
    def arms(self) -> tuple[Drafter, ...]:
        """All drafters it chooses from, those of nested ones included."""
        return tuple(arm for drafter in self.drafters for arm in drafter.arms)

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:
        """Raises `ValueError` if one of the drafters cannot serve the target."""
        for arm in self.arms:
            arm.check(target, tokenizer)

    def check_synced(self) -> None:
        """Raises `ValueError` if one of the drafters makes passes that other processes would have to make too."""
        for arm in self.arms:
            arm.check_synced()

    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        """Begins a call of all drafters."""
        return scheduled(self.arms, context, state, self.experience_with(context.target))


def _drafter(given: Any) -> Drafter:
    given = getattr(given, "_orig_mod", given)  # torch.compile
    if isinstance(given, PreTrainedModel):
        return DraftModel(given)
    if isinstance(given, Auto) and given.options.num_draft_tokens is not None:
        raise ValueError("An Auto among drafters is only a list of them; give num_draft_tokens to the outer one.")
    if isinstance(given, Drafter):
        return given
    if isinstance(given, type):
        raise ValueError(f"Auto needs drafters or models, not the class {given.__name__}; pass {given.__name__}(...).")
    if isinstance(given, str):
        raise ValueError(
            f"Auto needs drafters or models, not the name {given!r:.80}; pass an object such as Suffix(), or "
            "load_drafter(folder_or_id, target=model)."
        )
    raise ValueError(f"Auto needs drafters or models, not {given!r:.80}.")
