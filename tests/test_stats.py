"""Counts add up, rates are derived from them by the standard definitions."""

from __future__ import annotations

import json
import threading

import pytest
import torch

import hf_specdec
from hf_specdec import DraftModel, PromptLookup, SpecStats
from hf_specdec.stats import SharedStats
from tests.models import jittered, prompts, tiny


def example():
    stats = SpecStats(calls=1)
    stats.record_row(drafted=3, accepted=3, emitted=4, drafter="x")
    stats.record_row(drafted=3, accepted=1, emitted=2, drafter="x")
    stats.record_row(drafted=1, accepted=0, emitted=1, drafter="x")
    stats.record_row(drafted=0, accepted=0, emitted=1, drafter="x")
    return stats


def test_rates_follow_their_definitions():
    stats = example()
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted, stats.rounds_with_draft) == (4, 7, 4, 8, 3)
    assert stats.acceptance_rate == 4 / 7
    assert stats.mean_acceptance_length == 1 + 4 / 4
    assert stats.coverage == 3 / 4
    assert stats.drafted_at == [3, 2, 2]
    assert stats.tested_at == [3, 2, 1]
    assert stats.accepted_at == [2, 1, 1]
    assert stats.acceptance_by_position == [2 / 3, 1 / 2, 1.0]
    assert stats.cumulative_acceptance_by_position == [2 / 3, 1 / 2, 1 / 2]


def test_behind_the_leaf_of_a_tree_nothing_was_judged():
    stats = SpecStats()
    stats.record_row(drafted=4, accepted=2, emitted=3, drafter="x", judged=2)  # both tokens of a path of two
    stats.record_row(drafted=4, accepted=1, emitted=2, drafter="x", judged=2)  # what followed the first was refused
    assert (stats.tested_at, stats.accepted_at) == ([2, 2, 0, 0], [2, 1, 0, 0])
    assert stats.acceptance_by_position == [1.0, 0.5, None, None]


def test_nothing_drafted_divides_nothing_by_zero():
    stats = SpecStats()
    assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.coverage) == (None, None, None)
    assert stats.seconds_per_token is None
    assert "n/a" in str(stats)


def test_merge_adds_and_reset_clears():
    total, other = example(), example()
    other.record_row(drafted=5, accepted=5, emitted=6, drafter="x")
    total.merge(other)
    assert total.rounds == 9
    assert total.drafted_at == [7, 5, 5, 1, 1]
    total.reset()
    assert total == SpecStats()


def test_to_dict_is_json_and_independent():
    stats = example()
    values = stats.to_dict()
    stats.record_row(drafted=1, accepted=1, emitted=2, drafter="x")
    assert json.loads(json.dumps(values))["drafted_at"] == [3, 2, 2]


def test_counters_have_vllms_names_and_meaning():
    rounds = [(3, 3), (3, 1), (1, 0), (0, 0), (2, 2)]
    stats, counters = SpecStats(), dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
    per_position = [0, 0, 0]
    for drafted, accepted in rounds:
        stats.record_row(drafted, accepted, accepted + 1, "x")
        if drafted:  # vLLM observes only requests with a draft
            counters["drafts"] += 1
            counters["draft_tokens"] += drafted
            counters["accepted_tokens"] += accepted
            for position in range(accepted):
                per_position[position] += 1
    values = stats.to_dict()
    assert {name: values[f"spec_decode_num_{name}"] for name in counters} == counters
    assert values["spec_decode_num_accepted_tokens_per_pos"] == per_position == [3, 2, 1]
    values["spec_decode_num_accepted_tokens_per_pos"].clear()
    assert stats.accepted_at == per_position


def test_the_readable_form_names_the_numbers():
    text = str(example())
    assert "7 / 4 (57%)" in text
    assert "2.00 tokens a round" in text


def test_shared_stats_survive_threads():
    total = SharedStats()
    threads = [threading.Thread(target=lambda: [total.merge(example()) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total.rounds == 4 * 200 * 4


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["ragged", "lockstep"])
def test_counts_of_a_call_add_up(num_rows, kind):
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(num_rows)
    kwargs = {"attention_mask": mask, "max_new_tokens": 30, "eos_token_id": [2, 7, 11], "pad_token_id": 0}
    if kind == "lockstep":
        kwargs["logits_processor"] = [lambda ids, scores: scores]
    for drafter in (DraftModel(jittered(target)), PromptLookup(1, 3)):
        passes = []
        hook = target.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        out = target.generate(ids, assistant=drafter, **kwargs)
        hook.remove()
        stats = hf_specdec.last_stats(target)
        assert stats.target_passes == len(passes)
        new = out[:, ids.shape[1] :]
        ended = torch.isin(new, torch.tensor([2, 7, 11]))
        lengths = [(row.nonzero()[0].item() + 1 if row.any() else len(row)) for row in ended]
        assert stats.emitted == sum(lengths)
        assert stats.drafted == sum(stats.drafted_at)
        assert stats.accepted == sum(stats.accepted_at)
        assert stats.emitted - stats.accepted <= stats.rounds
        assert stats.rounds <= stats.target_passes * num_rows
        assert drafter.stats.emitted == stats.emitted
