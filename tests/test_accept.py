"""The acceptance rules emit exactly the target's law: proven by enumeration in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

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
from hf_specdec.accept import UNSOUND, Draft
from hf_specdec.drafters.base import checked
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


def tree_shapes(most: int):
    """The parents of every tree of up to so many nodes, each after the one it follows."""
    for size in range(1, most + 1):
        yield from itertools.product(*(range(-1, node) for node in range(size)))


def narrow_shapes(most: int, vocab: int):
    """Those whose siblings can differ in so small a vocabulary."""
    return (parents for parents in tree_shapes(most) if max(map(parents.count, parents)) <= vocab)


def labelled(parents: tuple[int, ...], vocab: int, seed: int) -> list[int]:
    """Tokens for a tree, different among siblings."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        free = [token for token in range(vocab) if token not in taken]
        tokens.append(free[int(torch.randint(len(free), (), generator=generator))])
    return tokens


def tree(tokens, parents, padding: int = 0) -> Draft:
    """A tree in a single row."""
    draft = Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]), parents=torch.tensor([list(parents)]))
    return draft.widened(len(tokens) + padding)


def ancestry(parents, node: int) -> list[int]:
    """A node and all it follows, from the root."""
    return [] if node < 0 else [*ancestry(parents, parents[node]), node]


def prefixes_of(tokens, parents) -> list[tuple[int, ...]]:
    """What every position of the pass follows: the text itself first."""
    return [(), *(tuple(tokens[n] for n in ancestry(parents, node)) for node in range(len(parents)))]


def walked(tokens, parents, chosen) -> tuple[list[int], int]:
    """A slow walk down a tree by the target's choice behind every position: the path, and the token behind it."""
    path, node = [], -1
    while True:
        follower = [n for n, p in enumerate(parents) if p == node and tokens[n] == chosen[node + 1]]
        if not follower:
            return path, chosen[node + 1]
        node = follower[0]
        path.append(node)


