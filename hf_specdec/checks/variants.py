"""The ways of generating that a benchmark knows by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from hf_specdec import Auto, DraftModel, DraftTree, EarlyExit, PromptLookup, Suffix, TokenRecycling, load_drafter
from hf_specdec.checks.report import HOST_LOOKUP, PLAIN
from hf_specdec.host import num_layers
from hf_specdec.loading import load_model

# What a variant adds to the arguments of `generate`. A name that ends in "=" is followed by a folder or Hub id, or by a
# number where `NUMBERS` says of what.
Builder = Callable[[PreTrainedModel, str], dict[str, Any]]
Arguments = Callable[[], dict[str, Any]]

HOST = "host-"
_TREE = DraftTree(depth=5, top_k=4, total_tokens=16)


def _exit_of_host(target: PreTrainedModel, layers: int) -> int:
    """How many layers draft, which the host does not check."""
    if layers >= (all_layers := num_layers(target)):
        raise ValueError(
            f"variant host-early-exit={layers}: {type(target).__name__} has {all_layers} layers; choose fewer."
        )
    return layers


VARIANTS: dict[str, Builder] = {
    PLAIN: lambda target, folder: {},
    HOST_LOOKUP: lambda target, folder: {"prompt_lookup_num_tokens": 10},
    "host-draft-model=": lambda target, folder: {"assistant_model": load_model(folder, target.dtype, target.device)},
    "host-early-exit=": lambda target, layers: {"assistant_early_exit": _exit_of_host(target, int(layers))},
    "prompt-lookup": lambda target, folder: {"assistant": PromptLookup()},
    "suffix": lambda target, folder: {"assistant": Suffix()},
    "suffix-chains": lambda target, folder: {"assistant": Suffix(branches=False)},
    "token-recycling": lambda target, folder: {"assistant": TokenRecycling()},
    "token-recycling=": lambda target, nodes: {"assistant": TokenRecycling(int(nodes))},
    "early-exit": lambda target, folder: {"assistant": EarlyExit()},
    "early-exit=": lambda target, layers: {"assistant": EarlyExit(int(layers))},
    "auto": lambda target, folder: {"assistant": Auto()},
    "draft-model=": lambda target, folder: {"assistant": DraftModel(load_model(folder, target.dtype, target.device))},
    "drafter=": lambda target, folder: {"assistant": load_drafter(folder, target)},
    "drafter-tree=": lambda target, folder: {"assistant": load_drafter(folder, target, tree=_TREE)},
    "auto=": lambda target, folder: {"assistant": Auto([Suffix(), TokenRecycling(), load_drafter(folder, target)])},
}
# By name: what the number behind it counts, and how the user is told.
NUMBERS = {
    "token-recycling=": ("NODES", "how many nodes its trees have"),
    "early-exit=": ("LAYERS", "how many of the target's layers draft"),
    "host-early-exit=": ("LAYERS", "how many of the target's layers draft"),
}


def split_variant(spelling: str) -> tuple[str, str]:
    """A variant's name in the registry, and what follows it: a folder, or a number.

    Raises:
        ValueError: if there is no such variant, or its number is none.
    """
    name, equals, value = spelling.partition("=")
    if name + equals not in VARIANTS or (equals and not value):
        followed = {known: NUMBERS.get(known, ("DIR",))[0] for known in VARIANTS if known[-1] == "="}
        allowed = ", ".join(known + followed.get(known, "") for known in VARIANTS)
        raise ValueError(f"variant {spelling!r} is unknown; use {allowed}.")
    if name + equals in NUMBERS and not (value.isdecimal() and int(value)):
        raise ValueError(f"variant {spelling!r}: say {NUMBERS[name + equals][1]}, such as {name}=4.")
    return name + equals, value


def build_variant(spelling: str, target: PreTrainedModel) -> Arguments:
    """The variant's arguments, built once for all calls.

    Raises:
        ValueError: if a model or drafter does not exist or does not fit the target.
    """
    name, value = split_variant(spelling)
    built = VARIANTS[name](target, value)
    return lambda: built
