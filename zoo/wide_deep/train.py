"""Train Wide & Deep (Cheng et al. 2016) with Keras: early stopping on the log's last rows, then once more on all of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import platform
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines import graph
from pipelines.errors import RequestError, ZooError
from pipelines.evaluate import click_metrics
from pipelines.files import read_json, replacing, sha256, write_json
from pipelines.progress import progress
from zoo.training import plot_curves, require_output, require_same_run, require_settings
from zoo.wide_deep.data import BUCKETS, CATEGORICAL, NUMERIC, Counts, ErrorLog, Features, Rows, fit, read_rows

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN announces itself on stderr and brings this small model nothing
import keras
import tensorflow as tf

Floats = npt.NDArray[np.float32]
Batch = tuple[npt.NDArray[np.int32], Floats, Floats]  # ids [n, categorical], numbers [n, numeric], labels [n]
Weights = Mapping[str, Floats]  # by variable path

WEIGHTS, STATE = "model.weights.h5", "checkpoint/state.npz"
CALIBRATION_ROWS = 4096
BLOCK_ROWS = 2_000_000  # rows in memory at once, 168 bytes each: smaller data is read once, larger data once an epoch


@dataclass(frozen=True)
class TrainConfig:
    """The training recipe.

    validation: how many of the log's last rows are held out, a count or a share below 1. min_delta: by how much their LogLoss must
    fall below the best one's to make an epoch the best; late gains this small are lost on the days after. patience: epochs without a
    new best that end the search. refit: train once more from the start on all rows, for as many epochs as were best.
    ema: momentum of the average of the weights over training steps; the average is what is evaluated and kept.
    l2_*: weigh the squared distance of all table entries from 0 (in fine-tuning: from the starting weights) against the *sum* of the
    rows' losses, as a Gaussian prior does, so that they hold for any number of rows.
    Raises RequestError for values out of range.
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
    seed: int = 0

    def __post_init__(self) -> None:
        def fits(name: str, value: Any) -> bool:
            if isinstance(value, float) and not math.isfinite(value):
                return False
            if name == "seed":
                return bool(0 <= value < 2**32)
            if name in ("dropout", "ema"):
                return bool(0 <= value < 1)
            least = min(value, default=0) if name == "hidden" else value
            return bool(least >= 0 if name in ("l2_embeddings", "l2_wide", "min_delta", "refit") else least > 0)

        require_settings(asdict(self), fits)


TRAIN = TrainConfig()
# Fine-tuning starts near a good minimum: steps of 1e-4 keep it there (those of 1e-3 forgot more than 1,000 or 2,400 own rows taught),
# and the prior holds the tables at the starting weights instead of at 0 (L2-SP, Li et al. 2018). A share is held out, because own
# data may have fewer rows than the recipe's 1,500.
FINETUNE = TrainConfig(learning_rate=1e-4, validation=0.15)


class Tables(keras.layers.Layer):  # type: ignore[misc]
    """One table a field: int32 [n, fields] -> a list of float32 [n, size]. The variables are called `<layer>/C<field>/<variable>`."""

    def __init__(self, fields: int, buckets: int, size: int, variable: str, initializer: str, **options: Any) -> None:
        super().__init__(**options)
        self.tables = [_Table((buckets, size), variable, initializer, name=f"C{i + 1}") for i in range(fields)]

    def build(self, shape: Any) -> None:
        """Make the variables."""
        for table in self.tables:
            table.build(shape)

    def call(self, ids: Any) -> Any:
        """Look every field up in its table."""
        return [table(ids[:, i]) for i, table in enumerate(self.tables)]


class _Table(keras.layers.Layer):  # type: ignore[misc]
    """keras.layers.Embedding without its wrap of negative ids, which is half of the operators of a frozen graph."""

    def __init__(self, shape: tuple[int, int], variable: str, initializer: str, **options: Any) -> None:
        super().__init__(**options)
        self.settings = {"shape": shape, "name": variable, "initializer": initializer}

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(**self.settings)

    def call(self, ids: Any) -> Any:
        return tf.gather(self.table, ids)


