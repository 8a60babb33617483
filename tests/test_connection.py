"""Without a connection, a name that is nowhere is refused within seconds; a connection that is late or slow is used."""

from __future__ import annotations

import importlib
import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from huggingface_hub.errors import HTTPError

import hf_specdec
from hf_specdec.checkpoints import connection, files, recognise
from hf_specdec.cli import main
from hf_specdec.loading import load_target
from tests.models import prompts, tiny
from tests.test_checkpoint_files import cached_without_safetensors
from tests.test_encoder_decoder import built, t5
from tests.tokenizers_for_tests import save_tiny

HTTP = importlib.import_module(HTTPError.__module__)  # the library that the Hub's client has
MISTYPED = "org/mistyped"


class Clock:
    """Time that passes at once for whoever sleeps."""

    def __init__(self):
        self.slept, self._real = 0.0, time.monotonic

    def sleep(self, seconds):
        self.slept += seconds

    def now(self):
        return self._real() + self.slept


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(time, "monotonic", clock.now)
    monkeypatch.setattr(connection, "_outcomes", {})
    return clock


@pytest.fixture
def nobody(hub, clock, monkeypatch):
    """A Hub at a port where nobody listens; tells how long one has waited for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    return clock


def generated(target):
    hf_specdec.enable(target).generate(prompts(1)[0], assistant=MISTYPED, max_new_tokens=2)


WAYS = {
    "load_drafter": lambda: hf_specdec.load_drafter(MISTYPED, tiny()),
    "load_drafter of a revision": lambda: hf_specdec.load_drafter(MISTYPED, tiny(), revision="main"),
    "assistant": lambda: generated(tiny()),
    "assistant of an encoder-decoder": lambda: generated(built(t5)),
    "load_target": lambda: load_target(MISTYPED),
    "check": lambda: hf_specdec.check(tiny(), MISTYPED),
    "check of two names": lambda: hf_specdec.check("org/wrong", MISTYPED),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_is_nowhere_is_refused_in_seconds(way, nobody):
    with pytest.raises(ValueError, match=r"cannot be reached|could not be opened at revision") as refused:
        WAYS[way]()
    assert "org/" in str(refused.value)
    assert nobody.slept < 4


@pytest.mark.parametrize("command", ["generate", "report"])
def test_commands_refuse_it_in_one_line(command, nobody, capsys):
    assert main([command, "--target", MISTYPED, "--prompt", "x"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"hf-specdec {command}: {MISTYPED} is no folder") and "cannot be reached" in said
    assert nobody.slept < 4


def test_a_place_that_cannot_be_a_name_is_refused_without_asking(nobody):
    with pytest.raises(ValueError, match="could not be opened"):
        load_target("no/such/folder")
    assert nobody.slept == 0


class Flaky:
    """A session in which the first requests end in an error."""

    def __init__(self, errors, session):
        self.errors, self.session = errors, session

    def head(self, url, **options):
        if self.errors:
            raise self.errors.pop()
        return self.session.head(url, **options)


# What connecting ends in, attempt by attempt, on connections that the client is able to use.
LATE = {
    "made at the third attempt": ["ConnectError", "ConnectError"],
    "slow to answer": ["ReadTimeout"] * 9,
    "broken off": ["RemoteProtocolError"] * 9,
}


@pytest.mark.parametrize("case", LATE)
def test_a_connection_that_is_late_is_used(case, hub, clock, monkeypatch, tmp_path):
    save_tiny(tmp_path / "target")
    hub.add("org/target", tmp_path / "target")
    session = Flaky([getattr(HTTP, name)("so it is") for name in LATE[case]], connection.get_session())
    monkeypatch.setattr(connection, "get_session", lambda: session)
    model, _ = load_target("org/target", "float32", "cpu")
    assert model.config.vocab_size


def test_nothing_is_tried_again_where_connecting_takes_long(hub, clock, monkeypatch):
    """As where packets are dropped: the system has tried for ten seconds by itself."""
    tried = []

    def head(url, **options):
        tried.append(options["timeout"])
        clock.sleep(options["timeout"])
        raise HTTP.ConnectTimeout("timed out")

    monkeypatch.setattr(connection, "get_session", lambda: SimpleNamespace(head=head))
    for _ in range(2):  # the outcome is remembered
        with pytest.raises(connection.UnreachableError, match="timed out"):
            connection.check_reach(MISTYPED, "config.json")
    assert tried == [huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT]


def test_without_a_connection_the_cache_says_what_there_is(nobody, monkeypatch):
    folder = Path(huggingface_hub.constants.HF_HUB_CACHE)
    cached_without_safetensors(folder)
    (folder / "models--some--head" / "snapshots" / ("a" * 40) / "config.json").write_text("{}")
    assert files.read_config("some/head") == {}
    assert files.fetch("some/head", "model.safetensors") is None
    with pytest.raises(ValueError, match=r"its pytorch_model\.bin is not in the cache"):
        files.fetch("some/head", "pytorch_model.bin")
    assert nobody.slept < 4  # the outcome is remembered


def test_weights_that_may_be_a_pickle_on_the_hub_are_not_taken_for_a_models(nobody):
    folder = Path(huggingface_hub.constants.HF_HUB_CACHE)
    cached_without_safetensors(folder)
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "models--some--head" / "snapshots" / ("a" * 40) / "config.json").write_text(json.dumps(config))
    with pytest.raises(connection.UnreachableError, match=r"its pytorch_model\.bin is not in the cache"):
        recognise("some/head")


def test_a_part_that_cannot_be_reached_is_not_called_missing(nobody):
    folder = Path(huggingface_hub.constants.HF_HUB_CACHE)
    cached_without_safetensors(folder)
    index = {"weight_map": {"fc.weight": "model-00001-of-00001.safetensors"}}
    inside = folder / "models--some--head"
    (inside / ".no_exist" / ("a" * 40) / "model.safetensors.index.json").unlink(missing_ok=True)
    (inside / "snapshots" / ("a" * 40) / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(connection.UnreachableError, match=r"its model-00001-of-00001\.safetensors is not in the cache"):
        files.read_headers("some/head")


def test_a_proxy_that_refuses_is_an_error_of_one_line(hub, monkeypatch):
    def refused(*_, **__):
        raise HTTP.ProxyError("403 Forbidden")

    monkeypatch.setattr(connection, "get_session", lambda: SimpleNamespace(head=refused))
    monkeypatch.setattr(files, "hf_hub_download", refused)
    monkeypatch.setattr(files, "snapshot_download", refused)
    for revision in (None, "main"):
        with pytest.raises(ValueError, match=r"org/mistyped could not be opened.*403 Forbidden"):
            hf_specdec.load_drafter(MISTYPED, tiny(), revision=revision)
