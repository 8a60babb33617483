"""Foreign settings and tensors of EAGLE heads, in every dialect, as an `EagleConfig` and a state dict.

The shapes of tensors win over numbers in the settings: these are often copied from a target. What decides by a key:

- `norm_before_residual` missing means False, for all dialects: the library that writes speculators files says so, and
  so do the heads that came first. (vLLM reads the same file as True.)
- `norm_output` means in speculators files that states are fed back after the norm. Elsewhere it may only mean that
  there is a norm before the output layer, unless `fc_norm` stands beside it (EAGLE-3.1, which has both).
- A second layer reads embeddings if its queries are 2H wide.
- Layer ids: see `_taps`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from hf_specdec.checkpoints import names
from hf_specdec.checkpoints.dialects import MASK_KEYS, Dialect, mask_id
from hf_specdec.checkpoints.headers import Stored
from hf_specdec.checkpoints.vocabulary import draft_ids
from hf_specdec.heads import EagleConfig, LayerConfig

_AUX_IDS = "eagle_aux_hidden_state_layer_ids"


class TargetShape(NamedTuple):
    """What a head must fit."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True)
class Translation:
    """A head in our words.

    Attributes:
        name: of the dialect.
        config: of the head.
        tensors: under the names of `EagleHead`.
        origins: as they lie in the files, under the same names.
    """

    name: str
    config: EagleConfig
    tensors: dict[str, Tensor]
    origins: dict[str, Stored]


class _Source:
    """A checkpoint with the questions that its translation asks."""

    def __init__(self, dialect: Dialect, location: str, config: dict[str, Any], tensors: dict[str, Stored]):
        self.dialect, self.location, self.config = dialect, location, config
        self.body: dict[str, Any] = config.get("transformer_layer_config") or config
        self.nested: dict[str, Any] = config.get("eagle_config") or {}
        self.found = names.renamed(tensors)
        self.num_layers = names.num_layers(self.found)
        self.kind = "eagle" if dialect.name in ("eagle", "speculators eagle") else "eagle3"
        self.hidden_size = self.shape("layers.0.self_attn.o_proj.weight")[0]

    def has(self, name: str) -> bool:
        return name in self.found

    def has_any(self, *endings: str) -> bool:
        return any(name.endswith(endings) for name in self.found)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.found:
            raise self.lack(names.expected_name(name, self.found))
        shape = self.found[name].shape
        num_sides = 1 if "norm" in name or name in ("d2t", "t2d") else 2
        if len(shape) != num_sides:
            raise ValueError(f"{self.found[name]} has shape {shape}; {num_sides} dimensions were expected.")
        return shape

    def flag(self, key: str) -> bool | None:
        """An option, which may stand in either of two places; `None` if it stands in neither."""
        values = {bool(place[key]) for place in (self.config, self.nested) if place.get(key) is not None}
        if len(values) > 1:
            raise self.problem(f"{key} and eagle_config.{key} contradict each other")
        return next(iter(values), None)

    def option(self, key: str, tensor: str) -> bool:
        """An option that shows in a tensor: said or seen, unless what is seen was denied."""
        said, is_seen = self.flag(key), any(name.startswith(tensor) for name in self.found)
        if said is False and is_seen:
            seen = next(stored for name, stored in self.found.items() if name.startswith(tensor))
            raise self.problem(f"{key}=false, but the weights hold {seen}")
        return bool(said) or is_seen

    def problem(self, text: str) -> ValueError:
        return ValueError(f"{self.location}/config.json: {text}.")

    def lack(self, text: str) -> ValueError:
        return ValueError(
            f"{names.file_names(self.found.values())} lacks tensors of a {self.dialect.name} head: {text}."
        )


def translate(
    dialect: Dialect,
    location: str,
    config: dict[str, Any],
    tensors: dict[str, Stored],
    target: TargetShape,
    taps: tuple[int, ...] | None = None,
) -> Translation:
    """Brings a checkpoint of any EAGLE dialect into our words.

    Args:
        dialect: as recognised.
        location: for messages.
        config: as in its config.json.
        tensors: as in its files.
        target: what the head must fit.
        taps: overrides which hidden states are read.

    Raises:
        ValueError: if options contradict each other, the tensors or the target, or are not supported.
    """
    source = _Source(dialect, location, config, tensors)
    _refuse_options(source)
    _check_target(source, target)
    ids = _draft_ids(source, target)
    weights = {name: stored.value for name, stored in source.found.items() if name not in ("d2t", "t2d")}
    weights["draft_ids"] = ids
    if "mask_hidden" in weights:
        weights["mask_hidden"] = weights["mask_hidden"].flatten()
    settings = _sizes(source, target) | _options(source) | _tapped(source, target, taps)
    try:
        head = EagleConfig(draft_vocab_size=len(ids), **settings)
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error
    return Translation(dialect.name, head, weights, source.found)


