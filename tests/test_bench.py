"""The benchmark: what it asks, in which order, and the arithmetic of its figures."""

from __future__ import annotations

import copy
import io
import json
import statistics
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from rich.console import Console

from hf_specdec.checkpoints.write import write_head
from hf_specdec.checks import plots
from hf_specdec.checks.bench import (
    VARIANTS,
    Bench,
    BenchOptions,
    Question,
    combinations,
    publish,
    read_questions,
    rotated,
    run_bench,
    settings_of,
    write_json,
)
from hf_specdec.checks.report import Batch, Run, Turn, first_difference, overhead_share, summary, typical
from hf_specdec.checks.resuming import Kept
from hf_specdec.checks.tables import profile_table, setting_title, table
from hf_specdec.heads import EagleHead
from hf_specdec.loading import load_model
from hf_specdec.schedule import Load
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
        ({"variants": ("host-early-exit=all",)}, "'host-early-exit=all': say how many of the target's layers"),
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


def test_prompts_and_conversations_are_questions_too(tmp_path):
    path = tmp_path / "asked.jsonl"
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
    rows = [{"prompt": "Zero?", "task_id": "t/1"}, {"messages": [*history, {"role": "assistant", "content": "1"}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_questions(path) == [
        Question("t/1", "asked.jsonl", ("Zero?",)),
        Question(2, "asked.jsonl", ("One?",), (history[0],)),
    ]


def test_data_sets_of_the_hub_are_asked(monkeypatch):
    rows = [{"prompt": ["One?", "And now?"], "prompt_id": 7, "category": "math"}, {"prompt": "Two?"}]

    class Datasets:
        load_dataset = staticmethod(lambda name, split, streaming: rows if (name, split) == ("org/q", "test") else [])

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert read_questions("hub:org/q:test") == [
        Question(7, "math", ("One?", "And now?")),
        Question(2, "hub:org/q:test", ("Two?",)),
    ]
    assert BenchOptions(questions="hub:org/q:test").published()["questions"] == "hub:org/q:test"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'pip install "hf_specdec\[data\]"'):
        read_questions("hub:org/q")


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/result.json", "cannot be written"),
        (".", "cannot be written"),
        ("notes.txt", "holds no document of a benchmark"),
        ("other.json", "holds no document of a benchmark"),
    ],
)
def test_no_other_file_is_overwritten_and_no_folder_made(name, message, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other.json").write_text('["mine"]')
    with pytest.raises(ValueError, match=message):
        run_bench(BenchOptions(questions="none.jsonl"), output=tmp_path / name)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "notes.txt": "mine",
        "other.json": '["mine"]',
    }


def test_what_was_measured_is_printed_even_if_it_cannot_be_written(tmp_path, capsys):
    with pytest.raises(OSError, match="No such file"):
        publish({"a": 1}, tmp_path / "none" / "result.json")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_an_earlier_document_is_replaced(tmp_path):
    for document in ({"variants": {}}, {"settings": []}):
        write_json(document, tmp_path / "result.json")
        with pytest.raises(FileNotFoundError, match="none"):  # it gets as far as the questions
            run_bench(BenchOptions(questions="none.jsonl"), output=tmp_path / "result.json")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_categories_are_shown_as_they_are_called(folders, is_terminal):
    """What stands in brackets is no markup."""
    question = Question(1, "[/math]", ("How many?",))
    console = Console(file=io.StringIO(), width=200, force_terminal=is_terminal, color_system=None)
    document = Bench(options(folders[2], folders[0], variants=("plain",))).document([question], console)
    assert "[/math]" in console.file.getvalue()
    shown = Console(file=io.StringIO(), width=200)
    shown.print(table(document))
    assert "[/math]" in shown.file.getvalue()


# --- strategies of the host -------------------------------------------------------------------------------


