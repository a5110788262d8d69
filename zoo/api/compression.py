"""Pruning by a strategy: each step prunes, fine-tunes, evaluates and times the int8 model; the best step is kept."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.compression import search
from pipelines.compression import strategy as strategies
from pipelines.compression.strategy import Step, Strategy
from pipelines.core.batches import Batch
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import copy_file, read_json, require_place, write_json
from pipelines.engines.timing import measure
from pipelines.models import npz, stages
from pipelines.models.family import Prunable
from pipelines.models.folder import ModelFolder
from pipelines.models.hub import CARD
from pipelines.models.pipeline import Pipeline, Predictor
from pipelines.models.record import SAMPLES as FOLDER_SAMPLES
from zoo.api.paths import Model, as_list
from zoo.api.training_settings import convert, finetuned, require_trainable, write_trained_card
from zoo.training.runs import require_free_run, require_task, training_files

logger = logging.getLogger(__name__)

LOG, SENSITIVITY, WORK = "compression.json", "sensitivity.json", "checkpoint"
TIMED = 1.5  # seconds to measure a speedup
SAMPLES = 16  # calibration samples of a model that is only timed


def plan(
    folder: ModelFolder, prune: str | None, strategy: Model | None, drop: float | None, settings: dict[str, str]
) -> Strategy:
    """Reads the strategy of a pruning run.

    Args:
        folder: Model folder to prune.
        prune: Pruning goal; the strategy is then built from `prune` and the settings teacher, qat and epochs.
        strategy: JSON file of the strategy, or None.
        drop: Maximum drop of the int8 metric; None for the one of the strategy.
        settings: Training settings; the function removes teacher, qat and epochs from them.

    Returns:
        The strategy.

    Raises:
        RequestError: The file is no strategy, it conflicts with other options, or the teacher has another task or other
            classes.
    """
    presets = {name: settings.pop(name) for name in ("teacher", "qat", "epochs") if name in settings}
    if strategy is not None:
        if conflicts := [*(["prune"] if prune else []), *presets]:
            raise RequestError(f"found --{conflicts[0]} and --strategy, which sets the same; leave one of them out")
        strategy_plan = strategies.read(strategy)
    else:
        try:
            epochs = int(presets.get("epochs", require_trainable(folder.entry).finetune_config().epochs))
        except ValueError:
            raise RequestError(f"setting epochs is {presets['epochs']!r}; expected a whole number") from None
        teacher, qat = presets.get("teacher", ""), convert("qat", presets.get("qat", "false"), False)
        strategy_plan = strategies.preset(epochs, prune or "", teacher=teacher, qat=qat, distil=bool(teacher))
    for step in strategy_plan.steps():
        name = (step.distil or {}).get("teacher") or folder.path
        if step.distil is not None:
            require_task(name, folder.entry.task)
        own, labels = (zoo.load(model).card.details.get("classes") for model in (folder.path, name))
        if own != labels:
            classes = f"{len(labels)} classes" if isinstance(labels, list) else f"{labels} classes"
            raise RequestError(f"found the teacher {name} of {classes}, expected one of those of {folder.card.name}")
    return strategy_plan if drop is None else replace(strategy_plan, drop=drop)


def compress(
    folder: ModelFolder,
    data: Any,
    output: Path,
    strategy: Strategy,
    *,
    settings: dict[str, str],
    resume: bool,
    on_error: str,
) -> dict[str, Any]:
    """Runs a pruning strategy on a model and writes a model folder.

    The result is the fastest step within the allowed drop, or else the best step. output/compression.json lists size,
    speed and metric of every step; output/sensitivity.json lists the sensitivity of every pruning group. Every step is
    a folder in output/checkpoint; a resumed run gives the same bytes.

    Args:
        folder: Model folder to prune.
        data: Training data.
        output: Folder of the new model.
        strategy: Schedule of distillation, pruning and quantization-aware training.
        settings: Training settings {name: value as text}.
        resume: Continue from the last finished step in `output`.
        on_error: "raise" to stop at an invalid row, "skip" to leave it out.

    Returns:
        The log, as in output/compression.json.

    Raises:
        RequestError: The family cannot be pruned, a goal cannot be reached, or as `zoo.train`.
    """
    if not isinstance(folder.entry, Prunable):
        able = ", ".join(name for name, entry in zoo.entries().items() if isinstance(entry, Prunable))
        raise RequestError(f"{folder.entry.name} cannot be pruned; these families can: {able}")
    steps = strategy.steps()
    for step in steps:
        if step.cut and step.cut.goal.rows and not hasattr(folder.entry.prunable(), "prune_rows"):
            raise RequestError(
                f"found the goal {step.cut.goal} for {folder.entry.name}, which has no embedding tables; leave rows out"
            )
    configs = [_config(folder, step, settings) for step in steps]  # checked before the work begins
    new = not output.exists()
    run = {"strategy": strategy.to_json(), "settings": settings, "start": folder.card.name}
    kept = output / WORK / "run.json"
    if not resume:
        require_free_run(output)
    elif not kept.is_file():
        raise RequestError(f"found no {WORK}/{kept.name} in {output} to resume from; start without --resume")
    elif read_json(kept) != run:
        raise RequestError(
            f"found a run with another strategy, settings or model in {output}; use the same, or another folder"
        )
    require_place(kept)
    write_json(kept, run)
    work = _Run(folder, folder.entry.prunable(), data, output, strategy, on_error)
    previous = folder
    try:
        work.begin(configs[0])
        for step, config in zip(steps, configs, strict=True):
            previous = work.step(previous, step, config)
    except ZooError:
        if not resume and "base" not in work.log:  # nothing to resume from
            shutil.rmtree(output if new else output / WORK)
        raise
    return work.finish()


def _config(folder: ModelFolder, step: Step, settings: Mapping[str, str]) -> Any:
    """The training settings of a step."""
    defaults = require_trainable(folder.entry).finetune_config()
    values = {"epochs": str(step.epochs), **({"qat": "true"} if step.qat else {})}
    if hasattr(defaults, "refit"):
        values["refit"] = "false"  # the held-out rows evaluate the model, so it must not be trained on them
    if hasattr(defaults, "grow"):
        values["grow"] = "false"  # pruned rows would grow again
    if step.distil is not None:
        named = {
            "weight": getattr(defaults, "SOFT", "distillation"),
            "features": getattr(defaults, "HINTS", "features"),
        }
        values["teacher"] = str(step.distil.get("teacher") or folder.path)
        values |= {named.get(key, key): str(value) for key, value in step.distil.items() if key != "teacher"}
    return finetuned(folder, {**settings, **values})


@dataclass(frozen=True)
class _OwnBatch(Predictor):
    """A predictor timed on its own batch, because models may encode the same samples differently."""

    batch: Batch

    def run(self, batch: Batch) -> dict[str, Any]:
        """Returns the outputs for the own batch.

        Args:
            batch: Ignored.
        """
        return super().run(self.batch)


class _Run:
    """A run of a strategy in its output folder."""

    def __init__(
        self, start: ModelFolder, kind: type[Any], data: Any, output: Path, strategy: Strategy, on_error: str
    ) -> None:
        self.start, self.data, self.output, self.strategy = start, data, output, strategy
        self.on_error, self.kind = on_error, kind
        self.base: Pipeline | None = None
        self.raw: Any = None  # samples of the timing
        self.evaluator: Any = None  # the first model, opened with the data, which evaluates all models
        log = output / WORK / LOG
        self.log: dict[str, Any] = read_json(log) if log.is_file() else {"strategy": strategy.to_json(), "steps": []}

    def _open(self, folder: ModelFolder, config: Any, importance: str = "taylor") -> Any:
        options = {"config": config, "importance": importance, "on_error": self.on_error}
        return self.kind(folder, self.data, **options, like=self.evaluator)

    def begin(self, config: Any) -> None:
        """Opens the first model with the data and evaluates it.

        Args:
            config: Training configuration of the first step.

        Raises:
            RequestError: A resumed run had other data.
        """
        self.evaluator = self._open(self.start, config)
        if "base" not in self.log:
            base = {"model": self.start.card.name, **self._figures(self.start, self._quality(self.start), 1.0)}
            self._note(base=base, data=self.evaluator.digest)
            self._print("baseline", base)
        elif self.log.get("data", self.evaluator.digest) != self.evaluator.digest:
            raise RequestError(
                f"found a checkpoint in {self.output} made with other data; resume with the same, or start in an empty "
                "folder"
            )

    def _quality(self, folder: ModelFolder) -> dict[str, float]:
        metrics: dict[str, float] = self.evaluator.quality(self._int8(folder))
        return metrics

    def _int8(self, folder: ModelFolder, **options: Any) -> Pipeline:
        """Opens an int8 model in the fastest engine of the family, the last one."""
        kind = self.start.entry.pipeline()
        return kind(folder, "int8", kind.engines(folder)[-1], **options)

    def _note(self, **entries: Any) -> None:
        self.log |= entries
        write_json(self.output / WORK / LOG, self.log)

    def speed(self, folder: ModelFolder, count: int) -> float:
        """Measures the speedup over the first model; both are timed in turn.

        Args:
            folder: Model folder.
            count: Batch size.
        """
        if self.base is None:
            self.base = self._int8(self.start, batch_size=count)
        if self.raw is None:
            try:
                self.raw = self.base.example(count)
            except RequestError:  # a model without shipped samples
                self.raw = self.base.example(count, as_list(self.data)[0])
        timed = getattr(self.kind, "timed", lambda pipeline: pipeline)
        pipelines = (self.base, self._int8(folder, batch_size=count))
        both = [_OwnBatch(timed(pipeline), pipeline.preprocess(self.raw)) for pipeline in pipelines]
        times: list[list[float]] = []
        begin = time.monotonic()
        while len(times) < 3 or time.monotonic() - begin < TIMED:
            times.append(measure(both, {}))
        before, after = np.min(times, axis=0)
        return float(before / after)

    def step(self, previous: ModelFolder, step: Step, config: Any) -> ModelFolder:
        """Runs a step: prunes, fine-tunes, builds, evaluates and times the model. Finished parts are kept.

        Args:
            previous: Model folder of the previous step.
            step: Step of the strategy.
            config: Training configuration of the step.

        Returns:
            Model folder of the step.
        """
        place = self.output / WORK / step.name
        if step.cut is not None and step.cut.goal.rows:
            previous = self._prune_rows(previous, step, config, place.with_name(f"{step.name}.rows"))
        if step.cut is not None and step.cut.goal.channels:
            previous = self._cut(previous, step, config, place.with_name(f"{step.name}.cut"))
        if not (place / CARD).is_file():
            resume = any((place / "checkpoint").glob("state.*"))
            for path in training_files(place) if place.exists() and not resume else ():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            print_line(f"step {step.name}: {step.epochs} epochs")
            train = require_trainable(self.start.entry).train
            previous.ensure("fp32.onnx")
            train(self.data, place, config=config, resume=resume, start_from=previous.path, on_error=self.on_error)
            write_trained_card(place, self.start.entry.name, f"{self.start.card.name}, step {step.name} of a strategy")
        folder = zoo.load(place)
        if step.name not in {entry["step"] for entry in self.log["steps"]}:
            stages.build(folder)
            figures = self._figures(folder, self._quality(folder), self.speed(folder, self.kind.batch_size))
            figures |= self._drop(figures)
            self._note(steps=[*self.log["steps"], {"step": step.name, "epochs": step.epochs, **figures}])
            self._print(f"step {step.name}", figures)
        return folder

    def _figures(self, folder: ModelFolder, quality: Mapping[str, float], speed: float) -> dict[str, Any]:
        size = folder.ensure("int8.onnx").stat().st_size
        return {"metrics": dict(quality), "speed": round(speed, 3), "bytes": size}

    def _drop(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        metric = self.kind.metric
        fell = self.log["base"]["metrics"][metric] - figures["metrics"][metric]
        return {"drop": round(fell, 6), "within": bool(fell <= self.drop)}

    @property
    def drop(self) -> float:
        """Maximum drop of the metric."""
        return float(self.kind.drop if self.strategy.drop is None else self.strategy.drop)

    def _print(self, what: str, figures: Mapping[str, Any]) -> None:
        metric = self.kind.metric
        fell = (
            f", drop {figures['drop']:+.4f} ({'within' if figures['within'] else 'outside'} {self.drop:g})"
            if "drop" in figures
            else ""
        )
        print_line(
            f"{what}: int8 {metric} {figures['metrics'][metric]:.4f}{fell}; {figures['speed']:.2f}x, "
            f"{figures['bytes'] / 1e6:.2f} MB",
        )

    def _prune_rows(self, previous: ModelFolder, step: Step, config: Any, place: Path) -> ModelFolder:
        """Prunes low-frequency embedding rows; returns the folder of the model, not fine-tuned yet."""
        assert step.cut is not None
        if (place / CARD).is_file():
            return zoo.load(place)
        pruned = self._open(previous, config).prune_rows(step.cut.goal.rows, place)
        self._note(rows=pruned)
        made = f"{self.start.card.name} without low-frequency rows, not fine-tuned"
        write_trained_card(place, self.start.entry.name, made)
        before, after = pruned["rows"]
        kept = f"; {', '.join(pruned['kept'])} are kept, which have no vocabulary" if pruned["kept"] else ""
        columns = ", ".join(f"{name} {rows[0]:,} -> {rows[1]:,}" for name, rows in pruned["columns"].items())
        print_line(
            f"pruned rows={pruned['least']}: {before - after:,} of {before:,} embedding rows ({columns}){kept}",
        )
        return zoo.load(place)

    def _cut(self, previous: ModelFolder, step: Step, config: Any, place: Path) -> ModelFolder:
        """Prunes channels; returns the folder of the model, not fine-tuned yet."""
        assert step.cut is not None
        goal = replace(step.cut.goal, rows=0)
        if (place / CARD).is_file():
            return zoo.load(place)
        model = self._open(previous, config, step.cut.importance)
        search.chosen(model.groups, step.cut.layers)
        if "channels" not in self.log:
            self._note(channels=sum(model.groups.values()))
        if not (place / SENSITIVITY).is_file():
            write_json(place / SENSITIVITY, search.sensitivity(model))
        sensitivity = read_json(place / SENSITIVITY)

        def speed(widths: search.Widths) -> float:
            with tempfile.TemporaryDirectory(dir=place, prefix=".") as scratch:
                model.save(widths, Path(scratch))
                return self.speed(self._quickly_built(Path(scratch)), self.kind.batch_size)

        if not (place / "cuts.json").is_file():
            made = search.choose(model, sensitivity, step.cut, goal, self.log["channels"], speed)
            write_json(place / "cuts.json", made)
        made = read_json(place / "cuts.json")
        model.save(made["widths"], place)
        write_trained_card(place, self.start.entry.name, f"{self.start.card.name}, pruned, not fine-tuned")
        left = sum(made["widths"].values())
        print_line(
            f"pruned {made['goal']}: {self.log['channels'] - left:,} of {self.log['channels']:,} channels"
            + (f", {made['speed']:.2f}x before training" if "speed" in made else ""),
        )
        return zoo.load(place)

    def _quickly_built(self, place: Path) -> ModelFolder:
        """Builds the int8 model of a folder without accuracy measures, only for timing."""
        write_trained_card(place, self.start.entry.name, "only for timing")
        arrays = npz.read_arrays(place / FOLDER_SAMPLES)
        npz.write_npz(place / FOLDER_SAMPLES, {name: array[:SAMPLES] for name, array in arrays.items()})
        folder = zoo.load(place)
        recipe = replace(self.start.own_recipe, observer="minmax", correct=False, search=False)
        stages.set_recipe(folder, recipe)
        return folder

    def finish(self) -> dict[str, Any]:
        """Copies the best step to the output folder, and returns the log."""
        metric, steps = self.kind.metric, self.log["steps"]
        within = [step for step in steps if step["within"]]
        best = (
            max(within, key=lambda step: step["speed"])
            if within
            else max(steps, key=lambda step: step["metrics"][metric])
        )
        self._note(best=best["step"], within=bool(within))
        source = self.output / WORK / best["step"]
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                copy_file(path, self.output / path.name)
        for cut in sorted((self.output / WORK).glob(f"*.cut/{SENSITIVITY}")):
            copy_file(cut, self.output / SENSITIVITY)
        write_json(self.output / LOG, self.log)
        made = f"{self.start.card.name} pruned by its user, step {best['step']}"
        write_trained_card(self.output, self.start.entry.name, made)
        if not within:
            logger.warning(
                "no step is within a drop of %g; the best one, %s, is kept, with a drop of %g",
                self.drop,
                best["step"],
                best["drop"],
            )
        return self.log
