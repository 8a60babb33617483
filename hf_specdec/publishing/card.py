"""The model card of a drafter, written from recorded facts only: what no file says, the card does not say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from yaml import YAMLError

from hf_specdec.checkpoints import files
from hf_specdec.files import write_text
from hf_specdec.provenance import Provenance

CARD_NAME = "README.md"
MARK = "<!-- Written by hf-specdec from recorded facts. -->"

_TITLES = {
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head, which drafts from the target's hidden states, as chains or trees",
    "p-eagle": "a P-EAGLE head, which drafts all tokens of a round in one pass over the target's hidden states",
    "pard": "a PARD model, a small language model that drafts all tokens of a round in one pass",
    "draft": "a small language model that drafts one token after the other",
}

_USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec

target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{target}")
hf_specdec.enable(target)

chat = [{{"role": "user", "content": "Why do people enjoy listening to music?"}}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = target.generate(**inputs, assistant="{drafter}", max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))
print(hf_specdec.last_stats(target))
"""


@dataclass(frozen=True)
class Facts:
    """What the files of a folder say.

    Attributes:
        provenance: of the weights.
        training: the record of the training (training.json); empty without one.
        metrics: its evaluations (metrics.jsonl).
        benches: documents of `hf-specdec bench` (bench*.json), by file name.
        checks: reports of `hf-specdec check --json` (check*.json), by file name.
    """

    provenance: Provenance
    training: dict[str, Any]
    metrics: list[dict[str, Any]]
    benches: dict[str, dict[str, Any]]
    checks: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> Facts:
        """Reads a folder.

        Raises:
            ValueError: if its config.json records no provenance, or a file is damaged.
        """
        provenance = Provenance.read(files.read_config(str(folder)), str(folder))
        if provenance is None:
            raise ValueError(
                f"{folder}/config.json does not say what the drafter was made for; write it with save_pretrained or "
                "hf-specdec train, or give the folder a README.md of your own."
            )
        training = files.read_json(folder / "training.json") if (folder / "training.json").is_file() else {}
        log = folder / "metrics.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
        benches, checks = (
            {p.name: files.read_json(p) for p in sorted(folder.glob(name))} for name in ("bench*.json", "check*.json")
        )
        try:
            metrics = [json.loads(line) for line in lines if line.strip()]
        except ValueError as error:
            raise ValueError(f"{log} is damaged ({error}); mend it or remove it.") from error
        return cls(provenance, training, metrics, benches, checks)


def write_card(folder: str | Path, repo_id: str, license: str | None = None) -> Path:
    """Writes README.md into a drafter's folder. One that somebody else has written is left alone.

    Args:
        folder: with config.json and, as far as they are to be in the card, training.json, metrics.jsonl, bench*.json
            and check*.json.
        repo_id: under which the drafter will be found.
        license: an id the Hub knows, such as "apache-2.0"; that of the card that is there by default.

    Returns:
        The card's path.

    Raises:
        ValueError: if the name is not like "org/name", config.json records no provenance, or a file is damaged.
    """
    check_repo_id(repo_id)
    path = Path(folder) / CARD_NAME
    if not path.parent.is_dir():
        raise ValueError(f"{folder} is no folder; give one with a drafter's config.json and model.safetensors.")
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if before and MARK not in before:
        return path
    if license is None and before:
        license = _license(before, path)
    facts = Facts.of(Path(folder))
    metadata = _metadata(facts, license).to_yaml()
    text = f"---\n{metadata}\n---\n\n{MARK}\n\n" + "\n".join(_sections(facts, repo_id))
    return write_text(path, text)


def check_repo_id(repo_id: str) -> None:
    """Raises `ValueError` unless a name has two parts: with one alone nobody could open the drafter by id."""
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise ValueError(f"repo_id={repo_id!r} must be like org/name.")


def _license(card: str, path: Path) -> str | None:
    """The license that a card names."""
    try:
        return ModelCard(card, ignore_metadata_errors=True).data.get("license")
    except YAMLError as error:
        raise ValueError(f"The metadata of {path} cannot be read ({error}); mend or remove the file.") from error


def usage(facts: Facts, repo_id: str) -> str:
    """The snippet a user pastes."""
    return _USAGE.format(target=facts.provenance.target, drafter=repo_id)


def _metadata(facts: Facts, license: str | None) -> ModelCardData:
    provenance = facts.provenance
    prompts = (provenance.data.get("settings") or {}).get("prompts") or ""
    return ModelCardData(
        license=license,
        library_name="hf_specdec",
        pipeline_tag="text-generation",
        base_model=provenance.target if "/" in provenance.target else None,
        datasets=[prompts.split(":")[1]] if prompts.startswith("hub:") else None,
        metrics=["mean_acceptance_length", "speedup"] if facts.benches else None,
        tags=["speculative-decoding", "draft-model", provenance.kind],
    )


