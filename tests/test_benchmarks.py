"""Every benchmark script runs, on a tiny model, and prints one JSON document last."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.test_bench import entries
from tests.tokenizers_for_tests import save_tiny

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("benchmarks") / "target")


def float32(target):
    return "--target", target, "--dtype", "float32"


def document(name, capsys, *arguments):
    script(name).main([*map(str, arguments)])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_verification(target, capsys, tmp_path):
    output = tmp_path / "document.json"
    found = document("verification", capsys, *float32(target), "--max-new-tokens", 4, "--output", output)
    assert json.loads(output.read_text()) == found
    assert set(found["results"]) == {
        f"{noise}, {rule}" for noise in (0.1, 0.3) for rule in ("token", "block", "coupled")
    }


def test_never_slower(target, capsys):
    found = document("never_slower", capsys, *float32(target), "--max-new-tokens", 4, "--repeats", 2)
    assert len(found["workloads"]) == 4
    assert all(len(entry["ratios"]) == 2 for entry in found["workloads"].values())


def test_ablation(target, capsys, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(entry) + "\n" for entry in entries()))
    kept = ["--answers", tmp_path / "answers.json", "--costs", tmp_path / "costs.json"]
    given = [*float32(target), "--limit", 1, "--max-new-tokens", 12]
    first, second = (document("ablation", capsys, questions, *given, *kept) for _ in range(2))
    assert first == second  # answers and costs are kept, and a replay has no clock of its own
    assert first["settings"]["host rule"]["against_host_rule"] == 1.0


@pytest.mark.parametrize(("name", "more"), [("history", []), ("lookup", ["--rounds", 20])])
def test_indexes(name, more, capsys):
    found = document(name, capsys, "--sizes", 500, *more)
    assert {row["history"] for row in found["results"]} == {500}
    assert all(row["propose_us"] > 0 for row in found["results"])


@pytest.mark.slow
def test_compiled(target, capsys):
    found = document("compiled", capsys, *float32(target), "--max-new-tokens", 8, "--num-draft-tokens", 3)
    assert found["ways"]["compiled, speculative"]["graphs_afterwards"] == 0
