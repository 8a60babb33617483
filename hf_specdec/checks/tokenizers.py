"""What two tokenizers share: ids, special tokens, and how they write the same conversations."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from hf_specdec import host
from hf_specdec.checks.findings import Finding
from hf_specdec.checks.sides import HEADS, Side
from hf_specdec.drafters.translation import Translation, translation_between
from hf_specdec.vocabulary import agreeing_ids, differing_tokens

_EXAMPLES = 3
_USER = {"role": "user", "content": "Which river flows through Köln?"}
_ANSWER = {"role": "assistant", "content": "The Rhine."}
_SYSTEM = {"role": "system", "content": "You are a careful guide."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# Name, messages, and what else the template is told.
CONVERSATIONS: tuple[tuple[str, list[dict[str, str]], dict[str, Any]], ...] = (
    ("one question", [_USER], {}),
    ("a system message", [_SYSTEM, _USER], {}),
    ("several turns", [_SYSTEM, _USER, _ANSWER, {"role": "user", "content": "How long is it?"}], {}),
    ("tools", [_USER], {"tools": [_TOOL]}),
    ("thinking switched on", [_USER], {"enable_thinking": True}),
    ("thinking switched off", [_USER], {"enable_thinking": False}),
)
TEXTS = ("The quick brown fox, 1234.", " naïve  spaces\n\n\tand 日本語 🙂", "def f(x): return x ** 2\n")


def vocabulary(target: Side, drafter: Side, num_target: int, num_drafter: int | None) -> Finding:
    """Whether ids mean the same on both sides.

    Args:
        target: the target.
        drafter: the drafter.
        num_target: ids the target scores.
        num_drafter: ids the drafter scores; `None` for a head, which has been compared with the target already.
    """
    if target.tokenizer is None or drafter.tokenizer is None:
        return _unknown_map(target, drafter, num_target, num_drafter)
    different = differing_tokens(drafter.tokenizer, target.tokenizer)
    if different:
        return _added(target, drafter, different) or _other_map(target, drafter, different)
    shared = f"both tokenizers give the same ids to all {len(target.tokenizer)} tokens"
    if num_drafter is None or num_drafter == num_target:
        return Finding("vocabulary", "ok", shared)
    return Finding(
        "vocabulary",
        "ok",
        f"{shared}; output layers are padded differently ({num_target} rows in the target, {num_drafter} in the "
        "drafter)",
        correctness="none: ids beyond the tokenizer are never proposed, and their mass in the target is untouched",
        advice=f"nothing if the drafter is opened by its folder or id; else {_show_both(drafter)}",
    )


def _show_both(drafter: Side) -> str:
    drafts_with = "ParallelDraft" if drafter.kind == "parallel-model" else "DraftModel"
    return f"show both tokenizers: {drafts_with}(model, tokenizer=..., target_tokenizer=...)"


def _unknown_map(target: Side, drafter: Side, num_target: int, num_drafter: int | None) -> Finding:
    if num_drafter is None:
        return Finding("vocabulary", "ok", "the head has no tokenizer of its own; it was made for the target's ids")
    lacking = " and ".join(role for role, side in (("target", target), ("drafter", drafter)) if side.tokenizer is None)
    found = f"no tokenizer of the {lacking} was found; the target scores {num_target} ids, the drafter {num_drafter}"
    if num_target != num_drafter:
        speed = "generate() refuses the pair as it is"
        return Finding("vocabulary", "error", found, speed=speed, advice=_show_both(drafter))
    speed = "if ids differ in meaning, no draft is accepted"
    return Finding("vocabulary", "warning", found, speed=speed, advice=_show_both(drafter))


def _added(target: Side, drafter: Side, different: list[str]) -> Finding | None:
    """Maps of one text that differ in added tokens; `None` if they differ in others, or the drafter minds any."""
    if drafter.kind != "causal-lm" or (shared := agreeing_ids(drafter.tokenizer, target.tokenizer)) is None:
        return None
    return Finding(
        "vocabulary",
        "ok",
        f"both tokenizers give the same ids to {len(shared)} tokens; only added tokens differ ({len(different)}, for "
        f"example {', '.join(map(repr, different[:_EXAMPLES]))})",
        correctness="none: tokens that differ are never proposed, and their mass in the target is untouched",
        advice=f"nothing if the drafter is opened by its folder or id; else {_show_both(drafter)}",
    )


def _other_map(target: Side, drafter: Side, different: list[str]) -> Finding:
    theirs, ours = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    shown = [f"{token!r} ({theirs.get(token, 'no id')}, {ours.get(token, 'no id')})" for token in different[:_EXAMPLES]]
    sizes = f"{len(theirs)} and {len(ours)} tokens"
    if len(theirs) == len(ours):
        sizes = f"both have {len(ours)} tokens, but not the same"
    count = "1 token has another id" if len(different) == 1 else f"{len(different)} tokens have other ids"
    found = f"{sizes}: {count} (target, drafter), for example {', '.join(shown)}"
    own = "use a drafter with the target's own tokenizer"
    try:
        shared = _translated(target, drafter).num_shared
    except ValueError as reason:
        speed = "drafted ids would mean something else to the target, which refuses them"
        return Finding("vocabulary", "error", f"{found}. {reason}", speed=speed, advice=own)
    return Finding(
        "vocabulary",
        "warning",
        f"{found}; {shared} of the drafter's tokens spell the same as one of the target's, so texts are translated",
        speed="only shared tokens are drawn, or text is put into the target's tokens: fewer of them are accepted, and "
        "every round costs a little more",
        advice=f"{own} if there is one, or measure; if the drafter is not opened by its folder or id, "
        f"{_show_both(drafter)}",
    )


def translation(target: Side, drafter: Side) -> Translation | None:
    """Between tokens of two maps; `None` if there is one map, one is not known, or nothing can be translated."""
    if target.tokenizer is None or drafter.tokenizer is None:
        return None
    if agreeing_ids(drafter.tokenizer, target.tokenizer) is not None:
        return None
    try:
        return _translated(target, drafter)
    except ValueError:
        return None


def _translated(target: Side, drafter: Side) -> Translation:
    """`ValueError` says why only ids of the target's own map could be drafted."""
    if drafter.kind != "causal-lm" or drafter.model is None:
        raise ValueError("A drafter of this kind drafts ids of the target, and nothing else.")
    if host.attends_to_encoder(drafter.model):
        raise ValueError("Models that attend to an encoder must share the target's vocabulary.")
    return translation_between(target.tokenizer, drafter.tokenizer)


