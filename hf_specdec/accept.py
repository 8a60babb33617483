"""The acceptance rules: which drafted tokens stay, and which token follows them.

Everything here is a pure function of tensors and computes in the dtype it is given. In the comments
B is the number of rows, N the longest draft of the round and V the size of the target's vocabulary;
p is the target's law after the user's logits processors and q the law the draft was drawn from.

A pass of the target has N + 1 positions: position 0 is the row's last token, position i drafted token i - 1. The scores
at a position are the law behind it. In a chain position i therefore judges drafted token i, and the last one supplies
the token after full acceptance. In a tree a position judges all tokens that follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

# What `sample` returns in place of a token where there is no law to draw from.
NO_LAW = -1
# The length of a draft that broke its contract: no token of it is judged, and the round is refused.
UNSOUND = -1


class Verdict(NamedTuple):
    """The outcome of one round, one entry a row.

    Attributes:
        accepted: number of drafted tokens that stay, shape (B,).
        next_tokens: the target's own token that follows them, shape (B,).
        path: which drafted tokens stay, in order: the first `accepted` entries of every row, shape (B, N).
    """

    accepted: Tensor
    next_tokens: Tensor
    path: Tensor

    @property
    def ends(self) -> Tensor:
        """The position of the pass that the target's own token follows, shape (B,)."""
        return _ends(self.path, self.accepted)

    def where(self, rows: Tensor, other: Verdict) -> Verdict:
        """This verdict in some rows (B,), another one in the rest."""
        return Verdict(
            torch.where(rows, self.accepted, other.accepted),
            torch.where(rows, self.next_tokens, other.next_tokens),
            torch.where(rows[:, None], self.path, other.path),
        )


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one round: a chain of tokens for every row, or a tree of them.

    Attributes:
        tokens: drafted ids, shape (B, N). Entries at or beyond a row's length are padding.
        lengths: number of drafted tokens of every row, shape (B,), each in [0, N].
        parents: in a tree, the drafted token that every one follows, an index smaller than its own, or -1 for the
            row's last token; shape (B, N). Tokens with the same parent must differ. Trees are point masses: in rows
            that `probs` speaks of, every token follows the one before it. `None` for a chain in every row.
        probs: the law every token was drawn from, shape (B, N, V), rows summing to one; `None` when each
            token is the drafter's only proposal (n-gram copies, greedy drafting): a point mass.
        drawn: in a draft of several drafters, the rows that `probs` speaks of, shape (B,); the others are point masses.
            `None` means all rows if there are `probs`.
        arms: which of several drafters drafted for every row, `None` for nobody; only the statistics read it.
        is_read_ahead: whether the target's first layers have read the rows' last tokens and all columns of `tokens`
            while drafting (`CachedModel.read_ahead`), so that the others may go on from there.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    drawn: Tensor | None = None
    arms: list[str | None] | None = None
    parents: Tensor | None = None
    is_read_ahead: bool = False

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str = "cpu") -> Draft:
        """A draft without a single token: the round becomes one plain decoding step."""
        return cls(
            tokens=torch.empty(num_rows, 0, dtype=torch.long, device=device),
            lengths=torch.zeros(num_rows, dtype=torch.long, device=device),
        )

    @classmethod
    def of_copies(
        cls, copies: list[list[int]], device: torch.device, parents: list[list[int] | None] | None = None
    ) -> Draft:
        """A point-mass draft from one token list a row, padded to the longest.

        Args:
            copies: tokens of every row.
            device: where the draft is wanted.
            parents: of every row's tokens; `None`, for all rows or one, if they are chains.
        """
        width = max(map(len, copies))
        draft = cls(
            tokens=_padded(copies, width, 0, device),
            lengths=torch.tensor([len(copy) for copy in copies], device=device),
        )
        if parents is None or all(row is None for row in parents):
            return draft
        rows = [list(range(-1, len(c) - 1)) if p is None else p for p, c in zip(parents, copies, strict=True)]
        rows = [[*row, *range(len(row) - 1, width - 1)] for row in rows]  # padding follows the token before it
        return replace(draft, parents=_padded(rows, width, -1, device))

    @property
    def width(self) -> int:
        """Length of the longest draft, N."""
        return self.tokens.shape[1]

    @property
    def valid(self) -> Tensor:
        """Which entries of `tokens` are drafted tokens, shape (B, N)."""
        return torch.arange(self.width, device=self.tokens.device) < self.lengths[:, None]

    def widened(self, width: int) -> Draft:
        """The same draft with padding up to a width: compiled passes come in few widths."""
        missing = width - self.width
        if missing <= 0:
            return self
        pad = torch.nn.functional.pad
        probs = None if self.probs is None else pad(self.probs, (0, 0, 0, missing))
        widened = replace(self, tokens=pad(self.tokens, (0, missing)), probs=probs, parents=None)
        if self.parents is None:
            return widened
        return replace(widened, parents=torch.cat([self.parents, widened.known_parents()[:, self.width :]], dim=1))

    def known_parents(self) -> Tensor:
        """The parents, of a chain too; shape (B, N)."""
        return _chain_of(self.tokens) - 1 if self.parents is None else self.parents

    def first_path(self) -> Draft:
        """The chain of a tree's first tokens: the first one, the first that follows it, and so on.

        For passes that cannot mask a tree. Waits for the device, so that no column is read in vain.
        """
        if self.parents is None:
            return self
        parents = torch.where(self.valid, self.parents, self.width)
        is_later = torch.ones(self.width, self.width, dtype=torch.bool, device=parents.device).tril(-1)
        is_first = ~((parents[:, :, None] == parents[:, None]) & is_later).any(dim=2) & self.valid
        is_on_path = self.unbroken(is_first)
        path = torch.argsort(~is_on_path, dim=1, stable=True)
        lengths = torch.where(self.lengths < 0, self.lengths, is_on_path.sum(dim=1))
        width = int(is_on_path.sum(dim=1).amax()) if self.width else 0
        probs = None if self.probs is None else self.probs[:, :width]  # of chains, whose tokens stay where they are
        return replace(self, tokens=self.tokens.gather(1, path)[:, :width], lengths=lengths, probs=probs, parents=None)

    def unbroken(self, holds: Tensor) -> Tensor:
        """Of which drafted tokens something holds, and of all that they follow; from (B, N) to (B, N), bool."""
        broken = torch.nn.functional.pad(~holds, (1, 0))  # (B, N + 1); position 0 is the text itself
        return ~(self.seen[:, 1:] & broken[:, None]).any(dim=2)

    @property
    def seen(self) -> Tensor:
        """Which positions of the pass every position sees: itself and all it follows; bool, (B, N + 1, N + 1)."""
        parents = self.known_parents()
        size = self.width + 1
        follows = torch.nn.functional.one_hot(parents + 1, size)  # (B, N, N + 1)
        seen = torch.eye(size, device=parents.device).repeat(len(parents), 1, 1)
        seen[:, 1:] += follows
        for _ in range(max(0, size - 2).bit_length()):  # every product doubles the distance seen
            seen = (seen @ seen).clamp(max=1)
        return seen > 0

    def goes_on_behind(self, positions: Tensor) -> Tensor:
        """Whether any drafted token follows one position of the pass in every row; bool, (B,) to (B,)."""
        return ((self.known_parents() + 1 == positions[:, None]) & self.valid).any(dim=1)

    def at(self, index: int) -> Draft:
        """The draft of one position alone, shape (B, 1): what step-by-step acceptance judges."""
        if index >= self.width:
            return Draft(self.tokens.new_zeros(len(self.tokens), 1), torch.zeros_like(self.lengths))
        here = slice(index, index + 1)
        return Draft(
            tokens=self.tokens[:, here],
            lengths=(self.lengths > index).long(),
            probs=None if self.probs is None else self.probs[:, here],
            drawn=self.drawn,
        )


