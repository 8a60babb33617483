"""How a model's scores become drafted tokens: greedily, or drawn from the law that the verifier is told."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec import host
from hf_specdec.accept import Draft, sample
from hf_specdec.drafters.base import DraftContext
from hf_specdec.noise import RoundNoise
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState


class Drawing:
    """Chooses the tokens of one call's drafts.

    Args:
        context: of the call.
        state: whose rows are drafted for.
        device: where the scores come from.
    """

    def __init__(self, context: DraftContext, state: DecodeState, device: torch.device):
        self.is_greedy = not context.do_sample or context.draft_temperature == 0
        self.scorer = _draft_scorer(context)
        # Tokens are drawn beside the drafter, unless a processor looks at the text, which lies beside the target.
        stays = self.scorer.reads_scores_only and device.type != "mps"  # which has no float64 for the noise
        self.device = device if stays else state.device
        if self.device != state.device:
            self.scorer = self.scorer.on(self.device)

    def noise(self, noise: RoundNoise | None) -> RoundNoise | None:
        """The round's numbers for drafts, where tokens are drawn."""
        return noise and noise.of_draft(self.device)

    def token(
        self, logits: Tensor, state: DecodeState, step: int, noise: RoundNoise | None
    ) -> tuple[Tensor, Tensor | None]:
        """The next drafted token of every row and, when sampling, the law it was drawn from.

        Args:
            logits: over the target's ids, (A, V).
            state: the rows; the token is written behind them if a processor reads the text.
            step: tokens drafted before.
            noise: what `noise` returned.
        """
        logits = logits.float().to(self.device)
        scores = self.scorer.at_all_positions(logits[:, None], state, first=step)[:, 0]
        if self.is_greedy:
            token, law = scores.max(dim=-1).indices, None
        elif noise is not None and noise.gumbels is not None:
            token, law = (scores + noise.gumbels[:, step]).argmax(dim=-1), None
        else:
            assert noise is not None
            law = scores.softmax(dim=-1)
            token = sample(law, noise.draws[:, step]).clamp(min=0)
        if not self.scorer.reads_scores_only:
            state.write(token[:, None], offset=step)
        return token, law


def chain(tokens: list[Tensor], laws: list[Tensor], limits: list[int], device: torch.device) -> Draft:
    """A draft of tokens (A,) and, if they were drawn, laws (A, V) step by step.

    A draft ends before a law that is none: a model that overflows must not cost more than its speed.
    """
    drafted = torch.stack(tokens, dim=1).to(device)
    num_drafted = torch.tensor(limits, device=device)
    if not laws:
        return Draft(drafted, num_drafted)
    probs = torch.stack(laws, dim=1).to(device)
    num_lawful = probs.sum(dim=-1).isfinite().long().cumprod(dim=1).sum(dim=1)
    return Draft(drafted, torch.minimum(num_drafted, num_lawful), probs)


def _draft_scorer(context: DraftContext) -> Scorer:
    """The call's processors at the draft's own temperature."""
    if context.do_sample and context.draft_temperature:
        return Scorer(host.with_temperature(context.scorer.processors, context.draft_temperature))
    return context.scorer
