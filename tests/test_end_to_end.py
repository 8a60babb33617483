"""From nothing to a published drafter in use: data, training, card, Hub, checks and text, for every kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import DraftModel, Eagle, ParallelDraft, load_drafter
from hf_specdec.cli import main
from hf_specdec.provenance import KEY
from hf_specdec.training.answers import DataOptions, make_data
from hf_specdec.training.curves import read_metrics
from hf_specdec.training.loop import train
from hf_specdec.training.options import TrainOptions
from tests.tokenizers_for_tests import save_tiny
from tests.training_data import KINDS

CLASSES = {"eagle3": Eagle, "p-eagle": ParallelDraft, "pard": ParallelDraft, "draft": DraftModel}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A target's folder, and data it has made from a file of prompts."""
    folder = tmp_path_factory.mktemp("end-to-end")
    save_tiny(folder / "target")
    prompts = [f"Write a story about {n} apples, please." for n in range(48)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    given = {"prompts": str(folder / "prompts.jsonl"), "batch_size": 16, "max_new_tokens": 24, "dtype": "float32"}
    with open(os.devnull, "w") as nowhere:
        make_data(DataOptions(str(folder / "target"), folder / "data", tokens=100_000, **given), Console(file=nowhere))
    return str(folder / "target"), str(folder / "data")


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_trained_published_and_used(kind, places, hub, tmp_path, capsys):
    location, data = places
    told = {"batch_tokens": 256, "batches_per_step": 1, "learning_rate": 1e-2, "warmup_steps": 2, "dtype": "float32"}
    told |= {"max_steps": 40, "evaluate_steps": 40, "held_out_share": 0.2, "cache_gigabytes": 0.0, "device": "cpu"}
    folder, name = tmp_path / "drafter", f"org/trained-{kind}"  # the host remembers commits of names
    train(TrainOptions(kind, data, str(folder), target=location, recipe=KINDS[kind], **told), lambda event: None)
    first, last = read_metrics(folder / "metrics.jsonl")[0], read_metrics(folder / "metrics.jsonl")[-1]
    assert last["acceptance_length"] > first["acceptance_length"]
    assert main(["push", str(folder), name, "--license", "apache-2.0"]) == 0
    repository = hub.repositories[name]
    files = repository.commits[repository.branches["main"]]
    assert capsys.readouterr().out.strip().endswith(repository.branches["main"])
    assert not any(str(tmp_path.parent).encode() in body for body in files.values())  # whose folders it was made in
    card = ModelCard(files["README.md"].decode())
    assert f"{last['acceptance_length']:.3f}" in card.text and kind in card.data.tags
    block = json.loads(files["config.json"])[KEY]
    assert (
        block["kind"] == kind and block["data"]["counts"]["examples"] == 48 and block["target"] == Path(location).name
    )
    assert not hf_specdec.check(location, name).errors
    target = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    drafter = load_drafter(name, target)
    assert isinstance(drafter, CLASSES[kind])
    hf_specdec.enable(target)
    tokenizer = AutoTokenizer.from_pretrained(location)
    inputs = tokenizer(["Write a story about 7 apples, please."], return_tensors="pt")
    plain = target.generate(**inputs, assistant=False, max_new_tokens=24, do_sample=False)
    found = target.generate(**inputs, assistant=drafter, max_new_tokens=24, do_sample=False)
    assert torch.equal(found, plain) and hf_specdec.last_stats(target).drafted > 0
