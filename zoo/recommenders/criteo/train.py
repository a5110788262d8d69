"""Train Wide & Deep (Cheng et al. 2016) with Keras: early stopping on the log's last rows, then once more on all of
them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core.console import console
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json, replacing, sha256, write_json
from pipelines.core.progress import progress, silent
from pipelines.graph import edit, io
from zoo.recommenders.criteo.checkpoint import Checkpoint
from zoo.recommenders.criteo.data import BUCKETS, CATEGORICAL, NUMERIC, Counts, Rows
from zoo.recommenders.criteo.features import Features
from zoo.recommenders.criteo.fitting import fit
from zoo.recommenders.criteo.model import Weights, assign, build_model, sort_neurons
from zoo.recommenders.criteo.row_store import RowStore, arrays
from zoo.recommenders.data.row_errors import timed
from zoo.recommenders.metrics import click_metrics
from zoo.recommenders.training.distillation import Teacher
from zoo.training.runs import (
    BELOW_1,
    FROM_0,
    SEED,
    SHARE,
    Workers,
    checkpointed,
    plot_curves,
    require_output,
    require_settings,
)

import keras  # isort: skip  # after zoo.recommenders.criteo.model, which quiets TensorFlow before its first import
import tensorflow as tf  # isort: skip


WEIGHTS, STATE = "model.weights.h5", "checkpoint/state.npz"
CALIBRATION_ROWS = 4096
RANGES = {
    "seed": SEED,
    "distillation": SHARE,
    "dropout": BELOW_1,
    "ema": BELOW_1,
    **dict.fromkeys(("l2_embeddings", "l2_wide", "min_delta"), FROM_0),
}


@dataclass(frozen=True)
class TrainConfig:
    """The training recipe.

    validation: how many of the log's last rows are held out, a count or a share below 1. min_delta: by how much their
    LogLoss must fall below the best one's to make an epoch the best; late gains this small are lost on the days after.
    patience: epochs without a new best that end the search. refit: train once more from the start on all rows, for as
    many epochs as were best.
    ema: momentum of the average of the weights over training steps; the average is what is evaluated and kept. l2_*:
    weigh the squared distance of all table entries from 0 (in fine-tuning: from the starting weights) against the *sum*
    of the rows' losses, as a Gaussian prior does, so that they hold for any number of rows. teacher: a model whose
    probabilities are the share `distillation` of each label (`zoo.recommenders.training.distillation`). Raises
    RequestError for values out
    of range.
    """

    numeric: int = NUMERIC
    categorical: int = CATEGORICAL
    buckets: int = BUCKETS
    embedding_size: int = 32
    hidden: tuple[int, ...] = (1024, 512, 256)
    epochs: int = 40
    batch_size: int = 256
    learning_rate: float = 1e-3
    dropout: float = 0.3
    ema: float = 0.98
    l2_embeddings: float = 5000.0
    l2_wide: float = 8.0
    patience: int = 3
    min_delta: float = 0.001
    validation: float = 1500.0
    refit: bool = True
    teacher: str = ""
    distillation: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require_settings(asdict(self), RANGES)


TRAIN = TrainConfig()
# Fine-tuning starts near a good minimum: steps of 1e-4 keep it there (those of 1e-3 forgot more than 1,000 or 2,400 own
# rows taught), and the prior holds the tables at the starting weights instead of at 0 (L2-SP, Li et al. 2018). A share
# is held out, because own data may have fewer rows than the recipe's 1,500.
FINETUNE = TrainConfig(learning_rate=1e-4, validation=0.15)


class Trainer:
    """A model in training on `rows` rows, the running average of its weights and its optimizer: all that a checkpoint
    holds.

    `step` takes this process's share of a batch and the rows of the whole batch, and returns the sum of the losses of
    all of them; every process applies the same sum of all gradients.
    """

    def __init__(
        self, features: Features, config: TrainConfig, rows: int, start: Weights | None, workers: Workers
    ) -> None:
        keras.utils.set_random_seed(config.seed)
        with workers.strategy.scope():
            self.model, self.average = build_model(features, config), build_model(features, config)
            if start is not None:
                assign(self.model, start)
            self.average.set_weights(self.model.get_weights())
            self.optimizer = keras.optimizers.Adam(config.learning_rate)
            self.optimizer.build(self.model.trainable_variables)
        logits = keras.Model(self.model.inputs, self.model.get_layer("logit").output)
        weights, means = self.model.trainable_variables, self.average.trainable_variables
        kinds = {"embeddings": config.l2_embeddings, "weights": config.l2_wide}

        def pull(weight: Any, gradient: Any) -> Any:
            """Dense gradient plus that of l2 |weight - start|^2: of the whole table, not only of the batch's rows of
            it.
            """
            if weight.name not in kinds:
                return gradient
            strength = (
                2 * kinds[weight.name] / rows / workers.count
            )  # the loss is a mean over rows, gradients are summed over processes
            return tf.convert_to_tensor(gradient) + strength * (weight - (start[weight.path] if start else 0.0))

        def share(ids: Any, numbers: Any, labels: Any, count: Any) -> Any:
            with tf.GradientTape() as tape:
                losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits([ids, numbers], training=True)[:, 0])
                total = tf.reduce_sum(losses)
                loss = total / count
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply(
                [pull(weight, gradient) for weight, gradient in zip(weights, gradients, strict=True)], weights
            )
            return workers.sum(total)

        @tf.function(input_signature=_signature(features, training=True))  # type: ignore[untyped-decorator]
        def step(ids: Any, numbers: Any, labels: Any, count: Any) -> Any:
            total = workers.strategy.run(share, (ids, numbers, labels, count))
            steps = tf.cast(self.optimizer.iterations, tf.float32)
            keep = tf.minimum(config.ema, (1 + steps) / (10 + steps))  # forget the first weights quickly
            for mean, weight in zip(means, weights, strict=True):
                mean.assign_add((weight - mean) * (1 - keep))
            return total

        self.step = step
        self.predict = tf.function(
            lambda ids, numbers: self.average([ids, numbers])[:, 0], input_signature=_signature(features)
        )

    @property
    def variables(self) -> list[Any]:
        """Everything that training changes, the dropout's random state as well."""
        return [*self.model.variables, *self.optimizer.variables, *self.average.weights]

    def restore(self, values: Sequence[Any]) -> None:
        """Set `variables`."""
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def evaluate(self, pieces: Iterable[Rows], features: Features) -> dict[str, float]:
        """AUC and LogLoss of the averaged weights on labelled rows."""
        scores, labels = [], []
        for rows in pieces:
            ids, numbers, clicks = arrays(rows, features)
            scores += [self.predict(ids[i : i + 4096], numbers[i : i + 4096]) for i in range(0, len(clicks), 4096)]
            labels.append(clicks)
        return click_metrics(np.concatenate(labels), np.concatenate(scores))


