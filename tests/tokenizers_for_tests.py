"""A small trained tokenizer with a chat template, and folders that hold a tiny model with it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.models import tiny

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Translate the following sentence, then explain every word of it.",
    "Write a short story about a lighthouse keeper and her logbook.",
    "How many apples are left if three of the eight apples are eaten?",
]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def trained_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE over a few sentences; ids 0, 1 and 2 are padding, start and end, as in the tiny models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<start>", "<end>", "<|user|>", "<|system|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<start>",
        eos_token="<end>",
        chat_template=chat_template,
        model_max_length=256,
    )


def save_tiny(folder: Path, *, seed: int = 0, chat_template: str | None = TEMPLATE) -> str:
    """Saves a random float32 model with the tokenizer; returns the folder."""
    tokenizer = trained_tokenizer(chat_template)
    model = tiny(seed=seed, vocab=len(tokenizer), dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
