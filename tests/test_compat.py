"""What `check` finds in constructed pairs, without a single weight, and what `generate` makes of it."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_specdec
from hf_specdec import Auto, DraftModel, Eagle, PromptLookup, check
from hf_specdec.checkpoints import load_head
from hf_specdec.checks.show import show
from hf_specdec.cli import main
from hf_specdec.provenance import Provenance, stamp
from hf_specdec.vocabulary import tokenizer_fingerprint
from tests import reference_heads as heads
from tests.hub_server import HubServer
from tests.models import jittered, prompts, tiny
from tests.test_bad_input import word_tokenizer
from tests.tokenizers_for_tests import TEMPLATE, save_tiny, trained_tokenizer

WITH_TOOLS = TEMPLATE.replace("{% for", "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}{% for", 1)
WITHOUT_THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}no thinking{% endif %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE


class Pair:
    """A target's and a drafter's folder; both hold the same tiny model and tokenizer until something is changed."""

    def __init__(self, base: Path, folder: Path):
        self.target, self.drafter = folder / "target", folder / "drafter"
        for place in (self.target, self.drafter):
            shutil.copytree(base, place)

    def settings(self, side: str, file: str = "config.json", **changes) -> None:
        path = getattr(self, side) / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def tokens(self, change) -> None:
        """Changes the model part of the drafter's tokenizer.json."""
        path = self.drafter / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content["model"])
        path.write_text(json.dumps(content))

    def added(self, token: str) -> None:
        """Adds a token to the drafter's tokenizer."""
        tokenizer = AutoTokenizer.from_pretrained(self.drafter)
        tokenizer.add_tokens([token])
        tokenizer.save_pretrained(self.drafter)

    def words(self) -> None:
        """Gives the drafter a tokenizer of whole words."""
        for path in self.drafter.glob("*token*"):
            path.unlink()
        tokenizer = word_tokenizer(12)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(self.drafter)

    def template(self, text: str | None) -> None:
        (self.drafter / "chat_template.jinja").unlink()
        if text is not None:
            (self.drafter / "chat_template.jinja").write_text(text)

    def model(self, side: str, model) -> None:
        """Another model, with the same tokenizer."""
        model.save_pretrained(getattr(self, side))

    def head(self, parts, **changes) -> None:
        """A head for a target of 8 layers and 64 ids, both without a tokenizer."""
        for place in (self.target, self.drafter):
            shutil.rmtree(place)
        tiny(num_hidden_layers=heads.DEPTH, dtype=torch.float32).save_pretrained(self.target)
        config, tensors = parts
        heads.write(self.drafter, config | changes, tensors)


def swap(model) -> None:
    vocabulary = model["vocab"]
    first, second = [token for token in sorted(vocabulary, key=vocabulary.get) if token.isalpha()][-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def drop_last(model) -> None:
    last = max(model["vocab"], key=model["vocab"].get)
    del model["vocab"][last]
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) != last]


def of_another_vocabulary():
    config, tensors = heads.eagle3()
    tensors["d2t"] = tensors["d2t"] + 100
    del tensors["t2d"]
    return config, tensors


def narrow():
    config, tensors = heads.eagle1()
    return config, {name: value[:24, :24] if value.ndim == 2 else value[:24] for name, value in tensors.items()}


def recorded_verifier(name):
    config, tensors = heads.speculators()
    config["speculators_config"] = dict(config.get("speculators_config") or {}, verifier={"name_or_path": name})
    return config, tensors


def recurrent():
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=16, num_hidden_layers=1, state_size=4, **ids))


def t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4))


def truncate(folder: Path) -> None:
    """Leaves of all weights only the headers."""
    for path in folder.glob("*.safetensors"):
        whole = path.read_bytes()
        path.write_bytes(whole[: 8 + int.from_bytes(whole[:8], "little")])


def a_head_on_t5(pair):
    pair.head(heads.eagle3())
    shutil.rmtree(pair.target)
    t5().save_pretrained(pair.target)


def a_truncated_head(pair):
    pair.head(heads.eagle3())
    truncate(pair.drafter)


def without_tokenizer(pair):
    for path in pair.drafter.glob("*token*"):
        path.unlink()


