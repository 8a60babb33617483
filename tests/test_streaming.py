"""A streamer sees exactly what plain `generate` puts: once each, in order, and always an end."""

from __future__ import annotations

import string
import threading

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from tests.models import jittered, prompts, tiny

NEVER = 4  # an id that the models below do not emit


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(tiny())


@pytest.fixture(scope="module")
def drafters(target):
    return {
        "itself": DraftModel(target, num_draft_tokens=7),
        "similar": DraftModel(jittered(target), num_draft_tokens=4),
        "lookup": PromptLookup(),
    }


DRAFTERS = ("itself", "similar", "lookup")


class Recording:
    """Remembers what was put, and of what kind it was."""

    def __init__(self):
        self.events, self.kinds = [], set()

    def put(self, value):
        self.events.append(value.tolist())
        self.kinds.add((value.dtype, value.device.type))

    def end(self):
        self.events.append("end")


class Pass(LogitsProcessor):
    """Changes nothing, but nobody can know: rows advance in lockstep."""

    def __call__(self, input_ids, scores):
        return scores


def batch(num_rows: int) -> dict:
    ids, mask = prompts(num_rows)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "do_sample": False,
        "pad_token_id": 0,
        "max_new_tokens": 24,
        "eos_token_id": NEVER,
    }


def streamed(target, assistant, **given) -> tuple[Recording, torch.Tensor]:
    stream = Recording()
    return stream, target.generate(assistant=assistant, streamer=stream, **given)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("lockstep", [False, True])
def test_puts_are_those_of_plain(target, drafters, drafter, num_rows, lockstep):
    given = batch(num_rows) | ({"logits_processor": LogitsProcessorList([Pass()])} if lockstep else {})
    (plain, plain_ids), (ours, ids) = (streamed(target, a, **given) for a in (False, drafters[drafter]))
    assert ours.events == plain.events and ours.kinds == plain.kinds
    assert torch.equal(ids, plain_ids)
    assert ours.events[0] == given["input_ids"].tolist()
    assert torch.tensor(ours.events[1:-1]).T.tolist() == ids[:, 12:].tolist()


def test_what_is_put_lies_on_the_host_whatever_the_default_device(target, drafters):
    given = batch(2)
    with torch.device("meta"):
        (plain, _), (ours, _) = (streamed(target, a, **given) for a in (False, drafters["lookup"]))
    assert ours.events == plain.events and ours.kinds == plain.kinds == {(torch.long, "cpu")}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("pad", [0, 5])
def test_rows_that_finish_early_are_filled_as_in_plain(target, drafters, drafter, row, pad):
    given = batch(3) | {"pad_token_id": pad}
    emitted = target.generate(assistant=False, **given)[:, 12:].tolist()
    # One row ends after a few tokens, another one later.
    ends = [emitted[row][3], emitted[(row + 1) % 3][9]]
    given |= {"eos_token_id": ends}
    lengths = {next((n for n, t in enumerate(tokens) if t in ends), 24) for tokens in emitted}
    assert len(lengths) > 1
    (plain, _), (ours, ids) = (streamed(target, a, **given) for a in (False, drafters[drafter]))
    assert ours.events == plain.events
    assert len(ours.events) == ids.shape[1] - 12 + 2


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sequences_of_one_prompt_are_streamed_side_by_side(target, drafters, drafter):
    given = batch(2) | {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 12}
    (plain, _), (ours, ids) = (streamed(target, a, **given) for a in (False, drafters[drafter]))
    assert ours.events == plain.events
    assert len(ours.events[0]) == 4
    given |= {"top_k": 0, "temperature": 1.5}
    ours, ids = streamed(target, drafters[drafter], **given)
    assert torch.tensor(ours.events[1:-1]).T.tolist() == ids[:, 12:].tolist()
    assert len({tuple(row) for row in ids.tolist()}) > 2


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_settings_of_a_generation_config_object(target, drafters, drafter):
    ids, mask = prompts(3)
    config = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, repetition_penalty=1.3)
    given = {"input_ids": ids, "attention_mask": mask, "generation_config": config}
    (plain, _), (ours, _) = (streamed(target, a, **given) for a in (False, drafters[drafter]))
    assert ours.events == plain.events


