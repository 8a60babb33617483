"""Whether the parts fit: kinds, widths and taps of heads, the target a drafter was made for, contexts, dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_specdec import host
from hf_specdec.checks.findings import Finding
from hf_specdec.checks.sides import HEADS, Side
from hf_specdec.fingerprints import TargetFingerprint
from hf_specdec.provenance import Provenance
from hf_specdec.vocabulary import tokenizer_fingerprint

_TARGETS = ("target_model_name_or_path", "target_model_name", "target_model")
_BASES = ("base_model_name_or_path", "base_model")  # of a head its target, of a model what it was tuned from


def kind(target: Side, drafter: Side) -> Finding:
    """What the drafter is, and whether it can be opened for this kind of target."""
    problem = drafter.problem or _refusal(target, drafter)
    if problem is not None:
        advice = "use the target it was made for, or another drafter"
        return Finding("drafter", "error", problem, speed="generate() refuses it", advice=advice)
    if drafter.kind == "strategy":
        return Finding("drafter", "ok", f"{drafter.name!r} has no weights of its own, and fits this target")
    is_bound = drafter.kind in HEADS or drafter.kind == "parallel-model"
    if target.model.config.is_encoder_decoder and is_bound:
        return Finding(
            "drafter",
            "error",
            f"a drafter of this kind ({drafter.kind}) drafts for decoder-only targets, and the target has an encoder",
            speed="generate() refuses it",
            advice="use a draft model, or a drafter that copies",
        )
    if drafter.head is not None:
        return _head(drafter)
    return Finding("drafter", "ok", f"{type(drafter.model).__name__}, {_size(drafter.model)} ({drafter.kind})")


def _refusal(target: Side, drafter: Side) -> str | None:
    """Why a drafter in memory refuses the target; `None` if it does not, or its weights cannot be bound yet."""
    if drafter.arm is None or (drafter.head is not None and not target.is_loaded):
        return None
    try:
        drafter.arm.check(target.model, target.tokenizer)
    except ValueError as reason:
        return str(reason)
    return None


def _head(drafter: Side) -> Finding:
    head: Any = drafter.head
    read = f"taps {', '.join(map(str, head.taps))}" if head.taps else "the last hidden state"
    found = (
        f"a head ({drafter.kind}) of {len(head.layers)} layer(s) reads {read} of width {head.target_hidden_size}, is "
        f"{head.hidden_size} wide with {head.num_heads} heads ({head.num_kv_heads} of keys), and drafts "
        f"{head.draft_vocab_size} of {head.vocab_size} ids"
    )
    if drafter.unread:
        return Finding(
            "drafter",
            "warning",
            f"{found}; {' and '.join(drafter.unread)} could not be read, as the file ends before",
            speed="a map to the ids of another vocabulary would not be noticed here",
            advice="complete the file",
        )
    return Finding("drafter", "ok", found)


def _size(model: Any) -> str:
    return f"{host.num_layers(model)} layers of width {host.hidden_size(model)}"


def made_for(target: Side, drafter: Side) -> Finding | None:
    """The target that a drafter says it was trained for; `None` where nothing is recorded or to be expected."""
    name, revision, fingerprint = _recorded(drafter)
    if fingerprint is not None and target.tokenizer is not None and not _is_of(drafter, fingerprint):
        own = tokenizer_fingerprint(target.tokenizer)
        if own != fingerprint:
            return Finding(
                "trained for",
                "error",
                f"the drafter was made for the tokenizer {fingerprint[:12]}..., the target's is {own[:12]}...",
                speed="drafted ids would mean something else to the target",
                advice="use the target it was made for, or another drafter",
            )
    if (difference := _other_target(target, drafter)) is not None:
        return Finding(
            "trained for",
            "error",
            f"the drafter was made for {name}, and the target is another model: {difference}",
            speed="it would draft what this target does not say",
            advice="use the target it was made for, or train a drafter for this one",
        )
    if name is None:
        is_head = drafter.kind in HEADS
        return (
            Finding("trained for", "ok", "the head records no target; only shapes were compared") if is_head else None
        )
    said = f"{name} (revision {revision})" if revision else name
    if name.rstrip("/").split("/")[-1].lower() != target.name.rstrip("/").split("/")[-1].lower():
        return Finding(
            "trained for",
            "warning",
            f"the drafter was trained for {said}, the target is {target.name}",
            speed=f"the more the targets differ, the fewer drafted tokens are accepted{_unless_refused(drafter)}",
            advice=f"use {name} as the target, or measure",
        )
    used = host.revision(target.model)
    if revision and used and not used.startswith(revision) and revision != "main":
        return Finding(
            "trained for",
            "warning",
            f"the drafter was trained for {said}, the target is of revision {used}",
            speed="if weights changed in between, fewer drafted tokens are accepted",
            advice=f"open the target with revision={revision!r}",
        )
    return Finding("trained for", "ok", said)


def _is_of(drafter: Side, fingerprint: str) -> bool:
    """Whether a language model was made for its own tokenizer, which can be compared with the target's itself."""
    is_model = drafter.kind == "causal-lm" and drafter.tokenizer is not None
    return is_model and tokenizer_fingerprint(drafter.tokenizer) == fingerprint


