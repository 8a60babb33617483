"""The training loop: counted rightly, the same after a kill and in two processes, clear about what it cannot do."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_specdec import Eagle, cli, load_drafter
from hf_specdec.checkpoints import write
from hf_specdec.training import checkpoint, evaluate
from hf_specdec.training.curves import draw, read_metrics
from hf_specdec.training.examples import Example, write_record, write_shard
from hf_specdec.training.features import FeatureStore
from hf_specdec.training.loop import METRICS_NAME, RECORD_NAME, Training, train
from tests.models import tiny
from tests.test_heads import initialised
from tests.tokenizers_for_tests import save_tiny
from tests.train_worker import options
from tests.training_data import KINDS, answered, data_folder

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders of a target and of its answers."""
    folder = tmp_path_factory.mktemp("training")
    target = save_tiny(folder / "target")
    return data_folder(folder / "data", target), target


# --- counting ---------------------------------------------------------------------------------------------


def slow_count(agreement):
    places, depth = len(agreement), len(agreement[0])
    hits, seen, kept, reached = ([0] * depth for _ in range(4))
    for place in range(places):
        for ahead in range(min(depth, places - place)):
            seen[ahead] += 1
            hits[ahead] += agreement[place][ahead]
            reached[ahead] += all(agreement[place][:ahead])
            kept[ahead] += all(agreement[place][: ahead + 1])
    place = rounds = 0
    while place < places:
        accepted = 0
        while accepted < min(depth, evaluate.CHAIN) and agreement[place][accepted]:
            accepted += 1
        place, rounds = place + accepted + 1, rounds + 1
    return tuple(hits), tuple(seen), tuple(kept), tuple(reached), rounds


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_counts_are_those_of_drafting_round_by_round(depth):
    generator = torch.Generator().manual_seed(depth)
    for places in (1, 2, 5, 40):
        agreement = torch.rand(places, depth, generator=generator) < 0.6
        inside = torch.arange(places)[:, None] + torch.arange(depth) < places
        agreement &= inside
        found = evaluate.count(agreement)
        assert (*found.counts(), found.rounds) == slow_count(agreement.tolist())
        assert found.tokens == places
    assert evaluate.count(torch.zeros(0, depth, dtype=torch.bool)).rounds == 0


def test_counts_add_up():
    first = evaluate.count(torch.tensor([[True, True], [True, False], [False, False]]))
    both = evaluate.total([first, evaluate.Acceptance(), first])
    assert both.hits == (4, 2) and both.rounds == 2 * first.rounds and both.length == first.length
    assert evaluate.Acceptance().length == 1.0 and evaluate.Acceptance().by_position == []


# --- hidden states ----------------------------------------------------------------------------------------


def test_hidden_states_are_the_targets_own_whether_kept_or_not(tmp_path):
    target = tiny(num_hidden_layers=4)
    examples = answered(target, 5)
    store = FeatureStore(target, (1, 3), tmp_path / "kept", max_bytes=10**9)
    computed, kept = store.texts(examples), FeatureStore(target, (1, 3), tmp_path / "kept", 10**9).texts(examples)
    for example, first, second in zip(examples, computed, kept, strict=True):
        tokens = torch.tensor([[*example.prompt, *example.answer]])
        states = target(tokens, output_hidden_states=True).hidden_states
        torch.testing.assert_close(first.taps, torch.cat([states[1], states[3]], dim=-1)[0])
        torch.testing.assert_close(first.last, states[4][0, len(example.prompt) - 1 :])
        assert torch.equal(first.taps, second.taps) and torch.equal(first.last, second.last)
    size = sum(path.stat().st_size for path in (tmp_path / "kept").glob("*/*"))
    assert 0 < store.bytes_of(examples) <= size == store.num_bytes


def test_the_store_stays_within_its_bound_and_repairs_what_is_damaged(tmp_path):
    target = tiny(num_hidden_layers=4)
    examples = answered(target, 6)
    one = FeatureStore(target, (1,), tmp_path, 10**9)
    one.texts(examples[:1])
    store = FeatureStore(target, (1,), tmp_path, int(2.5 * one.num_bytes))
    expected = [text.taps for text in store.texts(examples)]
    files = list(tmp_path.glob("*/*.safetensors"))
    assert len(files) == 2 and store.num_bytes <= store.max_bytes
    for path in files:
        half = path.read_bytes()[:100]
        path.unlink()  # what was read may still lie in the old file
        path.write_bytes(half)
    assert all(map(torch.equal, [text.taps for text in store.texts(examples)], expected))