def _draft_ids(source: _Source, target: TargetShape) -> Tensor:
    if source.has("lm_head.weight"):
        num_ids = source.shape("lm_head.weight")[0]
        output = f"{source.found['lm_head.weight']} {source.shape('lm_head.weight')}"
    else:
        num_ids, output = _num_shared_ids(source, target), "the target's output layer"
    return draft_ids(source.found.get("d2t"), source.found.get("t2d"), num_ids, target.vocab_size, output)


def _num_shared_ids(source: _Source, target: TargetShape) -> int:
    """Ids of a head without an output layer: the target's, or those it says it shares the target's rows of."""
    shares_rows = source.flag("shares_lm_head")
    lengths = {name: source.shape(name)[0] for name in ("d2t", "t2d") if source.has(name)}
    if shares_rows and "d2t" in lengths:
        return lengths["d2t"]
    for name, length in lengths.items():
        if length != target.vocab_size:
            raise ValueError(
                f"{source.found[name]} has shape {(length,)}, so it cuts the vocabulary ({name}) and lacks "
                f"lm_head.weight, of shape {(length, source.hidden_size)}."
            )
    return target.vocab_size


def _refuse_options(source: _Source) -> None:
    activation = source.body.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise source.problem(f"hidden_act={activation!r}; heads with 'silu' are supported")
    for key, allowed in (("use_mtp_layernorm", False), ("next_layer_regular", True)):
        if source.flag(key) not in (None, allowed):
            raise source.problem(f"{key}={str(not allowed).lower()} is not supported yet")
    if (source.nested.get("parallel_draft_step") or 1) > 1:
        raise source.problem("parallel_draft_step > 1 adds Medusa-like heads, which are not supported yet")


def _check_target(source: _Source, target: TargetShape) -> None:
    """Raises `ValueError` for a head of another target, as far as widths and vocabularies tell."""
    width = source.config.get("target_hidden_size")
    if width is not None and width != target.hidden_size:
        raise source.problem(
            f"target_hidden_size={width}, but the target's hidden states are {target.hidden_size} wide"
        )
    output = source.found["layers.0.self_attn.o_proj.weight"]
    if source.kind == "eagle" and source.hidden_size != target.hidden_size:
        raise ValueError(
            f"{output} has shape {output.shape}, so the head is {source.hidden_size} wide; the target's hidden states "
            f"are {target.hidden_size} wide."
        )
    is_narrow = source.hidden_size != target.hidden_size
    if is_narrow and not (source.has("embed_tokens.weight") and source.has("lm_head.weight")):
        raise ValueError(
            f"{output} has shape {output.shape}, so the head is {source.hidden_size} wide, the target "
            f"{target.hidden_size}: it needs embed_tokens.weight and lm_head.weight of its own, and lacks them. "
            "Is it a head for another target?"
        )
    _check_vocabulary(source, target)


def _check_vocabulary(source: _Source, target: TargetShape) -> None:
    sized = [name for name in ("t2d", "embed_tokens.weight") if source.has(name)]
    for name in sized:
        if (found := source.shape(name)[0]) != target.vocab_size:
            raise ValueError(
                f"{source.found[name]} is made for {found} ids; the target scores {target.vocab_size}. Its shape is "
                f"{source.shape(name)}; {(target.vocab_size, *source.shape(name)[1:])} was expected."
            )
    vocabulary = source.body.get("vocab_size")
    if not sized and vocabulary not in (None, target.vocab_size):
        raise source.problem(f"vocab_size is made for {vocabulary} ids; the target scores {target.vocab_size}")


def _sizes(source: _Source, target: TargetShape) -> dict[str, Any]:
    queries, keys = (source.shape(f"layers.0.self_attn.{name}_proj.weight")[0] for name in "qk")
    head_dim = _head_dim(source, queries)
    shapes = _told(source, "q_proj", "k_proj")
    if queries % head_dim or keys % head_dim:
        raise source.problem(f"head_dim={head_dim} does not divide the rows of {shapes}")
    if not keys or queries % keys:
        raise ValueError(f"{shapes}: the first must have as many rows as the second, or a multiple")
    return {
        "kind": source.kind,
        "hidden_size": source.hidden_size,
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_heads": queries // head_dim,
        "num_kv_heads": keys // head_dim,
        "head_dim": head_dim,
        "intermediate_size": source.shape("layers.0.mlp.gate_proj.weight")[0],
        "layers": tuple(_layer(source, index) for index in range(source.num_layers)),
    }


