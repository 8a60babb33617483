"""Drafting only as far as it pays: one or several drafters, asked in every round for what their record promises."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, compress
from operator import mul

import torch

from hf_specdec.accept import Draft
from hf_specdec.drafters.base import CopySession, DraftContext, Drafter, DraftSession
from hf_specdec.noise import RoundNoise
from hf_specdec.paths import chain_of, largest, products, united
from hf_specdec.schedule import FREE, PLAIN, Experience, Keep, Load, Rate, best_width, expected_tokens, row_weights
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.verify import TargetPass

# Width of the first round of an arm whose cost is unknown.
_FIRST_WIDTH = 2
# Where copies promise less than this, what a round without them takes is found out at once.
_DOUBTFUL_GAIN = 1.5
# With more tokens to catch up on, an arm's round is no measure of those to come.
_MOST_UNREAD = 32


@dataclass(frozen=True)
class Arm:
    """A drafter at work in this call: its name in the statistics, its session and its longest draft."""

    name: str
    session: DraftSession
    longest: int

    @property
    def is_free(self) -> bool:
        """Whether it copies text, which costs nothing and tells how sure it is."""
        return isinstance(self.session, CopySession)


@dataclass(frozen=True)
class Offer:
    """What an arm would draft for one row.

    Attributes:
        arm: who.
        rates: of its tokens: how often such a token stays if what it follows does. Of a tree that is not known yet,
            how often its first, second, ... token stays at all.
        copied: the tokens, if they cost nothing to have.
        parents: if these are a tree, which token each one follows, -1 for the text.
        limit: most tokens the row may draft.
    """

    arm: Arm
    rates: list[Rate]
    copied: list[int] = field(default_factory=list)
    parents: list[int] | None = None
    limit: int = sys.maxsize

    @cached_property
    def survival(self) -> list[float]:
        """Probability that each token stays, the largest first: in a chain, that the first 1, 2, ... all stay.

        It is known once asked for: what the rates learn later is for later offers.
        """
        return sorted(self._chances, reverse=True)

    def best(self, width: int) -> Offer:
        """The copy cut down to the tokens that are most likely to stay."""
        if self.parents is None:
            return replace(self, rates=self.rates[:width], copied=self.copied[:width])
        kept, parents = largest(self._chances, self.parents, width)
        rates, copied = [self.rates[place] for place in kept], [self.copied[place] for place in kept]
        return replace(self, rates=rates, copied=copied, parents=parents)

    def united(self, other: Offer) -> Offer:
        """One tree of two copies, with the arm of this one; a token that both have keeps its larger rate.

        Of more tokens than the row may draft, the likeliest.
        """
        mine, theirs = (offer.parents or chain_of(len(offer.copied)) for offer in (self, other))
        copied, parents, places = united(self.copied, mine, other.copied, theirs)
        rates: list[Rate] = self.rates + other.rates[:1] * (len(copied) - len(self.rates))
        for place, rate in zip(places, other.rates, strict=True):
            if place >= len(self.rates) or rate.value > rates[place].value:
                rates[place] = rate
        limit = max(self.limit, other.limit)  # of the row; an arm may draft less
        whole = Offer(self.arm, rates, copied, parents, limit)
        return whole if len(copied) <= limit else whole.best(limit)

    def learn(self, kept: int, asked: int, emitted: int) -> None:
        """Adds a round's outcome of a chain to the rates.

        Args:
            kept: tokens that stayed.
            asked: tokens that were wanted; one that was not even drafted is as good as refused.
            emitted: tokens the row gained. Behind them the row, or all of them in lockstep, was cut off.
        """
        for rate in self.rates[:kept]:
            rate.add(True)
        if kept < min(asked, emitted, len(self.rates)):
            self.rates[kept].add(False)

    def learn_path(self, path: list[int], asked: int) -> None:
        """Adds a round's outcome of a tree to the rates.

        Args:
            path: the drafted tokens that stayed, by their places.
            asked: tokens that were wanted.
        """
        for place, rate in enumerate(self.rates[:asked]):
            rate.add(place in path)

    def learn_text(self, text: list[int]) -> int:
        """Compares a copy with the text that came, as far as it is known; how much of the text it held."""
        parents = self.parents or chain_of(len(self.copied))
        current: int | None = -1
        for count, token in enumerate(text):
            followers = [place for place, parent in enumerate(parents) if parent == current]
            current = None
            for place in followers:
                self.rates[place].add(self.copied[place] == token)
                if self.copied[place] == token:
                    current = place
            if current is None:
                return count
        return len(text)

    @cached_property
    def _chances(self) -> list[float]:
        """Probability that each token stays, in the order of the rates."""
        values = [rate.value for rate in self.rates]
        if self.parents is not None:
            return products(values, self.parents)
        return values if self.arm.session.grows_trees and not self.copied else list(accumulate(values, mul))


@dataclass(frozen=True)
class Plan:
    """Who drafts for which row, and how far.

    Attributes:
        offers: by place; `None` where nobody drafts.
        width: longest draft.
        payer: the arm whose own passes the round pays for; `None` if it is free.
        speed: expected tokens a second.
        gain: the speed over that of a round without a draft.
    """

    offers: list[Offer | None]
    width: int
    payer: Arm | None = None
    speed: float = 0.0
    gain: float = 1.0

    @property
    def name(self) -> str:
        """Under which the seconds of such rounds are kept."""
        if self.width == 0:
            return PLAIN
        return FREE if self.payer is None else self.payer.name

    @property
    def own_widths(self) -> list[int]:
        """Tokens the payer drafts, by place."""
        own = [offer is not None and offer.arm is self.payer for offer in self.offers]
        return [
            min(self.width, len(offer.rates)) if offer is not None and is_own else 0
            for offer, is_own in zip(self.offers, own, strict=True)
        ]


@dataclass
class _Round:
    """What must be remembered until a round's outcome is known."""

    plan: Plan
    copies: dict[str, list[Offer]]  # of the arms that copy and were asked
    started: float | None
    asking: dict[str, float]  # seconds it took to ask each arm
    load: Load
    weights: list[float]  # what a token is worth in each riding row
    width: int = 0  # of the draft


