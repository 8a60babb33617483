"""Drafting only as far as it pays: one or several drafters, asked in every round for what their record promises."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import torch

from hf_specdec.accept import Draft
from hf_specdec.drafters.base import Copy, CopySession, DraftContext, Drafter, DraftSession
from hf_specdec.noise import RoundNoise
from hf_specdec.schedule import FREE, Experience, Rate, best_width, expected_tokens
from hf_specdec.state import DecodeState, Outcome

# Width of the first rounds of an arm whose cost is unknown, and of the trials of one that did not pay.
_FIRST_WIDTH = 2
_TRIAL_WIDTH = 1


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
        rates: of its tokens, in order.
        copy: the tokens, if they cost nothing to have.
    """

    arm: Arm
    rates: list[Rate]
    copy: Copy | None = None

    @property
    def survival(self) -> list[float]:
        """Probability that the first 1, 2, ... tokens all stay."""
        return list(accumulate((rate.value for rate in self.rates), mul))


@dataclass(frozen=True)
class Plan:
    """Who drafts for which row, and how far.

    Attributes:
        offers: by place; `None` where nobody drafts.
        width: longest draft.
        payer: the arm whose own passes the round pays for; `None` if it is free.
        speed: expected tokens a second.
    """

    offers: list[Offer | None]
    width: int
    payer: Arm | None
    speed: float


@dataclass
class _Round:
    """What must be remembered until a round's outcome is known."""

    plan: Plan
    started: float | None
    width: int  # of the draft


