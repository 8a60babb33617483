"""Prompt lookup by tensor operations on the device where the text lives: nothing is read back, whatever is found.

In the comments A is the number of riding rows, S the length of the longest, K the number of voters and N the width of
the draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec.accept import Draft
from hf_specdec.drafters.base import DraftSession
from hf_specdec.noise import RoundNoise
from hf_specdec.state import DecodeState

# Stands where nothing shall be matched or copied, as every negative id does.
_GAP = -1


class TensorLookup:
    """Scans whole texts for the longest match of their tails; proposes what `NgramIndex` proposes.

    Args:
        min_ngram: see `PromptLookup`, like all the others.
        max_ngram: see there.
        prefer: see there.
        tokens_per_match: see there.
        most_voters: how many of the newest matches vote if the most frequent continuation is preferred.
    """

    def __init__(self, min_ngram: int, max_ngram: int, prefer: str, tokens_per_match: int | None, most_voters: int):
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self.is_oldest_first = prefer == "earliest"
        self.most_voters = most_voters if prefer == "frequent" else 1
        self.tokens_per_match = tokens_per_match

    def draft(self, text: Tensor, firsts: Tensor, ends: Tensor, limits: Tensor, width: int) -> Draft:
        """Drafts for all rows, without waiting for the device.

        Args:
            text: one text a row, shape (A, S), S > 0.
            firsts: where each begins, shape (A,); what stands in front is padding.
            ends: where each ends, shape (A,).
            limits: most tokens to draft for each, shape (A,).
            width: the largest limit.

        Returns:
            A draft `width` wide, however little of it is used.
        """
        columns = torch.arange(text.shape[1], device=text.device)
        text = torch.where(columns < firsts[:, None], _GAP, text)
        sizes = self._match_lengths(text, ends[:, None])  # (A, S)
        best = sizes.amax(dim=1)
        is_match = (sizes == best[:, None]) & (best >= self.min_ngram)[:, None]
        places, is_voter = self._voters(is_match)
        tokens = _majority(_continuations(text, places, ends[:, None], width), is_voter)
        if self.tokens_per_match is not None:
            limits = torch.minimum(limits, best * self.tokens_per_match)
        num_tokens = (tokens >= 0).long().cumprod(dim=1).sum(dim=1)
        lengths = torch.where(is_match.any(dim=1), torch.minimum(limits, num_tokens), 0)
        is_drafted = torch.arange(width, device=text.device) < lengths[:, None]
        return Draft(torch.where(is_drafted, tokens, 0), lengths)

    def _match_lengths(self, text: Tensor, ends: Tensor) -> Tensor:
        """How many tokens in front of every place equal the text's last ones, up to the largest window; (A, S)."""
        num_columns, largest = text.shape[1], self.max_ngram
        padded = torch.nn.functional.pad(text, (largest, 0), value=_GAP)
        matches = (text >= 0) & (torch.arange(num_columns, device=text.device) < ends)
        lengths = torch.zeros_like(text)
        for back in range(1, largest + 1):
            shift = largest - back
            newest = padded.gather(1, ends + shift)  # (A, 1)
            matches = matches & (padded[:, shift : shift + num_columns] == newest) & (newest >= 0)
            lengths += matches
        return lengths

    def _voters(self, is_match: Tensor) -> tuple[Tensor, Tensor]:
        """The places of the matches that vote, in the order of their weight, and which of them there are; (A, K)."""
        num_columns = is_match.shape[1]
        ranks = torch.arange(1, num_columns + 1, device=is_match.device)
        ranks = ranks.flip(0) if self.is_oldest_first else ranks
        top = torch.where(is_match, ranks, 0).topk(min(self.most_voters, num_columns), dim=1).values
        places = num_columns - top if self.is_oldest_first else top - 1
        return torch.where(top > 0, places, 0), top > 0


class DeviceLookupSession(DraftSession):
    """Looks up the ends of all rows at once, in the state's own tensors.

    Args:
        lookup: how.
        state: of the call.
        vocabulary: ids from here on stand for images and the like and are never copied.
    """

    def __init__(self, lookup: TensorLookup, state: DecodeState, vocabulary: int):
        self.lookup, self.vocabulary = lookup, vocabulary
        self.firsts, self.prompts = _without_padding(state)

    def propose(self, state: DecodeState, limits: list[int], noise: RoundNoise | None) -> Draft:
        width, longest = max(limits), max(state.row_lengths)
        if width == 0 or longest == 0:
            return Draft.empty(len(limits), state.device)
        rows, ends, allowed = _sent([state.rows, state.row_lengths, limits], state.device)
        text = state.sequences[:, :longest].index_select(0, rows)
        if self.prompts is not None:
            text[:, : self.prompts.shape[1]] = self.prompts.index_select(0, rows)
        text = text.masked_fill(text >= self.vocabulary, _GAP)
        return self.lookup.draft(text, self.firsts.index_select(0, rows), ends, allowed, width)


def _without_padding(state: DecodeState) -> tuple[Tensor, Tensor | None]:
    """Where every text begins (B,), and prompts (B, P) with all padding in front if they have not been such before."""
    mask = state.prompt_mask
    if mask is None:
        return torch.zeros(state.num_rows, dtype=torch.long, device=state.device), None
    firsts = (~mask).sum(dim=1)
    if state.is_left_padded:
        return firsts, None
    order = mask.long().argsort(dim=1, stable=True)
    return firsts, state.sequences[:, : state.prompt_length].gather(1, order)


def _sent(numbers: list[list[int]], device: torch.device) -> Tensor:
    """The numbers on the device; the host goes on at once."""
    tensor = torch.tensor(numbers, device="cpu")  # wherever tensors are made by default
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _continuations(text: Tensor, places: Tensor, ends: Tensor, width: int) -> Tensor:
    """The tokens from every place on, (A, K, N). Behind the text's end stands the copy, which repeats them."""
    periods = (ends - places).clamp(min=1)
    steps = torch.arange(width, device=text.device)
    columns = places[:, :, None] + steps % periods[:, :, None]
    return text.gather(1, columns.flatten(1)).view(columns.shape)


def _majority(rows: Tensor, is_voter: Tensor) -> Tensor:
    """The token most voters agree on, step by step among those who agreed so far; the first of equals decides.

    All steps at once, since many small kernels would take longer: tables of K * K * N short integers a row.

    Args:
        rows: what every voter goes on with, shape (A, K, N).
        is_voter: which of them there are, shape (A, K).

    Returns:
        Tokens (A, N), a gap where no voter has a token.
    """
    num_voters = rows.shape[1]
    if num_voters == 1:
        return rows[:, 0]
    pairs = (is_voter[:, :, None] & is_voter[:, None])[..., None]
    agree = (rows[:, :, None] == rows[:, None]) & pairs & (rows >= 0)[:, None]
    agree = agree.cumprod(dim=3, dtype=torch.short)  # (A, K, K, N)
    weights = torch.arange(num_voters, 0, -1, dtype=torch.short, device=rows.device)[:, None]
    # One number for a group of voters who agree up to here: its size, then who is its first.
    groups = agree.sum(dim=2, dtype=torch.short) * (num_voters + 1) + (agree * weights).amax(dim=2)  # (A, K, N)
    agreed_before = torch.cat([pairs.short(), agree[..., :-1]], dim=3)
    winners = (agreed_before * groups[:, None]).amax(dim=2)
    follows = ((groups == winners) & is_voter[..., None]).cumprod(dim=2, dtype=torch.short)
    return torch.where(follows > 0, rows, _GAP).amax(dim=1)
