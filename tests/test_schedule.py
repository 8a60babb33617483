"""How long to draft: the estimates, the decision, and what both make of rounds whose seconds are known."""

from __future__ import annotations

import itertools
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from hf_specdec.accept import Draft
from hf_specdec.drafters import scheduled as scheduling
from hf_specdec.drafters.base import Copy, CopySession, DraftSession
from hf_specdec.drafters.scheduled import Arm, Offer, ScheduledSession
from hf_specdec.schedule import (
    FREE,
    PLAIN,
    Acceptance,
    Experience,
    Keep,
    Load,
    Rate,
    RoundSeconds,
    Trials,
    best_width,
    copy_confidence,
    expected_tokens,
    row_weights,
)
from hf_specdec.state import DecodeState, Outcome

# --- what is learned --------------------------------------------------------------------------------------


def test_confidence_is_a_probability_that_grows_with_votes_and_depth():
    for voters, depth in itertools.product(range(1, 30), range(1, 30)):
        values = [copy_confidence(votes, voters, depth) for votes in range(1, voters + 1)]
        assert all(0 < value < 1 for value in values)
        assert values == sorted(set(values))
        assert copy_confidence(voters, voters, depth + 1) > values[-1]
        assert copy_confidence(voters + 1, voters + 1, depth) > values[-1]


def test_a_rate_moves_from_its_guess_to_its_outcomes():
    rate = Rate(0.7, weight=2)
    assert rate.value == pytest.approx(0.7)
    rate.add(True)
    assert rate.value == pytest.approx((0.7 * 2 + 1) / 3)
    for hit in [True, False, False, False] * 50:
        rate.add(hit)
    assert rate.value == pytest.approx(0.25, abs=0.02)


def test_a_rate_follows_a_change_however_long_it_was_otherwise():
    rate = Rate(0.9, weight=8)
    for _ in range(5000):
        rate.add(False)
    assert rate.value < 1e-6  # the guess is forgotten
    for _ in range(32):
        rate.add(True)
    assert rate.value > 0.6


def test_rates_are_shared_by_confidence_and_told_apart_by_position():
    acceptance = Acceptance()
    low, high, top, same = acceptance.of_confidences([0.0, 0.97, 1.0, 0.02])
    assert low is same and high is top and low is not high
    assert (low.value, high.value) == pytest.approx((0.025, 0.975))
    first = acceptance.of_positions(2)
    assert acceptance.of_positions(4)[:2] == first
    assert len(set(map(id, acceptance.of_positions(4)))) == 4
    assert acceptance.of_positions(0) == []


def measured(*points, slope=0.1):
    line = RoundSeconds(slope)
    for width, seconds in points:
        line.add(width, seconds)
    return line


def test_seconds_lie_on_the_line_through_what_was_measured():
    line = measured((1, 1.1), (3, 1.3), (8, 1.8))
    assert [line.at(width, plain=1.0) for width in (1, 5, 20)] == pytest.approx([1.1, 1.5, 3.0])


def test_without_two_widths_the_slope_is_a_guess():
    assert RoundSeconds(0.1).at(5, plain=2.0) == pytest.approx(3.0)
    line = measured((5, 3.0), slope=0.1)
    assert [line.at(width, plain=0.0) for width in (0, 5, 10)] == pytest.approx([2.0, 3.0, 4.0])


@pytest.mark.parametrize("points", [[(1, 2.0), (8, 1.0)], [(2, 1.0), (3, 40.0), (3, 40.0)], [(10, 0.1), (20, 0.5)]])
def test_seconds_never_fall_with_the_width_and_are_never_below_a_plain_round(points):
    line = measured(*points)
    for plain in (0.0, 0.7):
        values = [line.at(width, plain) for width in range(30)]
        assert values == sorted(values)
        assert values[0] >= plain and values[0] > 0


def test_the_newest_measurements_count_and_single_outliers_do_not():
    line = measured((2, 9.0), *[(2, 1.2)] * 9, slope=0.1)
    assert line.at(2, plain=0.0) == pytest.approx(1.2)
    line.add(6, 60.0)  # a compilation
    assert line.at(6, plain=0.0) == pytest.approx(1.6)
    line.add(6, 1.7)
    assert line.at(6, plain=0.0) < 1.8


