"""The drafters that are published from this repository: their files, their cards, and what they draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import DraftTree, load_drafter
from hf_specdec.demo_model import demo_model_path

CARDS = Path(__file__).parents[1] / "model_cards"
DRAFTERS = sorted(path.parent for path in CARDS.glob("*/model.safetensors"))
MEBIBYTE = 2**20
QUESTIONS = ["Why do people enjoy listening to music?", "Tom has 12 apples and eats 5. How many are left?"]

drafters = pytest.mark.parametrize("folder", DRAFTERS, ids=lambda folder: folder.name)


def test_weights_stay_small():
    sizes = [(folder / "model.safetensors").stat().st_size / MEBIBYTE for folder in DRAFTERS]
    assert sizes and max(sizes) <= 16 and sum(sizes) <= 40


@drafters
def test_a_folder_holds_what_the_hub_shows_and_nothing_of_the_machine(folder):
    assert {path.name for path in folder.iterdir()} <= {"README.md", "config.json", "model.safetensors", "curves.png"}
    config, card = json.loads((folder / "config.json").read_text()), ModelCard.load(folder / "README.md")
    assert card.data.library_name == "hf_specdec" and card.data.license == "apache-2.0"
    assert card.data.base_model == config["hf_specdec"]["target"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config["hf_specdec"]["kind"] in card.data.tags
    assert "## Measured" in card.text and "## Training" in card.text
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {str(weights.get_tensor(name).dtype) for name in weights.keys()} <= {  # noqa: SIM118
            "torch.bfloat16",
            "torch.int64",
            "torch.bool",
        }
    for text in ((folder / "README.md").read_text(), (folder / "config.json").read_text()):
        assert not any(f"{root}/" in text for root in ("/root", "/home", "/work", "/tmp"))


@pytest.mark.slow
@drafters
def test_a_drafter_is_opened_by_id_and_drafts(folder, hub):
    """For the embedded demo model; the texts are plain's in float32."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(), padding_side="left")
    target = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval())
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    call = {**inputs, "do_sample": False, "max_new_tokens": 64}
    plain = target.generate(**call, assistant=False)
    hub.add(f"org/{folder.name}", folder)
    chains = load_drafter(f"org/{folder.name}", target)
    trees = load_drafter(f"org/{folder.name}", target, tree=DraftTree(depth=5, top_k=4, total_tokens=16))
    for drafter, least, num_drafted in ((chains, 1.3, 4), (trees, 1.5, 16)):
        assert torch.equal(target.generate(**call, assistant=drafter, num_draft_tokens=num_drafted), plain)
        assert hf_specdec.last_stats(target).mean_acceptance_length > least
