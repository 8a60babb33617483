"""The EAGLE family: one to a few decoder layers over the target's hidden states and the next token.

EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858), HASS (2408.15766), EAGLE-3 (2503.01840) and P-EAGLE (2602.01469) differ in
what they read and where they normalise; `EagleConfig` says which. Row t pairs the target's state at position t
with the token at t + 1 and predicts the token at t + 2.

H is the head's width, T the target's, A the riding rows, W the tokens of a pass, S the slots of the head's cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specdec import host


@dataclass(frozen=True)
class LayerConfig:
    """What one decoder layer reads.

    Attributes:
        reads_tokens: whether the token's embedding stands beside the hidden state, 2H wide; else the layer reads H.
        input_norm: whether what comes in is normalised: the embedding in a layer that reads tokens (the hidden state
            then has a norm of its own), else the hidden state.
        window: slots a token sees at most, itself included; `None` without a limit.
    """

    reads_tokens: bool
    input_norm: bool = True
    window: int | None = None


@dataclass(frozen=True)
class EagleConfig:
    """The shape of a head.

    Attributes:
        kind: "eagle" joins embedding and hidden state in `fc`; "eagle3" joins tapped states in `fc`, and
            embeddings in its layers.
        hidden_size: H.
        target_hidden_size: T.
        vocab_size: V, ids of the target.
        draft_vocab_size: ids the head can draft; V if it drafts all.
        layers: its decoder layers.
        num_heads: attention heads.
        num_kv_heads: heads of keys and values.
        head_dim: width of a head.
        intermediate_size: width of the MLPs.
        taps: for "eagle3" the indices into the target's `hidden_states` that are read: 0 is the embedding's output, n
            (the number of layers) the state after the final norm. Empty for "eagle", which reads n.
        has_fc: whether the taps pass `fc`; without it there is one tap, H wide.
        rms_norm_eps: of all norms.
        rope: settings of the rotary embedding (`host.rope_frequencies`).
        fc_bias: whether `fc` has a bias.
        qkv_bias: whether queries, keys and values have one.
        output_bias: whether the attention's output has one.
        mlp_bias: whether the MLPs have them.
        qk_norm: whether queries and keys are normalised head by head.
        embed_norm: whether "eagle" normalises embeddings before `fc`.
        norm_before_fc: whether one norm spans all taps before `fc`.
        fc_norm: whether every tap has a norm of its own before `fc`.
        norm_before_residual: whether layers that read tokens take the residual after their hidden state's norm.
        final_norm: whether states are normalised before the output layer.
        norm_output: whether states are fed back after the final norm, not before.
        own_embedding: whether the head has embeddings of its own; else the target's are bound.
        own_lm_head: whether the head has an output layer of its own; else the target's is bound, or the rows of it that
            belong to a cut vocabulary.
        mask_token_id: the id that stands for tokens not known yet; set for heads that draft in parallel, which also
            hold `mask_hidden` in place of their taps.
        num_draft_tokens: how far to draft by default, if the head was published with a length.

    Raises:
        ValueError: if fields are out of range or contradict each other.
    """

    kind: str
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[LayerConfig, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    taps: tuple[int, ...] = ()
    has_fc: bool = True
    rms_norm_eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    fc_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embed_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    final_norm: bool = True
    norm_output: bool = False
    own_embedding: bool = False
    own_lm_head: bool = True
    mask_token_id: int | None = None
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        _require(self.kind in ("eagle", "eagle3"), f"kind={self.kind!r}: allowed are 'eagle' and 'eagle3'")
        _require(bool(self.layers), "layers=(): a head needs a layer")
        _require(self.num_heads % self.num_kv_heads == 0, f"{self.num_heads} heads on {self.num_kv_heads} for keys")
        _require(self.head_dim % 2 == 0, f"head_dim={self.head_dim} is odd")
        _require(self.draft_vocab_size <= self.vocab_size, "draft_vocab_size is larger than vocab_size")
        _require(self.own_lm_head or self.hidden_size == self.target_hidden_size, "another width needs own_lm_head")
        _require(self.final_norm or not self.norm_output, "norm_output=True needs final_norm=True")
        self._check_rope()
        if self.kind == "eagle":
            self._check_eagle()
        else:
            self._check_eagle3()

    def _check_numbers(self) -> None:
        sizes = ("hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "intermediate_size"):
            _require(_is_count(getattr(self, name), 1), f"{name}={getattr(self, name)!r} must be a positive integer")
        for name, least in (("num_draft_tokens", 1), ("mask_token_id", 0)):
            value = getattr(self, name)
            _require(value is None or _is_count(value, least), f"{name}={value!r} must be an integer from {least} on")
        _require(all(_is_count(tap, 0) for tap in self.taps), f"taps={self.taps} must be integers from 0 on")
        eps = self.rms_norm_eps
        is_small = isinstance(eps, int | float) and 0 <= eps < 1
        _require(is_small, f"rms_norm_eps={eps!r} must be a number from 0 to 1")
        mask = self.mask_token_id
        _require(mask is None or mask < self.vocab_size, f"mask_token_id={mask} is not below {self.vocab_size}")

    def _check_rope(self) -> None:
        kind = self.rope.get("rope_type")
        _require(kind in host.ROPE_KINDS, f"rope_type={kind!r}: supported are {', '.join(host.ROPE_KINDS)}")
        _require(self.rope.get("rope_theta", 0) > 0, f"rope_theta={self.rope.get('rope_theta')} must be positive")

    def _check_eagle(self) -> None:
        _require(self.hidden_size == self.target_hidden_size, "kind='eagle' has the target's hidden_size")
        _require(not self.taps, "kind='eagle' reads the target's last hidden state and has no taps")
        _require(not any(layer.reads_tokens for layer in self.layers), "kind='eagle' reads tokens before its layers")
        for name in ("norm_before_fc", "fc_norm", "norm_before_residual"):
            _require(not getattr(self, name), f"{name}=True belongs to kind='eagle3'")
        _require(self.mask_token_id is None, "mask_token_id belongs to kind='eagle3'")
        _require(self.has_fc, "kind='eagle' needs fc")

    def _check_eagle3(self) -> None:
        _require(bool(self.taps), "kind='eagle3' needs taps")
        is_ascending = all(low < high for low, high in pairwise(self.taps))
        _require(is_ascending and self.taps[0] >= 0, f"taps={self.taps} must ascend from 0 on")
        _require(not self.embed_norm, "embed_norm=True belongs to kind='eagle'")
        if not self.has_fc:
            one_tap = self.num_taps == 1 and self.hidden_size == self.target_hidden_size
            _require(one_tap, "a head without fc reads one tap of its own width")
            for name in ("norm_before_fc", "fc_norm", "fc_bias"):
                _require(not getattr(self, name), f"{name}=True needs fc")

    @property
    def num_taps(self) -> int:
        """Hidden states of the target that are read beside each other; 0 for EAGLE-1, which reads the last."""
        return len(self.taps)

    @property
    def reads_tokens(self) -> bool:
        """Whether any part looks tokens up."""
        return self.kind == "eagle" or any(layer.reads_tokens for layer in self.layers)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _require(is_met: bool, problem: str) -> None:
    if not is_met:
        raise ValueError(f"EagleConfig: {problem}.")


class EagleHead(nn.Module):
    """A head of the EAGLE family. A new one holds NaN until weights are loaded or initialised.

    Attributes:
        config: its shape.
        draft_ids: the target's id of every id of the head, shape (draft_vocab_size,), int64, ascending.
    """

    draft_ids: Tensor

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        has_own_table = config.own_embedding and config.reads_tokens
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if has_own_table else None
        self.embed_norm = RMSNorm(width, eps) if config.embed_norm else None
        if config.kind == "eagle":
            self.fc: nn.Linear | None = nn.Linear(2 * width, width, bias=config.fc_bias)
        else:
            self._add_combination(config)
        self.layers = nn.ModuleList(EagleLayer(config, index) for index in range(len(config.layers)))
        self.norm = RMSNorm(width, eps) if config.final_norm else None
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        self.rotary = Rotary(config)
        is_full = config.draft_vocab_size == config.vocab_size
        ids = torch.arange(config.vocab_size) if is_full else torch.full((config.draft_vocab_size,), -1)
        self.register_buffer("draft_ids", ids)
        # In tuples, so that what belongs to the target is neither registered nor saved.
        self._bound_embedding: tuple[nn.Module, ...] = ()
        self._bound_lm_head: tuple[Any, ...] = ()
        for weight in self.parameters():
            nn.init.constant_(weight, math.nan)

    def _add_combination(self, config: EagleConfig) -> None:
        source, eps = config.num_taps * config.target_hidden_size, config.rms_norm_eps
        norms = [RMSNorm(config.target_hidden_size, eps) for _ in config.taps]
        self.input_norm = RMSNorm(source, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(source, config.hidden_size, bias=config.fc_bias) if config.has_fc else None
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.empty(source))

    @property
    def device(self) -> torch.device:
        """Where the head computes."""
        return self.draft_ids.device

    @property
    def dtype(self) -> torch.dtype:
        """In what the head computes."""
        return next(self.parameters()).dtype

    def bind(self, target: PreTrainedModel) -> EagleHead:
        """Lends the head what it shares with the target: embeddings, output layer, or none of them.

        Embeddings are looked up in the target's table as it is stored: where a model scales what it looks up, heads are
        trained and served without.

        Raises:
            ValueError: if the target has another width or vocabulary.
        """
        config = self.config
        if (found := host.vocabulary_size(target)) != config.vocab_size:
            raise ValueError(f"The head was made for {config.vocab_size} token ids; the target scores {found}.")
        if (found := host.hidden_size(target)) != config.target_hidden_size:
            raise ValueError(f"The head was made for hidden states {config.target_hidden_size} wide, not {found}.")
        if config.reads_tokens and not config.own_embedding:
            embedding: Any = target.get_input_embeddings()
            if (found := embedding.weight.shape[1]) != config.hidden_size:
                raise ValueError(
                    f"The target's embeddings are {found} wide, the head {config.hidden_size}; a head of "
                    "another width needs embeddings of its own."
                )
            self._bound_embedding = (embedding,)
        if not config.own_lm_head:
            self._bind_lm_head(target.get_output_embeddings())
        return self

    def _bind_lm_head(self, layer: Any) -> None:
        """The target's output layer; of a cut vocabulary a copy of its rows, made once for all calls."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            self._bound_lm_head = (layer,)
        elif not self._is_bound_to_rows_of(layer):
            self._bound_lm_head = (layer, *self._rows_of(layer))

    def _is_bound_to_rows_of(self, layer: Any) -> bool:
        if not self._bound_lm_head or self._bound_lm_head[0] is not layer:
            return False
        rows = self._bound_lm_head[1]
        return rows.device == self.device and rows.dtype == self.dtype

    def _rows_of(self, layer: Any) -> tuple[Tensor, Tensor | None]:
        weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2:
            raise ValueError(
                "The head shares some rows of the target's output layer, which stores none as plain numbers "
                f"({type(layer).__name__}); use a head with own_lm_head=True."
            )
        ids = self.draft_ids.to(weight.device)
        rows = weight.detach()[ids].to(self.device, self.dtype)
        return rows, None if bias is None else bias.detach()[ids].to(self.device, self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        # What is lent belongs to the target: a copy, or what was stored, is bound when its first call begins.
        return self.__dict__ | {"_bound_embedding": (), "_bound_lm_head": ()}

    def combine(self, features: Tensor) -> Tensor:
        """What the layers read of the target's hidden states.

        Args:
            features: of EAGLE-1 the last hidden state, shape (..., H); else the taps side by side, in the order
                of `config.taps`, shape (..., num_taps * T).

        Returns:
            Shape (..., H).
        """
        if self.config.kind == "eagle":
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            taps = features.split(self.config.target_hidden_size, dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        return features if self.fc is None else self.fc(features)

    def masked_hidden(self) -> Tensor:
        """What stands for the target's states where there are none yet, combined; shape (H,).

        Raises:
            ValueError: if the head does not draft in parallel.
        """
        if self.config.mask_token_id is None:
            raise ValueError("This head has no mask_hidden: it drafts one token after the other.")
        return self.combine(self.mask_hidden)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Reads W tokens behind the cache.

        Args:
            tokens: the token after each state, ids of the target, shape (A, W).
            hidden: combined states, or states fed back, shape (A, W, H).
            positions: of the states (not of the tokens), shape (A, W).
            mask: where each token may look, shape (A, 1, W, S + W), boolean; every token must see at least
                itself. `None` for causal attention over all slots.
            cache: the S slots before, which grow by W; `None` for none.

        Returns:
            States, shape (A, W, H).

        Raises:
            ValueError: if the head shares embeddings with a target and is not bound to one.
        """
        embeds = self.embed(tokens) if self.config.reads_tokens else None
        if self.config.kind == "eagle":
            assert self.fc is not None and embeds is not None
            hidden, embeds = self.fc(torch.cat([embeds, hidden], dim=-1)), None
        rotation = self.rotary(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, embeds, rotation, mask, cache)
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """What the head reads of tokens, ids of the target: (...) -> (..., H).

        Raises:
            ValueError: if the head shares the target's embeddings and is not bound to one.
        """
        if self.embed_tokens is not None:
            embeds = self.embed_tokens(tokens)
        elif self._bound_embedding:
            table: Any = self._bound_embedding[0].weight
            embeds = functional.embedding(tokens.to(table.device), table).to(self.device, self.dtype)
        else:
            raise ValueError("The head shares the target's embeddings; call head.bind(target) first.")
        return embeds if self.embed_norm is None else self.embed_norm(embeds)

    def feedback(self, states: Tensor) -> Tensor:
        """What takes the place of a combined state at the next position, which the target has not read; (..., H)."""
        return self.norm(states) if self.config.norm_output and self.norm is not None else states

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the head's own ids (`to_target` maps them), shape (..., draft_vocab_size).

        Raises:
            ValueError: if the head shares the target's output layer and is not bound to one.
        """
        if self.norm is not None:
            states = self.norm(states)
        if self.lm_head is not None:
            return self.lm_head(states)
        if not self._bound_lm_head:
            raise ValueError("The head shares the target's output layer; call head.bind(target) first.")
        if len(self._bound_lm_head) > 1:
            return functional.linear(states, *self._bound_lm_head[1:])
        return self._bound_lm_head[0](states)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target for ids of the head; any shape."""
        return self.draft_ids[draft_ids]


class EagleLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: EagleConfig, index: int):
        super().__init__()
        self.layer = config.layers[index]
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(width, eps) if self.layer.input_norm else None
        self.hidden_norm = RMSNorm(width, eps) if self.layer.reads_tokens else None
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(config)

    def forward(
        self,
        hidden: Tensor,
        embeds: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        residual = hidden
        if self.hidden_norm is None:
            source = hidden if self.input_layernorm is None else self.input_layernorm(hidden)
        else:
            assert embeds is not None
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            embeds = embeds if self.input_layernorm is None else self.input_layernorm(embeds)
            source = torch.cat([embeds, normed], dim=-1)
        hidden = residual + self.self_attn(source, rotation, mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: EagleConfig, index: int):
        super().__init__()
        self.index, self.head_dim, self.window = index, config.head_dim, config.layers[index].window
        source = config.hidden_size * (2 if config.layers[index].reads_tokens else 1)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(source, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(source, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(source, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, source: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        queries = rotated(self._heads(self.q_proj, source, self.q_norm), rotation)
        keys = rotated(self._heads(self.k_proj, source, self.k_norm), rotation)
        values = self._heads(self.v_proj, source, None)
        if cache is not None:
            keys, values = cache.update(keys, values, self.index)
        mask, is_causal = self._mask(mask, source.shape[1], keys.shape[2], source.device)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, projection: nn.Linear, source: Tensor, norm: RMSNorm | None) -> Tensor:
        """(A, W, source) -> (A, heads, W, head_dim)."""
        heads = projection(source).unflatten(-1, (-1, self.head_dim))
        return (heads if norm is None else norm(heads)).transpose(1, 2)

    def _mask(self, mask: Tensor | None, width: int, total: int, device: torch.device) -> tuple[Tensor | None, bool]:
        """The mask, shape (..., W, S + W), and whether plain causality says it all."""
        before = total - width
        is_short = self.window is None or total <= self.window
        if mask is None:
            if is_short and (width == 1 or before == 0):
                return None, width > 1
            mask = torch.ones(width, total, dtype=torch.bool, device=device).tril(before)
        if not is_short:
            assert self.window is not None
            # By slots: in a tree or a cache with holes a little less than the window, which only a draft can notice.
            mask = mask & torch.ones_like(mask).triu(before - self.window + 1)
        return mask, False


class MLP(nn.Module):
    """Gated by SiLU."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32 or what is finer."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        fine = states.to(torch.promote_types(states.dtype, torch.float32))
        normed = functional.rms_norm(fine, fine.shape[-1:], eps=self.eps)
        return self.weight * normed.to(states.dtype)


class Rotary(nn.Module):
    """Cosine and sine of the rotary embedding."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        # No buffer: those follow the weights to 16 bits, where frequencies lose positions.
        self.frequencies, self.scale = host.rope_frequencies(config.rope, config.head_dim)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(A, W) -> two tensors of shape (A, 1, W, D)."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the first D dimensions of every head, dimension i with i + D / 2; (A, heads, W, head_dim)."""
    cos, sin = rotation
    turned, kept = heads.tensor_split([cos.shape[-1]], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, kept], dim=-1)
