"""From the target's logits to the round's outcome: processors, acceptance rule, stopping.

Two shapes with one law. All positions at once is the fast one; rows accept different numbers of tokens.
Step by step serves what must see the text grow token by token: logits processors with a state, stopping
criteria of the user's own, models that cannot be given positions per row. There the rows of a batch
advance in lockstep, by as many tokens as the row that is refused first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec import accept
from hf_specdec.accept import Draft, Verdict
from hf_specdec.noise import RoundNoise
from hf_specdec.recording import Recorder
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.stopping import Stopping
from hf_specdec.verify import Scorer, TargetPass


@dataclass(frozen=True)
class Judge:
    """Decides what a round adds to every row.

    Attributes:
        do_sample: sample, or take the argmax.
        rule: "token" or "block"; only used when all positions are judged at once.
        scorer: the call's logits processors.
        stopping: the call's stopping criteria.
        recorder: keeps scores for the output dict.
    """

    do_sample: bool
    rule: str
    scorer: Scorer
    stopping: Stopping
    recorder: Recorder

    def all_at_once(
        self, state: DecodeState, draft: Draft, target_pass: TargetPass, noise: RoundNoise | None
    ) -> Outcome:
        """Judges all positions of all rows in one go, with a single read of the device."""
        state.write(draft.tokens)
        scores = self.scorer.at_all_positions(target_pass.logits, state)  # (A, N + 1, V)
        verdict = self._verdict(draft, scores, noise)
        # The row's new tokens: its accepted draft, then the target's own.
        columns = torch.cat([draft.tokens, draft.tokens.new_zeros(len(draft.tokens), 1)], dim=1)
        tokens = columns.scatter(1, verdict.accepted[:, None], verdict.next_tokens[:, None])
        state.write(tokens)
        read = torch.cat([draft.lengths[:, None], verdict.accepted[:, None], tokens], dim=1).tolist()
        new = [row[: accepted + 1] for _, accepted, *row in read]
        drafted, accepted = [row[0] for row in read], [row[1] for row in read]
        return self._cut(state, target_pass, scores, new, drafted, accepted)

    def step_by_step(
        self, state: DecodeState, draft: Draft, target_pass: TargetPass, noise: RoundNoise | None
    ) -> Outcome:
        """Judges position after position; the batch goes on while every unfinished row keeps its draft."""
        finished = list(state.finished)
        emitted: list[list[int]] = [[] for _ in finished]
        accepted, counts = [0] * len(finished), [0] * len(finished)
        for offset in range(draft.width + 1):
            scores = self.scorer.at_one_position(target_pass.logits[:, offset], state, offset)
            verdict = self._one_verdict(draft.position(offset), scores, noise, offset)
            drafted, kept, tokens = torch.stack([draft.lengths, *verdict]).tolist()
            tokens = [state.fill if done else token for token, done in zip(tokens, finished, strict=True)]
            state.write(torch.tensor(tokens, device=state.device)[:, None], offset)
            self.recorder.record_column(state, target_pass, scores, offset)
            ended = self.stopping.column(state, offset, tokens, self.recorder.columns())
            goes_on = True
            for row, token in enumerate(tokens):
                emitted[row].append(token)
                if not finished[row]:
                    counts[row] += 1
                    accepted[row] += kept[row]
                    finished[row] = ended[row]
                    goes_on = goes_on and (ended[row] or kept[row] == 1)
            if not goes_on or all(finished):
                break
        return Outcome(emitted, drafted, accepted, finished, counts)

    def _verdict(self, draft: Draft, scores: Tensor, noise: RoundNoise | None) -> Verdict:
        if not self.do_sample:
            return accept.greedy(draft, scores)
        assert noise is not None
        coins = noise.coins[:, : draft.width]
        return accept.sampled(self.rule, draft, scores.softmax(dim=-1), coins, noise.next_tokens)

    def _one_verdict(self, draft: Draft, scores: Tensor, noise: RoundNoise | None, offset: int) -> Verdict:
        if not self.do_sample:
            return accept.one_greedy_step(draft, scores)
        assert noise is not None
        if offset == noise.coins.shape[1]:  # behind the longest draft there is nothing left to judge
            return accept.one_step(draft, scores.softmax(dim=-1), noise.next_tokens, noise.next_tokens)
        return accept.one_step(draft, scores.softmax(dim=-1), noise.coins[:, offset], noise.replacements[:, offset])

    def _cut(
        self,
        state: DecodeState,
        target_pass: TargetPass,
        scores: Tensor,
        new: list[list[int]],
        drafted: list[int],
        accepted: list[int],
    ) -> Outcome:
        """Cuts every row behind its end; rows that had ended before get nothing."""
        new = [[] if state.finished[row] else tokens for row, tokens in zip(state.rows, new, strict=True)]
        self.recorder.record(state, target_pass, scores, [len(tokens) for tokens in new])
        emitted, finished = [], []
        for row, tokens in zip(state.rows, new, strict=True):
            count, ended = self.stopping.cut(state, row, tokens, self.recorder.scores_of(row))
            self.recorder.forget(row, len(tokens) - count)
            emitted.append(tokens[:count])
            finished.append(ended)
        kept = [min(count, len(tokens)) for count, tokens in zip(accepted, emitted, strict=True)]
        return Outcome(emitted, drafted, kept, finished, [len(tokens) for tokens in emitted])
