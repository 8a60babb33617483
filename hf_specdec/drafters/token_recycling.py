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

# Refused tokens are learned from as long as a pass teaches no more than this: each costs a search through all logits.
_MOST_LEARNED = 16
# How often what was likely where a token was last read comes true where it is read next: half as often (measured by
# bins of probability over 4,300 tokens of five kinds of text).
_HOLDS_AGAIN = 0.5
# Chance below which a token is not worth looking at.
_LEAST_CHANCE = 0.005


class TokenRecycling(Drafter):
    """Drafts a tree from a table of the target's own likeliest successors of every token it has read.

    Needs no second model and no training. Pays for text that copies nothing, where looking anything up fails. Every
    round fills the table from the tokens that stayed, and from some of the refused ones; of a prompt only the last
    token is learned, as no more of it is scored.
    Luo et al., "Turning Trash into Treasure: Accelerating Inference of LLMs with Token Recycling" (arXiv 2408.08696).
    Theirs is a static tree; here it holds the likeliest nodes by the probabilities in the table, as many as pay.

    A table belongs to a target and is kept over calls: it changes the speed, never the output or its law. Under
    sampling too a seed says the text, whatever the table holds. (Beside a drafter that draws its drafts, in `Auto`, it
    does so in the first call only: what an output has taught must not decide where its numbers judge again, so later
    calls derive others from the seed.)

    The table takes 64 bytes for each token of the vocabulary and lies where the target's logits are, so it is not
    pickled or copied. Where the host's own loop runs the target (`as_candidate_generator`) nobody sees its logits, so
    nothing is learned there.

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
        self.noise_stream = table.next_reader()

    def copies(self, state: DecodeState, limits: list[int]) -> list[Copy]:
        # The mask may leave nothing of a prompt; such a row has no last token to go on from.
        ends = [state.tokens[row][-1:] for row in state.rows]
        successors = self.table.reader([end[0] for end, limit in zip(ends, limits, strict=True) if end and limit > 0])
        return [
            self._copy(end[0], successors, limit) if end and limit > 0 else Copy([], [])
            for end, limit in zip(ends, limits, strict=True)
        ]

    def commit(self, state: DecodeState, outcome: Outcome, target_pass: TargetPass | None = None) -> None:
        if target_pass is None:
            return
        logits, tokens = target_pass.logits.flatten(0, 1), target_pass.tokens
        order = torch.tensor(_order(outcome, tokens.shape[1]), dtype=torch.long, device=logits.device)
        if len(order):
            self.table.learn(tokens.flatten()[order], *likeliest(logits[order], self.top_k))

    def _copy(self, last: int, successors: Callable[[int], Successors], limit: int) -> Copy:
        def again(token: int) -> Successors:
            ids, probs = successors(token)
            return ids, [_HOLDS_AGAIN * prob for prob in probs]

        tree = (grow if self.takes_trees else grow_chain)(last, again, limit, _LEAST_CHANCE)
        return Copy(tree.tokens, tree.confidences, tree.parents if self.takes_trees else None)


def _order(outcome: Outcome, width: int) -> list[int]:
    """Positions of the pass to learn from; of a token read twice the later one counts.

    First some that were refused, the foremost of every row's draft, then those that stayed. Padding counts among the
    refused, since lengths are known on the device alone; nothing is learned of it.
    """
    refused, stayed = [], []
    for place, count in enumerate(outcome.emitted):
        if count == 0:
            continue  # the row had ended
        kept = list(range(count)) if outcome.positions is None else outcome.positions[place][:count]
        refused += [(position, place) for position in range(width) if position not in kept]
        stayed += [(position, place) for position in kept]
    chosen = [*sorted(refused)[: max(0, _MOST_LEARNED - len(stayed))], *stayed]
    return [place * width + position for position, place in chosen]
