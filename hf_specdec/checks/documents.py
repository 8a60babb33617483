"""The document of a benchmark: what it says beside its figures, and how it is written."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.files import refuse_homeless, write_text
from hf_specdec.versions import commit


def write_json(document: Any, path: Path) -> None:
    """Writes a document so that the file is either whole or not there."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def refuse_other_file(path: Path) -> None:
    """Raises `ValueError` before a long run if its document could not be written, or only over what is none."""
    refuse_homeless(path)
    if path.exists() and not _is_document(path):
        raise ValueError(f"{path} holds no document of a benchmark, and would be overwritten. Name another file.")


def _is_document(path: Path) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no text
        return False
    return isinstance(found, dict) and bool({"settings", "variants"} & set(found))


def settings_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents of all settings; that of a single one is its own."""
    return document.get("settings", [document])


def publish(document: dict[str, Any], output: Path | None = None) -> None:
    """Prints a document as one line, the last of a benchmark, then keeps it in a file if one is named."""
    print(json.dumps(document), flush=True)
    if output is not None:
        write_json(document, output)


def environment(model: PreTrainedModel) -> dict[str, Any]:
    """What the figures depend on beside the options."""
    accelerated = model.device.type == "cuda"
    return {
        "hf_specdec": hf_specdec.__version__,
        "commit": commit(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(model.device) if accelerated else str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "target": model.config.name_or_path and Path(model.config.name_or_path).name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