def test_early_exits_are_counted_as_drafts(folders):
    target, _, questions = folders
    settings = options(questions, target, variants=("host-early-exit=1", "early-exit=1"), limit=1)
    variants = run_bench(settings)["variants"]
    for figures in variants.values():
        assert figures["total"]["identical"] == 3
        # Every answer has at least as many tokens as passes, unless passes that draft are among these.
        assert figures["total"]["target_passes"] <= figures["total"]["tokens"]
    assert variants["early-exit=1"]["total"]["target_passes"] == variants["early-exit=1"]["total"]["rounds"]


def test_a_host_early_exit_behind_the_last_layer_is_refused(folders):
    with pytest.raises(ValueError, match="host-early-exit=2: LlamaForCausalLM has 2 layers; choose fewer"):
        Bench(options(folders[2], folders[0], variants=("host-early-exit=2",)))


# --- several settings -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(folders):
    """Two targets and two batch sizes."""
    target, drafter, questions = folders
    others = {"dtype": "float32", "device": "cpu", "categories": ("writing",), "limit": 2, "max_new_tokens": 6}
    variants = ("plain", "host-prompt-lookup", "prompt-lookup")
    return run_bench(combinations([target, drafter], (1, 2), variants=variants, questions=questions, **others))


def test_every_combination_is_a_setting():
    settings = combinations(("a", "b"), (1, 2), (0.0, 1.0), questions="q", num_draft_tokens=3)
    found = [(setting.target, setting.batch_size, setting.temperature) for setting in settings]
    assert found == [(target, size, heat) for target in "ab" for size in (1, 2) for heat in (0.0, 1.0)]
    assert {setting.num_draft_tokens for setting in settings} == {3}


def test_every_setting_is_measured(several, folders):
    found = [(document["options"]["target"], document["options"]["batch_size"]) for document in settings_of(several)]
    assert found == [(target, size) for target in folders[:2] for size in (1, 2)]
    for document in settings_of(several):
        is_single = document["options"]["batch_size"] == 1
        assert ("host-prompt-lookup" in document["variants"]) == is_single
        assert [batch["question_ids"] for batch in document["batches"]] == ([[0], [2]] if is_single else [[0, 2]])
        assert document["variants"]["prompt-lookup"]["total"]["identical"] == 2
    assert len({setting_title(document) for document in settings_of(several)}) == 4


def test_a_single_setting_is_its_own_document(document):
    assert settings_of(document) == [document]
    (single,) = combinations(questions="q")
    assert single == BenchOptions("q")


@pytest.mark.parametrize("several", [{"targets": ("a", "a")}, {"batch_sizes": (1, 1)}, {"temperatures": ()}])
def test_combinations_refuse_what_is_named_twice_or_not_at_all(several):
    with pytest.raises(ValueError, match="name at least one, and each once"):
        combinations(questions="q", **several)
    with pytest.raises(ValueError, match=r"batch_size=2.*Leave these variants out"):
        combinations(questions="q", batch_sizes=(2, 4))


# --- resuming ---------------------------------------------------------------------------------------------


def interrupted_after(num_groups):
    """A benchmark that is stopped as by Ctrl-C once it has finished so many groups."""
    real, calls = Bench.ask, []

    def ask(self, name, group, max_new_tokens, turns):
        if max_new_tokens == self.options.max_new_tokens:  # not the warm-up
            calls.append(group[0].question_id)
            if len(calls) > num_groups * len(self.variants):
                raise KeyboardInterrupt
        return real(self, name, group, max_new_tokens, turns)

    return mock.patch.object(Bench, "ask", ask), calls


def counted(document):
    """What does not depend on the clock."""
    return {
        name: {key: figures["total"][key] for key in ("tokens", "rounds", "drafted", "accepted", "identical")}
        for name, figures in document["variants"].items()
    }