def test_pauses_of_the_machine_are_believed_step_by_step():
    line = measured(*[(width, 1 + 0.1 * width) for width in (0, 1, 2) for _ in range(4)], slope=0.1)
    line.add(4, 9.0)  # a new width: once does not count
    assert line.at(4, plain=0.0) == pytest.approx(1.4)
    for _ in range(2):
        line.add(4, 9.0)
        assert line.at(4, plain=0.0) < 3
    for _ in range(12):
        line.add(4, 9.0)
    assert line.at(4, plain=0.0) > 4


def test_a_compilation_in_the_very_first_round_is_outvoted_by_the_second():
    assert measured((4, 50.0), (4, 1.0)).at(4, plain=0.5) == pytest.approx(1.0)
    assert measured((4, 50.0), (1, 1.0)).at(1, plain=0.5) == pytest.approx(1.0)


def test_the_pause_doubles_with_every_trial_and_starts_over_when_it_pays():
    trials = Trials()
    due = [number for number in range(1, 497) if trials.is_due()]
    assert [b - a for a, b in itertools.pairwise([0, *due])] == [16, 32, 64, 128, 128, 128]
    trials.paid()
    assert [number for number in range(1, 50) if trials.is_due()] == [16, 48]


def test_seconds_of_a_round_before_and_after_measuring():
    experience = Experience()
    seconds = experience.seconds("small", Load(1), longest=5)
    assert [seconds(0), seconds(5), seconds(7)] == pytest.approx([1.0, 1.5, 1.54])  # in plain rounds
    experience.record_seconds(FREE, Load(1), 0, 0.2)
    assert experience.seconds("small", Load(1), 5)(5) == pytest.approx(0.3)
    experience.record_seconds(PLAIN, Load(1), 0, 0.1)
    experience.record_seconds("small", Load(1), 2, 0.3)
    experience.record_seconds("small", Load(1), 5, 0.6)
    seconds = experience.seconds("small", Load(1), longest=5)
    assert [seconds(0), seconds(3), seconds(5)] == pytest.approx([0.1, 0.4, 0.6])
    assert seconds(30) == pytest.approx(0.6 + 25 * 0.2 * 0.02)  # behind its own drafts, what copies cost
    assert experience.is_measured("small", Load(1)) and not experience.is_measured("small", Load(2))
    assert experience.seconds("small", Load(2), 5)(0) == 1.0  # of two rows nothing is known


def test_what_was_measured_under_the_nearest_load_stands_in():
    experience = Experience()
    assert Load.of(8, 100) == Load.of(8, 105) != Load.of(8, 150)
    for size, plain in ((10, 1.0), (20, 4.0)):
        experience.record_seconds(PLAIN, Load(8, size), 0, plain)
        experience.record_seconds(FREE, Load(8, size), 1, 1.5 * plain)
        experience.record_seconds(FREE, Load(8, size), 5, 2 * plain)
    for size, plain in ((10, 1.0), (14, 1.0), (16, 4.0), (99, 4.0)):
        seconds = experience.seconds(FREE, Load(8, size), longest=5)
        assert [seconds(0) / plain, seconds(1) / plain, seconds(5) / plain] == pytest.approx([1.0, 1.5, 2.0])
    assert experience.seconds(FREE, Load(7, 10), longest=5)(0) == 1.0  # of seven rows nothing is known


def test_a_clock_that_stands_still_measures_nothing():
    experience = Experience()
    experience.record_seconds(PLAIN, Load(1), 0, 0.0)
    assert not experience.is_measured(PLAIN, Load(1))


def test_several_threads_may_measure_and_ask():
    experience, errors = Experience(), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(seed):
        try:
            for number in range(300):
                experience.record_seconds("x", Load(1), 4 * number + seed, 1.0 + number % 7)
                assert experience.seconds("x", Load(1), 5)(3) > 0
        except Exception as error:  # reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors


# --- what is decided --------------------------------------------------------------------------------------


def enumerated_tokens(chances, weights, width, in_lockstep):
    """The slow twin: every way in which drafted tokens can stay or not. `chances`: conditional, one list a row."""
    total = 0.0
    drafts = [row[:width] for row in chances]
    for flips in itertools.product(*(itertools.product([True, False], repeat=len(row)) for row in drafts)):
        chance, kept = 1.0, []
        for row, flip in zip(drafts, flips, strict=True):
            for rate, stays in zip(row, flip, strict=True):
                chance *= rate if stays else 1 - rate
            kept.append(next((place for place, stays in enumerate(flip) if not stays), len(flip)))
        kept = [min(kept, default=0)] * len(kept) if in_lockstep else kept
        total += chance * sum(weight * (count + 1) for weight, count in zip(weights, kept, strict=True))
    return total


