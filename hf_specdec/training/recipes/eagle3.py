"""EAGLE-3 heads (arXiv 2503.01840), trained as they draft: on their own states.

A chain begins behind every answer token. At step 0 the head reads the target's states; at every later step it reads
the state it has just made, at the next position, with the text's next token. So a query at step i sees the rows of
step 0 up to the beginning of its chain, and the chain's own rows of steps 1 to i, as in drafting. Prompts are only
read: of their rows nothing is needed but keys and values.

R are the rows of all texts of a batch one behind the other, C their chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.heads import EagleHead
from hf_specdec.heads.eagle import rotated
from hf_specdec.training.features import Text
from hf_specdec.training.losses import cross_entropy, mean_rows
from hf_specdec.training.recipes.base import Losses
from hf_specdec.training.recipes.heads import HeadRecipe


@dataclass(frozen=True)
class Rows:
    """Texts one behind the other.

    Attributes:
        hidden: combined states of all rows, shape (R, H).
        tokens: the token behind every row, shape (R,).
        positions: of the rows, shape (R,).
        chains: the rows at which chains begin, shape (C,).
        num_rows: of every text.
        num_chains: of every text.
        ahead: the tokens each chain reads and predicts, shape (C, depth + 1); at the text's end the last is repeated.
        is_text: whether what a chain predicts at a step is in its text, shape (C, depth).
        laws: where the target's law for that prediction stands among `last`, shape (C, depth).
        last: the target's final states of all texts, shape (S, T).
    """

    hidden: Tensor
    tokens: Tensor
    positions: Tensor
    chains: Tensor
    num_rows: list[int]
    num_chains: list[int]
    ahead: Tensor
    is_text: Tensor
    laws: Tensor
    last: Tensor


class Eagle3(HeadRecipe):
    """Training-time test: `depth` steps, their losses weighted by powers of `decay`."""

    name = "eagle3"

    def losses(self, texts: Sequence[Text], seed: int = 0) -> Losses:
        rows = self.rows(texts)
        means = mean_rows(rows.last, self.output)
        total, hits, seen = rows.hidden.new_zeros(()), [], []
        for step, states in enumerate(self.steps(rows)):
            wanted = self.wanted(rows, step)
            labels = self.own_ids[rows.ahead[wanted, step + 1]]
            expected = means[rows.laws[wanted, step]]
            losses, is_best = cross_entropy(self.normed(states[wanted]), self.output, expected, labels)
            total = total + self.options.decay**step * losses.sum()
            hits.append(int(is_best.sum()))
            seen.append(len(labels))
        return Losses(total, seen[0], tuple(hits), tuple(seen))

    @torch.no_grad()
    def agreement(self, texts: Sequence[Text]) -> list[Tensor]:
        rows = self.rows(texts)
        found = []
        for step, states in enumerate(self.steps(rows)):
            best = self.head.to_target(self.head.logits(states).argmax(dim=-1))
            found.append((best == rows.ahead[:, step + 1]) & rows.is_text[:, step])
        return list(torch.stack(found, dim=1).split(rows.num_chains))

    def wanted(self, rows: Rows, step: int) -> Tensor:
        """Chains that learn at a step: those whose next token is in their text and in the head's vocabulary."""
        return (rows.is_text[:, step] & (self.own_ids[rows.ahead[:, step + 1]] >= 0)).nonzero()[:, 0]

    def rows(self, texts: Sequence[Text]) -> Rows:
        """Lays texts one behind the other; those whose answers are too short to predict anything have no rows."""
        head, device = self.head, self.head.device
        starts = [text.prompt_length - 1 for text in texts]
        num_rows = [max(0, len(text.tokens) - 2) for text in texts]
        num_chains = [max(0, rows - start) for rows, start in zip(num_rows, starts, strict=True)]
        taps = torch.cat([text.taps[:rows] for text, rows in zip(texts, num_rows, strict=True)])
        tokens = torch.cat([text.tokens[1 : rows + 1] for text, rows in zip(texts, num_rows, strict=True)])
        positions = torch.cat([torch.arange(rows) for rows in num_rows])
        begins, ahead, is_text, laws = [], [], [], []
        row_offset = law_offset = 0
        for text, start, chains, rows in zip(texts, starts, num_chains, num_rows, strict=True):
            begin = torch.arange(start, start + chains)
            begins.append(begin + row_offset)
            behind = begin[:, None] + torch.arange(1, self.depth + 2)  # (A, depth + 1)
            ahead.append(text.tokens[behind.clamp(max=len(text.tokens) - 1)])
            is_text.append(behind[:, 1:] < len(text.tokens))
            # What scores token n stands in row n - prompt_length of `last`.
            laws.append((behind[:, 1:] - text.prompt_length).clamp(max=len(text.last) - 1) + law_offset)
            row_offset, law_offset = row_offset + rows, law_offset + len(text.last)
        return Rows(
            hidden=head.combine(taps.to(device, head.dtype)),
            tokens=tokens.to(device),
            positions=positions.to(device),
            chains=torch.cat(begins).to(device),
            num_rows=num_rows,
            num_chains=num_chains,
            ahead=torch.cat(ahead).to(device),
            is_text=torch.cat(is_text).to(device),
            laws=torch.cat(laws).to(device),
            last=torch.cat([text.last for text in texts]).to(device),
        )

    def steps(self, rows: Rows) -> Any:
        """States of all chains, shape (C, H), step by step."""
        trace = Trace(self.head, rows)
        hidden, tokens = rows.hidden, rows.tokens
        for step in range(self.depth):
            states = trace.read(tokens, hidden, step)
            hidden, tokens = self.head.feedback(states), rows.ahead[:, step + 1]
            yield states


