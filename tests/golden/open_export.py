"""Opens an exported head with `speculators` 0.9.0 and writes down what it says: run by tests/test_publishing.py.

    env/bin/python tests/golden/open_export.py FOLDER OUTPUT

OUTPUT gets `features` (1, T, taps x width) and `tokens` (1, T), random, and `logits` (1, T, draft): step 0 of the
training-time test, or of a parallel head slot 0 behind every row. What the head shares with its target the library
reads itself from the folder that the export names. See make_speculators.py for an environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from make_speculators import NUM_ROWS, every_slot, peagle_core
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.peagle import PEagleDraftModel

KINDS = {"eagle3": Eagle3DraftModel, "peagle": PEagleDraftModel}


def main() -> None:
    """Opens and measures."""
    folder, output = map(Path, sys.argv[1:3])
    settings = json.loads((folder / "config.json").read_text())
    kind = settings["speculators_model_type"]
    peagle_core.generate_cod_sample_indices = every_slot
    config = KINDS[kind].config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = KINDS[kind].from_pretrained(folder, config=config).eval()
    width = config.transformer_layer_config.hidden_size
    taps = len(settings["eagle_aux_hidden_state_layer_ids"])
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, NUM_ROWS, taps * width, generator=generator)
    tokens = torch.randint(3, config.transformer_layer_config.vocab_size, (1, NUM_ROWS), generator=generator)
    said: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, result: said.append(result[:, :NUM_ROWS]))
    inputs = {"hidden_states": features, "input_ids": tokens, "document_ids": torch.zeros_like(tokens)}
    with torch.no_grad():
        if kind == "peagle":
            last = torch.zeros(1, NUM_ROWS, width)
            model(
                **inputs,
                verifier_last_hidden_states=last,
                num_depths=2,
                loss_config=resolve_loss_config("kl_div", "eager"),
            )
        else:
            model(**inputs, ttt_steps=1)
    save_file({"features": features, "tokens": tokens, "logits": said[0].contiguous()}, output)


if __name__ == "__main__":
    main()
