"""A call that was traced, with all a report shows of it: in a file, readable without the model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_specdec.checks.findings import LEVELS, CompatReport, Finding
from hf_specdec.files import write_text
from hf_specdec.pages.pieces import Pieces, pieces_of, prompt_texts
from hf_specdec.rounds import Trace

FORMAT, VERSION = "hf_specdec run", 1


@dataclass(frozen=True)
class Run:
    """A traced call, its tokens as text.

    Attributes:
        trace: the rounds.
        prompts: every row's prompt.
        pieces: what the tokens of every round look like, by row, in the trace's order.
        about: what else is to be shown, by name, such as the target.
        findings: what a check of the pair found.

    Raises:
        ValueError: if there is not one text for every token.
    """

    trace: Trace
    prompts: list[str]
    pieces: list[list[Pieces]]
    about: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        texts = [*self.prompts, *self.about, *self.about.values()]
        texts += [text for turn in self.pieces for part in turn for text in (*part.drafted, *part.emitted)]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("prompts, about and pieces must hold texts.")
        tokens = [[(len(part.drafted), len(part.emitted)) for part in turn.rows] for turn in self.trace.rounds]
        found = [[(len(part.drafted), len(part.emitted)) for part in turn] for turn in self.pieces]
        if tokens != found or len(self.prompts) != len(self.trace.prompts):
            raise ValueError("there must be one text for every prompt and for every token of every round.")

    @classmethod
    def of(
        cls,
        trace: Trace,
        tokenizer: PreTrainedTokenizerBase,
        about: dict[str, str] | None = None,
        check: CompatReport | None = None,
    ) -> Run:
        """Reads a trace with the target's tokenizer.

        Args:
            trace: of one call.
            tokenizer: the target's.
            about: what else is to be shown, by name.
            check: the report of `hf_specdec.check`, if its findings are to be shown.
        """
        findings = [] if check is None else list(check.findings)
        return cls(trace, prompt_texts(trace, tokenizer), pieces_of(trace, tokenizer), about or {}, findings)

    def save(self, path: str | Path) -> Path:
        """Writes the run as JSON; the file appears whole."""
        parts = {name: getattr(self, name) for name in ("prompts", "about")}
        parts["pieces"] = [[asdict(pieces) for pieces in turn] for turn in self.pieces]
        parts["findings"] = [asdict(finding) for finding in self.findings]
        document = {"format": FORMAT, "version": VERSION, "trace": self.trace.to_dict(), **parts}
        return write_text(Path(path), json.dumps(document) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Reads what `save` has written.

        Raises:
            ValueError: if the file holds something else.
            FileNotFoundError: if there is no such file.
        """
        try:
            return _run_from(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # no JSON, no UTF-8, or not a run's
            raise ValueError(f"{path} is no run as hf-specdec generate --trace writes it: {error}") from error


def _run_from(document: Any) -> Run:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f'it does not say "format": "{FORMAT}".')
    if document.get("version") != VERSION:
        raise ValueError(f"version={document.get('version')!r} is unknown; this release reads {VERSION}.")
    try:
        pieces = [[Pieces(**texts) for texts in turn] for turn in document["pieces"]]
        findings = [Finding(**_checked_finding(found)) for found in document["findings"]]
        return Run(Trace.from_dict(document["trace"]), document["prompts"], pieces, document["about"], findings)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"a part is missing or of another type ({type(error).__name__}: {error}).") from error


def _checked_finding(found: dict[str, str]) -> dict[str, str]:
    if found["level"] not in LEVELS or not all(isinstance(text, str) for text in found.values()):
        raise ValueError(f"a finding must hold texts, and a level of {', '.join(LEVELS)}.")
    return found