class ScheduledSession(DraftSession):
    """Asks one or several sessions for drafts, each as far as it is expected to pay.

    Args:
        arms: who can draft.
        experience: what earlier rounds have taught; grows.
        in_lockstep: whether rows advance by as many tokens as the row that is refused first.
        is_fixed: always take the longest draft: only who drafts is decided.
        num_unread: tokens of the longest prompt, which no arm has read.
        max_length: tokens a row may have, prompt included.
        takes_trees: whether copies of several arms may be united in one tree.
    """

    def __init__(
        self,
        arms: list[Arm],
        experience: Experience,
        in_lockstep: bool,
        is_fixed: bool,
        num_unread: int,
        max_length: int,
        takes_trees: bool = False,
    ):
        self.arms, self.takes_trees = arms, takes_trees
        self.max_length = max_length
        self.experience = experience
        self.in_lockstep = in_lockstep
        self.is_fixed = is_fixed
        self.num_unread = {arm.name: 0 if arm.session.shares_passes else num_unread for arm in arms}
        self.noise_stream = _joint_stream([arm.session.noise_stream for arm in arms])
        self.taps = tuple(sorted({tap for arm in arms for tap in arm.session.taps}))
        self.teaching = dict.fromkeys((arm.name for arm in arms), 0.0)
        self.round: _Round | None = None

    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        started = time.perf_counter()
        offers, asking = self._asked(state, limits)
        plan = self._plan(offers, state)
        copies = {arm.name: offers[arm.name] for arm in self.arms if arm.is_free and arm.name in offers}
        started_typically = started if self._is_typical(plan, state) else None
        self.round = _Round(plan, copies, started_typically, asking, _load_of(state), self._weights(state))
        draft = self._drafted(plan, state, noise)
        self.round.width = draft.width
        return draft

    def commit(self, state: DecodeState, outcome: Outcome, target_pass: TargetPass | None = None) -> None:
        current, self.round = self.round, None
        payer = None
        if current is not None:
            self._learn(current, outcome)
            payer = current.plan.payer if current.plan.width > 0 else None
        for arm in self.arms:
            started = time.perf_counter()
            is_taught = not arm.is_free or current is None or arm.name in current.asking
            arm.session.commit(state, _share(outcome, arm, current), target_pass if is_taught else None)
            self.teaching[arm.name] = time.perf_counter() - started
            has_read = arm is payer or arm.session.shares_passes
            self.num_unread[arm.name] = 0 if has_read else self.num_unread[arm.name] + max(outcome.emitted)

    def keep_rows(self, places: list[int]) -> None:
        for arm in self.arms:
            arm.session.keep_rows(places)

    # --- before the draft ---------------------------------------------------------------------------------

    def _asked(self, state: DecodeState, limits: list[int]) -> tuple[dict[str, list[Offer]], dict[str, float]]:
        """What every arm that is not at rest would draft, and the seconds it took to say so."""
        offers, asking = {}, {}
        for arm in self.arms:
            if self.is_fixed or not arm.is_free or not self._keep_of(arm, state).is_resting():
                started = time.perf_counter()
                offers[arm.name] = self._offers(arm, state, limits)
                asking[arm.name] = time.perf_counter() - started
        return offers, asking

    def _keep_of(self, arm: Arm, state: DecodeState) -> Keep:
        return self.experience.keep_of(arm.name, len(state.rows))

    def _offers(self, arm: Arm, state: DecodeState, limits: list[int]) -> list[Offer]:
        """What an arm would draft for every row."""
        acceptance = self.experience.acceptance_of(arm.name)
        limits = [min(limit, arm.longest) for limit in limits]
        if isinstance(arm.session, CopySession):
            copies = zip(arm.session.copies(state, limits), limits, strict=True)
            rates = acceptance.of_confidences
            return [Offer(arm, rates(copy.confidences), copy.tokens, copy.parents, limit) for copy, limit in copies]
        return [Offer(arm, acceptance.of_positions(limit)) for limit in arm.session.within_context(state, limits)]

    def _plan(self, offers: dict[str, list[Offer]], state: DecodeState) -> Plan:
        """The fastest plan; now and then a trial of what has not paid for a while."""
        if self.is_fixed:
            return self._fixed_plan(offers)
        free: list[Offer | None] = [None] * len(state.rows)
        asked = [arm for arm in self.arms if arm.name in offers]
        for arm in asked:
            if arm.is_free:
                free = _choice(free, offers[arm.name], _united if self.takes_trees else _better)
        plans = [self._best(free, None, state)]
        for arm in asked:
            if not arm.is_free and any(offer.rates for offer in offers[arm.name]):
                plans.append(self._best(self._mixed(free, offers[arm.name]), arm, state))
        chosen = max(plans, key=lambda plan: plan.speed)
        return self._plain_trial(chosen, state) or self._trial(plans, chosen) or chosen

    def _mixed(self, free: list[Offer | None], own: list[Offer]) -> list[Offer | None]:
        """The better offer of every row; all of the arm's own if copies are better everywhere, or may not join."""
        if own[0].arm.session.shares_passes:
            return _choice([None] * len(own), own, _first)
        mixed = _choice(free, own, _better)
        is_used = any(held is new for held, new in zip(mixed, own, strict=True))
        return mixed if is_used else _choice([None] * len(own), own, _first)

    def _fixed_plan(self, offers: dict[str, list[Offer]]) -> Plan:
        """As long as can be, by the first who can: the same plan for the same text, whatever was measured."""
        chosen: list[Offer | None] = [None] * len(next(iter(offers.values())))
        payer = None
        for arm in self.arms:
            if arm.is_free or payer is None:
                chosen = _choice(chosen, offers[arm.name], _first)
                if not arm.is_free and any(offer is not None and offer.arm is arm for offer in chosen):
                    payer = arm
        if payer is not None and payer.session.shares_passes:  # what is copied for other rows must wait
            chosen = _choice([None] * len(chosen), offers[payer.name], _first)
        width = max((len(offer.rates) for offer in chosen if offer is not None), default=0)
        return Plan(chosen, width, payer)

    def _best(self, offers: list[Offer | None], payer: Arm | None, state: DecodeState) -> Plan:
        """How far to draft, given who drafts."""
        load = _load_of(state)
        going = [not state.finished[row] for row in state.rows]
        survival = [[] if offer is None else offer.survival for offer in compress(offers, going)]
        tokens = expected_tokens(survival, list(compress(self._weights(state), going)), self.in_lockstep)
        name, longest = (FREE, len(tokens)) if payer is None else (payer.name, payer.longest)
        seconds = self.experience.seconds(name, load, longest)
        width, speed = best_width(tokens, seconds)
        if payer is not None and not self.experience.is_measured(name, self.experience.nearest(name, load)):
            width = min(width, _FIRST_WIDTH)
        return Plan(offers, width, payer, speed, gain=speed * seconds(0) / tokens[0])

    def _weights(self, state: DecodeState) -> list[float]:
        """What a token is worth in each of the riding rows; nothing in one that has ended."""
        going = [not state.finished[row] for row in state.rows]
        lengths = list(compress(state.row_lengths, going))
        weights = iter(row_weights(lengths, self.max_length - min(lengths, default=0)))
        return [next(weights) if goes_on else 0.0 for goes_on in going]

    def _plain_trial(self, chosen: Plan, state: DecodeState) -> Plan | None:
        """A round without a draft, where that has not been measured (for a while): all else is compared with it."""
        if chosen.width == 0 or min(state.num_emitted) == 0:
            return None
        experience, load = self.experience, _load_of(state)
        is_blind = experience.is_measured(chosen.name, load) and not experience.is_measured(PLAIN, load)
        is_known = experience.is_measured(PLAIN, experience.nearest(PLAIN, load))
        is_doubtful = chosen.gain < _DOUBTFUL_GAIN or (chosen.payer is not None and not is_known)
        is_due = experience.trials_of(PLAIN).is_due()
        return Plan(chosen.offers, width=0) if is_due or (is_blind and is_doubtful) else None

    def _trial(self, plans: list[Plan], chosen: Plan) -> Plan | None:
        """A plan that has not been chosen for so long that it is tried again."""
        for plan in plans:
            trials = self.experience.trials_of(FREE if plan.payer is None else plan.payer.name)
            could_draft = any(offer is not None for offer in plan.offers)
            if plan is chosen and plan.width > 0:
                trials.paid()
            elif could_draft and trials.is_due():
                return replace(plan, width=max(1, plan.width))
        return None

    def _is_typical(self, plan: Plan, state: DecodeState) -> bool:
        """Whether the round takes as long as others like it: the prompt's pass, or reading up, says nothing."""
        unread = self.num_unread[plan.payer.name] if plan.payer is not None and plan.width > 0 else 0
        return min(state.num_emitted) > 0 and unread <= _MOST_UNREAD

    # --- the draft ----------------------------------------------------------------------------------------

    def _drafted(self, plan: Plan, state: DecodeState, noise: RoundNoise | None) -> Draft:
        offers = [None if offer is None else offer.best(plan.width) for offer in plan.offers]
        tokens = [[] if offer is None else offer.copied for offer in offers]
        copies = Draft.of_copies(tokens, state.device, [None if offer is None else offer.parents for offer in offers])
        own = plan.own_widths
        if plan.payer is None or not any(own):
            draft = copies
        else:
            draft = plan.payer.session.propose(state, own, noise)
            if copies.width:
                draft = _merged(copies, draft)
        return replace(draft, arms=[None if offer is None else offer.arm.name for offer in plan.offers])

    # --- after the round ----------------------------------------------------------------------------------

    def _learn(self, current: _Round, outcome: Outcome) -> None:
        """Adds the outcome to the experience."""
        plan, width = current.plan, current.width
        texts = [appended[:emitted] for appended, emitted in zip(outcome.appended, outcome.emitted, strict=True)]
        covered = {  # by copies that were not used, too: the text says whether they were right
            name: [offer.learn_text(text) for offer, text in zip(offers, texts, strict=True)]
            for name, offers in current.copies.items()
        }
        if plan.payer is not None:
            width = min(width, plan.payer.longest)
        if current.started is not None and (width > 0 or plan.width == 0):
            seconds = time.perf_counter() - current.started
            self.experience.record_seconds(plan.name, current.load, width, seconds)
            self._learn_worth(current, covered, outcome, seconds)
        for place, (held, asked) in enumerate(zip(plan.offers, plan.own_widths, strict=True)):
            if held is not None and asked > 0:
                _learn_own(held, asked, place, outcome)
                if outcome.accepted[place] == asked or (held.arm.session.grows_trees and outcome.accepted[place]):
                    self.experience.trials_of(held.arm.name).paid()

    def _learn_worth(self, current: _Round, covered: dict[str, list[int]], outcome: Outcome, seconds: float) -> None:
        """Compares the share of the tokens that an arm had, and no arm before it, with the time it took."""
        emitted = max(1.0, sum(map(mul, current.weights, outcome.emitted)))
        had = [0] * len(outcome.accepted)
        for name, counts in covered.items():
            reached = [min(pair) for pair in zip(counts, outcome.accepted, strict=True)]
            added = [max(0, mine - earlier) for mine, earlier in zip(reached, had, strict=True)]
            had = list(map(max, had, reached))
            cost = (current.asking[name] + self.teaching[name]) / max(seconds, 1e-9)
            keep = self.experience.keep_of(name, current.load.num_rows)
            keep.asked(sum(map(mul, current.weights, added)) / emitted, cost)


