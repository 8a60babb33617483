"""What a drafter is: a strategy the user holds, and a session it starts for every call."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import hf_specdec
from hf_specdec.accept import UNSOUND, Draft
from hf_specdec.cached_model import CachedModel
from hf_specdec.noise import RoundNoise
from hf_specdec.options import SpeculationOptions
from hf_specdec.paths import chain_of, largest, products, united
from hf_specdec.schedule import Experience
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.stats import SharedStats
from hf_specdec.verify import TargetPass


@dataclass(frozen=True)
class Compilation:
    """How a drafter's own passes are to be compiled, in a call that compiles the target's.

    Attributes:
        config: the call's generation config, which holds the settings.
        num_slots: slots of the target's fixed cache: enough for a drafter's.
    """

    config: GenerationConfig
    num_slots: int


@dataclass(frozen=True)
class DraftContext:
    """What a session may know about its call.

    Attributes:
        target: the model whose tokens are guessed; a session must leave it as it is.
        do_sample: whether the call samples. If not, drafting greedily is best.
        scorer: the call's stateless logits processors, for drafters that draft from a law.
        draft_temperature: the temperature asked for, `None` for the call's own.
        compilation: set if the call's passes are compiled.
        takes_trees: whether the target's passes can verify a tree. If not, of a tree only the first path is used.
        in_lockstep: whether all rows gain the same number of tokens in every round, those of the row that is refused
            first.
        is_scheduled: whether draft lengths follow the measured record.
        max_length: tokens a row may have, prompt included.
        num_draft_tokens: the fixed length, if the call names one.
        is_alone: whether no other drafter drafts in this call.
        arguments: of the target's forward passes; an encoder's outputs and its mask are among them.
        encoder_inputs: what the target's encoder read, shape (B / n, ...) where n samples share an input;
            `None` for a decoder-only target.
        reader: the target and what it has read in this call, for drafters that run its layers ahead of a pass; `None`
            where the host's own loop runs the target.
    """

    target: PreTrainedModel
    do_sample: bool
    scorer: Scorer
    draft_temperature: float | None = None
    compilation: Compilation | None = None
    takes_trees: bool = False
    in_lockstep: bool = False
    is_scheduled: bool = False
    max_length: int = sys.maxsize
    num_draft_tokens: int | None = None
    is_alone: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)
    encoder_inputs: Tensor | None = None
    reader: CachedModel | None = None

    def for_arm(self, options: SpeculationOptions) -> DraftContext:
        """The context of one drafter among several: its own temperature counts unless the call names one."""
        if self.draft_temperature is not None:
            return self
        return replace(self, draft_temperature=options.draft_temperature)


class DraftSession(ABC):
    """A drafter at work in one call. Rows are the riding rows of the state, in its order.

    Attributes:
        noise_stream: which of the seed's streams of random numbers the call uses. A draft must be independent of the
            numbers that judge it. Outputs of earlier calls with the same seed are not, so a session that knows
            such outputs takes a stream that none of those calls has used.
        taps: hidden states of the target that `commit` wants to see, as indices into `output_hidden_states`.
        grows_trees: whether its drafts are trees, the most promising tokens first.
        shares_passes: whether drafting does a part of the target's pass, for all rows at once: nobody else then drafts
            in the same round.
    """

    noise_stream: int = 0
    taps: tuple[int, ...] = ()
    grows_trees: bool = False
    shares_passes: bool = False

    @abstractmethod
    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        """Drafts tokens for every row.

        Args:
            state: what has been generated. A session may write its tokens behind the rows' ends.
            limits: most tokens of each row, possibly 0; the draft is at most `max(limits)` wide. Near the end of a
                row a tree may have more tokens than the row still gets.
            noise: the round's random numbers, as wide as `max(limits)`; `None` in greedy decoding. Only
                `noise.draws` may be used, or in coupled sampling `noise.gumbels`, which the target's choice
                shares: the others must stay independent of the draft.

        Returns:
            A draft on the state's device. Tokens with `probs` must have been drawn from them.
        """

    def within_context(self, state: DecodeState, limits: list[int]) -> list[int]:
        """The limits, shortened where a row nears the end of what the session can read."""
        return limits

    def commit(  # noqa: B027 - most sessions read the state
        self, state: DecodeState, outcome: Outcome, target_pass: TargetPass | None = None
    ) -> None:
        """Called when the round's tokens have become part of the state.

        Args:
            state: with the new tokens.
            outcome: what they are, and which positions of the pass they follow.
            target_pass: what the target said at all positions; its tensors belong to the round. `None` where the host's
                own loop ran the target.
        """

    def keep_rows(self, places: list[int]) -> None:  # noqa: B027
        """Called when finished rows leave: the rows at these places stay."""


@dataclass(frozen=True)
class Copy:
    """A draft of one row that was copied from text seen before.

    Attributes:
        tokens: in order.
        confidences: how likely each is right if those it follows are, in [0, 1]: a function of the text alone.
        parents: in a tree, which token each one follows, -1 for the text; `None` for a chain.
    """

    tokens: list[int]
    confidences: list[float]
    parents: list[int] | None = None

    def united(self, other: Copy, limit: int) -> Copy:
        """Both in one tree, or of it the likeliest tokens; of one that both have the larger confidence counts."""
        mine, theirs = (copy.parents or chain_of(len(copy.tokens)) for copy in (self, other))
        tokens, parents, places = united(self.tokens, mine, other.tokens, theirs)
        confidences = self.confidences + [0.0] * (len(tokens) - len(self.tokens))
        for place, confidence in zip(places, other.confidences, strict=True):
            confidences[place] = max(confidences[place], confidence)
        if len(tokens) > limit:
            kept, parents = largest(products(confidences, parents), parents, limit)
            tokens, confidences = [tokens[place] for place in kept], [confidences[place] for place in kept]
        return Copy(tokens, confidences, None if parents == chain_of(len(tokens)) else parents)


class CopySession(DraftSession):
    """A session that copies text. It costs next to nothing, so it may be asked before anybody knows how far to go."""

    @abstractmethod
    def copies(self, state: DecodeState, limits: list[int]) -> list[Copy]:
        """At most `limits[i]` tokens for the riding row i."""

    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        copies = self.copies(state, limits)
        return Draft.of_copies([copy.tokens for copy in copies], state.device, [copy.parents for copy in copies])


class Drafter(ABC):
    """A drafting strategy with its options; safe to use in several calls, one after the other or at once.

    Attributes:
        name: what the registry and benchmarks call it.
        default_num_draft_tokens: longest draft when neither the drafter nor the call says one.
        draws: whether it draws its drafts from a law when the call samples; trees, where it plants any, it does not.
        plants: whether it drafts trees where they can be verified.
        reads_states: whether its sessions look at hidden states of the target; such a call is not compiled.
        options: the options given to the drafter itself; those of a call override them.
        stats: counts and seconds of the calls whose assistant it was; of an arm of `Auto`, see the calls' own.
    """

    name: ClassVar[str]
    default_num_draft_tokens: int
    draws: ClassVar[bool] = False
    plants: bool = False
    reads_states: ClassVar[bool] = False

    def __init__(self, options: SpeculationOptions | None = None):
        self.options = options or SpeculationOptions()
        self.stats = SharedStats()
        self._experience: WeakKeyDictionary[PreTrainedModel, Experience] = WeakKeyDictionary()

    @property
    def arms(self) -> tuple[Drafter, ...]:
        """Who drafts: the drafter itself, or those it chooses from."""
        return (self,)

    def experience_with(self, target: PreTrainedModel) -> Experience:
        """What earlier calls with this target have taught about draft lengths."""
        return self._experience.setdefault(target, Experience())

    def check(self, target: PreTrainedModel, tokenizer: Any = None) -> None:  # noqa: B027 - most fit any target
        """Raises `ValueError` if this drafter cannot serve the target.

        Args:
            target: the model about to generate.
            tokenizer: the target's tokenizer, if the caller knows it.
        """

    def check_synced(self) -> None:  # noqa: B027 - most make no passes that other processes have a part in
        """Raises `ValueError` if this drafter cannot serve calls in which all processes pass together (synced_gpus)."""

    @abstractmethod
    def start(self, context: DraftContext, state: DecodeState) -> DraftSession:
        """Begins a call."""

    def __getstate__(self) -> dict[str, Any]:
        # Experience belongs to a machine and a target in memory.
        return {name: value for name, value in self.__dict__.items() if name != "_experience"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _experience=WeakKeyDictionary())


class WeightedDrafter(Drafter):
    """A drafter with weights of its own, which can be saved, published and opened again.

    Files are not the drafters' business: these methods call the package's functions of the same names.
    """

    def save_pretrained(self, folder: str | Path, target: PreTrainedModel, **facts: Any) -> Path:
        """Writes settings and weights into a folder, with where they come from.

        Args:
            folder: is made if it does not exist; appears whole.
            target: the model it drafts for. What the drafter shares with it is not written.
            facts: for the record: `tokenizer` (the target's), `recipe` and `data` (dictionaries), `name` (the target's
                Hub id, if it was opened from a folder of another name).

        Raises:
            ValueError: if the drafter does not fit the target.
        """
        return hf_specdec.save_pretrained(self, folder, target, **facts)

    def push_to_hub(self, repo_id: str, target: PreTrainedModel, **options: Any) -> str:
        """Publishes the drafter with a model card that says what is known about it.

        Args:
            repo_id: such as "org/name".
            target: the model it drafts for.
            options: `license` for the card; `private`, `token`, `revision` and `message` for the Hub; and the facts of
                `save_pretrained`.

        Returns:
            The address of the commit.

        Raises:
            ValueError: if the drafter does not fit the target, or the Hub refuses.
        """
        return hf_specdec.push_to_hub(self, repo_id, target, **options)

    @classmethod
    def from_pretrained(cls, location: str | Path, target: PreTrainedModel, **options: Any) -> Any:
        """Opens a folder or a Hub repository, as `load_drafter` does, if it holds a drafter of this kind.

        Raises:
            ValueError: if it holds another kind or none, or a drafter for another target.
        """
        found = hf_specdec.load_drafter(str(location), target, **options)
        if not isinstance(found, cls):
            raise ValueError(f"{location} holds {type(found).__name__}, not {cls.__name__}; load_drafter opens any.")
        return found


def checked(draft: Draft, limits: list[int], vocabulary: int) -> Draft:
    """The draft, with length `UNSOUND` in rows that break the contract of `DraftSession.propose`.

    Shapes are judged here and now. Values are judged on the draft's device without waiting for it: whoever reads
    the lengths finds the mark. Ids are clamped, so that the target can read them whatever they are.

    Args:
        draft: as proposed.
        limits: most tokens of every row.
        vocabulary: V, ids the target knows.

    Raises:
        ValueError: if a shape or a dtype is wrong.
    """
    rows, width = len(limits), draft.width
    shapes = {"tokens": (rows, width), "lengths": (rows,)}
    if draft.probs is not None:
        shapes["probs"] = (rows, width, vocabulary)
    if draft.parents is not None:
        shapes["parents"] = (rows, width)
    for name, shape in shapes.items():
        if (found := tuple(getattr(draft, name).shape)) != shape:
            raise ValueError(f"The drafter returned {name} of shape {found}; {shape} was expected.")
    if width > max(limits):
        raise ValueError(f"The drafter returned drafts {width} tokens wide; {max(limits)} were allowed.")
    if draft.tokens.is_floating_point() or draft.lengths.is_floating_point():
        raise ValueError("The drafter returned tokens or lengths that are no integers.")
    if width == 0:
        return replace(draft, lengths=torch.where(draft.lengths == 0, draft.lengths, UNSOUND))
    tokens = draft.tokens.clamp(0, vocabulary - 1)
    allowed = torch.tensor(limits, device=draft.lengths.device)
    is_sound = (draft.lengths >= 0) & (draft.lengths <= allowed)
    is_sound &= ((tokens == draft.tokens) & _is_law(draft) & _is_tree(draft) | ~draft.valid).all(dim=1)
    parents = draft.parents
    if parents is not None:
        index = torch.arange(width, device=parents.device)
        parents = torch.minimum(parents, index - 1).clamp(min=-1)  # the target can read it, whatever it is
    return replace(draft, tokens=tokens, lengths=torch.where(is_sound, draft.lengths, UNSOUND), parents=parents)


def _is_tree(draft: Draft) -> Tensor:
    """Which tokens follow an earlier one, and differ from all earlier ones that do; (B, N) or a scalar."""
    parents = draft.parents
    if parents is None:
        return torch.ones((), dtype=torch.bool, device=draft.tokens.device)
    index = torch.arange(draft.width, device=parents.device)
    is_sibling = (parents[:, :, None] == parents[:, None]) & (index[:, None] > index)
    is_repeated = (is_sibling & (draft.tokens[:, :, None] == draft.tokens[:, None])).any(dim=2)
    is_chain = draft.probs is None or (parents == index - 1)
    if draft.drawn is not None:
        is_chain = is_chain | ~draft.drawn[:, None]
    return (parents >= -1) & (parents < index) & ~is_repeated & is_chain


def _is_law(draft: Draft) -> Tensor:
    """At which positions the reported law is one, and gives the drafted token a mass; (B, N) or a scalar."""
    if draft.probs is None:
        return torch.ones((), dtype=torch.bool, device=draft.tokens.device)
    total = draft.probs.sum(dim=-1)
    tolerance = 1e-3 if draft.probs.dtype in (torch.float32, torch.float64) else 3e-2
    mass = draft.probs.gather(2, draft.tokens.clamp(0, draft.probs.shape[-1] - 1)[..., None])[..., 0]
    is_law = ((total - 1).abs() <= tolerance) & (draft.probs.amin(dim=-1) >= 0) & (mass > 0)
    return is_law if draft.drawn is None else is_law | ~draft.drawn[:, None]