def build_model(features: Features, config: TrainConfig) -> keras.Model:
    """Build the network of Cheng et al. 2016, figure 4, with fresh weights from Keras' global seed.

    Inputs `ids` int32 [n, 26] and `numbers` float32 [n, 13]; output `probability` float32 [n, 1]. Variables: `deep/C<i>/embeddings`
    [buckets, embedding_size], `wide/C<i>/weights` [buckets, 1], `hidden_<k>/kernel` and `/bias`, `deep_logit/kernel` and `/bias`.
    """
    fields = features.categorical
    ids = keras.Input((fields,), dtype="int32", name="ids")
    numbers = keras.Input((features.numeric,), dtype="float32", name="numbers")
    embeddings = Tables(fields, features.buckets, config.embedding_size, "embeddings", "uniform", name="deep")(ids)
    hidden = keras.layers.Concatenate(name="features")([*embeddings, numbers])
    for k, size in enumerate(config.hidden):
        hidden = keras.layers.Dense(size, activation="relu", name=f"hidden_{k}")(hidden)
        hidden = keras.layers.Dropout(config.dropout, name=f"dropout_{k}")(hidden)
    deep = keras.layers.Dense(1, name="deep_logit")(hidden)
    wide = Tables(fields, features.buckets, 1, "weights", "zeros", name="wide")(ids)
    logit = keras.layers.Add(name="logit")([deep, *wide])
    return keras.Model([ids, numbers], keras.layers.Activation("sigmoid", name="probability")(logit), name="wide_deep")


def assign(model: keras.Model, weights: Weights) -> None:
    """Set the model's weights by variable path. Raises RequestError naming every weight that is missing or has another shape."""
    wrong = [
        f"{variable.path} {list(weights[variable.path].shape) if variable.path in weights else 'missing'}, wanted {list(variable.shape)}"
        for variable in model.weights
        if variable.path not in weights or weights[variable.path].shape != tuple(variable.shape)
    ]
    if wrong:
        raise RequestError(f"found weights of another model: {'; '.join(wrong)}")
    for variable in model.weights:
        variable.assign(weights[variable.path])


def sort_neurons(model: keras.Model, samples: Mapping[str, Any]) -> None:
    """Number the neurons of every hidden layer by how often they are active on `samples` (model inputs), most often first. In place.

    The same function: columns of a kernel and the rows of the next change places together. Zeros of the ReLU then come in runs, which
    the native kernels skip.
    """
    hidden = [each for each in model.layers if each.name.startswith("hidden_")]
    outputs = keras.Model(model.inputs, {each.name: each.output for each in hidden})([samples["ids"], samples["numbers"]], training=False)
    for layer, after in itertools.pairwise([*hidden, model.get_layer("deep_logit")]):
        values = np.asarray(outputs[layer.name])
        active = (values > values.max(initial=0) / 512).mean(axis=0)  # what does not round to zero in 8 bits
        order = np.argsort(-active, kind="stable")
        kernel, bias = layer.get_weights()
        layer.set_weights([kernel[:, order], bias[order]])
        kernel, bias = after.get_weights()
        after.set_weights([kernel[order], bias])


class Log:
    """A labelled log in its order: held in memory up to `BLOCK_ROWS` rows, read again from its source every time beyond."""

    def __init__(self, data: Any, counts: Counts, on_error: str) -> None:
        self.data, self.options = data, dict[str, Any](on_error=on_error, **counts)
        self.rows, self.errors, digest = 0, ErrorLog(), hashlib.sha256()
        kept: list[Rows] = []
        with progress("reading") as advance:
            for rows in read_rows(data, errors=self.errors, **self.options):
                if rows.labels is None:
                    raise RequestError("found rows without labels, wanted a label (0 or 1) in front of every row to train on")
                for array in (rows.labels, rows.numbers, rows.ids):
                    digest.update(array.tobytes())
                self.rows += len(rows)
                kept = [*kept, rows] if self.rows <= BLOCK_ROWS else []
                advance(len(rows))
        if not self.rows:
            raise RequestError(f"found no rows to train on: {self.errors}")
        self.digest = digest.hexdigest()
        self.memory = [Rows.concatenate(kept)] if kept else None

    def part(self, start: int, stop: int) -> Iterator[Rows]:
        """Rows [start, stop) in blocks of up to `BLOCK_ROWS`. Raises RequestError where the source has fewer rows than at first."""
        position = 0
        for rows in self.memory or read_rows(self.data, batch_rows=BLOCK_ROWS, **self.options):
            piece = rows[max(start - position, 0) : max(stop - position, 0)]
            position += len(rows)
            if len(piece):
                yield piece
            if position >= stop:
                return
        raise RequestError(f"found {position} rows where {self.rows} were at first; train on files that stay as they are")

    def batches(self, stop: int, features: Features, size: int, seed: Sequence[int]) -> Iterator[Batch]:
        """The first `stop` rows once, shuffled within every block."""
        random = np.random.default_rng(seed)
        for block in self.part(0, stop):
            ids, numbers, labels = _arrays(block, features)
            order = random.permutation(len(block))
            for begin in range(0, len(order), size):
                some = order[begin : begin + size]
                yield ids[some], numbers[some], labels[some]


