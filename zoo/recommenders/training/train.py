"""Trains recommenders in torch on a click log: early stopping on the last rows, then once more on all rows.

All embedding tables of a log are one parameter; a step reads, decays and averages their rows in a few calls.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.core.console import print_line
from pipelines.core.errors import RequestError
from pipelines.core.files import write_json
from pipelines.core.plain import to_plain
from pipelines.models.npz import write_npz
from zoo.recommenders.data import sources
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.models.checkpoints import MODEL, Build
from zoo.recommenders.train_config import TrainConfig
from zoo.recommenders.training import qat
from zoo.recommenders.training.distillation import LogSource, Teacher
from zoo.recommenders.training.fitting import FINISHED, STATE, Fitting, new_trial
from zoo.recommenders.training.negative_sampling import log_odds
from zoo.recommenders.training.row_store import CategoryCounts, RowStore
from zoo.recommenders.training.start import open_start
from zoo.recommenders.training.tables.networks import tables_in_file
from zoo.recommenders.training.trainer import Trainer
from zoo.recommenders.training.trainer_factory import TrainerFactory
from zoo.training.runs import (
    load_checkpoint,
    plot_curves,
    processes,
    provenance,
    require_output,
    save_weights,
)

CALIBRATION_ROWS = 4096
ADDED: dict[str, Any] = {  # settings since version 0.2.0
    "negative_rate": 0.0,
    "grow": True,
    "new_ids": "unknown",
    "freeze_towers": False,
    "evict_after": 0,
    "evict_below": 0,
}
MAX_UNKNOWN = 0.9  # of a column's categories that training replaces: a column of new values alone teaches nothing


def train(
    build: Build,
    data: Any,
    output: str | Path,
    *,
    config: TrainConfig,
    resume: bool = False,
    start_from: str | Path | None = None,
    on_error: str = "raise",
    schema: str | Path | Schema | None = None,
    label: str | Sequence[str] | None = None,
) -> dict[str, Any]:
    """Trains on the labelled rows of a log in time order; the last rows are held out.

    `output` gets model.pt (averaged weights), schema.json, train.json (with the features), learning_curve.png and
    calibration.npz (`CALIBRATION_ROWS` encoded training rows). Every epoch writes checkpoint/state.pt and the best
    weights; a finished training keeps only a note there. A seed gives the same weights on one machine with the same
    number of processes. Under torchrun all processes make the same call; `batch_size` is the total over all processes,
    and process 0 writes the files.

    Args:
        build: Creates the untrained network from features and settings.
        data: Labelled log, see `Features.read`.
        output: Folder to train into.
        config: Training settings. With `refit`, metrics and history are those of the search; the final model was also
            trained on the held-out rows.
        resume: Whether to continue from the checkpoint; the result is the same as without interruption.
        start_from: Model folder whose weights, schema and sizes are the start; None: random weights.
        on_error: "raise", or "skip" to leave out faulty rows.
        schema: Schema or its file; None: inferred from the log.
        label: Columns to predict, one or several; None: those of the schema.

    Returns:
        {"auc", "logloss", "accuracy"} on the held-out rows; for several labels their means, and "labels": those of
        every label.

    Raises:
        RequestError: The data cannot be used, the output folder is in use, or the checkpoint belongs to another run.
    """
    output, data = Path(output), sources.spool_stdin(data)
    with processes() as group:
        require_output(output, STATE, resume)
        start = open_start(build, data, config, start_from, schema, label, on_error)
        config, features = start.config, start.features
        torch.manual_seed(config.seed)
        quantization = None
        if config.qat:
            config = qat.for_qat(config, start.folder, group.count)
            quantization = qat.fake_quantization(start_from, features)
        store = RowStore(features, data, on_error, output)
        if not start_from:  # with `start_from`, another log chose the columns
            store.require_values(features, data)
        run = {"config": to_plain(config), "data": store.digest, "start": start.digest()}
        split = store.split(config.held_out)
        _require_both_labels(store, split, features.schema.labels)

        @functools.lru_cache(maxsize=1)
        def categories_of(rows: int) -> CategoryCounts:
            earlier = None if start.model is None else start.model.earlier
            return CategoryCounts(features, store, rows, config.min_count, earlier)

        shares = categories_of(split).unseen_shares(store.parts(split, len(store))).clamp(config.unknown, MAX_UNKNOWN)
        teacher = _teacher(config, features, LogSource(data, on_error, output)) if config.teacher else None
        new_trainer = TrainerFactory(build, config, start, store, group, categories_of, quantization)
        saved = load_checkpoint(output / STATE, run, ADDED) if resume else None
        if saved is not None and saved["phase"] == FINISHED:
            return _finished(output, saved, group.rank == 0)
        beginning: dict[str, Any] = {"run": run, "phase": "search", "trial": 0, "winner": {}}
        state: dict[str, Any] = saved or {**beginning, **new_trial()}
        state.setdefault("began", time.time())
        fitting = Fitting(output, store, features, config, new_trainer, shares, teacher, categories_of)
        trainer = fitting.run(state, split)
        metrics = _metrics(state["winner"])
        if group.rank == 0:
            if not config.refit:
                trainer.load_snapshot(fitting.best_weights(state))
            used = len(store) if config.refit else split
            record = {
                "config": run["config"],
                "features": features.to_json(),
                "metrics": metrics,
                "rows": {"train": split, "held_out": len(store) - split, "final": used, "left_out": store.errors.total},
                "epochs": state["winner"]["epoch"],
                "l2_embeddings": state["winner"]["l2"],
                "history": state["winner"]["history"],
                "seconds": round(time.time() - state["began"], 1),
                "processes": group.count,
                **start.ids,
            }
            if not trainer.stored:  # tables in files do not grow
                start.save_counts(output, categories_of(used).counts)
            _write(output, data, trainer, categories_of(used), store, used, record)
            if quantization is not None:
                quantization.save_ranges(trainer.model, output)
            fitting.finish(state, metrics)
        group.same(None)  # the others wait for the files
    return {**metrics, **start.ids}


def _teacher(config: TrainConfig, features: Features, source: LogSource) -> Teacher:
    """Returns the teacher of a distillation on the rows of a log."""
    shift = log_odds(config.negative_rate)
    return Teacher(config.teacher, features.to_json(), config.distillation, source, shift)


def _metrics(epoch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of an epoch on the held-out rows, and those of every label if there are several."""
    names = ("auc", "logloss", "accuracy")
    metrics: dict[str, Any] = {name: epoch[name] for name in names}
    if by_label := epoch.get("labels"):
        metrics["labels"] = {label: {name: scores[name] for name in names} for label, scores in by_label.items()}
    return metrics