def test_states_of_other_targets_are_not_taken_for_ones_own(tmp_path):
    """Files are named after texts, and a folder may be shared by trainings."""
    target, examples = tiny(num_hidden_layers=4), answered(tiny(num_hidden_layers=4), 1)
    FeatureStore(target, (1,), tmp_path, 10**9).texts(examples)
    for other in (tiny(num_hidden_layers=4, seed=5), tiny(num_hidden_layers=4).to(torch.bfloat16)):
        with pytest.raises(ValueError, match=r"holds hidden states of another target or dtype.*--cache"):
            FeatureStore(other, (1,), tmp_path, 10**9)
    (tmp_path / "features.json").unlink()  # as releases left it that kept no record
    assert FeatureStore(target, (3,), tmp_path, 10**9).num_bytes and (tmp_path / "features.json").is_file()


# --- a whole training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_leaves_a_drafter_a_log_curves_and_a_record(kind, places, tmp_path, capsys):
    data, target = places
    command = ["train", kind, "--target", target, "--data", data, "--output", str(tmp_path), "--max-steps", "6"]
    command += ["--dtype", "float32", "--device", "cpu", "--depth", "3", "--batch-tokens", "100", "--seed", "1"]
    assert cli.main(command) == 0
    assert "acceptance" in capsys.readouterr().err
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics[0]["step"] == 0 and metrics[-1]["step"] == 6 and metrics[-1]["loss"] > 0
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["recipe"]["kind"] == kind and record["progress"]["step"] == 6
    pytest.importorskip("matplotlib")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_the_best_drafter_is_the_one_that_is_kept(places, tmp_path, monkeypatch):
    saved, written = [], []
    training = Training(options(*places, str(tmp_path), max_steps=24), lambda _: None)
    monkeypatch.setattr(training, "_keep", lambda: saved.append(training.progress.step))
    monkeypatch.setattr(training, "_write_metrics", written.append)
    for step, tokens in ((0, 2), (8, 6), (16, 4), (24, 5)):
        training.progress.step = step
        counted = evaluate.Acceptance(tokens=tokens, rounds=2)
        monkeypatch.setattr(training, "_acceptance", lambda counted=counted: counted)
        training._evaluate()
    assert saved == [0, 8] and training.progress.best == 3.0
    assert [line["step"] for line in written if line["is_best"]] == saved


def test_curves_name_no_folder_of_this_machine(places, tmp_path, monkeypatch):
    """They are published with the drafter."""
    pytest.importorskip("matplotlib")
    titles = []
    monkeypatch.setattr("hf_specdec.training.loop.draw", lambda metrics, path, title: titles.append(title))
    train(options(*places, str(tmp_path), max_steps=1))
    assert set(titles) == {f"eagle3 for {Path(places[1]).name}"}


def test_a_single_process_asks_no_device_for_the_time(places, tmp_path):
    """Some have no numbers of 64 bits; "meta" has no numbers at all."""
    training = Training(options(*places, str(tmp_path), max_steps=3), lambda _: None)
    training.accelerator = SimpleNamespace(num_processes=1, device=torch.device("meta"), is_main_process=True)
    assert not training._is_over() and training._least(7) == 7 and training._is_due(0.0, 0.0, None)


def test_a_process_without_a_held_out_text_counts_nothing(places, tmp_path):
    """Counts of all processes are added, so they must have one shape."""
    training = Training(replace(options(*places, str(tmp_path)), num_held_out=1), lambda _: None)
    shapes = []

    def reduce(values, how):
        shapes.append(tuple(values.shape))
        return values

    for index in (0, 1):
        training.accelerator = SimpleNamespace(
            process_index=index, num_processes=2, device=torch.device("cpu"), reduce=reduce
        )
        counted = training._acceptance()
        assert (counted.rounds > 0) == (index == 0) and len(counted.hits) == training.recipe.depth
    assert shapes[:2] == shapes[2:]


