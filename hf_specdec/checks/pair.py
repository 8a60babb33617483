"""All that can be said of a target and a drafter without running either."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from transformers import PreTrainedModel

from hf_specdec import host
from hf_specdec.checks import shapes, tokenizers
from hf_specdec.checks.findings import Finding
from hf_specdec.checks.sides import Side, side_of_drafter, side_of_model, weights_of
from hf_specdec.drafters import Drafter

_PENALTIES = ("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "guidance_scale")
_WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
_HOST_TOP_K = 50

# Of every target the weights that have drafted for it before, with the tokenizers they had then (the weights themselves
# stand for none). All references are weak, so that models can be freed.
_MET: WeakKeyDictionary[Any, WeakKeyDictionary[Any, WeakSet[Any]]] = WeakKeyDictionary()


def findings_on(target: Side, drafters: list[Side], context: int | None = None, batch: int = 1) -> list[Finding]:
    """Everything that can be found out about a pair.

    Args:
        target: the target.
        drafters: all that draft.
        context: how long a text is to get, in tokens.
        batch: rows generated together.
    """
    found = [rollback(target, batch), settings(target)]
    for side in drafters:
        found += _of_drafter(target, side, context, batch)
    return found


def _of_drafter(target: Side, drafter: Side, context: int | None, batch: int) -> list[Finding]:
    found: list[Finding | None] = [shapes.kind(target, drafter)]
    if drafter.kind == "strategy":
        return [shapes.kind(target, drafter), *shapes.context(target, drafter, context)]
    if drafter.problem is None and drafter.model is not None:
        found.append(_drafters_cache(drafter, batch))
    if drafter.kind != "unknown" and not target.model.config.is_encoder_decoder:
        found.append(_vocabulary(target, drafter))
    found += [
        tokenizers.encoding(target, drafter),
        shapes.made_for(target, drafter),
        *_markers(target, drafter),
        tokenizers.template(target, drafter),
        *shapes.context(target, drafter, context),
        shapes.dtype_and_device(target, drafter),
    ]
    return [finding for finding in found if finding is not None]


def _vocabulary(target: Side, drafter: Side) -> Finding:
    num_drafter = None if drafter.model is None else host.vocabulary_size(drafter.model)
    return tokenizers.vocabulary(target, drafter, host.vocabulary_size(target.model), num_drafter)


def _markers(target: Side, drafter: Side) -> list[Finding]:
    """A head reads the target's states, whatever its folder says of special tokens."""
    return tokenizers.special_tokens(target, drafter) if drafter.model is not None else []


def rollback(target: Side, batch: int) -> Finding:
    """Whether the target's cache can be rolled back after a refused draft."""
    try:
        host.refuse_target(target.model)
        cache = host.new_cache(target.model)
        host.refuse_cache(cache, is_filled=False)
    except ValueError as reason:
        return Finding("cache", "error", str(reason), "it would change", "generate() refuses", "use another one")
    if batch > 1 and not (host.can_be_ragged(cache) and host.accepts_position_ids(target.model)):
        return Finding(
            "cache",
            "warning",
            "the target's cache cannot be rearranged row by row",
            speed="the rows of a batch advance together, as far as the row that is refused first",
            advice="generate one row at a time where you can",
        )
    kinds = "with sliding windows, rearranged after every round" if host.is_sliding(cache) else "of full attention"
    return Finding("cache", "ok", f"the target's cache, {kinds}, can be rolled back")


def _drafters_cache(drafter: Side, batch: int) -> Finding | None:
    """`None` if the drafter's cache can be used as it is."""
    try:
        host.refuse_model(drafter.model)
        cache = host.new_cache(drafter.model)
        host.refuse_cache(cache, is_filled=False)
    except ValueError as reason:
        return Finding("cache", "error", f"the drafter: {reason}", speed="generate() refuses", advice="use another one")
    if batch > 1 and not host.can_be_ragged(cache):
        return Finding(
            "cache",
            "error",
            "the drafter's cache cannot be rearranged row by row, which a batch needs",
            speed="generate() refuses the batch",
            advice="generate one row at a time, or use another drafter",
        )
    return None


def settings(target: Side) -> Finding:
    """What the target's generation settings mean for drafting, and for the law of its output."""
    read = host.setting(target.model, None, {})
    try:
        host.refuse_settings(read)
    except ValueError as reason:
        return Finding("settings", "error", str(reason), "it would change", "generate() refuses", "as said")
    shaping = [f"{name}={read(name)}" for name in _PENALTIES if read(name) not in (None, 0, 1, 1.0)]
    if read("do_sample"):
        shaping += [f"{name}={read(name)}" for name in _WARPERS if read(name) is not None]
        if read("top_k") is None:
            shaping.append(f"top_k={_HOST_TOP_K} (the host's default)")
    way = "samples" if read("do_sample") else "decodes greedily"
    if not shaping:
        return Finding("settings", "ok", f"the target {way} by default")
    return Finding(
        "settings",
        "ok",
        f"the target {way} by default, with {', '.join(shaping)}",
        correctness="the law that is kept is the one after these settings, as in plain generation",
        speed="drafts are drawn under the same settings",
        advice="set what you want in the call: it counts for both sides",
    )


def first_meeting(target: PreTrainedModel, drafter: Drafter, tokenizer: Any = None) -> list[Finding]:
    """The cheap part, for a call of `generate`: what costs speed and shows without opening anything.

    Most of what cannot be served is refused by the drafter itself, call by call.

    Args:
        target: the model about to generate.
        drafter: the assistant.
        tokenizer: the target's, if the call knows it.

    Returns:
        What is not "ok". Nothing for weights that the target has met before, unless there was an error.
    """
    found: list[Finding] = []
    for arm in drafter.arms:
        weights, own = weights_of(arm), getattr(arm, "tokenizer", None)
        if weights is None:
            continue
        met = _MET.setdefault(target, WeakKeyDictionary()).setdefault(weights, WeakSet())
        key = weights if own is None else own
        if key in met:
            continue
        noticed = _at_first_sight(target, arm, tokenizer)
        if all(finding.level != "error" for finding in noticed):
            met.add(key)
        found += noticed
    return found


def _at_first_sight(target: PreTrainedModel, arm: Drafter, tokenizer: Any) -> list[Finding]:
    known = getattr(arm, "target_tokenizer", None) if tokenizer is None else tokenizer
    ours, theirs = side_of_drafter(arm), side_of_model(target, "causal-lm", known)
    looked_at: list[Finding | None] = [
        _vocabulary(theirs, ours) if known is not None and ours.tokenizer is not None else None,
        *_markers(theirs, ours),
        tokenizers.encoding(theirs, ours),
        tokenizers.template(theirs, ours),
        *shapes.context(theirs, ours, None),
        shapes.dtype_and_device(theirs, ours),
        shapes.made_for(theirs, ours),
    ]
    return [finding for finding in looked_at if finding is not None and finding.level != "ok"]
