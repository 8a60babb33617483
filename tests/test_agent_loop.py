"""The benchmark of agent-like requests: what it asks, and that no drafter knows a request before it is measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from rich.console import Console

from hf_specdec.checks.bench import Bench, BenchOptions
from hf_specdec.checks.tables import host_table, lengths_table, table
from tests.tokenizers_for_tests import save_tiny

PATH = Path(__file__).parent.parent / "benchmarks" / "agent_loop.py"


@pytest.fixture(scope="module")
def agent_loop():
    specification = importlib.util.spec_from_file_location("agent_loop", PATH)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_seed_says_all_requests(agent_loop):
    assert agent_loop.requests(8) == agent_loop.requests(8)
    assert agent_loop.requests(8, seed=1) != agent_loop.requests(8)


def test_both_passes_have_as_many_requests_of_every_category(agent_loop):
    for questions in agent_loop.requests(8):
        categories = [question.category for question in questions]
        assert categories == [name for name in agent_loop.CATEGORIES for _ in range(8)]


def test_no_request_is_made_twice(agent_loop):
    warm, measured = agent_loop.requests(40)
    texts = {json.dumps([*question.history, question.turns]) for question in warm + measured}
    names = {question.question_id for question in warm + measured}
    assert len(texts) == len(names) == 2 * 3 * 40


def test_worked_examples_are_the_json_they_ask_for(agent_loop):
    warm, _ = agent_loop.requests(1)
    answers = [message["content"] for message in warm[0].history if message["role"] == "assistant"]
    assert [json.loads(answer)["tool"] for answer in answers] == ["open_ticket", "open_ticket"]


def test_every_edit_finds_its_place_in_the_file(agent_loop):
    for old, replacements in agent_loop.EDITS.items():
        assert agent_loop.SHOP_FILE.count(old) == 1
        assert old not in replacements


@pytest.fixture(scope="module")
def result(agent_loop, tmp_path_factory):
    """The whole run with a tiny model, and which variant was asked what, in order."""
    asked = []
    original = Bench.ask

    def ask(self, name, group, max_new_tokens, turns):
        asked.extend((name, question.question_id) for question in group)
        return original(self, name, group, max_new_tokens, turns)

    options = BenchOptions(
        questions=str(PATH),
        target=save_tiny(tmp_path_factory.mktemp("target")),
        variants=("plain", "host-prompt-lookup", "prompt-lookup"),
        dtype="float32",
        device="cpu",
        max_new_tokens=8,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "ask", ask)
        return agent_loop.run(options, 1, Console(quiet=True)), asked


def test_figures_of_all_variants(result):
    document, _ = result
    names = ["plain", "host-prompt-lookup", "prompt-lookup", "suffix-cold", "suffix-warm", "auto-warm"]
    assert list(document["variants"]) == names
    for figures in document["variants"].values():
        assert list(figures["by_category"]) == ["tool-call", "code-edit", "reflection"]
        assert figures["total"]["identical"] == 3
        assert figures["against_host_prompt_lookup"]["geometric_mean"]["speedup"] > 0
    assert json.loads(json.dumps(document))["memory"]["suffix-warm"]["requests"] == 3
    for made in (table, host_table, lengths_table):
        assert made(document).row_count >= 3


def test_what_is_measured_was_asked_once_and_last(agent_loop, result):
    _, asked = result
    warm, measured = ({question.question_id for question in questions} for questions in agent_loop.requests(1))
    for name in ("plain", "suffix-warm", "auto-warm"):
        own = [question_id for variant, question_id in asked if variant == name]
        assert set(own[-3:]) == measured
        assert set(own[:-3]) <= warm


def test_only_the_warm_variants_remember(agent_loop, result):
    document, _ = result
    assert set(document["memory"]) == set(agent_loop.WARM)
    for memory in document["memory"].values():
        assert memory["requests"] == 3 and memory["tokens"] > 0
