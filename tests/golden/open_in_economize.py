"""Opens drafters by Hub id with `economize` 0.3.2 and lets them draft: run by tests/test_publishing.py.

    env/bin/python tests/golden/open_in_economize.py TARGET PROMPT_ID,... NUM_TOKENS REPO_ID...

Prints one JSON document last: by id what went wrong (`error`), or which hidden states are read (`taps`) and what was
written (`tokens`). See benchmarks/README.md for an environment.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from economize.integrations import hub
from transformers import AutoModelForCausalLM


def main() -> None:
    """Opens all, one after the other."""
    target, prompt, num_tokens, *names = sys.argv[1:]
    tokens = torch.tensor([[int(token) for token in prompt.split(",")]])
    print(json.dumps({name: opened(name, target, tokens, int(num_tokens)) for name in names}))


def opened(name: str, target: str, tokens: torch.Tensor, num_tokens: int) -> dict[str, Any]:
    """What one of them does."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    try:
        drafting = hub.from_pretrained(name, base_model=model)
    except Exception as error:  # of whatever kind: it is what is asked here
        return {"error": f"{type(error).__name__}: {error}"}
    (technique,) = (module for module in drafting.modules() if hasattr(module, "aux_layers"))
    written = drafting.decode(tokens, num_tokens).tokens
    return {"taps": list(technique.aux_layers), "tokens": torch.as_tensor(written).flatten().tolist()}


if __name__ == "__main__":
    main()