def _arrays(rows: Rows, features: Features) -> Batch:
    inputs = features.encode(rows)
    assert rows.labels is not None
    return inputs["ids"], inputs["numbers"], rows.labels


class Trainer:
    """A model in training on `rows` rows, the running average of its weights and its optimizer: all that a checkpoint holds."""

    def __init__(self, features: Features, config: TrainConfig, rows: int, start: Weights | None) -> None:
        keras.utils.set_random_seed(config.seed)
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
            """Dense gradient plus that of l2 |weight - start|^2: of the whole table, not only of the batch's rows of it."""
            if weight.name not in kinds:
                return gradient
            strength = 2 * kinds[weight.name] / rows  # the loss is a mean over rows
            return tf.convert_to_tensor(gradient) + strength * (weight - (start[weight.path] if start else 0.0))

        @tf.function(input_signature=_signature(features, labels=True))  # type: ignore[untyped-decorator]
        def step(ids: Any, numbers: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits([ids, numbers], training=True)[:, 0])
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply([pull(weight, gradient) for weight, gradient in zip(weights, gradients, strict=True)], weights)
            steps = tf.cast(self.optimizer.iterations, tf.float32)
            keep = tf.minimum(config.ema, (1 + steps) / (10 + steps))  # forget the first weights quickly
            for mean, weight in zip(means, weights, strict=True):
                mean.assign_add((weight - mean) * (1 - keep))
            return tf.reduce_sum(losses)

        self.step = step
        self.predict = tf.function(lambda ids, numbers: self.average([ids, numbers])[:, 0], input_signature=_signature(features))

    @property
    def variables(self) -> list[Any]:
        """Everything that training changes, the dropout's random state as well."""
        return [*self.model.variables, *self.optimizer.variables, *self.average.weights]

    def restore(self, values: Sequence[Any]) -> None:
        """Set `variables`."""
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def epoch(self, title: str, rows: int, batches: Iterable[Batch]) -> float:
        """Train on every batch once; returns the mean training loss (with dropout, without the prior)."""
        total = 0.0
        with progress(title, rows) as advance:
            for ids, numbers, labels in batches:
                total += float(self.step(ids, numbers, labels))
                advance(len(labels))
        return total / rows

    def evaluate(self, held_out: Batch) -> dict[str, float]:
        """AUC and LogLoss of the averaged weights."""
        ids, numbers, labels = held_out
        scores = [self.predict(ids[i : i + 4096], numbers[i : i + 4096]) for i in range(0, len(labels), 4096)]
        return click_metrics(labels, np.concatenate(scores))


def _signature(features: Features, labels: bool = False) -> list[Any]:
    ids, numbers = (None, features.categorical), (None, features.numeric)
    inputs = [tf.TensorSpec(ids, tf.int32, name="ids"), tf.TensorSpec(numbers, tf.float32, name="numbers")]
    return [*inputs, tf.TensorSpec((None,), tf.float32, name="labels")] if labels else inputs


