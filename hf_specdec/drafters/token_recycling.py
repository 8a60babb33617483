"""Token recycling: draft a tree of what the target itself last thought could follow each token."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_specdec import host
from hf_specdec.drafters.base import Copy, CopySession, DraftContext, Drafter
from hf_specdec.options import SpeculationOptions, check_count
from hf_specdec.recycling import Successors, SuccessorTable, grow, grow_chain, likeliest
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.verify import TargetPass


class TokenRecycling(Drafter):
    """Drafts a tree from a table of the target's own likeliest successors of every token it has read.

    Needs no second model and no training. Pays for text that copies nothing, where looking anything up fails. Every
    pass fills the table from all its positions, those of refused tokens too.
    Luo et al., "Turning Trash into Treasure: Accelerating Inference of LLMs with Token Recycling" (arXiv 2408.08696).
    Theirs is a static tree; here it holds the likeliest nodes by the probabilities in the table, as many as pay.

    A table belongs to a target and is kept over calls: it changes the speed, never the output or its law. It takes
    64 bytes for each token of the vocabulary and lies where the target's logits are, so it is not pickled or copied.
    Where the host's own loop runs the target (`as_candidate_generator`) nobody sees its logits, so nothing is learned
    there.

    Args:
        num_draft_tokens: most nodes of a tree; the whole width of the pass that verifies it.
        top_k: successors to keep of every token.

    Raises:
        ValueError: if a value is no positive integer.
    """

    name = "token-recycling"
    default_num_draft_tokens = 24
    plants = True

    def __init__(self, num_draft_tokens: int | None = None, top_k: int = 8):
        super().__init__(SpeculationOptions(num_draft_tokens=num_draft_tokens))
        check_count("top_k", top_k)
        self.top_k = top_k
        self._new_tables()

    def table_of(self, target: PreTrainedModel, device: torch.device | None = None) -> SuccessorTable:
        """What is known of a target's tokens; brought to a device, if one is named."""
        with self._lock:
            if target not in self._tables:
                self._tables[target] = SuccessorTable(host.vocabulary_size(target), self.top_k, device or "cpu")
            if device is not None:
                self._tables[target].move(device)
            return self._tables[target]

    def clear(self) -> None:
        """Forgets the tables of all targets."""
        with self._lock:
            self._tables.clear()

    def start(self, context: DraftContext, state: DecodeState) -> CopySession:
        """Begins a call with what earlier ones have left in the target's table."""
        return _RecyclingSession(self.table_of(context.target, state.device), self.top_k, context.takes_trees)

    def __getstate__(self) -> dict[str, Any]:
        # The tables belong to targets in memory.
        return {name: value for name, value in super().__getstate__().items() if name not in ("_tables", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._new_tables()

    def _new_tables(self) -> None:
        self._tables: WeakKeyDictionary[PreTrainedModel, SuccessorTable] = WeakKeyDictionary()
        self._lock = threading.Lock()


class _RecyclingSession(CopySession):
    """Grows a tree for every row, and learns from every pass of the target."""

    def __init__(self, table: SuccessorTable, top_k: int, takes_trees: bool):
        self.table, self.top_k, self.takes_trees = table, top_k, takes_trees

    def copies(self, state: DecodeState, limits: list[int]) -> list[Copy]:
        ends = [state.tokens[row][-1] for row in state.rows]
        successors = self.table.reader([end for end, limit in zip(ends, limits, strict=True) if limit > 0])
        return [self._copy(end, successors, limit) for end, limit in zip(ends, limits, strict=True)]

    def commit(self, state: DecodeState, outcome: Outcome, target_pass: TargetPass | None = None) -> None:
        if target_pass is None:
            return
        ids, probs = likeliest(target_pass.logits.flatten(0, 1), self.top_k)
        order = torch.tensor(_order(outcome, target_pass.tokens.shape[1]), device=ids.device)
        if len(order):
            self.table.learn(target_pass.tokens.flatten()[order], ids[order], probs[order])

    def _copy(self, last: int, successors: Callable[[int], Successors], limit: int) -> Copy:
        if limit <= 0:
            return Copy([], [])
        if not self.takes_trees:
            chain = grow_chain(last, successors, limit)
            return Copy(chain.tokens, chain.confidences)
        tree = grow(last, successors, limit)
        return Copy(tree.tokens, tree.confidences, tree.parents)


def _order(outcome: Outcome, width: int) -> list[int]:
    """Positions of the pass, row after row, those that stayed last: of a token read twice, they count."""
    order = []
    for place, count in enumerate(outcome.emitted):
        if count == 0:
            continue  # the row had ended
        kept = list(range(count)) if outcome.positions is None else outcome.positions[place][:count]
        order += [place * width + position for position in [*sorted(set(range(width)) - set(kept)), *kept]]
    return order
