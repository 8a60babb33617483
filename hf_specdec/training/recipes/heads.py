"""What recipes for heads over hidden states share: their shape, first weights, vocabulary and files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specdec import host
from hf_specdec.checkpoints.write import write_head
from hf_specdec.drafters import Drafter, Eagle
from hf_specdec.heads import EagleConfig, EagleHead, LayerConfig
from hf_specdec.training.examples import Example
from hf_specdec.training.losses import centred
from hf_specdec.training.recipes.base import Recipe, RecipeOptions

# Of a head that another training begins with; embeddings and output layer become the target's.
_MAY_DIFFER = {"draft_vocab_size", "own_embedding", "own_lm_head", "mask_token_id", "num_draft_tokens"}
_MAY_DIFFER |= {"rope", "rms_norm_eps"}  # the same may be said in several ways, and both are learned anew


class HeadRecipe(Recipe):
    """A head that shares the target's embeddings and output layer, of which it keeps the rows of frequent tokens.

    Args:
        target: the model to draft for.
        head: bound to it.
        options: how to train.
    """

    optimizer = "muon"
    learning_rate = 8e-3

    def __init__(self, target: Any, head: EagleHead, options: RecipeOptions):
        self.target, self.head, self.options = target, head, options
        self.module, self.taps, self.depth = head, head.config.taps, options.depth
        self.own_ids = torch.full((head.config.vocab_size,), -1, device=head.device)
        self.own_ids[head.draft_ids] = torch.arange(len(head.draft_ids), device=head.device)
        weight = target.get_output_embeddings().weight.detach()
        # What both laws are computed from: the target's rows of the head's ids, shape (D, H).
        self.output = centred(weight[head.draft_ids.to(weight.device)]).to(head.device)

    @classmethod
    def new(cls, target: Any, examples: Sequence[Example], options: RecipeOptions) -> HeadRecipe:
        """A head with its first weights, and a vocabulary of what is frequent in the examples."""
        vocabulary = host.vocabulary_size(target)
        ids = frequent_ids(examples, vocabulary, options.coverage, options.draft_vocab_size)
        head = EagleHead(cls.config(target, len(ids), options, examples))
        initialise(head, target, ids, options.seed)
        return cls(target, head.to(target.device, target.dtype).bind(target), options)

    @classmethod
    def config(
        cls, target: Any, draft_vocab_size: int, options: RecipeOptions, examples: Sequence[Example]
    ) -> EagleConfig:
        """The head's shape."""
        return head_config(target, draft_vocab_size, options.num_layers)

    def normed(self, states: Tensor) -> Tensor:
        """What the output layer reads."""
        return states if self.head.norm is None else self.head.norm(states)

    def save(self, folder: Path) -> None:
        write_head(self.head, folder)

    def weights_of(self, drafter: Drafter) -> dict[str, Tensor]:
        head = drafter.head if isinstance(drafter, Eagle) else getattr(drafter, "model", None)
        if not isinstance(head, EagleHead):
            raise ValueError(f"{type(drafter).__name__} is no head over hidden states, as {self.name} trains.")
        theirs, ours = asdict(head.config), asdict(self.head.config)
        if other := [name for name in ours if name not in _MAY_DIFFER and theirs[name] != ours[name]]:
            told = ", ".join(f"{name}={theirs[name]!r} instead of {ours[name]!r}" for name in other)
            raise ValueError(f"the head is of another make than {self.name} trains here: {told}.")
        weights = {name: weight.detach() for name, weight in head.named_parameters()}
        return {name: weight for name, weight in weights.items() if not name.startswith(("embed_tokens.", "lm_head."))}


def frequent_ids(
    examples: Sequence[Example], vocabulary: int, coverage: float, draft_vocab_size: int | None = None
) -> Tensor:
    """The most frequent ids of answers, ascending.

    Args:
        examples: whose answers to count.
        vocabulary: ids of the target.
        coverage: the share of all answer tokens they are to make up.
        draft_vocab_size: how many they are instead. If fewer occur, those of prompts fill them up, then low ids:
            vocabularies made by merging pairs hold frequent ones first.
    """
    counts = Counter(token for example in examples for token in example.answer)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    if draft_vocab_size is not None:
        asked = Counter(token for example in examples for token in example.prompt)
        others = [token for token in range(vocabulary) if token not in counts]
        ranked += sorted(others, key=lambda token: (-asked[token], token))
        return torch.tensor(sorted(ranked[:draft_vocab_size]))
    wanted, covered, kept = coverage * counts.total(), 0, []
    for token in ranked:
        if covered >= wanted:
            break
        kept.append(token)
        covered += counts[token]
    return torch.tensor(sorted(kept))