def _unless_refused(drafter: Side) -> str:
    """What a check that reads no weights leaves to the opening of one of our own drafters."""
    is_ours = Provenance.read(drafter.settings, drafter.name) is not None
    return "; if the weights turn out to be unrelated, generate() refuses the drafter" if is_ours else ""


def _other_target(target: Side, drafter: Side) -> str | None:
    """How the target differs from the one whose fingerprint the drafter records; `None` if it does not."""
    provenance = Provenance.read(drafter.settings, drafter.name)
    if provenance is None or target.model is None:
        return None
    return provenance.target_fingerprint.difference(TargetFingerprint.of(target.model))


def _recorded(drafter: Side) -> tuple[str | None, str | None, str | None]:
    """Name, revision and tokenizer fingerprint of the target, where they are recorded."""
    settings = drafter.settings
    if (ours := Provenance.read(settings, drafter.name)) is not None:
        return ours.target, ours.target_revision, ours.tokenizer_fingerprint
    keys = (*_TARGETS, *_BASES) if drafter.kind in HEADS else _TARGETS
    speculators = settings.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    verifier = verifier if isinstance(verifier, dict) else {}
    names = [verifier.get("name_or_path"), *(settings.get(key) for key in keys)]
    revisions = (settings.get("target_revision"), verifier.get("revision"))
    return _text_among(names), _text_among(revisions), _text_among([settings.get("tokenizer_fingerprint")])


def _text_among(values: Iterable[Any]) -> str | None:
    """The first that is a text; others' settings may hold anything."""
    return next((value for value in values if value and isinstance(value, str)), None)


def context(target: Side, drafter: Side, num_tokens: int | None) -> list[Finding]:
    """How far both can read.

    Args:
        target: the target.
        drafter: the drafter.
        num_tokens: how long a text is to get; `None` if that is not known.
    """
    longest = host.max_positions(target.model)
    found = [_rope(target, num_tokens), _beyond(longest, num_tokens)]
    if drafter.model is None:
        return [finding for finding in found if finding is not None]
    own = host.max_positions(drafter.model)
    wanted = num_tokens or longest
    if own is not None and (wanted is None or own < wanted):
        found.append(
            Finding(
                "context",
                "warning",
                f"the drafter reads {own} tokens; {_length(wanted)}",
                speed=f"beyond {own} tokens nothing is drafted, and generation is as fast as plain",
                advice="beyond that use a drafter of longer context, or add one that copies: Auto([Suffix(), model])",
            )
        )
    else:
        found.append(Finding("context", "ok", f"the drafter reads {own or 'any number of'} tokens; {_length(wanted)}"))
    return [finding for finding in found if finding is not None]


def _length(wanted: int | None) -> str:
    return "the target's limit is not known" if wanted is None else f"{wanted} are wanted"


def _beyond(longest: int | None, num_tokens: int | None) -> Finding | None:
    if longest is None or num_tokens is None or num_tokens <= longest:
        return None
    return Finding(
        "context",
        "warning",
        f"texts of {num_tokens} tokens are wanted; the target was built for {longest}",
        correctness="the same as in plain generation beyond that length",
        advice=f"keep to {longest} tokens",
    )


def _rope(target: Side, num_tokens: int | None) -> Finding | None:
    name, border = host.rope_border(target.model)
    if border is None or (num_tokens is not None and num_tokens <= border):
        return None
    return Finding(
        "rope scaling",
        "warning",
        f"the target's rotary embedding ({name}) changes when a text grows past {border} tokens",
        correctness="none: texts that may grow past that length are refused or kept from drafting across it",
        speed="such texts are not drafted for, or not across that length",
        advice=f"keep to {border} tokens where you can",
    )


def dtype_and_device(target: Side, drafter: Side) -> Finding | None:
    """Where weights are and in which dtype."""
    if drafter.kind == "strategy" or drafter.dtype is None or target.dtype is None:
        return None
    theirs, ours = (str(side.dtype).removeprefix("torch.") for side in (target, drafter))
    places = {str(side.model.device) for side in (target, drafter) if side.is_loaded}
    where = f"; they sit on {' and '.join(sorted(places))}" if places else ""
    if theirs == "float32" or theirs == "float64":
        correctness = "none"
    else:
        correctness = f"near ties of two tokens may fall the other way in {theirs}, as with any other width of a pass"
    if drafter.dtype.itemsize > target.dtype.itemsize and drafter.is_loaded:
        return Finding(
            "dtype",
            "warning",
            f"the target is in {theirs}, the drafter in {ours}{where}",
            correctness,
            speed="the drafter reads more bytes a token than it needs to",
            advice=f"load the drafter with dtype=torch.{theirs}",
        )
    speed = "a round moves its drafted tokens, and their laws when sampling, from one device to the other"
    return Finding(
        "dtype",
        "ok",
        f"the target is in {theirs}, the drafter's weights in {ours}{where}",
        correctness,
        speed if len(places) > 1 else "none",
    )
