"""Does this drafter fit this target? The whole check, for users."""

from __future__ import annotations

from typing import Any

from hf_specdec.checks.findings import CompatReport, Measurement
from hf_specdec.checks.measure import measure as measured
from hf_specdec.checks.memory import bill
from hf_specdec.checks.pair import findings_on
from hf_specdec.checks.sides import Side, drafter_sides, target_side
from hf_specdec.drafters import DraftModel
from hf_specdec.generation import resolve_assistant
from hf_specdec.loading import load_model, placement
from hf_specdec.options import check_count


def check(
    target: Any,
    drafter: Any,
    *,
    tokenizer: Any = None,
    drafter_tokenizer: Any = None,
    context: int | None = None,
    batch: int = 1,
    measure: bool = False,
    dtype: str = "bfloat16",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> CompatReport:
    """Says whether a drafter fits a target, and what it costs, without loading weights.

    Of folders and Hub repositories only settings, tokenizers and the headers of safetensors files are read.

    Args:
        target: a folder, a Hub id or a Transformers model.
        drafter: a folder, a Hub id, a Transformers model, a drafter, or the name of a strategy.
        tokenizer: the target's; by default the one beside its weights.
        drafter_tokenizer: the drafter's; likewise.
        context: how long texts are to get, in tokens; by default as long as the target can read.
        batch: rows to be generated together.
        measure: whether to load both and to measure a few rounds, unless an error was found.
        dtype: for measuring, of what is not loaded yet.
        device: for measuring; by default an accelerator if there is one.
        trust_remote_code: whether code of the repositories may run.

    Returns:
        Findings with level "ok", "warning" or "error", the bill in memory, and what was measured.

    Raises:
        ValueError: if there is no such target or drafter, or an option is out of range.
    """
    check_count("batch", batch)
    if context is not None:
        check_count("context", context)
    theirs = target_side(target, tokenizer, trust_remote_code)
    ours = drafter_sides(drafter, theirs, drafter_tokenizer, trust_remote_code)
    report = CompatReport(
        target=theirs.name,
        drafter=" + ".join(side.name for side in ours),
        findings=tuple(findings_on(theirs, ours, context, batch)),
        bill=bill(theirs, ours, context, batch),
    )
    if not measure or report.errors:
        return report
    found = _measured(target, theirs, drafter, ours, batch, dtype, device)
    return CompatReport(report.target, report.drafter, report.findings, report.bill, found)


def _measured(
    target: Any, theirs: Side, drafter: Any, ours: list[Side], batch: int, dtype: str, device: str | None
) -> Measurement:
    model = load_model(target, *placement(dtype, device)) if isinstance(target, str) else theirs.model
    if len(ours) == 1 and ours[0].kind == "causal-lm" and isinstance(drafter, str):
        # Both tokenizers are known here, so that output layers padded to different sizes can be served.
        opened = load_model(drafter, model.dtype, model.device)
        drafter = DraftModel(opened, tokenizer=ours[0].tokenizer, target_tokenizer=theirs.tokenizer)
    return measured(model, resolve_assistant(drafter, model), theirs.tokenizer, batch)