@pytest.mark.parametrize("in_lockstep", [False, True])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, 1.0, 0.7]])
@pytest.mark.parametrize(
    "chances",
    [[[0.9, 0.5, 0.2]], [[0.9, 0.5, 0.2], [0.3, 0.8]], [[0.7], [0.6, 0.9], [0.5, 0.4, 0.1]], [[0.9, 0.8], [], []],
     [[], []], []],
)  # fmt: skip
def test_expected_tokens_are_those_of_an_enumeration(chances, weights, in_lockstep):
    survival = [list(itertools.accumulate(row, lambda a, b: a * b)) for row in chances]
    weights = weights[: len(chances)]
    tokens = expected_tokens(survival, weights, in_lockstep)
    assert tokens == pytest.approx([enumerated_tokens(chances, weights, n, in_lockstep) for n in range(len(tokens))])
    assert len(tokens) == 1 + (min if in_lockstep else max)(map(len, chances), default=0)


def test_tokens_of_rows_that_are_ahead_lose_their_worth_towards_the_end():
    assert row_weights([5, 5, 5], 60) == [1.0, 1.0, 1.0]
    early, late = row_weights([10, 20, 30], 1000), row_weights([10, 20, 30], 10)
    assert 1.0 == early[0] > early[1] > early[2] > 0.8
    assert late[0] == 1.0 and late[1] < 0.1 and late[2] < 0.01
    assert row_weights([], 1) == [] and row_weights([3, 4], 0)[0] == 1.0


def test_the_best_width_yields_most_tokens_a_second():
    assert best_width([1.0], lambda width: 2.0) == (0, 0.5)
    assert best_width([1.0, 1.9, 2.7, 3.0], lambda width: 1 + 0.5 * width) == (2, pytest.approx(1.35))
    assert best_width([1.0, 1.5, 1.75], lambda width: 1.0) == (2, 1.75)
    assert best_width([1.0, 1.5], lambda width: 1 + 0.5 * width)[0] == 0  # of equals, the shorter
    assert best_width([1.0, 1.04], lambda width: 1.0) == (0, 1.0)  # too little to be sure


def test_who_does_not_earn_his_keep_rests_ever_longer():
    keep = Keep()

    def rounds(num_rounds, gain, cost=0.05):
        asked = []
        for _ in range(num_rounds):
            asked.append(not keep.is_resting())
            if asked[-1]:
                keep.asked(gain, cost)
        return "".join(".x"[was_asked] for was_asked in asked)

    assert rounds(32, gain=0.0) == 32 * "x"  # the first verdict waits: memories begin empty
    assert rounds(28, gain=0.0) == 8 * "." + 4 * "x" + 16 * "."
    assert rounds(200, gain=0.0).startswith(4 * "x" + 32 * "." + 4 * "x" + 64 * "." + 4 * "x" + 64 * "." + 4 * "x")
    while keep.is_resting():
        pass
    assert rounds(40, gain=0.5) == 40 * "x"
    after_a_good_time = rounds(200, gain=0.0)  # what was gained is remembered for a while, and rests are short again
    assert after_a_good_time.startswith(40 * "x") and ".." in after_a_good_time
    assert after_a_good_time.lstrip("x").startswith(8 * "." + 4 * "x" + 16 * ".")


def test_small_gains_keep_whoever_costs_less():
    keep = Keep()
    for round_number in range(100):
        assert not keep.is_resting()
        keep.asked(gain=0.3 * (round_number % 5 == 0), cost=0.02)
    assert keep.gain == pytest.approx(0.06, abs=0.02) and keep.cost == pytest.approx(0.02)


# --- sessions with a clock of ours ------------------------------------------------------------------------

RIGHT, WRONG = 1, 2
SPAN = 5


class Model(DraftSession):
    """Drafts right tokens while `is_right(round)`; every token takes `cost` plain rounds."""

    def __init__(self, world, cost, is_right):
        self.world, self.cost, self.is_right = world, cost, is_right
        self.widths = []  # of every round in which it was asked

    def propose(self, state, limits, noise):
        self.world.now += self.cost * max(limits)
        self.widths.append((self.world.round, list(limits)))
        token = RIGHT if self.is_right(self.world.round) else WRONG
        return Draft.of_copies([[token] * limit for limit in limits], state.device)