class Thresholds(NamedTuple):
    """A rule before its coins are thrown; enumerating it gives the rule's exact law.

    Attributes:
        coins_below: drafted token i passes when its coin, uniform on [0, 1), is smaller; shape (B, N).
        weights: factor on the target's law in the residual after i accepted tokens, shape (B, N + 1).
    """

    coins_below: Tensor
    weights: Tensor


def matched(draft: Draft, choices: Tensor) -> Verdict:
    """Keeps the longest prefix of the draft that equals what the target itself chooses.

    With argmaxes as choices this is greedy verification. With samples of the target's law it is exact for any draft
    that does not depend on their noise, since only samples are ever emitted; for a point mass it accepts as often as
    any rule can.

    Args:
        draft: the proposal; its `probs` do not matter.
        choices: the target's token at every position, shape (B, N + 1).
    """
    if draft.parents is not None:
        return _matched_in_tree(draft, choices)
    agrees = (draft.tokens == choices[:, :-1]) & draft.valid
    accepted = _leading(agrees)
    return Verdict(accepted, choices.gather(1, accepted[:, None])[:, 0], _chain_of(draft.tokens))


def _matched_in_tree(draft: Draft, choices: Tensor) -> Verdict:
    """The same in a tree: of tokens with one parent at most one is the target's choice behind it."""
    assert draft.parents is not None
    stays = draft.unbroken((draft.tokens == choices.gather(1, draft.parents + 1)) & draft.valid)
    accepted = stays.sum(dim=1)
    path = torch.argsort(~stays, dim=1, stable=True)  # what is followed comes first
    return Verdict(accepted, choices.gather(1, _ends(path, accepted)[:, None])[:, 0], path)


