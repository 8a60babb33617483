"""Every benchmark script runs, on a tiny model, and prints one JSON document last."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_specdec
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


def test_trees(target, capsys):
    found = document("trees", capsys, *float32(target), "--contexts", "16", "--rows", 2, "--repeats", 1)
    assert len(found["milliseconds"]["16"]) == 9 and min(found["milliseconds"]["16"].values()) > 0


TINY = ("--shape", "tiny", "--dtype", "float32", "--device", "cpu", "--repeats", 1)


def test_overhead(capsys):
    options = ("--rows", "1,2", "--draft-tokens", 4, "--acceptance", "0,1", "--max-new-tokens", 32)
    found = document("overhead", capsys, *TINY, *options)["results"]
    assert len(found) == 4
    for name, result in found.items():
        is_right = name.endswith("acceptance 1")  # the oracle is right always or never
        assert result["tokens_a_round"] == pytest.approx(32 / 7 if is_right else 1)
        assert ("host's loop" in result["speedup"]) == name.startswith("1 rows")


def test_rules(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "overhead", script("overhead"))
    found = document("rules", capsys, *TINY, "--rows", "1,2", "--vocabulary", 100)["results"]
    assert len(found) == 8 and all(result["milliseconds"] > 0 for result in found.values())


def test_never_slower(target, capsys):
    found = document("never_slower", capsys, *float32(target), "--max-new-tokens", 4, "--repeats", 2)
    assert len(found["workloads"]) == 4
    assert all(len(entry["ratios"]) == 2 for entry in found["workloads"].values())


def test_ablation(target, capsys, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(entry) + "\n" for entry in entries()))
    kept = [part for name in ("answers", "costs", "successors") for part in (f"--{name}", tmp_path / f"{name}.json")]
    given = [*float32(target), "--limit", 1, "--max-new-tokens", 12]
    first, second = (document("ablation", capsys, questions, *given, *kept) for _ in range(2))
    assert first == second  # answers and costs are kept, and a replay has no clock of its own
    assert first["settings"]["host rule"]["against_host_rule"] == 1.0


@pytest.mark.parametrize(("name", "more"), [("history", []), ("lookup", ["--rounds", 20])])
def test_indexes(name, more, capsys):
    found = document(name, capsys, "--sizes", 500, *more)
    assert {row["history"] for row in found["results"]} == {500}
    assert all(row["propose_us"] > 0 for row in found["results"])


PEER = """
import dataclasses, types
__version__ = "0"
Config = dataclasses.make_dataclass("Config", ["param_dtype"])
DecodeConfig = dataclasses.make_dataclass("DecodeConfig", ["cycle_length"])
class Model:
    def __init__(self, target): self.target = target
    def decode(self, ids, count, decoding, stop):
        assert decoding.cycle_length == 4
        output = self.target.generate(ids, max_new_tokens=count, do_sample=False)
        return types.SimpleNamespace(tokens=output[0, ids.shape[1] :])
def read_checkpoint(folder): return types.SimpleNamespace(configs=[Config("float32")])
def attach(target, checkpoint): return Model(target)
"""


def head_for(target, folder):
    """A golden head whose target has another number of ids."""
    shutil.copytree(Path(__file__).parent / "golden/speculators/eagle3_residual", folder)
    vocabulary = json.loads(Path(target, "config.json").read_text())["vocab_size"]
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["vocab_size"] = vocabulary
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["t2d"] = torch.cat([tensors["t2d"], torch.zeros(vocabulary - 64, dtype=torch.bool)])
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.skipif(not hasattr(hf_specdec, "load_drafter"), reason="heads are no drafters yet")
@pytest.mark.parametrize("has_peer", [False, True])
def test_peers(has_peer, target, capsys, tmp_path, monkeypatch):
    """The peer is a stand-in: its package is not here, and only the comparison is tested."""
    (tmp_path / "economize.py").write_text(PEER)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(entry) + "\n" for entry in entries()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(SCRIPTS.parent)]))
    peer = ["--python-of-peer", sys.executable] if has_peer else []
    given = [*float32(target), "--head", head_for(target, tmp_path / "head"), "--questions", questions, "--limit", 1]
    found = document("peers", capsys, *given, "--max-new-tokens", 12, "--num-draft-tokens", 3, *peer)
    assert set(found["sides"]) == {"plain", "hf_specdec"} | ({"economize"} if has_peer else set())
    assert ("ours_over_peer" in found) == has_peer
    assert [side["as_plain"] for side in found["sides"].values()] == [3] * len(found["sides"])
    assert found["sides"]["plain"]["tokens_per_pass"] == 1 <= found["sides"]["hf_specdec"]["tokens_per_pass"]


@pytest.mark.slow
def test_compiled(target, capsys):
    found = document("compiled", capsys, *float32(target), "--max-new-tokens", 8, "--num-draft-tokens", 3)
    assert found["ways"]["compiled, speculative"]["graphs_afterwards"] == 0
