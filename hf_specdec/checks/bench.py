"""`hf-specdec bench`: how much faster is which way of generating, on one's own questions and machine?

All variants answer every question in one process, in rotating order, so that whatever else slows the machine
down meets all of them; speed-ups are paired, question by question.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_specdec.checks.documents import environment, publish, refuse_other_file, settings_of, write_json
from hf_specdec.checks.questions import Question, read_questions
from hf_specdec.checks.resuming import Kept, KeptSetting
from hf_specdec.checks.running import Bench, clock, logit_gap, rotated
from hf_specdec.checks.settings import BenchOptions, combinations
from hf_specdec.checks.tables import profile_table, setting_title, table
from hf_specdec.checks.variants import VARIANTS

__all__ = [
    "VARIANTS",
    "Bench",
    "BenchOptions",
    "Question",
    "clock",
    "combinations",
    "environment",
    "logit_gap",
    "publish",
    "read_questions",
    "rotated",
    "run_bench",
    "settings_of",
    "write_json",
]


def run_bench(
    options: BenchOptions | Sequence[BenchOptions],
    console: Console | None = None,
    output: Path | None = None,
    profile: bool = False,
) -> dict[str, Any]:
    """Measures all variants in all settings and returns the whole result, ready for JSON.

    Every setting begins with a target and drafters opened anew, so that none remembers another's answers.

    Args:
        options: what to measure; several settings ask the same questions (see `combinations`).
        console: where to show progress and tables; `None` shows nothing.
        output: a file for the result. What is finished is kept beside it until it is written: called again with the
            same options, a killed benchmark goes on.
        profile: whether to show a second table, of seconds by phase and tokens by drafter.

    Returns:
        For a single setting `environment`, `options`, `variants` (see `report.summary`; with `differences` from plain
        where greedy outputs part), `batches` (what every batch took, in the order in which the variants ran) and
        where it was resumed `resumed_at` (by which groups; drafters that remember began anew there). For several
        `settings`, a list of these.

    Raises:
        ValueError: if a file, model or category does not exist or does not fit, the output lies in no folder that
            exists or is a file that holds no such document, or an unfinished benchmark of other options lies beside it.
    """
    if output is not None:
        refuse_other_file(output)
    settings = [options] if isinstance(options, BenchOptions) else list(options)
    questions = read_questions(settings[0].questions, settings[0].categories, settings[0].limit)
    kept = None if output is None else Kept(output, settings, questions)
    documents = []
    for number, setting in enumerate(settings):
        documents.append(_document(setting, questions, console, None if kept is None else kept.setting(number)))
        if console is not None:
            _show(documents[-1], console, profile)
    document = documents[0] if len(documents) == 1 else {"settings": documents}
    if output is not None and kept is not None:
        write_json(document, output)
        kept.discard()
    return document


def _document(
    setting: BenchOptions, questions: list[Question], console: Console | None, kept: KeptSetting | None
) -> dict[str, Any]:
    if kept is not None and (finished := kept.document()) is not None:
        return finished
    gc.collect()  # the models of the setting before are in cycles, and two of them may not fit
    document = Bench(setting).document(questions, console, kept=kept)
    if kept is not None:
        kept.finish(document)
    return document


def _show(document: dict[str, Any], console: Console, profile: bool) -> None:
    console.print(setting_title(document), style="bold", markup=False, highlight=False)
    console.print(table(document))
    if profile:
        console.print(profile_table(document))