def _load_of(state: DecodeState) -> Load:
    return Load.of(len(state.rows), max(state.row_lengths))


def _joint_stream(streams: list[int]) -> int:
    """A stream of random numbers that none of the arms' memories has met: their own, if only one has any."""
    met = [stream for stream in streams if stream > 0]
    if len(met) < 2:
        return sum(met)
    return int.from_bytes(hashlib.sha256(repr(streams).encode()).digest()[:7], "big")


def _learn_own(held: Offer, asked: int, place: int, outcome: Outcome) -> None:
    """Adds what became of a payer's draft for one row."""
    accepted, emitted = outcome.accepted[place], outcome.emitted[place]
    if not held.arm.session.grows_trees:
        held.learn(accepted, asked, emitted)
    elif outcome.positions is None:  # of a tree, only the first path could be used
        held.learn_path(list(range(accepted)), min(asked, accepted + 1))
    else:
        held.learn_path([position - 1 for position in outcome.positions[place][1 : accepted + 1]], asked)


def _choice(
    held: list[Offer | None], new: list[Offer], choose: Callable[[Offer | None, Offer], Offer | None]
) -> list[Offer | None]:
    """One of two offers for every row."""
    return [choose(mine, theirs) for mine, theirs in zip(held, new, strict=True)]


def _first(held: Offer | None, new: Offer) -> Offer | None:
    """Of two offers, the first that has any tokens."""
    return held or (new if new.rates else None)


