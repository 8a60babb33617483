"""A trace tells what happened: its tokens are the text, its counts are the statistics."""

from __future__ import annotations

import copy
import json
import threading

import pytest

import hf_specdec
from hf_specdec import Auto, PromptLookup, Suffix, TokenRecycling, Trace
from hf_specdec.rounds import BONUS, CORRECTION, PLAIN, RowRound, TracedRound
from tests.models import jittered, prompts, tiny
from tests.tree_drafters import Bushy, Mixed, Oracle, bushy

MODES = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "temperature": 0.7},
    "coupled": {"do_sample": True, "seed": 3, "verification": "coupled"},
    "lockstep": {"logits_processor": [lambda ids, scores: scores]},  # not known to be stateless
    "sampled lockstep": {"do_sample": True, "seed": 3, "logits_processor": [lambda ids, scores: scores]},
    "cache returned": {"return_dict_in_generate": True},
}


@pytest.fixture(scope="module")
def batch():
    """Three ragged prompts, what the target says to them, and an end that cuts the rows to different lengths."""
    target = hf_specdec.enable(tiny())
    ids, mask = prompts(3)
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=40, eos_token_id=None)
    return target, ids, mask, plain, int(plain[0, ids.shape[1] + 7])


def drafter(name, target, plain):
    return {
        "prompt-lookup": PromptLookup,
        "auto": lambda: Auto([Suffix(), PromptLookup(), TokenRecycling()]),
        "draft-model": lambda: jittered(target),
        "bushy": Bushy,
        "oracle": lambda: Oracle(plain, is_deep=True),
        "mixed": lambda: Mixed(text=plain),
    }[name]()


def without_zeros(counts: list[int]) -> list[int]:
    """Falling counts up to the last position that has any."""
    return [count for count in counts if count]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["prompt-lookup", "auto", "draft-model", "bushy", "oracle", "mixed"])
