"""A drafter that breaks its contract gets a clear error, in either way of judging; the model goes on as before."""

from __future__ import annotations

import pytest
import torch

import hf_specdec
from hf_specdec.accept import Draft
from hf_specdec.drafters import Drafter, DraftSession
from tests.models import prompts, tiny

VOCABULARY = 64
K = 3
ROWS = 2
TOKENS = torch.full((ROWS, K), 5)
LENGTHS = torch.full((ROWS,), K)
LAW = torch.full((ROWS, K, VOCABULARY), 1 / VOCABULARY)


class Scripted(Drafter):
    """Proposes one and the same draft in every round that has room for it."""

    name = "scripted"
    default_num_draft_tokens = K

    def __init__(self, draft):
        super().__init__()
        self.draft = draft

    def start(self, context, state):
        return _ScriptedSession(self.draft)


class _ScriptedSession(DraftSession):
    def __init__(self, draft):
        self.draft = draft

    def propose(self, state, limits, noise):
        fits = min(limits) >= K and len(limits) == ROWS
        return self.draft if fits else Draft.empty(len(limits))


def without_mass(law):
    law = law.clone()
    law[..., 5] = 0
    return law / law.sum(-1, keepdim=True)


VALUES = {
    "an id behind the vocabulary": Draft(torch.full((ROWS, K), VOCABULARY), LENGTHS),
    "a negative id": Draft(torch.full((ROWS, K), -1), LENGTHS),
    "more tokens than drafted": Draft(TOKENS, LENGTHS + 1),
    "fewer than none": Draft(TOKENS, LENGTHS - K - 1),
    "a law that sums to two": Draft(TOKENS, LENGTHS, LAW * 2),
    "a law with NaN": Draft(TOKENS, LENGTHS, LAW * float("nan")),
    "a law with negative entries": Draft(TOKENS, LENGTHS, torch.cat([-LAW[..., :1], LAW[..., 1:]], -1)),
    "a token its law cannot draw": Draft(TOKENS, LENGTHS, without_mass(LAW)),
}
SHAPES = {
    "too wide": Draft(torch.full((ROWS, K + 4), 5), LENGTHS),
    "a row too many": Draft(torch.full((ROWS + 1, K), 5), torch.full((ROWS + 1,), K)),
    "lengths of one row": Draft(TOKENS, LENGTHS[:1]),
    "a law of another vocabulary": Draft(TOKENS, LENGTHS, LAW[..., 1:]),
    "tokens that are no integers": Draft(TOKENS.float(), LENGTHS),
}


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(tiny())


def arguments(do_sample=True, in_lockstep=False):
    ids, mask = prompts(ROWS)
    kwargs = {"attention_mask": mask, "max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
    if in_lockstep:
        kwargs["prefix_allowed_tokens_fn"] = lambda row, text: list(range(VOCABULARY))
    return {"inputs": ids, "do_sample": do_sample} | kwargs


@pytest.mark.parametrize("in_lockstep", [False, True])
@pytest.mark.parametrize("fault", VALUES)
def test_values_are_refused(target, fault, in_lockstep):
    with pytest.raises(ValueError, match="cannot be verified"):
        target.generate(assistant=Scripted(VALUES[fault]), **arguments(in_lockstep=in_lockstep))


@pytest.mark.parametrize("fault", SHAPES)
def test_shapes_are_refused(target, fault):
    with pytest.raises(ValueError, match="drafter returned"):
        target.generate(assistant=Scripted(SHAPES[fault]), **arguments())


def test_a_sound_draft_passes_and_faults_leave_no_trace(target):
    plain = target.generate(assistant=False, **arguments(do_sample=False))
    for draft in (*VALUES.values(), *SHAPES.values()):
        with pytest.raises(ValueError):
            target.generate(assistant=Scripted(draft), **arguments())
    for draft in (Draft(TOKENS, LENGTHS), Draft(TOKENS, LENGTHS, LAW)):
        assert torch.equal(target.generate(assistant=Scripted(draft), **arguments(do_sample=False)), plain)
    assert target.generate(assistant=Scripted(Draft(TOKENS, LENGTHS, LAW)), **arguments()).shape == plain.shape
