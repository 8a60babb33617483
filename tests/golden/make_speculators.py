"""Writes tests/golden/speculators: tiny random EAGLE-3 and P-EAGLE heads, and what their own library makes of them.

The project itself never needs this script, nor `speculators`; the tests read what it wrote. To write it again, in an
environment of its own (`speculators` 0.9.0 wants transformers <= 5.19; where its torchvision and torchaudio do not suit
the torch beside them, uninstall both, nothing here uses them):

    python -m venv env && env/bin/pip install torch speculators==0.9.0
    env/bin/pip uninstall -y torchvision torchaudio
    env/bin/python tests/golden/make_speculators.py [--output tests/golden/speculators]

Each folder holds `config.json` and `model.safetensors`, written by the library's `save_pretrained`, and
`golden.safetensors`, written by us after the head was read back from that folder:

    features    (1, T, 96)      three tapped hidden states of 32 side by side, random
    tokens      (1, T)          tokens[t] is the token that FOLLOWS features[t], as `shift_batch` pairs them
    embeddings  (64, 32)        the target's input embedding; the head's own where its file has one ("own" below)
    logits      (3, T, draft)   EAGLE-3: [k, t] is what step k of the library's training-time test says in row t
    logits      (A, K, draft)   P-EAGLE: [a, d] is what slot d says after a prefix of a + 1 true rows

Step k of EAGLE-3. Row t of step 0 is (features[t], tokens[t]); it attends to rows 0..t of step 0. Row t of a step k > 0
is (state of row t of step k - 1, tokens[t + k]), a true token and not a drafted one, token 0 behind the end; it attends
to rows 0..t of step 0 and to the rows t of steps 1..k, at position p + k where row t of step 0 has position p. So for a
single t this is a head that has read t + 1 true rows and then ran k times on its own states. "eagle3_sliding" sees the
last 4 of the true rows only, and all of its own: counted from t, so that the window does not move with k.

Slots of P-EAGLE. Row a is (features[a], tokens[a]) and answers slot 0; slots d > 0 are (mask_hidden, the mask token) at
position p + d, attending to true rows 0..a and to the slots up to d of the same a. The library draws at random which
(a, d) it trains; the draw is replaced here by all of them with a + K <= T.

Positions: the library counts EAGLE-3's rows from 1 and P-EAGLE's from 0. Both use rotary positions, which are relative,
so any first position gives these logits up to rounding. All is float32, computed with eager attention on the CPU.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel
from speculators.models.peagle import core as peagle_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

HIDDEN, VOCAB, DRAFT_VOCAB, MASK_TOKEN = 32, 64, 32, 63
NUM_ROWS, NUM_STEPS, NUM_SLOTS = 9, 3, 4
TAPS = [1, 2, 3]  # of a target with four layers
LAYERS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


@dataclass(frozen=True)
class Case:
    """One head: which of the library's classes, its options, and how its layers look."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    own_embedding: bool = True
    num_layers: int = 1
    draft_vocab: int = DRAFT_VOCAB
    family: str = "llama"
    layer: dict[str, Any] = field(default_factory=dict)


