"""A trained head of the EAGLE family, opened unchanged by its Hub id: as a chain, and as draft trees.

python examples/06_eagle_from_the_hub.py TARGET HEAD

for example meta-llama/Llama-3.1-8B-Instruct yuhuili/EAGLE3-LLaMA3.1-Instruct-8B. "org/name@revision" names a revision.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import DraftTree

target_name, head_name = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(target_name)
target = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(target_name, dtype="auto", device_map="auto"))

print(hf_specdec.check(target_name, head_name))  # reads settings and headers only: does it fit, what will it cost?

chain = hf_specdec.load_drafter(head_name, target)  # generate(assistant=head_name) does this too, without options
tree = hf_specdec.load_drafter(head_name, target, tree=DraftTree(depth=4, top_k=4, total_tokens=16))

inputs = tokenizer("Write a short story about a lighthouse keeper.", return_tensors="pt").to(target.device)
for name, drafter in (("chain", chain), ("tree", tree)):
    output = target.generate(**inputs, assistant=drafter, max_new_tokens=60, do_sample=False)
    print(f"\n{name}: {drafter.stats.mean_acceptance_length:.2f} tokens a round")
print(tokenizer.decode(output[0], skip_special_tokens=True))
