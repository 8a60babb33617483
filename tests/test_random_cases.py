"""Random models, drafters, batches and options against plain `generate`, in float64; and faults at random moments.

Hypothesis prints the failing case and how to replay it. The slow suite runs 2,000 cases.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hf_specdec
from hf_specdec import DraftModel, PromptLookup, host
from tests.models import jittered, prompts, tiny

FAMILIES = ["llama", "qwen3", "mistral4", "mistral8", "gemma3", "gpt2", "bloom"]
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@functools.cache
def target(family):
    return hf_specdec.enable(tiny(family, seed=1))


@functools.cache
def drafting_model(family, quality):
    model = target(family)
    return {"itself": model, "good": jittered(model, 0.02), "poor": tiny(seed=7, num_hidden_layers=1)}[quality]


class Untouched:
    """A processor nobody knows: lockstep."""

    def __call__(self, input_ids, scores):
        return scores


cases = st.fixed_dictionaries(
    {
        "family": st.sampled_from(FAMILIES),
        "drafter": st.sampled_from(["itself", "good", "poor", "lookup"]),
        "window": st.sampled_from([(1, 1), (1, 4), (2, 3)]),
        "num_rows": st.integers(1, 5),
        "longest": st.integers(3, 16),
        "seed": st.integers(0, 10_000),
        "num_draft_tokens": st.integers(1, 9),
        "max_new_tokens": st.integers(1, 40),
        "ends": st.sampled_from([None, [2], [2, 7, 11, 30], list(range(2, 40, 3))]),
        "setting": st.sampled_from(
            [
                {},
                {},
                {"repetition_penalty": 1.3},
                {"no_repeat_ngram_size": 2},
                {"min_new_tokens": 6},
                {"output_scores": 1},
            ]
        ),
        "lockstep": st.booleans(),
        "static": st.booleans(),
    }
)


def run(case, assistant, **extra):
    ids, mask = prompts(case["num_rows"], case["longest"], seed=case["seed"])
    kwargs = {"max_new_tokens": case["max_new_tokens"], "eos_token_id": case["ends"], "pad_token_id": 0}
    kwargs |= case["setting"] | {"return_dict_in_generate": True, "attention_mask": mask, "do_sample": False}
    if case["static"] and not case["family"].startswith(("mistral", "gemma3")):
        kwargs["cache_implementation"] = "static"
    if case["lockstep"]:
        kwargs["logits_processor"] = [Untouched()]
    return target(case["family"]).generate(ids, assistant=assistant, **kwargs, **extra)


def drafter_of(case):
    if case["drafter"] == "lookup":
        return PromptLookup(*case["window"])
    return DraftModel(drafting_model(case["family"], case["drafter"]))


def check(case):
    plain = run(case, False)
    ours = run(case, drafter_of(case), num_draft_tokens=case["num_draft_tokens"])
    assert torch.equal(plain.sequences, ours.sequences)
    if plain.scores is not None and case["num_rows"] == 1:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain.scores, ours.scores, strict=True))
    assert int(plain[host.CACHE_NAME].get_seq_length()) == int(ours[host.CACHE_NAME].get_seq_length())


@settings(max_examples=60, **QUIET)
@given(cases)
def test_greedy_output_is_plains(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=2000, **QUIET)
@given(cases)
def test_greedy_output_is_plains_in_two_thousand_cases(case):
    check(case)


class Faulty:
    """Raises at its n-th call, wherever it is plugged in."""

    def __init__(self, moment):
        self.moment, self.calls = moment, 0

    def tick(self):
        self.calls += 1
        if self.calls == self.moment:
            raise RuntimeError("fault")

    def processor(self, input_ids, scores):
        self.tick()
        return scores

    def criterion(self, input_ids, scores, **kwargs):
        self.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def drafting(self, drafter):
        start = drafter.start

        def faulty_start(context, state):
            session = start(context, state)
            propose = session.propose

            def faulty_propose(*args):
                self.tick()
                return propose(*args)

            session.propose = faulty_propose
            return session

        drafter.start = faulty_start
        return drafter

    def put(self, value):
        self.tick()

    def end(self):
        self.ended = True


@settings(max_examples=40, **QUIET)
@given(cases, st.sampled_from(["processor", "criterion", "streamer", "drafter"]), st.integers(1, 12))
def test_a_fault_leaves_the_model_able_to_say_what_plain_says(case, place, moment):
    faulty = Faulty(moment)
    plug = {
        "processor": {"logits_processor": [faulty.processor]},
        "criterion": {"stopping_criteria": [faulty.criterion]},
        "streamer": {"streamer": faulty},
        "drafter": {},
    }[place]
    drafter = drafter_of(case)
    if place == "drafter":
        drafter = faulty.drafting(drafter)
    case = case | {"lockstep": False}
    before = set(vars(target(case["family"])))
    with contextlib.suppress(RuntimeError):
        run(case, drafter, **plug)
    assert place != "streamer" or faulty.ended
    assert set(vars(target(case["family"]))) <= before | {"_previous_max_cache_length"}
    check(case)
