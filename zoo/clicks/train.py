"""Train a recommender in torch on any click log: early stopping on the log's last rows, then once more on all of them.

torch, because the tables of a log are its own: one parameter for all of them, whose rows a step reads, decays and
averages in a few calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed, nn
from torch.nn import functional

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import FULL, DiskFull, read_json, replacing, sha256, write_json
from pipelines.core.plain import from_plain, to_plain
from pipelines.core.progress import console, progress, silent
from pipelines.graph import edit, io
from pipelines.models.hub import CARD
from zoo.clicks.features import UNKNOWN, Features
from zoo.clicks.infer import infer
from zoo.clicks.logs import open_log
from zoo.clicks.metrics import EPSILON, click_metrics, logloss
from zoo.clicks.model import Embeddings, Scalars
from zoo.clicks.reading import ErrorLog
from zoo.clicks.schema import Column, Schema
from zoo.training import (
    BELOW_1,
    FROM_0,
    SEED,
    Processes,
    Range,
    fill,
    load_checkpoint,
    plot_curves,
    processes,
    require_output,
    require_settings,
)

MODEL, STATE = "model.pt", "checkpoint/state.pt"
CALIBRATION_ROWS = 4096
RANGES = {
    "seed": SEED,
    "dropout": BELOW_1,
    "ema": BELOW_1,
    "unknown": BELOW_1,
    **dict.fromkeys(("l2_embeddings", "l2_scalars", "l2_layers", "min_delta"), FROM_0),
}
FEWEST = 100_000  # rows that a prior is weighed against: of fewer it would silence the network
MOST_NEW = 0.9  # of a column's categories that training replaces: a column of new values alone teaches nothing
BATCH = 8192  # rows evaluated at once

Build = Callable[[Features, Any], nn.Module]


@dataclass(frozen=True)
class TrainConfig:
    """The training recipe of recommenders.

    embedding_size: columns of a table. hidden: outputs of the layers. held_out: how many of the last rows (by the
    timestamp, where there is one) are held out, a count or a share below 1. min_delta: by how much their
    LogLoss, of logits shifted to their share of clicks, must fall below the best one's to make an epoch the best.
    patience: epochs without a new best that end the search. refit: train once more from the start on all rows, for as
    many epochs as were best.
    ema: momentum of the average of the weights over training steps; the average is what is evaluated and kept. l2_*:
    weigh the squared distance of all entries of tables, of first-order weights and of layers from 0 (in fine-tuning:
    from the starting weights) against the *sum* of the rows' losses, as a Gaussian prior does, so that they hold for
    any number of rows; of several l2_embeddings the search tries one after the other while the held-out rows say that
    it helps: the sparser the categories, the more. unknown: the least share of each column's categories that training
    replaces by the unknown one, which stands for all that were rarer than min_count and for those to come; a column
    with more new values than that among the held-out rows, such as users where new ones keep coming, has as many
    replaced. Raises RequestError for values out of range.
    """

    embedding_size: int = 16
    hidden: tuple[int, ...] = (128, 64)
    epochs: int = 40
    batch_size: int = 256
    learning_rate: float = 2e-3
    dropout: float = 0.0
    ema: float = 0.999
    l2_embeddings: tuple[float, ...] = (10.0, 1000.0, 20000.0)
    l2_scalars: float = 10.0
    l2_layers: float = 50.0
    unknown: float = 0.05
    min_count: int = 1
    patience: int = 5
    min_delta: float = 0.0001
    held_out: float = 0.1
    refit: bool = True
    seed: int = 0

    ranges: ClassVar[dict[str, Range]] = {}  # of a family's own settings, where they are not numbers above 0

    def __post_init__(self) -> None:
        require_settings(asdict(self), RANGES | self.ranges)


def for_finetuning(config: TrainConfig) -> Any:
    """The recipe for going on from trained weights: small steps."""
    return replace(config, learning_rate=config.learning_rate / 10, unknown=0.0, l2_embeddings=config.l2_embeddings[:1])


class Store:
    """Labelled rows in time order, kept as records in a file without a name beside `folder`, which goes with the
    process. digest: SHA-256 of all records.

    Raises RequestError for data that cannot be trained on, ZooError where the disk is full.
    """

    def __init__(self, features: Features, data: Any, on_error: str, folder: Path) -> None:
        width, numbers, lists = features.shape
        self.record = np.dtype(
            [
                ("ids", "i4", (width,)),
                ("numbers", "f4", (numbers,)),
                ("scales", "f4", (lists,)),
                ("label", "f4"),
                ("weight", "f4"),
            ]
        )
        self.errors, digest = ErrorLog(), hashlib.sha256()
        times: list[NDArray[np.float64]] = []
        parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        try:
            self._file = tempfile.TemporaryFile(dir=parent)  # noqa: SIM115 (open as long as this object)
            with progress("reading") as advance:
                for rows in features.read(data, on_error=on_error, errors=self.errors, labelled=True):
                    records = np.empty(len(rows), self.record)
                    for name in ("ids", "numbers", "scales"):
                        records[name] = getattr(rows, name)
                    records["label"], records["weight"] = rows.labels, rows.weights
                    digest.update(records.view(np.uint8).data)
                    self._file.write(records.view(np.uint8).data)
                    times.append(rows.times)
                    advance(len(rows))
            self._file.flush()
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull(f"the rows read to {parent}", error) from error
            raise RequestError(f"cannot write in {parent}: {error.strerror or error}") from error
        self.digest = digest.hexdigest()
        self.order = np.argsort(np.concatenate(times), kind="stable")
        self._records = np.memmap(self._file, self.record, "r")

    def __len__(self) -> int:
        return len(self.order)

    def rows(self, places: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """The rows at these places of the time order: tensors ids, numbers, scales, label, weight."""
        records = self._records[self.order[places]]
        return {name: torch.from_numpy(np.ascontiguousarray(records[name])) for name in self.record.names or ()}

    def parts(self, start: int, stop: int) -> Iterator[dict[str, torch.Tensor]]:
        """Rows [start, stop) of the time order, `BATCH` at a time."""
        for begin in range(start, stop, BATCH):
            yield self.rows(np.arange(begin, min(begin + BATCH, stop)))


class Categories:
    """How often each id of each field occurs in the first `stop` rows, and what stands for the rare and the new."""

    def __init__(self, features: Features, store: Store, stop: int, least: int) -> None:
        self.fields = features.fields
        found = [np.zeros(each.rows, np.int64) for each in self.fields]
        for part in store.parts(0, stop):
            ids = part["ids"].numpy()
            for each, count in zip(self.fields, found, strict=True):
                count += np.bincount(ids[:, each.start : each.start + each.width].ravel(), minlength=each.rows)
        self.known = [torch.from_numpy(count >= least) for count in found]
        for each, known in zip(self.fields, self.known, strict=True):
            if each.is_list:
                known[each.last] = True
        starts = np.cumsum([0, *(each.rows for each in self.fields)])
        self._all = torch.cat(self.known) if self.known else torch.zeros(0, dtype=torch.bool)
        self._offsets = torch.from_numpy(
            np.concatenate(
                [np.zeros(0, np.int64), *(np.full(f.width, s) for f, s in zip(self.fields, starts, strict=False))]
            )
        )
        # ids that a random unknown may replace: not the places without an item
        padding = [np.full(each.width, each.last if each.is_list else -1) for each in self.fields]
        self._padding = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *padding]))

    def usual(self, ids: torch.Tensor) -> torch.Tensor:
        """ids with the unknown category for those that are not known."""
        return torch.where(self._all[ids + self._offsets], ids, UNKNOWN)

    def new(self, parts: Iterator[dict[str, torch.Tensor]]) -> torch.Tensor:
        """The share of each column's ids in some rows that are not known, float32 [columns]; a list's are one."""
        found = torch.zeros(len(self.fields), 2)
        for part in parts:
            for number, (each, known) in enumerate(zip(self.fields, self.known, strict=True)):
                ids = part["ids"][:, each.start : each.start + each.width].long()
                ids = ids[ids != each.last] if each.is_list else ids
                found[number] += torch.tensor([float((~known[ids]).sum()), ids.numel()])
        shares = found[:, 0] / found[:, 1].clamp_min(1)
        return shares.repeat_interleave(torch.tensor([each.width for each in self.fields], dtype=torch.long))

    def forget(self, ids: torch.Tensor, shares: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        """`usual` ids, of each column a share, drawn at random, unknown. shares: float32 [columns]."""
        drawn = torch.rand(ids.shape, generator=random) < shares
        return torch.where(drawn & (ids != self._padding), UNKNOWN, self.usual(ids))

    @torch.no_grad()
    def settle(self, model: nn.Module) -> None:
        """Give the rows of all that is not known the unknown category's weights. In place."""
        for module in model.modules():
            if isinstance(module, Embeddings):
                for number, each in enumerate(module.fields):
                    table = module.table(number)
                    table[~self.known[self.fields.index(each)]] = table[UNKNOWN].clone()
                module.clear()


