"""Drafters survive being saved, published, fetched and exported; what does not fit or is damaged is refused by name."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import hf_specdec
from hf_specdec import DraftModel, Eagle, ParallelDraft, PromptLookup, Suffix, load_drafter
from hf_specdec.checkpoints import load_head, recognise
from hf_specdec.checkpoints.files import snapshot
from hf_specdec.checkpoints.write import write_head
from hf_specdec.cli import main
from hf_specdec.fingerprints import TargetFingerprint
from hf_specdec.heads import EagleHead, LayerConfig
from hf_specdec.loading import load_model
from hf_specdec.provenance import KEY, Provenance
from hf_specdec.publishing import FORMATS, export, push, write_card
from hf_specdec.publishing.card import MARK
from hf_specdec.training.recipes.heads import head_config, initialise
from hf_specdec.vocabulary import tokenizer_fingerprint
from tests.hub_server import HubServer
from tests.models import tiny
from tests.tokenizers_for_tests import trained_tokenizer

DEPTH, DRAFT_VOCAB = 8, 40


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer()


@pytest.fixture(scope="module")
def target(tokenizer):
    return tiny(vocab=len(tokenizer), num_hidden_layers=DEPTH, dtype=torch.float32)


def a_head(target, num_layers: int = 1, full: bool = False, **changes) -> EagleHead:
    """A head with first weights, bound to its target."""
    vocab = target.config.vocab_size
    count = vocab if full else DRAFT_VOCAB
    head = EagleHead(replace(head_config(target, count, num_layers), **changes))
    ids = torch.arange(vocab)[:: vocab // count][:count] if not full else torch.arange(vocab)
    initialise(head, target, ids)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name == "mask_hidden":
                weight.normal_()
    return head.to(target.dtype).bind(target).eval()


@pytest.fixture(scope="module")
def eagle(target):
    return Eagle(a_head(target))


@pytest.fixture(scope="module")
def parallel(target):
    return ParallelDraft(a_head(target, num_layers=2, mask_token_id=5))


def logits_of(head, target, seed: int = 0):
    """What a head says about random states and tokens."""
    generator = torch.Generator().manual_seed(seed)
    config = head.config
    features = torch.randn(1, 5, config.num_taps * config.target_hidden_size, generator=generator).to(head.dtype)
    tokens = torch.randint(config.vocab_size, (1, 5), generator=generator)
    with torch.no_grad():
        states = head(tokens, head.combine(features), torch.arange(5)[None], None, None)
        return head.logits(states)


def head_of(drafter):
    return drafter.head if isinstance(drafter, Eagle) else drafter.model


# --- saving and opening -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["eagle", "parallel"])
def test_heads_come_back_as_they_were(which, request, target, tokenizer, tmp_path):
    drafter = request.getfixturevalue(which)
    folder = drafter.save_pretrained(
        tmp_path / "d", target, tokenizer=tokenizer, recipe={"depth": 7}, name="org/target"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    found = load_drafter(str(folder), target)
    assert type(found) is type(drafter) and head_of(found).config == head_of(drafter).config
    for name, value in head_of(drafter).state_dict().items():
        assert torch.equal(head_of(found).state_dict()[name], value), name
    assert torch.equal(logits_of(head_of(found), target), logits_of(head_of(drafter), target))


def test_what_is_shared_with_the_target_is_not_written(eagle, target, tmp_path):
    folder = eagle.save_pretrained(tmp_path / "d", target)
    names = set(load_file(folder / "model.safetensors"))
    assert "lm_head.weight" not in names and "embed_tokens.weight" not in names and {"d2t", "t2d"} <= names


def test_the_record_says_where_weights_come_from(eagle, target, tokenizer, tmp_path):
    facts = {"tokenizer": tokenizer, "recipe": {"depth": 3}, "data": {"counts": {}}, "name": "org/target"}
    folder = eagle.save_pretrained(tmp_path / "d", target, **facts)
    found = Provenance.read(json.loads((folder / "config.json").read_text()), str(folder))
    assert found.kind == "eagle3" and found.target == "org/target" and found.recipe == {"depth": 3}
    assert found.target_fingerprint == TargetFingerprint.of(target)
    assert found.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    assert (
        found.versions["torch"] == torch.__version__.partition("+")[0] or found.versions["torch"] == torch.__version__
    )


def test_models_come_back_as_they_were(target, tokenizer, tmp_path):
    student = tiny(vocab=len(tokenizer), seed=3, dtype=torch.float32)
    pard = ParallelDraft(student, mask_token_id=5, tokenizer=tokenizer)
    found = load_drafter(str(pard.save_pretrained(tmp_path / "pard", target)), target)
    assert isinstance(found, ParallelDraft) and found.mask_token_id == 5
    plain = load_drafter(str(DraftModel(student).save_pretrained(tmp_path / "draft", target)), target)
    assert isinstance(plain, DraftModel)
    for model in (found.model, plain.model):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), student.parameters(), strict=True))
    kinds = [json.loads((tmp_path / name / "config.json").read_text())[KEY]["kind"] for name in ("pard", "draft")]
    assert kinds == ["pard", "draft"]


def test_from_pretrained_opens_its_own_kind_only(eagle, target, tmp_path):
    folder = eagle.save_pretrained(tmp_path / "d", target)
    assert isinstance(Eagle.from_pretrained(folder, target), Eagle)
    with pytest.raises(ValueError, match=r"holds Eagle, not ParallelDraft"):
        ParallelDraft.from_pretrained(folder, target)


@pytest.mark.parametrize("drafter", [PromptLookup(), Suffix(), 3], ids=["lookup", "suffix", "no drafter"])
def test_drafters_without_weights_are_not_saved(drafter, target, tmp_path):
    with pytest.raises(ValueError, match="no weights to save"):
        hf_specdec.save_pretrained(drafter, tmp_path / "d", target)
    assert not (tmp_path / "d").exists()


def test_a_head_that_the_format_cannot_hold_is_not_saved(target, tmp_path):
    head = a_head(target, final_norm=False)
    with pytest.raises(ValueError, match=r"cannot be saved.*norm\.weight"):
        Eagle(head).save_pretrained(tmp_path / "d", target)
    assert not (tmp_path / "d").exists()


def test_a_failed_save_leaves_what_was_there(eagle, target, tmp_path, monkeypatch):
    folder = eagle.save_pretrained(tmp_path / "d", target)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")  # as the library says it

    monkeypatch.setattr("hf_specdec.checkpoints.write.save_file", full)
    with pytest.raises(OSError, match=r"could not be written: .* No space left"):
        eagle.save_pretrained(folder, target)
    with pytest.raises(OSError, match=r"could not be written: .* No space left"):
        export(str(folder), tmp_path / "out", "sglang", target)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_weights_of_before_are_not_taken_for_the_new_ones(target, tokenizer, tmp_path, monkeypatch):
    """Weights in several files have other names than those in one, which is looked for first."""
    before, after = (tiny(vocab=len(tokenizer), seed=seed, dtype=torch.float32) for seed in (3, 4))
    folder = DraftModel(before).save_pretrained(tmp_path / "d", target)
    for name in ("notes.txt", "pytorch_model.bin"):  # pickles are opened where there is nothing else
        (folder / name).write_text("mine")
    plain = type(after).save_pretrained
    monkeypatch.setattr(type(after), "save_pretrained", lambda *args: plain(*args, max_shard_size="20KB"))
    DraftModel(after).save_pretrained(folder, target)
    found = load_drafter(str(folder), target).model
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), after.parameters(), strict=True))
    parts = {path.name for path in folder.glob("model*")}
    assert "model.safetensors.index.json" in parts and len(parts) > 2
    monkeypatch.undo()
    DraftModel(before).save_pretrained(folder, target)
    assert {path.name for path in folder.glob("model*")} == {"model.safetensors"}
    assert (folder / "notes.txt").read_text() == (folder / "pytorch_model.bin").read_text() == "mine"


def test_a_file_is_no_folder_to_save_into(eagle, target, tmp_path):
    (tmp_path / "d").write_text("mine")
    with pytest.raises(ValueError, match="d is a file; name a folder"):
        eagle.save_pretrained(tmp_path / "d", target)
    assert (tmp_path / "d").read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["d"]


# --- the target at hand -----------------------------------------------------------------------------------


def test_fingerprints_do_not_depend_on_the_dtype(target, tokenizer):
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = tiny(vocab=len(tokenizer), num_hidden_layers=DEPTH, dtype=torch.float32).to(dtype)
        assert TargetFingerprint.of(model) == TargetFingerprint.of(target)


def test_fingerprints_do_not_depend_on_the_default_dtype():
    """In bfloat16 the last of 49151 rows would be row 49152."""
    model = tiny(vocab=49151, hidden_size=16, num_hidden_layers=1, dtype=torch.float32)
    own = TargetFingerprint.of(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert TargetFingerprint.of(model) == own
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("signs", ["zz", 5, None])
def test_a_damaged_fingerprint_is_named(signs, eagle, target, tmp_path):
    path = eagle.save_pretrained(tmp_path / "d", target) / "config.json"
    config = json.loads(path.read_text())
    config[KEY]["target_fingerprint"]["signs"] = signs
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: the block 'hf_specdec' is damaged.*hexadecimal"):
        load_drafter(str(path.parent), target)


def test_fingerprints_do_not_depend_on_the_default_device(target):
    with torch.device("meta"):
        found = TargetFingerprint.of(target)
    assert found == TargetFingerprint.of(target)


def test_weights_that_lie_elsewhere_are_not_compared(target, tokenizer):
    own = TargetFingerprint.of(target)
    with torch.device("meta"):
        empty = TargetFingerprint.of(type(target)(target.config))
    assert empty.signs == "" and own.difference(empty) is None and own.agreement(empty) == 1


def test_changed_copies_are_told_from_strangers(target, tokenizer):
    own = TargetFingerprint.of(target)
    tuned = tiny(vocab=len(tokenizer), num_hidden_layers=DEPTH, dtype=torch.float32)
    with torch.no_grad():
        table = tuned.get_input_embeddings().weight
        table += 0.02 * torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
    found = TargetFingerprint.of(tuned)
    assert 0.9 < own.agreement(found) < 1 and own.difference(found) is None
    stranger = TargetFingerprint.of(tiny(seed=9, vocab=len(tokenizer), num_hidden_layers=DEPTH))
    # Of 512 coin flips 75 % agree less than once in 10^29.
    assert own.agreement(stranger) < 0.65 and own.difference(stranger) == "the weights are unrelated"


def test_a_drafter_of_another_target_is_refused(eagle, target, tokenizer, tmp_path):
    folder = str(eagle.save_pretrained(tmp_path / "d", target, name="org/target"))
    stranger = tiny(seed=9, vocab=len(tokenizer), num_hidden_layers=DEPTH, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"made for org/target.*weights are unrelated.*hf-specdec train"):
        load_drafter(folder, stranger)
    deeper = tiny(vocab=len(tokenizer), num_hidden_layers=DEPTH + 1, dtype=torch.float32)
    with pytest.raises(ValueError, match="num_layers is 8 there and 9 here"):
        load_drafter(folder, deeper)
    with pytest.raises(ValueError, match="vocabulary_size"):
        load_drafter(folder, tiny(vocab=64, num_hidden_layers=DEPTH, dtype=torch.float32))


def test_a_changed_copy_is_served_and_said_so(eagle, target, tokenizer, tmp_path, monkeypatch):
    folder = str(eagle.save_pretrained(tmp_path / "d", target))
    said = []
    monkeypatch.setattr("hf_specdec.provenance.logger.warning_once", said.append)
    load_drafter(folder, target)
    assert not said
    tuned = tiny(vocab=len(tokenizer), num_hidden_layers=DEPTH, dtype=torch.float32)
    with torch.no_grad():
        tuned.get_input_embeddings().weight[-1] *= -1
    assert isinstance(load_drafter(folder, tuned), Eagle)
    assert len(said) == 1 and "changed copy" in said[0]


def test_the_check_reads_the_record(eagle, target, tokenizer, tmp_path):
    folder = str(eagle.save_pretrained(tmp_path / "d", target, tokenizer=tokenizer, name="org/target"))
    stranger = tiny(seed=9, vocab=len(tokenizer), num_hidden_layers=DEPTH + 1, dtype=torch.float32)
    for model, place, level in ((target, "target", "ok"), (stranger, "other", "error")):
        model.save_pretrained(tmp_path / place)
        tokenizer.save_pretrained(tmp_path / place)
        findings = hf_specdec.check(str(tmp_path / place), folder).findings
        found = next(finding for finding in findings if finding.topic == "trained for")
        assert found.level == level and "org/target" in found.found
    stranger = tiny(seed=9, vocab=len(tokenizer), num_hidden_layers=DEPTH, dtype=torch.float32)
    stranger.save_pretrained(tmp_path / "other")  # of the same shapes: only weights tell, and none are read
    found = [f for f in hf_specdec.check(str(tmp_path / "other"), folder).findings if f.topic == "trained for"]
    assert found[0].level == "warning" and "generate() refuses" in found[0].speed
    other = trained_tokenizer()
    other.add_tokens("<other>")
    other.save_pretrained(tmp_path / "target")
    findings = hf_specdec.check(str(tmp_path / "target"), folder).findings
    assert any(finding.level == "error" and "made for the tokenizer" in finding.found for finding in findings)


def test_a_damaged_record_is_refused(eagle, target, tmp_path):
    folder = eagle.save_pretrained(tmp_path / "d", target)
    config = json.loads((folder / "config.json").read_text())
    for block in ({"kind": "eagle3"}, {**config[KEY], "surprise": 1}, 3):
        (folder / "config.json").write_text(json.dumps(config | {KEY: block}))
        with pytest.raises(ValueError, match="'hf_specdec' is damaged"):
            load_drafter(str(folder), target)


# --- the Hub ----------------------------------------------------------------------------------------------


def test_push_and_open_by_id(eagle, target, hub):
    url = eagle.push_to_hub("org/head", target, license="apache-2.0", name="org/target")
    repository = hub.repositories["org/head"]
    files = repository.commits[repository.branches["main"]]
    assert url.endswith(repository.branches["main"]) and set(files) == {"config.json", "model.safetensors", "README.md"}
    found = load_drafter("org/head", target)
    assert torch.equal(logits_of(found.head, target), logits_of(eagle.head, target))
    assert "apache-2.0" in files["README.md"].decode()


def test_published_drafters_draft(eagle, target, hub):
    eagle.push_to_hub("org/head", target)
    hf_specdec.enable(target)
    try:
        prompt = torch.arange(3, 12)[None]
        plain = target.generate(prompt, max_new_tokens=12, assistant=False)
        assert torch.equal(target.generate(prompt, max_new_tokens=12, assistant="org/head"), plain)
        assert hf_specdec.last_stats(target).drafted > 0
    finally:
        hf_specdec.disable(target)


def test_revisions(eagle, target, hub, tmp_path):
    eagle.push_to_hub("org/head", target)
    first = hub.repositories["org/head"].branches["main"]
    other = Eagle(a_head(target))
    with torch.no_grad():
        other.head.norm.weight += 1
    other.push_to_hub("org/head", target, revision="next")
    for location, revision, drafter in (
        ("org/head", None, eagle),
        ("org/head", "next", other),
        ("org/head@next", None, other),
        (f"org/head@{first}", None, eagle),
    ):
        found = load_drafter(location, target, revision=revision)
        assert torch.equal(found.head.norm.weight, drafter.head.norm.weight), location
    with pytest.raises(ValueError, match="'none'"):
        load_drafter("org/head@none", target)
    with pytest.raises(ValueError, match="different revisions"):
        load_drafter("org/head@next", target, revision="main")
    with pytest.raises(ValueError, match="is a folder, which has no revisions"):
        load_drafter(str(tmp_path), target, revision="main")


def test_a_revision_brings_its_tokenizer_along(eagle, target, hub, tmp_path):
    """In one file or in parts, as slow tokenizers are written."""
    folder = eagle.save_pretrained(tmp_path / "d", target)
    names = {"tokenizer.model", "vocab.txt", "merges.txt", "chat_template.jinja"}
    for name in names:
        (folder / name).write_text("x")
    hub.add("org/head", folder)
    assert names <= {path.name for path in Path(snapshot("org/head", "main")).iterdir()}


def test_private_repositories_want_a_token(eagle, target, hub, monkeypatch):
    eagle.push_to_hub("org/secret", target, private=True)
    assert hub.repositories["org/secret"].private
    assert isinstance(load_drafter("org/secret", target), Eagle)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "w" * 34)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", huggingface_hub.constants.HF_HUB_CACHE + "2")
    with pytest.raises(ValueError, match="org/secret could not be opened"):
        load_drafter("org/secret", target)
    with pytest.raises(ValueError, match=r"(?s)could not be published.*hf auth login"):
        eagle.push_to_hub("org/secret", target)


def test_an_interrupted_upload_changes_nothing(eagle, target, hub):
    eagle.push_to_hub("org/head", target)
    repository = hub.repositories["org/head"]
    before = dict(repository.branches)
    hub.cut_uploads = 99
    with pytest.raises(ValueError, match="could not be published"):
        eagle.push_to_hub("org/head", target, license="mit")
    assert repository.branches == before
    hub.cut_uploads = 0
    eagle.push_to_hub("org/head", target, license="mit")
    assert repository.branches != before


def test_an_interrupted_download_is_no_drafter_and_can_be_repeated(eagle, target, hub):
    eagle.push_to_hub("org/head", target)
    hub.cut_downloads = 1
    try:
        found = load_drafter("org/head", target)
    except ValueError:  # a client that does not go on by itself
        found = load_drafter("org/head", target)
    assert hub.cut_downloads == 0
    assert torch.equal(logits_of(found.head, target), logits_of(eagle.head, target))


class _Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("damage", ["truncated", "flipped header", "pickle that runs", "pickle that unpacks"])
def test_damaged_and_malicious_files_are_refused(damage, eagle, target, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = eagle.save_pretrained(tmp_path / "d", target)
    weights = folder / "model.safetensors"
    body = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(body[: len(body) // 2])
    elif damage == "flipped header":
        weights.write_bytes(body[:20] + bytes(byte ^ 0xFF for byte in body[20:40]) + body[40:])
    else:
        tensors = load_file(weights)
        weights.unlink()
        path = folder / "pytorch_model.bin"
        if damage == "pickle that runs":
            path.write_bytes(pickle.dumps(tensors | {"evil": _Evil()}))
        else:
            torch.save(tensors | {"zeros": torch.zeros(1 << 20)}, tmp_path / "plain.bin")
            with (
                zipfile.ZipFile(tmp_path / "plain.bin") as plain,
                zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed,
            ):
                for name in plain.namelist():
                    packed.writestr(name, plain.read(name))
    hub.add("org/damaged", folder)
    for location in (str(folder), "org/damaged"):
        with pytest.raises(ValueError, match=r"damaged|more than"):
            load_drafter(location, target)
    with pytest.raises(ValueError, match=r"damaged|more than|is a pickle"):
        push(folder, "org/again")
    assert not (tmp_path / "evil").exists() and "org/again" not in hub.repositories


def test_only_what_belongs_to_a_drafter_is_published(eagle, target, hub, tmp_path):
    folder = eagle.save_pretrained(tmp_path / "d", target)
    for name in ("training-state.safetensors", "secret.txt", "training.json", "metrics.jsonl", "bench.json"):
        (folder / name).write_text("{}")
    for name in ("tokenizer.model", "vocab.json", "merges.txt"):  # a tokenizer that is written in parts
        (folder / name).write_text("x")
    (folder / "features").mkdir()
    save_file({"x": torch.zeros(1)}, folder / "features" / "model.safetensors")
    push(folder, "org/head")
    repository = hub.repositories["org/head"]
    published = set(repository.commits[repository.branches["main"]])
    tokenizers = {"tokenizer.model", "vocab.json", "merges.txt"}
    assert published == {"config.json", "model.safetensors", "metrics.jsonl", *tokenizers}


def test_a_folder_without_a_drafter_is_not_published(hub, tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        push(tmp_path / "none", "org/x")
    with pytest.raises(ValueError, match=r"no config\.json"):
        push(tmp_path, "org/x")
    assert not hub.repositories


# --- the card ---------------------------------------------------------------------------------------------


BENCH = {
    "environment": {
        "dtype": "float32",
        "device": "cpu",
        "cpu": "Some CPU",
        "threads": 2,
        "torch": "2",
        "transformers": "5",
    },
    "options": {"questions": "q.jsonl", "temperature": 0.0, "max_new_tokens": 32, "batch_size": 1},
    "variants": {
        "plain": {
            "total": {"questions": 4, "identical": 4, "mean_acceptance_length": 1.0},
            "geometric_mean": {"speedup": 1.0},
        },
        "drafter=/home/me/head": {
            "total": {"questions": 4, "identical": 3, "mean_acceptance_length": 2.345},
            "geometric_mean": {"speedup": 1.678},
        },
    },
}
DATA = {
    "settings": {"prompts": "hub:org/prompts"},
    "counts": {"examples": 9, "answer_tokens": 777, "greedy": 5, "by_source": {"self": 6, "hub": 3}},
}


def test_the_card_says_what_is_recorded_and_no_more(eagle, target, tmp_path):
    folder = eagle.save_pretrained(tmp_path / "d", target, name="org/target", recipe={"depth": 7}, data=DATA)
    text = write_card(folder, "org/head").read_text()
    assert "Measured" not in text and "Checked" not in text and "speedup" not in text
    (folder / "bench.json").write_text(json.dumps(BENCH))
    warm = BENCH | {"options": BENCH["options"] | {"temperature": 0.7}}
    (folder / "bench-settings.json").write_text(json.dumps({"settings": [BENCH, warm]}))
    lines = [
        {"acceptance_length": n, "acceptance_by_position": [0.5, 0.25], "answer_tokens": 5, "step": n} for n in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = {"level": "warning", "findings": [{"topic": "memory", "level": "ok", "found": "fits"}]}
    (folder / "check.json").write_text(json.dumps(report))
    text = write_card(folder, "org/head", license="apache-2.0").read_text()
    assert "| drafter=head | 2.35 | 1.68 | 3 of 4 |" in text and "/home/me" not in text
    assert text.count("## Measured") == 3 and "temperature 0.7" in text
    assert "777 tokens" in text and "length 2.000" in text and "0.500, 0.250" in text and "memory: fits" in text
    metadata = ModelCard(text).data
    assert metadata.base_model == "org/target" and metadata.library_name == "hf_specdec"
    assert metadata.license == "apache-2.0" and metadata.datasets == ["org/prompts"] and "eagle3" in metadata.tags
    again = write_card(folder, "org/head").read_text()
    assert again == text  # the license stays


def test_the_card_tells_of_the_drafter_that_lies_there(eagle, target, tmp_path):
    """Held-out texts that grow are a new measure: the best by the old one was replaced, however good it looked."""
    folder = eagle.save_pretrained(tmp_path / "d", target, name="org/target")
    lines = [
        {"acceptance_length": length, "acceptance_by_position": [], "answer_tokens": 5, "step": step, "held_out": count}
        for step, length, count in ((0, 1.25, 3), (10, 2.5, 3), (20, 1.75, 9), (30, 1.5, 9))
    ]

    def said(lines):
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return write_card(folder, "org/head").read_text()

    assert "length 1.750 after 5 answer tokens (step 20)" in said(lines)
    bests = (True, True, False, True)  # somebody took the drafter away behind step 20
    assert "(step 30)" in said([line | {"is_best": is_best} for line, is_best in zip(lines, bests, strict=True)])


ODD = {
    "bench.json": "{}",
    "check.json": '{"level": "ok"}',
    "metrics.jsonl": '{"step": 1}\n',
    "training.json": "{",
    "README.md": f"---\nlicense: [\n---\n{MARK}",
}


@pytest.mark.parametrize("name", ODD)
def test_records_that_are_damaged_are_named(name, eagle, target, hub, tmp_path, capsys):
    folder = eagle.save_pretrained(tmp_path / "d", target)
    (folder / name).write_text(ODD[name])
    assert main(["push", str(folder), "org/head"]) == 2
    assert name in capsys.readouterr().err and not hub.repositories
    assert (folder / name).read_text() == ODD[name]


@pytest.mark.parametrize("name", ["head", "a/b/c", "org/"])
def test_names_under_which_nothing_could_be_opened_are_refused(name, eagle, target, hub, tmp_path):
    folder = eagle.save_pretrained(tmp_path / "d", target)
    with pytest.raises(ValueError, match="must be like org/name"):
        push(folder, name)
    assert main(["push", str(folder), name]) == 2 and main(["push", str(tmp_path / "none"), "org/head"]) == 2
    assert not hub.repositories and not (folder / "README.md").exists()


@pytest.mark.parametrize(("seconds", "said"), [(20, "1 minute"), (1500, "25 minutes"), (4320, "1.2 hours")])
def test_the_card_says_how_long_the_training_took(seconds, said, eagle, target, tmp_path):
    folder = eagle.save_pretrained(tmp_path / "d", target, name="org/target", recipe={"depth": 7})
    (folder / "training.json").write_text(json.dumps({"progress": {"seconds": seconds}}))
    assert f"Trained for {said}." in write_card(folder, "org/head").read_text()
    told = {"progress": {"seconds": seconds}, "options": {"init_from": "elsewhere"}}
    (folder / "training.json").write_text(json.dumps(told))
    assert (
        f"Trained for {said}, beginning with the weights of an earlier run."
        in write_card(folder, "org/head").read_text()
    )


@pytest.mark.parametrize("name", ["org/target", "target"])
def test_a_push_says_that_nobody_else_finds_the_target(name, eagle, target, tmp_path, hub, capsys):
    folder = eagle.save_pretrained(tmp_path / "d", target, name=name)
    assert main(["push", str(folder), "org/head"]) == 0
    assert ("'target', which is no Hub id" in capsys.readouterr().err) == (name == "target")


def test_a_card_of_the_user_is_kept(eagle, target, tmp_path):
    folder = eagle.save_pretrained(tmp_path / "d", target)
    (folder / "README.md").write_text("# Mine\n")
    assert write_card(folder, "org/head").read_text() == "# Mine\n"


def test_a_drafter_of_unknown_origin_gets_no_card(eagle, tmp_path):
    write_head(eagle.head, tmp_path)
    with pytest.raises(ValueError, match="does not say what the drafter was made for"):
        write_card(tmp_path, "org/head")


def test_the_snippet_of_the_card_runs(eagle, target, tokenizer, tmp_path):
    """As a user would: pushed from the command line, fetched by id in a process of its own, pasted from the card."""
    eagle.save_pretrained(tmp_path / "head", target, tokenizer=tokenizer, name="org/target")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    with HubServer() as hub:
        hub.add("org/target", tmp_path / "target")
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        command = [sys.executable, "-m", "hf_specdec.cli", "push", str(tmp_path / "head"), "org/head"]
        run = {"env": environment, "capture_output": True, "text": True, "timeout": 600}
        pushed = subprocess.run([*command, "--license", "mit"], **run)
        assert pushed.returncode == 0, pushed.stderr
        repository = hub.repositories["org/head"]
        assert pushed.stdout.strip().endswith(repository.branches["main"])
        card = repository.commits[repository.branches["main"]]["README.md"].decode()
        snippet = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
        done = subprocess.run([sys.executable, "-c", snippet], **run)
    assert done.returncode == 0, done.stderr
    assert "drafted" in done.stdout


def test_a_head_without_safetensors_is_opened_offline_once_it_was_fetched(eagle, target, tmp_path):
    """As many are published: the cache then knows that there is no other file of weights."""
    folder = eagle.save_pretrained(tmp_path / "head", target)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    target.save_pretrained(tmp_path / "target")
    script = "import hf_specdec, transformers\n"
    script += f"target = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / 'target')!r})\n"
    script += "print(hf_specdec.load_drafter('org/head', target).head.config.kind)"
    with HubServer() as hub:
        hub.add("org/head", folder)
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        run = {"capture_output": True, "text": True, "timeout": 600}
        online = subprocess.run([sys.executable, "-c", script], env=environment, **run)
    offline = subprocess.run([sys.executable, "-c", script], env=environment | {"HF_HUB_OFFLINE": "1"}, **run)
    assert online.stdout.strip() == offline.stdout.strip() == "eagle3", online.stderr + offline.stderr


# --- export -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("format", ["vllm-speculators", "sglang", "safeailab"])
def test_exports_say_the_same(format, full, target, tmp_path):
    drafter = Eagle(a_head(target, full=full))
    source = str(drafter.save_pretrained(tmp_path / "d", target))
    folder = export(source, tmp_path / "out", format, target)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["lm_head.weight"].shape[0] == len(drafter.head.draft_ids) and ("d2t" in tensors) != full
    names = {"vllm-speculators": "speculators eagle3", "sglang": "specforge", "safeailab": "eagle3"}
    assert recognise(str(folder)).name == names[format]
    found = load_drafter(str(folder), target)
    assert (
        torch.equal(found.head.draft_ids, drafter.head.draft_ids) and found.head.config.taps == drafter.head.config.taps
    )
    torch.testing.assert_close(logits_of(found.head, target), logits_of(drafter.head, target), atol=1e-6, rtol=1e-5)


def test_parallel_heads_are_exported_for_vllm_only(parallel, target, tmp_path):
    source = str(parallel.save_pretrained(tmp_path / "d", target))
    folder = export(source, tmp_path / "out", "vllm-speculators", target)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 1, 96) and "embed_tokens.weight" in tensors
    found = load_drafter(str(folder), target)
    assert isinstance(found, ParallelDraft)
    torch.testing.assert_close(logits_of(found.model, target), logits_of(parallel.model, target), atol=1e-6, rtol=1e-5)
    for format in ("sglang", "safeailab"):
        with pytest.raises(ValueError, match=r"drafts all tokens at once.*vllm-speculators"):
            export(source, tmp_path / format, format, target)
        assert not (tmp_path / format).exists()


def test_what_cannot_be_exported_is_refused(eagle, target, tmp_path):
    source = str(eagle.save_pretrained(tmp_path / "d", target))
    with pytest.raises(ValueError, match=r"format='onnx' is unknown; use one of vllm-speculators"):
        export(source, tmp_path / "out", "onnx", target)
    with pytest.raises(ValueError, match="exists"):
        export(source, tmp_path, "sglang", target)
    stranger = tiny(seed=9, vocab=target.config.vocab_size, num_hidden_layers=DEPTH, dtype=torch.float32)
    with pytest.raises(ValueError, match="another model: the weights are unrelated"):
        export(source, tmp_path / "out", "sglang", stranger)
    odd = Eagle(a_head(target, norm_before_residual=True))
    source = str(odd.save_pretrained(tmp_path / "odd", target))
    with pytest.raises(ValueError, match="norm_before_residual"):
        export(source, tmp_path / "out", "safeailab", target)


def test_exports_that_cannot_be_are_refused_before_the_target_is_loaded(tmp_path, capsys):
    options = ["export", "drafter", "--target", str(tmp_path / "none"), "--output", str(tmp_path), "--format"]
    for format, message in (("onnx", "format='onnx' is unknown"), ("sglang", "exists; give a folder that does not")):
        assert main([*options, format]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm_before_fc": True}, "sets norm_before_fc"),
        ({"num_layers": 2}, "has 2 layers"),
        ({"mask_token_id": 5}, "drafts all tokens at once"),
        ({"qk_norm": True}, "sets qk_norm"),
        ({"qkv_bias": True, "output_bias": True}, "sets qkv_bias, output_bias"),
        ({"mlp_bias": True}, "sets mlp_bias"),
    ],
)
@pytest.mark.parametrize("format", ["sglang", "safeailab"])
def test_what_a_format_cannot_hold_is_said(format, changes, reason, target):
    with pytest.raises(ValueError, match=f"this one {reason}. Use vllm-speculators"):
        FORMATS[format](a_head(target, **changes), target)


def test_norms_and_rotations_that_a_format_would_lose_are_said(target):
    with pytest.raises(ValueError, match="fc_norm=False and norm_output=True"):
        FORMATS["sglang"](a_head(target, norm_output=True), target)
    scaled = a_head(target, rope={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ValueError, match=r"this head's are scaled \(linear\)"):
        FORMATS["safeailab"](scaled, target)


SCALED = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
WIDER = {"hidden_size": 48, "head_dim": 12, "own_embedding": True, "own_lm_head": True}
PLAIN, WITH_TOKENS = LayerConfig(False), LayerConfig(True)
# By option: what it changes of a head, and the formats that hold it; the others say a name of it when they refuse.
OPTIONS = {
    "nothing": ({}, "vllm-speculators sglang safeailab", ""),
    "all ids": ({"full": True}, "vllm-speculators sglang safeailab", ""),
    "own embeddings": ({"own_embedding": True}, "vllm-speculators safeailab", "embeddings"),
    "own output layer": ({"own_lm_head": True}, "vllm-speculators sglang safeailab", ""),
    "another width": (WIDER, "vllm-speculators sglang safeailab", ""),
    "another eps": ({"rms_norm_eps": 1e-3}, "vllm-speculators sglang safeailab", ""),
    "other taps": ({"taps": (1, 4, 6)}, "vllm-speculators sglang", "hidden states"),
    "two taps": ({"taps": (2, 5)}, "vllm-speculators sglang", "hidden states"),
    "the last state": ({"taps": (2, 4, 8)}, "vllm-speculators sglang", "hidden states"),
    "scaled rotation": ({"rope": SCALED}, "vllm-speculators sglang", "linear"),
    "rotation in part": (
        {"rope": SCALED | {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "",
        "partial_rotary",
    ),
    "two layers": ({"num_layers": 2}, "vllm-speculators", "2 layers"),
    "two layers that read tokens": ({"layers": (WITH_TOKENS, WITH_TOKENS)}, "", "tokens"),
    "a layer without tokens": ({"layers": (PLAIN,)}, "", "tokens"),
    "a layer without a norm": ({"layers": (LayerConfig(True, input_norm=False),)}, "", "norm"),
    "bias of fc": ({"fc_bias": True}, "", "fc"),
    "biases of the attention": ({"qkv_bias": True, "output_bias": True}, "vllm-speculators", "qkv_bias"),
    "some biases of the attention": ({"qkv_bias": True}, "", "bias"),
    "biases of MLPs": ({"mlp_bias": True}, "vllm-speculators", "mlp_bias"),
    "norms of queries": ({"qk_norm": True}, "vllm-speculators", "qk_norm"),
    "norms of queries, biases of MLPs": ({"qk_norm": True, "mlp_bias": True}, "", "mlp_bias"),
    "windows": ({"layers": (LayerConfig(True, window=3),)}, "", "windows"),
    "windows, norms of queries": (
        {"layers": (LayerConfig(True, window=3),), "qk_norm": True},
        "vllm-speculators",
        "qk",
    ),
    "no final norm": ({"final_norm": False}, "", "final norm"),
    "norm before fc": ({"norm_before_fc": True}, "vllm-speculators", "norm_before_fc"),
    "norm before the residual": ({"norm_before_residual": True}, "vllm-speculators", "norm_before_residual"),
    "norms of taps": ({"fc_norm": True}, "vllm-speculators", "norm"),
    "normed feedback": ({"norm_output": True}, "vllm-speculators", "norm"),
    "norms of taps, normed feedback": ({"fc_norm": True, "norm_output": True}, "vllm-speculators sglang", "norm"),
    "parallel": ({"mask_token_id": 5}, "vllm-speculators", "all tokens at once"),
    "parallel, two layers, all ids": (
        {"mask_token_id": 5, "num_layers": 2, "full": True},
        "vllm-speculators",
        "at once",
    ),
}


def a_random_head(target, num_layers=1, full=False, **changes):
    """A head whose every number says something: biases and gains too."""
    vocab = target.config.vocab_size
    count = vocab if full else DRAFT_VOCAB
    head = EagleHead(replace(head_config(target, count, num_layers), **changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2 + float("norm" in name))
        head.draft_ids.copy_(torch.arange(vocab)[:: vocab // count][:count])
    return head.to(target.dtype).bind(target).eval()


def two_steps(head):
    """Logits of a head about states of a target and, behind them, about what it feeds back to itself."""
    generator, config = torch.Generator().manual_seed(0), head.config
    features = torch.randn(1, 5, config.num_taps * config.target_hidden_size, generator=generator).to(head.dtype)
    tokens = torch.randint(config.vocab_size, (1, 6), generator=generator)
    hidden = head.combine(features)
    if config.mask_token_id is not None:
        hidden = torch.cat([hidden, head.masked_hidden().expand(1, 1, -1)], dim=1)
    else:
        fed = head.feedback(head(tokens[:, :5], hidden, torch.arange(5)[None])[:, -1:])
        hidden = torch.cat([hidden, fed], dim=1)
    return head.logits(head(tokens, hidden, torch.arange(6)[None]))


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_export_holds_all_of_a_head_or_says_what_it_cannot_hold(option, format, target, tmp_path):
    changes, formats, reason = OPTIONS[option]
    head = a_random_head(target, **changes)
    if format not in formats.split():
        with pytest.raises(ValueError, match=reason):
            FORMATS[format](head, target)
        return
    config, tensors = FORMATS[format](head, target)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_head(str(tmp_path), target)
    lasting = ("taps", "rms_norm_eps", "layers", "mask_token_id", "rope", "norm_output", "norm_before_residual")
    for name in lasting:
        ours, theirs = getattr(head.config, name), getattr(found.config, name)
        assert ours.items() <= theirs.items() if name == "rope" else ours == theirs
    assert torch.equal(found.draft_ids, head.draft_ids)
    torch.testing.assert_close(two_steps(found), two_steps(head), atol=1e-5, rtol=1e-5)


def test_export_from_the_command_line(eagle, target, tokenizer, tmp_path, capsys):
    eagle.save_pretrained(tmp_path / "d", target)
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    options = ["--format", "sglang", "--output", str(tmp_path / "out"), "--target", str(tmp_path / "target")]
    assert main(["export", str(tmp_path / "d"), *options, "--dtype", "float32"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert main(["export", str(tmp_path / "d"), *options]) == 2
    assert "exists" in capsys.readouterr().err


SPECULATORS = os.environ.get("HF_SPECDEC_SPECULATORS_PYTHON")


@pytest.mark.skipif(SPECULATORS is None, reason="HF_SPECDEC_SPECULATORS_PYTHON names no Python with speculators 0.9.0")
@pytest.mark.parametrize("which", ["eagle", "parallel"])
def test_speculators_opens_the_export_and_says_the_same(which, request, target, tmp_path):
    drafter = request.getfixturevalue(which)
    source = str(drafter.save_pretrained(tmp_path / "d", target))
    target.save_pretrained(tmp_path / "target")
    opened = load_model(str(tmp_path / "target"), torch.float32, torch.device("cpu"))
    folder = export(source, tmp_path / "out", "vllm-speculators", opened)
    script = Path(__file__).parent / "golden" / "open_export.py"
    command = [str(SPECULATORS), str(script), str(folder), str(tmp_path / "said")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    said = load_file(tmp_path / "said")
    head = head_of(drafter)
    with torch.no_grad():
        states = head(
            said["tokens"], head.combine(said["features"]), torch.arange(said["tokens"].shape[1])[None], None, None
        )
    torch.testing.assert_close(head.logits(states), said["logits"], atol=1e-5, rtol=1e-5)


ECONOMIZE = os.environ.get("HF_SPECDEC_ECONOMIZE_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(ECONOMIZE is None, reason="HF_SPECDEC_ECONOMIZE_PYTHON names no Python with economize 0.3.2")
def test_what_economize_opens_by_id(eagle, parallel, target, tokenizer, tmp_path):
    """Every export of an EAGLE-3 head; from `sglang` it reads hidden states one layer too early, as vLLM does.

    Not our own files, which leave the rows of the output layer to the target, and no heads that draft in parallel.
    """
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    source = str(eagle.save_pretrained(tmp_path / "own", target))
    parallel.save_pretrained(tmp_path / "p-eagle", target)
    formats = ("vllm-speculators", "sglang", "safeailab")
    for format in formats:
        export(source, tmp_path / format, format, target)
    prompt = torch.arange(3, 12)[None]
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    names = [f"org/{name}" for name in ("own", "p-eagle", *formats)]
    with HubServer() as hub:
        for name in names:
            hub.add(name, tmp_path / name.partition("/")[2])
        script = Path(__file__).parent / "golden" / "open_in_economize.py"
        told = [str(tmp_path / "target"), ",".join(map(str, prompt[0].tolist())), "12", *names]
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        run = {"env": environment, "capture_output": True, "text": True, "timeout": 1200}
        done = subprocess.run([str(ECONOMIZE), str(script), *told], **run)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "needs 'lm_head.weight'" in found["org/own"]["error"]
    assert "2 draft layers" in found["org/p-eagle"]["error"]
    taps = list(eagle.head.config.taps)
    for format in formats:
        opened = found[f"org/{format}"]
        assert opened["taps"] == ([tap - 1 for tap in taps] if format == "sglang" else taps), format
        assert opened["tokens"] == plain[0, prompt.shape[1] :].tolist(), format
