"""What a target says about texts: the hidden states that recipes read, kept on disk once they are known.

One file an example, so the store may grow with the data, survives a kill at any moment and is shared by processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hf_specdec import host
from hf_specdec.files import whole
from hf_specdec.fingerprints import TargetFingerprint
from hf_specdec.training.examples import Example, write_whole

RECORD_NAME = "features.json"


@dataclass(frozen=True)
class Text:
    """An example with what the target computed over it.

    Attributes:
        tokens: prompt and answer, shape (L,).
        prompt_length: tokens of the prompt.
        taps: tapped hidden states side by side, shape (L, T * number of taps).
        last: the state behind the final norm from the prompt's last token on, shape (L - prompt_length + 1, T): what
            the output layer reads. Row i scores token `prompt_length + i`.
    """

    tokens: Tensor
    prompt_length: int
    taps: Tensor
    last: Tensor

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt_length


class FeatureStore:
    """Hidden states of a target over examples.

    Args:
        target: the model.
        taps: indices into its `hidden_states` (see `host.tapped`); may be empty.
        folder: where states are kept; `None` computes them anew every time.
        max_bytes: the most the folder may hold; examples beyond it are computed anew every time.
        device: where texts are handed out.

    Raises:
        ValueError: if the folder holds states of another target, or in another dtype.
    """

    def __init__(
        self, target: Any, taps: Sequence[int], folder: Path | None = None, max_bytes: int = 0, device: Any = None
    ):
        self.target, self.taps, self.folder, self.max_bytes = target, tuple(taps), folder, max_bytes
        self.device = torch.device(device) if device is not None else target.device
        self.num_bytes = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._refuse_other_states(folder / RECORD_NAME)
            self.num_bytes = sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))

    def _refuse_other_states(self, record: Path) -> None:
        """Files are named after their texts alone, so the folder says whose states they hold."""
        own = {
            "target_fingerprint": TargetFingerprint.of(self.target).to_dict(),
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }
        if not record.is_file():  # new, or of a release that kept no record
            write_whole(record, json.dumps(own) + "\n")
        elif json.loads(record.read_text(encoding="utf-8")) != own:
            raise ValueError(
                f"{record.parent} holds hidden states of another target or dtype ({record.name}); give another folder "
                "with --cache, or remove that one."
            )

    def bytes_of(self, examples: Sequence[Example]) -> int:
        """How much room the states of these examples take."""
        width, size = host.hidden_size(self.target), torch.finfo(self.target.dtype).bits // 8
        rows = sum(
            (len(example.prompt) + len(example.answer)) * len(self.taps) + len(example.answer) + 1
            for example in examples
        )
        return rows * width * size

    def texts(self, examples: Sequence[Example]) -> list[Text]:
        """The examples with the target's states, read from disk or computed."""
        found = [self._read(example) for example in examples]
        missing = [place for place, text in enumerate(found) if text is None]
        if missing:
            computed = self._computed([examples[place] for place in missing])
            for place, text in zip(missing, computed, strict=True):
                found[place] = text
                self._write(examples[place], text)
        return [text for text in found if text is not None]

    @torch.no_grad()
    def _computed(self, examples: Sequence[Example]) -> list[Text]:
        """One pass over the examples, padded on the right, where causal models see nothing of the padding."""
        rows = [[*example.prompt, *example.answer] for example in examples]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.target.device)
        depth = host.num_layers(self.target)
        with host.tapped(self.target, {*self.taps, depth}) as found:
            self.target.get_decoder()(input_ids=tokens, use_cache=False)
        texts = []
        for place, (example, row) in enumerate(zip(examples, rows, strict=True)):
            states = [found[tap][0][place, : len(row)] for tap in self.taps]
            taps = torch.cat(states, dim=-1) if states else tokens.new_zeros(len(row), 0, dtype=self.target.dtype)
            last = found[depth][0][place, len(example.prompt) - 1 : len(row)]
            texts.append(self._placed(Text(tokens[place, : len(row)], len(example.prompt), taps, last.clone())))
        return texts

    def _placed(self, text: Text) -> Text:
        tokens, taps, last = (states.to(self.device) for states in (text.tokens, text.taps, text.last))
        return Text(tokens, text.prompt_length, taps, last)

    def _path(self, example: Example) -> Path | None:
        if self.folder is None:
            return None
        ids = numpy.array([self.taps, (len(example.prompt),), example.prompt, example.answer], dtype=object)
        name = blake2b(numpy.concatenate([*map(numpy.int64, ids)]).tobytes(), digest_size=12).hexdigest()
        return self.folder / name[:2] / f"{name[2:]}.safetensors"

    def _read(self, example: Example) -> Text | None:
        path = self._path(example)
        if path is None or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                taps, last = file.get_tensor("taps"), file.get_tensor("last")
        except (SafetensorError, OSError):  # cut short by a full disk or a broken machine: made anew
            return None
        tokens = torch.tensor([*example.prompt, *example.answer])
        return self._placed(Text(tokens, len(example.prompt), taps, last))

    def _write(self, example: Example, text: Text) -> None:
        path = self._path(example)
        if path is None:
            return
        content = save({"taps": text.taps.cpu().contiguous(), "last": text.last.cpu().contiguous()})
        if self.num_bytes + len(content) > self.max_bytes:
            return
        path.parent.mkdir(exist_ok=True)
        with whole(path) as part:
            part.write_bytes(content)
        self.num_bytes += len(content)