def test_a_drafter_on_disk_can_be_used_while_its_training_goes_on(places, tmp_path):
    data, location = places
    opened = []

    def use(event):
        if event["event"] == "step" and (tmp_path / "config.json").is_file():
            opened.append(load_drafter(str(tmp_path), target))

    target = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    train(options(data, location, str(tmp_path), max_steps=3), use)
    assert len(opened) == 3


def test_an_epoch_reads_what_has_come_since_and_a_resumed_one_does_not(places, tmp_path):
    data, location = tmp_path / "data", places[1]
    target = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    data.mkdir()
    write_shard(data, 0, answered(target, 14))
    settings = {"max_steps": 3, "batch_tokens": 60}
    first = Training(options(str(data), location, str(tmp_path / "out"), **settings), lambda _: None)
    first.run()
    write_shard(data, 1, answered(target, 10, seed=5))
    resumed = Training(options(str(data), location, str(tmp_path / "out"), max_steps=40), lambda _: None)
    assert resumed.batches == first.batches and len(resumed.learned) == len(first.learned)
    resumed.run()
    assert resumed.progress.num_examples == 24 and len(resumed.learned) > len(first.learned)


@pytest.mark.parametrize("kind", KINDS)
def test_a_better_drafter_stays_when_held_out_texts_are_added(kind, places, tmp_path, monkeypatch):
    """The kept one is measured again, on all texts. Here weights are all alike, and a drafter is as good as they are
    large, but worse on the new texts."""
    data, location = tmp_path / "data", places[1]
    target = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    data.mkdir()
    write_shard(data, 0, answered(target, 14))
    training = Training(options(str(data), location, str(tmp_path / "out"), kind), lambda _: None)
    trained, before = training.weights.module.values(), len(training.held_out)

    def acceptance():
        least = min(float(weight.detach().min()) for weight in trained)
        return evaluate.Acceptance(tokens=round(4 * least) - 2 * (len(training.held_out) > before), rounds=4)

    def evaluated(value):
        with torch.no_grad():
            for master in training.weights.masters.values():
                master.fill_(value)
        training.weights.publish()
        training.progress.step += 1
        training._evaluate()
        return read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["is_best"]

    monkeypatch.setattr(training, "_acceptance", acceptance)
    assert evaluated(3.0) and not evaluated(2.0)
    write_shard(data, 1, answered(target, 10, seed=5))
    training.progress.cursor = len(training.batches)
    training._next_batches()
    assert len(training.held_out) > before and training.progress.best == 2.5
    assert all(bool((weight == 2.0).all()) for weight in trained)
    assert not evaluated(2.0) and not evaluated(3.0) and evaluated(3.5)


def test_the_drafter_that_is_measured_again_is_the_kept_one(places, tmp_path):
    """Not by name alone: what its files hold agrees with texts as it did when it was written."""
    for kind in KINDS:
        settings = {"max_steps": 4, "dtype": "bfloat16"}  # heads are rounded to it when they are written
        training = Training(options(*places, str(tmp_path / kind), kind, **settings), lambda _: None)
        training.run()
        training._keep()
        texts = training.store.texts(training.learned)
        before = training.recipe.agreement(texts)
        with torch.no_grad():
            for weight in training.weights.module.values():
                weight.zero_()
        training.weights.show(training._published(str(tmp_path / kind)))
        assert sum(map(torch.sum, before)) > 0
        assert all(map(torch.equal, before, training.recipe.agreement(texts)))


