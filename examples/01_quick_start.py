"""The shortest way in: `assistant="auto"` drafts by whatever pays, and the text is the model's own.

python examples/01_quick_start.py [FOLDER_OR_HUB_ID]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_specdec
from hf_specdec.demo_model import demo_model_path

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path())
tokenizer = AutoTokenizer.from_pretrained(name)
model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(name))

text = (
    "The lighthouse was built in 1871. Its lamp burned oil until 1924, when it was wired for electricity. "
    "The keeper, Mary Bell, wrote down the weather every evening for thirty years."
)
chat = [{"role": "user", "content": f"Repeat the text, then summarise it in one sentence.\n\n{text}"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

model.generate(
    **inputs,
    assistant="auto",
    max_new_tokens=80,
    do_sample=False,
    streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
)
print(hf_specdec.last_stats(model))
