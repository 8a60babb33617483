"""Files of checkpoints: what the cache knows to be absent, and tensors that claim more than is stored."""

from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from hf_specdec.checkpoints import files, headers


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

    monkeypatch.setattr(headers, "try_to_load_from_cache", lambda *args: known(*args, cache_dir=tmp_path))
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