def test_a_killed_benchmark_goes_on(folders, tmp_path):
    target, drafter, questions = folders
    output, variants = tmp_path / "result.json", ("plain", "prompt-lookup", "host-prompt-lookup")
    settings = options(questions, target, variants=variants, limit=2, num_draft_tokens=4)
    whole = run_bench(settings)
    patch, _ = interrupted_after(4)
    with patch, pytest.raises(KeyboardInterrupt):
        run_bench(settings, output=output)
    assert not output.exists()
    assert sum(path.stem.split("-")[-1].isdecimal() for path in (tmp_path / "result.json.partial").iterdir()) == 4
    for other in (replace(settings, limit=1), replace(settings, max_new_tokens=13), replace(settings, target=drafter)):
        with pytest.raises(ValueError, match="holds an unfinished run with other options"):
            run_bench(other, output=output)
    patch, calls = interrupted_after(100)
    with patch:
        document = run_bench(settings, output=output)
    assert calls == [3] * 3 + [7] * 3  # the two groups that were missing
    assert counted(document) == counted(whole)
    assert [batch["question_ids"] for batch in document["batches"]] == [[0], [2], [1], [5], [3], [7]]
    assert document["resumed_at"] == [4] and "resumed_at" not in whole
    assert json.loads(output.read_text()) == json.loads(json.dumps(document))
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_finished_setting_is_not_repeated(folders, tmp_path):
    target, _, questions = folders
    settings = [options(questions, target, variants=("plain",), limit=1, temperature=heat) for heat in (0.0, 1.0)]
    patch, _ = interrupted_after(3 + 1)
    with patch, pytest.raises(KeyboardInterrupt):
        run_bench(settings, output=tmp_path / "result.json")
    patch, calls = interrupted_after(100)
    with patch:
        document = run_bench(settings, output=tmp_path / "result.json")
    assert calls == [1, 3] and len(document["settings"]) == 2
    assert [document.get("resumed_at") for document in document["settings"]] == [None, [1]]


def test_a_benchmark_goes_on_only_where_it_began_and_with_its_questions(folders, tmp_path):
    settings = options(folders[2], folders[0])
    asked = [Question(1, "math", ("One?",))]
    output = tmp_path / "result.json"
    surroundings = {"torch": "2.11", "date": "yesterday"}
    assert Kept(output, [settings], asked).setting(0).begin(surroundings) == (surroundings, [])
    assert Kept(output, [settings], asked).setting(0).begin(surroundings | {"date": "today"}) == (surroundings, [])
    with pytest.raises(ValueError, match=r"other surroundings \(torch: '2.11', now '2.12'\)"):
        Kept(output, [settings], asked).setting(0).begin(surroundings | {"torch": "2.12"})
    with pytest.raises(ValueError, match=r"other options \(questions: "):
        Kept(output, [settings], [Question(1, "math", ("Two?",))])


# --- what is shown ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(folders):
    """All kinds of variants; seconds of rounds, which fixed draft lengths leave unmeasured, are made up."""
    target, _, questions = folders
    variants = ("plain", "host-prompt-lookup", "prompt-lookup", "auto")
    found = run_bench(options(questions, target, variants=variants, limit=1, max_new_tokens=40, num_draft_tokens=4))
    seconds = {"0": [1.0, 1.2, 9.0], "4": [2.0, 2.0]}
    for name in ("prompt-lookup", "auto"):
        measured = {"payer": "(free)", "rows": 1, "text_tokens": 64, "seconds": seconds}
        found["variants"][name]["profile"]["round_seconds"] = [measured]
    return found


def test_profiles_hold_seconds_by_phase_and_tokens_by_drafter(profiled):
    for name, figures in profiled["variants"].items():
        total, profile = figures["total"], figures["profile"]
        if name in ("plain", "host-prompt-lookup"):
            assert profile is None
            continue
        assert total["seconds_by_phase"] == profile["seconds"]
        assert 0 < sum(profile["seconds"].values()) < total["seconds"]
        assert sum(profile["drafted_by"].values()) == total["drafted"]
        assert sum(profile["accepted_by"].values()) == total["accepted"] == profile["spec_decode_num_accepted_tokens"]
    assert len(profiled["variants"]["auto"]["profile"]["drafted_by"]) > 1
    text = shown(profile_table(profiled))
    profile = profiled["variants"]["prompt-lookup"]["profile"]
    assert f"{profile['accepted']} of {profile['drafted']}" in text
    assert "outside the loop" in text and "host-prompt-lookup" not in text


