"""What does a TokenHistory cost at 1 thousand to 1 million tokens? Prints a table, and one JSON document last.

    python benchmarks/history.py [--sizes 1000,10000,100000,1000000] [--depth 24]

Two kinds of text over 32,000 ids: Zipf's law with copied spans (half of the spans repeat an earlier place), and uniform
noise. Seconds are CPU time of the thread, so that other processes disturb little. A "single" is one token appended
to the newest request by a call of its own; a proposal looks up the end of the text, which then grows by one token of
the same kind. Bytes a token are those after the bulk. If arctic_inference can be imported, its SuffixDecodingCache is
measured beside it, with one active request (what such a request gains is stored in its own tree and the global one).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from hf_specdec.history import ANCHORS, MOST_VOTERS, CopyRule, TokenHistory

NUM_IDS = 32_000
NUM_PROPOSALS = 2000


class Ours:
    """The history of this package."""

    name = "hf_specdec"

    def __init__(self, depth: int):
        self.history, self.rule, self.depth = TokenHistory(depth), CopyRule(), depth

    def bulk(self, tokens: np.ndarray) -> None:
        """Adds a prompt."""
        self.history.add(tokens)

    def single(self, token: list[int]) -> None:
        """Appends one token."""
        self.history.extend(token)

    def propose(self, text: list[int]) -> int:
        """Drafts for the end of the text; the number of tokens."""
        return len(self.history.propose(None, self.depth, self.rule).tokens)

    def num_bytes(self) -> int:
        """Memory held."""
        return self.history.num_bytes


class Arctic:
    """ArcticInference's suffix trees (C++)."""

    name = "arctic_inference"

    def __init__(self, depth: int):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache, self.depth = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=10_000), depth

    def bulk(self, tokens: np.ndarray) -> None:
        """Adds a prompt."""
        self.cache.start_request(0, tokens.astype(np.int32))

    def single(self, token: list[int]) -> None:
        """Appends one token."""
        self.cache.add_active_response(0, token)

    def propose(self, text: list[int]) -> int:
        """Drafts for the end of the text; the number of tokens."""
        return len(self.cache.speculate(0, text[-self.depth :], max_spec_tokens=self.depth).token_ids)

    def num_bytes(self) -> int:
        """Memory held, as the trees estimate it; the tree of the request only, which holds the whole text."""
        return self.cache._local_trees[0].estimate_memory()


def main(argv: list[str] | None = None) -> None:
    """Measures everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1000,10000,100000,1000000")
    parser.add_argument("--depth", type=int, default=24)
    options = parser.parse_args(argv)
    candidates = [Ours] + [Arctic] * bool(importlib.util.find_spec("arctic_inference"))
    header = (
        "text     history      library            bulk us  single us (p99)   propose us (p99)   bytes/token  drafted"
    )
    print(header)
    results = []
    for kind in ("zipf", "uniform"):
        for size in map(int, options.sizes.split(",")):
            text = TEXTS[kind](size + 2 * NUM_PROPOSALS)
            results += [measured(candidate, options.depth, kind, size, text) for candidate in candidates]
    machine = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    settings = {"depth": options.depth, "anchors": ANCHORS, "most_voters": MOST_VOTERS, "rule": "vLLM's defaults"}
    print(json.dumps({"machine": machine, "settings": settings, "results": results}))


def zipf_text(length: int, seed: int = 0) -> np.ndarray:
    """Ids by Zipf's law, in which about half of all spans repeat an earlier one."""
    chance = np.random.default_rng(seed)
    weights = 1 / np.arange(1, NUM_IDS + 1)
    text = chance.choice(NUM_IDS, size=length, p=weights / weights.sum()).astype(np.int32)
    place = 100
    while place < length:
        span = min(int(chance.integers(5, 60)), length - place)
        if chance.random() < 0.5:
            start = int(chance.integers(0, place - 60))
            text[place : place + span] = text[start : start + span]
        place += span
    return text


def uniform_text(length: int, seed: int = 0) -> np.ndarray:
    """Ids without any order."""
    return np.random.default_rng(seed).integers(0, NUM_IDS, length).astype(np.int32)


TEXTS: dict[str, Callable[[int], np.ndarray]] = {"zipf": zipf_text, "uniform": uniform_text}


def measured(candidate: type, depth: int, kind: str, size: int, text: np.ndarray) -> dict[str, float | str]:
    """One row of the table."""
    subject = candidate(depth)
    bulk = seconds(lambda: subject.bulk(text[:size]))
    num_bytes = subject.num_bytes()
    tokens = text.tolist()
    singles = [[token] for token in tokens[size:]]
    in_a_row = seconds(lambda: [subject.single(token) for token in singles[:NUM_PROPOSALS]])
    appended, proposed, num_drafted = [], [], 0
    for number, token in enumerate(singles[NUM_PROPOSALS:], start=size + NUM_PROPOSALS):
        appended.append(seconds(lambda token=token: subject.single(token)))
        ending = tokens[number + 1 - depth : number + 1]
        start = time.thread_time_ns()
        num_drafted += subject.propose(ending)
        proposed.append((time.thread_time_ns() - start) / 1e9)
    row = {
        "text": kind,
        "history": size,
        "library": candidate.name,
        "bulk_us": bulk / size * 1e6,
        "single_us": in_a_row / NUM_PROPOSALS * 1e6,
        "single_p99_us": float(np.quantile(appended, 0.99)) * 1e6,
        "propose_us": statistics.median(proposed) * 1e6,
        "propose_p99_us": float(np.quantile(proposed, 0.99)) * 1e6,
        "bytes_per_token": num_bytes / size,
        "drafted": num_drafted / NUM_PROPOSALS,
    }
    print(
        "{text:8} {history:9,}    {library:16} {bulk_us:9.2f} {single_us:7.1f} ({single_p99_us:5.1f})"
        "   {propose_us:8.1f} ({propose_p99_us:6.1f})   {bytes_per_token:10.1f}   {drafted:6.2f}".format(**row),
        flush=True,
    )
    return row


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    start = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - start) / 1e9


if __name__ == "__main__":
    main()
