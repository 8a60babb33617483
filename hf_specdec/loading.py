"""Opens targets by folder or Hub id, and turns conversations into prompts: what commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.checkpoints.connection import check_reach
from hf_specdec.demo_model import HUB_ID, MODEL_NAME, demo_model_path

DTYPES = ("bfloat16", "float32", "float16")

Chat = list[dict[str, str]]


def load_target(
    location: str | None, dtype: str = "bfloat16", device: str | None = None
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Opens a causal language model and its tokenizer, ready for left-padded batches.

    Args:
        location: a folder or a Hub id; `None` means the embedded demo model.
        dtype: one of `DTYPES`.
        device: such as "cpu" or "cuda"; `None` means the accelerator if there is one.

    Raises:
        ValueError: if there is no such model, dtype or device.
    """
    numbers, place = placement(dtype, device)
    folder = str(_demo_model()) if location is None else location
    tokenizer = _open(AutoTokenizer, folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return load_model(folder, numbers, place), tokenizer


def placement(dtype: str, device: str | None) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device that names stand for; see `load_target`.

    Raises:
        ValueError: if there is no such dtype or device.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; use one of {', '.join(DTYPES)}.")
    return getattr(torch, dtype), _device(device)


def load_model(location: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Opens a causal language model for inference.

    Raises:
        ValueError: if `location` is no folder or Hub id of one.
    """
    return _open(AutoModelForCausalLM, location, dtype=dtype).to(device).eval()


def target_name(model: PreTrainedModel) -> str:
    """What a model is called wherever it lies: its Hub id, or the name of its folder."""
    location = str(model.config.name_or_path)
    if not Path(location).is_dir():
        return location or type(model).__name__
    name = Path(location).resolve().name
    return HUB_ID if name == MODEL_NAME else name


def encode(
    tokenizer: PreTrainedTokenizerBase, chats: list[Chat], device: torch.device, use_template: bool = True
) -> dict[str, Tensor]:
    """Makes a batch of prompts, padded on the left: `input_ids` and `attention_mask`, each (B, P).

    Args:
        tokenizer: of the target. Without a chat template the messages are joined by blank lines.
        chats: one list of messages a prompt, each with `role` and `content`.
        device: where the tensors go.
        use_template: whether to apply the tokenizer's chat template, if it has one.
    """
    templated = use_template and tokenizer.chat_template is not None
    texts = [_templated(tokenizer, chat) if templated else _joined(chat) for chat in chats]
    encoded = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, add_special_tokens=not templated)
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _templated(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def _joined(chat: Chat) -> str:
    return "\n\n".join(message["content"] for message in chat)


def _open(kind: Any, location: str, **arguments: Any) -> Any:
    check_reach(location, "config.json")
    try:
        return kind.from_pretrained(location, **arguments)
    except (HTTPError, OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{location!r} could not be opened; give a folder or a Hub id of a causal language model "
            f"with a tokenizer. Transformers said: {error}"
        ) from error


def _demo_model() -> Any:
    try:
        return demo_model_path()
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _device(name: str | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is unknown; use for example cpu, cuda or cuda:1.") from error
    usable = "cpu" if accelerator is None else f"cpu or {accelerator.type}"
    if device.type not in usable.split(" or "):
        raise ValueError(f"device={name!r} is not there on this machine; use {usable}.")
    return device
