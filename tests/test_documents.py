"""What the documents show is executed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import hf_specdec
from tests.models import jittered
from tests.tokenizers_for_tests import save_tiny

ROOT = Path(__file__).parent.parent


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


def test_the_python_of_the_readme_runs(tmp_path, capsys):
    folder = save_tiny(tmp_path)
    small_model = jittered(AutoModelForCausalLM.from_pretrained(folder))
    names = {"name": folder, "small_model": small_model, "text": "the quick brown fox"}
    exec("from transformers import pipeline", names)
    for block in blocks("README.md", "python"):
        exec(block, names)
    assert "mean acceptance length" in capsys.readouterr().out
    assert "generate" not in vars(names["model"])


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(example, tmp_path, monkeypatch, capsys):
    folders = [save_tiny(tmp_path / str(seed), seed=seed) for seed in range(2)]
    monkeypatch.setattr("sys.argv", [example, *folders])
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    assert capsys.readouterr().out
    assert len((ROOT / "examples" / example).read_text().splitlines()) < 60


def test_the_tables_of_the_readme_name_what_exists():
    text = (ROOT / "README.md").read_text()
    for name in hf_specdec.drafters.NAMED:
        assert f'"{name}"' in text
    for option in hf_specdec.options.OPTION_NAMES:
        assert f"`{option}`" in text


def test_files_named_in_the_architecture_exist():
    named = set(re.findall(r"`(?:\w+/)?(\w+\.py)`", (ROOT / "docs/architecture.md").read_text()))
    existing = {p.name for folder in ("hf_specdec", "tests") for p in (ROOT / folder).rglob("*.py")}
    assert named <= existing
