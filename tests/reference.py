"""Slow and obvious twins: the exact law of a few tokens, the exact law of a rule, and the test between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import scipy.stats
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec import accept
from hf_specdec.accept import Draft

# A correct sampler fails one chi-square test with this probability.
FALSE_ALARM = 1e-6


def target_law(model, prompt: Tensor, processors: LogitsProcessorList, num_tokens: int, vocab: int) -> Tensor:
    """P(first tokens) of plain sampling by full enumeration, shape (V,) * num_tokens, in float64."""
    joint = torch.ones((), dtype=torch.float64)
    for length in range(num_tokens):
        prefixes = torch.tensor(list(itertools.product(range(vocab), repeat=length)), dtype=torch.long)
        prefixes = prefixes.view(vocab**length, length)
        ids = torch.cat([prompt.expand(len(prefixes), -1), prefixes], dim=1)
        with torch.no_grad():
            scores = processors(ids, model(ids).logits[:, -1].float())
        joint = joint[..., None] * scores.double().softmax(-1).view(*[vocab] * length, vocab)
    return joint


def assert_follows(samples: Tensor, law: Tensor) -> None:
    """Chi-square test of samples (num_samples, k) against a law of shape (V,) * k.

    Cells expected fewer than five times are merged. A correct sampler fails with probability FALSE_ALARM.
    """
    observed, expected = _cells(samples, law)
    result = scipy.stats.chisquare(observed, expected)
    assert result.pvalue > FALSE_ALARM, f"chi-square p-value {result.pvalue:.2e} with {len(samples)} samples"


def p_value(samples: Tensor, law: Tensor) -> float:
    """The p-value of `assert_follows`."""
    return float(scipy.stats.chisquare(*_cells(samples, law)).pvalue)


def _cells(samples: Tensor, law: Tensor) -> tuple[list[float], list[float]]:
    vocab = law.shape[0]
    flat = torch.zeros(len(samples), dtype=torch.long)
    for column in samples.T:
        flat = flat * vocab + column
    counts = flat.bincount(minlength=law.numel()).double()
    expected = law.flatten() * len(samples)
    assert counts[expected == 0].sum() == 0, "a token without probability was emitted"
    rare = expected < 5
    merged = [counts[rare].sum().item()], [expected[rare].sum().item()]
    if merged[1][0] < 5:  # too rare even together: leave it out and compare the rest among itself
        merged = [], []
    observed, wanted = counts[~rare].tolist() + merged[0], expected[~rare].tolist() + merged[1]
    scale = sum(observed) / sum(wanted)
    return observed, [value * scale for value in wanted]


Conditional = Callable[[tuple[int, ...]], Tensor]


def rule_law(
    rule: str, target: Conditional, drawn: Conditional, reported: Conditional | None, num_drafted: int, vocab: int
) -> Tensor:
    """The exact law of the first num_drafted + 1 tokens that a rule emits, by enumerating every draft.

    Args:
        rule: "token" or "block".
        target: prefix -> p.
        drawn: prefix -> the law drafted tokens are drawn from.
        reported: prefix -> the q the rule is told; `None` reports a point mass.
        num_drafted: N.
        vocab: V.
    """
    drafts = list(itertools.product(range(vocab), repeat=num_drafted))
    tokens = torch.tensor(drafts)
    chance = torch.stack([_chance(drawn, x) for x in drafts])  # P(draft)
    target_probs = torch.stack([torch.stack([target(x[:i]) for i in range(num_drafted + 1)]) for x in drafts])
    probs = None
    if reported is not None:
        probs = torch.stack([torch.stack([reported(x[:i]) for i in range(num_drafted)]) for x in drafts])
    draft = Draft(tokens, torch.full((len(drafts),), num_drafted), probs)
    thresholds = (accept.block_rule if rule == "block" else accept.token_rule)(draft, target_probs)
    law = torch.zeros([vocab] * (num_drafted + 1), dtype=torch.float64)
    completions: dict[tuple[int, ...], Tensor] = {}
    for accepted, probability in enumerate(_law_of_accepted(rule, thresholds.coins_below)):
        count = torch.full((len(drafts),), accepted)
        after = accept.next_token_law(draft, target_probs, thresholds.weights, count)
        for row, x in enumerate(drafts):
            for token in range(vocab):
                prefix = (*x[:accepted], token)
                if prefix not in completions:
                    completions[prefix] = _completion(target, prefix, num_drafted + 1, vocab)
                law[prefix] += chance[row] * probability[row] * after[row, token] * completions[prefix]
    return law


def joint_law(conditional: Conditional, length: int, vocab: int) -> Tensor:
    """The joint law of a sequence from its conditionals, shape (V,) * length."""
    return _completion(conditional, (), length, vocab)


def _law_of_accepted(rule: str, coins_below: Tensor) -> list[Tensor]:
    """P(accepted = i) for i = 0..N, one tensor (B,) each."""
    num_drafted = coins_below.shape[1]
    if rule == "token":
        so_far = torch.cat([torch.ones_like(coins_below[:, :1]), coins_below.cumprod(1)], dim=1)
        return [so_far[:, i] * (1 - coins_below[:, i]) for i in range(num_drafted)] + [so_far[:, -1]]
    refused_behind = (1 - coins_below).flip(1).cumprod(1).flip(1)  # all of i..N refused
    behind = torch.cat([refused_behind, torch.ones_like(coins_below[:, :1])], dim=1)
    return [behind[:, 0]] + [coins_below[:, i] * behind[:, i + 1] for i in range(num_drafted)]


def _chance(law: Conditional, sequence: tuple[int, ...]) -> Tensor:
    chance = torch.ones((), dtype=torch.float64)
    for i, token in enumerate(sequence):
        chance = chance * law(sequence[:i])[token]
    return chance


def _completion(law: Conditional, prefix: tuple[int, ...], length: int, vocab: int) -> Tensor:
    """P(the tokens behind a prefix, up to `length`), shape (V,) * (length - len(prefix))."""
    if len(prefix) == length:
        return torch.ones((), dtype=torch.float64)
    here = law(prefix)
    return torch.stack([here[t] * _completion(law, (*prefix, t), length, vocab) for t in range(vocab)])