class Trace:
    """A head's only layer over all chains at once.

    Args:
        head: with one layer that reads tokens.
        rows: what it reads at step 0.
    """

    def __init__(self, head: EagleHead, rows: Rows):
        self.head, self.rows = head, rows
        self.layer: Any = head.layers[0]
        self.attention: Any = self.layer.self_attn
        self.keys: list[tuple[Tensor, ...]] = []  # by step; of step 0 all rows, of others the chains
        self.values: list[tuple[Tensor, ...]] = []
        self.barred = [  # what no query of step 0 may see: rows behind the beginning of its chain
            torch.ones(chains, count, dtype=torch.bool, device=head.device).triu(count - chains + 1)
            for chains, count in zip(rows.num_chains, rows.num_rows, strict=True)
        ]

    def read(self, tokens: Tensor, hidden: Tensor, step: int) -> Tensor:
        """States of all chains at a step, shape (C, H).

        Args:
            tokens: of all rows at step 0, then of all chains.
            hidden: likewise, shape (R, H) or (C, H).
            step: the steps before have been read.
        """
        rows, layer = self.rows, self.layer
        embeds = self.head.embed(tokens)
        normed = layer.hidden_norm(hidden)
        residual = normed if layer.norm_before_residual else hidden
        embeds = embeds if layer.input_layernorm is None else layer.input_layernorm(embeds)
        source = torch.cat([embeds.to(normed), normed], dim=-1)
        positions = rows.positions if step == 0 else rows.positions[rows.chains] + step
        rotation = self._rotation(positions, residual.dtype)
        sizes = rows.num_rows if step == 0 else rows.num_chains
        self.keys.append(self._heads(self.attention.k_proj, self.attention.k_norm, source, rotation).split(sizes, 1))
        self.values.append(self._heads(self.attention.v_proj, None, source, None).split(sizes, 1))
        if step == 0:
            source, residual = source[rows.chains], residual[rows.chains]
            rotation = self._rotation(rows.positions[rows.chains], residual.dtype)
        queries = self._heads(self.attention.q_proj, self.attention.q_norm, source, rotation)
        attended = [self._attended(query, text) for text, query in enumerate(queries.split(rows.num_chains, 1))]
        states = residual + self.attention.o_proj(torch.cat(attended))
        return states + layer.mlp(layer.post_attention_layernorm(states))

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.head.rotary(positions[None], dtype)
        return cos[0], sin[0]

    def _heads(self, projection: Any, norm: Any, source: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """(N, source) -> (heads, N, head_dim)."""
        heads = projection(source).unflatten(-1, (-1, self.attention.head_dim))
        heads = (heads if norm is None else norm(heads)).transpose(0, 1)
        return heads if rotation is None else rotated(heads, rotation)

    def _attended(self, queries: Tensor, text: int) -> Tensor:
        """What one text's chains (heads, A, d) take from the rows they see, shape (A, heads * d)."""
        keys, values = [step[text] for step in self.keys], [step[text] for step in self.values]
        groups, count = len(keys[0]), queries.shape[1]
        if count == 0:
            return queries.transpose(0, 1).flatten(1)
        grouped = queries.unflatten(0, (groups, -1)) * self.attention.head_dim**-0.5  # (groups, G, A, d)
        before = grouped.flatten(1, 2) @ keys[0].transpose(1, 2)
        before = before.unflatten(1, (-1, count)).masked_fill(self.barred[text], -torch.inf)
        own = [(grouped * key[:, None]).sum(dim=-1, keepdim=True) for key in keys[1:]]
        weights = torch.cat([before, *own], dim=-1).softmax(dim=-1).to(queries)
        of_rows, *of_own = weights.split([keys[0].shape[1], *[1] * len(own)], dim=-1)
        taken = (of_rows.flatten(1, 2) @ values[0]).unflatten(1, (-1, count))
        for share, value in zip(of_own, values[1:], strict=True):
            taken = taken + share * value[:, None]
        return taken.flatten(0, 1).transpose(0, 1).flatten(1)