class Copies(CopySession):
    """Copies right tokens while `is_right(round)`, in the given rows."""

    def __init__(self, world, is_right, rows=None, confidence=0.9, length=20):
        self.world, self.is_right, self.rows, self.confidence, self.length = world, is_right, rows, confidence, length

    def copies(self, state, limits):
        token = RIGHT if self.is_right(self.world.round) else WRONG
        lengths = [min(limit, self.length) if self.rows is None or row in self.rows else 0
                   for row, limit in zip(state.rows, limits, strict=True)]  # fmt: skip
        return [Copy([token] * length, [self.confidence] * length) for length in lengths]


class World:
    """Rounds of a target that always says `RIGHT`; time is counted in plain rounds, 50 a second."""

    def __init__(self, monkeypatch, num_rows=1, slope=0.02, in_lockstep=False, max_length=sys.maxsize):
        self.now, self.round, self.slope, self.max_length = 0.0, 0, slope, max_length
        self.state = DecodeState(torch.ones(num_rows, 4, dtype=torch.long), None, fill=0)
        self.in_lockstep, self.experience = in_lockstep, Experience()
        self.drafts = []
        monkeypatch.setattr(scheduling, "time", SimpleNamespace(perf_counter=lambda: self.now / 50))

    def start(self, longest=SPAN, **sessions):
        arms = [
            Arm(name, session, 24 if isinstance(session, Copies) else longest) for name, session in sessions.items()
        ]
        self.session = ScheduledSession(
            arms, self.experience, self.in_lockstep, is_fixed=False, num_unread=4, max_length=self.max_length
        )

    def run(self, num_rounds):
        began = self.now
        for _ in range(num_rounds):
            self.step()
        return self.now - began

    def step(self):
        num_rows = len(self.state.rows)
        draft = self.session.propose(self.state, [24] * num_rows, None)
        self.now += 1 + self.slope * draft.width
        drafted = draft.lengths.tolist()
        accepted = [next((place for place in range(length) if draft.tokens[row, place] != RIGHT), length)
                    for row, length in enumerate(drafted)]  # fmt: skip
        appended = [[RIGHT] * (count + 1) for count in accepted]
        self.state.append(appended)
        outcome = Outcome(appended, [len(new) for new in appended], drafted, accepted, [False] * num_rows)
        self.state.commit(outcome)
        self.session.commit(self.state, outcome)
        self.drafts.append((drafted, draft.arms))
        self.round += 1

    @property
    def widths(self):
        return [max(drafted) for drafted, _ in self.drafts]


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def never(number):
    return False


def always(number):
    return True


def test_a_useless_draft_model_costs_little(world):
    """Every drafted token takes as long as a plain round and is refused."""
    world.start(small=Model(world, 1.0, never))
    assert world.run(512) <= 1.05 * 512
    assert max(world.widths[16:]) <= 1


def test_a_useless_draft_model_costs_little_in_a_batch_beside_copies_that_are_wrong(monkeypatch):
    world = World(monkeypatch, num_rows=4)
    world.start(small=Model(world, 1.0, never), copies=Copies(world, never), more=Model(world, 0.5, never))
    assert world.run(512) <= 1.05 * 512


def test_a_measured_model_is_judged_by_plain_rounds_even_if_nothing_else_ever_drafts(world):
    """Rates alone would say: draft. Only a plain round shows that it does not pay."""
    world.start(small=Model(world, 2.0, lambda number: number % 2 == 0))
    world.run(200)
    assert world.widths[3:].count(0) > 180


def test_a_first_round_that_compiles_does_not_decide_for_long(world):
    world.start(small=Model(world, 0.05, always))
    world.step()
    usual, world.slope = world.slope, 50.0
    world.step()
    world.slope = usual
    world.run(300)
    assert world.widths[-100:].count(SPAN) >= 95


def test_a_perfect_cheap_drafter_is_used_at_full_length(world):
    world.start(small=Model(world, 0.05, always))
    world.run(512)
    assert max(world.widths[:2]) == 2  # nobody knows yet what it costs
    assert world.widths[5:].count(SPAN) >= 500
    assert 2 <= world.widths[5:].count(0) <= 8  # plain rounds, to know what they take


