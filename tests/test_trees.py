"""Draft trees through whole `generate` calls: greedy identity, laws, processors, caches, batches."""

from __future__ import annotations

import pytest
import torch

import hf_specdec
from hf_specdec.accept import Draft
from hf_specdec.drafters.base import Drafter, DraftSession
from tests.models import prompts, tiny

FAMILIES = ["llama", "qwen3", "gpt2", "mistral8", "gemma3"]


class Oracle(Drafter):
    """Drafts a tree that holds the target's own text somewhere among wrong tokens.

    Args:
        text: what plain generation says, (B, L).
        num_nodes: of every tree.
        seed: of the places of right and wrong tokens.
    """

    name = "oracle"
    default_num_draft_tokens = 12
    plants = True

    def __init__(self, text, num_nodes=12, seed=0, vocab=64):
        super().__init__()
        self.text, self.num_nodes, self.vocab = text, num_nodes, vocab
        self.generator = torch.Generator().manual_seed(seed)

    def start(self, context, state):
        return OracleSession(self)


class OracleSession(DraftSession):
    grows_trees = True

    def __init__(self, drafter):
        self.drafter = drafter

    def propose(self, state, limits, noise):
        rows = zip(state.rows, limits, strict=True)
        trees = [self._tree(self.drafter.text[row].tolist()[state.lengths[row] :], limit) for row, limit in rows]
        return Draft.of_copies([tree[0] for tree in trees], state.device, [tree[1] for tree in trees])

    def _tree(self, right, limit):
        def pick(n):
            return int(torch.randint(n, (), generator=self.drafter.generator))

        tokens, parents, depths, on_text = [], [], [], []
        for _ in range(min(limit, self.drafter.num_nodes)):
            parent = pick(len(tokens) + 1) - 1
            depth = 0 if parent < 0 else depths[parent]
            is_right = parent < 0 or on_text[parent]
            token = right[depth] if is_right and depth < len(right) and pick(3) else pick(self.drafter.vocab)
            if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
                continue
            on_text.append(is_right and depth < len(right) and token == right[depth])
            tokens.append(token)
            parents.append(parent)
            depths.append(depth + 1)
        return tokens, parents


def plain_and_tree(model, ids, mask, num_nodes=12, **kwargs):
    kwargs = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False} | kwargs
    plain = model.generate(ids, **kwargs)
    hf_specdec.enable(model)
    text = plain if isinstance(plain, torch.Tensor) else plain.sequences
    out = model.generate(ids, assistant=Oracle(text, num_nodes), **kwargs)
    return plain, out, hf_specdec.last_stats(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_text_is_the_same(family, num_rows, attention):
    # The host's eager attention casts scores to float32, where float64's lowest number is -inf and padding gives NaN.
    model = tiny(family, dtype=torch.float32 if attention == "eager" else torch.float64)
    model.set_attn_implementation(attention)
    ids, mask = prompts(num_rows)
    plain, out, stats = plain_and_tree(model, ids, mask)
    assert torch.equal(plain, out)
    assert stats.mean_acceptance_length > 1.5
