"""A pipeline whose model drafts by default; one call may say otherwise.

python examples/02_pipeline.py [FOLDER_OR_HUB_ID]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hf_specdec
from hf_specdec.demo_model import demo_model_path

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path())
tokenizer = AutoTokenizer.from_pretrained(name)
model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(name), assistant="auto")
writer = pipeline("text-generation", model=model, tokenizer=tokenizer)

chat = [{"role": "user", "content": "List the days of the week twice."}]
settings = {"max_new_tokens": 60, "do_sample": False, "return_full_text": False}

print(writer(chat, **settings)[0]["generated_text"])  # drafts: nothing in the pipeline's own code knows of it
print(f"\n{hf_specdec.last_stats(model).mean_acceptance_length:.2f} tokens a round by default")

writer(chat, assistant="prompt-lookup", **settings)  # another strategy for this call
print(f"{hf_specdec.last_stats(model).mean_acceptance_length:.2f} tokens a round by prompt lookup alone")

writer(chat, assistant=False, **settings)  # and none at all
print("without an assistant:", hf_specdec.last_stats(model))
