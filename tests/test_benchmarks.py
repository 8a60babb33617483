"""Every benchmark script runs, on a tiny model, and prints one JSON document last."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import CompileConfig

from hf_specdec import cli
from hf_specdec.checkpoints.write import write_head
from hf_specdec.heads import EagleHead
from hf_specdec.loading import load_model
from hf_specdec.training.recipes.heads import head_config, initialise
from tests.reference import FALSE_ALARM
from tests.test_bench import entries
from tests.tokenizers_for_tests import save_tiny

SCRIPTS = Path(__file__).parents[1] / "benchmarks"
QUIET = Console(quiet=True)


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
    with pytest.raises(ValueError, match=r"answers\.json was made with .*; remove it or name another"):
        document("ablation", capsys, questions, *given, "--max-new-tokens", 11, *kept)


@pytest.mark.parametrize(("name", "more"), [("history", []), ("lookup", ["--rounds", 20])])
def test_indexes(name, more, capsys):
    found = document(name, capsys, "--sizes", 500, *more)
    assert {row["history"] for row in found["results"]} == {500}
    assert all(row["propose_us"] > 0 for row in found["results"])


# A stand-in for economize: its loop generates plainly, and draws twice as hot with a draft model.
PEER = """
import dataclasses, types, torch
__version__ = "0"
Config = dataclasses.make_dataclass("Config", ["param_dtype"])
DecodeConfig = dataclasses.make_dataclass("DecodeConfig", ["cycle_length", ("verifier", object, None)])
TopPSampler = dataclasses.make_dataclass("TopPSampler", ["temperature", "top_p", "seed"])
class Model:
    def __init__(self, target, heat): self.target, self.heat = target, heat
    def decode(self, ids, count, decoding, stop, selector=None):
        draw = {"do_sample": False}
        if selector is not None:
            torch.manual_seed(selector.seed)
            draw = {"do_sample": True, "top_k": 0, "temperature": selector.temperature * self.heat}
        output = self.target.generate(ids[None], max_new_tokens=count, **draw)
        return types.SimpleNamespace(tokens=output[0, len(ids) :])