def test_a_prompt_that_is_continued_by_one_token(target):
    for assistant in (PromptLookup(), DraftModel(target)):
        stream, ids = streamed(target, assistant, **(batch(1) | {"max_new_tokens": 1}))
        assert stream.events == [batch(1)["input_ids"].tolist(), ids[0, 12:].tolist(), "end"]


# --- exceptions -------------------------------------------------------------------------------------------


class Fails(StoppingCriteria):
    """Raises once a length is reached."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("criterion")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_stream_ends_once_when_the_call_fails(target, drafters, drafter, num_rows):
    given = batch(num_rows)
    complete, _ = streamed(target, False, **given)
    stream = Recording()
    with pytest.raises(RuntimeError, match="criterion"):
        target.generate(
            assistant=drafters[drafter],
            streamer=stream,
            stopping_criteria=StoppingCriteriaList([Fails(28)]),
            **given,
        )
    assert stream.events[-1] == "end" and stream.events.count("end") == 1
    assert stream.events[:-1] == complete.events[: len(stream.events) - 1]
    assert 1 <= len(stream.events) - 1 <= 1 + 15  # the prompt, then no token behind the failure


@pytest.mark.parametrize(
    "refused",
    [
        {"num_beams": 2},
        {"num_draft_tokens": 0},
        {"stop_strings": ["a"]},
        {"max_new_tokens": 0},
        {"assistant": "no-name"},
    ],
)
def test_the_stream_ends_when_the_call_is_refused(target, refused):
    stream = Recording()
    with pytest.raises(ValueError):
        target.generate(**({"assistant": PromptLookup(), "streamer": stream} | batch(1) | refused))
    assert stream.events[-1:] == ["end"] and stream.events.count("end") == 1


def test_the_stream_ends_when_the_streamer_itself_fails(target):
    class Broken(Recording):
        def put(self, value):
            super().put(value)
            if len(self.events) == 3:
                raise RuntimeError("streamer")

    stream = Broken()
    with pytest.raises(RuntimeError, match="streamer"):
        target.generate(assistant=PromptLookup(), streamer=stream, **batch(1))
    assert stream.events.count("end") == 1 and stream.events[-1] == "end"


# --- the host's own streamers -----------------------------------------------------------------------------


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Every id from 3 to 63 is one letter or digit."""
    letters = string.ascii_letters + string.digits[:9]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: i for i, letter in enumerate(letters, 3)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("skip_prompt", [False, True])
def test_pieces_of_an_iterator_streamer_join_to_the_text(target, drafters, drafter, skip_prompt):
    tokenizer = letter_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=60)
    given = batch(1)
    worker = threading.Thread(
        target=target.generate, kwargs={"assistant": drafters[drafter], "streamer": streamer, **given}
    )
    worker.start()
    text = "".join(streamer)
    worker.join()
    plain = target.generate(assistant=False, **given)
    assert text == tokenizer.decode(plain[0, 12 if skip_prompt else 0 :])


def test_a_reader_of_an_iterator_streamer_is_released_when_the_call_fails(target):
    streamer = TextIteratorStreamer(letter_tokenizer(), timeout=60)
    with pytest.raises(RuntimeError, match="criterion"):
        target.generate(
            assistant=PromptLookup(),
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([Fails(16)]),
            **batch(1),
        )
    assert isinstance("".join(streamer), str)  # would wait for the timeout otherwise


def test_a_text_streamer_prints_the_text(target, capsys):
    tokenizer = letter_tokenizer()
    for assistant in (False, DraftModel(target)):
        target.generate(assistant=assistant, streamer=TextStreamer(tokenizer), **batch(1))
    plain, ours = capsys.readouterr().out.splitlines()
    assert ours == plain == tokenizer.decode(target.generate(assistant=False, **batch(1))[0])


def test_a_streamer_that_takes_one_row_refuses_a_batch_as_in_plain(target):
    for assistant in (False, PromptLookup()):
        with pytest.raises(ValueError, match="batch size 1"):
            target.generate(assistant=assistant, streamer=TextStreamer(letter_tokenizer()), **batch(2))