class TestTrees:
    """Draft trees, against slow walks and by enumeration, in all shapes of up to four nodes."""

    VOCAB = 4

    @pytest.mark.parametrize("padding", [0, 2])
    def test_positions_see_themselves_and_what_they_follow(self, padding):
        for parents in tree_shapes(4):
            draft = tree(labelled(parents, self.VOCAB, 0), parents, padding)
            for node in range(len(parents)):
                seen = draft.seen[0, node + 1].nonzero()[:, 0].tolist()
                assert seen == [0, *(n + 1 for n in ancestry(parents, node))]

    def test_long_chains_and_stars_are_seen_to_the_root(self):
        for size in (1, 2, 3, 7, 8, 9, 31, 32, 33, 60):
            chain = Draft(torch.zeros(1, size).long(), torch.tensor([size]), parents=torch.arange(size)[None] - 1)
            assert torch.equal(chain.seen[0], torch.ones(size + 1, size + 1).tril().bool())

    @pytest.mark.parametrize("padding", [0, 2])
    def test_what_is_unbroken_holds_all_the_way_up(self, padding):
        for parents in tree_shapes(4):
            draft = tree(labelled(parents, self.VOCAB, 0), parents, padding)
            for holds in itertools.product([False, True], repeat=len(parents)):
                given = torch.tensor([[*holds, *[True] * padding]])
                wanted = [all(holds[n] for n in ancestry(parents, node)) for node in range(len(parents))]
                assert draft.unbroken(given)[0, : len(parents)].tolist() == wanted

    @pytest.mark.parametrize("padding", [0, 2])
    def test_the_first_path_takes_the_first_follower_everywhere(self, padding):
        for parents in tree_shapes(4):
            tokens = labelled(parents, self.VOCAB, 1)
            path, node = [], -1
            while node in parents:
                node = parents.index(node)
                path.append(tokens[node])
            chain = tree(tokens, parents, padding).first_path()
            assert chain.parents is None
            assert chain.tokens[0, : int(chain.lengths)].tolist() == path

    @pytest.mark.parametrize("padding", [0, 2])
    def test_the_longest_path_of_the_targets_own_choices_stays(self, padding):
        for parents in narrow_shapes(4, 3):
            tokens = labelled(parents, 3, 2)
            for chosen in itertools.product(range(3), repeat=len(parents) + 1):
                verdict = accept.matched(
                    tree(tokens, parents, padding), torch.tensor([[*chosen, *[tokens[0]] * padding]])
                )
                path, following = walked(tokens, parents, chosen)
                assert verdict.path[0, : int(verdict.accepted)].tolist() == path
                assert verdict.next_tokens.tolist() == [following]

    def test_position_by_position_gives_the_same_path(self):
        for parents in narrow_shapes(4, 3):
            tokens = labelled(parents, 3, 2)
            draft = tree(tokens, parents)
            for chosen in itertools.product(range(3), repeat=len(parents) + 1):
                path, position = [], torch.zeros(1, dtype=torch.long)
                while True:
                    step = accept.one_match(draft, torch.tensor(chosen)[position], position)
                    if not step.accepted:
                        break
                    position = step.position
                    path.append(int(position) - 1)
                assert (path, int(step.tokens)) == walked(tokens, parents, chosen)

    @pytest.mark.parametrize("seed", range(2))
    def test_samples_that_belong_to_places_in_the_text_give_the_targets_law(self, seed):
        """Any tree: one uniform a place in the text, shared by all positions there; exact by integrating over them."""
        vocab = 3
        target = law_of(random_logits(seed, vocab))
        for parents in narrow_shapes(4, vocab):
            tokens = labelled(parents, vocab, seed)
            prefixes = prefixes_of(tokens, parents)
            laws = torch.stack([target(prefix) for prefix in prefixes])
            depths = [len(prefix) for prefix in prefixes]
            # Between two neighbouring sums of any law at a place, no choice there depends on the uniform.
            cells = [_cells(laws[[d == depth for d in depths]]) for depth in range(max(depths) + 1)]
            emitted: dict[tuple[int, ...], float] = {}
            for places in itertools.product(*cells):
                uniforms = torch.tensor([places[depth][0] for depth in depths], dtype=torch.float64)
                verdict = accept.matched(tree(tokens, parents), accept.sample(laws, uniforms)[None])
                kept = verdict.path[0, : int(verdict.accepted)].tolist()
                text = (*(tokens[node] for node in kept), int(verdict.next_tokens))
                mass = torch.tensor([place[1] for place in places], dtype=torch.float64).prod().item()
                emitted[text] = emitted.get(text, 0.0) + mass
            for text, mass in emitted.items():
                wanted = torch.stack([target(text[:i])[token] for i, token in enumerate(text)]).prod()
                assert abs(mass - wanted.item()) < EXACT

    @pytest.mark.parametrize(
        ("tokens", "parents"),
        [([1, 1], [-1, -1]), ([1, 2, 2], [-1, 0, 0]), ([1, 2], [1, -1]), ([1, 2], [0, 0]), ([1], [-2]), ([1], [5])],
    )
    def test_twins_and_parents_that_are_none_are_refused(self, tokens, parents):
        draft = checked(tree(tokens, parents), [4], self.VOCAB)
        assert draft.lengths.tolist() == [UNSOUND]
        assert (draft.parents >= -1).all() and (draft.parents < torch.arange(draft.width)).all()
        assert draft.seen.shape == (1, draft.width + 1, draft.width + 1)
        assert draft.first_path().lengths.tolist() == [UNSOUND]

    def test_sound_trees_pass_whatever_their_padding_holds(self):
        for parents in tree_shapes(4):
            draft = tree(labelled(parents, self.VOCAB, 0), parents, 3)
            draft = replace(draft, parents=torch.where(draft.valid, draft.parents, 9))
            assert checked(draft, [9], self.VOCAB).lengths.tolist() == [len(parents)]

    def test_what_was_drawn_must_be_a_chain(self):
        probs = torch.full((2, 2, 4), 0.25)
        parents = torch.tensor([[-1, -1], [-1, -1]])
        draft = Draft(torch.tensor([[1, 2], [1, 2]]), torch.tensor([2, 2]), probs, parents=parents)
        assert checked(draft, [2, 2], 4).lengths.tolist() == [UNSOUND, UNSOUND]
        mixed = replace(draft, drawn=torch.tensor([True, False]))
        assert checked(mixed, [2, 2], 4).lengths.tolist() == [UNSOUND, 2]


def _cells(laws: torch.Tensor) -> list[tuple[float, float]]:
    """Middles and widths of the intervals between the sums of some laws, on [0, 1)."""
    bounds = torch.cat([torch.zeros(1, dtype=torch.float64), laws.cumsum(dim=1).flatten()]).sort().values
    cells = [((a + b) / 2, b - a) for a, b in itertools.pairwise(bounds.tolist())]
    return [cell for cell in cells if cell[1] > 1e-15]
