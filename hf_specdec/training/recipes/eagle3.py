"""EAGLE-3 heads (arXiv 2503.01840), trained as they draft: on their own states.

A chain begins behind every answer token. At step 0 the head reads the target's states; at every later step it reads
the state it has just made, at the next position, with the text's next token. So a query at step i sees the rows of
step 0 up to the beginning of its chain, and the chain's own rows of steps 1 to i, as in drafting. Prompts are only
read: of their rows nothing is needed but keys and values.

R are the rows of all texts of a batch one behind the other, C their chains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.heads import EagleConfig, EagleHead
from hf_specdec.heads.eagle import rotated
from hf_specdec.training.examples import Example
from hf_specdec.training.features import Text
from hf_specdec.training.losses import cross_entropy, mean_rows
from hf_specdec.training.recipes.base import Losses, RecipeOptions
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
    """Training-time test: `depth` steps, the losses of which count by powers of `decay`.

    They count so by drawing: only that share of the chains goes on to the next step. On average gradients are those of
    weighted losses, and later steps cost less.
    """

    name = "eagle3"
    unread = ("drop_rate", "drop_least")

    @classmethod
    def config(
        cls, target: Any, draft_vocab_size: int, options: RecipeOptions, examples: Sequence[Example]
    ) -> EagleConfig:
        if options.num_layers != 1:
            raise ValueError(f"num_layers={options.num_layers}: eagle3 learns one layer; give 1, or train a p-eagle.")
        return super().config(target, draft_vocab_size, options, examples)

    def losses(self, texts: Sequence[Text], seed: int = 0) -> Losses:
        rows = self.rows(texts)
        means = mean_rows(rows.last, self.output)
        total, hits, seen = rows.hidden.new_zeros(()), [], []
        for step, (chains, states) in enumerate(self.steps(rows, torch.Generator().manual_seed(seed))):
            labels = self.own_ids[rows.ahead[chains, step + 1]]
            wanted = (rows.is_text[chains, step] & (labels >= 0)).nonzero()[:, 0]
            expected = means[rows.laws[chains[wanted], step]]
            losses, is_best = cross_entropy(self.normed(states[wanted]), self.output, expected, labels[wanted])
            total = total + losses.sum()
            hits.append(int(is_best.sum()))
            seen.append(len(wanted))
        return Losses(total, seen[0], tuple(hits), tuple(seen))

    @torch.no_grad()
    def agreement(self, texts: Sequence[Text]) -> list[Tensor]:
        rows = self.rows(texts)
        found = []
        for step, (_, states) in enumerate(self.steps(rows)):
            best = self.head.to_target(self.head.logits(states).argmax(dim=-1))
            found.append((best == rows.ahead[:, step + 1]) & rows.is_text[:, step])
        return list(torch.stack(found, dim=1).split(rows.num_chains))

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

    def steps(self, rows: Rows, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Reads step by step: which chains go on, shape (C,), and their states, shape (C, H).

        Args:
            rows: what is read.
            generator: draws the share `decay` of the chains that go on; `None` for all of them.
        """
        trace, chains = Trace(self.head, rows), torch.arange(len(rows.chains), device=self.head.device)
        hidden, tokens = rows.hidden, rows.tokens
        for step in range(self.depth):
            states = trace.read(tokens, hidden, step)
            yield chains, states
            if generator is not None and step + 1 < self.depth:
                kept = self._drawn(rows.is_text[chains, step + 1], generator)
                trace.keep(kept)
                chains, states = chains[kept], states[kept]
            hidden, tokens = self.head.feedback(states), rows.ahead[chains, step + 1]

    def _drawn(self, goes_on: Tensor, generator: torch.Generator) -> Tensor:
        """Chains that go on, ascending: a share of those whose text goes on."""
        places = goes_on.nonzero()[:, 0]
        count = math.ceil(self.options.decay * len(places))
        chosen = torch.randperm(len(places), generator=generator)[:count].sort().values
        return places[chosen.to(places.device)]


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
        self.chains, self.num_chains = rows.chains, rows.num_chains
        self.texts = torch.arange(len(rows.num_rows)).repeat_interleave(torch.tensor(rows.num_chains))
        self.own: list[tuple[Tensor, Tensor]] = []  # keys and values of the chains' steps, (heads, C, d)
        self.barred = [  # what no query may see of its text's rows: those behind the beginning of its chain
            torch.ones(chains, count, dtype=torch.bool, device=head.device).triu(count - chains + 1)
            for chains, count in zip(rows.num_chains, rows.num_rows, strict=True)
        ]

    def keep(self, kept: Tensor) -> None:
        """Goes on with some of the chains, given by their places among those that are left, ascending."""
        self.own = [(keys[:, kept], values[:, kept]) for keys, values in self.own]
        places = [part.to(kept.device) for part in torch.arange(len(self.texts)).split(self.num_chains)]
        inside = [kept[(kept >= part[0]) & (kept <= part[-1])] - part[0] if len(part) else part for part in places]
        self.barred = [barred[chosen] for barred, chosen in zip(self.barred, inside, strict=True)]
        self.chains, self.texts = self.chains[kept], self.texts[kept.cpu()]
        self.num_chains = torch.bincount(self.texts, minlength=len(self.num_chains)).tolist()

    def read(self, tokens: Tensor, hidden: Tensor, step: int) -> Tensor:
        """States of the chains at a step, shape (C, H).

        Args:
            tokens: of all rows at step 0, then of the chains.
            hidden: likewise, shape (R, H) or (C, H).
            step: the steps before have been read.
        """
        rows, layer = self.rows, self.layer
        embeds = self.head.embed(tokens)
        normed = layer.hidden_norm(hidden)
        residual = normed if layer.norm_before_residual else hidden
        embeds = embeds if layer.input_layernorm is None else layer.input_layernorm(embeds)
        source = torch.cat([embeds.to(normed), normed], dim=-1)
        rotation = self._rotation(rows.positions if step == 0 else rows.positions[self.chains] + step, residual.dtype)
        keys = self._heads(self.attention.k_proj, self.attention.k_norm, source, rotation)
        values = self._heads(self.attention.v_proj, None, source, None)
        if step == 0:
            self.keys, self.values = keys.split(rows.num_rows, 1), values.split(rows.num_rows, 1)
            source, residual = source[self.chains], residual[self.chains]
            rotation = self._rotation(rows.positions[self.chains], residual.dtype)
        else:
            self.own.append((keys, values))
        queries = self._heads(self.attention.q_proj, self.attention.q_norm, source, rotation)
        states = residual + self.attention.o_proj(self._attended_by_all(queries))
        return states + layer.mlp(layer.post_attention_layernorm(states))

    def _attended_by_all(self, queries: Tensor) -> Tensor:
        """Text by text: (heads, C, d) -> (C, heads * d)."""
        own = [[both.split(self.num_chains, 1) for both in step] for step in self.own]
        return torch.cat(
            [
                self._attended(query, text, [(keys[text], values[text]) for keys, values in own])
                for text, query in enumerate(queries.split(self.num_chains, 1))
            ]
        )

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.head.rotary(positions[None], dtype)
        return cos[0], sin[0]

    def _heads(self, projection: Any, norm: Any, source: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """(N, source) -> (heads, N, head_dim)."""
        heads = projection(source).unflatten(-1, (-1, self.attention.head_dim))
        heads = (heads if norm is None else norm(heads)).transpose(0, 1)
        return heads if rotation is None else rotated(heads, rotation)

    def _attended(self, queries: Tensor, text: int, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """What one text's chains (heads, A, d) take from the rows they see and their own steps, (A, heads * d)."""
        keys, values = self.keys[text], self.values[text]
        groups, count = len(keys), queries.shape[1]
        if count == 0:
            return queries.transpose(0, 1).flatten(1)
        grouped = queries.unflatten(0, (groups, -1)) * self.attention.head_dim**-0.5  # (groups, G, A, d)
        before = grouped.flatten(1, 2) @ keys.transpose(1, 2)
        before = before.unflatten(1, (-1, count)).masked_fill(self.barred[text], -torch.inf)
        itself = [(grouped * key[:, None]).sum(dim=-1, keepdim=True) for key, _ in own]
        weights = torch.cat([before, *itself], dim=-1).softmax(dim=-1).to(queries)
        of_rows, *of_own = weights.split([keys.shape[1], *[1] * len(own)], dim=-1)
        taken = (of_rows.flatten(1, 2) @ values).unflatten(1, (-1, count))
        for share, (_, value) in zip(of_own, own, strict=True):
            taken = taken + share * value[:, None]
        return taken.flatten(0, 1).transpose(0, 1).flatten(1)