def test_measured_seconds_of_rounds_are_in_the_profile(folders):
    bench = Bench(options(folders[2], folders[0], variants=("prompt-lookup",), limit=1))
    drafter = bench.variants["prompt-lookup"]()["assistant"]
    drafter.experience_with(bench.model).record_seconds("(free)", Load.of(5, 64), 3, 0.25)
    document = bench.document(read_questions(folders[2], limit=1))
    expected = {"payer": "(free)", "rows": 5, "text_tokens": 64, "seconds": {"3": [0.25]}}
    assert expected in document["variants"]["prompt-lookup"]["profile"]["round_seconds"]


def shown(what, **settings):
    stream = io.StringIO()
    Console(file=stream, width=200, **settings).print(what)
    return stream.getvalue()


def test_a_log_shows_lines_and_a_terminal_a_bar(folders):
    target, _, questions = folders
    settings = options(questions, target, variants=("plain",), limit=1)
    streams = {}
    for is_terminal in (False, True):
        streams[is_terminal] = io.StringIO()
        console = Console(file=streams[is_terminal], force_terminal=is_terminal, width=120)
        run_bench(settings, console, profile=is_terminal)
    log, terminal = streams[False].getvalue(), streams[True].getvalue()
    assert "\x1b" not in log and "━" not in log
    assert log.splitlines()[:3] == ["1/3 writing", "2/3 math", "3/3 translation"]
    assert "━" in terminal and "3/3 translation" not in terminal
    assert "Seconds by phase" in terminal and "Seconds by phase" not in log


def test_plots_of_a_document(profiled, tmp_path):
    stream = io.StringIO()
    files = plots.draw_plots(profiled, tmp_path / "plots", Console(file=stream, width=200))
    assert [path.stem for path in files] == list(plots.PLOTS)
    assert sorted(files) == sorted((tmp_path / "plots").iterdir())
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in files)
    assert "left out" not in stream.getvalue()


def test_curves_are_the_counts(profiled):
    profile = profiled["variants"]["auto"]["profile"]
    curves = {line.get_label(): list(line.get_ydata()) for line in plots.acceptance_by_position(profiled).axes[0].lines}
    num_points = len(curves["auto"])
    assert num_points > 0 and curves["auto"] == pytest.approx(profile["acceptance_by_position"][:num_points])
    lines = plots.length_by_draft(profiled).axes[0].lines
    place = [line.get_label() for line in lines].index("auto")  # for the legend; behind it the curve and the mark
    first = profile["accepted_at"][0] / profile["tested_at"][0]
    assert lines[place + 1].get_ydata()[:2] == pytest.approx([1, 1 + first])
    drafts = profile["rounds_with_draft"]
    assert lines[place + 2].get_xydata()[0] == pytest.approx(
        [profile["drafted"] / drafts, 1 + profile["accepted"] / drafts]
    )


def test_costs_are_medians_by_width(profiled):
    (line,) = (line for line in plots.cost_by_width(profiled).axes[0].lines if line.get_label() == "auto")
    assert list(line.get_xdata()) == [0, 4] and list(line.get_ydata()) == [1200, 2000]


def test_every_setting_has_its_own_plots_and_what_cannot_be_drawn_is_said(several, tmp_path):
    stream = io.StringIO()
    several = {"settings": copy.deepcopy(settings_of(several)[:2])}
    for document in several["settings"]:
        document["variants"]["prompt-lookup"]["profile"]["round_seconds"] = []
    files = plots.draw_plots(several, tmp_path, Console(file=stream, width=200))
    assert {"speedup-by-category-0.png", "speedup-by-category-1.png"} <= {path.name for path in files}
    assert "cost-by-width-1.png is left out: no variant has measured rounds of several widths" in stream.getvalue()


def test_drafters_of_the_same_name_are_told_apart():
    document = {"variants": dict.fromkeys(("plain", "drafter=a/head", "drafter=b/head", "drafter=b/other"))}
    labels = [style["label"] for style, _ in plots.styled(document, document["variants"])]
    assert labels == ["drafter=a/head", "drafter=b/head", "drafter=other"]