def _finished(output: Path, saved: Mapping[str, Any], is_first: bool) -> dict[str, Any]:
    """Returns the metrics of a training that had ended before it was resumed."""
    if missing := [name for name in (MODEL, "train.json") if not (output / name).is_file()]:
        raise RequestError(
            f"the training in {output} is finished, but {missing[0]} is gone; train into an empty folder"
        )
    if is_first:
        print_line(f"the training in {output} is finished: nothing to resume")
    return dict(saved["metrics"])


def _require_both_labels(store: RowStore, split: int, labels: Sequence[str]) -> None:
    """Raises RequestError where training rows or held-out rows of a weight above 0 have only one value of a label."""
    for name, first, last in (("first", 0, split), ("last", split, len(store))):
        weighed = np.concatenate([part["label"][part["weight"] > 0].numpy() for part in store.parts(first, last)])
        for column, label in enumerate(labels):
            values = weighed if len(labels) == 1 else weighed[:, column]
            classes = np.unique(values[~np.isnan(values)])
            if len(classes) == 2:
                continue
            only = f"only label {classes[0]:.0f}" if len(classes) else "no label"
            only += f" of {label}" if len(labels) > 1 else ""
            rows = f"{last - first:,} rows" + (" of a weight above 0" if len(weighed) < last - first else "")
            raise RequestError(f"found {only} in the {name} {rows}, expected both 0 and 1")


def _write(
    output: Path,
    data: Any,
    trainer: Trainer,
    categories: CategoryCounts,
    store: RowStore,
    used: int,
    record: dict[str, Any],
) -> None:
    """Writes all files except for the checkpoint."""
    features = Features.from_json(record["features"])
    chosen = np.sort(np.random.default_rng(record["config"]["seed"]).permutation(used)[:CALIBRATION_ROWS])
    rows = store.rows(chosen)
    samples: dict[str, Any] = {name: rows[name].numpy() for name in features.inputs}
    trainer.assign(trainer.average)
    trained = trainer.model
    with tables_in_file(trainer, categories, output / MODEL):
        if (end := getattr(trained, "end_training", None)) is not None:
            end()
        categories.copy_unknown(trained)
        if (sort_neurons := getattr(trained, "sort_neurons", None)) and not record["config"]["freeze_towers"]:
            sort_neurons(rows)
    if not trainer.stored:
        save_weights(output / MODEL, qat.float_weights(trained) if record["config"]["qat"] else trained.state_dict())
    write_npz(output / "calibration.npz", samples)
    features.schema.save(output / "schema.json")
    loss, auc = (
        {"train_logloss": ("training", "C0--"), "logloss": ("held out", "C0-")},
        {"auc": ("AUC, held out", "C1-")},
    )
    plot_curves(output / "learning_curve.png", record["history"], loss, auc, ("LogLoss", "AUC"), record["epochs"])
    inputs = [data] if isinstance(data, str | os.PathLike) else data
    paths = [path for path in inputs if isinstance(path, str | os.PathLike)]
    names = [Path(path) for pattern in paths for path, _ in sources.expand(pattern)]
    write_json(output / "train.json", record | provenance(record["config"]["seed"], names))
