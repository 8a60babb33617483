"""One loop for all kinds of drafters, on one process or several.

A step is made of whole batches. Every process takes its share of them, gradients of sums are added over batches and
processes and divided by the count of what was learned, so the number of processes changes nothing but rounding. What
is random follows from the seed and the place in the data, so a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_specdec.fingerprints import TargetFingerprint
from hf_specdec.hub import load_drafter
from hf_specdec.loading import load_target, target_name
from hf_specdec.provenance import Provenance, filling, stamp
from hf_specdec.training import checkpoint, evaluate
from hf_specdec.training.checkpoint import Progress
from hf_specdec.training.curves import draw, read_metrics
from hf_specdec.training.examples import (
    Example,
    is_held_out,
    read_examples,
    read_record,
    remove_parts,
    write_whole,
)
from hf_specdec.training.features import FeatureStore
from hf_specdec.training.options import TrainOptions
from hf_specdec.training.recipes import RECIPES
from hf_specdec.training.recipes.base import Recipe

METRICS_NAME = "metrics.jsonl"
CURVES_NAME = "curves.png"
RECORD_NAME = "training.json"

# Called after every step and evaluation with what happened.
Report = Callable[[dict[str, Any]], None]


def train(options: TrainOptions, report: Report | None = None) -> dict[str, Any]:
    """Trains a drafter, or goes on where a run was stopped.

    Args:
        options: what to train. A folder that holds the state of a run with other options is refused.
        report: hears of every step and evaluation, in the first process.

    Returns:
        The last line of the metrics.

    Raises:
        ValueError: if the data, the target or a resumed run do not fit, or the loss is no number.
        OSError: if the disk is full. In all cases the last good state and the best drafter stay.
    """
    return Training(options, report or (lambda _: None)).run()


class Training:
    """A target, a drafter and where their training stands.

    Args:
        options: what to train.
        report: hears of every step and evaluation.
    """

    def __init__(self, options: TrainOptions, report: Report):
        self.options, self.report, self.folder = options, report, Path(options.output)
        self._refuse_at_once()
        self.accelerator = Accelerator(cpu=options.device == "cpu")
        device = str(self.accelerator.device) if options.device is None else options.device
        target, self.tokenizer = load_target(options.target, options.dtype, device)
        self.target = target.requires_grad_(False)
        self.fingerprint = TargetFingerprint.of(self.target)
        self.progress = Progress(target=self.fingerprint.to_dict())
        self._refuse_other_data()
        if self.accelerator.is_main_process:
            remove_parts(self.folder)
        found = checkpoint.read_state(self.folder)
        if found is not None:
            self._refuse_other_run(found[0], found[1])
            self.progress = found[0]
            if not self._is_kept():  # whoever took the best drafter away wants another
                self.progress.best = 0.0
        else:
            self._refuse_other_files()
        self._read_data(self.progress.num_examples or None)
        self.recipe = self._recipe(found[1] if found else None)
        self.weights = checkpoint.Weights(self.recipe.module)
        self.optimizers = _optimizers(self.weights, options.optimizer or self.recipe.optimizer, options.weight_decay)
        if found is not None:
            checkpoint.restore(found[2], self.weights, self.optimizers)
        elif options.init_from is not None:
            self._init_from(options.init_from)
        self.folder.mkdir(parents=True, exist_ok=True)
        cache = Path(options.cache or self.folder / "features")
        limit = int(options.cache_gigabytes * 1e9)
        self.store = FeatureStore(self.target, self.recipe.taps, cache if limit else None, limit)
        self.started = time.monotonic() - self.progress.seconds
        self.saved = self.evaluated = time.monotonic()

    def _refuse_at_once(self) -> None:
        """Raises `ValueError` for what need not wait until the target is loaded."""
        if self.options.kind not in RECIPES:
            raise ValueError(f"kind={self.options.kind!r} is unknown; use one of {', '.join(RECIPES)}.")
        RECIPES[self.options.kind].refuse_unread(self.options.recipe)
        if self.folder.resolve() == Path(self.options.data).resolve():
            raise ValueError(f"{self.folder} is the folder of the data; give the drafter an output of its own.")

    def _refuse_other_data(self) -> None:
        record = data_record(self.options.data).get("target_fingerprint")
        if record is None:
            return
        if (difference := TargetFingerprint.from_dict(record).difference(self.fingerprint)) is not None:
            raise ValueError(
                f"{self.options.data} holds answers of another target: {difference}. Drafters learn from answers of "
                "the target they draft for; make them with: hf-specdec data --target ..."
            )

    # --- data ---------------------------------------------------------------------------------------------

    def _read_data(self, count: int | None = None) -> None:
        """Splits the first examples of the folder (all, if nobody says how many) into those to learn and the others."""
        examples = read_examples(self.options.data)[:count]
        self._refuse_unknown(examples, count or 0)
        examples = examples[: self._least(len(examples))]  # another process may have looked a moment earlier
        share = self.options.held_out_share
        held_out = [example for example in examples if is_held_out(example, share) and example.temperature == 0]
        self.held_out = [example for example in held_out if len(example.answer) > 1][: self.options.num_held_out]
        self.learned = [example for example in examples if not is_held_out(example, share) and len(example.answer) > 1]
        self.progress.num_examples = len(examples)
        if not self.learned or not self.held_out:
            raise ValueError(
                f"{self.options.data} holds {len(examples)} examples: {len(self.learned)} to learn from and "
                f"{len(self.held_out)} greedy ones that are held out. Both must be more than none, with answers of at "
                f"least two tokens; make more data, or hold out more than held_out_share={share:g}, such as 0.2."
            )
        self._batches_of_epoch()

    def _refuse_unknown(self, examples: Sequence[Example], count: int) -> None:
        """Raises `ValueError` for fewer examples than a resumed run had, and for ids that the target does not have."""
        if len(examples) < count:
            raise ValueError(
                f"{self.options.data} holds {len(examples)} examples; this run had {count} when it stopped. Put "
                "the others back, or begin another output with init_from."
            )
        highest = max(max(*example.prompt, *example.answer) for example in examples)
        if highest >= self.fingerprint.vocabulary_size:
            raise ValueError(
                f"{self.options.data} holds the id {highest}; the target has {self.fingerprint.vocabulary_size} ids. "
                "Drafters learn from answers of the target they draft for; make them with: hf-specdec data --target ..."
            )

    def _batches_of_epoch(self) -> None:
        """The epoch's examples, in an order that follows from the seed and the epoch, as batches."""
        generator = torch.Generator().manual_seed(self.options.recipe.seed * 1_000_003 + self.progress.epoch)
        order = torch.randperm(len(self.learned), generator=generator).tolist()
        self.batches: list[list[Example]] = [[]]
        room = self.options.batch_tokens
        for place in order:
            size = len(self.learned[place].answer)
            if self.batches[-1] and size > room:
                self.batches.append([])
                room = self.options.batch_tokens
            self.batches[-1].append(self.learned[place])
            room -= size

    def _next_batches(self) -> list[tuple[int, list[Example]]]:
        """The batches of the coming step, each with a seed of its own.

        Where an epoch ends a new one begins, with the data that are there then.
        """
        if self.progress.cursor >= len(self.batches):
            self.progress.epoch, self.progress.cursor = self.progress.epoch + 1, 0
            before = self.held_out
            self._read_data()
            if self.held_out != before:  # figures of other texts say nothing about which drafter is the best
                self.progress.best = self._length_of_kept()
        few = self.progress.step < 4 * self.options.warmup_steps
        count = 1 if few else self.options.batches_per_step
        start = self.progress.cursor
        self.progress.cursor += count
        first = (self.options.recipe.seed * 1_000_003 + self.progress.epoch) * 1_000_003
        return [(first + place, self.batches[place]) for place in range(start, min(start + count, len(self.batches)))]

    # --- the drafter --------------------------------------------------------------------------------------

    def _recipe(self, facts: dict[str, Any] | None) -> Recipe:
        count = facts["num_examples_at_first"] if facts else self.progress.num_examples
        examples = read_examples(self.options.data)[:count]
        share = self.options.held_out_share
        learned = [example for example in examples if not is_held_out(example, share)]
        self.num_examples_at_first = len(examples)
        return RECIPES[self.options.kind].new(self.target, learned, self.options.recipe)

    def _init_from(self, location: str) -> None:
        try:
            found = checkpoint.read_state(Path(location))
            tensors = self._published(location) if found is None else self._of_training(found)
            self.weights.load(tensors, may_lack=True)  # a head that drafts in parallel has one more than its model
        except ValueError as error:
            raise ValueError(
                f"--init-from {location} is neither the output of such a training nor a drafter to begin with: {error}"
            ) from error

    def _of_training(self, found: checkpoint.State) -> dict[str, Tensor]:
        """The latest weights of a training, which need not be its best."""
        if (difference := TargetFingerprint.from_dict(found[0].target).difference(self.fingerprint)) is not None:
            raise ValueError(f"it was trained for another target: {difference}.")
        return {n.removeprefix("module."): x for n, x in found[2].items() if n.startswith("module.")}

    def _published(self, location: str) -> dict[str, Tensor]:
        """The weights of a drafter of a folder or of the Hub."""
        return self.recipe.weights_of(load_drafter(location, self.target))

    def _refuse_other_run(self, progress: Progress, facts: dict[str, Any]) -> None:
        if (difference := TargetFingerprint.from_dict(progress.target).difference(self.fingerprint)) is not None:
            raise ValueError(
                f"{self.folder} holds a run for another target: {difference}. Give that target, or another output."
            )
        told = self._lasting_options()
        if changed := sorted(name for name in told if facts["options"].get(name, told[name]) != told[name]):
            was = ", ".join(f"{name}={facts['options'].get(name)!r}" for name in changed)
            raise ValueError(
                f"{self.folder} holds a run with other options ({was}). Give the same, or another output with "
                f"init_from={str(self.folder)!r}."
            )

    def _refuse_other_files(self) -> None:
        """A run saves its state before it writes anything else, so what lies there without one is somebody's own."""
        names = ("config.json", "model.safetensors", METRICS_NAME)
        if there := [name for name in names if (self.folder / name).exists()]:
            raise ValueError(
                f"{self.folder} holds {' and '.join(there)} and no state of a training ({checkpoint.STATE_NAME}) to go "
                "on from. They would be overwritten: give another output."
            )

    def _lasting_options(self) -> dict[str, Any]:
        """Options that a resumed run must share; when it ends and how often it writes may change."""
        options = asdict(self.options)
        data = ("held_out_share", "num_held_out")
        lasting = ("kind", "recipe", "batch_tokens", "batches_per_step", "optimizer", "dtype", *data)
        return {name: options[name] for name in lasting}

    # --- the loop -----------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Learns until one of the limits is reached; see `train`."""
        self._say_size()
        if not read_metrics(self.folder / METRICS_NAME):
            self._save()
            self._evaluate()
        while not self._is_over():
            self._step(self._next_batches())
            if self._is_due(self.evaluated, self.options.evaluate_every, self.options.evaluate_steps):
                self._evaluate()
            elif self._is_due(self.saved, self.options.save_every, self.options.save_steps):
                self._save()
        if self.progress.loss[1]:
            self._evaluate()
        return read_metrics(self.folder / METRICS_NAME)[-1]

    def _say_size(self) -> None:
        size = self.store.bytes_of([*self.learned, *self.held_out])
        kept = min(size, self.store.max_bytes)
        self._report(self._line("start") | {"bytes": kept})

    def _fraction(self) -> float:
        """How much of the training is behind us, by the limit that is nearest."""
        options, progress = self.options, self.progress
        done = [0.0]
        if options.max_steps is not None:
            done.append(progress.step / options.max_steps)
        if options.epochs is not None:
            done.append((progress.epoch + progress.cursor / len(self.batches)) / options.epochs)
        if options.time_budget is not None:
            done.append((time.monotonic() - self.started) / options.time_budget)
        return max(done)

    def _is_over(self) -> bool:
        """Whether any process has reached a limit; all learn at the rate of the one that is furthest."""
        self.fraction = float(self._gathered(torch.tensor([self._fraction()], dtype=torch.float64)).max())
        return self.fraction >= 1

    def _is_due(self, since: float, seconds: float, steps: int | None) -> bool:
        if steps is not None:
            return self.progress.step % steps == 0
        return bool(self._summed(torch.tensor([float(time.monotonic() - since >= seconds)])) > 0)

    def _step(self, batches: Sequence[tuple[int, list[Example]]]) -> None:
        """One step of the optimisers over some batches, which the processes share."""
        sums = torch.zeros(2, dtype=torch.float64)
        for seed, batch in batches[self.accelerator.process_index :: self.accelerator.num_processes]:
            losses = self.recipe.losses(self.store.texts(batch), seed)
            if losses.count:
                losses.total.backward()
                sums += torch.tensor([float(losses.total.detach()), losses.count], dtype=torch.float64)
        loss, count = self._summed(sums).tolist()
        norm = self._reduce_gradients(count)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise ValueError(
                f"The loss of step {self.progress.step + 1} is {loss} (gradient {norm}). The last good state is kept; "
                "lower learning_rate and go on from it with init_from, or look at the data."
            )
        rate = self._learning_rate()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.weights.publish()
        progress = self.progress
        progress.step += 1
        progress.answer_tokens += sum(len(example.answer) for _, batch in batches for example in batch)
        progress.loss = (progress.loss[0] + loss, progress.loss[1] + int(count))
        self._report(self._line("step") | {"loss": loss / max(count, 1), "learning_rate": rate})

    def _reduce_gradients(self, count: float) -> float:
        """Adds gradients over processes, divides them by the count, shortens them, and says how long they were."""
        flat = self._summed(self.weights.take_gradients()) / max(count, 1)
        norm = float(flat.norm())
        self.weights.set_gradients(flat * min(1.0, self.options.max_grad_norm / max(norm, 1e-12)))
        return norm

    def _report(self, event: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.report(event)

    def _least(self, count: int) -> int:
        """The least count of all processes."""
        return int(self._gathered(torch.tensor([count])).min())

    def _gathered(self, values: Tensor) -> Tensor:
        """The values of all processes, one behind the other."""
        if self.accelerator.num_processes == 1:  # not every device has numbers of 64 bits
            return values
        return self.accelerator.gather(values.to(self.accelerator.device))

    def _summed(self, values: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return values
        return self.accelerator.reduce(values.to(self.accelerator.device), "sum")

    def _learning_rate(self) -> float:
        """Rises over the first steps, stays, and falls at the end."""
        options = self.options
        rise = min(1.0, (self.progress.step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
        fall = min(1.0, (1 - self.fraction) / options.decay_share) if options.decay_share else 1.0
        return (options.learning_rate or self.recipe.learning_rate) * rise * max(fall, 0.01)

    # --- what is kept -------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Counts acceptance on held-out texts, writes a line about it, and keeps the drafter if it is the best.

        The state is saved at once.
        """
        counted = self._acceptance()
        is_best = counted.length > self.progress.best
        loss, count = self.progress.loss
        metrics = self._line("evaluation") | {
            "loss": loss / count if count else None,
            "acceptance_length": counted.length,
            "acceptance_by_position": counted.by_position,
            "agreement_by_position": counted.unconditional,
            "counts": asdict(counted),
            "is_best": is_best,
        }
        self.progress.loss = (0.0, 0)
        self.progress.best = max(self.progress.best, counted.length)
        if self.accelerator.is_main_process:
            if is_best:
                self._keep()
            self._write_metrics(metrics)
            self._draw()
            self._write_record()
        self._report(metrics)
        self.evaluated = time.monotonic()
        self._save()  # a run that goes on from an older state might take a worse drafter for the best

    def _is_kept(self) -> bool:
        """Whether the best drafter so far is still there."""
        return all((self.folder / name).exists() for name in ("config.json", "model.safetensors"))

    def _length_of_kept(self) -> float:
        """The acceptance length of the drafter that is kept, on the texts held out now; 0 if there is none."""
        if not self._least(int(self._is_kept())):
            return 0.0
        self.weights.show(self._published(str(self.folder)))
        length = self._acceptance().length
        self.weights.publish()
        return length

    @torch.no_grad()
    def _acceptance(self) -> evaluate.Acceptance:
        nothing = (0,) * self.recipe.depth  # a process may have no text at all, and counts must have one shape
        counted = evaluate.Acceptance(nothing, nothing, nothing, nothing)
        mine = self.held_out[self.accelerator.process_index :: self.accelerator.num_processes]
        for start in range(0, len(mine), 8):
            agreed = self.recipe.agreement(self.store.texts(mine[start : start + 8]))
            counted += evaluate.total(map(evaluate.count, agreed))
        if self.accelerator.num_processes == 1:
            return counted
        sums = torch.tensor([*map(list, counted.counts())], dtype=torch.float64)
        ends = torch.tensor([counted.tokens, counted.rounds], dtype=torch.float64)
        tokens, rounds = map(int, self._summed(ends).tolist())
        hits, seen, kept, reached = (tuple(map(int, row)) for row in self._summed(sums).tolist())
        return evaluate.Acceptance(hits, seen, kept, reached, tokens, rounds)

    def _line(self, event: str) -> dict[str, Any]:
        progress = self.progress
        progress.seconds = time.monotonic() - self.started
        return {
            "event": event,
            "step": progress.step,
            "epoch": progress.epoch,
            "answer_tokens": progress.answer_tokens,
            "examples": len(self.learned),
            "held_out": len(self.held_out),
            "seconds": round(progress.seconds, 1),
            "fraction": min(1.0, self._fraction()),
        }

    def _write_metrics(self, line: dict[str, Any]) -> None:
        """Appends a line; what a killed run wrote after its last state is overwritten."""
        path = self.folder / METRICS_NAME
        kept = [entry for entry in read_metrics(path) if entry["step"] < line["step"]]
        write_whole(path, "".join(json.dumps(entry) + "\n" for entry in [*kept, line]))

    def _keep(self) -> None:
        """Puts the drafter in place of the best one so far."""
        described, data = self.recipe.describe(), data_record(self.options.data)
        name = target_name(self.target)
        provenance = Provenance.of(self.options.kind, self.target, name, self.tokenizer, described, data)
        with filling(self.folder) as part:
            self.recipe.save(part)
            stamp(part, provenance)

    def _draw(self) -> None:
        learned = [entry for entry in read_metrics(self.folder / METRICS_NAME) if entry["loss"] is not None]
        if learned and find_spec("matplotlib") is not None:
            draw(learned, self.folder / CURVES_NAME, f"{self.options.kind} for {target_name(self.target)}")

    def _write_record(self) -> None:
        record = {"options": asdict(self.options), "recipe": self.recipe.describe(), "target": self.progress.target}
        record |= {"data": data_record(self.options.data), "progress": asdict(self.progress)}
        write_whole(self.folder / RECORD_NAME, json.dumps(record, indent=1) + "\n")

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            self._line("state")
            facts = {"options": self._lasting_options(), "num_examples_at_first": self.num_examples_at_first}
            checkpoint.write_state(self.folder, self.progress, self.weights, self.optimizers, facts)
        self.saved = time.monotonic()


def data_record(folder: str) -> dict[str, Any]:
    """What the data folder says about itself; empty if it says nothing."""
    return read_record(folder) if (Path(folder) / "data.json").is_file() else {}


def _optimizers(weights: checkpoint.Weights, name: str, decay: float) -> list[torch.optim.Optimizer]:
    """The optimisers; their rates are set before every step."""
    masters = list(weights.masters.values())
    matrices = [master for master in masters if master.ndim == 2]
    others = {"params": [master for master in masters if master.ndim != 2], "weight_decay": 0.0}
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "fused": True}
    if name == "adamw":
        return [torch.optim.AdamW([{"params": matrices, "weight_decay": decay}, others], **settings)]
    muon = torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW([others], **settings)]