def apply(target, *configs): return Model(target, 2 if any(hasattr(one, "model") for one in configs) else 1)
def read_checkpoint(folder): raise ValueError("this head is not for me")
"""
TECHNIQUES = {
    "draft_model": "class DraftModelConfig:\n    def __init__(self, model): self.model = model",
    "lookup": "class LookupConfig: pass",
}


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """A folder of environments: economize's has a stand-in, flashspec's lacks it, others are not there."""
    monkeypatch.syspath_prepend(SCRIPTS)
    package = tmp_path / "lib" / "economize"
    for name, text in TECHNIQUES.items():
        (package / "techniques" / name).mkdir(parents=True)
        (package / "techniques" / name / "__init__.py").write_text(text)
    (package / "__init__.py").write_text(PEER)
    for name in ("economize", "flashspec"):
        python = tmp_path / f"env-{name}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "lib"} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
    return tmp_path


def head_for(target, folder):
    """An untrained head over all ids."""
    model = load_model(target, torch.float32, torch.device("cpu"))
    ids = torch.arange(model.config.vocab_size)
    folder.mkdir()
    write_head(initialise(EagleHead(head_config(model, len(ids))), model, ids), folder)
    return folder


def test_peers(target, peers, capsys):
    questions = peers / "questions.jsonl"
    questions.write_text("".join(json.dumps(entry) + "\n" for entry in entries()))
    given = [*float32(target), "--environments", peers, "--questions", questions, "--limit", 1, "--law-samples", 0]
    given += ["--head", head_for(target, peers / "head"), "--draft-model", target, "--max-new-tokens", 8]
    given += ["--num-drafted", 3, "--threads", 1, "--keep", peers / "kept.jsonl"]
    first = document("peers/__main__", capsys, *given)
    ours, hosts, stand_in = (first["figures"][name] for name in ("hf_specdec", "transformers", "economize"))
    assert {"plain", "lookup", "suffix", "auto", "draft-model", "eagle3"} <= set(ours)
    assert set(hosts) == {"plain", "lookup", "draft-model", "draft-model-default"}
    assert set(stand_in) == {"plain", "generate", "lookup", "draft-model"}
    for way in [*ours.values(), *hosts.values(), *stand_in.values()]:
        assert (way["answers"], way["as_generate"], way["as_ours"]) == (3, 3, 3) and way["tokens_per_pass"] >= 1
    assert hosts["draft-model"]["tokens_per_pass"] > 2  # the target drafts for itself
    assert hosts["plain"]["over_plain"]["ratio"] == 1 and stand_in["lookup"]["ours_over_it"]["speed"]["ratio"] > 0
    peers_said = first["peers"]
    assert "this head is not for me" in peers_said["economize"]["unusable"]["eagle3"]
    assert "No module named 'flashspec'" in peers_said["flashspec"]["error"]
    assert "--make-environments" in peers_said["dejavuu"]["error"]
    again = document("peers/__main__", capsys, *given, "--only", "transformers")["figures"]
    assert again == {name: first["figures"][name] for name in again}  # seconds too: nothing ran again


@pytest.mark.parametrize(("way", "follows"), [("lookup", True), ("draft-model", False)])
def test_the_samples_of_peers_are_judged(way, follows, peers, tmp_path):
    """500 samples of the stand-in."""
    law, process = (importlib.import_module(f"peers.{name}") for name in ("law", "process"))
    kept = importlib.import_module("peers.kept").Kept(None, {})
    with process.started(["economize"], law.tiny_case(tmp_path / "tiny"), peers, QUIET) as processes:
        processes["economize"].ways = [way]
        found = law.tests_of(processes["economize"], 500, kept, QUIET)[way]["T=1"]
    assert found["samples"] == 500 and (found["p_value"] > FALSE_ALARM) == follows


def test_a_text_without_probability_is_never_excused(peers):
    law = importlib.import_module("peers.law")
    samples = torch.cat([torch.zeros(999, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)])
    only_zeros = torch.zeros(8, 8, 8, dtype=torch.float64)
    only_zeros[0, 0, 0] = 1
    assert law.verdict(samples, only_zeros) == {"samples": 1000, "impossible": 1, "p_value": 0.0}


def test_a_peer_that_dies_stops_nobody(target, peers):
    side, process = (importlib.import_module(f"peers.{name}") for name in ("side", "process"))
    with process.started(["transformers"], side.Case(target, dtype="float32"), None, QUIET) as processes:
        processes["transformers"].process.kill()
        answers = [processes["transformers"].ask(way="plain", prompt=[3], max_new_tokens=1) for _ in range(2)]
    assert all(answer["error"].startswith("ended early") for answer in answers)


def test_kept_answers_belong_to_their_settings(peers):
    kept = importlib.import_module("peers.kept").Kept
    kept(peers / "file", {"dtype": "float32"}).put([1, 2], 7, "economize")
    with (peers / "file").open("a") as file:
        file.write('{"key": [8, "eco')  # broken off
    again = kept(peers / "file", {"dtype": "float32"})
    assert again.get(7, "economize") == [1, 2] and again.get(8, "economize") is None
    again.put([3], 9, "economize")
    assert kept(peers / "file", {"dtype": "float32"}).get(9, "economize") == [3]
    with pytest.raises(ValueError, match="other settings"):
        kept(peers / "file", {"dtype": "bfloat16"})


def test_an_environment_that_fails_stops_no_other(peers, monkeypatch):
    environments = importlib.import_module("peers.environments")
    ran = []

    def run(command, **arguments):
        ran.append(command)
        Path(command[-1]).mkdir(exist_ok=True, parents=True) if "venv" in command else None
        if any(part.endswith("dejavuu.txt") for part in command):
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(environments.subprocess, "run", run)
    environments.make_environments(peers, None)
    made = {Path(command[-1]).name for command in ran if "venv" in command}
    assert made == {"env-dejavuu", "env-arctic"}  # the others are there
    assert (peers / "env-arctic").exists() and not (peers / "env-dejavuu").exists()
    with pytest.raises(ValueError, match="no such peer; use one of"):
        environments.make_environments(peers, ["economise"])


def test_passes_of_a_grid(target, capsys, monkeypatch):
    """Graphs run as they were recorded, since compiling takes minutes."""
    compiled = script("compiled")
    monkeypatch.setattr(compiled, "compilation", lambda model: eager_graphs())
    compiled.main([*map(str, float32(target)), "--rows", "1,2", "--widths", "1,3", "--max-new-tokens", "0"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "ways" not in found and [(one["rows"], one["width"]) for one in found["passes"]] == [
        (1, 1),
        (1, 3),
        (2, 1),
        (2, 3),
    ]
    assert min(min(one["eager_milliseconds"], one["compiled_milliseconds"]) for one in found["passes"]) > 0


def eager_graphs():
    config = CompileConfig(backend="eager", mode=None, dynamic=False)
    config._compile_all_devices = True
    return config


# Stands for Python in gpu.sh: writes down what it is to run, fails at two steps, and runs only what gathers.
STAND_IN = """#!/bin/bash
if [ "$1" = "-" ]; then exec {python} "$@"; fi
printf '%s\\0' "$@" >>{folder}/commands; printf '\\n' >>{folder}/commands
case "$*" in
    *rules.py*) echo "out of memory"; exit 3 ;;
    *compiled.py*) sleep "${{SLOW:-0}}" ;;
    "-m pytest"*) echo "7 passed" ;;
    *) echo noise; echo '{{"results": 1}}' ;;