def _ends(path: Tensor, accepted: Tensor) -> Tensor:
    """The position of the pass behind the first `accepted` (B,) tokens of every path (B, N); shape (B,)."""
    positions = torch.nn.functional.pad(path + 1, (1, 0))  # of the last token and of those that stay
    return positions.gather(1, accepted[:, None])[:, 0]


def token_rule(draft: Draft, target_probs: Tensor) -> Thresholds:
    """Token-level rejection sampling: keep token i with probability min(1, p/q), else draw from (p - q)+.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192), and
    Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (arXiv 2302.01318).

    Args:
        draft: the proposal.
        target_probs: the target's law at every position, shape (B, N + 1, V).
    """
    ratios = _acceptance_ratios(draft, target_probs)
    return Thresholds(ratios.clamp(max=1), torch.ones_like(target_probs[..., 0]))


def block_rule(draft: Draft, target_probs: Tensor) -> Thresholds:
    """Block verification: judges the draft as a whole and never accepts fewer tokens in expectation.

    Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444). With w_i the
    running product of ratios, clipped at one after every factor, and S_i the mass of (w_i p_i - q_i)+,
    prefix i passes with probability S_i / (S_i + 1 - w_i), the whole draft with w_N; the longest passing
    prefix stays.

    Args:
        draft: the proposal.
        target_probs: the target's law at every position, shape (B, N + 1, V).
    """
    ratios = _acceptance_ratios(draft, target_probs)
    weights = _clipped_products(ratios)  # (B, N + 1)
    after = weights[:, 1:]  # weight after drafted tokens 1..N, (B, N)
    excess = _excess_mass(draft, target_probs, weights)[:, 1:]  # S_1 .. S_{N-1}, (B, N - 1)
    inner = after[:, :-1]
    denominator = excess + 1 - inner
    # 0/0 means w = 1 and p = q: nothing speaks against the prefix.
    partial = torch.where(denominator > 0, excess / denominator, torch.ones_like(excess))
    coins_below = torch.cat([partial, after[:, -1:]], dim=1)
    is_last = torch.arange(1, draft.width + 1, device=after.device) == draft.lengths[:, None]
    coins_below = torch.where(is_last, after, coins_below)
    return Thresholds(torch.where(draft.valid, coins_below, 0), weights)


def accepted_by_tokens(thresholds: Thresholds, coins: Tensor) -> Tensor:
    """Number of tokens before the first one whose coin fails, shape (B,)."""
    return _leading(coins < thresholds.coins_below)


def accepted_by_blocks(thresholds: Thresholds, coins: Tensor) -> Tensor:
    """Length of the longest prefix whose own coin passes, shape (B,)."""
    lengths = torch.arange(1, coins.shape[1] + 1, device=coins.device)
    passed = torch.where(coins < thresholds.coins_below, lengths, 0)
    return passed.amax(dim=1) if coins.shape[1] else passed.sum(dim=1)


