"""SmolLM2-135M-Instruct, the embedded demo model: what tiny random models cannot show."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import DraftModel
from hf_specdec.demo_model import demo_model_path
from tests.models import jittered

pytestmark = pytest.mark.slow

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
    "List the days of the week, then list them again in reverse.",
    "def add(a, b):\n    return a + b\n\nRewrite this function with type hints and a docstring.",
    "Translate to French: good morning, my friend.",
    "What is 17 plus 25? Explain step by step.",
    "Summarise: Water boils at 100 degrees. High up it boils at a lower temperature, since the pressure falls.",
    "Name five fruits and their colours.",
    "Why is the sky blue?",
    "Write a JSON object with the keys name, age and city.",
    "Correct the spelling: I recieved teh mesage yesterday evning.",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Explain recursion to a child.",
    "Write a short email asking for a day off.",
    "Count from one to twenty in words.",
    "What rhymes with light?",
    "Describe the water cycle in four steps.",
    "Continue: one two three one two three one two",
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path(), padding_side="left")


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval())


def encoded(tokenizer, questions):
    chats = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )


@pytest.mark.parametrize("num_rows", [1, 5])
def test_greedy_identity_in_float32_on_twenty_prompts(target, tokenizer, num_rows):
    drafters = ["prompt-lookup", DraftModel(jittered(target, 1e-3), num_draft_tokens=4)]
    for first in range(0, len(QUESTIONS), num_rows):
        inputs = encoded(tokenizer, QUESTIONS[first : first + num_rows])
        kwargs = {"max_new_tokens": 40, "do_sample": False}
        plain = target.generate(**inputs, assistant=False, **kwargs)
        for drafter in drafters:
            assert torch.equal(plain, target.generate(**inputs, assistant=drafter, **kwargs))


def test_a_drafter_equal_to_the_target_is_always_accepted(target, tokenizer):
    drafter = DraftModel(target, num_draft_tokens=5)
    target.generate(
        **encoded(tokenizer, QUESTIONS[:3]), assistant=drafter, max_new_tokens=60, do_sample=False, eos_token_id=None
    )
    assert drafter.stats.accepted == drafter.stats.drafted > 100