FAST_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
SLIDING = {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention"]}
CASES = {
    "eagle3_plain": Case("eagle3"),
    "eagle3_residual": Case("eagle3", {"norm_before_residual": True}, own_embedding=False, layer=FAST_ROPE),
    "eagle3_output": Case("eagle3", {"norm_output": True}, own_embedding=False, draft_vocab=VOCAB),
    "eagle3_input_norm": Case(
        "eagle3", {"norm_before_fc": True, "norm_before_residual": True}, own_embedding=False, num_layers=2
    ),
    "eagle3_fc_norm": Case("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3_all": Case("eagle3", {"fc_norm": True, "norm_output": True, "norm_before_residual": True}, num_layers=2),
    "eagle3_qwen3": Case("eagle3", {"norm_before_fc": True, "norm_output": True}, family="qwen3"),
    "eagle3_sliding": Case("eagle3", own_embedding=False, family="qwen3", layer=SLIDING),
    "peagle_plain": Case("peagle"),
    "peagle_input_norm": Case("peagle", {"norm_before_fc": True, "norm_before_residual": True}, num_layers=2),
    "peagle_fc_norm": Case("peagle", {"fc_norm": True, "norm_output": True}, own_embedding=False),
    "peagle_bias": Case("peagle", {"norm_before_residual": True}, layer={"attention_bias": True} | FAST_ROPE),
}


def main(argv: list[str] | None = None) -> None:
    """Writes all folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "speculators")
    output = parser.parse_args(argv).output
    peagle_core.generate_cod_sample_indices = every_slot
    Eagle3DraftModel.load_verifier_weights = lambda self: None  # there is no verifier to read from
    for seed, (name, case) in enumerate(CASES.items()):
        folder = output / name
        shutil.rmtree(folder, ignore_errors=True)
        embedding = save_head(case, seed, folder)
        golden = measured(case, folder, embedding, seed)
        save_file(golden, folder / "golden.safetensors")
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name}: logits {tuple(golden['logits'].shape)}, {size} bytes")


def save_head(case: Case, seed: int, folder: Path) -> torch.Tensor:
    """Writes a random head the way the library does; returns the embedding (64, 32) that belongs to it."""
    model = randomised(model_class(case)(config(case)), seed)
    tensors = model.state_dict()
    kept = {name: tensor for name, tensor in tensors.items() if case.own_embedding or name != "embed_tokens.weight"}
    model.save_pretrained(folder, state_dict=kept)
    for path in folder.glob("*.py"):  # the library's source of its config class
        path.unlink()
    return tensors["embed_tokens.weight"]


def model_class(case: Case) -> type[Eagle3DraftModel]:
    """The library's class of a case."""
    return PEagleDraftModel if case.kind == "peagle" else Eagle3DraftModel


def config(case: Case) -> Eagle3SpeculatorConfig:
    """The library's configuration of a case."""
    layers = {"num_hidden_layers": case.num_layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "vocab_size": VOCAB, "max_position_embeddings": 64}
    transformer = LAYERS[case.family](**layers, **sizes, **case.layer)
    transformer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=NUM_STEPS)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    options = case.options | ({"mask_token_id": MASK_TOKEN} if case.kind == "peagle" else {})
    return model_class(case).config_class(
        transformer_layer_config=transformer,
        draft_vocab_size=case.draft_vocab,
        eagle_aux_hidden_state_layer_ids=TAPS,
        speculators_config=SpeculatorsConfig(
            algorithm=case.kind, proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
        **options,
    )


def randomised(model: Eagle3DraftModel, seed: int) -> Eagle3DraftModel:
    """Random weights under which every part of the head moves the logits visibly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            else:
                weight.copy_(noise * (0.5 if weight.dim() == 1 else weight.shape[-1] ** -0.5))
        model.embed_tokens.weight.mul_(4)
    if model.use_draft_vocab:
        chosen = torch.randperm(VOCAB, generator=generator)[: model.draft_vocab_size].sort().values
        used = torch.zeros(VOCAB, dtype=torch.bool)
        used[chosen] = True
        model.load_vocab_mappings(used, chosen - torch.arange(len(chosen)))
    return model.eval()


def measured(case: Case, folder: Path, embedding: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Inputs, and what the head in the folder says about them."""
    model = load_head(case, folder, embedding)
    generator = torch.Generator().manual_seed(1000 + seed)
    features = torch.randn(1, NUM_ROWS, len(TAPS) * HIDDEN, generator=generator)
    tokens = torch.randint(VOCAB - 1, (1, NUM_ROWS), generator=generator)
    said: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: said.append(output[0]))
    inputs = {"hidden_states": features, "input_ids": tokens, "document_ids": torch.zeros_like(tokens)}
    with torch.no_grad():
        if case.kind == "peagle":
            last = torch.zeros(1, NUM_ROWS, HIDDEN)
            loss = resolve_loss_config("kl_div", "eager")
            model(**inputs, verifier_last_hidden_states=last, num_depths=NUM_SLOTS, loss_config=loss)
        else:
            model(**inputs, ttt_steps=NUM_STEPS)
    handle.remove()
    logits = torch.stack(said) if case.kind == "eagle3" else by_anchor(said[0])
    assert logits.isfinite().all()
    return {"features": features, "tokens": tokens, "embeddings": embedding, "logits": logits.contiguous()}


def load_head(case: Case, folder: Path, embedding: torch.Tensor) -> Eagle3DraftModel:
    """A head as the library reads it, with the target's embedding where the folder has none."""
    settings = model_class(case).config_class.from_pretrained(folder)
    settings.transformer_layer_config._attn_implementation = "eager"
    model = model_class(case).from_pretrained(folder, config=settings).eval()
    with torch.no_grad():
        if not case.own_embedding:
            model.embed_tokens.weight.copy_(embedding)
        model.verifier_lm_head.weight.zero_()  # only for a loss that nobody reads
    assert torch.equal(model.embed_tokens.weight, embedding)
    return model


def every_slot(seq_length: int, num_depths: int, **ignored: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(anchor, depth) of every row: all true rows, then slots 1..K-1 of every anchor that has room for all of them."""
    anchors = torch.arange(seq_length - num_depths + 1)
    rows = [torch.arange(seq_length), *[anchors] * (num_depths - 1)]
    depths = [torch.full_like(row, depth) for depth, row in enumerate(rows)]
    return torch.cat(rows), torch.cat(depths)


def by_anchor(logits: torch.Tensor) -> torch.Tensor:
    """(rows, draft) in the order of `every_slot` -> (A, K, draft)."""
    num_anchors = NUM_ROWS - NUM_SLOTS + 1
    true_rows, masked = logits[:num_anchors], logits[NUM_ROWS:].view(NUM_SLOTS - 1, num_anchors, -1)
    return torch.cat([true_rows[None], masked]).transpose(0, 1)


if __name__ == "__main__":
    main()