def next_token_law(draft: Draft, target_probs: Tensor, weights: Tensor, accepted: Tensor) -> Tensor:
    """The law of the token that follows `accepted` drafted tokens, shape (B, V).

    It is the target's own law where the whole draft stayed, and the normalised residual (w p - q)+ where
    a token was refused. A residual without mass (p equals q up to rounding) falls back to p.
    """
    row = torch.arange(len(accepted), device=accepted.device)
    law = target_probs[row, accepted]  # (B, V)
    if draft.width == 0:
        return law
    refused = accepted < draft.lengths
    index = accepted.clamp(max=draft.width - 1)
    scaled = weights[row, accepted][:, None] * law
    if draft.probs is None:
        residual = scaled.scatter(1, draft.tokens[row, index][:, None], 0.0)
    else:
        residual = (scaled - draft.probs[row, index]).clamp(min=0)
    mass = residual.sum(dim=-1, keepdim=True)
    use_residual = refused[:, None] & (mass > 0)
    return torch.where(use_residual, residual / torch.where(mass > 0, mass, torch.ones_like(mass)), law)


def sample(law: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one token a row by inverting the cumulative law.

    Args:
        law: non-negative weights, shape (..., V); they need not sum to one.
        uniforms: numbers on [0, 1), shape (...).

    Returns:
        Token ids, shape (...). A token without mass is never drawn, whatever the number. Where the weights are no
        law (NaN, infinite, all zero) the id is `NO_LAW`.
    """
    blocks = _in_blocks(law)  # (..., n, b): two short searches instead of a running sum over the whole vocabulary
    masses = blocks.sum(dim=-1).to(uniforms.dtype)
    cumulative = masses.cumsum(dim=-1)
    total = cumulative[..., -1:]
    aim = uniforms[..., None] * total
    block = torch.searchsorted(cumulative, aim, right=True).clamp(max=masses.shape[-1] - 1)
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, blocks.shape[-1]))[..., 0, :]
    within = inside.to(uniforms.dtype).cumsum(dim=-1)
    rest = aim - (cumulative - masses).gather(-1, block)
    # Sums in another order round differently: the rest must stay below what the block holds.
    rest = torch.minimum(rest.clamp(min=0), within[..., -1:] * (1 - torch.finfo(uniforms.dtype).eps))
    place = torch.searchsorted(within, rest, right=True).clamp(max=blocks.shape[-1] - 1)
    is_law = torch.isfinite(total) & (total > 0)
    return torch.where(is_law, block * blocks.shape[-1] + place, NO_LAW)[..., 0]


def _in_blocks(law: Tensor, size: int = 256) -> Tensor:
    """(..., V) -> (..., n, size), the last block filled up with zeros."""
    missing = -law.shape[-1] % size
    return (torch.nn.functional.pad(law, (0, missing)) if missing else law).unflatten(-1, (-1, size))


class Rule(NamedTuple):
    """An acceptance rule: its thresholds, and how coins that passed them are counted."""

    thresholds: Callable[[Draft, Tensor], Thresholds]
    accepted: Callable[[Thresholds, Tensor], Tensor]


RULES = {
    "token": Rule(token_rule, accepted_by_tokens),
    "block": Rule(block_rule, accepted_by_blocks),
}


def sampled(rule: str, draft: Draft, target_probs: Tensor, coins: Tensor, uniforms: Tensor) -> Verdict:
    """Applies a rule to all positions at once.

    Args:
        rule: a name in `RULES`.
        draft: the proposal.
        target_probs: the target's law at every position, shape (B, N + 1, V).
        coins: one number on [0, 1) for every drafted token, shape (B, N), independent of the draft.
        uniforms: one for every position, should the token that follows the accepted ones stand there; (B, N + 1).
    """
    thresholds = RULES[rule].thresholds(draft, target_probs)
    accepted = RULES[rule].accepted(thresholds, coins)
    law = next_token_law(draft, target_probs, thresholds.weights, accepted)
    return Verdict(accepted, sample(law, uniforms.gather(1, accepted[:, None])[:, 0]), _chain_of(draft.tokens))


class Step(NamedTuple):
    """The outcome at one position, one entry a row.

    Attributes:
        accepted: 1 where a drafted token stays, else 0, shape (B,).
        tokens: the token that follows the position: drafted, or the target's own; shape (B,).
        position: the pass's position of the drafted token that stays; of no meaning elsewhere. Shape (B,).
    """

    accepted: Tensor
    tokens: Tensor
    position: Tensor

    def where(self, rows: Tensor, other: Step) -> Step:
        """This step in some rows (B,), another one in the rest."""
        return Step(*(torch.where(rows, mine, theirs) for mine, theirs in zip(self, other, strict=True)))


def one_step(draft: Draft, law: Tensor, coins: Tensor, uniforms: Tensor, position: Tensor) -> Step:
    """The token rule at one position: the same law as `sampled("token", ...)`, taken left to right.

    Args:
        draft: one position of a draft, shape (B, 1); rows of length 0 have nothing to judge.
        law: the target's law there, shape (B, V).
        coins: shape (B,).
        uniforms: shape (B,).
        position: the position, shape (B,).

    Returns:
        The outcome; the target's own token comes from the residual, or from the law where nothing was drafted.
    """
    thresholds = token_rule(draft, law[:, None])
    accepted = accepted_by_tokens(thresholds, coins[:, None])
    replacement = sample(next_token_law(draft, law[:, None], thresholds.weights, torch.zeros_like(accepted)), uniforms)
    return Step(accepted, torch.where(accepted > 0, draft.tokens[:, 0], replacement), position + 1)


def one_match(draft: Draft, choices: Tensor, position: Tensor) -> Step:
    """`matched` at one position: a whole draft (B, N), and the target's choices (B,) behind the positions (B,)."""
    before = _chain_of(draft.tokens) if draft.parents is None else draft.parents + 1
    is_match = (before == position[:, None]) & (draft.tokens == choices[:, None]) & draft.valid
    if draft.width == 0:
        return Step(torch.zeros_like(choices), choices, position)
    return Step(is_match.any(dim=1).long(), choices, is_match.long().argmax(dim=1) + 1)


def _chain_of(tokens: Tensor) -> Tensor:
    """0, 1, 2, ... in every row: which tokens of a chain come first; shape (B, N)."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def _padded(rows: list[list[int]], width: int, fill: int, device: torch.device) -> Tensor:
    """Lists of integers as one tensor (B, width)."""
    filled = [row + [fill] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=device).view(len(rows), width)


def _leading(passed: Tensor) -> Tensor:
    """Number of leading true entries of every row: (B, N) -> (B,)."""
    return passed.long().cumprod(dim=1).sum(dim=1)


def _acceptance_ratios(draft: Draft, target_probs: Tensor) -> Tensor:
    """p(x) / q(x) of every drafted token, zero beyond a row's draft, shape (B, N)."""
    tokens = draft.tokens[..., None]
    target = target_probs[:, : draft.width].gather(2, tokens)[..., 0]
    if draft.probs is None:
        ratios = target
    else:
        drawn = draft.probs.gather(2, tokens)[..., 0]
        # A token of q-mass zero cannot have been drawn; should rounding say so, p alone decides.
        ratios = torch.where(drawn > 0, target / torch.where(drawn > 0, drawn, 1), (target > 0).to(target.dtype))
    return torch.where(draft.valid, ratios, 0)


def _clipped_products(ratios: Tensor) -> Tensor:
    """w_0 .. w_N with w_0 = 1 and w_i = min(w_{i-1} r_i, 1): (B, N) -> (B, N + 1)."""
    weight = torch.ones_like(ratios[:, 0]) if ratios.shape[1] else ratios.new_ones(len(ratios))
    weights = [weight]
    for ratio in ratios.unbind(dim=1):
        weight = (weight * ratio).clamp(max=1)
        weights.append(weight)
    return torch.stack(weights, dim=1)


def _excess_mass(draft: Draft, target_probs: Tensor, weights: Tensor) -> Tensor:
    """Mass of (w_i p_i - q_i)+ for i = 0 .. N-1, q_i being the law of drafted token i; shape (B, N)."""
    before = weights[:, :-1]
    law = target_probs[:, :-1]
    if draft.probs is None:
        # The point mass removes exactly its own token, since w p(x) never exceeds one.
        drafted = law.gather(2, draft.tokens[..., None])[..., 0]
        return before * (1 - drafted).clamp(min=0)
    return (before[..., None] * law - draft.probs).clamp(min=0).sum(dim=-1)
