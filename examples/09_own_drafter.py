"""A drafter of your own: one file, one registry line. Exactness is not its affair: whatever it says, the text is right.

This one guesses that the last few tokens come again.

python examples/09_own_drafter.py [FOLDER_OR_HUB_ID]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.demo_model import demo_model_path
from hf_specdec.drafters import NAMED, Copy, CopySession, DraftContext, Drafter
from hf_specdec.state import DecodeState


class Echo(Drafter):
    """The strategy with its options. It may serve several calls at once, so it keeps nothing of a call.

    Args:
        period: how many tokens come again.
    """

    name = "echo"
    default_num_draft_tokens = 8

    def __init__(self, period: int = 4):
        super().__init__()
        self.period = period

    def start(self, context: DraftContext, state: DecodeState) -> CopySession:
        return _EchoSession(self.period)


class _EchoSession(CopySession):
    """The strategy at work in one call; `DraftSession` is the base of those that run a model."""

    def __init__(self, period: int):
        self.period = period

    def copies(self, state: DecodeState, limits: list[int]) -> list[Copy]:
        drafts = [state.tokens[row][-self.period :][:limit] for row, limit in zip(state.rows, limits, strict=True)]
        return [Copy(draft, [0.5] * len(draft)) for draft in drafts]  # and how sure it is of every token


NAMED["echo"] = Echo  # the registry line; in the package it stands in drafters/__init__.py

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path())
tokenizer = AutoTokenizer.from_pretrained(name)
model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(name))
inputs = tokenizer("one two three four one two three four one two", return_tensors="pt")
plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
output = model.generate(**inputs, assistant="echo", max_new_tokens=40, do_sample=False)
assert torch.equal(output, plain)
print(tokenizer.decode(output[0]), hf_specdec.last_stats(model), sep="\n")
