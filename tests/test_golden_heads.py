"""Heads written by `speculators` say here what they said there, as tests/golden/make_speculators.py recorded it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from hf_specdec.checkpoints import load_head
from tests.models import tiny

FOLDERS = sorted(path.parent for path in Path(__file__).parent.glob("golden/speculators/*/config.json"))
EAGLE3 = [folder for folder in FOLDERS if folder.name.startswith("eagle3")]
PEAGLE = [folder for folder in FOLDERS if folder.name.startswith("peagle")]
NUM_WINDOW_STEPS = 1  # later ones see less here: the library's window does not move while it reads its own states


def opened(folder):
    """A head bound to a target that has its embedding, where it is not the head's own, and the golden tensors."""
    golden = load_file(folder / "golden.safetensors")
    target = tiny("llama", num_hidden_layers=4, dtype=torch.float32)
    if "embed_tokens.weight" not in load_file(folder / "model.safetensors"):
        target.get_input_embeddings().weight.data.copy_(golden["embeddings"])
    return load_head(str(folder), target), golden


def agree(found, golden):
    torch.testing.assert_close(found, golden, atol=1e-5, rtol=1e-5)


def by_folder(folders):
    return pytest.mark.parametrize("folder", folders, ids=lambda folder: folder.name)


def test_all_options_have_numbers():
    assert len(EAGLE3) == 8 and len(PEAGLE) == 4
    heads = [opened(folder)[0].config for folder in FOLDERS]
    for option in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "own_embedding", "qk_norm"):
        assert {getattr(config, option) for config in heads} == {False, True}
    assert {len(config.layers) for config in heads} == {1, 2}
    assert {config.layers[0].window for config in heads} == {None, 4}


@by_folder(FOLDERS)
def test_vocabulary(folder):
    head, golden = opened(folder)
    stored = load_file(folder / "model.safetensors")
    used = stored.get("t2d", torch.ones(64, dtype=torch.bool))
    assert torch.equal(head.draft_ids, used.nonzero()[:, 0])
    assert golden["logits"].shape[-1] == len(head.draft_ids)


@by_folder(EAGLE3)
@pytest.mark.parametrize("first_position", [0, 1])
@torch.no_grad()
def test_recursion_row_by_row(folder, first_position):
    """Every prefix of true rows, then the head on its own states, one token a pass: the way it drafts."""
    head, golden = opened(folder)
    logits, tokens = golden["logits"], golden["tokens"]
    num_steps = NUM_WINDOW_STEPS if head.config.layers[0].window else len(logits)
    for row in range(tokens.shape[1]):
        cache, width = DynamicCache(), row + 1
        positions = first_position + torch.arange(width)[None]
        hidden = head.combine(golden["features"][:, :width])
        states = head(tokens[:, :width], hidden, positions, cache=cache)
        agree(head.logits(states)[0], logits[0, :width])
        for step in range(1, min(num_steps, tokens.shape[1] - row)):
            token, position = tokens[:, row + step, None], positions[:, -1:] + step
            states = head(token, head.feedback(states[:, -1:]), position, cache=cache)
            agree(head.logits(states)[0, 0], logits[step, row])


@torch.no_grad()
def all_rows_at_once(head, golden):
    """The library's own layout: a pass for each step, rows kept apart by the mask."""
    tokens, cache = golden["tokens"], DynamicCache()
    width = tokens.shape[1]
    hidden, mask = head.combine(golden["features"]), torch.ones(width, width, dtype=torch.bool).tril()
    said = []
    for step in range(len(golden["logits"])):
        read = torch.cat([tokens[:, step:], tokens.new_zeros(1, step)], dim=1)
        states = head(read, hidden, 1 + step + torch.arange(width)[None], mask[None, None], cache)
        said.append(head.logits(states)[0])
        hidden, mask = head.feedback(states), torch.cat([mask, torch.eye(width, dtype=torch.bool)], dim=1)
    return torch.stack(said)


@by_folder([folder for folder in EAGLE3 if "sliding" not in folder.name])
def test_recursion_of_all_rows_at_once(folder):
    head, golden = opened(folder)
    agree(all_rows_at_once(head, golden), golden["logits"])


@by_folder(PEAGLE)
@pytest.mark.parametrize("is_cached", [False, True])
@torch.no_grad()
def test_parallel_slots(folder, is_cached):
    """A prefix of true rows, the last of which is slot 0, and masked slots behind it, in one pass or two."""
    head, golden = opened(folder)
    num_slots = golden["logits"].shape[1]
    for anchor, logits in enumerate(golden["logits"]):
        width = anchor + num_slots
        tokens = torch.full((1, width), head.config.mask_token_id)
        tokens[:, : anchor + 1] = golden["tokens"][:, : anchor + 1]
        hidden = head.masked_hidden().expand(1, width, -1).clone()
        hidden[:, : anchor + 1] = head.combine(golden["features"][:, : anchor + 1])
        cache, positions = DynamicCache(), torch.arange(width)[None]
        if is_cached:
            for rows in (slice(0, anchor), slice(anchor, width)) if anchor else (slice(0, width),):
                states = head(tokens[:, rows], hidden[:, rows], positions[:, rows], cache=cache)
        else:
            states = head(tokens, hidden, positions)[:, anchor:]
        agree(head.logits(states)[0], logits)


@pytest.mark.parametrize("name", ["eagle3_plain", "eagle3_all"])
@pytest.mark.parametrize("option", ["norm_before_residual", "norm_output"])
def test_a_wrong_option_is_noticed(name, option):
    head, golden = opened(FOLDERS[0].parent / name)
    head.config = replace(head.config, **{option: not getattr(head.config, option)})
    head.layers[0].norm_before_residual = head.config.norm_before_residual
    assert (all_rows_at_once(head, golden) - golden["logits"]).abs().max() > 0.1
