"""From the target's logits to the round's outcome: processors, acceptance rule, stopping.

Two shapes with one law. All positions at once is the fast one; rows accept different numbers of tokens.
Step by step serves what must see the text grow token by token: logits processors with a state, stopping
criteria of the user's own, models that cannot be given positions per row. There the rows of a batch
advance in lockstep, by as many tokens as the row that is refused first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_specdec import accept
from hf_specdec.accept import Draft, Step, Verdict
from hf_specdec.noise import RoundNoise
from hf_specdec.recording import Recorder
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.stopping import Stopping
from hf_specdec.verify import TargetPass


@dataclass(frozen=True)
class Judge:
    """Decides what a round adds to every row.

    Attributes:
        do_sample: sample, or take the argmax.
        rule: a name in `accept.RULES`, for judging all positions at once; one by one, it is the token rule.
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
        """Judges all positions of all riding rows in one go, with a single read of the device."""
        state.write(draft.tokens)
        scores = self.scorer.at_all_positions(target_pass.logits, state, draft=draft)  # (A, N + 1, V)
        verdict = self._verdict(draft, scores, noise)
        # A row's new tokens: its accepted draft, then the target's own.
        kept = draft.tokens.gather(1, verdict.path)
        columns = torch.cat([kept, kept.new_zeros(len(kept), 1)], dim=1)
        tokens = columns.scatter(1, verdict.accepted[:, None], verdict.next_tokens[:, None])
        state.write(tokens)
        read = torch.cat([draft.lengths[:, None], verdict.accepted[:, None], tokens], dim=1)
        if draft.parents is not None:
            goes_on = draft.goes_on_behind(verdict.ends)
            read = torch.cat([read, verdict.path + 1, goes_on[:, None]], dim=1)
        return self._outcome(state, draft, target_pass, scores, read.tolist())

    def _outcome(
        self, state: DecodeState, draft: Draft, target_pass: TargetPass, scores: Tensor, read: list[list[int]]
    ) -> Outcome:
        """What stopping leaves of a verdict.

        Of every row its draft's length, tokens that stay, new tokens; in a tree also the path, and whether it goes on.
        """
        lengths, accepted = [row[0] for row in read], [row[1] for row in read]
        _refuse_unsound(lengths)
        _refuse_lawless([row[2 + n] for row, n in zip(read, accepted, strict=True)])
        appended, finished, positions = [], [], []
        for place, (row, numbers) in enumerate(zip(state.rows, read, strict=True)):
            new, path = numbers[2 : 3 + accepted[place]], numbers[3 + draft.width : 3 + 2 * draft.width]
            follows = [0, *(path[: accepted[place]] if path else range(1, accepted[place] + 1))]
            count, ends = self._cut(state, row, new, scores[place], follows)
            self.recorder.record(row, place, follows[:count], target_pass, scores[place])
            appended.append(new[:count])
            positions.append(follows[:count])
            finished.append(ends)
        emitted = [len(tokens) for tokens in appended]
        kept = list(map(min, accepted, emitted))
        if draft.parents is None:
            return Outcome(appended, emitted, lengths, kept, finished)
        judged = [min(count, n + row[-1]) for count, n, row in zip(emitted, accepted, read, strict=True)]
        return Outcome(appended, emitted, lengths, kept, finished, positions, judged)

    def step_by_step(
        self, state: DecodeState, draft: Draft, target_pass: TargetPass, noise: RoundNoise | None
    ) -> Outcome:
        """Judges position after position; the batch goes on while every unfinished row keeps its draft."""
        columns = _Columns(state)
        position = torch.zeros_like(draft.lengths)  # of every row in the pass
        rows = torch.arange(len(position), device=position.device)
        for offset in range(draft.width + 1):
            scores = self.scorer.at_one_position(target_pass.logits[rows, position], state, offset)  # (B, V)
            step = self._one_step(draft, scores, noise, offset, position)
            goes_on = draft.goes_on_behind(position).long()
            read = torch.stack([draft.lengths, step.accepted, step.tokens, position, goes_on]).tolist()
            drafted, kept, tokens, follows, is_judged = read
            tokens = columns.filled(tokens)
            _refuse_unsound(drafted)
            _refuse_lawless(tokens)
            state.write(torch.tensor(tokens, device=state.device)[:, None], offset)
            for row in state.rows:
                self.recorder.record_one(row, row, follows[row], target_pass, scores[row])
            recorded = self.recorder.columns() if self.stopping.others else None
            ended = self.stopping.column(state, offset, tokens, recorded)
            if not columns.append(tokens, kept, follows, is_judged, ended):
                break
            # Only rows that have ended go on without a match: over filling, column by column.
            position = torch.where(step.accepted > 0, step.position, (position + 1).clamp(max=draft.width))
        return columns.outcome(drafted, is_tree=draft.parents is not None)

    def _cut(
        self, state: DecodeState, row: int, new: list[int], scores: Tensor, positions: list[int]
    ) -> tuple[int, bool]:
        """How many of a row's new tokens stay, and whether the row has ended; scores (N + 1, V)."""
        if state.finished[row]:
            return 0, True
        recorded = self.recorder.scores_of(row) if self.stopping.others else None
        if recorded is not None:
            recorded = [*recorded, *(scores[position] for position in positions)]
        return self.stopping.cut(state, row, new, recorded)

    def _verdict(self, draft: Draft, scores: Tensor, noise: RoundNoise | None) -> Verdict:
        if not self.do_sample:
            # Of equals both take the first; on CPUs this is three times as fast as argmax.
            return accept.matched(draft, scores.max(dim=-1).indices)
        assert noise is not None
        noise = noise.at_positions_of(draft)
        if noise.gumbels is not None:
            return accept.matched(draft, (scores + noise.gumbels).argmax(dim=-1))
        laws = scores.softmax(dim=-1)
        if draft.probs is None:
            return accept.matched(draft, accept.sample(laws, noise.finals))
        verdict = accept.sampled(self.rule, draft, laws, noise.coins, noise.finals)
        if draft.drawn is None:
            return verdict
        return verdict.where(draft.drawn, accept.matched(draft, accept.sample(laws, noise.finals)))

    def _one_step(self, draft: Draft, scores: Tensor, noise: RoundNoise | None, offset: int, position: Tensor) -> Step:
        """The outcome behind one position of every row, `offset` drafted tokens away; scores (B, V)."""
        if not self.do_sample:
            return accept.one_match(draft, scores.argmax(dim=-1), position)
        assert noise is not None
        if noise.gumbels is not None:
            return accept.one_match(draft, (scores + noise.gumbels[:, offset]).argmax(dim=-1), position)
        law, finals = scores.softmax(dim=-1), noise.finals[:, offset]
        if draft.probs is None or offset >= draft.width:  # behind the longest draft there is no coin, and no need
            return accept.one_match(draft, accept.sample(law, finals), position)
        step = accept.one_step(draft.at(offset), law, noise.coins[:, offset], finals, position)
        if draft.drawn is None:
            return step
        return step.where(draft.drawn, accept.one_match(draft, accept.sample(law, finals), position))


