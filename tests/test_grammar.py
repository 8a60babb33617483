"""Grammar libraries' stateful processors: valid JSON, the same text as plain, whatever the drafter."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LogitsProcessor

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from tests.models import jittered, tiny
from tests.tokenizers_for_tests import trained_tokenizer

PATTERN = r'\{"name":"[a-z]{1,6}","apples":[0-9]{1,2}\}'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "apples": {"type": "boolean"}},
    "required": ["name", "apples"],
    "additionalProperties": False,
}


class OutlinesProcessor(LogitsProcessor):
    """Walks one `outlines_core` guide a row; every new token moves its state, so no prefix may be shown twice."""

    def __init__(self, tokenizer, num_rows):
        outlines = pytest.importorskip("outlines_core")
        words: dict[str, list[int]] = {}
        for token_id in range(6, len(tokenizer)):
            words.setdefault(tokenizer.decode([token_id]), []).append(token_id)
        index = outlines.Index(PATTERN, outlines.Vocabulary(tokenizer.eos_token_id, words))
        self.guides = [outlines.Guide(index) for _ in range(num_rows)]
        self.length = None

    def __call__(self, input_ids, scores):
        if self.length is not None:
            assert input_ids.shape[1] == self.length + 1
            for guide, token in zip(self.guides, input_ids[:, -1].tolist(), strict=True):
                if not guide.is_finished():
                    guide.advance(token, return_tokens=False)
        self.length = input_ids.shape[1]
        allowed = torch.full_like(scores, -torch.inf)
        for row, guide in enumerate(self.guides):
            allowed[row, guide.get_tokens()] = 0
        return scores + allowed


def xgrammar_processor(tokenizer, num_rows):
    xgrammar = pytest.importorskip("xgrammar")
    information = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiled = xgrammar.GrammarCompiler(information, max_threads=1).compile_json_schema(
        json.dumps(SCHEMA), any_whitespace=False
    )
    return xgrammar.contrib.hf.LogitsProcessor(compiled)


@pytest.mark.parametrize("make", [OutlinesProcessor, xgrammar_processor], ids=["outlines-core", "xgrammar"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_json_is_valid_and_plains(make, num_rows):
    tokenizer = trained_tokenizer()
    target = hf_specdec.enable(tiny(vocab=len(tokenizer)))
    texts = ["apples and the dog", "the quick brown fox jumps over", "Write a short story about"][:num_rows]
    tokenizer.padding_side = "left"
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    kwargs = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    plain = target.generate(**inputs, assistant=False, logits_processor=[make(tokenizer, num_rows)], **kwargs)
    for drafter in (DraftModel(jittered(target)), PromptLookup(1, 3)):
        ours = target.generate(**inputs, assistant=drafter, logits_processor=[make(tokenizer, num_rows)], **kwargs)
        assert torch.equal(plain, ours)
    for row in plain[:, inputs["input_ids"].shape[1] :]:
        answer = json.loads(tokenizer.decode(row, skip_special_tokens=True))
        assert set(answer) == {"name", "apples"}