def test_wrong_copies_are_dropped_and_tried_again_at_the_pauses_only(world):
    world.start(copies=Copies(world, never))
    assert world.run(512) <= 1.05 * 512
    world.run(512)
    tried = [number for number, width in enumerate(world.widths) if width > 0 and number >= 512]
    assert 3 <= len(tried) <= 6
    assert all(b - a == 128 for a, b in itertools.pairwise(tried[1:]))
    assert max(world.widths[512:]) == 1


@pytest.mark.parametrize("since", [300, 2000])
def test_a_drafter_that_becomes_good_again_is_used_again(world, since):
    session = Model(world, 0.1, lambda number: number < 100 or number >= since)
    world.start(small=session)
    world.run(since)
    assert world.widths[-100:].count(0) > 90
    world.run(512)
    assert world.widths[-100:].count(SPAN) >= 95


def test_copies_that_become_good_again_are_used_within_twenty_rounds(world):
    """Copies that were not used are compared with the text too."""
    world.start(copies=Copies(world, lambda number: number >= 1000))
    world.run(1020)
    assert world.widths[990:1000].count(0) >= 9
    assert max(world.widths[1000:1020]) >= 10


def test_of_two_copying_drafters_the_one_that_is_not_chosen_learns_as_well(world):
    early = Copies(world, lambda number: number < 100 or number >= 400, confidence=0.93)
    late = Copies(world, lambda number: 100 <= number < 400)
    world.start(early=early, late=late)
    world.run(500)
    chosen = [arms[0] for _, arms in world.drafts]
    assert chosen[50:100] == ["early"] * 50
    assert chosen[250:400] == ["late"] * 150
    assert chosen[480:] == ["early"] * 20


def test_a_better_draft_model_is_found_though_its_guess_is_worse(world):
    worse = Model(world, 0.2, lambda number: number % 3 > 0)
    better = Model(world, 0.2, always)
    world.start(worse=worse, better=better)
    world.run(600)
    assert [arms[0] for _, arms in world.drafts[-100:]].count("better") >= 95


def test_a_model_is_tried_though_copies_promise_more_in_every_row(world):
    """Copies that are right half of the time hide a model whose record is bad."""
    small = Model(world, 0.05, lambda number: number >= 300)
    world.start(small=small, copies=Copies(world, lambda number: number % 2 == 0, length=2))
    world.run(900)
    assert [arms[0] for _, arms in world.drafts[-100:]].count("small") >= 90


def test_rows_choose_their_own_drafters(monkeypatch):
    world = World(monkeypatch, num_rows=3)
    world.start(copies=Copies(world, always, rows=[0]), small=Model(world, 0.05, always))
    world.run(200)
    mixed = ([20, SPAN, SPAN], ["copies", "small", "small"])  # a longer copy does not make the model draft on
    assert world.drafts[-100:].count(mixed) >= 95


def test_a_session_is_told_only_of_its_own_drafts(monkeypatch):
    """What others drafted in a row is no token that the model has read there."""
    seen = []

    class Told(Model):
        def commit(self, state, outcome, target_pass=None):
            seen.append((outcome.drafted, outcome.accepted, list(map(len, outcome.appended))))

    world = World(monkeypatch, num_rows=3)
    world.start(copies=Copies(world, always, rows=[0]), small=Told(world, 0.05, always))
    world.run(200)
    assert seen[-100:].count(([0, SPAN, SPAN], [0, SPAN, SPAN], [21, SPAN + 1, SPAN + 1])) >= 95


def test_one_row_of_eight_that_can_draft(monkeypatch):
    cheap, dear = World(monkeypatch, num_rows=8), World(monkeypatch, num_rows=8, slope=0.3)
    for world in (dear, cheap):
        monkeypatch.setattr(scheduling, "time", SimpleNamespace(perf_counter=lambda world=world: world.now / 50))
        world.start(copies=Copies(world, always, rows=[5]))
        world.run(300)
    assert [cheap.drafts[-2][0][row] for row in range(8)] == [0, 0, 0, 0, 0, 20, 0, 0]
    assert dear.widths[-100:].count(0) >= 95  # one token more of nine is not worth 30 %


def test_in_lockstep_one_row_that_cannot_draft_stops_all(monkeypatch):
    world = World(monkeypatch, num_rows=3, in_lockstep=True)
    world.start(copies=Copies(world, always, rows=[0, 2]))
    world.run(100)
    assert max(world.widths) <= 1
    assert world.widths.count(1) <= 3  # trials