class Trainer:
    """A model in training on `rows` rows, its optimizer and the running average of its weights: all that a checkpoint
    holds. With several processes each takes a share of every batch, and all apply the same sum of gradients.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, rows: int, group: Processes) -> None:
        self.model, self.config, self.group = model, config, group
        self.weights = list(model.parameters())
        self.average = [each.detach().clone() for each in self.weights]
        self.start = [torch.zeros_like(each) for each in self.weights]
        kinds = {
            id(m.weight): config.l2_scalars if isinstance(m, Scalars) else config.l2_embeddings[0]
            for m in model.modules()
            if isinstance(m, Embeddings)
        }
        self.strength = [
            kinds.get(id(each), config.l2_layers if each.ndim > 1 and each.numel() > 1 else 0.0) * 2 / max(rows, FEWEST)
            for each in self.weights
        ]
        self.padded = [m for m in model.modules() if isinstance(m, Embeddings) and m.padding]
        self.optimizer = torch.optim.Adam(self.weights, config.learning_rate, foreach=True)
        self.steps = 0

    def hold(self) -> None:
        """Pull towards the weights as they are now, not towards 0 (L2-SP, Li et al. 2018)."""
        self.start = [each.detach().clone() for each in self.weights]

    def step(self, batch: Mapping[str, torch.Tensor], total: float) -> float:
        """Train on this process's share of a batch whose weights sum to `total`; returns the sum of all its losses."""
        self.model.train()
        losses = self.losses(batch)
        loss = (losses * batch["weight"]).sum()
        self.optimizer.zero_grad(set_to_none=False)
        torch.autograd.backward(loss / total)
        summed = loss.detach()
        if self.group.count > 1:
            for each in self.weights:
                each.grad = torch.zeros_like(each) if each.grad is None else each.grad
                distributed.all_reduce(each.grad)
            distributed.all_reduce(summed)
        with torch.no_grad():
            for weight, start, strength in zip(self.weights, self.start, self.strength, strict=True):
                if strength and weight.grad is not None:
                    weight.grad.add_(weight - start, alpha=strength)
            for module in self.padded:
                if module.weight.grad is not None:
                    module.weight.grad[module.padding] = 0
            self.optimizer.step()
            self.steps += 1
            keep = min(self.config.ema, (1 + self.steps) / (10 + self.steps))  # forget the first weights quickly
            torch._foreach_lerp_(self.average, [each.detach() for each in self.weights], 1 - keep)
        return float(summed)

    def losses(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each row, [n]: the cross-entropy of the click, unless the model has `losses` of its own."""
        inputs = batch["ids"], batch["numbers"], batch["scales"]
        own = getattr(self.model, "losses", None)
        if own is not None:
            return own(*inputs, batch["label"])  # type: ignore[no-any-return]
        logits = _first(self.model(*inputs))
        return functional.binary_cross_entropy_with_logits(logits[:, 0], batch["label"], reduction="none")

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model with the averaged weights, in evaluation."""
        own = [each.detach().clone() for each in self.weights]
        self._set(self.average)
        self.model.eval()
        try:
            with torch.inference_mode():
                yield self.model
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: Sequence[torch.Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)

    def predict(self, parts: Iterator[dict[str, torch.Tensor]], categories: Categories) -> tuple[Any, Any]:
        """Probabilities and labels of rows, with the averaged weights, float64 [n]."""
        scores, labels = [], []
        with self.averaged() as model:
            for part in parts:
                logits = _first(model(categories.usual(part["ids"]), part["numbers"], part["scales"]))
                scores.append(torch.sigmoid(logits[:, 0].double()).numpy())
                labels.append(part["label"].numpy())
        return np.concatenate(scores), np.concatenate(labels)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        optimizer = self.optimizer.state_dict()
        return {
            "model": self.model.state_dict(),
            "average": self.average,
            "start": self.start,
            "optimizer": optimizer,
            "steps": self.steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self.model.load_state_dict(state["model"])
        self.average, self.start, self.steps = list(state["average"]), list(state["start"]), state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])


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
    label: str | None = None,
) -> dict[str, Any]:
    """Train on the labelled rows of a log (see `Features.read`) in time order; returns {"auc", "logloss", "accuracy"}
    on the held-out last ones.

    build: the untrained network of a log's features and the settings. schema: what the columns are; None: inferred,
    with `label` as the column to predict. `output` gets model.pt (the averaged weights), schema.json, train.json (with
    the features), learning_curve.png, calibration.npz (`CALIBRATION_ROWS` training rows, encoded) and, after every
    epoch, checkpoint/state.pt, from which `resume` goes on to the same result. One seed gives the same weights on one
    machine with one number of processes. `start_from` is a model folder whose weights, schema and sizes are taken over.
    With `refit`, metrics and history are those of the search: the final model has seen the held-out rows. Under
    torchrun every process calls this alike; batch_size is that of all together, and process 0 alone writes. Raises
    RequestError for unusable data, an output folder in use, or a checkpoint of another run.
    """
    output = Path(output)
    with processes() as group:
        require_output(output, STATE, resume)
        about = _about(Path(start_from)) if start_from else {}
        if about:
            sizes = {name: about["config"][name] for name in _sizes(config) if name in about["config"]}
            config = replace(config, **from_plain(sizes))
        features = Features.from_json(about["features"]) if about else Features(_schema(data, schema, label))
        if not features.schema.of("label"):
            raise RequestError("the schema has no column of the kind label; training predicts one of 0 and 1")
        torch.manual_seed(config.seed)
        start = sha256(Path(start_from) / "fp32.onnx") if start_from else None
        store = Store(features, data, on_error, output)
        settings = to_plain(config)
        run = {"config": settings, "data": store.digest, "start": start}
        held = round(config.held_out if config.held_out >= 1 else config.held_out * len(store))
        split = len(store) - held
        if not 0 < held < len(store):
            raise RequestError(
                f"found {len(store):,} rows, wanted more than the {held:,} to hold out; set held_out to a share such "
                "as 0.1"
            )
        for name, first, last in (("first", 0, split), ("last", split, len(store))):
            classes = np.unique(np.concatenate([part["label"].numpy() for part in store.parts(first, last)]))
            if len(classes) < 2:
                raise RequestError(
                    f"found only label {classes[0]:.0f} in the {name} {last - first:,} rows, wanted both 0 and 1"
                )

        known = Categories(features, store, split, config.min_count)
        shares = known.new(store.parts(split, len(store))).clamp(config.unknown, MOST_NEW)

        def fresh(rows: int, l2: float) -> Trainer:
            torch.manual_seed(config.seed)
            model = build(features, config)
            if start_from:
                fill(model, _weights(model, Path(start_from) / "fp32.onnx"), start_from)
            trainer = Trainer(model, replace(config, l2_embeddings=(l2,)), rows, group)
            if start_from:
                trainer.hold()
            return trainer

        saved = load_checkpoint(output / STATE, run) if resume else None
        beginning: dict[str, Any] = {"run": run, "phase": "search", "trial": 0, "winner": {}}
        state: dict[str, Any] = saved or {**beginning, **_fresh_trial()}
        state.setdefault("began", time.time())
        if state["phase"] == "search":
            trainer = _search(state, output, store, split, features, config, fresh, shares)
            if config.refit:
                state |= {"phase": "refit", "epoch": 0, "trainer": None}
        if state["phase"] == "refit":
            best = state["winner"]
            trainer = _fit(state, output, store, len(store), best["epoch"], features, config, fresh, best["l2"], shares)
        used = len(store) if config.refit else split
        metrics = {name: state["winner"][name] for name in ("auc", "logloss", "accuracy")}
        if group.rank == 0:
            if not config.refit:
                trainer.average = [each.clone() for each in state["winner"]["weights"]]
            record = {
                "config": settings,
                "features": features.to_json(),
                "metrics": metrics,
                "rows": {"train": split, "held_out": held, "final": used, "left_out": store.errors.total},
                "epochs": state["winner"]["epoch"],
                "l2_embeddings": state["winner"]["l2"],
                "history": state["winner"]["history"],
                "seconds": round(time.time() - state["began"], 1),
                "processes": group.count,
            }
            _write(output, data, trainer, Categories(features, store, used, config.min_count), store, used, record)
        group.same(None)  # the others wait for the files
    return metrics