def test_tokens_are_the_text_and_counts_the_statistics(batch, name, mode):
    target, ids, mask, plain, end = batch
    with hf_specdec.trace() as traces:
        output = target.generate(
            ids,
            attention_mask=mask,
            assistant=drafter(name, target, plain),
            max_new_tokens=40,
            eos_token_id=end,
            **MODES[mode],
        )
    output = getattr(output, "sequences", output)
    (trace,) = traces
    assert trace.prompts == [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    for row in range(3):
        tokens = trace.tokens(row)
        padded = tokens + [0] * (output.shape[1] - ids.shape[1] - len(tokens))
        assert padded == output[row, ids.shape[1] :].tolist()
        assert len(tokens) == 40 or tokens[-1] == end
    told, counted = hf_specdec.last_stats(target).to_dict(), trace.stats().to_dict()
    assert counted.pop("seconds") == pytest.approx(told.pop("seconds"))
    assert counted.pop("seconds_per_token") == pytest.approx(told.pop("seconds_per_token"))
    assert counted == told
    assert trace.stats().drafted == sum(trace.stats(arm).drafted for arm in trace.arms) > 0
    for arm in trace.arms:
        stats, (drafted, judged, stayed) = trace.stats(arm), trace.by_depth(arm)
        assert sum(stayed) == stats.accepted
        assert without_zeros(judged) == without_zeros(stats.tested_at)
        assert without_zeros(stayed) == without_zeros(stats.accepted_at)
        if all(part.parents is None for turn in trace.rounds for part in turn.rows):
            assert drafted == stats.drafted_at
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


def test_drafts_are_those_that_were_judged(batch):
    """Behind the same token this drafter draws the same tree, whatever the limit cuts off its end."""
    target, ids, mask, _, _ = batch
    with hf_specdec.trace() as traces:
        target.generate(ids, attention_mask=mask, assistant=Bushy(), max_new_tokens=30)
    texts = [list(prompt) for prompt in traces[0].prompts]
    num_trees = 0
    for index, turn in enumerate(traces[0].rounds):
        for part in turn.rows:
            tokens, parents = bushy(texts[part.row][-1], len(part.drafted), 64)
            if index > 0:  # the prompt's pass takes no tree
                assert (part.drafted, part.known_parents) == (tokens, parents)
            num_trees += part.parents is not None
            texts[part.row] += part.emitted
    assert num_trees > 10


def test_the_target_s_own_tokens_are_told_apart():
    chain = {"row": 0, "arm": "x", "drafted": [5, 6], "parents": None}
    tree = {"row": 0, "arm": "x", "drafted": [5, 6, 7], "parents": [-1, -1, 0]}
    assert RowRound(**chain, kept=[], emitted=[9]).last == CORRECTION
    assert RowRound(**chain, kept=[0], emitted=[5, 9]).last == CORRECTION
    assert RowRound(**chain, kept=[0, 1], emitted=[5, 6, 9]).last == BONUS
    assert RowRound(**chain, kept=[0], emitted=[5]).last is None
    assert RowRound(**tree, kept=[0], emitted=[5, 9]).last == CORRECTION
    assert RowRound(**tree, kept=[1], emitted=[6, 9]).last == BONUS
    assert RowRound(**tree, kept=[0, 2], emitted=[5, 7, 9]).last == BONUS
    assert RowRound(0, None, [], None, [], [9]).last == PLAIN


def test_a_tree_is_counted_by_depth():
    tree = {"row": 0, "arm": "x", "drafted": [5, 6, 7, 8], "parents": [-1, -1, 0, 2]}
    parts = [
        RowRound(**tree, kept=[], emitted=[9]),  # refused at once
        RowRound(**tree, kept=[1], emitted=[6, 9]),  # along the short branch to its end
        RowRound(**tree, kept=[0, 2], emitted=[5, 7, 9]),  # refused at the third
        RowRound(**tree, kept=[0, 2], emitted=[5, 7]),  # cut behind the second
        RowRound(0, "y", [5], None, [0], [5, 9]),
    ]
    trace = Trace("z", [[1]], [TracedRound({}, [part]) for part in parts])
    assert trace.by_depth("x") == ([4, 4, 4], [4, 2, 1], [3, 2, 0])
    assert trace.by_depth("y") == ([1], [1], [1])
    assert trace.by_depth("z") == ([], [], [])
    assert trace.stats("x").tested_at == [4, 2, 1, 0]


def test_drafters_and_rows_that_the_call_did_not_have_are_refused():
    trace = Trace("z", [[1]], [TracedRound({}, [RowRound(0, "y", [5], None, [0], [5, 9])])])
    assert (trace.stats("z").rounds, trace.stats("y").rounds, trace.tokens(0)) == (0, 1, [5, 9])
    for ask in (trace.stats, trace.by_depth):
        with pytest.raises(ValueError, match="arm='suffixx' drafted nothing in this call; known are y, z"):
            ask("suffixx")
    for row in (1, -1):
        with pytest.raises(ValueError, match=f"row={row}: rows of the call are counted from 0 to 0"):
            trace.tokens(row)


def test_only_calls_inside_the_block_are_traced(batch):
    target, ids, mask, _, _ = batch
    call = {"attention_mask": mask, "max_new_tokens": 5}
    with hf_specdec.trace() as traces:
        target.generate(ids, **call)  # plain
        thread = threading.Thread(target=target.generate, args=(ids,), kwargs=call | {"assistant": "prompt-lookup"})
        thread.start()
        thread.join()
        assert traces == []
        with hf_specdec.trace() as inner:
            target.generate(ids, assistant="prompt-lookup", **call)
        target.generate(ids, assistant="prompt-lookup", **call)
        target.generate(ids, custom_generate=hf_specdec.speculate("suffix"), **call)
    target.generate(ids, assistant="prompt-lookup", **call)
    assert [trace.assistant for trace in traces] == ["prompt-lookup", "suffix"]
    assert len(inner) == 1


def test_a_call_that_fails_leaves_its_rounds(batch):
    target, ids, mask, _, _ = batch

    def refuse(ids, scores):
        if ids.shape[1] > 16:
            raise RuntimeError("enough")
        return scores

    call = {"attention_mask": mask, "max_new_tokens": 20, "assistant": "prompt-lookup"}
    with hf_specdec.trace() as traces:
        with pytest.raises(RuntimeError, match="enough"):
            target.generate(ids, logits_processor=[refuse], **call)
        target.generate(ids, **call)
    assert 0 < len(traces[0].rounds) < len(traces[1].rounds)


def damaged(document, change):
    changed = copy.deepcopy(document)
    change(changed)
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("rounds"), "no trace"),
        (lambda d: d.update(prompts=3), "no trace"),
        (lambda d: d.update(prompts=[["a"]]), "prompts="),
        (lambda d: d.update(assistant=None), "assistant=None"),
        (lambda d: d["rounds"][0].update(seconds={"tea": 1.0}), "by phase"),
        (lambda d: d["rounds"][0].update(seconds={"draft": -1.0}), "by phase"),
        (lambda d: d["rounds"][0].update(seconds={"draft": float("nan")}), "by phase"),
        (lambda d: d["rounds"][0].update(seconds=[]), "by phase"),
        (lambda d: d["rounds"][0]["rows"][0].update(row=1), "has no prompt"),
        (lambda d: d["rounds"][0]["rows"][0].update(row="0"), "row="),
        (lambda d: d["rounds"][0]["rows"][0].update(colour="red"), "no trace"),
        (lambda d: d["rounds"][0]["rows"][0].update(arm=None), "a name and tokens"),
        (lambda d: d["rounds"][0]["rows"][0].update(drafted=[5, -6]), "drafted="),
        (lambda d: d["rounds"][0]["rows"][0].update(parents=[-1]), "parents="),
        (lambda d: d["rounds"][0]["rows"][0].update(parents=[-1, 1]), "parents="),
        (lambda d: d["rounds"][0]["rows"][0].update(kept=[2]), "not drafted"),
        (lambda d: d["rounds"][0]["rows"][0].update(kept=[1]), "a path"),
        (lambda d: d["rounds"][0]["rows"][0].update(emitted=[6, 9]), "a path"),
        (lambda d: d["rounds"][0]["rows"][0].update(emitted=[5, 9, 9]), "not more"),
    ],
)
def test_a_damaged_trace_is_refused(change, message):
    part = RowRound(0, "x", [5, 6], None, [0], [5, 9])
    document = {"assistant": "x", "prompts": [[1]], "rounds": [{"seconds": {"draft": 0.1}, "rows": [vars(part)]}]}
    assert Trace.from_dict(document).tokens(0) == [5, 9]
    with pytest.raises(ValueError, match=message):
        Trace.from_dict(damaged(document, change))