def test_reading_up_is_no_measure(world):
    """A model that was idle reads what it missed; that round must not make it look dear for ever."""

    class Reader(Model):
        def propose(self, state, limits, noise):
            missed = self.world.round - (self.widths[-1][0] if self.widths else 0)
            self.world.now += 0.5 * missed if missed > 40 else 0
            return super().propose(state, limits, noise)

    world.start(small=Reader(world, 0.1, lambda number: number < 40 or number >= 900))
    world.run(900)
    assert world.experience.seconds("small", Load.of(1, max(world.state.row_lengths)), SPAN)(1) < 1.5 / 50
    world.run(300)
    assert world.widths[-100:].count(SPAN) >= 95


def test_a_session_that_drafts_nothing_when_asked_loses_trust(world):
    class Silent(Model):
        def propose(self, state, limits, noise):
            super().propose(state, limits, noise)
            return Draft.empty(len(limits))

    world.start(small=Silent(world, 0.1, always))
    world.run(512)
    assert sum(number >= 256 for number, _ in world.session.arms[0].session.widths) <= 6


def test_calls_share_what_they_learned(world):
    world.start(small=Model(world, 1.0, never))
    world.run(300)
    again = Model(world, 1.0, never)
    world.start(small=again)
    assert world.run(100) <= 102


def test_rounds_without_a_proposal_leave_the_session_sound(world):
    """The loop asks nobody where no row has room."""
    world.start(small=Model(world, 0.1, always))
    state = world.state
    for _ in range(3):
        state.append([[RIGHT]])
        outcome = Outcome([[RIGHT]], [1], [0], [0], [False])
        state.commit(outcome)
        world.session.commit(state, outcome)
    world.run(20)
    assert world.widths[-1] == SPAN


def copy_offer(tokens, parents, rates, limit=24):
    arm = Arm("copies", Copies(None, always), 24)
    return Offer(arm, [Rate(rate, 1.0) for rate in rates], tokens, parents, limit)


def test_united_copies_hold_every_path_once_with_its_larger_rate():
    chain = copy_offer([5, 6, 7], None, [0.9, 0.8, 0.7])
    tree = copy_offer([8, 5, 6, 9], [-1, -1, 1, 1], [0.3, 0.95, 0.2, 0.4])
    both = chain.united(tree)
    paths = {}
    for place, (token, parent) in enumerate(zip(both.copied, both.parents, strict=True)):
        paths[place] = (*paths.get(parent, ()), token)
    rates = {path: both.rates[place].value for place, path in paths.items()}
    expected = {(5,): 0.95, (5, 6): 0.8, (5, 6, 7): 0.7, (8,): 0.3, (5, 9): 0.4}
    assert rates == pytest.approx(expected) and len(rates) == len(both.copied)
    assert both.survival == sorted(both.survival, reverse=True)
    best = both.best(3)
    assert sorted(best.copied) == [5, 6, 7] and all(parent < place for place, parent in enumerate(best.parents))


def test_united_copies_are_no_longer_than_the_row_may_draft():
    chain, tree = copy_offer([5, 6, 7], None, [0.9, 0.8, 0.7], 3), copy_offer([8, 9], [-1, -1], [0.3, 0.75], 2)
    both = chain.united(tree)
    assert (both.copied, both.parents) == ([5, 6, 9], [-1, 0, -1])


def test_a_tree_learns_from_the_text_only_where_its_tokens_were_asked():
    tree = copy_offer([8, 5, 6, 9, 4], [-1, -1, 1, 1, 0], [0.5] * 5)
    tree.learn_text([5, 9, 1])
    values = [rate.value for rate in tree.rates]
    assert values[1] > 0.5 and values[3] > 0.5 and values[0] < 0.5 and values[2] < 0.5 and values[4] == 0.5


def test_rows_without_room_get_no_draft(monkeypatch):
    world = World(monkeypatch, num_rows=3)
    world.start(copies=Copies(world, always, rows=[0, 1]), small=Model(world, 0.05, always))
    world.run(50)
    for limits in ([0, 3, 0], [0, 0, 2], [1, 0, 0]):
        draft = world.session.propose(world.state, limits, None)
        assert all(n <= limit for n, limit in zip(draft.lengths.tolist(), limits, strict=True))
        outcome = Outcome([[RIGHT]] * 3, [1] * 3, draft.lengths.tolist(), [0] * 3, [False] * 3)
        world.state.append(outcome.appended)
        world.state.commit(outcome)
        world.session.commit(world.state, outcome)