def test_another_training_goes_on_from_the_weights_of_one(places, tmp_path):
    train(options(*places, str(tmp_path / "first"), max_steps=4))
    began = Training(options(*places, str(tmp_path / "second"), init_from=str(tmp_path / "first")), lambda _: None)
    found = checkpoint.read_state(tmp_path / "first")
    assert all(torch.equal(x, found[2][f"module.{name}"]) for name, x in began.weights.masters.items())
    assert began.progress.step == 0
    other = Training(options(*places, str(tmp_path / "third"), "p-eagle", init_from=str(tmp_path / "first")), print)
    assert torch.equal(other.weights.masters["fc.weight"], began.weights.masters["fc.weight"])
    assert other.weights.masters["mask_hidden"].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_begins_with_a_published_drafter(kind, places, tmp_path):
    train(options(*places, str(tmp_path / "first"), kind, max_steps=1))
    for name in (checkpoint.STATE_NAME, METRICS_NAME, RECORD_NAME):  # what nobody publishes
        (tmp_path / "first" / name).unlink()
    weights = tmp_path / "first" / "model.safetensors"
    changed = {name: x * 1.25 if x.is_floating_point() else x for name, x in load_file(weights).items()}
    save_file(changed, weights, {"format": "pt"})
    began = Training(options(*places, str(tmp_path / "second"), kind, init_from=str(tmp_path / "first")), print)
    rows = [row for name, x in changed.items() if "embed_tokens" in name for row in x]  # of which one is the mask's
    for name, weight in began.weights.masters.items():
        same_shape = [x.to(weight) for x in [*changed.values(), *rows] if x.shape == weight.shape]
        assert any(torch.equal(weight, x) for x in same_shape), name


def test_what_no_training_can_begin_with_is_refused(places, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither the output of such a training nor a drafter"):
        Training(options(*places, str(tmp_path / "second"), init_from=str(tmp_path / "empty")), print)
    train(options(*places, str(tmp_path / "draft"), "draft", max_steps=1))
    (tmp_path / "draft" / checkpoint.STATE_NAME).unlink()
    with pytest.raises(ValueError, match="DraftModel is no head"):
        Training(options(*places, str(tmp_path / "third"), init_from=str(tmp_path / "draft")), print)


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("draft", "cut", "could not be opened as a language model"),
        ("pard", "lacks", r"lacks weights of a .*norm\.weight"),
        ("draft", "nan", "values that are not finite numbers"),
        ("eagle3", "state", "was not written by this version"),
    ],
)
def test_damaged_weights_to_begin_with_are_refused(kind, damage, message, places, tmp_path):
    train(options(*places, str(tmp_path / "first"), kind, max_steps=1))
    weights, state = (tmp_path / "first" / name for name in ("model.safetensors", checkpoint.STATE_NAME))
    tensors = load_file(weights)
    state.unlink()
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "state":
        save_file({"module.x": torch.ones(1)}, state)
    else:
        norm = tensors.pop("model.norm.weight")
        save_file(
            tensors | ({"model.norm.weight": norm * torch.nan} if damage == "nan" else {}), weights, {"format": "pt"}
        )
    with pytest.raises(ValueError, match=message):
        Training(options(*places, str(tmp_path / "second"), kind, init_from=str(tmp_path / "first")), print)
    assert not (tmp_path / "second").exists()