def _head_dim(source: _Source, queries: int) -> int:
    if source.has("layers.0.self_attn.q_norm.weight"):
        return source.shape("layers.0.self_attn.q_norm.weight")[0]
    said, heads = source.body.get("head_dim"), source.body.get("num_attention_heads")
    if said and heads and said * heads != queries:
        shapes = _told(source, "q_proj")
        raise source.problem(f"{heads} heads with head_dim={said} do not make the {queries} queries of {shapes}")
    if said:
        return said
    if heads:
        return queries // heads
    raise source.problem("neither head_dim nor num_attention_heads is given")


def _told(source: _Source, *projections: str) -> str:
    """Where projections of the first layer lie, with their shapes."""
    found = [source.found[f"layers.0.self_attn.{name}.weight"] for name in projections]
    return " and ".join(f"{stored} {stored.shape}" for stored in found)


def _layer(source: _Source, index: int) -> LayerConfig:
    width, prefix = source.shape(f"layers.{index}.self_attn.q_proj.weight")[1], f"layers.{index}."
    allowed = (source.hidden_size,) if source.kind == "eagle" else (source.hidden_size, 2 * source.hidden_size)
    if width not in allowed:
        stored, expected = source.found[f"{prefix}self_attn.q_proj.weight"], " or ".join(map(str, allowed))
        raise ValueError(f"{stored} has shape {stored.shape}: it reads {width} columns; {expected} were expected.")
    has_norm = source.has(f"{prefix}input_layernorm.weight")
    said = source.flag("use_input_layernorm_in_first_layer") if index == 0 else None
    if said is False and has_norm:
        norm = source.found[f"{prefix}input_layernorm.weight"]
        raise source.problem(f"use_input_layernorm_in_first_layer=false, but the weights hold that norm: {norm}")
    may_lack = index == 0 and (not _has_outer_norms(source) if source.kind == "eagle" else said is False)
    return LayerConfig(width != source.hidden_size, has_norm or not may_lack, _window(source, index))


def _window(source: _Source, index: int) -> int | None:
    kinds = source.body.get("layer_types")
    slides = kinds[index] == "sliding_attention" if kinds and index < len(kinds) else False
    slides = slides or (not kinds and bool(source.body.get("use_sliding_window")))
    return source.body.get("sliding_window") if slides else None


def _options(source: _Source) -> dict[str, Any]:
    is_eagle3 = source.kind == "eagle3"
    options = {
        "rms_norm_eps": source.body.get("rms_norm_eps", 1e-6),
        "rope": _rope(source),
        "fc_bias": source.option("fusion_bias", "fc.bias"),
        "qkv_bias": source.has_any("q_proj.bias", "k_proj.bias", "v_proj.bias"),
        "output_bias": source.has_any("o_proj.bias"),
        "mlp_bias": source.has_any("gate_proj.bias", "up_proj.bias", "down_proj.bias"),
        "qk_norm": source.has_any("q_norm.weight", "k_norm.weight"),
        "embed_norm": not is_eagle3 and _has_outer_norms(source),
        "final_norm": _final_norm(source),
        "own_embedding": source.has("embed_tokens.weight") or source.dialect.name == "deepspec",
        "own_lm_head": source.has("lm_head.weight") or source.dialect.name == "deepspec",
        "mask_token_id": _mask(source),
        "num_draft_tokens": _num_draft_tokens(source),
    }
    return options | (_eagle3_options(source) if is_eagle3 else {})


def _eagle3_options(source: _Source) -> dict[str, Any]:
    fc_norm = source.option("fc_norm", "fc_norm.") or bool(source.flag("use_aux_norm"))
    is_fed_back = source.flag("norm_output") and ("speculators_model_type" in source.config or fc_norm)
    return {
        "norm_before_fc": source.option("norm_before_fc", "input_norm."),
        "fc_norm": fc_norm,
        "norm_before_residual": bool(source.flag("norm_before_residual")),
        "norm_output": bool(is_fed_back),
    }


def _has_outer_norms(source: _Source) -> bool:
    """Whether a head of the first kind is of the variant with norms around it: of embeddings, layer and output.

    A final norm under its usual name belongs to no head of that kind.
    """
    is_named = source.has("norm.weight") and "lm_head" in source.found["norm.weight"].name
    return source.option("layernorms", "embed_norm.") or is_named


