"""Trains recommenders in torch on a click log: early stopping on the last rows, then once more on all rows.

All embedding tables of a log are one parameter; a step reads, decays and averages their rows in a few calls.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zoo
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError
from pipelines.core.files import sha256, write_json
from pipelines.core.plain import from_plain, to_plain
from pipelines.models.npz import write_npz
from zoo.recommenders import criteo
from zoo.recommenders.data import sources
from zoo.recommenders.data.columns.kinds import AS_NUMBERS, AS_TEXTS
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_logs
from zoo.recommenders.data.schema import Column, Schema
from zoo.recommenders.data.schema_inference import infer, load_schema, with_labels
from zoo.recommenders.models.checkpoints import MODEL, Build, training_record
from zoo.recommenders.models.multitask.outputs import parents_of
from zoo.recommenders.train_config import TrainConfig
from zoo.recommenders.training import qat
from zoo.recommenders.training.distillation import LogSource, Teacher
from zoo.recommenders.training.fitting import FINISHED, STATE, Fitting, new_trial
from zoo.recommenders.training.growth.growing import grown, new_row_rates
from zoo.recommenders.training.growth.id_counts import counted
from zoo.recommenders.training.growth.survey import growing
from zoo.recommenders.training.growth.vectors import center_priors, digest_of, fill_vectors, with_vectors
from zoo.recommenders.training.negative_sampling import log_odds, require_one_sampled_label, start_at_all_rows
from zoo.recommenders.training.row_store import CategoryCounts, RowStore
from zoo.recommenders.training.tables.networks import new_network, require_in_memory, tables_in_file
from zoo.recommenders.training.trainer import Trainer
from zoo.training.runs import (
    fill,
    load_checkpoint,
    plot_curves,
    processes,
    provenance,
    require_output,
    save_weights,
)
from zoo.training.settings import require_kept

CALIBRATION_ROWS = 4096
FINETUNE_ONLY = ("freeze_towers", "evict_after", "evict_below")  # settings that need a model to start from
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
        about = training_record(Path(start_from)) if start_from else {}
        if about:
            config = _with_sizes(config, about["config"])
            rate = config.negative_rate or about["config"].get("negative_rate", 0.0)
            config = replace(config, negative_rate=rate)
        features = (
            Features.from_json(about["features"])
            if about
            else Features(_schema(data, schema, label, on_error, getattr(build, "sequences", False)))
        )
        require_labels(build, features.schema)
        if start_from:
            require_in_memory(build, features, config, "fine-tuning")
        start_model = grown(build, features, config, Path(start_from), data) if start_from else None
        features = features if start_model is None else start_model.features
        features, vectors = with_vectors(features)
        if vectors:
            require_in_memory(build, features, config, "training from given vectors")
        _require_trainable(config, features, start_model is not None)
        torch.manual_seed(config.seed)
        start = sha256(Path(start_from) / "fp32.onnx") if start_from else None
        quantization = None
        if config.qat:
            config = qat.for_qat(config, start, group.count)
            quantization = qat.fake_quantization(start_from, features)
        store = RowStore(features, data, on_error, output)
        if not start_from:  # whose columns were chosen by another log
            store.require_values(features, data)
        settings = to_plain(config)
        start = digest_of(vectors) if vectors else start
        run = {"config": settings, "data": store.digest, "start": start}
        split = store.split(config.held_out)
        _require_both_labels(store, split, features.schema.labels)
        earlier = None if start_model is None else start_model.earlier

        @functools.lru_cache(maxsize=1)
        def categories_of(rows: int) -> CategoryCounts:
            return CategoryCounts(features, store, rows, config.min_count, earlier)

        of_split = categories_of(split)
        shares = of_split.unseen_shares(store.parts(split, len(store))).clamp(config.unknown, MAX_UNKNOWN)

        has_new = start_model is not None and any(column["added"] for column in start_model.report.values())
        announced: list[str] = []
        teacher = None
        if config.teacher:
            source = LogSource(data, on_error, output)
            shift = log_odds(config.negative_rate)
            teacher = Teacher(config.teacher, features.to_json(), config.distillation, source, shift)

        def new_trainer(rows: int, l2: float, files: Path) -> Trainer:
            torch.manual_seed(config.seed)
            model = new_network(build, features, config, group.count)
            require_one_sampled_label(config.negative_rate, features.schema, parents_of(model))
            if start_model is not None:
                fill(model, start_model.state, start_from or "")
            else:
                fill_vectors(model, vectors)
                if (begin := getattr(model, "begin_training", None)) is not None:
                    rare = of_split if rows == split else categories_of(rows)
                    begin({**part, "ids": rare.replace_rare(part["ids"])} for part in store.parts(0, rows))
            if start_model is None and config.negative_rate:
                example = store.rows(np.arange(min(len(store), 64)))
                inputs = example["ids"], example["numbers"], example["scales"]
                start_at_all_rows(model, inputs, log_odds(config.negative_rate))
            model = model if quantization is None else quantization.prepare(model)
            prior = replace(config, l2_embeddings=(l2,))
            table_rate, row_rates = new_row_rates(model, start_model) if start_model and has_new else (1.0, None)
            trainer = Trainer(model, prior, rows, group, table_rate, row_rates, files)
            if start_from:
                trainer.center_priors()
            elif vectors:
                center_priors(trainer, vectors)
            if trainer.sparse and not announced and group.rank == 0:
                heights = ", ".join(f"{len(table.weight):,}" for table in trainer.sparse.values())
                announced.append(f"tables of {heights} rows: a step changes the rows of its batch alone")
                announced[0] += f"; trained rows are kept in {files.parent}" if trainer.stored else ""
                print_line(announced[0])
            return trainer

        saved = load_checkpoint(output / STATE, run, ADDED) if resume else None
        if saved is not None and saved["phase"] == FINISHED:
            return _finished(output, saved, group.rank == 0)
        beginning: dict[str, Any] = {"run": run, "phase": "search", "trial": 0, "winner": {}}
        state: dict[str, Any] = saved or {**beginning, **new_trial()}
        state.setdefault("began", time.time())
        fitting = Fitting(output, store, features, config, new_trainer, shares, teacher, categories_of)
        if state["phase"] == "search":
            trainer = fitting.search(state, split)
            if config.refit:
                del trainer, state["best_weights"]  # all rows train new weights
                state["winner"].pop("weights")
                state |= {"phase": "refit", "epoch": 0, "trainer": None}
        if state["phase"] == "refit":
            trainer = fitting.fit(state, len(store), state["winner"]["epoch"], state["winner"]["l2"])
        used = len(store) if config.refit else split
        metrics = _metrics(state["winner"])
        if group.rank == 0:
            if not config.refit:
                trainer.load_snapshot(fitting.best_weights(state))
            record = {
                "config": settings,
                "features": features.to_json(),
                "metrics": metrics,
                "rows": {"train": split, "held_out": len(store) - split, "final": used, "left_out": store.errors.total},
                "epochs": state["winner"]["epoch"],
                "l2_embeddings": state["winner"]["l2"],
                "history": state["winner"]["history"],
                "seconds": round(time.time() - state["began"], 1),
                "processes": group.count,
                **({"ids": start_model.report} if start_model is not None and start_model.report else {}),
            }
            categories = categories_of(used)
            if growing(features) and not trainer.stored:  # tables in files do not grow
                counts, pending = (None, {}) if start_model is None else (start_model.counts, start_model.pending)
                counted(features, categories.counts, counts, pending).save(output, features)
            _write(output, data, trainer, categories, store, used, record)
            if quantization is not None:
                quantization.save_ranges(trainer.model, output)
            fitting.finish(state, metrics)
        group.same(None)  # the others wait for the files
    return {**metrics, "ids": start_model.report} if start_model is not None and start_model.report else metrics


def _require_trainable(config: TrainConfig, features: Features, finetunes: bool) -> None:
    """Raises RequestError for settings of fine-tuning in other trainings, and for logs without categories."""
    if not finetunes and (only := [name for name in FINETUNE_ONLY if getattr(config, name)]):
        raise RequestError(
            f"found the setting {only[0]} in a training from random weights, expected it in fine-tuning; run: zoo "
            "finetune MODEL"
        )
    if not features.fields:
        raise RequestError(
            "found numbers alone, expected a category or a list of them to learn embeddings of; give one such as an id "
            'or a code "kind": "category" (zoo schema LOG -o schema.json, then --schema schema.json)'
        )


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


def _schema(
    data: Any,
    schema: str | Path | Schema | None,
    label: str | Sequence[str] | None,
    on_error: str,
    sequences: bool,
) -> Schema:
    """Returns the schema, with other labels if given, or infers it from the data."""
    if schema is None:
        log_schema = infer(open_logs(data), label, on_error, sequences=sequences)
        ignored = ", ".join(f"{column.name} ({column.why})" for column in log_schema.of("ignored"))
        held = ", ".join(column.name for column in log_schema.of("timestamp")) or "their order"
        kinds = ", ".join(f"{len(log_schema.of(kind))} {kind}" for kind in ("number", "category", "categories"))
        mixed = ", ".join(
            column.name for column in log_schema.of("category") if AS_NUMBERS in column.why or AS_TEXTS in column.why
        )
        kinds += f" (numbers with other texts: {mixed}; zoo schema says more)" if mixed else ""
        kinds += f"; ignored: {ignored}" if ignored else ""
        print_line(
            f"schema inferred from {log_schema.rows:,} rows: predicts {', '.join(log_schema.labels)} from {kinds}; the "
            f"last rows by {held} are held out (zoo schema shows it, --schema takes an edited one)",
        )
        return log_schema
    source = criteo.schema(data, on_error=on_error) if criteo.is_built_in(schema) else schema
    log_schema = source if isinstance(source, Schema) else load_schema(source, data, on_error)
    labels = (label,) if isinstance(label, str) else tuple(label or ())
    if not labels:
        return log_schema
    names = [column.name for column in log_schema.columns]
    if twice := [name for index, name in enumerate(labels) if name in labels[:index]]:
        raise RequestError(f"found the label {twice[0]} twice, expected every label once; leave one of them out")
    if unknown := [name for name in labels if name not in names]:
        raise RequestError(f"the schema has no column {unknown[0]!r}; its columns are {', '.join(names)}")
    chosen = with_labels(log_schema.columns, labels)
    return replace(log_schema, columns=tuple(_within(column, labels) for column in chosen))


def _within(column: Column, labels: Sequence[str]) -> Column:
    """A column whose label `where` is one of `labels`, else none."""
    return replace(column, where="") if column.where and column.where not in labels else column


def require_labels(build: Build, schema: Schema) -> None:
    """Checks the number of labels that a network is trained on.

    Args:
        build: Creates the network; `labels` gives the fewest and the most labels, if more than one may be.
        schema: Schema of the log.

    Raises:
        RequestError: The network predicts another number.
    """
    if not schema.labels:
        raise RequestError("the schema has no column of the kind label; training predicts one of 0 and 1")
    fewest, most = getattr(build, "labels", (1, 1))
    if len(schema.labels) > most:
        able = [name for name, entry in zoo.entries().items() if getattr(getattr(entry, "build", None), "labels", ())]
        raise RequestError(
            f"the schema has the labels {', '.join(schema.labels)}, expected one; train a family of several labels "
            f"({', '.join(able)}), or choose one with --label {schema.labels[0]}"
        )
    if len(schema.labels) < fewest:
        raise RequestError(
            f"the schema has the label {schema.labels[0]} alone, expected at least {fewest}; name them in their order, "
            "such as --label clicked --label bought"
        )


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


def _with_sizes(config: Any, kept: Mapping[str, Any]) -> Any:
    """The settings with the sizes of the model that training starts from."""
    kept = {**config.absent, **kept}
    sizes = from_plain({name: kept[name] for name in _sizes(config) if name in kept})
    for name, size in sizes.items():
        if (setting := getattr(config, name)) != getattr(type(config)(), name):
            require_kept(name, setting, size)
    return replace(config, **sizes)


def _sizes(config: Any) -> list[str]:
    """Settings that determine the shapes of the weights: those of the family, and two of the shared recipe."""
    return ["embedding_size", "hidden", *(asdict(config).keys() - asdict(TrainConfig()).keys())]


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
