"""Drafters of trees for tests: some that know the text, some that follow a rule, some that mix trees with chains."""

from __future__ import annotations

import torch

from hf_specdec.accept import Draft, sample
from hf_specdec.drafters.base import Drafter, DraftSession


class Oracle(Drafter):
    """Drafts a tree that holds a given text somewhere among wrong tokens.

    Args:
        text: what the target is going to say, (B, L).
        num_nodes: of every tree.
        seed: of the places of right and wrong tokens.
        vocab: ids to draft from.
        is_deep: whether the text stands there as far as the tree allows; else it may break off anywhere.
    """

    name = "oracle"
    default_num_draft_tokens = 12
    plants = True

    def __init__(self, text, num_nodes=12, seed=0, vocab=64, is_deep=False):
        super().__init__()
        self.text, self.num_nodes, self.vocab, self.is_deep = text, num_nodes, vocab, is_deep
        self.default_num_draft_tokens = num_nodes
        self.generator = torch.Generator().manual_seed(seed)
        self.takes_trees: list[bool] = []  # of every call

    def start(self, context, state):
        self.takes_trees.append(context.takes_trees)
        return OracleSession(self)

    def tree(self, right, limit):
        """Tokens and parents; `right` is the text that is going to follow."""
        tokens, parents, depths, on_text, last_right = [], [], [], [], -1
        for _ in range(min(limit, self.num_nodes)):
            parent = self._pick(len(tokens) + 1) - 1
            if self.is_deep and self._pick(2):
                parent = last_right
            depth = 0 if parent < 0 else depths[parent]
            is_right = (parent < 0 or on_text[parent]) and depth < len(right)
            token = right[depth] if is_right and self._pick(3) else self._pick(self.vocab)
            if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
                continue
            on_text.append(is_right and token == right[depth])
            tokens.append(token)
            parents.append(parent)
            depths.append(depth + 1)
            if on_text[-1]:
                last_right = len(tokens) - 1
        return tokens, parents

    def _pick(self, count):
        return int(torch.randint(count, (), generator=self.generator))


class OracleSession(DraftSession):
    grows_trees = True

    def __init__(self, drafter):
        self.drafter = drafter

    def propose(self, state, limits, noise):
        rows = zip(state.rows, limits, strict=True)
        trees = [self.drafter.tree(self.drafter.text[row].tolist()[state.lengths[row] :], limit) for row, limit in rows]
        return Draft.of_copies([tree[0] for tree in trees], state.device, [tree[1] for tree in trees])


def bushy(last, limit, vocab, width=2, depth=3):
    """A tree that is a function of the last token: every token has `width` followers, `depth` levels deep."""
    tokens, parents, level = [], [], [(-1, last)]
    for _ in range(depth):
        following = []
        for parent, token in level:
            for rank in range(width):
                if len(tokens) < limit:
                    following.append((len(tokens), (3 * token + 2 * rank + 1) % vocab))
                    tokens.append(following[-1][1])
                    parents.append(parent)
        level = following
    return tokens, parents


class Bushy(Drafter):
    """Drafts the same tree behind the same token.

    Args:
        vocab: ids to draft from.
    """

    name = "bushy"
    default_num_draft_tokens = 14
    plants = True

    def __init__(self, vocab=64):
        super().__init__()
        self.vocab = vocab

    def start(self, context, state):
        return _BushySession(self.vocab)


class _BushySession(DraftSession):
    grows_trees = True

    def __init__(self, vocab):
        self.vocab = vocab

    def propose(self, state, limits, noise):
        rows = zip(state.rows, limits, strict=True)
        trees = [bushy(state.tokens[row][-1], limit, self.vocab) for row, limit in rows]
        return Draft.of_copies([tree[0] for tree in trees], state.device, [tree[1] for tree in trees])


class Mixed(Drafter):
    """Every row takes turns: a chain drawn from a fixed law, a tree, nothing.

    Args:
        vocab: ids to draft from.
        text: if given, what the trees hold among other tokens (see `Oracle`).
    """

    name = "mixed"
    default_num_draft_tokens = 14
    plants = True
    draws = True

    def __init__(self, vocab=64, text=None):
        super().__init__()
        self.vocab = vocab
        self.oracle = None if text is None else Oracle(text, vocab=vocab, is_deep=True)
        self.law = torch.arange(1, vocab + 1, dtype=torch.float64).flip(0) / (vocab * (vocab + 1) / 2)
        self.kinds: list[list[str]] = []  # of all rows, round by round

    def start(self, context, state):
        return _MixedSession(self)


class _MixedSession(DraftSession):
    grows_trees = True

    def __init__(self, drafter):
        self.drafter, self.round = drafter, 0

    def propose(self, state, limits, noise):
        drafter, device = self.drafter, state.device
        self.round += 1
        kinds = [("chain", "tree", "none")[(row + self.round) % 3] for row in state.rows]
        drafter.kinds.append(kinds)
        limits = [min(limit, 3) if kind == "chain" else limit for limit, kind in zip(limits, kinds, strict=True)]
        copies = []
        for row, limit, kind in zip(state.rows, limits, kinds, strict=True):
            tokens, parents = [], []
            if kind == "tree" and drafter.oracle is not None:
                tokens, parents = drafter.oracle.tree(drafter.oracle.text[row].tolist()[state.lengths[row] :], limit)
            elif kind == "tree":
                tokens, parents = bushy(state.tokens[row][-1], limit, drafter.vocab)
            elif kind == "chain":
                tokens, parents = [0] * limit, list(range(-1, limit - 1))
            copies.append((tokens, parents))
        draft = Draft.of_copies([tokens for tokens, _ in copies], device, [parents for _, parents in copies])
        if noise is None or draft.width == 0:
            return draft
        probs = drafter.law.to(device).expand(len(kinds), draft.width, -1).contiguous()
        drawn = torch.tensor([kind == "chain" for kind in kinds], device=device)
        tokens = sample(probs, noise.draws[:, : draft.width])
        tokens = torch.where(drawn[:, None], tokens, draft.tokens)
        return Draft(tokens, draft.lengths, probs, drawn, None, draft.known_parents())
