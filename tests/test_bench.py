"""The benchmark: what it asks, in which order, and the arithmetic of its figures."""

from __future__ import annotations

import json
import statistics
from unittest import mock

import pytest
import torch

from hf_specdec.checkpoints.write import write_head
from hf_specdec.checks.bench import VARIANTS, BenchOptions, read_questions, rotated, run_bench, write_json
from hf_specdec.checks.report import Batch, Run, Turn, first_difference, overhead_share, summary, typical
from hf_specdec.heads import EagleHead
from hf_specdec.loading import load_model
from hf_specdec.stats import SpecStats
from hf_specdec.training.recipes.heads import head_config, initialise
from tests.tokenizers_for_tests import SENTENCES, save_tiny

COUNTS = {
    "questions",
    "tokens",
    "seconds",
    "rounds",
    "drafted",
    "accepted",
    "rounds_with_draft",
    "coverage",
    "mean_acceptance_length",
    "acceptance_rate",
    "seconds_by_phase",
    "speedup",
    "median_speedup",
    "speedup_interval",
    "identical",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, another model to draft with, and a file of questions."""
    place = tmp_path_factory.mktemp("bench")
    questions = place / "questions.jsonl"
    questions.write_text("".join(json.dumps(entry) + "\n" for entry in entries()))
    return save_tiny(place / "target"), save_tiny(place / "drafter", seed=1), str(questions)


def entries():
    for number in range(12):
        category = ("writing", "math", "writing", "translation")[number % 4]
        turns = [SENTENCES[number % 4] + " " * (number % 3), "And now again, please."]
        yield {"question_id": number, "category": category, "turns": turns}


@pytest.fixture(scope="module")
def document(folders):
    """All variants on two questions a category."""
    target, drafter, questions = folders
    variants = ("plain", "host-prompt-lookup", "prompt-lookup", f"draft-model={drafter}", f"host-draft-model={drafter}")
    return run_bench(options(questions, target, variants=variants, limit=2))


def test_trees_by_size(folders):
    target, _, questions = folders
    variants = ("token-recycling", *(f"token-recycling={nodes}" for nodes in (4, 8, 16, 32)), "suffix", "suffix-chains")
    found = run_bench(options(questions, target, variants=variants, limit=1, max_new_tokens=24))["variants"]
    assert list(found) == ["plain", *variants]
    assert all(figures["total"]["identical"] == 3 for figures in found.values())
    assert found["token-recycling=32"]["total"]["target_passes"] < found["plain"]["total"]["target_passes"]


def test_heads_as_chains_trees_and_among_others(folders, tmp_path):
    location, _, questions = folders
    target = load_model(location, torch.float32, torch.device("cpu"))
    ids = torch.arange(target.config.vocab_size)
    write_head(initialise(EagleHead(head_config(target, len(ids))), target, ids), tmp_path)
    variants = tuple(f"{name}={tmp_path}" for name in ("drafter", "drafter-tree", "auto"))
    found = run_bench(options(questions, location, variants=variants, limit=1, num_draft_tokens=6))["variants"]
    assert all(figures["total"]["identical"] == 3 for figures in found.values())
    assert all(figures["total"]["drafted"] > 0 for name, figures in found.items() if name != "plain")


def options(questions, target, **others):
    settings = {"dtype": "float32", "device": "cpu", "max_new_tokens": 12} | others
    return BenchOptions(questions=questions, target=target, **settings)


def test_the_document_is_complete_json(document):
    assert json.loads(json.dumps(document)) == document | {"options": json.loads(json.dumps(document["options"]))}
    assert document["options"]["questions"] == "questions.jsonl"  # by its name: documents are published
    assert {"torch", "transformers", "hf_specdec", "threads", "device", "dtype", "cpu", "date"} <= set(
        document["environment"]
    )
    for figures in document["variants"].values():
        assert set(figures["by_category"]) == {"writing", "math", "translation"}
        for entry in (figures["total"], *figures["by_category"].values()):
            assert set(entry) >= COUNTS


def test_limit_counts_per_category(document):
    for figures in document["variants"].values():
        assert [entry["questions"] for entry in figures["by_category"].values()] == [2, 2, 2]
    asked = [batch["question_ids"] for batch in document["batches"]]
    assert asked == [[0], [2], [1], [5], [3], [7]]


def test_every_variant_comes_first_in_turn(document):
    names = list(document["variants"])
    orders = [list(batch["runs"]) for batch in document["batches"]]
    assert orders == [rotated(names, number) for number in range(6)]
    assert [order[0] for order in orders[:5]] == names


def test_float32_outputs_are_identical_to_plain(document):
    for figures in document["variants"].values():
        assert figures["total"]["identical"] == figures["total"]["questions"] == 6
        assert figures.get("differences", []) == []


def test_past_ends_every_answer_has_the_full_length(folders):
    """A target that ends at once, were it allowed to."""
    target, _, questions = folders
    variants = ("plain", "host-prompt-lookup", "prompt-lookup")
    settings = options(questions, target, variants=variants, limit=1, past_ends=True)
    with mock.patch("hf_specdec.checks.running._end_ids", return_value=set(range(10_000))):
        document = run_bench(settings)
    for figures in document["variants"].values():
        assert figures["total"]["tokens"] == 12 * figures["total"]["questions"] == 36


def test_plain_is_its_own_base(document):
    plain = document["variants"]["plain"]
    assert plain["total"]["speedup"] == plain["geometric_mean"]["median_speedup"] == 1
    assert plain["total"]["rounds"] == plain["total"]["target_passes"] == plain["total"]["tokens"]
    assert plain["total"]["mean_acceptance_length"] == 1


def test_figures_follow_from_the_batches(document):
    runs = [batch["runs"] for batch in document["batches"]]
    for name, figures in document["variants"].items():
        total = figures["total"]
        assert total["tokens"] == sum(run[name]["tokens"] for run in runs)
        assert total["seconds"] == pytest.approx(sum(run[name]["seconds"] for run in runs))
        ratios = [speed(run[name]) / speed(run["plain"]) for run in runs]
        assert total["median_speedup"] == pytest.approx(statistics.median(ratios))
        by_category = figures["by_category"].values()
        expected = statistics.geometric_mean([entry["median_speedup"] for entry in by_category])
        assert figures["geometric_mean"]["median_speedup"] == pytest.approx(expected)
        against_host = [speed(run[name]) / speed(run["host-prompt-lookup"]) for run in runs]
        writing = figures["against_host_prompt_lookup"]["by_category"]["writing"]
        assert writing["median_speedup"] == pytest.approx(statistics.median(against_host[:2]))


def speed(run):
    return run["tokens"] / run["seconds"]


def test_ours_count_drafts_and_the_hosts_count_passes(document):
    for name, figures in document["variants"].items():
        total = figures["total"]
        if name in {"prompt-lookup"} or name.startswith("draft-model"):
            assert total["drafted"] >= total["accepted"]
            assert total["rounds"] == total["target_passes"]
            assert total["mean_acceptance_length"] == 1 + total["accepted"] / total["rounds"]
            assert 0 < figures["overhead_share"] < 1
        else:
            assert total["drafted"] is None and figures["overhead_share"] is None
            assert total["mean_acceptance_length"] == total["tokens"] / total["target_passes"]


def test_batches_are_padded_and_equal_to_plain(folders):
    target, drafter, questions = folders
    variants = ("prompt-lookup", f"draft-model={drafter}")
    document = run_bench(options(questions, target, variants=variants, batch_size=4, categories=("writing",)))
    assert list(document["variants"]) == ["plain", *variants]
    assert [batch["question_ids"] for batch in document["batches"]] == [[0, 2, 4, 6], [8, 10]]
    for figures in document["variants"].values():
        assert figures["total"]["identical"] == 6
        assert figures["total"]["rounds"] >= figures["total"]["target_passes"]


def test_all_turns_are_asked_one_after_the_other(folders):
    target, _, questions = folders
    settings = {"variants": ("prompt-lookup",), "categories": ("math",), "limit": 1}
    first, both = (run_bench(options(questions, target, turns=turns, **settings)) for turns in ("first", "all"))
    tokens = [document["variants"]["plain"]["total"]["tokens"] for document in (first, both)]
    assert 0 < tokens[0] < tokens[1]
    assert both["variants"]["prompt-lookup"]["total"]["identical"] == 1


def test_sampled_outputs_are_reproducible_and_not_compared(folders):
    target, _, questions = folders
    settings = {"variants": ("prompt-lookup",), "limit": 1, "temperature": 1.0, "seed": 3}
    once, again = (run_bench(options(questions, target, **settings))["variants"]["prompt-lookup"] for _ in range(2))
    assert once["total"]["identical"] is None and "differences" not in once
    assert (once["total"]["tokens"], once["total"]["accepted"]) == (
        again["total"]["tokens"],
        again["total"]["accepted"],
    )


def test_differences_name_the_token_and_the_gap(folders, monkeypatch):
    target, _, questions = folders
    # A variant that is wrong on purpose: it bans what plain generation says first.
    monkeypatch.setitem(VARIANTS, "wrong", lambda target, folder: {"suppress_tokens": list(range(6, 200))})
    variants = run_bench(options(questions, target, variants=("wrong",), limit=2))["variants"]
    assert variants["wrong"]["total"]["identical"] + len(variants["wrong"]["differences"]) == 6
    assert variants["wrong"]["differences"]
    for found in variants["wrong"]["differences"]:
        assert found["tokens"][0] != found["tokens"][1] and found["logit_gap"] > 0 and found["position"] >= 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variants": ("prompt-lokup",)}, "prompt-lokup.*use plain, host-prompt-lookup, host-draft-model=DIR"),
        ({"variants": ("draft-model=",)}, "draft-model="),
        ({"variants": ("token-recycling=many",)}, "'token-recycling=many': say how many nodes"),
        ({"variants": ("token-recycling=0",)}, "'token-recycling=0': say how many nodes"),
        ({"variants": ("prompt-lookup=x",)}, "prompt-lookup=x"),
        ({"variants": ("plain", "prompt-lookup", "prompt-lookup")}, "names one twice"),
        ({"variants": ("host-prompt-lookup",), "batch_size": 2}, "batch_size=2.*Leave these variants out"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"limit": 0}, "limit=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"turns": "last"}, "turns='last'.*first, all"),
    ],
)
def test_bad_options_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BenchOptions(questions="questions.jsonl", **settings)


def test_bad_questions_are_refused(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question_id": 1, "category": "math", "turns": ["One?"]}\n\n{"question_id": 2}\n')
    with pytest.raises(ValueError, match=r"line 3 is no question.*category"):
        read_questions(path)
    path.write_text('{"question_id": 1, "category": "math", "turns": []}\n')
    with pytest.raises(ValueError, match="turns must be a list of at least one text"):
        read_questions(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no questions"):
        read_questions(path)


def test_unknown_categories_are_refused_with_the_known_ones(folders):
    with pytest.raises(ValueError, match="no questions of poetry; it has math, translation, writing"):
        run_bench(options(folders[2], folders[0], categories=("math", "poetry")))


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_overhead_leaves_the_prompt_out():
    stats = SpecStats()
    stats.seconds.update(prefill=100.0, draft=1.0, verify=7.0, accept=1.5, bookkeeping=0.5)
    assert overhead_share(stats) == pytest.approx(0.2)
    assert overhead_share(None) is None


def test_typical_is_the_geometric_mean_of_medians():
    value, (low, high) = typical([[1.0, 2.0, 9.0], [7.0, 8.0, 9.0]])
    assert value == pytest.approx(4.0)
    assert 1 <= low <= value <= high < 9.001
    assert typical([[1.5, 1.5], [1.5]]) == (pytest.approx(1.5), pytest.approx([1.5, 1.5]))


def test_speedup_of_sums_and_of_pairs_differ_as_they_should():
    def batch(number, plain_seconds, fast_seconds):
        def run(seconds):
            return Run([[Turn([1], [5] * 10)]], seconds, target_passes=10, rounds=10)

        return Batch("any", [number], {"plain": run(plain_seconds), "fast": run(fast_seconds)})

    figures = summary([batch(0, 1.0, 0.5), batch(1, 1.0, 0.5), batch(2, 8.0, 8.0)], "fast", is_greedy=True)
    assert figures["total"]["speedup"] == pytest.approx(10 / 9)
    assert figures["total"]["median_speedup"] == pytest.approx(2.0)
    assert "against_host_prompt_lookup" not in figures


def test_write_json_replaces_the_whole_file(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")
    write_json({"a": 1}, path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