def saved_for_another_tokenizer(pair):
    target = AutoModelForCausalLM.from_pretrained(pair.target)
    other = trained_tokenizer()
    other.add_tokens("<other>")
    stamp(pair.drafter, Provenance.of("draft", target, "org/target", other))


# Name: what makes the pair, the one topic that is not "ok" (or the one to look at), its level, and what it says.
PAIRS = {
    "identical": (lambda pair: None, "vocabulary", "ok", "same ids to all 320 tokens"),
    "padded": (lambda p: p.model("drafter", tiny(vocab=384)), "vocabulary", "ok", "320 rows in the target, 384 in the"),
    "two tokens swapped": (
        lambda p: p.tokens(swap),
        "vocabulary", "warning", "both have 320 tokens, .* 2 tokens have .*; 320 of the drafter's tokens",
    ),
    "one token less": (
        lambda p: p.tokens(drop_last),
        "vocabulary", "warning", "320 and 319 tokens: 1 token has .*; 319 of the drafter's tokens",
    ),
    "an added token more": (
        lambda p: p.added("<think>"),
        "vocabulary", "ok", r"same ids to 320 tokens; only added tokens differ \(1, for example '<think>'\)",
    ),
    "tokens that do not say what they spell": (
        lambda p: p.words(), "vocabulary", "error", "320 and 12 tokens: .* do not say which bytes they spell"
    ),
    "two tokens swapped under a parallel model": (
        lambda p: (p.tokens(swap), p.settings("drafter", pard_token=7)),
        "vocabulary", "error", "2 tokens have other ids .* drafts ids of the target, and nothing else",
    ),
    "no tokenizer": (without_tokenizer, "vocabulary", "warning", "no tokenizer of the drafter was found"),
    "no tokenizer and other sizes": (
        lambda p: (without_tokenizer(p), p.model("drafter", tiny(vocab=384))),
        "vocabulary", "error", "the target scores 320 ids, the drafter 384",
    ),
    "other merges": (
        lambda p: p.tokens(lambda model: model.update(merges=[])), "encoding", "warning", "cut 'The quick brown fox"
    ),
    "EOS differs": (
        lambda p: p.settings("target", "generation_config.json", eos_token_id=[2, 5]),
        "special tokens", "warning", r"EOS is '<end>' \(2\), '<\|assistant\|>' \(5\) in the target, '<end>' \(2\) in",
    ),
    "BOS differs": (
        lambda p: p.settings("drafter", "generation_config.json", bos_token_id=3),
        "special tokens", "warning", r"BOS is '<start>' \(1\) in the target",
    ),
    "padding differs": (
        lambda p: p.settings("drafter", "generation_config.json", pad_token_id=2),
        "special tokens", "ok", "padding differs, which is masked",
    ),
    "template differs with tools": (
        lambda p: p.template(WITH_TOOLS), "chat template", "warning", "1 of 6 .*; tools: from token 0 on the target has"
    ),
    "thinking switch": (
        lambda p: p.template(WITHOUT_THINKING),
        "chat template", "warning", "1 of 6 .*; thinking switched off: from token .* has the end, the drafter 'no t",
    ),
    "no system message": (
        lambda p: p.template(NO_SYSTEM), "chat template", "warning", "a system message: the drafter's template refuses"
    ),
    "no template": (lambda p: p.template(None), "chat template", "warning", "has a chat template, the drafter none"),
    "shorter context": (
        lambda p: p.settings("drafter", max_position_embeddings=128),
        "context", "warning", "the drafter reads 128 tokens; 256 are wanted",
    ),
    "dynamic rope": (
        lambda p: p.settings("target", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "rope scaling", "warning", r"\(dynamic\) changes when a text grows past 256",
    ),
    "recurrent drafter": (
        lambda p: p.model("drafter", recurrent()), "cache", "error", "MambaForCausalLM keeps a recurrent state"
    ),
    "beam search": (
        lambda p: p.settings("target", "generation_config.json", num_beams=4), "settings", "error", "num_beams=4"
    ),
    "sampling settings": (
        lambda p: p.settings("target", "generation_config.json", do_sample=True, repetition_penalty=1.3),
        "settings", "ok", r"samples by default, with repetition_penalty=1.3, top_k=50 \(the host's default\)",
    ),
    "another tokenizer recorded": (
        lambda p: p.settings("drafter", tokenizer_fingerprint="abc" * 20),
        "trained for", "error", "made for the tokenizer abcabcabcabc",
    ),
    "saved for another tokenizer": (
        saved_for_another_tokenizer, "trained for", "error", "made for the tokenizer [0-9a-f]{12}"
    ),
    "another target recorded": (
        lambda p: p.settings("drafter", target_model_name_or_path="org/Other-7B"),
        "trained for", "warning", "trained for org/Other-7B, the target is",
    ),
    "a format that is not supported": (
        lambda p: p.settings("drafter", medusa_num_heads=3), "drafter", "error", "Medusa drafter .* not supported yet"
    ),
    "a head that fits": (
        lambda p: p.head(heads.eagle3()),
        "drafter", "ok", r"1 layer\(s\) reads taps 2, 4, 5 of width 32.* 4 heads \(2 of keys\).* 40 of 64 ids",
    ),
    "a head of another width": (lambda p: p.head(narrow()), "drafter", "error", "is 24 wide; the target's hidden"),
    "d2t of another vocabulary": (lambda p: p.head(of_another_vocabulary()), "drafter", "error", "d2t does not lead"),
    "taps of a deeper target": (
        lambda p: p.head(heads.speculators(), eagle_aux_hidden_state_layer_ids=[2, 20, 38]),
        "drafter", "error", r"hidden states \(2, 20, 38\) are to be read",
    ),
    "a head trained for another target": (
        lambda p: p.head(recorded_verifier("org/Big-8B")), "trained for", "warning", "trained for org/Big-8B"
    ),
    "a head trained for this target": (
        lambda p: p.head(recorded_verifier("org/target")), "trained for", "ok", "org/target"
    ),
    "a head for an encoder-decoder": (a_head_on_t5, "drafter", "error", ""),
    "a head whose file is cut short": (a_truncated_head, "drafter", "warning", "d2t and t2d could not be read"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return Path(save_tiny(tmp_path_factory.mktemp("base") / "model"))


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name, base, tmp_path):
    change, topic, level, message = PAIRS[name]
    pair = Pair(base, tmp_path)
    change(pair)
    report = check(str(pair.target), str(pair.drafter))
    looked_at = [finding for finding in report.findings if finding.topic == topic and finding.level == level]
    assert looked_at, report
    assert any(re.search(message, finding.found) for finding in looked_at), report
    assert report.level == level, report
    assert {finding.topic for finding in report.findings if finding.level != "ok"} <= {topic}, report
    for finding in report.errors + report.warnings:
        assert finding.correctness and finding.speed != "none" and finding.advice != "nothing"


@pytest.mark.parametrize(("settings", "name"), [({}, "DraftModel"), ({"pard_token": 7}, "ParallelDraft")])
def test_advice_names_the_class_that_takes_the_tokenizers(settings, name, base, tmp_path):
    pair = Pair(base, tmp_path)
    pair.settings("drafter", **settings)
    without_tokenizer(pair)
    found = check(str(pair.target), str(pair.drafter)).warnings[0]
    assert found.topic == "vocabulary" and f"{name}(model, tokenizer=..., target_tokenizer=...)" in found.advice


# --- without weights --------------------------------------------------------------------------------------


def test_no_weight_is_read(base, tmp_path, monkeypatch):
    pair = Pair(base, tmp_path)
    expected = check(str(pair.target), str(pair.drafter)).to_dict()
    for folder in (pair.target, pair.drafter):
        truncate(folder)
        assert (folder / "model.safetensors").stat().st_size < 5000

    def refuse(*_, **__):
        raise AssertionError("weights were read")

    for name in ("torch.load", "safetensors.torch.load_file", "safetensors.safe_open"):
        monkeypatch.setattr(name, refuse)
    assert check(str(pair.target), str(pair.drafter)).to_dict() == expected


def test_the_bill_is_that_of_the_models(base, tmp_path):
    pair = Pair(base, tmp_path)
    pair.model("target", tiny("mistral8", vocab=320, dtype=torch.float32, num_hidden_layers=3))
    bill = check(str(pair.target), str(pair.drafter), context=100, batch=4).bill
    target, drafter = (AutoModelForCausalLM.from_pretrained(folder) for folder in (pair.target, pair.drafter))
    for model, weights, cache, slots in (
        (target, bill.target_weights, bill.target_cache, 8),
        (drafter, bill.drafter_weights, bill.drafter_cache, 100),
    ):
        assert weights == sum(weight.nbytes for weight in model.parameters())
        past = model(torch.ones(4, 5, dtype=torch.long)).past_key_values
        per_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers) // (4 * 5)
        assert cache == per_token * slots * 4
    assert bill.target_cache_per_token == per_token * 3 // 2
    assert bill.extra == bill.drafter_weights + bill.drafter_cache
    assert bill.left == bill.memory - bill.target_weights - bill.target_cache - bill.extra


def test_the_cache_of_a_head_and_of_copies(base, tmp_path):
    pair = Pair(base, tmp_path)
    pair.head(heads.eagle3())
    bill = check(str(pair.target), str(pair.drafter), context=10).bill
    assert bill.drafter_cache == 2 * heads.KV * heads.DIM * 4 * 10  # in the target's float32
    values = sum(tensor.numel() for tensor in heads.eagle3()[1].values())
    assert bill.drafter_weights == pytest.approx(4 * values, rel=0.02)  # maps of ids are wider or narrower
    assert check(str(pair.target), "auto").bill.extra == 0


def test_remote_code_does_not_run_unless_it_is_trusted(base, tmp_path):
    pair = Pair(base, tmp_path)
    (pair.drafter / "strange.py").write_text(f"open({str(tmp_path / 'has-run')!r}, 'w')\nraise KeyError('ran')")
    names = {"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.Model"}
    pair.settings("drafter", auto_map=names, model_type="strange", architectures=["StrangeForCausalLM"])
    with pytest.raises(ValueError, match="trust_remote_code"):
        check(str(pair.target), str(pair.drafter))
    assert not (tmp_path / "has-run").exists()
    with pytest.raises(ValueError, match="ran"):
        check(str(pair.target), str(pair.drafter), trust_remote_code=True)
    assert (tmp_path / "has-run").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda place: shutil.rmtree(place), "is neither a folder nor a Hub id"),
        (lambda place: (place / "config.json").unlink(), "has no config.json"),
        (lambda place: (place / "config.json").write_text("{"), "is not JSON"),
        (lambda place: (place / "generation_config.json").write_text("{"), "generation_config.json"),
        (lambda place: (place / "model.safetensors").write_bytes(b"abc"), "model.safetensors is damaged"),
        (lambda place: (place / "config.json").write_text('{"architectures": ["XForCausalLM"]}'), "language model"),
    ],
)
@pytest.mark.parametrize("side", ["target", "drafter"])
def test_what_cannot_be_opened_is_said(side, spoil, message, base, tmp_path):
    pair = Pair(base, tmp_path)
    spoil(getattr(pair, side))
    if side == "drafter" and "damaged" in message:
        assert check(str(pair.target), str(pair.drafter)).errors  # it may be a kind of drafter that is not known
    else:
        with pytest.raises(ValueError, match=message):
            check(str(pair.target), str(pair.drafter))


