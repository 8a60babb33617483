"""A head of one's own in vLLM: exported to the format that vLLM opens, then served, if vLLM is installed.

python examples/12_serve_with_vllm.py TARGET HEAD OUTPUT_FOLDER
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

from hf_specdec.publishing import export

target_name, head_name, output = sys.argv[1:4]
if not Path(output).exists():
    target = AutoModelForCausalLM.from_pretrained(target_name, dtype="auto")
    export(head_name, output, "vllm-speculators", target)  # hf-specdec export HEAD --target TARGET ... does the same
print(f"{output} holds:", *sorted(path.name for path in Path(output).iterdir()))

speculative = json.dumps({"method": "eagle3", "model": output, "num_speculative_tokens": 4})
command = ["vllm", "serve", target_name, "--speculative-config", speculative]
print("To serve it:", *command[:-1], f"'{speculative}'")
if importlib.util.find_spec("vllm") is None:
    print("vLLM is not installed here: pip install vllm, on a machine with a GPU.")
else:
    subprocess.run(command, check=True)