def _signature(features: Features, training: bool = False) -> list[Any]:
    ids, numbers = (None, features.categorical), (None, features.numeric)
    inputs = [tf.TensorSpec(ids, tf.int32, name="ids"), tf.TensorSpec(numbers, tf.float32, name="numbers")]
    targets = [tf.TensorSpec((None,), tf.float32, name="labels"), tf.TensorSpec((), tf.float32, name="count")]
    return [*inputs, *targets] if training else inputs


def train(
    data: Any,
    output: str | Path,
    *,
    config: TrainConfig | None = None,
    resume: bool = False,
    start_from: str | Path | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Train on labelled rows (whatever `read_rows` takes) in time order; returns {"auc", "logloss", "accuracy"} on the
    held-out last ones.

    `output` gets model.weights.h5, train.json (with the features), learning_curve.png, calibration.npz
    (`CALIBRATION_ROWS` training samples, preprocessed) and, after every epoch, checkpoint/state.npz, from which
    `resume` goes on to the same result. One seed gives the same weights on one machine. `start_from` is a model folder
    whose weights (fp32.onnx), sizes and preprocessing are taken over; `config` is then `FINETUNE` unless given, else
    `TRAIN`. With `refit`, metrics and history are those of the search: the final model has seen the held-out rows.
    Raises RequestError for unusable data, an output folder in use, or a checkpoint of another run.
    """
    workers = Workers()
    with workers.watched():
        return _train(workers, data, Path(output), config, resume, start_from, on_error)


def _train(
    workers: Workers,
    data: Any,
    output: Path,
    config: TrainConfig | None,
    resume: bool,
    start_from: str | Path | None,
    on_error: str,
) -> dict[str, Any]:
    workers.agreed(lambda: require_output(output, STATE, resume))
    asked = config or (FINETUNE if start_from else TRAIN)
    start, features, config = workers.together(
        lambda: started(Path(start_from), asked) if start_from else (None, None, asked)
    )
    tf.config.experimental.enable_op_determinism()

    counts, begin = (
        Counts(numeric=config.numeric, categorical=config.categorical, buckets=config.buckets),
        time.perf_counter(),
    )
    log = workers.together(lambda: RowStore(data, counts, on_error, output))
    settings = asdict(config) | {"hidden": list(config.hidden)}
    run = {
        "config": settings,
        "data": log.digest,
        "start": sha256(Path(start_from) / "fp32.onnx") if start_from else None,
    }
    workers.require_same(run, "rows, settings or starting weights")
    held = round(config.validation if config.validation >= 1 else config.validation * log.rows)
    if not 0 < held < log.rows:
        raise RequestError(
            f"found {log.rows} rows, wanted more than the {held} to hold out; set validation to a share such as 0.15"
        )
    split = log.rows - held
    features = features or fit(log.part(0, split), buckets=config.buckets)
    if len(found := np.unique(np.concatenate([rows.labels for rows in log.part(split, log.rows)]))) < 2:
        raise RequestError(
            f"found only label {found[0]:.0f} in the last {held} rows, wanted both for an AUC; set validation to more "
            "rows"
        )

    saved = workers.agreed(lambda: Checkpoint.load(output / STATE, run) if resume else Checkpoint(run))
    saved.seconds["read"] += time.perf_counter() - begin
    if saved.phase == "search":
        _fit(saved, output, log, split, config.epochs, features, config, start, workers, search=True)
        if config.refit:
            saved.phase, saved.epoch, saved.variables = "refit", 0, []
    weights = saved.best_weights
    if saved.phase == "refit":
        weights = _fit(saved, output, log, log.rows, saved.best["epoch"], features, config, start, workers)

    metrics: dict[str, float] = {name: saved.best[name] for name in ("auc", "logloss", "accuracy")}
    used = log.rows if config.refit else split
    record = {
        "config": settings,
        "features": features.to_json(),
        "metrics": metrics,
        "rows": {"train": split, "held_out": held, "final": used, "left_out": log.errors.total},
        "epochs": saved.best["epoch"],
        "history": saved.history,
    }
    workers.agreed(
        lambda: _write(output, data, weights, _sample(log.part(0, used), used, features, config.seed), saved, record)
    )
    return metrics


def _fit(
    saved: Checkpoint,
    output: Path,
    log: RowStore,
    rows: int,
    epochs: int,
    features: Features,
    config: TrainConfig,
    start: Weights | None,
    workers: Workers,
    search: bool = False,
) -> list[Any]:
    """Train on the first `rows` rows up to epoch `epochs`; in a search, judge each by the rows after them, note the
    best and stop early.

    Returns the average of the weights.
    """
    trainer = Trainer(features, config, rows, start, workers)
    teacher = Teacher(config.teacher, features.to_json(), config.distillation) if config.teacher else None
    if saved.variables:
        trainer.restore(saved.variables)
    path = output / STATE if workers.rank == 0 else None
    saved.save(path, trainer.variables)
    while saved.epoch < epochs and not (search and saved.stale >= config.patience):
        epoch, shown = saved.epoch + 1, progress if workers.rank == 0 else silent
        batches = log.batches(
            rows,
            features,
            config.batch_size,
            [config.seed, epoch],
            skip=saved.batch,
            rank=workers.rank,
            processes=workers.count,
        )
        with shown(f"{saved.phase}: epoch {epoch} of {epochs}", rows) as advance, contextlib.closing(batches):
            advance(saved.batch * config.batch_size)
            for batch, count in timed(batches, saved.seconds, "wait"):
                if teacher is not None:
                    ids, numbers, clicks = batch
                    batch = ids, numbers, teacher.labels({"ids": ids, "numbers": numbers}, clicks)
                with saved.clock("step"):
                    saved.loss += float(trainer.step(*batch, count))
                saved.batch, saved.trained = saved.batch + 1, saved.trained + count
                advance(count)
                saved.save_now_and_then(path, trainer.variables)
        loss = saved.loss / rows
        if not np.isfinite(loss):
            raise ZooError(
                f"training diverged in epoch {epoch} (LogLoss {loss}); train again with a lower learning_rate"
            )
        saved.epoch, saved.batch, saved.loss = epoch, 0, 0.0
        line = f"{saved.phase}: epoch {epoch}/{epochs}  LogLoss {loss:.4f}"
        if search:
            with saved.clock("evaluate"):
                found = workers.agreed(lambda: trainer.evaluate(log.part(rows, log.rows), features))
            saved.note(
                {"epoch": epoch, "train_logloss": loss, **found}, trainer.average.get_weights(), config.min_delta
            )
            line += f"  held out {found['logloss']:.4f}  AUC {found['auc']:.4f}"
        saved.save(path, trainer.variables)
        checkpointed(output)
        if workers.rank == 0:
            console.print(line, highlight=False, soft_wrap=True)
    return list(trainer.average.get_weights())


def _write(
    output: Path, data: Any, weights: list[Any], samples: dict[str, Any], saved: Checkpoint, record: dict[str, Any]
) -> None:
    """Everything but the checkpoint."""
    features = Features.from_json(record["features"])
    model = build_model(features, TrainConfig(**record["config"] | {"hidden": tuple(record["config"]["hidden"])}))
    model.set_weights(weights)
    sources = [data] if isinstance(data, str | os.PathLike) else data
    names = [os.fspath(each) for each in sources if isinstance(each, str | os.PathLike)]
    files = [Path(name) for name in names if "\t" not in name and Path(name).is_file()]  # not raw rows, not a hub id
    sort_neurons(model, samples)
    save_network(model, output)
    with replacing(output / "calibration.npz") as temporary:
        np.savez(temporary, **samples)
    loss, auc = (
        {"train_logloss": ("training", "C0--"), "logloss": ("held out", "C0-")},
        {"auc": ("AUC, held out", "C1-")},
    )
    plot_curves(output / "learning_curve.png", saved.history, loss, auc, ("LogLoss", "AUC"), saved.best["epoch"])
    about = {
        "seed": record["config"]["seed"],
        "trained_rows": saved.trained,
        "seconds": {name: round(value, 3) for name, value in saved.seconds.items()},
        "data": [{"file": path.name, "sha256": sha256(path)} for path in files],
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
    }
    write_json(output / "train.json", record | about)


def save_network(model: Any, folder: Path) -> None:
    """Write the weights of a network of Keras into a folder, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:  # Keras insists on the ending .weights.h5
        model.save_weights(Path(scratch) / WEIGHTS)
        (Path(scratch) / WEIGHTS).replace(folder / WEIGHTS)


def started(folder: Path, config: TrainConfig) -> tuple[dict[str, Any], Features, TrainConfig]:
    """Weights, preprocessing and sizes of the model to start from."""
    own = folder / "train.json"
    features = Features.from_json(
        read_json(own)["features"] if own.is_file() else read_json(folder / "card.json").get("preprocessing")
    )
    model = io.load(folder / "fp32.onnx")
    edit.expand_fp16(model)
    weights = {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    hidden = [weights[f"hidden_{k}/kernel"].shape[1] for k in range(len(weights)) if f"hidden_{k}/kernel" in weights]
    if "deep/C1/embeddings" not in weights or not hidden:
        raise RequestError(
            f"found no Wide & Deep weights in {folder / 'fp32.onnx'}; start from a folder that zoo train or zoo "
            "download wrote"
        )
    sizes = {"hidden": tuple(hidden), "embedding_size": weights["deep/C1/embeddings"].shape[1], **features.counts}
    for name, size in sizes.items():
        if getattr(config, name) not in (getattr(FINETUNE, name), size):
            raise RequestError(
                f"found {name} {getattr(config, name)}, but fine-tuning keeps the sizes of the model ({size}); leave "
                "it out"
            )
    return weights, features, replace(config, **sizes)


def _sample(pieces: Iterable[Rows], rows: int, features: Features, seed: int) -> dict[str, Any]:
    """Inputs of up to `CALIBRATION_ROWS` of the rows, drawn without replacement, in their order."""
    chosen = np.sort(np.random.default_rng(seed).choice(rows, min(rows, CALIBRATION_ROWS), replace=False))
    parts, position = [], 0
    for piece in pieces:
        inside = chosen[(chosen >= position) & (chosen < position + len(piece))] - position
        parts.append({name: array[inside] for name, array in features.encode(piece).items()})
        position += len(piece)
    return {name: np.concatenate([part[name] for part in parts]) for name in ("ids", "numbers")}