def _better(held: Offer | None, new: Offer) -> Offer | None:
    """Of two offers, the one that is expected to yield more; the one held among equals."""
    if not new.rates:
        return held
    return new if held is None or sum(new.survival) > sum(held.survival) else held


def _united(held: Offer | None, new: Offer) -> Offer | None:
    """Both offers in one tree, if one of them is a tree; else the better one."""
    better = _better(held, new)
    if held is None or better is None or not new.rates or held.parents is new.parents is None:
        return better
    return better.united(held if better is new else new)


def _merged(copied: Draft, drafted: Draft) -> Draft:
    """One draft from two, each of which has tokens in rows of its own."""
    width = max(copied.width, drafted.width)
    copied, drafted = copied.widened(width), drafted.widened(width)
    is_copied = copied.lengths > 0
    parents = None
    if copied.parents is not None or drafted.parents is not None:
        parents = torch.where(is_copied[:, None], copied.known_parents(), drafted.known_parents())
    return Draft(
        tokens=torch.where(is_copied[:, None], copied.tokens, drafted.tokens),
        lengths=torch.where(is_copied, copied.lengths, drafted.lengths),
        probs=drafted.probs,
        drawn=None if drafted.probs is None else ~is_copied,
        parents=parents,
    )


def _share(outcome: Outcome, arm: Arm, current: _Round | None) -> Outcome:
    """A round's outcome as one arm should see it: tokens that others drafted are none of its own."""
    offers = current.plan.offers if current is not None else [None] * len(outcome.appended)
    is_own = [offer is not None and offer.arm is arm for offer in offers]
    drafted, accepted = (
        [count if own else 0 for count, own in zip(counts, is_own, strict=True)]
        for counts in (outcome.drafted, outcome.accepted)
    )
    return replace(outcome, drafted=drafted, accepted=accepted)


def scheduled(
    drafters: tuple[Drafter, ...], context: DraftContext, state: DecodeState, experience: Experience
) -> ScheduledSession:
    """Starts drafters as arms of one session.

    Args:
        drafters: who can draft; names are made distinct.
        context: of the call; a drafter's own temperature counts for it alone.
        state: of the call.
        experience: of these drafters with this target.
    """
    arms: list[Arm] = []
    for drafter in drafters:
        own = drafter.options
        num_same = sum(other.name == drafter.name for other in drafters[: len(arms)])
        name = f"{drafter.name}-{num_same + 1}" if num_same else drafter.name
        session = drafter.start(replace(context.for_arm(own), is_alone=len(drafters) == 1), state)
        longest = own.num_draft_tokens or context.num_draft_tokens or drafter.default_num_draft_tokens
        arms.append(Arm(name, session, longest))
    num_unread = max(len(tokens) for tokens in state.tokens)
    return ScheduledSession(
        arms,
        experience,
        context.in_lockstep,
        is_fixed=not context.is_scheduled,
        num_unread=num_unread,
        max_length=context.max_length,
        takes_trees=context.takes_trees,
    )
