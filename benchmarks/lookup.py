"""What does PromptLookup's index cost at 1 thousand to 1 million tokens? Prints a table, and one JSON document last.

    python benchmarks/lookup.py [--sizes 1000,10000,100000,1000000] [--rounds 500]

Texts, and what a microsecond is (CPU time of the thread), are those of benchmarks/history.py. The index reads a prompt
in one go ("bulk"), then the text grows by one token a round: a "single" round reads the token and drafts nothing, a
proposal reads it and drafts up to 15 tokens for the windows (1, 4). Bytes a token are what the index holds after the
prompt, the caller's text not counted. Beside it: the candidate generator of Transformers' own prompt lookup, which has
no index and scans the text in every round, with the host's window of 2 tokens at most.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import torch
import transformers
from history import TEXTS, seconds
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specdec.drafters.prompt_lookup import PREFERENCES, NgramIndex

NUM_DRAFT_TOKENS = 15


class Ours:
    """The index of this package; the text is a list, as in `DecodeState.tokens`."""

    def __init__(self, prefer: str):
        self.name = f"hf_specdec {prefer}"
        self.index = NgramIndex(1, 4, prefer)

    def prepare(self, tokens: list[int]) -> list[int]:
        """The text as rounds see it."""
        return list(tokens)

    def grow(self, text: list[int], token: int) -> list[int]:
        """The text of the next round."""
        text.append(token)
        return text

    def propose(self, text: list[int], limit: int) -> int:
        """Drafts for the end of the text; the number of tokens."""
        return len(self.index.copy(text, limit).tokens)


class Host:
    """Transformers' own prompt lookup; the text is a tensor that the loop has grown already."""

    name = "transformers"

    def __init__(self) -> None:
        settings = {"num_output_tokens": NUM_DRAFT_TOKENS, "max_matching_ngram_size": 2, "max_length": 2**31}
        self.generator = PromptLookupCandidateGenerator(**settings)

    def prepare(self, tokens: list[int]) -> torch.Tensor:
        """The text as rounds see it."""
        return torch.tensor([tokens])

    def grow(self, text: torch.Tensor, token: int) -> torch.Tensor:
        """The text of the next round."""
        return torch.cat([text, torch.tensor([[token]])], dim=1)

    def propose(self, text: torch.Tensor, limit: int) -> int:
        """Drafts for the end of the text; the number of tokens."""
        if limit == 0:
            return 0
        return self.generator.get_candidates(text)[0].shape[1] - text.shape[1]


def main(argv: list[str] | None = None) -> None:
    """Measures everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1000,10000,100000,1000000")
    parser.add_argument("--rounds", type=int, default=500)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    candidates: list[Callable[[], Ours | Host]] = [lambda prefer=prefer: Ours(prefer) for prefer in PREFERENCES]
    print(
        "text     history      library               bulk us  single us   propose us (     p99)   bytes/token  drafted"
    )
    results = []
    for kind in ("zipf", "uniform"):
        for size in map(int, options.sizes.split(",")):
            text = TEXTS[kind](size + 2 * options.rounds).tolist()
            rows = [measured(candidate, kind, size, text, options.rounds) for candidate in candidates]
            rows.append(measured(Host, kind, size, text, min(options.rounds, 100)))
            results += rows
    machine = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    machine |= {"torch": torch.__version__, "transformers": transformers.__version__}
    settings = {"windows": [1, 4], "num_draft_tokens": NUM_DRAFT_TOKENS, "host_window": 2, "rounds": options.rounds}
    print(json.dumps({"machine": machine, "settings": settings, "results": results}))


def measured(
    candidate: Callable[[], Ours | Host], kind: str, size: int, tokens: list[int], num_rounds: int
) -> dict[str, float | str]:
    """One row of the table."""
    subject = candidate()
    text = subject.prepare(tokens[:size])
    bulk = seconds(lambda: subject.propose(text, 0))
    single, proposed, num_drafted = [], [], 0
    for number, token in enumerate(tokens[size : size + 2 * num_rounds]):
        text = subject.grow(text, token)
        limit = NUM_DRAFT_TOKENS if number % 2 else 0
        start = time.thread_time_ns()
        num_drafted += subject.propose(text, limit)
        (proposed if limit else single).append((time.thread_time_ns() - start) / 1e3)
    row = {
        "text": kind,
        "history": size,
        "library": subject.name,
        "bulk_us": bulk / size * 1e6,
        "single_us": statistics.mean(single),
        "propose_us": statistics.median(proposed),
        "propose_p99_us": float(np.quantile(proposed, 0.99)),
        "bytes_per_token": num_bytes(candidate, tokens[:size]) / size,
        "drafted": num_drafted / num_rounds,
    }
    print(
        "{text:8} {history:9,}    {library:20} {bulk_us:8.2f} {single_us:10.1f} {propose_us:12.1f}"
        " ({propose_p99_us:8.1f})   {bytes_per_token:11.1f}   {drafted:6.2f}".format(**row),
        flush=True,
    )
    return row


def num_bytes(candidate: Callable[[], Ours | Host], tokens: list[int]) -> int:
    """Memory that is held once a prompt has been read."""
    subject = candidate()
    text = subject.prepare(tokens)
    tracemalloc.start()
    subject.propose(text, 0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


if __name__ == "__main__":
    main()
