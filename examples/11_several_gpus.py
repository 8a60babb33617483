"""The target spread over several GPUs, the draft model on the last of them; with fewer, on what is there.

python examples/11_several_gpus.py TARGET DRAFTER

Tokens and logits stay where the prompt is; drafted tokens, and their laws, move once a round.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import DraftModel

target_name, drafter_name = sys.argv[1:3]
num_gpus = torch.cuda.device_count()
if num_gpus > 1:
    print(f"{num_gpus} GPUs: the target is spread over all, the drafter is on the last.")
    where, drafter_where = "balanced", f"cuda:{num_gpus - 1}"
elif num_gpus == 1:
    print("One GPU: target and drafter share it.")
    where = drafter_where = "cuda:0"
else:
    print("No GPU: both run on the CPU.")
    where = drafter_where = "cpu"

tokenizer = AutoTokenizer.from_pretrained(target_name)
target = AutoModelForCausalLM.from_pretrained(target_name, dtype="auto", device_map=where)
small_model = AutoModelForCausalLM.from_pretrained(drafter_name, dtype="auto", device_map=drafter_where)
hf_specdec.enable(target, assistant=DraftModel(small_model))

inputs = tokenizer("Write a short story about a lighthouse keeper.", return_tensors="pt").to(target.device)
output = target.generate(**inputs, max_new_tokens=60, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
devices = sorted({str(device) for device in getattr(target, "hf_device_map", {"": target.device}).values()})
print("The target is on", ", ".join(devices))
print(hf_specdec.last_stats(target))
