"""Pairs of small tokenizers: letters with merges of their own, and trained ones over texts of several scripts."""

from __future__ import annotations

import itertools
import json

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.models import tiny
from tests.tokenizers_for_tests import SENTENCES

SCRIPTS = [
    "Xin chào các bạn, hôm nay trời đẹp quá. Tiếng Việt có nhiều dấu thanh.",
    "人工知能は速く考える。今日は天気がいいですね。你好世界。我们一起学习。",
    "😀 smile 😊 and 👩‍👩‍👧 families 🇻🇳 🎉🎉 hooray, naïve café déjà vu",
    "    indented code\n\n\tdef f(x):\n        return x + 1  # twice  spaced\r\n",
]
SPECIAL = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>"}
LETTERS = "abcde"
PAIRS = ["".join(pair) for pair in itertools.product(LETTERS, LETTERS)]


def lettered(tokens: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over given tokens, ids in their order; tokens of two letters are merges, the first first."""
    merges = [(token[0], token[1]) for token in tokens if len(token) == 2]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def overlapping(percent: int) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """A target's tokenizer of 20 tokens and one of 20 that shares this part of them, under other ids."""
    ours = [*LETTERS, *PAIRS[:15]]
    if percent >= 25:
        shared = [*LETTERS, *PAIRS[: percent // 5 - 5]]
        theirs = [*shared, *PAIRS[15 : 35 - len(shared)]]
    else:  # another alphabet, with a few tokens in common
        theirs = [*LETTERS[: percent // 5], *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"][:20]
    assert len(theirs) == 20 and len(set(ours) & set(theirs)) * 5 == percent
    return lettered(ours), lettered(theirs[::-1])


def bytes_only(order: int = 1) -> PreTrainedTokenizerFast:
    """Three special tokens and the 256 bytes: any text has one spelling. Ids start elsewhere and go up or down."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[::order]
    tokens = [*SPECIAL.values(), *alphabet] if order > 0 else [*alphabet, *SPECIAL.values()]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL.values()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def byte_level(texts: list[str], size: int, special: dict[str, str] = SPECIAL) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = list(dict.fromkeys(special.values()))
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def sentencepiece(texts: list[str], size: int, with_space_in_front: bool = False) -> PreTrainedTokenizerFast:
    """BPE as SentencePiece does it: "▁" for spaces, bytes for unknown characters; trained. Begins texts with <bos>."""
    marks = [normalizers.Prepend("▁")] if with_space_in_front else []
    marks.append(normalizers.Replace(" ", "▁"))
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(marks)
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # no token reaches into the next word
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    merges = [tuple(pair) for pair in learned["merges"]]
    model = models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(marks)
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<unk>"
    )


def scripts(kind: str) -> PreTrainedTokenizerFast:
    """A trained tokenizer by name."""
    return {
        "english": lambda: byte_level(SENTENCES, 330),
        "scripts": lambda: byte_level([*SENTENCES[:1], *SCRIPTS], 420, SPECIAL | {"bos_token": "<end>"}),
        "pieces": lambda: sentencepiece(SENTENCES + SCRIPTS[:1], 120),
        "spaced": lambda: sentencepiece(SENTENCES + SCRIPTS[1:], 160, with_space_in_front=True),
    }[kind]()


def small(tokenizer, seed: int, layers: int = 2, scale: float = 0.15, padding: int = 0):
    """A random model over a tokenizer's ids, whose laws are neither flat nor peaked."""
    vocab = len(tokenizer) + padding
    model = tiny(seed=seed, vocab=vocab, dtype=torch.float32, num_hidden_layers=layers)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale / model.lm_head.weight.std())
    return model