def _final_norm(source: _Source) -> bool:
    if source.kind == "eagle":
        return _has_outer_norms(source)
    return source.has("norm.weight") or source.flag("use_last_layernorm") is not False


def _mask(source: _Source) -> int | None:
    is_parallel = source.dialect.family == "parallel-head" or source.has("mask_hidden")
    if is_parallel and source.kind == "eagle3" and mask_id(source.config, source.location) is None:
        raise source.problem(f"a head with mask_hidden needs the id of its mask token ({', '.join(MASK_KEYS)})")
    return mask_id(source.config, source.location) if is_parallel and source.kind == "eagle3" else None


def _num_draft_tokens(source: _Source) -> int | None:
    methods = (source.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens") or source.config.get("num_draft_tokens")


def _rope(source: _Source) -> dict[str, Any]:
    """Rotary settings: `rope_parameters` wins over the older keys beside it, 10000 where no base is given."""
    body = source.body
    rope = dict(body.get("rope_parameters") or body.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise source.problem("rope_parameters by kind of layer are not supported yet")
    kind = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or body.get("rope_theta") or 10000.0)
    if (partial := body.get("partial_rotary_factor")) is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if body.get("max_position_embeddings"):
        rope["max_position_embeddings"] = body["max_position_embeddings"]
    return rope


def _tapped(source: _Source, target: TargetShape, override: tuple[int, ...] | None) -> dict[str, Any]:
    """The taps, and whether they are joined by `fc`."""
    if source.kind == "eagle":
        if override is not None:
            raise ValueError(f"{source.location} holds an EAGLE-1 head, which has no taps; leave taps= out.")
        return {}
    if source.flag("use_aux_hidden_state") is False:
        if source.has("fc.weight"):
            stored = source.found["fc.weight"]
            raise source.problem(f"use_aux_hidden_state=false, but the weights hold fc.weight ({stored})")
        return {"has_fc": False, "taps": _checked_taps(override or (target.num_layers,), 1, source, target)}
    columns = source.shape("fc.weight")[1]
    if columns % target.hidden_size:
        stored = source.found["fc.weight"]
        raise ValueError(
            f"{stored} reads {columns} columns, which are no multiple of the {target.hidden_size} of the target's "
            f"hidden states. Its shape is {stored.shape}."
        )
    num_taps = columns // target.hidden_size
    return {"taps": _checked_taps(override or _taps(source, target), num_taps, source, target)}


def _taps(source: _Source, target: TargetShape) -> tuple[int, ...]:
    """Indices into `hidden_states`, in which a layer's output stands one behind its number.

    Settings beside the other ones of the speculators library count that way. Those in `eagle_config` (SpecForge,
    ModelOpt) and DeepSpec's name layers whose output is read, unless one is the number of layers, which no layer
    has. Without any (an empty list is none) it is the rule of the first heads: {2, n // 2, n - 3}.
    """
    depth, found = target.num_layers, {}
    for key in (_AUX_IDS, "aux_hidden_state_layer_ids"):
        if source.config.get(key):
            found[key] = tuple(source.config[key])
    if ids := source.nested.get(_AUX_IDS):
        shift = 0 if max(ids) == depth else 1
        found[f"eagle_config.{_AUX_IDS}"] = tuple(index + shift for index in ids)
    if source.dialect.name == "deepspec" and (ids := source.config.get("target_layer_ids")) is not None:
        found["target_layer_ids"] = tuple(index + 1 for index in ids)
    if len(set(found.values())) > 1:
        raise source.problem(f"{' and '.join(found)} contradict each other; pass taps=")
    return next(iter(found.values()), (2, depth // 2, depth - 3))


def _checked_taps(taps: tuple[int, ...], num_taps: int, source: _Source, target: TargetShape) -> tuple[int, ...]:
    taps = tuple(taps)
    if len(taps) != num_taps:
        reader = source.found.get("fc.weight", source.found["layers.0.self_attn.q_proj.weight"])
        raise ValueError(
            f"{reader} reads {num_taps} hidden states of the target's width (its shape is {reader.shape}), "
            f"but {len(taps)} are named: {taps}. Is it a head for another target?"
        )
    is_ascending = all(low < high for low, high in pairwise(taps))
    if not is_ascending or not 0 <= taps[0] <= taps[-1] <= target.num_layers:
        raise ValueError(
            f"{source.location}: hidden states {taps} are to be read; of a target with {target.num_layers} layers they "
            f"must ascend within 0 ... {target.num_layers}. Is it a head for another target?"
        )
    return taps
