"""Trees grow as a slow search says."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.trees import grow, most_probable


def slow(table, root, depth, top_k, total):
    """Nodes (path, score) of one row, best first; scores in float32, of equal ones the earlier."""

    def best(logprobs):
        return sorted(range(len(logprobs)), key=lambda token: -float(logprobs[token]))[:top_k]

    level = [((token,), root[token]) for token in best(root)]
    nodes = list(level)
    for _ in range(depth - 1):
        children = [
            ((*path, token), score + table[path[-1], token]) for path, score in level for token in best(table[path[-1]])
        ]
        nodes += children
        level = sorted(children, key=lambda node: -float(node[1]))[:top_k]
    return sorted(nodes, key=lambda node: -float(node[1]))[:total]


def children(logprobs, count):
    """The most probable ones, of equals the earlier."""
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], ids[..., :count]


@pytest.mark.parametrize("is_coarse", [False, True])  # coarse scores tie
@pytest.mark.parametrize(("depth", "top_k", "total"), [(1, 1, 1), (4, 1, 9), (3, 4, 10), (7, 3, 60), (2, 20, 30)])
def test_the_best_tokens_are_kept(depth, top_k, total, is_coarse):
    generator = torch.Generator().manual_seed(depth)
    table = torch.randn(3, 8, 8, generator=generator)
    table = -table.abs().round() if is_coarse else table.log_softmax(dim=-1)
    roots = table[:, 0]
    rows = torch.arange(3)[:, None]
    tokens, parents, scores = grow(
        children(roots, top_k), lambda beam, before, level: children(table[rows, beam], top_k), depth, top_k, total
    )
    for row in range(3):
        paths = []
        for token, parent in zip(tokens[row].tolist(), parents[row].tolist(), strict=True):
            assert parent < len(paths)
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        expected = slow(table[row], roots[row], depth, top_k, total)
        assert paths == [path for path, _ in expected]
        assert torch.equal(scores[row], torch.stack([score for _, score in expected]))


def test_a_beam_is_read_with_the_places_of_its_parents():
    table = torch.randn(2, 6, 6).log_softmax(dim=-1)
    rows, beams = torch.arange(2)[:, None], []

    def step(beam, before, level):
        beams.append(beam)
        if level > 1:
            assert bool((table[rows, beams[-2].gather(1, before)].topk(3).indices == beam[:, :, None]).any(-1).all())
        return children(table[rows, beam], 3)

    grow(children(table[:, 0], 3), step, 4, 3, 20)
    assert len(beams) == 3


def test_what_cannot_be_drafted_stands_last():
    first = children(torch.tensor([[0.0, -torch.inf, -torch.inf]]), 2)
    later = tuple(part[:, None].expand(1, 2, 2) for part in first)
    _, _, scores = grow(first, lambda beam, before, level: later, 3, 2, 10)
    assert scores.isfinite().sum() == 3 and bool(scores[0, :3].isfinite().all())


@pytest.mark.parametrize("gone", range(6))
def test_what_is_no_number_stands_last(gone):
    """A head that overflows behind one token spoils what follows that token, and nothing else."""
    logits = torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(gone))
    logits[0, gone] = torch.nan
    tokens, parents, scores = grow(
        most_probable(logits[:, 0 if gone else 1], 3),
        lambda beam, before, level: most_probable(logits[:, beam[0]], 3),
        4,
        3,
        20,
    )
    sound = int(scores.isfinite().sum())
    assert sound > 0 and bool(scores[0, :sound].isfinite().all())
    assert all(parent < place for place, parent in enumerate(parents[0, :sound].tolist()))
    assert not any(tokens[0, parent] == gone for parent in parents[0, :sound].tolist() if parent >= 0)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_the_most_probable_ids(count):
    logits = torch.randn(2, 3, 6, dtype=torch.bfloat16)
    logits[..., 2] = -torch.inf
    values, ids = most_probable(logits, count)
    laws = logits.float().log_softmax(dim=-1)
    assert values.dtype == torch.float32 and ids.shape == (2, 3, min(count, 6))
    assert torch.equal(values, laws.sort(dim=-1, descending=True).values[..., :count])
    assert torch.equal(values, laws.gather(-1, ids))