def special_tokens(target: Side, drafter: Side) -> list[Finding]:
    """BOS, EOS and padding, as the generation settings and the tokenizers say, and other markers."""
    ours, theirs = _special_ids(drafter), _special_ids(target)
    meant = _in_targets_ids(ours, translation(target, drafter))
    found = []
    for name, meaning in (
        ("eos", "the drafter does not stop where the target does, so drafts around the end of a text are refused"),
        ("bos", "the drafter was trained on texts that begin otherwise, which may cost acceptance"),
    ):
        if ours[name] and theirs[name] and meant[name] != theirs[name]:
            said = (
                f"{name.upper()} is {_listed(theirs[name], target)} in the target, {_listed(ours[name], drafter)} in "
            )
            found.append(
                Finding(
                    "special tokens",
                    "warning",
                    f"{said}the drafter",
                    correctness="none: a text ends and begins as the target's settings say",
                    speed=meaning,
                    advice="use a drafter trained in the target's format, or measure what it costs",
                )
            )
    if found:
        return found
    is_padded_alike = meant["pad"] == theirs["pad"] or not ours["pad"] or not theirs["pad"]
    pad = "" if is_padded_alike else "; padding differs, which is masked"
    ends = _listed(theirs["eos"], target) if theirs["eos"] else "none"
    return [Finding("special tokens", "ok", f"BOS and EOS agree (EOS: {ends}){pad}")]


def _special_ids(side: Side) -> dict[str, frozenset[int]]:
    """Ids by role: of the generation settings, else of the tokenizer."""
    config = side.model.generation_config if side.model is not None else None
    ids = {}
    for name in ("bos", "eos", "pad"):
        said = getattr(config, f"{name}_token_id", None)
        said = getattr(side.tokenizer, f"{name}_token_id", None) if said is None else said
        ids[name] = frozenset([said] if isinstance(said, int) else said or ())
    return ids