def head_config(target: Any, draft_vocab_size: int, num_layers: int = 1, **changes: Any) -> EagleConfig:
    """A head with the shape of the target's layers, over the states of the published rule (2, n // 2, n - 3)."""
    depth, width = host.num_layers(target), host.hidden_size(target)
    taps = tuple(sorted({min(2, depth), max(depth // 2, 1), max(depth - 3, 1)}))
    config = target.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    layers = [LayerConfig(reads_tokens=True)] + [LayerConfig(reads_tokens=False)] * (num_layers - 1)
    attention = getattr(host.decoder_layers(target)[-1], "self_attn", None)
    return EagleConfig(
        kind="eagle3",
        hidden_size=width,
        target_hidden_size=width,
        vocab_size=host.vocabulary_size(target),
        draft_vocab_size=draft_vocab_size,
        layers=tuple(layers),
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or width // heads,
        intermediate_size=_inner_size(config, width),
        taps=taps,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope=host.rope_settings(target),
        qkv_bias=getattr(getattr(attention, "q_proj", None), "bias", None) is not None,
        qk_norm=hasattr(attention, "q_norm"),
        own_lm_head=False,
        **changes,
    )


def _inner_size(config: Any, width: int) -> int:
    size = getattr(config, "intermediate_size", None)
    return size if isinstance(size, int) else 4 * width


@torch.no_grad()
def initialise(head: EagleHead, target: Any, draft_ids: Tensor, seed: int = 0) -> EagleHead:
    """First weights: those of the target's last layer where the shapes allow, which then reads its last tapped state.

    What reads embeddings is drawn at random, and embeddings come in as large as a norm makes them: the gains of the
    target's first norm are so small that hardly anything would be learned of the token that is given.

    Args:
        head: new.
        target: to copy from.
        draft_ids: the target's ids of the head's.
        seed: of everything that is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in head.named_parameters():
        if weight.ndim == 1:
            weight.fill_(float("norm" in name))
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1]))
    head.draft_ids.copy_(draft_ids)
    if head.fc is not None:
        width = head.config.hidden_size
        head.fc.weight[:, :-width] *= 0.1
        head.fc.weight[:, -width:] = torch.eye(width)
    source, layer = host.decoder_layers(target)[-1], head.layers[-1]
    _copy(head.norm, getattr(target.get_decoder(), "norm", None))
    _copy(layer.hidden_norm or layer.input_layernorm, getattr(source, "input_layernorm", None))
    _copy(layer.post_attention_layernorm, getattr(source, "post_attention_layernorm", None))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        _copy(getattr(layer.self_attn, name), getattr(getattr(source, "self_attn", None), name, None))
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy(getattr(layer.mlp, name), getattr(getattr(source, "mlp", None), name, None))
    return head


def _copy(ours: Any, theirs: Any) -> None:
    """Copies weights of the same shape; where ours reads embeddings beside, into the part that reads states."""
    if ours is None or not isinstance(getattr(theirs, "weight", None), Tensor) or not theirs.weight.is_floating_point():
        return
    if isinstance(getattr(ours, "bias", None), Tensor) and isinstance(getattr(theirs, "bias", None), Tensor):
        ours.bias.copy_(theirs.bias)
    mine, other = ours.weight, theirs.weight.to(ours.weight)
    if mine.ndim == 1 and mine.shape == other.shape:
        mine.copy_(_gains(theirs, other))
    elif mine.ndim == 2 and len(mine) == len(other) and mine.shape[1] in (other.shape[1], 2 * other.shape[1]):
        mine[:, -other.shape[1] :] = other


def _gains(norm: Any, weight: Tensor) -> Tensor:
    """What a norm multiplies by: its weight, or one more in some families; ones for a norm that does more than that."""
    ones = torch.ones_like(weight)
    if getattr(norm, "bias", None) is not None:
        return ones
    gains = norm(ones.to(norm.weight)).to(weight)
    return gains if gains.isfinite().all() and gains.any() else ones