def test_a_head_with_an_output_layer_of_its_own_is_begun_with_if_it_is_of_the_same_make(places, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(places[1], dtype=torch.float32)
    mine = Training(options(*places, str(tmp_path / "a")), print).recipe.head.config
    head = initialised(replace(mine, draft_vocab_size=20, own_lm_head=True))
    head.draft_ids.copy_(torch.arange(20))
    Eagle(head.float()).save_pretrained(tmp_path / "head", target)
    began = Training(options(*places, str(tmp_path / "b"), init_from=str(tmp_path / "head")), print)
    assert torch.equal(began.weights.masters["fc.weight"], head.fc.weight)
    other = initialised(replace(mine, draft_vocab_size=20, own_lm_head=True, taps=(0, *mine.taps[1:])))
    other.draft_ids.copy_(torch.arange(20))
    Eagle(other.float()).save_pretrained(tmp_path / "other", target)
    with pytest.raises(ValueError, match=r"of another make than eagle3 trains here: taps="):
        Training(options(*places, str(tmp_path / "c"), init_from=str(tmp_path / "other")), print)


# --- kills ------------------------------------------------------------------------------------------------


def worker(places, output, kind="eagle3"):
    command = [sys.executable, "-m", "tests.train_worker", *places, str(output), kind]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(process):
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors.decode()
    return json.loads(output.splitlines()[-1])


def test_a_run_that_is_killed_ends_as_one_that_is_not(places, tmp_path):
    """Killed three times: after some file was written, whichever, at a moment drawn at random."""
    kill_and_compare(places, tmp_path, 3, "p-eagle")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_five_kills(kind, places, tmp_path):
    kill_and_compare(places, tmp_path, 5, kind)


def kill_and_compare(places, tmp_path, num_kills, kind):
    expected = train(options(*places, str(tmp_path / "whole"), kind))
    chance = random.Random(num_kills)
    state = tmp_path / "killed" / checkpoint.STATE_NAME
    for _ in range(num_kills):
        process, before = worker(places, tmp_path / "killed", kind), state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None and (not state.exists() or state.stat().st_mtime_ns == before):
            time.sleep(0.005)
        time.sleep(chance.random() * 0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = finished(worker(places, tmp_path / "killed", kind))
    different = {"seconds"}
    assert {k: x for k, x in found.items() if k not in different} == {
        k: x for k, x in json.loads(json.dumps(expected)).items() if k not in different
    }
    ends = [checkpoint.read_state(tmp_path / name)[2] for name in ("whole", "killed")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_learn_what_one_does(kind, places, tmp_path):
    expected = finished(worker(places, tmp_path / "one", kind))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += ["-m", "tests.train_worker", *places, str(tmp_path / "two"), kind]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = read_metrics(tmp_path / "two" / "metrics.jsonl")[-1]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["answer_tokens"] == expected["answer_tokens"]
    ends = [checkpoint.read_state(tmp_path / name)[2] for name in ("one", "two")]
    for name, value in ends[0].items():
        if name.startswith("module."):
            torch.testing.assert_close(ends[1][name], value, rtol=1e-3, atol=1e-4)


# --- what goes wrong --------------------------------------------------------------------------------------


@pytest.fixture
def good(places, tmp_path):
    """A run that has got somewhere, and its files."""
    train(options(*places, str(tmp_path / "out"), max_steps=4))
    names = (checkpoint.STATE_NAME, "model.safetensors", "config.json")
    return tmp_path / "out", {name: (tmp_path / "out" / name).read_bytes() for name in names}


def assert_intact(good):
    folder, files = good
    assert all((folder / name).read_bytes() == content for name, content in files.items())
    assert not list(folder.glob(".*"))


def test_a_loss_that_is_no_number_stops_before_it_does_harm(places, good, monkeypatch):
    training = Training(options(*places, str(good[0]), max_steps=8), lambda _: None)
    plain = training.recipe.losses
    monkeypatch.setattr(
        training.recipe, "losses", lambda *args: replace(plain(*args), total=plain(*args).total * float("nan"))
    )
    with pytest.raises(ValueError, match=r"loss of step 5 is nan.*last good state is kept"):
        training.run()
    assert_intact(good)


@pytest.mark.parametrize("evaluate_steps", [100, 1], ids=["a state", "a drafter"])
def test_a_full_disk_leaves_the_last_good_state(evaluate_steps, places, good, monkeypatch):
    def full(tensors, path, **_):
        Path(path).write_bytes(b"half of it")
        raise SafetensorError("I/O error: No space left on device (os error 28)")  # as the library says it

    monkeypatch.setattr(write, "save_file", full)
    with pytest.raises(OSError, match=r"could not be written: .* No space left"):
        train(options(*places, str(good[0]), max_steps=8, evaluate_steps=evaluate_steps))
    assert_intact(good)


def test_a_run_for_another_target_is_not_resumed(places, good, tmp_path):
    other = save_tiny(tmp_path / "other", seed=9)
    with pytest.raises(ValueError, match="another target: the weights are unrelated"):
        train(options(places[0], other, str(good[0]), max_steps=8))
    wider = tmp_path / "wider"
    model = tiny(vocab=320, hidden_size=48, num_hidden_layers=2, dtype=torch.float32)
    model.save_pretrained(wider)
    AutoModelForCausalLM.from_pretrained(wider)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (wider / name).write_bytes((Path(places[1]) / name).read_bytes())
    with pytest.raises(ValueError, match="hidden_size is 32 there and 48 here"):
        train(options(places[0], str(wider), str(good[0]), max_steps=8))
    assert_intact(good)


def test_what_a_killed_run_was_writing_is_removed(places, good):
    folder = good[0]
    (folder / "features").mkdir(exist_ok=True)
    parts = [".training-state.safetensors.77.part", ".curves.png.77.part", "features/.x.safetensors.77.part"]
    kept = [".gitignore", ".notes.part", "mine.77.part"]
    for name in parts + kept:
        (folder / name).write_text("half of it")
    (folder.parent / f".{folder.name}-abcd1234" / "part").mkdir(parents=True)
    (folder.parent / f".{folder.name}-abcd5678" / "mine").mkdir(parents=True)
    train(options(*places, str(folder), max_steps=4))
    assert [(folder / name).exists() for name in parts + kept] == [False] * len(parts) + [True] * len(kept)
    assert [path.name for path in folder.parent.glob(f".{folder.name}-*")] == [f".{folder.name}-abcd5678"]


def test_data_that_changed_under_a_run_are_refused(places, good, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    lines = (Path(places[0]) / "answers-00000.jsonl").read_text().splitlines(keepends=True)
    (few / "answers-00000.jsonl").write_text("".join(lines[:20]))
    with pytest.raises(ValueError, match=r"holds 20 examples; this run had 30 when it stopped"):
        train(options(str(few), places[1], str(good[0])))
    write_shard(few, 1, [Example((3, 4), (5, 999), 0.0, "self", True)])
    with pytest.raises(ValueError, match=r"holds the id 999; the target has 320 ids"):
        train(options(str(few), places[1], str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()
    (good[0] / "metrics.jsonl").write_text("no json\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged"):
        train(options(*places, str(good[0])))
    assert_intact(good)


def test_a_drafter_that_was_taken_away_is_written_again(places, good):
    for name in ("config.json", "model.safetensors"):
        (good[0] / name).unlink()
    train(options(*places, str(good[0]), max_steps=5))
    assert load_drafter(str(good[0]), AutoModelForCausalLM.from_pretrained(places[1], dtype=torch.float32))


def test_what_is_no_run_is_not_overwritten(places, good):
    """A target's own folder, somebody's notes, and a drafter whose training cannot go on."""
    target = Path(places[1])
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(ValueError, match=r"holds config.json and model.safetensors and no state.*another output"):
        train(options(*places, str(target)))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    state = good[0] / checkpoint.STATE_NAME
    whole = state.read_bytes()
    for damaged, message in ((whole[:999], "is damaged.*another output"), (None, "and no state of a training")):
        state.unlink() if damaged is None else state.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            train(options(*places, str(good[0])))
    state.write_bytes(whole)
    assert_intact(good)


def test_a_run_that_goes_on_knows_the_best_there_was(places, tmp_path, monkeypatch):
    """Killed after an evaluation, whenever the state would have been saved next."""
    folder = str(tmp_path / "out")
    training = Training(options(*places, folder, save_steps=100, evaluate_steps=100), lambda _: None)
    monkeypatch.setattr(training, "_acceptance", lambda: evaluate.Acceptance(tokens=6, rounds=2))
    training._evaluate()
    del training
    assert Training(options(*places, folder), lambda _: None).progress.best == 3.0


def test_other_options_are_not_resumed(places, good):
    with pytest.raises(ValueError, match=r"other options \(batch_tokens=60\)"):
        train(options(*places, str(good[0]), batch_tokens=99))
    with pytest.raises(ValueError, match=r"names differ|has shape"):
        train(options(*places, str(good[0]) + "-new", "draft", init_from=str(good[0])))
    assert_intact(good)


def test_data_without_anything_to_learn_are_refused(places, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(ValueError, match="make training data"):
        train(options(str(data), places[1], str(tmp_path / "out")))
    write_shard(data, 0, [Example((3, 4, n), (5,), 0.0, "self", True) for n in range(30)])
    with pytest.raises(ValueError, match="0 to learn from"):
        train(options(str(data), places[1], str(tmp_path / "out")))
    with (data / "answers-00000.jsonl").open("a") as file:
        file.write("no json\n")
    write_record(data, {"target_fingerprint": {"vocabulary_size": 7, "hidden_size": 2, "num_layers": 1, "signs": "0"}})
    with pytest.raises(ValueError, match="answers of another target: vocabulary_size is 7"):
        train(options(str(data), places[1], str(tmp_path / "out")))


def test_broken_lines_are_shown_and_the_rest_is_learned(places, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    lines = (Path(places[0]) / "answers-00000.jsonl").read_text().splitlines()
    lines.insert(3, '{"prompt": [1')
    (data / "answers-00000.jsonl").write_text("\n".join(lines) + "\n")
    train(options(str(data), places[1], str(tmp_path / "out"), max_steps=2))
    assert "1 broken lines are left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["medusa"], "kind='medusa' is unknown; use one of eagle3, p-eagle, pard, draft"),
        (["eagle3", "--max-steps", "0"], "max_steps=0"),
        (["eagle3", "--learning-rate", "0"], "learning_rate=0.0"),
        (["eagle3", "--depth", "0"], "depth=0"),
        (["eagle3", "--coverage", "2"], "coverage=2.0"),
        (["draft", "--num-layers", "99"], "num_layers=99"),
        (["eagle3", "--num-layers", "2"], "num_layers=2: eagle3 learns one layer"),
        (["p-eagle", "--decay", "0.5"], "decay: p-eagle has no use for that"),
        (["pard", "--decay", "0.5", "--coverage", "0.5"], "decay, coverage: pard has no use for that"),
        (["draft", "--draft-vocab-size", "64"], "draft_vocab_size: draft has no use for that"),
    ],
)
def test_wrong_options_are_one_clear_line(arguments, message, places, tmp_path, capsys):
    command = ["train", *arguments, "--target", places[1], "--data", places[0], "--output", str(tmp_path)]
    command += [] if "--max-steps" in arguments else ["--max-steps", "1"]
    assert cli.main([*command, "--device", "cpu"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_is_wrong_with_the_command_is_said_before_the_target_is_loaded(places, tmp_path, capsys):
    command = ["train", "--target", str(tmp_path / "none"), "--data", places[0], "--epochs", "1", "--device", "cpu"]
    assert cli.main([*command, "medusa", "--output", str(tmp_path / "out")]) == 2
    assert "kind='medusa' is unknown" in capsys.readouterr().err
    assert cli.main([*command, "eagle3", "--output", f"{places[0]}/."]) == 2
    assert "is the folder of the data" in capsys.readouterr().err


def test_a_training_says_where_it_goes_on_and_when_nothing_is_left(places, tmp_path, capsys):
    command = ["train", "eagle3", "--target", places[1], "--data", places[0], "--output", str(tmp_path / "out")]
    shown = []
    for steps in ("1", "2", "2"):
        assert cli.main([*command, "--device", "cpu", "--depth", "1", "--max-steps", steps]) == 0
        shown.append(capsys.readouterr().err)
    assert "Going on" not in shown[0] and "nothing left" not in shown[0] + shown[1]
    assert "Going on from step 1" in shown[1]
    assert "nothing left to do: this run ended at step 2" in shown[2] and "--max-steps" in shown[2]


def test_a_training_says_when_there_is_little_or_nothing_to_judge_by(places, tmp_path, capsys):
    command = ["train", "eagle3", "--target", places[1], "--output", str(tmp_path / "out"), "--device", "cpu"]
    command += ["--depth", "1", "--max-steps", "1", "--data"]
    shown = []
    for share in ("0.1", "0.5"):
        assert cli.main([*command, places[0], "--output", str(tmp_path / share), "--held-out-share", share]) == 0
        shown.append(" ".join(capsys.readouterr().err.split()))
    assert "held-out answers are too few to judge by" in shown[0] and "--held-out-share" in shown[0]
    assert "too few" not in shown[1]
    sampled = tmp_path / "sampled"
    sampled.mkdir()
    write_shard(sampled, 0, [Example((3, 4, n), (5, 6), 1.0, "self", True) for n in range(30)])
    assert cli.main([*command, str(sampled)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "and 0 greedy ones that are held out. Both must be more than none" in said and "0.2" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["5ms", "90sm", "h", "soon", ""])
def test_times_that_are_none_are_refused(text, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "eagle3", "--data", str(tmp_path), "--output", str(tmp_path), "--time-budget", text])
    assert f"{text!r} is no time; write for example 90s, 60m or 5h" in capsys.readouterr().err


def test_a_training_must_end(places, tmp_path, capsys):
    command = ["train", "eagle3", "--target", places[1], "--data", places[0], "--output", str(tmp_path)]
    assert cli.main(command) == 2
    assert "Nothing ends this training" in capsys.readouterr().err


def test_curves_need_matplotlib_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"hf_specdec\[plots\]"):
        draw([{}], tmp_path / "curves.png", "")