@pytest.mark.parametrize(
    "settings", [{"target_model": ["x"]}, {"speculators_config": {"verifier": 5}}, {"tokenizer_fingerprint": 5}]
)
def test_records_of_an_unknown_kind_say_nothing(settings, base, tmp_path):
    pair = Pair(base, tmp_path)
    pair.settings("drafter", **settings)
    assert not check(str(pair.target), str(pair.drafter)).errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 5}, "target must be a folder"),
        ({"drafter": 5}, "drafter must be a name"),
        ({"drafter": "no-such-strategy"}, "no-such-strategy"),
        ({"context": 0}, "context=0"),
        ({"batch": 1.5}, "batch=1.5"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, base):
    given = {"target": str(base), "drafter": "auto"} | arguments
    with pytest.raises(ValueError, match=message):
        check(given.pop("target"), given.pop("drafter"), **given)


# --- what is loaded ---------------------------------------------------------------------------------------


def test_models_and_drafters_in_memory_are_checked_as_folders_are(base, tmp_path):
    target, drafter = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    by_folder = check(str(base), str(base))
    for given in (drafter, DraftModel(drafter), Auto([drafter])):
        report = check(target, given)
        assert [str(finding) for finding in report.findings][:-1] == [str(f) for f in by_folder.findings][:-1]
        assert "they sit on cpu" in report.findings[-1].found
        assert report.bill.extra == pytest.approx(by_folder.bill.extra, abs=100)  # rotary frequencies are in no file
    assert check(target, Auto([PromptLookup(), drafter])).drafter == f"prompt-lookup + {base}"
    tokenizer = AutoTokenizer.from_pretrained(base)
    nameless = tiny(vocab=320)
    assert "no tokenizer of the target and drafter" in check(nameless, tiny(vocab=320)).warnings[0].found
    assert check(nameless, tiny(vocab=320), tokenizer=tokenizer, drafter_tokenizer=tokenizer).level == "ok"


