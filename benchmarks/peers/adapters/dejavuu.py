"""dejavuu on its Transformers backend: plain, prompt lookup as chains; recycled tokens and suffixes as trees.

Attention is computed as for everybody else (sdpa); its default is eager. Drafters that remember keep what they have
seen, as in its own benchmarks.
"""

from __future__ import annotations

from typing import Any

from dejavuu.core import Sampler, generate
from dejavuu.decoders.hf import HFBackend
from dejavuu.drafters import make_drafter

from peers.side import GENERATE, PLAIN, Case, Generate, Sampling, Side, device, ends_of, generating, opened

TREES = ("token_recycling", "suffix_decoding", "suffix_recycle_merge")


def side(case: Case) -> Side:
    """All ways share one backend, and the backend the model that `generate` uses."""
    backend = HFBackend(case.target, device(), case.dtype, attn_implementation="sdpa")
    backend._model = target = opened(case.target, case)
    ways = {
        PLAIN: lambda: decoding(backend, target, "baseline", 0),
        GENERATE: lambda: generating(target),
        "lookup": lambda: decoding(backend, target, "pld", case.num_copied),
    }
    for method in TREES:
        ways[method.replace("_", "-")] = lambda method=method: decoding(backend, target, method, case.num_copied)
    return Side(target, ways, ("dejavuu",))


def decoding(backend: Any, target: Any, method: str, budget: int) -> Generate:
    """Answers by its own loop, which knows one end only."""
    drafter, end = make_drafter(method), next(iter(ends_of(target)), None)

    def answer(prompt: list[int], num_tokens: int, sampling: Sampling | None) -> list[int]:
        sampler = None if sampling is None else Sampler(sampling.temperature, sampling.top_p, sampling.seed)
        shape = {"budget": budget, "tree": method in TREES}
        found = generate(backend, prompt, num_tokens, drafter, eos=end, sampler=sampler, **shape)
        return found.tokens[:num_tokens]

    return answer
