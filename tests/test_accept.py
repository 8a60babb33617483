"""The acceptance rules emit exactly the target's law: proven by enumeration in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specdec import accept
from hf_specdec.accept import Draft
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState
from tests.reference import joint_law, rule_law

EXACT = 1e-12


def random_logits(seed: int, vocab: int, scale: float = 1.5):
    """A random function prefix -> logits."""
    table: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(prefix):
        if prefix not in table:
            key = seed * 7919 + sum((t + 1) * 31**i for i, t in enumerate(prefix)) + 1000 * len(prefix)
            generator = torch.Generator().manual_seed(key)
            table[prefix] = torch.randn(vocab, generator=generator, dtype=torch.float64) * scale
        return table[prefix]

    return logits


def law_of(logits, processors=(), prompt=(0,)):
    """prefix -> law after processors, each called as plain `generate` calls it."""

    def law(prefix):
        ids = torch.tensor([[*prompt, *prefix]])
        return LogitsProcessorList(processors)(ids, logits(prefix)[None].clone())[0].softmax(-1)

    return law


PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top-k": [TopKLogitsWarper(2)],
    "top-p": [TopPLogitsWarper(0.7)],
    "min-p": [MinPLogitsWarper(0.3)],
    "repetition": [RepetitionPenaltyLogitsProcessor(1.7)],
    "all": [
        RepetitionPenaltyLogitsProcessor(1.4),
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(3),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.05),
    ],
}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("seed", range(3))
def test_sampled_drafts_leave_the_law_exact(rule, processors, seed):
    target = law_of(random_logits(seed, 3), PROCESSORS[processors])
    drafter = law_of(random_logits(seed + 100, 3), PROCESSORS[processors])
    emitted = rule_law(rule, target, drafter, drafter, num_drafted=3, vocab=3)
    assert (emitted - joint_law(target, 4, 3)).abs().max() <= EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("vocab", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_larger_vocabularies(rule, vocab):
    target, drafter = law_of(random_logits(1, vocab)), law_of(random_logits(2, vocab))
    emitted = rule_law(rule, target, drafter, drafter, num_drafted=2, vocab=vocab)
    assert (emitted - joint_law(target, 3, vocab)).abs().max() <= EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("processors", PROCESSORS)
def test_point_mass_drafts_leave_the_law_exact(rule, processors):
    target = law_of(random_logits(5, 4), PROCESSORS[processors])
    greedy = random_logits(6, 4)

    def point_mass(prefix):
        return torch.nn.functional.one_hot(greedy(prefix).argmax(), 4).double()

    emitted = rule_law(rule, target, point_mass, None, num_drafted=3, vocab=4)
    assert (emitted - joint_law(target, 4, 4)).abs().max() <= EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_any_drafted_tokens_may_be_reported_as_point_masses(rule):
    target, drafter = law_of(random_logits(7, 3)), law_of(random_logits(8, 3))
    emitted = rule_law(rule, target, drafter, None, num_drafted=3, vocab=3)
    assert (emitted - joint_law(target, 4, 3)).abs().max() <= EXACT


@pytest.mark.parametrize("seed", range(5))
def test_block_verification_never_accepts_fewer(seed):
    target, drafter = law_of(random_logits(seed, 3)), law_of(random_logits(seed + 50, 3))
    accepted = {rule: _expected_accepted(rule, target, drafter, 3, 3) for rule in ("token", "block")}
    assert accepted["block"] >= accepted["token"] - EXACT
    assert seed or accepted["block"] > accepted["token"] + 0.01


def _expected_accepted(rule, target, drafter, num_drafted, vocab):
    from tests.reference import _chance, _law_of_accepted

    drafts = list(itertools.product(range(vocab), repeat=num_drafted))
    p = torch.stack([torch.stack([target(x[:i]) for i in range(num_drafted + 1)]) for x in drafts])
    q = torch.stack([torch.stack([drafter(x[:i]) for i in range(num_drafted)]) for x in drafts])
    draft = Draft(torch.tensor(drafts), torch.full((len(drafts),), num_drafted), q)
    thresholds = (accept.block_rule if rule == "block" else accept.token_rule)(draft, p)
    chance = torch.stack([_chance(drafter, x) for x in drafts])
    law = _law_of_accepted(rule, thresholds.coins_below)
    return float(sum(i * (chance * probability).sum() for i, probability in enumerate(law)))


def test_one_step_has_the_law_of_the_target():
    target, drafter = law_of(random_logits(3, 5))(()), law_of(random_logits(4, 5))(())
    draft = Draft(torch.arange(5)[:, None], torch.ones(5, dtype=torch.long), drafter.expand(5, 1, 5))
    below = accept.token_rule(draft, target.expand(5, 1, 5)).coins_below[:, 0]
    residual = accept.next_token_law(
        draft, target.expand(5, 1, 5), torch.ones(5, 1).double(), torch.zeros(5, dtype=torch.long)
    )
    emitted = drafter * below + (drafter * (1 - below)) @ residual
    assert (emitted - target).abs().max() <= EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rows_of_different_lengths_are_judged_as_alone(rule):
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(4, 4, 6, generator=generator).double().softmax(-1)
    q = torch.randn(4, 3, 6, generator=generator).double().softmax(-1)
    tokens = torch.randint(6, (4, 3), generator=generator)
    coins, uniforms = torch.rand(4, 3, generator=generator).double(), torch.rand(4, 4, generator=generator).double()
    lengths = torch.tensor([3, 0, 1, 2])
    together = accept.sampled(rule, Draft(tokens, lengths, q), p, coins, uniforms)
    for row, n in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        alone = accept.sampled(
            rule,
            Draft(tokens[one, :n], lengths[one], q[one, :n]),
            p[one, : n + 1],
            coins[one, :n],
            uniforms[one, : n + 1],
        )
        assert alone.accepted == together.accepted[row]
        assert alone.next_tokens == together.next_tokens[row]


@pytest.mark.parametrize("processors", ["repetition", "all"])
def test_scores_at_all_positions_equal_scores_prefix_by_prefix(processors):
    vocab, num_drafted, prompt = 4, 3, (2, 1)
    logits = random_logits(9, vocab)
    drafts = list(itertools.product(range(vocab), repeat=num_drafted))
    table = torch.stack([torch.stack([logits(x[:i]) for i in range(num_drafted + 1)]) for x in drafts])
    state = DecodeState(torch.tensor([prompt]).expand(len(drafts), -1), None, fill=0)
    state.write(torch.tensor(drafts))
    scores = Scorer(LogitsProcessorList(PROCESSORS[processors])).at_all_positions(table, state)
    law = law_of(logits, PROCESSORS[processors], prompt)
    wanted = torch.stack([torch.stack([law(x[:i]) for i in range(num_drafted + 1)]) for x in drafts])
    assert torch.equal(scores.softmax(-1), wanted)


class TestNumericalEdges:
    def test_a_coin_of_zero_never_accepts_a_token_without_probability(self):
        p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
        draft = Draft(torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[[0.5, 0.5]]]))
        for rule in ("token", "block"):
            verdict = accept.sampled(rule, draft, p, torch.zeros(1, 1), torch.zeros(1, 2))
            assert (verdict.accepted, verdict.next_tokens) == (0, 1)

    def test_the_largest_coin_still_accepts_what_is_certain(self):
        p = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
        draft = Draft(torch.tensor([[0]]), torch.tensor([1]))
        for rule in ("token", "block"):
            assert accept.sampled(rule, draft, p, torch.full((1, 1), 1 - 2**-24), torch.zeros(1, 2)).accepted == 1

    def test_a_residual_without_mass_falls_back_to_the_target(self):
        law = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
        draft = Draft(torch.tensor([[1]]), torch.tensor([1]), law[:, :1])
        after = accept.next_token_law(draft, law, torch.ones(1, 2), torch.tensor([0]))
        assert torch.equal(after, law[:, 0])

    def test_equal_laws_accept_everything_without_a_zero_division(self):
        law = torch.tensor([[[0.25, 0.75], [0.25, 0.75], [0.25, 0.75]]])
        draft = Draft(torch.tensor([[1, 0]]), torch.tensor([2]), law[:, :2])
        for rule in (accept.token_rule, accept.block_rule):
            assert torch.equal(rule(draft, law).coins_below, torch.ones(1, 2))

    def test_a_token_the_drafter_could_not_draw_is_judged_by_the_target_alone(self):
        p = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
        draft = Draft(torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[[0.0, 1.0]]]))
        assert torch.isfinite(accept.block_rule(draft, p).coins_below).all()

    def test_sampling_never_draws_a_token_without_mass(self):
        law = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
        largest = torch.tensor([1 - 2.0**-52], dtype=torch.float64)
        uniforms = torch.cat([torch.linspace(0, 1, 100_001, dtype=torch.float64)[:-1], largest])
        drawn = accept.sample(law.expand(len(uniforms), -1), uniforms)
        assert set(drawn.tolist()) == {1, 3}
        assert abs((drawn == 1).double().mean() - 0.3) < 2e-5

    @pytest.mark.parametrize("weights", [[0.5, float("nan")], [float("inf"), 1.0], [0.0, 0.0]])
    def test_what_is_no_law_draws_no_token(self, weights):
        drawn = accept.sample(torch.tensor([weights, [0.5, 0.5]]), torch.tensor([0.3, 0.7], dtype=torch.float64))
        assert drawn.tolist() == [accept.NO_LAW, 1]

    def test_the_longest_passing_prefix_wins_in_block_verification(self):
        thresholds = accept.Thresholds(torch.tensor([[0.5, 0.1, 0.5, 0.1]]), torch.ones(1, 5))
        coins = torch.tensor([[0.9, 0.9, 0.2, 0.9]])
        assert accept.accepted_by_blocks(thresholds, coins) == 3
        assert accept.accepted_by_tokens(thresholds, coins) == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_rules_compute_in_the_dtype_they_are_given(self, dtype):
        p = torch.rand(2, 3, 5).softmax(-1).to(dtype)
        draft = Draft(torch.zeros(2, 2, dtype=torch.long), torch.tensor([2, 1]), p[:, :2].clone())
        assert accept.block_rule(draft, p).weights.dtype == dtype
        assert accept.next_token_law(draft, p, torch.ones(2, 3, dtype=dtype), torch.tensor([0, 1])).dtype == dtype


def test_greedy_keeps_the_agreeing_prefix_of_every_row():
    scores = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]]), 5).double()
    draft = Draft(torch.tensor([[1, 2], [1, 4], [1, 2]]), torch.tensor([2, 2, 1]))
    verdict = accept.matched(draft, scores.argmax(-1))
    assert verdict.accepted.tolist() == [2, 1, 1]
    assert verdict.next_tokens.tolist() == [3, 2, 2]


class TestKnownWrongRulesAreRejected:
    """Negative controls: the same enumeration must see what went wrong for others."""

    VISIBLE = 1e-3

    def error(self, drawn, reported, target=None, checked=None):
        target = target or self.target
        emitted = rule_law("token", checked or target, drawn, reported, num_drafted=2, vocab=4)
        return (emitted - joint_law(target, 3, 4)).abs().max()

    @pytest.fixture(autouse=True)
    def laws(self):
        self.processors = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(2)]
        self.target = law_of(random_logits(1, 4), self.processors)
        self.draft_logits = random_logits(2, 4)
        self.drafter = law_of(self.draft_logits, self.processors)

    def test_the_right_report_is_exact(self):
        assert self.error(self.drafter, self.drafter) <= EXACT

    def test_the_law_before_truncation(self):
        assert self.error(self.drafter, law_of(self.draft_logits)) > self.VISIBLE

    def test_another_temperature(self):
        assert self.error(self.drafter, law_of(self.draft_logits, [TemperatureLogitsWarper(2.0)])) > self.VISIBLE

    def test_a_greedy_draft_reported_as_its_softmax(self):
        def greedy(prefix):
            return torch.nn.functional.one_hot(self.draft_logits(prefix).argmax(), 4).double()

        assert self.error(greedy, self.drafter) > self.VISIBLE

    def test_the_target_cut_to_the_draft_vocabulary(self):
        def cut(prefix):
            law = self.target(prefix) * torch.tensor([1.0, 0.0, 1.0, 1.0])
            return law / law.sum()

        assert self.error(self.drafter, self.drafter, checked=cut) > self.VISIBLE

    def test_the_target_without_its_processors(self):
        assert self.error(self.drafter, self.drafter, checked=law_of(random_logits(1, 4))) > self.VISIBLE

    def test_top_k_candidates_tested_with_their_softmax(self):
        def top_one(prefix):
            return torch.nn.functional.one_hot(self.drafter(prefix).argmax(), 4).double()

        assert self.error(top_one, self.drafter) > self.VISIBLE
