"""Files of checkpoints: what a cache tells offline, and tensors that claim more than is stored."""

from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

import hf_specdec
from hf_specdec import DraftModel
from hf_specdec.checkpoints import connection, files, headers, tokenizers
from hf_specdec.checkpoints.tokenizers import tokenizer_at
from tests import reference_heads
from tests.models import tiny
from tests.published_heads import FORMS
from tests.tokenizers_for_tests import trained_tokenizer


def cached_without_safetensors(folder: Path) -> None:
    repository, commit = folder / "models--some--head", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / ".no_exist" / commit).mkdir(parents=True)
    (repository / ".no_exist" / commit / "model.safetensors").touch()


def test_what_the_cache_knows_to_be_absent_is_absent_offline(tmp_path, monkeypatch):
    cached_without_safetensors(tmp_path)
    known = headers.try_to_load_from_cache

    def unreachable(*args, **kwargs):
        raise LocalEntryNotFoundError("offline")

    for module in (headers, connection):
        monkeypatch.setattr(module, "try_to_load_from_cache", lambda *args: known(*args, cache_dir=tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(headers, "get_session", unreachable)
    monkeypatch.setattr(files, "hf_hub_download", unreachable)
    assert files.fetch("some/head", "model.safetensors") is None
    assert headers.of_hub("some/head", "model.safetensors") is None
    with pytest.raises(ValueError, match="cannot be reached"):
        files.fetch("some/head", "config.json")


def test_tensors_that_claim_more_than_is_stored_are_refused(tmp_path):
    torch.save({"fc.weight": torch.zeros(1).expand(2**10, 2**10)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin holds tensors that claim .* fc.weight"):
        files.read_tensors(str(tmp_path))


@pytest.fixture
def fetched(hub, monkeypatch, tmp_path):
    """Puts a folder on the Hub, fetches what is there, and cuts the line: the cache then knows of no absent file."""

    def fetch(folder: Path) -> str:
        hub.add("org/drafter", folder)
        huggingface_hub.snapshot_download("org/drafter")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        hub.requests.clear()
        return "org/drafter"

    yield fetch
    assert hub.requests == []


@pytest.mark.parametrize(
    "name", ["yuhuili/EAGLE-LLaMA3-Instruct-8B", "yuhuili/EAGLE3-LLaMA3.1", "nebius/EAGLE3-gpt-oss-20b"]
)
def test_a_head_that_was_fetched_as_a_whole_opens_offline(name, fetched, tmp_path):
    """With weights in a pickle too, and without tokenizer files, of which it has none."""
    form, target = FORMS[name], tiny(num_hidden_layers=8)
    location = fetched(Path(reference_heads.write(tmp_path / "a", form.config, form.tensors, pickled=form.is_pickled)))
    drafter = hf_specdec.load_drafter(location, target)
    assert drafter.head.config.taps == form.taps
    target.save_pretrained(tmp_path / "target")
    findings = hf_specdec.check(str(tmp_path / "target"), location).findings
    assert "error" not in {finding.level for finding in findings}


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_model_without_tokenizer_files_opens_offline(has_tokenizer, fetched, tmp_path, monkeypatch):
    tokenizer, said = trained_tokenizer(), []
    target = tiny(vocab=len(tokenizer))
    target.save_pretrained(tmp_path / "model")
    if has_tokenizer:
        tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(tokenizers.logger, "warning_once", said.append)
    location = fetched(tmp_path / "model")
    drafter = hf_specdec.load_drafter(location, target)
    assert isinstance(drafter, DraftModel) and (drafter.tokenizer is not None) == has_tokenizer
    assert (tokenizer_at(location) is not None) == has_tokenizer
    assert any("no tokenizer is known" in text for text in said) != has_tokenizer
    findings = hf_specdec.check(str(tmp_path / "model"), location).findings
    assert "error" not in {finding.level for finding in findings}


def test_weights_that_were_never_fetched_are_missed_offline(fetched, tmp_path):
    location = fetched(Path(reference_heads.write(tmp_path / "a", FORMS["yuhuili/EAGLE3-LLaMA3.1"].config, None)))
    with pytest.raises(ValueError, match=r"model\.safetensors is not in the cache.* cannot be reached"):
        hf_specdec.load_drafter(location, tiny(num_hidden_layers=8))
