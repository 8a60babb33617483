"""A smaller model drafts for a batch of prompts of different lengths; sampling stays exact and reproducible.

python examples/04_batch_of_prompts.py TARGET DRAFTER
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import DraftModel

target_name, drafter_name = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(target_name, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
target = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(target_name))
drafter = DraftModel(AutoModelForCausalLM.from_pretrained(drafter_name), num_draft_tokens=4)

prompts = ["The quick brown fox", "How many apples are left if three of the eight apples are eaten?", "Write a story"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)
settings = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": 1}

first = target.generate(**inputs, assistant=drafter, **settings)
again = target.generate(**inputs, assistant=drafter, **settings)
assert torch.equal(first, again)  # the same seed, the same texts

for text in tokenizer.decode(first, skip_special_tokens=True):
    print("-", text)
print(drafter.stats)  # over both calls
