"""The files of a checkpoint, local or on the Hub: settings, names and tensors. Nothing in them is executed."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hf_specdec.checkpoints import headers
from hf_specdec.checkpoints.connection import UnreachableError, check_reach, is_cached, is_known_absent
from hf_specdec.checkpoints.headers import Stored, TensorInfo

# In the order in which they are looked for; an index names several files.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Settings, weights, tokenizers and chat templates.
_FETCHED = ("*.json", "*.safetensors", "*.bin", "*.jinja", "*.model", "*.txt")


def read_config(location: str) -> dict[str, Any]:
    """The settings of a checkpoint.

    Args:
        location: a local folder or a Hub id.

    Raises:
        ValueError: if there is no `config.json`, or it is no JSON object.
    """
    path = fetch(location, "config.json")
    if path is None:
        raise ValueError(f"{location} has no config.json, so it holds no model and no drafter.")
    return read_json(path)


def weight_files(location: str) -> list[Path]:
    """The files with the tensors, safetensors before pickles.

    Raises:
        ValueError: if there are none, or an index names one that is missing.
    """
    for name in WEIGHTS:
        if (path := fetch_known(location, name)) is not None:
            return _shards(location, path) if name.endswith(".index.json") else [path]
    for name in WEIGHTS:
        fetch(location, name)  # says which of them might be on the Hub
    raise ValueError(f"{location} has no weights; looked for {', '.join(WEIGHTS)}.")


def has_weights(location: str) -> bool:
    """Whether there are files that `read_tensors` can read."""
    if read_headers(location) is not None or any(fetch_known(location, name) for name in WEIGHTS[2:]):
        return True
    return any(fetch(location, name) for name in WEIGHTS[2:])  # says so if one of them might be on the Hub


def survey(location: str) -> Mapping[str, Stored | TensorInfo]:
    """All tensors with their shapes and files, by name; of safetensors only the headers are read.

    Raises:
        ValueError: as `read_tensors`.
    """
    return read_headers(location) or read_tensors(location)


def read_headers(location: str) -> dict[str, TensorInfo] | None:
    """All tensors of a checkpoint as the headers of its safetensors files tell, nothing else being read or fetched.

    Returns:
        By name; `None` if there are no such files (weights in other formats have no header).

    Raises:
        ValueError: if a header is damaged, an index names a missing file, or the Hub cannot be reached.
    """
    try:
        if (found := _header(location, WEIGHTS[0])) is not None:
            return found
    except UnreachableError:
        if not any(is_cached(location, other) for other in WEIGHTS):
            raise
    if (index := fetch_known(location, WEIGHTS[1])) is None:
        return None
    tensors: dict[str, TensorInfo] = {}
    for name in _shard_names(index):
        if (found := _header(location, name)) is None:
            raise ValueError(f"{index} names {name}, which is missing.")
        tensors |= found
    return tensors


def _header(location: str, name: str) -> dict[str, TensorInfo] | None:
    if Path(location).is_dir():
        path = fetch(location, name)
        return None if path is None else headers.of_file(path, str(path))
    return headers.of_hub(location, name)


def read_tensors(location: str) -> dict[str, Stored]:
    """All tensors, on the CPU.

    Raises:
        ValueError: if a file is damaged or holds more than tensors, or a tensor appears in two files.
    """
    tensors: dict[str, Stored] = {}
    for path in weight_files(location):
        file = f"{location}/{path.name}"
        found = {name: Stored(name, value, file) for name, value in _tensors(path).items()}
        if twice := sorted(found.keys() & tensors.keys()):
            raise ValueError(f"{path} repeats tensors of another file: {', '.join(twice)}.")
        tensors |= found
    return tensors


@contextmanager
def expected_kinds(location: str) -> Iterator[None]:
    """Turns what settings of a wrong kind cause (a word for a number, a list for an object) into `ValueError`."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(
            f"{location}/config.json lacks a setting or holds one of an unexpected kind: {error!r}."
        ) from error


def fetch(location: str, name: str) -> Path | None:
    """One file of a checkpoint; `None` if the folder or repository has no such file.

    Raises:
        UnreachableError: if the file is not in the cache and the Hub cannot be reached.
        ValueError: if the repository does not exist.
    """
    if Path(location).is_dir():
        path = Path(location) / name
        return path if path.is_file() else None
    if Path(location).is_file():
        raise ValueError(f"{location} is a file; give the folder it lies in, or a Hub id.")
    try:
        check_reach(location, name)
        return Path(hf_hub_download(location, name))
    except (UnreachableError, LocalEntryNotFoundError) as error:
        if is_known_absent(location, name):
            return None
        raise error if isinstance(error, UnreachableError) else UnreachableError(location, name, error) from error
    except EntryNotFoundError:
        return None
    except (HTTPError, OSError, ValueError) as error:
        raise ValueError(f"{location} could not be opened: it is no folder, and the Hub said: {error}") from error


def fetch_known(location: str, name: str) -> Path | None:
    """One file of a checkpoint; `None` if there is none, or the Hub cannot be reached and the cache has none.

    For files that a checkpoint may lack: a cache tells such files from those that were never fetched only sometimes.

    Raises:
        ValueError: if the repository does not exist.
    """
    try:
        return fetch(location, name)
    except UnreachableError:
        return None


def snapshot(location: str, revision: str) -> str:
    """A Hub repository as it was at a revision, in a folder of the cache.

    Raises:
        ValueError: if the repository cannot be reached, or has no such revision.
    """
    try:
        return snapshot_download(location, revision=revision, allow_patterns=list(_FETCHED))
    except (HTTPError, OSError, ValueError) as error:
        raise ValueError(f"{location} could not be opened at revision {revision!r}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: if it holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; an object was expected.")
    return found


def _shard_names(index: Path) -> list[str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index} has no weight_map.")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, which is no file beside it.")
    return sorted(set(names.values()))


def _shards(location: str, index: Path) -> list[Path]:
    paths = []
    for name in _shard_names(index):
        path = fetch(location, name)
        if path is None:
            raise ValueError(f"{index} names {name}, which is missing.")
        paths.append(path)
    return paths


def _is_plain(name: Any, value: Any) -> bool:
    """Whether something is a tensor with a name, and has numbers one after the other."""
    is_tensor = isinstance(name, str) and isinstance(value, Tensor)
    return is_tensor and value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized


def _claims_too_much(value: Tensor) -> bool:
    """Whether a tensor repeats its storage, as an expanded one does: to compute from it may take any memory."""
    return value.numel() * value.element_size() > value.untyped_storage().nbytes()


def _refuse_unpacking(path: Path) -> None:
    """Raises `ValueError` for an archive that grows when it is unpacked: tensors are stored as they are."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > path.stat().st_size:
        raise ValueError(f"{path} would unpack to {unpacked} bytes, more than it has; it was not opened.")


def _tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    _refuse_unpacking(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors, or is damaged; it was not opened: {error}") from error
    except Exception as error:  # a pickle of a stranger's may end in any
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; tensors by name were expected.")
    if others := sorted(str(name) for name, value in found.items() if not _is_plain(name, value)):
        raise ValueError(f"{path} holds more than plain tensors by name: {', '.join(others)}.")
    if large := sorted(name for name, value in found.items() if _claims_too_much(value)):
        raise ValueError(f"{path} holds tensors that claim more bytes than are stored: {', '.join(large)}.")
    return found
