"""Training data: the target's own words, whole shards, nothing that is held out, and the same after a kill."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hf_specdec.cli import main
from hf_specdec.loading import load_target
from hf_specdec.training.answers import DataMaker, DataOptions, end_ids, longest_prompt, make_data
from hf_specdec.training.examples import (
    Example,
    conversation_name,
    is_held_out,
    read_examples,
    read_record,
    shard_paths,
    write_shard,
)
from hf_specdec.training.prompts import (
    HeldOut,
    PromptWriter,
    is_junk,
    open_turn,
    read_passages,
    read_prompts,
    shortened,
    user_turn_ends,
)
from hf_specdec.training.themes import THEMES, Theme, read_themes
from hf_specdec.training.writing import write
from tests.models import tiny
from tests.tokenizers_for_tests import TEMPLATE, save_tiny, trained_tokenizer

QUIET = Console(file=open(os.devnull, "w"))  # noqa: SIM115 - as long as the tests run


def example(prompt=(3, 4), answer=(5, 2), **changes) -> Example:
    return Example(
        **({"prompt": prompt, "answer": answer, "temperature": 0.0, "source": "self", "finished": True} | changes)
    )


# --- folders ----------------------------------------------------------------------------------------------


def test_examples_come_back_in_order(tmp_path):
    written = [example(prompt=(n,), temperature=n / 10, finished=bool(n % 2)) for n in range(1, 9)]
    for index in (1, 0):
        write_shard(tmp_path, index, written[4 * index : 4 * index + 4])
    assert read_examples(tmp_path) == written
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["answers-00000.jsonl", "answers-00001.jsonl"]


BROKEN = {
    "cut": '{"prompt": [3], "ans',
    "a list": "[1]",
    "a field less": '{"prompt": [3], "answer": [4], "temperature": 0.0, "source": "self"}',
    "no answer": '{"prompt": [3], "answer": [], "temperature": 0.0, "source": "self", "finished": true}',
    "a word": '{"prompt": ["x"], "answer": [4], "temperature": 0.0, "source": "self", "finished": true}',
    "a truth": '{"prompt": [true], "answer": [4], "temperature": 0.0, "source": "self", "finished": true}',
    "cold": '{"prompt": [3], "answer": [4], "temperature": -1, "source": "self", "finished": true}',
    "nobody's": '{"prompt": [3], "answer": [4], "temperature": 0.0, "source": "me", "finished": true}',
    "perhaps": '{"prompt": [3], "answer": [4], "temperature": 0.0, "source": "self", "finished": 1}',
    "a talk": '{"prompt": [3], "answer": [4], "temperature": 0.0, "source": "self", "finished": true, '
    '"conversation": "of ours"}',
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_broken_lines_are_shown_and_the_rest_is_kept(line, tmp_path, capsys):
    path = write_shard(tmp_path, 0, [example(), example(prompt=(7,))])
    whole = path.read_text().splitlines()
    path.write_text(f"{whole[0]}\n{line}\n{whole[1]}\n")
    assert read_examples(tmp_path) == [example(), example(prompt=(7,))]
    said = capsys.readouterr().err
    assert "1 broken lines are left out" in said and "answers-00000.jsonl, line 2" in said


def test_folders_without_data_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no answers.*hf-specdec data"):
        read_examples(tmp_path)
    with pytest.raises(ValueError, match=r"data\.json cannot be read"):
        read_record(tmp_path)


def test_growing_data_never_move_between_training_and_evaluation():
    examples = [example(prompt=(n, n + 1)) for n in range(4000)]
    chosen = [is_held_out(one, 0.1) for one in examples]
    # Binomial: 400 expected, standard deviation 19; further away than 7 of them less than once in 10^11.
    assert 267 < sum(chosen) < 533
    assert chosen[:10] == [is_held_out(one, 0.1) for one in examples[:10]]
    assert all(is_held_out(one, 0.2) for one in examples if is_held_out(one, 0.1))
    assert is_held_out(examples[0], 0.1) == is_held_out(example(prompt=(0, 1), answer=(9,), temperature=1.0), 0.1)
    assert not any(is_held_out(one, 0) for one in examples[:50])
    with pytest.raises(ValueError, match="share=1"):
        is_held_out(examples[0], 1)


def test_the_split_is_that_of_the_first_release():
    """A training that goes on must not learn what it was evaluated on: the digest of a prompt is part of the format."""
    lowest = {n: int(conversation_name((n, n + 1)), 16) / 2**64 for n in range(40)}
    assert conversation_name((3, 4)) == blake2b(b"[3, 4]", digest_size=8).hexdigest()
    for n, place in lowest.items():
        one = example(prompt=(n, n + 1))
        assert is_held_out(one, place + 1e-9) and not is_held_out(one, place - 1e-9)


def test_turns_of_a_conversation_stay_together(tmp_path):
    first = example(prompt=(1, 2))
    later = [example(prompt=(1, 2, 3, n), conversation=conversation_name(first.prompt)) for n in range(200)]
    for share in (0.05, 0.5, 0.9):
        assert {is_held_out(one, share) for one in later} == {is_held_out(first, share)}
    write_shard(tmp_path, 0, [first, later[0]])
    lines = (tmp_path / "answers-00000.jsonl").read_text().splitlines()
    assert ["conversation" in line for line in lines] == [False, True]  # what older releases read stays as it was
    assert read_examples(tmp_path) == [first, later[0]]


# --- writing ----------------------------------------------------------------------------------------------


def greedy_by_the_host(model, prompt, ends, limit):
    output = model.generate(torch.tensor([prompt]), max_new_tokens=limit, eos_token_id=sorted(ends), do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral6", "gemma3", "gpt2"])
def test_texts_written_together_are_what_the_target_writes_alone(family):
    model = tiny(family)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in (3, 11, 1, 6, 6, 9)]
    ends = frozenset({2, 7, 9, 11, 30})  # many, so that rows end at different times
    texts = write(model, prompts, [0.0] * 6, 40, ends, generator)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.tokens == greedy_by_the_host(model, prompt, ends, 40)
        assert text.finished == (text.tokens[-1] in ends)
    assert len({len(text.tokens) for text in texts}) > 1


def test_models_that_cannot_read_padding_say_so():
    with pytest.raises(ValueError, match=r"BloomForCausalLM cannot read.*batch size of 1"):
        write(tiny("bloom"), [[5], [4, 6, 7]], [0.0] * 2, 4, frozenset({2}), torch.Generator())


def test_sampled_tokens_follow_the_law():
    model = tiny(vocab=16, initializer_range=0.6)
    prompt, count = [3, 5], 4000
    with torch.no_grad():
        law = (model(torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    for top_p, expected in ((1.0, law), (0.6, nucleus(law, 0.6))):
        generator = torch.Generator().manual_seed(1)
        texts = write(model, [prompt] * count, [0.7] * count, 1, frozenset({2}), generator, top_p)
        found = torch.bincount(torch.tensor([text.tokens[0] for text in texts]), minlength=16) / count
        assert (found[expected == 0] == 0).all()
        # Every share is off by more than 6 standard deviations less than once in 10^8.
        assert ((found - expected).abs() <= 6 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()


def nucleus(law, mass):
    order = law.argsort(descending=True)
    ahead = law[order].cumsum(0) - law[order]
    kept = torch.zeros_like(law)
    kept[order[ahead < mass]] = law[order[ahead < mass]]
    return kept / kept.sum()


# --- prompts ----------------------------------------------------------------------------------------------


def test_the_user_turn_is_left_open():
    tokenizer = trained_tokenizer()
    assert open_turn(tokenizer, "") == "<|user|>"
    assert open_turn(tokenizer, "Be kind.") == "<|system|>Be kind.<end><|user|>"
    assert user_turn_ends(tokenizer) == {tokenizer.convert_tokens_to_ids("<end>")}


def test_targets_without_a_chat_template_cannot_write_prompts(tmp_path):
    save_tiny(tmp_path / "target", chat_template=None)
    options = DataOptions(str(tmp_path / "target"), tmp_path / "data", dtype="float32")
    with pytest.raises(ValueError, match=r"no chat template.*--prompts"):
        make_data(options, QUIET)


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def test_templates_without_system_messages_get_none():
    tokenizer = trained_tokenizer(NO_SYSTEM + TEMPLATE)
    assert open_turn(tokenizer, "Be kind.") == open_turn(tokenizer, "") == "<|user|>"
    with pytest.raises(ValueError, match=r"refuses a user's message: never"):
        open_turn(trained_tokenizer("{{ raise_exception('never') }}"), "")


def test_templates_that_hide_the_user_are_refused():
    with pytest.raises(ValueError, match="does not show the user's message once"):
        open_turn(trained_tokenizer("{{ 'nothing' }}"), "")


def test_written_prompts_begin_as_told_and_repeat_with_the_seed():
    tokenizer = trained_tokenizer()
    model = tiny(vocab=len(tokenizer))
    writer = PromptWriter(model, tokenizer, [Theme("Talk.", ("Why do apples",))], frozenset(range(40, 320, 2)), 8)
    first = writer.write(30, "a", [])
    assert first and all(not is_junk(prompt) for prompt in first)
    assert any(prompt.startswith("Why do apples") for prompt in first)
    assert writer.write(30, "a", []) == first != writer.write(30, "b", [])
    passage = "The keeper wrote down what she saw. " + " ".join(f"On day {n} she saw ship {3 * n}." for n in range(20))
    about = writer.write(60, "a", [passage])
    assert any("The keeper wrote down" in prompt for prompt in about)


def test_long_passages_are_cut_behind_a_sentence():
    text = "One two three. " * 300
    assert len(shortened(text)) <= 1600 and shortened(text).endswith("three.")
    assert shortened(" short ") == "short"


JUNK = [
    "",
    "Hi",
    "a b " * 40,
    "word",
    "What \ufffd is this thing",
    "x" * 200 + " y",
    "1 2 3 4 5 6 7 8 9 10",
    "a b" * 4000,
]


@pytest.mark.parametrize("text", JUNK)
def test_junk(text):
    assert is_junk(text)


@pytest.mark.parametrize("text", ["What is a lighthouse?", "Summarize the following text:\n\nA man walked home alone."])
def test_prompts_are_no_junk(text):
    assert not is_junk(text)


def test_prompts_are_read_from_lines_of_several_kinds(tmp_path, capsys):
    lines = [
        {"prompt": "One?"},
        {"turns": ["Two?", "And then?"]},
        {"messages": [{"role": "user", "content": "Three?"}, {"role": "assistant", "content": "3"}]},
        {"messages": [{"role": "assistant", "content": "3"}]},
        {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "ShareGPT?"}]},
        {"prompt": " "},
        {"question": "Four?"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join([*map(json.dumps, lines), "{", "", json.dumps({"prompt": "Line\u2028end?"}, ensure_ascii=False)])
    )
    found = [chat[-1]["content"] for (chat,) in read_prompts(str(path))]
    assert found == ["One?", "Two?", "Three?", "ShareGPT?", "Line\u2028end?"]
    said = capsys.readouterr().err
    assert "4 broken lines are left out" in said and "line 4" in said and "and 1 more" in said
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(str(path))


def said(*messages):
    return [{"role": role, "content": content} for role, content in messages]


def test_turns_of_conversations(tmp_path, capsys):
    talk = said(("system", "S"), ("user", "1?"), ("assistant", "1"), ("user", "2?"), ("user", "3?"), ("assistant", "2"))
    tool = said(("user", "1?"), ("assistant", "call"), ("tool", "it"), ("user", "2?"))
    greeting = said(("assistant", "Hello!"), ("user", "1?"), ("assistant", "1"), ("system", "T"), ("user", "2?"))
    rows = [{"messages": talk}, {"turns": ["1?", "2?"]}, {"messages": tool}, {"messages": greeting}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_prompts(str(path)) == [[talk[:5]], [said(("user", "1?"))], [tool], [greeting]]
    assert not capsys.readouterr().err
    assert read_prompts(str(path), "all") == [
        [talk[:2], talk[3:5]],
        [said(("user", "1?")), said(("user", "2?"))],
        [greeting[:2], greeting[3:]],
    ]
    assert "line 3: turns of the role 'tool' cannot be asked in order; use --turns last" in capsys.readouterr().err


def test_data_sets_of_the_hub_need_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'pip install "hf_specdec\[data\]"'):
        read_prompts("hub:org/prompts")


def test_data_sets_of_the_hub_are_read_row_by_row(monkeypatch):
    rows = [{"prompt": "One?"}, {"messages": [{"role": "user", "content": "Two?"}]}]

    class Datasets:
        load_dataset = staticmethod(
            lambda name, split, streaming: rows if (name, split) == ("org/p", "train") else None
        )

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert [chat[-1]["content"] for (chat,) in read_prompts("hub:org/p")] == ["One?", "Two?"]
    with pytest.raises(ValueError, match="hub:org/none cannot be read"):
        read_prompts("hub:org/none")


def test_themes_are_read(tmp_path, capsys):
    path = tmp_path / "themes.jsonl"
    path.write_text('{"system": "S"}\n{"beginnings": ["a", "b"]}\n{"other": 1}\n{"system": 3}\n{"beginnings": "Why"}\n')
    assert read_themes(path) == (Theme("S"), Theme("", ("a", "b")))
    assert "3 broken lines" in capsys.readouterr().err
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no theme"):
        read_themes(path)
    assert len({theme.system for theme in THEMES}) > 8


def test_passages_are_read(tmp_path, capsys):
    path, long = tmp_path / "passages.jsonl", "Apples are red. " * 20
    path.write_text(f'{{"text": "{long}"}}\n{{"text": "short"}}\n{{"other": 1}}\n{{"text"\n')
    with path.open("a") as file:
        file.write(json.dumps({"text": " " * 400}) + "\n" + json.dumps({"text": "\ud800" * 400}) + "\n")
    assert read_passages(path) == [long]
    assert "5 broken lines" in capsys.readouterr().err
    path.write_text('{"text": "short"}\n')
    with pytest.raises(ValueError, match="holds no passages"):
        read_passages(path)


def test_half_of_the_written_prompts_are_about_the_users_passages():
    tokenizer = trained_tokenizer()
    passage = "The keeper wrote down what she saw. " + " ".join(f"On day {n} she saw ship {3 * n}." for n in range(20))
    ends = frozenset(range(40, 320, 2))
    model, theme = tiny(vocab=len(tokenizer)), Theme("Talk.", ("Why do apples",))
    writer = PromptWriter(model, tokenizer, [theme], ends, 8, [passage])
    prompts = writer.write(60, "a", ["Her own texts are not asked about. " * 20])
    assert sum("The keeper wrote down" in prompt for prompt in prompts) > 0.3 * len(prompts) > 0
    assert not any("Her own texts" in prompt for prompt in prompts)


HELD_OUT = "How many apples are left if three of the eight apples are eaten?"


def test_held_out_prompts_are_recognised(tmp_path):
    path = tmp_path / "questions.jsonl"
    turns = {"turns": ["Name a river.", HELD_OUT]}
    path.write_text(json.dumps(turns) + "\n" + json.dumps({"messages": [{"role": "user", "content": "Hm?"}]}) + "\n")
    held_out = HeldOut(path)
    for text in (HELD_OUT, "name A river", HELD_OUT.upper(), f"Question: {HELD_OUT} Thanks.", HELD_OUT[:55], "hm"):
        assert held_out.refuses(text), text
    for text in ("Name a river in France.", "How many pears are left?", "three of the eight"):
        assert not held_out.refuses(text), text
    assert len(held_out.refused) == 6
    assert not HeldOut(None).refuses(HELD_OUT)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        HeldOut(path)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": said(("user", HELD_OUT), ("assistant", "call"), ("tool", "5"), ("user", "So?"))},
        {"messages": said(("user", "So?"), ("assistant", "5"), ("user", HELD_OUT), ("assistant", "5"))},
        {"prompt": ["So?", HELD_OUT]},
    ],
    ids=["behind it a tool speaks", "the last of two", "a list of prompts"],
)
def test_everything_that_a_user_says_is_held_out(row, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert HeldOut(path).refuses(HELD_OUT) and HeldOut(path).refuses("so")


def test_a_line_without_a_bottom_is_a_broken_one(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text("[" * 100_000 + "\n" + json.dumps({"prompt": HELD_OUT}) + "\n")
    assert len(read_prompts(str(path))) == 1
    assert "line 1: it is nested too deeply" in capsys.readouterr().err


def test_files_of_other_systems_may_begin_with_a_mark(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": HELD_OUT}), encoding="utf-8-sig")
    assert read_prompts(str(path)) == [[said(("user", HELD_OUT))]] and not capsys.readouterr().err


@pytest.mark.parametrize("line", ["{}", "[1]", '{"prompt": "Who', '{"messages": ["Who?"]}', '{"turns": "Who?"}'])
def test_held_out_lines_that_cannot_be_read_are_refused(line, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"prompt": HELD_OUT}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"questions\.jsonl, line 2: .*mend the line or remove it"):
        HeldOut(path)


# --- the whole --------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """A target with a tokenizer, prompts and evaluation prompts."""
    save_tiny(tmp_path / "target")
    prompts = [f"Tell me a story about {n} lighthouses and the sea." for n in range(40)]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in [*prompts, prompts[0]])
    )
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"turns": [prompts[7]]}) + "\n")
    return tmp_path


def options_for(files: Path, **changes) -> DataOptions:
    told = {"output": files / "data", "prompts": str(files / "prompts.jsonl"), "held_out": files / "held-out.jsonl"}
    told |= {"tokens": 10_000, "batch_size": 8, "max_new_tokens": 12, "dtype": "float32"}
    return DataOptions(str(files / "target"), **(told | changes))


def made(options: DataOptions):
    record = make_data(options, QUIET)
    return record, read_examples(options.output)


def test_a_terminal_shows_that_a_round_is_being_made(files):
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=200, force_terminal=is_terminal)
        make_data(options_for(files, output=files / f"data-{is_terminal}", tokens=1), console)
        assert ("Shard 0: the target writes" in console.file.getvalue()) == is_terminal


def test_data_hold_the_answers_of_the_target(files, capsys):
    record, examples = made(options_for(files))
    assert len(examples) == 39 and record == read_record(files / "data")  # one twice, one held out
    assert "1 prompts occur in" in capsys.readouterr().err
    assert record["counts"]["examples"] == 39 and record["counts"]["by_source"] == {"file": 39}
    assert record["settings"]["held_out"] == "held-out.jsonl" and str(files) not in json.dumps(record)
    tokenizer = trained_tokenizer()
    model = tiny(vocab=len(tokenizer), dtype=torch.float32)
    texts = {tokenizer.decode(one.prompt) for one in examples}
    assert len(texts) == 39 and not any("about 7 lighthouses" in text for text in texts)
    assert all(text.startswith("<|user|>") and text.endswith("<|assistant|>") for text in texts)
    assert {one.temperature for one in examples} > {0.0} and {one.source for one in examples} == {"file"}
    ends = end_ids(model, tokenizer)
    for one in examples:
        assert one.finished == (one.answer[-1] in ends)
        if one.temperature == 0:
            assert list(one.answer) == greedy_by_the_host(model, list(one.prompt), ends, 12)


def test_growing_goes_on_where_it_was(files):
    whole = made(options_for(files, output=files / "whole"))[1]
    made(options_for(files, tokens=90))
    num_shards = len(shard_paths(files / "data"))
    assert 0 < num_shards < len(shard_paths(files / "whole"))
    assert made(options_for(files))[1] == whole


def test_every_turn_is_answered_by_the_target(files):
    """Whatever the file says an assistant said."""
    talks = [
        said(("user", f"Write a story about {n} apples."), ("assistant", "No."), ("user", "Then two."), ("user", "Hm?"))
        for n in range(12)
    ]
    (files / "prompts.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    long = {"turns": [f"Once more, {n} apples." for n in range(20)]}
    with (files / "prompts.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    settings = {"turns": "all", "held_out": None, "max_new_tokens": 24, "batch_size": 4}
    _, examples = made(options_for(files, **settings))
    tokenizer = trained_tokenizer()
    model = tiny(vocab=len(tokenizer), dtype=torch.float32)
    ends = end_ids(model, tokenizer)
    by_prompt = {one.prompt: one for one in examples}
    seconds = [one for one in examples if "Then two." in tokenizer.decode(one.prompt)]
    firsts = [one for one in examples if "a story about" in tokenizer.decode(one.prompt) and one not in seconds]
    assert len(firsts) == 12 and len(seconds) == sum(one.finished for one in firsts if usable(one, tokenizer)) > 0
    for one in seconds:
        text = tokenizer.decode(one.prompt)
        begin = text[: text.index("<|assistant|>") + len("<|assistant|>")]
        first = by_prompt[tuple(tokenizer(begin, add_special_tokens=False)["input_ids"])]
        answer = tokenizer.decode(first.answer, skip_special_tokens=True).strip()
        assert text == f"{begin}{answer}<end><|user|>Then two.<end><|user|>Hm?<end><|assistant|>"
        assert one.temperature == first.temperature
        assert first.conversation is None and one.conversation == conversation_name(first.prompt)
        if one.temperature == 0:
            assert list(one.answer) == greedy_by_the_host(model, list(one.prompt), ends, 24)
    assert all(len(one.prompt) <= longest_prompt(model, 24) for one in examples)
    made(options_for(files, output=files / "again", tokens=90, **settings))
    assert made(options_for(files, output=files / "again", **settings))[1] == examples


def usable(example, tokenizer):
    return tokenizer.decode(example.answer, skip_special_tokens=True).strip()


def test_prompts_that_cannot_be_asked_are_shown(files, capsys):
    """Too long ones, and those that the chat template refuses; held out is what any turn shares with that file."""
    save_tiny(files / "target", chat_template=NO_SYSTEM + TEMPLATE)
    rows = [
        {"prompt": "Tell me " + "again and again " * 200},
        {"messages": said(("system", "Be kind."), ("user", "Who are you then?"))},
        {"turns": ["Who are you?", "Tell me a story about 7 lighthouses and the sea."]},
        {"prompt": "Who is left, after all?"},
    ]
    (files / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, examples = made(options_for(files, turns="all"))
    assert len(examples) == 1
    shown = capsys.readouterr().err
    assert "2 unusable prompts are left out" in shown and "1 prompts occur in" in shown
    assert "prompts may have" in shown and "the chat template refuses it: no system" in shown


def test_a_shard_that_is_missing_is_no_reason_to_overwrite_another(files):
    made(options_for(files, tokens=250, batch_size=2))
    paths = shard_paths(files / "data")
    paths[0].unlink()
    kept = {path: path.read_bytes() for path in paths[1:]}
    made(options_for(files))
    assert len(kept) > 1 and all(path.read_bytes() == content for path, content in kept.items())


def test_what_is_held_out_too_late_is_refused(files):
    made(options_for(files, held_out=None))
    with pytest.raises(ValueError, match=r"already holds answers to 1 prompts that occur in .*held-out.jsonl"):
        made(options_for(files))


def test_where_nothing_can_be_asked_there_are_no_data(files, monkeypatch):
    with pytest.raises(ValueError, match="nothing to ask"):
        made(options_for(files, held_out=files / "prompts.jsonl"))
    monkeypatch.setattr(PromptWriter, "write", lambda self, count, seed, passages: [])
    with pytest.raises(ValueError, match="nothing to ask"):
        made(options_for(files, prompts=None))


def test_prompts_of_both_kinds_are_mixed(files, monkeypatch):
    def written(self, count, seed, passages):
        return [f"Prompt {seed} number {n}, please." for n in range(count)]

    monkeypatch.setattr(PromptWriter, "write", written)
    _, examples = made(options_for(files, self_written=0.75, tokens=400))
    counts = [sum(one.source == source for one in examples) for source in ("self", "file")]
    assert counts[0] == 3 * counts[1] > 0


def test_rounds_in_which_nothing_usable_is_written_ask_the_others(files, monkeypatch):
    asked = []

    def written(self, count, seed, passages):
        asked.append(count)
        return [] if seed.endswith(" 0") else [f"Prompt {seed} number {n}, please." for n in range(count)]

    monkeypatch.setattr(PromptWriter, "write", written)
    _, examples = made(options_for(files, self_written=0.1, tokens=200, batch_size=1))
    sources = [one.source for one in examples]
    assert sources[:4] == ["file"] * 4 and "self" in sources and set(asked) == {1}


def test_held_out_prompts_are_not_written_either(files, monkeypatch):
    texts = ["Tell me a story about 7 lighthouses and the sea.", "Tell me something else, please."]
    monkeypatch.setattr(PromptWriter, "write", lambda self, count, seed, passages: texts if seed.endswith(" 0") else [])
    _, examples = made(options_for(files, prompts=None))
    assert len(examples) == 1


def test_a_damaged_record_is_named(files):
    made(options_for(files, tokens=90))
    (files / "data" / "data.json").write_text("{}")
    with pytest.raises(ValueError, match=r"data\.json: A target's fingerprint has"):
        made(options_for(files))


def test_other_targets_and_tokenizers_do_not_share_a_folder(files):
    made(options_for(files, tokens=90))
    save_tiny(files / "other", seed=5)
    with pytest.raises(ValueError, match=r"not of this target: the weights are unrelated"):
        made(replace(options_for(files), target=str(files / "other")))
    tokenizer = trained_tokenizer()
    tokenizer.add_tokens("<new>")
    tokenizer.save_pretrained(files / "target")
    with pytest.raises(ValueError, match="the tokenizer is another one"):
        made(options_for(files))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"self_written": 1.5}, "self_written=1.5"),
        ({"prompts": None, "self_written": 0.5}, "needs --prompts"),
        ({"prompts": "p.jsonl", "passages": Path("t.jsonl")}, "passages steers prompts that the target writes itself"),
        ({"turns": "first"}, "turns='first' is unknown; use one of last, all"),
        ({"turns": "all"}, "turns='all' needs --prompts"),
    ],
)
def test_bad_options(changes, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        DataOptions(None, tmp_path, **changes)


def test_a_full_disk_leaves_whole_shards(files, monkeypatch):
    made(options_for(files, tokens=90))
    before = {path.name: path.read_bytes() for path in (files / "data").iterdir()}

    def full(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("hf_specdec.training.examples.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            made(options_for(files))
    assert {path.name: path.read_bytes() for path in (files / "data").iterdir()} == before


def test_a_killed_run_goes_on_to_the_same_data(files, capsys):
    """From the command line, killed as soon as there is something."""
    whole = made(options_for(files, output=files / "whole"))[1]
    command = [sys.executable, "-m", "hf_specdec.cli", "data", "--target", str(files / "target"), "--dtype", "float32"]
    command += ["--output", str(files / "data"), "--prompts", str(files / "prompts.jsonl"), "--tokens", "10000"]
    command += ["--held-out", str(files / "held-out.jsonl"), "--batch-size", "8", "--max-new-tokens", "12"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not shard_paths(files / "data") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert shard_paths(files / "data")
    assert main(command[3:]) == 0
    assert read_examples(files / "data") == whole
    assert f"hf-specdec train eagle3 --target {files / 'target'} --data {files / 'data'} " in capsys.readouterr().err


def test_models_without_an_end_are_refused():
    model, tokenizer = tiny(), trained_tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token_id"):
        end_ids(model, tokenizer)


def test_a_maker_knows_what_was_asked_before(files):
    made(options_for(files, tokens=90))
    maker = DataMaker(options_for(files), *load_target(str(files / "target"), "float32"))
    assert len(maker.given) == 39 - len(read_examples(files / "data"))