def train(
    data: Any,
    output: str | Path,
    *,
    config: TrainConfig | None = None,
    resume: bool = False,
    start_from: str | Path | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Train on labelled rows (whatever `read_rows` takes) in time order; returns {"auc", "logloss", "accuracy"} on the held-out last ones.

    `output` gets model.weights.h5, train.json (with the features), learning_curve.png, calibration.npz (`CALIBRATION_ROWS` training
    samples, preprocessed) and, after every epoch, checkpoint/state.npz, from which `resume` goes on to the same result. One seed gives
    the same weights on one machine. `start_from` is a model folder whose weights (fp32.onnx), sizes and preprocessing are taken over;
    `config` is then `FINETUNE` unless given, else `TRAIN`. With `refit`, metrics and history are those of the search: the final model
    has seen the held-out rows. Raises RequestError for unusable data, an output folder in use, or a checkpoint of another run.
    """
    output = Path(output)
    require_output(output, STATE, resume)
    config = config or (FINETUNE if start_from else TRAIN)
    start, features = None, None
    if start_from is not None:
        start, features, config = _start(Path(start_from), config)
    tf.config.experimental.enable_op_determinism()

    log = Log(data, Counts(numeric=config.numeric, categorical=config.categorical, buckets=config.buckets), on_error)
    held = round(config.validation if config.validation >= 1 else config.validation * log.rows)
    if not 0 < held < log.rows:
        raise RequestError(f"found {log.rows} rows, wanted more than the {held} to hold out; set validation to a share such as 0.15")
    split = log.rows - held
    features = features or fit(log.part(0, split), buckets=config.buckets)
    held_out = _arrays(Rows.concatenate(list(log.part(split, log.rows))), features)
    if len(found := np.unique(held_out[2])) < 2:
        raise RequestError(f"found only label {found[0]:.0f} in the last {held} rows, wanted both for an AUC; set validation to more rows")

    settings = asdict(config) | {"hidden": list(config.hidden)}
    run = {"config": settings, "data": log.digest, "start": sha256(Path(start_from) / "fp32.onnx") if start_from else None}
    saved = _Checkpoint.load(output / STATE, run) if resume else _Checkpoint(run)
    if saved.phase == "search":
        model = _fit(saved, output, log, split, config.epochs, features, config, start, held_out)
        model.set_weights(saved.best_weights)
        if config.refit:
            saved.phase, saved.epoch, saved.best_weights, saved.variables = "refit", 0, [], []
    if saved.phase == "refit":
        model = _fit(saved, output, log, log.rows, saved.best["epoch"], features, config, start)

    used = log.rows if config.refit else split
    metrics = {name: saved.best[name] for name in ("auc", "logloss", "accuracy")}
    sources = [data] if isinstance(data, str | os.PathLike) else data
    names = [os.fspath(each) for each in sources if isinstance(each, str | os.PathLike)]
    files = [Path(name) for name in names if "\t" not in name and Path(name).is_file()]  # not raw rows, not a hub id
    samples = _sample(log.part(0, used), used, features, config.seed)
    sort_neurons(model, samples)
    with tempfile.TemporaryDirectory(dir=output, prefix=".") as scratch:  # Keras insists on the ending .weights.h5
        model.save_weights(Path(scratch) / WEIGHTS)
        (Path(scratch) / WEIGHTS).replace(output / WEIGHTS)
    with replacing(output / "calibration.npz") as temporary:
        np.savez(temporary, **samples)
    loss, auc = {"train_logloss": ("training", "C0--"), "logloss": ("held out", "C0-")}, {"auc": ("AUC, held out", "C1-")}
    plot_curves(output / "learning_curve.png", saved.history, loss, auc, ("LogLoss", "AUC"), saved.best["epoch"])
    record = {
        "config": settings,
        "features": features.to_json(),
        "metrics": metrics,
        "rows": {"train": split, "held_out": held, "final": used, "left_out": log.errors.total},
        "epochs": saved.best["epoch"],
        "history": saved.history,
        "seed": config.seed,
        "data": [{"file": path.name, "sha256": sha256(path)} for path in files],
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
    }
    write_json(output / "train.json", record)
    return metrics


def _fit(
    saved: _Checkpoint,
    output: Path,
    log: Log,
    rows: int,
    epochs: int,
    features: Features,
    config: TrainConfig,
    start: Weights | None,
    held_out: Batch | None = None,
) -> keras.Model:
    """Train on the first `rows` rows up to epoch `epochs`; with `held_out`, note the best epoch and stop early. Returns the average."""
    trainer = Trainer(features, config, rows, start)
    if saved.variables:
        trainer.restore(saved.variables)
    saved.save(output / STATE, trainer)
    while saved.epoch < epochs and not (held_out and saved.stale >= config.patience):
        saved.epoch += 1
        batches = log.batches(rows, features, config.batch_size, [config.seed, saved.epoch])
        loss = trainer.epoch(f"{saved.phase}: epoch {saved.epoch} of {epochs}", rows, batches)
        if not np.isfinite(loss):
            raise ZooError(f"training diverged in epoch {saved.epoch} (LogLoss {loss}); train again with a lower learning_rate")
        if held_out:
            found = {"epoch": saved.epoch, "train_logloss": loss, **trainer.evaluate(held_out)}
            saved.note(found, trainer.average.get_weights(), config.min_delta)
        saved.save(output / STATE, trainer)
    return trainer.average


@dataclass
class _Checkpoint:
    """Where a run stands. `phase` is search or refit; `variables` are the trainer's, in its order."""

    run: dict[str, Any]
    phase: str = "search"
    epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    best_weights: list[Any] = field(default_factory=list)
    variables: list[Any] = field(default_factory=list)

    @property
    def stale(self) -> int:
        """Epochs since the best one."""
        return self.epoch - self.best["epoch"] if self.best else 0

    def note(self, found: dict[str, Any], weights: list[Any], min_delta: float) -> None:
        """Add an epoch to the history; see `TrainConfig` for when it is the best."""
        self.history.append(found)
        if not self.best or found["logloss"] < self.best["logloss"] - min_delta:
            self.best, self.best_weights = found, weights

    def save(self, path: Path, trainer: Trainer) -> None:
        """Write everything, whole or not at all."""
        arrays = {f"variable{i}": variable.numpy() for i, variable in enumerate(trainer.variables)}
        arrays |= {f"best{i}": array for i, array in enumerate(self.best_weights)}
        text = json.dumps({name: getattr(self, name) for name in ("run", "phase", "epoch", "history", "best")})
        with replacing(path) as temporary:
            np.savez(temporary, state=np.array(text), **arrays)

    @classmethod
    def load(cls, path: Path, run: dict[str, Any]) -> _Checkpoint:
        """Read a checkpoint of the run `run`. Raises RequestError where it is broken or another run's, naming what differs."""
        try:
            with np.load(path, allow_pickle=False) as file:
                state = json.loads(str(file["state"]))
                lists = [[file[name] for name in file.files if name.startswith(kind)] for kind in ("best", "variable")]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise RequestError(f"cannot read the checkpoint {path} ({error}); train again into an empty folder") from error
        require_same_run(path, state["run"], run)
        return cls(**state, best_weights=lists[0], variables=lists[1])


def _start(folder: Path, config: TrainConfig) -> tuple[dict[str, Any], Features, TrainConfig]:
    """Weights, preprocessing and sizes of the model to start from."""
    own = folder / "train.json"
    features = Features.from_json(read_json(own)["features"] if own.is_file() else read_json(folder / "card.json").get("preprocessing"))
    model = graph.load(folder / "fp32.onnx")
    graph.expand_fp16(model)
    weights = {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value is not None}
    hidden = [weights[f"hidden_{k}/kernel"].shape[1] for k in range(len(weights)) if f"hidden_{k}/kernel" in weights]
    if "deep/C1/embeddings" not in weights or not hidden:
        raise RequestError(
            f"found no Wide & Deep weights in {folder / 'fp32.onnx'}; start from a folder that zoo train or zoo download wrote"
        )
    sizes = {"hidden": tuple(hidden), "embedding_size": weights["deep/C1/embeddings"].shape[1], **features.counts}
    for name, size in sizes.items():
        if getattr(config, name) not in (getattr(FINETUNE, name), size):
            raise RequestError(f"found {name} {getattr(config, name)}, but fine-tuning keeps the sizes of the model ({size}); leave it out")
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