def _in_targets_ids(ids: dict[str, frozenset[int]], translation: Translation | None) -> dict[str, frozenset[int]]:
    """What special tokens of the drafter are to the target; those it lacks are nothing to it."""
    if translation is None:
        return ids
    images = translation.to_target
    return {name: frozenset(images[i] for i in found if i < len(images)) - {-1} for name, found in ids.items()}


def _listed(ids: frozenset[int], side: Side) -> str:
    if side.tokenizer is None:
        return ", ".join(map(str, sorted(ids)))
    return ", ".join(f"{side.tokenizer.convert_ids_to_tokens(index)!r} ({index})" for index in sorted(ids))


# --- conversations ----------------------------------------------------------------------------------------


def encoding(target: Side, drafter: Side) -> Finding | None:
    """Whether tokenizers of one map cut texts alike; `None` if they do, or one is not known."""
    if target.tokenizer is None or drafter.tokenizer is None:
        return None
    if agreeing_ids(drafter.tokenizer, target.tokenizer) is None:  # texts are translated, whoever cuts them how
        return None
    for text in TEXTS:
        theirs, ours = (
            tokenizer(text, add_special_tokens=False).input_ids for tokenizer in (target.tokenizer, drafter.tokenizer)
        )
        if theirs != ours:
            return Finding(
                "encoding",
                "warning",
                f"the tokenizers cut {text!r} into {len(theirs)} and {len(ours)} tokens; "
                f"{_first_difference(target.tokenizer, theirs, drafter.tokenizer, ours)}",
                speed="the drafter reads the target's tokens, which are cut otherwise than those it was trained on",
                advice="use a drafter with the target's own tokenizer, or measure what it costs",
            )
    return None


def template(target: Side, drafter: Side) -> Finding | None:
    """Whether both sides write the same conversations; `None` where there is nothing to compare."""
    if target.tokenizer is None or drafter.tokenizer is None or target.tokenizer.chat_template is None:
        return None
    if drafter.tokenizer.chat_template is None:
        if drafter.kind in HEADS:
            return None
        return Finding(
            "chat template",
            "warning",
            "the target has a chat template, the drafter none",
            speed="the drafter was probably never trained on conversations, so in them it is accepted less often",
            advice="use an instruction-tuned drafter for conversations",
        )
    parted = [
        f"{name}: {difference}"
        for name, chat, told in CONVERSATIONS
        if (difference := _difference(target.tokenizer, drafter.tokenizer, chat, told)) is not None
    ]
    if not parted:
        return Finding("chat template", "ok", f"{len(CONVERSATIONS)} kinds of conversation are written alike")
    return Finding(
        "chat template",
        "warning",
        f"{len(parted)} of {len(CONVERSATIONS)} kinds of conversation are written differently; {'; '.join(parted)}",
        speed="the drafter reads the target's format, which it was not trained on, and is accepted less often there",
        advice="use a drafter trained in the target's format, or measure acceptance on your own conversations",
    )


def _difference(target: Any, drafter: Any, chat: list[dict[str, str]], told: dict[str, Any]) -> str | None:
    """Where the two part; `None` if they write the same, or both refuse such a conversation.

    Both texts are cut by the target's tokenizer, since its tokens are what the drafter will read.
    """
    theirs, ours = _written(target, chat, told), _written(drafter, chat, told)
    if theirs == ours:
        return None
    if theirs is None or ours is None:
        return f"the {'target' if theirs is None else 'drafter'}'s template refuses it"
    ids = [target(text, add_special_tokens=False).input_ids for text in (theirs, ours)]
    return _first_difference(target, ids[0], target, ids[1])


def _written(tokenizer: Any, chat: list[dict[str, str]], told: dict[str, Any]) -> str | None:
    """A conversation as text; `None` if the template refuses it."""
    try:
        return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **told))
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError):
        return None


def _first_difference(target: Any, theirs: list[int], drafter: Any, ours: list[int]) -> str:
    pairs = zip(theirs, ours, strict=False)
    at = next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(theirs), len(ours)))
    shown = [
        repr(str(tokenizer.decode(ids[at : at + 6]))) if at < len(ids) else "the end"
        for tokenizer, ids in ((target, theirs), (drafter, ours))
    ]
    return f"from token {at} on the target has {shown[0]}, the drafter {shown[1]}"