esac
"""


def gpu_script(folder, *arguments, **environment):
    """Runs gpu.sh with the stand-in: how it ended, and the commands it ran."""
    (folder / "python").write_text(STAND_IN.format(python=sys.executable, folder=folder))
    (folder / "python").chmod(0o755)
    known = {**os.environ, "PYTHON": str(folder / "python"), "OUT": str(folder / "out"), **environment}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "gpu.sh"), *arguments], env=known, capture_output=True, text=True, timeout=300
    )
    lines = (folder / "commands").read_text().splitlines()
    return done, [line.rstrip("\0").split("\0") for line in lines]


def test_the_gpu_script_goes_on_after_a_failure_and_tells_all(tmp_path):
    (tmp_path / "questions.jsonl").touch()
    done, _ = gpu_script(tmp_path, str(tmp_path / "questions.jsonl"), MODEL="some/folder", BUDGET="4", SLOW="60")
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and told["failed"] == ["rules", "compiled", "overhead-compiled"]
    steps = told["steps"]
    assert list(steps) == ["device", "tests", "rules", "overhead", "bench", "compiled", "overhead-compiled"]
    assert (steps["rules"]["status"], steps["rules"]["said"]) == (3, "out of memory")
    assert steps["compiled"]["status"] == 124  # it took what was left of four seconds
    assert steps["overhead-compiled"]["said"] == "there was no time left"
    assert steps["tests"]["said"] == "7 passed" and steps["bench"]["said"] == {"results": 1}
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == told


@pytest.mark.parametrize("with_questions", [False, True])
def test_the_commands_of_the_gpu_script_can_be_parsed(with_questions, tmp_path, monkeypatch):
    questions = [str(tmp_path / "questions.jsonl")] * with_questions
    (tmp_path / "questions.jsonl").touch()
    _, commands = gpu_script(tmp_path, *questions)
    monkeypatch.setitem(sys.modules, "overhead", script("overhead"))
    parsed = []
    for command in commands:
        if command[0].startswith("benchmarks/"):
            parsed.append((Path(command[0]).stem, script(Path(command[0]).stem).parsed(command[1:])))
        elif command[:2] == ["-m", "hf_specdec.cli"]:
            parsed.append(("bench", cli._parser().parse_args(command[2:])))
    expected = ["rules", "overhead", *["bench"] * with_questions, "compiled", "overhead"]
    assert [name for name, _ in parsed] == expected
    assert all(options.device == "cuda" and options.dtype == "bfloat16" for _, options in parsed)
    assert [options.compiled for name, options in parsed if name == "overhead"] == [False, True]


@pytest.mark.slow
def test_compiled(target, capsys):
    found = document("compiled", capsys, *float32(target), "--max-new-tokens", 8, "--num-draft-tokens", 3)
    assert found["ways"]["compiled, speculative"]["graphs_afterwards"] == 0