def test_a_head_in_memory(tmp_path):
    target = tiny(num_hidden_layers=heads.DEPTH)
    drafter = Eagle(load_head(heads.write(tmp_path, *heads.eagle3()), target))
    report = check(target, drafter)
    assert report.level == "ok" and "taps 2, 4, 5" in str(report)
    other = tiny(num_hidden_layers=heads.DEPTH, hidden_size=48)
    assert "wide" in check(other, drafter).errors[0].found


def test_weights_in_a_wider_dtype_are_pointed_out(base):
    target, drafter = (AutoModelForCausalLM.from_pretrained(base, dtype=dtype) for dtype in ("bfloat16", "float32"))
    finding = check(target, drafter).warnings[0]
    assert finding.topic == "dtype" and "dtype=torch.bfloat16" in finding.advice and "ties" in finding.correctness


# --- generate ---------------------------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog, monkeypatch):
    """What generate warns of, once a message."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    logger = hf_specdec.generation.logger
    said: list[str] = []
    monkeypatch.setattr(logger, "warning_once", lambda text: said.append(text))
    return said


def test_generate_warns_once_of_a_new_pair(warnings, monkeypatch):
    target = hf_specdec.enable(tiny())
    drafter = DraftModel(tiny(seed=1, max_position_embeddings=64))
    for _ in range(3):
        target.generate(prompts(1)[0], assistant=drafter, max_new_tokens=5)
    assert len(warnings) == 1 and "the drafter reads 64 tokens; 256 are wanted" in warnings[0]
    assert "For speed: beyond 64 tokens nothing is drafted" in warnings[0]
    other = hf_specdec.enable(tiny(seed=2))
    other.generate(prompts(1)[0], assistant=drafter, max_new_tokens=5)
    assert len(warnings) == 2


def test_later_calls_are_not_checked_again(monkeypatch):
    target, drafter = hf_specdec.enable(tiny()), DraftModel(tiny(seed=1))
    calls = []
    monkeypatch.setattr("hf_specdec.checks.pair._at_first_sight", lambda *given: calls.append(given) or [])
    for _ in range(3):
        target.generate(prompts(1)[0], assistant=drafter, max_new_tokens=3)
        target.generate(prompts(1)[0], assistant=drafter.model, max_new_tokens=3)
        target.generate(prompts(1)[0], assistant=False, custom_generate=hf_specdec.speculate(drafter), max_new_tokens=3)
    assert len(calls) == 1
    tokenizer = trained_tokenizer()
    named = {"tokenizer": tokenizer, "assistant_tokenizer": tokenizer}
    for _ in range(3):  # with a tokenizer there is more to see
        target.generate(prompts(1)[0], assistant=drafter.model, max_new_tokens=3, **named)
        target.generate(prompts(1)[0], assistant=drafter, max_new_tokens=3, **named)
    assert len(calls) == 2


def test_a_good_pair_is_not_warned_of(warnings):
    target = hf_specdec.enable(tiny())
    target.generate(prompts(1)[0], assistant=jittered(target), max_new_tokens=5)
    target.generate(prompts(1)[0], assistant="auto", max_new_tokens=5)
    assert not warnings


def test_tokenizers_known_to_generate_are_compared(warnings):
    ours, theirs = trained_tokenizer(), trained_tokenizer(WITHOUT_THINKING)
    target = hf_specdec.enable(tiny(vocab=320))
    drafter = DraftModel(tiny(seed=1, vocab=320), tokenizer=theirs, target_tokenizer=ours)
    target.generate(prompts(1)[0], assistant=drafter, max_new_tokens=5)
    assert len(warnings) == 1 and "thinking switched off" in warnings[0]


def test_generate_refuses_a_drafter_made_for_another_tokenizer():
    tokenizer = trained_tokenizer()
    target, drafter = hf_specdec.enable(tiny(vocab=320)), tiny(seed=1, vocab=320)
    assistant = DraftModel(drafter, tokenizer=tokenizer, target_tokenizer=tokenizer)
    drafter.config.tokenizer_fingerprint = "0" * 64
    for _ in range(2):
        with pytest.raises(ValueError, match="made for the tokenizer 000000000000"):
            target.generate(prompts(1)[0], assistant=assistant, max_new_tokens=5)
    drafter.config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
    target.generate(prompts(1)[0], assistant=assistant, max_new_tokens=5)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("hf_specdec.checks.measure._NEW_TOKENS", 13)


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_prints_tables(base, tmp_path, capsys):
    pair = Pair(base, tmp_path)
    pair.template(WITH_TOOLS)
    assert main(["check", str(pair.target), str(pair.drafter), "--context", "100", "--batch", "2"]) == 0
    shown = capsys.readouterr().out
    for expected in ("tools: from token 0", "to do: use a drafter trained", "memory at 100 tokens, batch 2"):
        assert expected in shown
    assert shown.rstrip().endswith("The drafter can be used, with reservations. 0 error(s), 1 warning(s).")


def test_the_command_prints_one_json_document(base, tmp_path, capsys):
    pair = Pair(base, tmp_path)
    pair.words()
    assert main(["check", str(pair.target), str(pair.drafter), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    report = check(str(pair.target), str(pair.drafter))
    assert document == report.to_dict() and document["level"] == "error"
    assert main(["check", str(pair.target), str(pair.drafter)]) == 1
    assert "The drafter does not fit." in capsys.readouterr().out


def test_the_command_measures(base, capsys, short):
    arguments = ["--measure", "--json", "--dtype", "float32", "--device", "cpu", "--batch", "2"]
    assert main(["check", str(base), str(base), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["measurement"]
    assert found["acceptance"][:3] == [1, 1, 1]  # a drafter equal to its target
    assert set(found["verify_seconds"]) == {"2", "3", "5", "9"} and found["draft_seconds"] > 0
    assert found["verdict"].startswith("It will") and found["batch"] == 2


@pytest.mark.parametrize("kind", ["prompt-lookup", "head", "padded", "other ids"])
def test_other_drafters_are_measured_too(kind, base, tmp_path, short):
    pair = Pair(base, tmp_path)
    if kind == "head":
        pair.head(heads.eagle3())
    if kind == "padded":
        pair.model("drafter", tiny(vocab=384))
    if kind == "other ids":
        pair.tokens(swap)
    drafter = kind if kind == "prompt-lookup" else str(pair.drafter)
    report = check(str(pair.target), drafter, measure=True, dtype="float32", device="cpu")
    assert report.measurement.plain_seconds > 0 and len(report.measurement.round_seconds) == 4
    console = Console(file=io.StringIO(), width=120)
    show(report, console)
    assert report.measurement.verdict in " ".join(console.file.getvalue().split())


def test_a_pair_with_errors_is_not_measured(base, tmp_path):
    pair = Pair(base, tmp_path)
    pair.words()
    assert check(str(pair.target), str(pair.drafter), measure=True).measurement is None


# --- the Hub ----------------------------------------------------------------------------------------------


def test_hub_ids_are_checked_without_fetching_weights(base, tmp_path):
    pair = Pair(base, tmp_path)
    pair.settings("drafter", max_position_embeddings=128)
    with HubServer() as hub:
        for name in ("target", "drafter"):
            hub.add(f"org/{name}", tmp_path / name)
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        command = [sys.executable, "-m", "hf_specdec.cli", "check", "org/target", "org/drafter", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    expected = check(str(pair.target), str(pair.drafter)).to_dict()
    assert document["level"] == "warning" and document["findings"] == expected["findings"]
    assert document["bill"]["drafter_weights"] == expected["bill"]["drafter_weights"]
    assert hub.served["model.safetensors"] < 10_000 < (pair.target / "model.safetensors").stat().st_size
