"""How drafters that compute scores choose tokens, one after the other, and report the laws they drew from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_specdec import host
from hf_specdec.accept import Draft, sample
from hf_specdec.drafters.base import DraftContext
from hf_specdec.noise import RoundNoise
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState


@dataclass(frozen=True)
class Drawing:
    """Chooses drafted tokens.

    Attributes:
        scorer: the processors, at the draft's own temperature.
        is_greedy: whether the best token is taken.
    """

    scorer: Scorer
    is_greedy: bool

    @classmethod
    def of(cls, context: DraftContext) -> Drawing:
        """As a call wants it."""
        scorer = context.scorer
        if context.do_sample and context.draft_temperature:
            scorer = Scorer(host.with_temperature(scorer.processors, context.draft_temperature))
        return cls(scorer, not context.do_sample or context.draft_temperature == 0)

    def on(self, device: torch.device) -> Drawing:
        """The same on another device."""
        return replace(self, scorer=self.scorer.on(device))

    def draw(
        self, logits: Tensor, state: DecodeState, step: int, noise: RoundNoise | None
    ) -> tuple[Tensor, Tensor | None]:
        """The next drafted token of every row, (A,), and the law it was drawn from, (A, V), if it was.

        Args:
            logits: over the target's vocabulary, float32, shape (A, V).
            state: of the call; tokens are written behind it where processors read them.
            step: how many tokens were drafted before.
            noise: of the round.
        """
        scores = self.scorer.at_all_positions(logits[:, None], state, first=step)[:, 0]
        law = None
        if self.is_greedy:
            token = scores.argmax(dim=-1)
        elif noise is not None and noise.gumbels is not None:
            token = (scores + noise.gumbels[:, step]).argmax(dim=-1)
        else:
            assert noise is not None
            law = scores.softmax(dim=-1)
            token = sample(law, noise.draws[:, step]).clamp(min=0)
        if not self.scorer.reads_scores_only:
            state.write(token[:, None], offset=step)
        return token, law


def drawn(tokens: list[Tensor], laws: list[Tensor | None], limits: list[int], device: torch.device) -> Draft:
    """A draft of tokens (A,) and laws (A, V), one a step; it ends before a law that is none."""
    drafted, lengths = torch.stack(tokens, dim=1).to(device), torch.tensor(limits, device=device)
    known = [law for law in laws if law is not None]
    if not known:
        return Draft(drafted, lengths)
    probs = torch.stack(known, dim=1).to(device)
    # A model that overflows must not cost more than its speed.
    num_lawful = probs.sum(dim=-1).isfinite().long().cumprod(dim=1).sum(dim=1)
    return Draft(drafted, torch.minimum(lengths, num_lawful), probs)
