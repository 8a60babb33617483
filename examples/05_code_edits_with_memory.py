"""Edits of one file: drafts are copied from earlier answers, and the memory of them outlives the process.

python examples/05_code_edits_with_memory.py [FOLDER_OR_HUB_ID] [MEMORY_FOLDER]

Without the second argument the memory goes to a temporary folder; name one and run twice to begin with the first run's.
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import Suffix
from hf_specdec.demo_model import demo_model_path

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path())
memory = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()) / "suffix"
tokenizer = AutoTokenizer.from_pretrained(name)
model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(name))

FILE = """HOST = "localhost"
PORT = 8080
TIMEOUT = 30


def address(path):
    return f"http://{HOST}:{PORT}/{path}"
"""


def edit(drafter: Suffix, wish: str) -> str:
    """The file after another change; prints one line about how the answer was drafted."""
    contents = (
        f"```python\n{FILE}```\n\nChange TIMEOUT to 60 and write the whole file again.",
        f"```python\n{FILE.replace('30', '60')}```",
        f"{wish} and write the whole file again.",
    )
    chat = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), contents, strict=True)]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, assistant=drafter, max_new_tokens=100, do_sample=False)
    stats = hf_specdec.last_stats(model)
    print(f"{wish:30} {stats.mean_acceptance_length:5.2f} tokens a round, {drafter.cached_tokens} tokens remembered")
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


drafter = Suffix(tokenizer=tokenizer)  # the memory then refuses to be used with another tokenizer
if memory.is_dir():
    drafter.load(memory)
edit(drafter, "Change PORT to 9090")
edit(drafter, "Change PORT to 5000")
drafter.save(memory)

restarted = Suffix(tokenizer=tokenizer).load(memory)  # another process, another day
print("\n" + edit(restarted, "Change PORT to 3000"))