def _sections(facts: Facts, repo_id: str) -> list[str]:
    provenance = facts.provenance
    revision = f" (revision `{provenance.target_revision}`)" if provenance.target_revision else ""
    text = [
        f"# {repo_id.split('/')[-1]}",
        "",
        f"This is {_TITLES.get(provenance.kind, provenance.kind)}. It drafts for `{provenance.target}`{revision} and "
        "leaves what that says as it is: greedy output is the target's own, sampled output has the target's own "
        "distribution.",
        "",
        "```python",
        usage(facts, repo_id).rstrip(),
        "```",
        "",
    ]
    for name, document in facts.benches.items():
        for setting in document.get("settings", [document]):  # of a benchmark with several
            text += _section(name, "hf-specdec bench", _bench_section, setting)
    text += _section("metrics.jsonl", "hf-specdec train", _training_section, facts)
    for name, report in facts.checks.items():
        text += _section(name, "hf-specdec check --json", _check_section, report)
    text += ["## Made with", "", ", ".join(f"{name} {value}" for name, value in provenance.versions.items()), ""]
    if provenance.commit:
        text += [f"Commit `{provenance.commit}` of hf_specdec.", ""]
    return text


def _section(name: str, writer: str, make: Callable[[Any], list[str]], content: Any) -> list[str]:
    """A part of the card.

    Raises:
        ValueError: if the file it is made from says other things than what writes such files.
    """
    try:
        return make(content)
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(f"{name} is not as {writer} writes it ({error!r}); write it anew or remove it.") from error


def _bench_section(document: dict[str, Any]) -> list[str]:
    options, where = document["options"], document["environment"]
    asked = next(iter(document["variants"].values()))["total"]["questions"]
    drafted = options.get("num_draft_tokens")
    text = [
        "## Measured" + (f", {drafted} drafted tokens a round" if drafted else ""),
        "",
        f"{asked} questions of `{options['questions']}`, temperature {options['temperature']:g}, at most "
        f"{options['max_new_tokens']} new tokens, batch size {options['batch_size']}, {where['dtype']} on "
        f"{where['cpu'] if where['device'] == 'cpu' else where['device']} ({where['threads']} "
        f"thread{'s' if where['threads'] != 1 else ''}), torch "
        f"{where['torch']}, transformers {where['transformers']}.",
        "",
        "| | tokens per target pass | speed-up over plain generation | identical answers |",
        "|---|---|---|---|",
    ]
    for name, figures in document["variants"].items():
        total, mean = figures["total"], figures["geometric_mean"]
        identical = "" if total["identical"] is None else f"{total['identical']} of {total['questions']}"
        length = f"{total['mean_acceptance_length']:.2f}"
        text.append(f"| {short_variant(name)} | {length} | {mean['speedup']:.2f} | {identical} |")
    return [*text, "", "Speed-ups are geometric means over the categories of questions.", ""]


def short_variant(name: str) -> str:
    """A variant's name without the folders of its drafter."""
    kind, equals, location = name.partition("=")
    return kind + equals + Path(location).name if equals else kind


def _training_section(facts: Facts) -> list[str]:
    recipe = facts.provenance.recipe or facts.training.get("recipe") or {}
    data = facts.provenance.data or facts.training.get("data") or {}
    text = []
    if recipe:
        text += [", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in recipe.items()) + ".", ""]
    if counts := data.get("counts"):
        sources = ", ".join(f"{count} from {name!r}" for name, count in counts.get("by_source", {}).items())
        text += [
            f"Data: {counts['examples']} answers of the target itself with {counts['answer_tokens']} tokens, "
            f"{counts['greedy']} of them greedy; prompts {sources} ('self': written by the target).",
            "",
        ]
    if facts.metrics:
        best = _kept(facts.metrics)
        positions = ", ".join(f"{value:.3f}" for value in best["acceptance_by_position"] if value is not None)
        text += [
            f"Held-out acceptance length {best['acceptance_length']:.3f} after {best['answer_tokens']} answer tokens "
            f"(step {best['step']}); by position, given that all before it were accepted: {positions}.",
            "",
        ]
    if text and facts.training.get("progress"):
        goes_on = facts.training.get("options", {}).get("init_from") is not None
        began = ", beginning with the weights of an earlier run" if goes_on else ""
        text += [f"Trained for {_duration(facts.training['progress']['seconds'])}{began}.", ""]
    return ["## Training", "", *text] if text else []


def _duration(seconds: float) -> str:
    """In hours, or, of a short training, in minutes."""
    minutes = max(1, round(seconds / 60))
    return f"{seconds / 3600:.1f} hours" if minutes >= 60 else f"{minutes} minute{'s' if minutes > 1 else ''}"


def _kept(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """The evaluation of the drafter that lies there: the last that was the best so far.

    Held-out texts may have grown on the way, and then which is the best was judged anew. Older logs do not say when.
    """
    if judged := [line for line in metrics if line.get("is_best")]:
        return judged[-1]
    same_texts = [line for line in metrics if line.get("held_out") == metrics[-1].get("held_out")]
    return max(same_texts, key=lambda line: line["acceptance_length"])


def _check_section(report: dict[str, Any]) -> list[str]:
    lines = [f"- {found['level']}: {found['topic']}: {found['found']}" for found in report["findings"]]
    return ["## Checked", "", f"`hf-specdec check` says: {report['level']}.", "", *lines, ""]
