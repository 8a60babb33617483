"""A draft model of another family: both tokenizers are known, so tokens or strings are translated.

python examples/07_other_tokenizer.py TARGET DRAFTER

for example google/gemma-3-1b-it HuggingFaceTB/SmolLM2-135M-Instruct. The text stays exact. Both tokenizers must be
byte-level BPE or SentencePiece-like.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import DraftModel

target_name, drafter_name = sys.argv[1:3]
tokenizer, theirs = (AutoTokenizer.from_pretrained(name) for name in (target_name, drafter_name))
target = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(target_name))
small_model = AutoModelForCausalLM.from_pretrained(drafter_name)

shared = tokenizer.get_vocab().keys() & theirs.get_vocab().keys()
print(f"{len(tokenizer)} tokens in the target, {len(theirs)} in the drafter, {len(shared)} spelled alike\n")

inputs = tokenizer("Write a short story about a lighthouse keeper and her logbook.", return_tensors="pt")
settings = {"max_new_tokens": 40, "do_sample": False}
plain = target.generate(**inputs, **settings)

for method in ("tli", "slem", None):  # shared tokens only, strings, or in every row what has stayed more often
    drafter = DraftModel(small_model, tokenizer=theirs, target_tokenizer=tokenizer, translation=method)
    output = target.generate(**inputs, assistant=drafter, num_draft_tokens=4, **settings)
    kept = f"{drafter.stats.accepted} of {drafter.stats.drafted} drafted tokens stayed"
    print(f"{method or 'by default':12} {kept}; the text is plain generation's: {torch.equal(plain, output)}")
print("\n" + tokenizer.decode(plain[0], skip_special_tokens=True))