class ScheduledSession(DraftSession):
    """Asks one or several sessions for drafts, each as far as it is expected to pay.

    Args:
        arms: who can draft.
        experience: what earlier rounds have taught; grows.
        in_lockstep: whether rows advance by as many tokens as the row that is refused first.
        is_fixed: always take the longest draft: only who drafts is decided.
    """

    def __init__(self, arms: list[Arm], experience: Experience, in_lockstep: bool, is_fixed: bool):
        self.arms = arms
        self.experience = experience
        self.in_lockstep = in_lockstep
        self.is_fixed = is_fixed
        self.noise_stream = max(arm.session.noise_stream for arm in arms)
        self.round: _Round | None = None

    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        is_measured = min(state.num_emitted) > 0  # the prompt's pass says nothing about later ones
        started = time.perf_counter() if is_measured else None
        plan = self._plan(state, limits)
        draft = self._drafted(plan, state, limits, noise)
        self.round = _Round(plan, started, draft.width)
        return draft

    def commit(self, state: DecodeState, outcome: Outcome) -> None:
        current, self.round = self.round, None
        if current is not None:
            self._learn(current, outcome)
        for arm in self.arms:
            arm.session.commit(state, _share(outcome, arm, current))

    def keep_rows(self, places: list[int]) -> None:
        for arm in self.arms:
            arm.session.keep_rows(places)

    # --- before the draft ---------------------------------------------------------------------------------

    def _plan(self, state: DecodeState, limits: list[int]) -> Plan:
        """The fastest plan; now and then a trial of what has not paid for a while."""
        free = self._free_offers(state, limits)
        if self.is_fixed:
            return self._fixed_plan(free, limits)
        plans = [self._best(free, None, state)]
        for arm in self.arms:
            if not arm.is_free:
                own = [self._costly_offer(arm, limit) for limit in limits]
                mixed = [_better(held, new) for held, new in zip(free, own, strict=True)]
                if any(offer is not None and offer.arm is arm for offer in mixed):
                    plans.append(self._best(mixed, arm, state))
        chosen = self._with_trials(plans, max(plans, key=lambda plan: plan.speed))
        is_paid = chosen.payer is not None and self.experience.is_measured(chosen.payer.name, len(limits))
        if is_paid and not self.experience.knows_plain(len(limits)):
            return replace(chosen, width=0)  # whether it pays can only be said beside a plain round
        return chosen

    def _fixed_plan(self, free: list[Offer | None], limits: list[int]) -> Plan:
        """As long as can be, by the first who can: the same plan for the same text, whatever was measured."""
        payer = next((arm for arm in self.arms if not arm.is_free), None)
        offers = free
        if payer is not None:
            own = (self._costly_offer(payer, limit) for limit in limits)
            offers = [_first(held, new) for held, new in zip(free, own, strict=True)]
        width = max((len(offer.rates) for offer in offers if offer is not None), default=0)
        return Plan(offers, width, payer, speed=0.0)

    def _best(self, offers: list[Offer | None], payer: Arm | None, state: DecodeState) -> Plan:
        """How far to draft, given who drafts."""
        survival = [offer.survival for offer in offers if offer is not None]
        unfinished = sum(not state.finished[row] for row in state.rows)
        tokens = expected_tokens(survival, unfinished, self.in_lockstep)
        name = FREE if payer is None else payer.name
        seconds = self.experience.seconds(name, len(state.rows))
        width, speed = best_width(tokens, seconds)
        if payer is not None and not self.experience.is_measured(name, len(state.rows)):
            width = min(width, _FIRST_WIDTH)
        return Plan(offers, width, payer, speed)

    def _with_trials(self, plans: list[Plan], chosen: Plan) -> Plan:
        """The chosen plan, or one that has not been chosen for so long that it is tried again."""
        for plan in plans:
            name = FREE if plan.payer is None else plan.payer.name
            trials = self.experience.trials_of(name)
            could_draft = any(offer is not None for offer in plan.offers)
            if plan is chosen and plan.width > 0:
                trials.was_chosen()
            elif could_draft and trials.is_due():
                return replace(plan, width=_TRIAL_WIDTH)
        return chosen

    def _free_offers(self, state: DecodeState, limits: list[int]) -> list[Offer | None]:
        """The best copy of every row."""
        best: list[Offer | None] = [None] * len(limits)
        for arm in self.arms:
            if isinstance(arm.session, CopySession):
                acceptance = self.experience.acceptance_of(arm.name)
                copies = arm.session.copies(state, [min(limit, arm.longest) for limit in limits])
                offers = [Offer(arm, acceptance.of_confidences(copy.confidences), copy) for copy in copies]
                choose = _first if self.is_fixed else _better
                best = [choose(held, new) for held, new in zip(best, offers, strict=True)]
        return best

    def _costly_offer(self, arm: Arm, limit: int) -> Offer:
        return Offer(arm, self.experience.acceptance_of(arm.name).of_positions(min(limit, arm.longest)))

    # --- the draft ----------------------------------------------------------------------------------------

    def _drafted(self, plan: Plan, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        copies = [
            [] if offer is None or offer.copy is None else offer.copy.tokens[: plan.width] for offer in plan.offers
        ]
        names = [None if offer is None else offer.arm.name for offer in plan.offers]
        draft = Draft.of_copies(copies, state.device)
        if plan.payer is not None and plan.width > 0:
            own = [
                min(limit, plan.width) if offer is not None and offer.arm is plan.payer else 0
                for limit, offer in zip(limits, plan.offers, strict=True)
            ]
            draft = _merged(draft, plan.payer.session.propose(state, own, noise))
        return replace(draft, arms=names)

    # --- after the round ----------------------------------------------------------------------------------

    def _learn(self, current: _Round, outcome: Outcome) -> None:
        """Adds the outcome to the experience."""
        plan = current.plan
        if current.started is not None:
            name = FREE if plan.payer is None or plan.width == 0 else plan.payer.name
            seconds = time.perf_counter() - current.started
            self.experience.record_seconds(name, len(plan.offers), current.width, seconds)
        judged = zip(plan.offers, outcome.drafted, outcome.accepted, outcome.emitted, strict=True)
        for offer, drafted, accepted, emitted in judged:
            if offer is None:
                continue
            if offer.arm.session.may_find_nothing:
                drafted = min(plan.width, len(offer.rates))  # as promised: what was not found counts as refused
            for rate in offer.rates[:accepted]:
                rate.add(True)
            if accepted < drafted and emitted > accepted:  # refused, not cut off
                offer.rates[accepted].add(False)


def _first(held: Offer | None, new: Offer) -> Offer | None:
    """Of two offers, the first that has any tokens."""
    return held or (new if new.rates else None)


def _better(held: Offer | None, new: Offer) -> Offer | None:
    """Of two offers, the one that is expected to yield more; the one held among equals."""
    if not new.rates:
        return held
    return new if held is None or sum(new.survival) > sum(held.survival) else held


def _merged(copied: Draft, drafted: Draft) -> Draft:
    """One draft from two, each of which has tokens in rows of its own."""
    width = max(copied.width, drafted.width)
    copied, drafted = copied.widened(width), drafted.widened(width)
    is_copied = copied.lengths > 0
    return Draft(
        tokens=torch.where(is_copied[:, None], copied.tokens, drafted.tokens),
        lengths=torch.where(is_copied, copied.lengths, drafted.lengths),
        probs=drafted.probs,
        drawn=None if drafted.probs is None else ~is_copied,
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
        name = drafter.name if drafter.name not in [arm.name for arm in arms] else f"{drafter.name}-{len(arms) + 1}"
        session = drafter.start(replace(context.for_arm(own), is_alone=len(drafters) == 1), state)
        arms.append(Arm(name, session, own.num_draft_tokens or drafter.default_num_draft_tokens))
    return ScheduledSession(arms, experience, context.in_lockstep, is_fixed=not context.is_scheduled)