def _about(folder: Path) -> dict[str, Any]:
    """{"config", "features"} of a model, trained here or shipped without its checkpoint."""
    if (folder / "train.json").is_file():
        return read_json(folder / "train.json")  # type: ignore[no-any-return]
    card = read_json(folder / CARD)
    try:
        return {"config": card["training"]["config"], "features": card["preprocessing"]}
    except (KeyError, TypeError) as error:
        raise RequestError(f"{folder} does not say how it was trained; start from one that zoo train made") from error


def _weights(model: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """The weights of `model` out of the graph that `export` made of it; what only training needs stays as it is."""
    graph = io.load(path)
    edit.expand_fp16(graph)
    found = {name: each.const_value for name, each in graph.graph.initializers.items()}
    arrays = {name: torch.from_numpy(each.numpy().copy()) for name, each in found.items() if each is not None}
    state = {name: each for name, each in model.state_dict().items() if not name.endswith((".weight", ".bias"))}
    for path_of, module in model.named_modules():
        if isinstance(module, Embeddings):
            names = [f"{path_of}.{each.name}.table" for each in module.fields]
            if all(name in arrays for name in names):
                state[f"{path_of}.weight"] = torch.cat([arrays[name] for name in names])
        elif isinstance(module, nn.Linear):
            state |= {name: arrays[name] for kind in ("weight", "bias") if (name := f"{path_of}.{kind}") in arrays}
    return state


def _schema(data: Any, schema: str | Path | Schema | None, label: str | None) -> Schema:
    """The schema given, with another label if one is named, or the one inferred from the first source."""
    if schema is None:
        source = data[0] if isinstance(data, list | tuple) and data and not isinstance(data[0], dict) else data
        found = infer(open_log(source), label)
        labels = ", ".join(each.name for each in found.of("label"))
        held = ", ".join(each.name for each in found.of("timestamp")) or "their order"
        kinds = ", ".join(f"{len(found.of(kind))} {kind}" for kind in ("number", "category", "categories"))
        console.print(
            f"schema inferred from {found.rows:,} rows: predicts {labels} from {kinds}; the last rows by {held} are "
            "held out (zoo schema shows it, --schema takes an edited one)",
            highlight=False,
            soft_wrap=True,
        )
        return found
    found = schema if isinstance(schema, Schema) else Schema.load(schema)
    if label is None:
        return found
    if label not in {each.name for each in found.columns}:
        names = ", ".join(each.name for each in found.columns)
        raise RequestError(f"the schema has no column {label!r}; its columns are {names}")
    columns = [
        Column(label, "label", each.distinct, each.missing)
        if each.name == label
        else (replace(each, kind="ignored", encoding={}) if each.kind == "label" else each)
        for each in found.columns
    ]
    return replace(found, columns=tuple(columns))


def _sizes(config: Any) -> list[str]:
    """The settings that a model's weights are bound to: those that the shared recipe does not have, and two of it."""
    return ["embedding_size", "hidden", *(asdict(config).keys() - asdict(TrainConfig()).keys())]


def shifted_logloss(labels: NDArray[Any], probabilities: NDArray[np.float64]) -> float:
    """The LogLoss after all logits are shifted by one number, so that as many clicks are expected as there are.

    By how much clicks became more or fewer since training says nothing of a model. labels, probabilities: [n].
    """
    inside = np.clip(probabilities, EPSILON, 1 - EPSILON)
    logits = np.log(inside) - np.log1p(-inside)
    shift = 0.0
    for _ in range(20):  # Newton's steps
        p = 1 / (1 + np.exp(-(logits + shift)))
        shift += float((labels - p).sum() / max((p * (1 - p)).sum(), EPSILON))
    return logloss(labels, 1 / (1 + np.exp(-(logits + shift))))


def _is_done(state: Mapping[str, Any], config: TrainConfig) -> bool:
    """Whether a trial of the search has no new best any more, or is well behind an earlier trial."""
    best, winner, epoch = state["best"], state["winner"], state["epoch"]
    if not best:
        return False
    behind = winner and best["auc"] <= winner["auc"] and epoch >= 2 * winner["epoch"] + config.patience
    return bool(behind) or epoch - best["epoch"] >= config.patience


def _fresh_trial() -> dict[str, Any]:
    return {"epoch": 0, "trainer": None, "best": {}, "history": []}


def _search(
    state: dict[str, Any],
    output: Path,
    store: Store,
    split: int,
    features: Features,
    config: TrainConfig,
    fresh: Callable[[int, float], Trainer],
    shares: torch.Tensor,
) -> Trainer:
    """Try each of `l2_embeddings`, as long as it ranks better than the one before; the best is state["winner"].

    A weaker prior is surer of itself, which a LogLoss takes amiss before it has lost any order: AUC compares trials.
    """
    while True:
        l2 = config.l2_embeddings[state["trial"]]
        trainer = _fit(state, output, store, split, config.epochs, features, config, fresh, l2, shares)
        best, winner = state["best"], state["winner"]
        better = not winner or best["auc"] > winner["auc"] + config.min_delta
        if better:
            kept = {"l2": l2, "weights": state["best_weights"], "history": state["history"]}
            state["winner"] = {**best, **kept}
        state["trial"] += 1
        if not better or state["trial"] == len(config.l2_embeddings):
            return trainer
        state |= _fresh_trial()


def _fit(
    state: dict[str, Any],
    output: Path,
    store: Store,
    rows: int,
    epochs: int,
    features: Features,
    config: TrainConfig,
    fresh: Callable[[int, float], Trainer],
    l2: float,
    shares: torch.Tensor,
) -> Trainer:
    """Train on the first `rows` rows up to epoch `epochs`; in the search, judge each by the rows after them, note the
    best and stop early.
    """
    trainer = fresh(rows, l2)
    search, group = state["phase"] == "search", trainer.group
    categories = Categories(features, store, rows, config.min_count)
    if state.get("trainer"):
        trainer.restore(state["trainer"])
    while state["epoch"] < epochs:
        if search and _is_done(state, config):
            break
        epoch = state["epoch"] + 1
        order = np.random.default_rng([config.seed, epoch]).permutation(rows)
        random = torch.Generator().manual_seed(config.seed * 1000 + epoch)
        torch.manual_seed(config.seed * 1000 + epoch + group.rank)  # for dropout
        loss = seen = 0.0
        shown = progress if group.rank == 0 else silent
        with shown(f"{state['phase']}: epoch {epoch} of {epochs}", rows) as advance:
            for begin in range(0, rows, config.batch_size):
                batch = store.rows(order[begin : begin + config.batch_size])
                total = max(float(batch["weight"].sum()), 1e-12)
                batch["ids"] = categories.forget(batch["ids"], shares, random)
                mine = slice(group.rank, None, group.count)
                loss += trainer.step({name: each[mine] for name, each in batch.items()}, total)
                seen += total
                advance(len(batch["label"]))
        if not math.isfinite(loss):
            raise ZooError(f"training diverged in epoch {epoch}; train again with a lower learning_rate")
        kind = f", l2_embeddings {l2:g}" if search and len(config.l2_embeddings) > 1 else ""
        line = f"{state['phase']}{kind}: epoch {epoch}/{epochs}  loss {loss / seen:.4f}"
        if search:
            scores, labels = trainer.predict(store.parts(rows, len(store)), categories)
            found = {**click_metrics(labels, scores), "shifted": shifted_logloss(labels, scores)}
            state["history"].append({"epoch": epoch, "train_logloss": loss / seen, **found})
            if not state["best"] or found["shifted"] < state["best"]["shifted"] - config.min_delta:
                state["best"] = {"epoch": epoch, **found}
                state["best_weights"] = [each.clone() for each in trainer.average]
            line += f"  held out {found['logloss']:.4f}  AUC {found['auc']:.4f}"
        state |= {"epoch": epoch, "trainer": trainer.state()}
        if group.rank == 0:
            with replacing(output / STATE) as temporary:
                torch.save(state, temporary)
            console.print(line, highlight=False, soft_wrap=True)
        group.checkpointed(output)
    return trainer


def _write(
    output: Path,
    data: Any,
    trainer: Trainer,
    categories: Categories,
    store: Store,
    used: int,
    record: dict[str, Any],
) -> None:
    """Everything but the checkpoint."""
    features = Features.from_json(record["features"])
    chosen = np.sort(np.random.default_rng(record["config"]["seed"]).permutation(used)[:CALIBRATION_ROWS])
    rows = store.rows(chosen)
    samples: dict[str, Any] = {name: rows[name].numpy() for name in features.inputs}
    trainer._set(trainer.average)
    categories.settle(trainer.model)
    with replacing(output / MODEL) as temporary:
        torch.save({"state_dict": trainer.model.state_dict()}, temporary)
    with replacing(output / "calibration.npz") as temporary:
        np.savez(temporary, **samples)
    features.schema.save(output / "schema.json")
    loss, auc = (
        {"train_logloss": ("training", "C0--"), "logloss": ("held out", "C0-")},
        {"auc": ("AUC, held out", "C1-")},
    )
    plot_curves(output / "learning_curve.png", record["history"], loss, auc, ("LogLoss", "AUC"), record["epochs"])
    sources = [data] if isinstance(data, str | os.PathLike) else data
    names = [Path(each) for each in sources if isinstance(each, str | os.PathLike)]
    about = {
        "seed": record["config"]["seed"],
        "data": [{"file": path.name, "sha256": sha256(path)} for path in names if path.is_file()],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    write_json(output / "train.json", record | about)


def _first(found: Any) -> Any:
    """The logits of what a model gives."""
    return found[0] if isinstance(found, tuple) else found
