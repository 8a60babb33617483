"""Where a drafter's weights come from: a block in its config.json, and what it says about the target at hand."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_specdec import host
from hf_specdec.files import write_text
from hf_specdec.fingerprints import TargetFingerprint
from hf_specdec.versions import commit, versions
from hf_specdec.vocabulary import tokenizer_fingerprint

KEY = "hf_specdec"
_SETTINGS = "config.json"
# Names of files with weights that could be opened in place of new ones: one of all, or parts and their index.
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Provenance:
    """What is recorded with a drafter's weights.

    Attributes:
        kind: of drafter: "eagle3", "p-eagle", "pard" or "draft".
        target: the target's Hub id, or the name of its folder.
        target_fingerprint: tells the target from others.
        target_revision: the commit of the Hub the target was opened from, if it was.
        tokenizer_fingerprint: of the target's tokenizer, if it was at hand.
        recipe: how the weights were trained; empty if nobody said.
        data: what they were trained on; empty if nobody said.
        commit: of the checkout that wrote them; `None` for an installed package.
        versions: of the packages that wrote them.
    """

    kind: str
    target: str
    target_fingerprint: TargetFingerprint
    target_revision: str | None = None
    tokenizer_fingerprint: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kind: str,
        target: PreTrainedModel,
        name: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        recipe: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
    ) -> Provenance:
        """What is known here and now.

        Args:
            kind: of drafter.
            target: the model the drafter is for.
            name: what to call the target.
            tokenizer: the target's.
            recipe: how the drafter was trained.
            data: what it was trained on.
        """
        tokens = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
        fingerprint = TargetFingerprint.of(target)
        revision = host.revision(target)
        return cls(kind, name, fingerprint, revision, tokens, recipe or {}, data or {}, commit(), versions())

    @classmethod
    def read(cls, config: dict[str, Any], location: str) -> Provenance | None:
        """What a config.json records; `None` for drafters that others have published.

        Raises:
            ValueError: if the block is damaged.
        """
        block = config.get(KEY)
        if block is None:
            return None
        try:
            fingerprint = TargetFingerprint.from_dict(block["target_fingerprint"])
            return cls(**{**block, "target_fingerprint": fingerprint})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{location}/config.json: the block {KEY!r} is damaged: {error}") from error

    def to_settings(self) -> dict[str, Any]:
        """What to add to a config.json."""
        known = {name: value for name, value in asdict(self).items() if value not in (None, {})}
        return {KEY: known}

    def check(self, target: PreTrainedModel, location: str) -> None:
        """Compares with the target at hand; says so if it is a changed copy, fine-tuned or quantised.

        Raises:
            ValueError: if it is another model.
        """
        own = TargetFingerprint.of(target)
        difference = self.target_fingerprint.difference(own)
        if difference is not None:
            raise ValueError(
                f"{location} was made for {self.target}, and the target at hand is another model: {difference}. Use "
                f"it with {self.target}, or train a drafter for this target (hf-specdec train)."
            )
        if self.target_fingerprint.agreement(own) < 1:
            logger.warning_once(
                f"{location} was made for {self.target}, of which the target at hand is a changed copy (fine-tuned, "
                "quantised or of another revision). The output stays the target's own; fewer drafted tokens may be "
                "accepted."
            )


def stamp(folder: Path, provenance: Provenance) -> None:
    """Adds a provenance to the config.json of a folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | provenance.to_settings()
    write_text(path, json.dumps(config, indent=2) + "\n")


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A folder to write files into, which are moved to `folder` when all are written, each in one step.

    A new folder appears whole. In one that exists files of the same names are replaced, and weights under other names
    removed, which would be taken for the new ones; the settings come last.

    Raises:
        ValueError: if the folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        part = Path(work) / "part"
        part.mkdir()
        yield part
        if not folder.exists():
            os.replace(part, folder)
            return
        written = {path.name for path in part.iterdir()}
        for name in sorted(written - {_SETTINGS}):
            os.replace(part / name, folder / name)
        if any(map(_WEIGHTS.fullmatch, written)):
            for path in folder.iterdir():
                if _WEIGHTS.fullmatch(path.name) and path.name not in written:
                    path.unlink()
        if _SETTINGS in written:
            os.replace(part / _SETTINGS, folder / _SETTINGS)
