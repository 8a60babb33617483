"""ArcticInference's suffix trees (C++) in our loop, with the settings that vLLM gives them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache

import hf_specdec
from hf_specdec.drafters.base import Copy, CopySession, Drafter
from peers.adapters.hf_specdec import assisted
from peers.side import PLAIN, Case, Side, generating, opened

DEPTH, NUM_REQUESTS = 24, 10_000


def side(case: Case) -> Side:
    """Lengths are its own: as long as the match, and no longer than its tree is deep."""
    target = hf_specdec.enable(opened(case.target, case))
    ways = {
        PLAIN: lambda: generating(target, assistant=False),
        "suffix": lambda: assisted(target, ArcticSuffix(False), num_draft_tokens=DEPTH),
        "suffix-tree": lambda: assisted(target, ArcticSuffix(True), num_draft_tokens=DEPTH),
    }
    return Side(target, ways, ("arctic-inference", "hf_specdec"))


class ArcticSuffix(Drafter):
    """Drafts what one `SuffixDecodingCache` speculates; it keeps the answers of all calls."""

    name = "arctic-suffix"
    default_num_draft_tokens = DEPTH

    def __init__(self, branches: bool):
        super().__init__()
        self.branches = branches
        self.cache = SuffixDecodingCache(max_tree_depth=DEPTH, max_cached_requests=NUM_REQUESTS)
        self.requests = itertools.count()

    def start(self, context: Any, state: Any) -> ArcticSession:
        """Begins a call: a request for every row."""
        return ArcticSession(self, state, self.branches and context.takes_trees)


class ArcticSession(CopySession):
    """Rows are (request, tokens it has been told)."""

    def __init__(self, drafter: ArcticSuffix, state: Any, branches: bool):
        self.cache, self.branches = drafter.cache, branches
        self.rows = [[next(drafter.requests), len(state.tokens[row])] for row in state.rows]
        for (request, _), row in zip(self.rows, state.rows, strict=True):
            self.cache.start_request(request, np.asarray(state.tokens[row], dtype=np.int32))

    def copies(self, state: Any, limits: list[int]) -> list[Copy]:
        """What it speculates about every row's end."""
        self._tell(state)
        rows = zip(self.rows, state.rows, limits, strict=True)
        return [self._copy(row[0], state.tokens[index], limit) for row, index, limit in rows]

    def commit(self, state: Any, outcome: Any, target_pass: Any = None) -> None:
        """Ends the requests of finished rows, whose answers stay."""
        self._tell(state)
        for row, finished in zip(self.rows, outcome.finished, strict=True):
            if finished and row[0] in self.cache.active_requests:
                self.cache.stop_request(row[0])

    def keep_rows(self, places: list[int]) -> None:
        """The rows at these places stay."""
        self.rows = [self.rows[place] for place in places]

    def _tell(self, state: Any) -> None:
        for row, index in zip(self.rows, state.rows, strict=True):
            new = state.tokens[index][row[1] :]
            if new and row[0] in self.cache.active_requests:
                self.cache.add_active_response(row[0], new)
                row[1] += len(new)

    def _copy(self, request: int, text: list[int], limit: int) -> Copy:
        if limit < 1:
            return Copy([], [])
        draft = self.cache.speculate(request, text[-DEPTH:], max_spec_tokens=limit, use_tree_spec=self.branches)
        parents = draft.parents if self.branches else None
        return Copy(draft.token_ids, draft.probs, parents)