def _refuse_lawless(tokens: list[int]) -> None:
    if accept.NO_LAW in tokens:
        raise ValueError(
            "The target's scores are no probability law: they hold NaN or +inf, or every token is forbidden. Look at "
            "the model's dtype and at the logits processors (remove_invalid_values=True replaces NaN and inf)."
        )


def _refuse_unsound(lengths: list[int]) -> None:
    if accept.UNSOUND in lengths:
        raise ValueError(
            "The drafter returned a draft that cannot be verified: ids outside the target's vocabulary, more tokens "
            "than a row was allowed, a law that does not sum to one or gives a drafted token no mass, or a tree whose "
            "tokens follow later ones or repeat each other."
        )


class _Columns:
    """The tokens of a lockstep round, column by column."""

    def __init__(self, state: DecodeState):
        self.fill = state.fill
        self.finished = list(state.finished)
        self.appended: list[list[int]] = [[] for _ in self.finished]
        self.emitted = [0] * len(self.finished)
        self.accepted = [0] * len(self.finished)
        self.positions: list[list[int]] = [[] for _ in self.finished]
        self.judged = [0] * len(self.finished)

    def filled(self, tokens: list[int]) -> list[int]:
        """A column in which finished rows hold filling."""
        return [self.fill if done else token for token, done in zip(tokens, self.finished, strict=True)]

    def append(
        self, tokens: list[int], kept: list[int], follows: list[int], is_judged: list[int], ended: list[bool]
    ) -> bool:
        """Adds a column; whether another may follow: some row is unfinished, and all that were have kept their draft.

        A row that ends with a token of the target's own has not been read to its end: the next pass begins there.

        Args:
            tokens: one a row.
            kept: whether it was drafted.
            follows: the position of the pass that it follows.
            is_judged: whether anything was drafted there.
            ended: whether the row ends with it.
        """
        kept_all = True
        for row, token in enumerate(tokens):
            self.appended[row].append(token)
            self.positions[row].append(follows[row])
            if self.finished[row]:
                continue
            self.emitted[row] += 1
            self.accepted[row] += kept[row]
            self.judged[row] += is_judged[row]
            self.finished[row] = ended[row]
            kept_all = kept_all and bool(kept[row])
        return kept_all and not all(self.finished)

    def outcome(self, drafted: list[int], is_tree: bool) -> Outcome:
        """The round's outcome, given how many tokens were drafted for every row."""
        outcome = Outcome(self.appended, self.emitted, drafted, self.accepted, self.finished)
        return replace(outcome, positions=self.positions, judged=self.judged) if is_tree else outcome
