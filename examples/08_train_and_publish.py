"""From a target alone to a drafter of one's own on the Hub: data, training, a look at it, publishing.

python examples/08_train_and_publish.py TARGET WORK_FOLDER ORG/NAME TIME_BUDGET [WORDS FOR hf-specdec data ...]

for example HuggingFaceTB/SmolLM2-135M-Instruct work me/my-head 5h --tokens 1000000. Every step may be killed and
started again with the same words. Log in first: hf auth login.
"""

import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec

target, work, repository, budget = sys.argv[1:5]
data, drafter = (str(Path(work) / name) for name in ("data", "drafter"))


def run(*words: str) -> None:
    """Runs hf-specdec as one would in a terminal; stops at the first command that fails."""
    print("hf-specdec", *words, flush=True)
    subprocess.run([sys.executable, "-m", "hf_specdec.cli", *words], check=True)


run("data", "--target", target, "--output", data, *sys.argv[5:])
run("train", "eagle3", "--target", target, "--data", data, "--output", drafter, "--time-budget", budget)

model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(target, dtype="auto"))
tokenizer = AutoTokenizer.from_pretrained(target)
inputs = tokenizer("Write a short story about a lighthouse keeper.", return_tensors="pt")
model.generate(**inputs, assistant=drafter, max_new_tokens=60)
print(hf_specdec.last_stats(model))

run("push", drafter, repository, "--license", "apache-2.0")
print(f'From now on, anywhere: model.generate(..., assistant="{repository}")')
