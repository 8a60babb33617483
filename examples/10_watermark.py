"""Watermarked text, drafted: the detector finds the mark as in plain generation, since drafts are judged behind it.

python examples/10_watermark.py [FOLDER_OR_HUB_ID]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, WatermarkDetector, WatermarkingConfig

import hf_specdec
from hf_specdec.demo_model import demo_model_path

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path())
tokenizer = AutoTokenizer.from_pretrained(name)
model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(name))

inputs = tokenizer("Write a long story about a lighthouse keeper and her logbook.", return_tensors="pt")
mark = WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")
detector = WatermarkDetector(model_config=model.config, device="cpu", watermarking_config=mark)
settings = {"max_new_tokens": 120, "min_new_tokens": 120, "do_sample": True, "assistant": "auto", "seed": 1}

for label, marking in (("with a mark", {"watermarking_config": mark}), ("without", {})):
    output = model.generate(**inputs, **settings, **marking)
    new = output[:, inputs["input_ids"].shape[1] :]
    found = detector(new, return_dict=True)
    print(
        f"{label:12} z = {found.z_score[0]:6.2f}, found: {bool(found.prediction[0])}, "
        f"{hf_specdec.last_stats(model).mean_acceptance_length:.2f} tokens a round"
    )
