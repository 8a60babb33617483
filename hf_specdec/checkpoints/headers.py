"""Headers of safetensors files: names, dtypes and shapes of tensors without their values, local or on the Hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]
from torch import Tensor

from hf_specdec.checkpoints.connection import UnreachableError, check_reach, is_known_absent

# The library's own limit; a longer one is no header.
_LONGEST = 100_000_000
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

Read = Callable[[int, int], bytes]


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file; as text it says where: "folder/model.safetensors: fc.weight".

    Attributes:
        name: in the file.
        value: the tensor; on the meta device where only its header was read.
        file: the checkpoint's folder or Hub id with the name of the file.
    """

    name: str
    value: Tensor
    file: str

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(self.value.shape)


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor.

    Attributes:
        file: it lies in.
        dtype: as safetensors spells it, such as "BF16".
        shape: of the tensor.
        start: its first byte in the file.
        stop: the byte behind its last.
        read: reads bytes of the file, from one place to another.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    read: Read

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return self.stop - self.start

    def without_values(self) -> Tensor:
        """A tensor on the meta device, of its shape and dtype."""
        return torch.empty(self.shape, dtype=_DTYPES.get(self.dtype, torch.uint8), device="meta")

    def values(self) -> Tensor | None:
        """The tensor itself, meant for small ones; `None` if the file ends before it does."""
        found = self.read(self.start, self.stop)
        if len(found) != self.num_bytes or self.dtype not in _DTYPES:
            return None
        return torch.frombuffer(bytearray(found), dtype=_DTYPES[self.dtype]).reshape(self.shape)


def of_file(path: Path, name: str) -> dict[str, TensorInfo]:
    """The tensors of a local file, which may end behind its header.

    Args:
        path: of the file.
        name: what messages call it.

    Raises:
        ValueError: if the header is damaged.
    """

    def read(start: int, stop: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    return _parsed(read, name)


def of_hub(location: str, name: str) -> dict[str, TensorInfo] | None:
    """The tensors of a file on the Hub, of which only the header is fetched; `None` if there is no such file.

    Raises:
        UnreachableError: if the Hub cannot be reached.
        ValueError: if the header is damaged.
    """
    cached = try_to_load_from_cache(location, name)
    if isinstance(cached, str):
        return of_file(Path(cached), f"{location}/{name}")
    url = hf_hub_url(location, name)

    def read(start: int, stop: int) -> bytes:
        asked = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}"}
        response = get_session().get(url, headers=asked)
        hf_raise_for_status(response)
        found = response.content
        return found[start:stop] if response.status_code == 200 else found  # 200: a server without ranges

    try:
        check_reach(location, name)
        return _parsed(read, f"{location}/{name}")
    except EntryNotFoundError:
        return None
    except Exception as error:  # the Hub's, or of the HTTP library, which is another one in every other release
        if isinstance(error, ValueError) and not isinstance(error, UnreachableError):
            raise
        if is_known_absent(location, name):
            return None
        raise error if isinstance(error, UnreachableError) else UnreachableError(location, name, error) from error


def _parsed(read: Read, name: str) -> dict[str, TensorInfo]:
    length = int.from_bytes(read(0, 8), "little")
    if not 2 <= length <= _LONGEST:
        raise ValueError(f"{name} is damaged: it has no header.")
    try:
        found: dict[str, Any] = json.loads(read(8, 8 + length))
        found.pop("__metadata__", None)
        return {tensor: _info(said, 8 + length, read, name) for tensor, said in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} is damaged: its header cannot be read ({error!r}).") from error


def _info(said: dict[str, Any], start_of_values: int, read: Read, file: str) -> TensorInfo:
    start, stop = (start_of_values + place for place in said["data_offsets"])
    return TensorInfo(file, said["dtype"], tuple(said["shape"]), start, stop, read)
