"""Wide & Deep opened with its log, to be cut: units of hidden layers, columns of the embeddings."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.compression.search import TILE, Widths
from pipelines.core.errors import RequestError
from pipelines.core.files import replacing, write_json
from pipelines.models.folder import SAMPLES, ModelFolder
from zoo.recommenders.criteo.data import Counts, Rows
from zoo.recommenders.criteo.row_store import RowStore
from zoo.recommenders.metrics import click_metrics, logloss
from zoo.training.runs import record_of

if TYPE_CHECKING:
    from pipelines.models.pipeline import GraphPipeline

EMBEDDING = "embedding"
SEEN, KEPT = 8192, 4096  # rows of importance, for calibration
Matrix = NDArray[np.float32]


class _Network(NamedTuple):
    """tables: [fields, buckets, size]. wide: [fields, buckets]. kernels, biases: of the hidden layers and the logit."""

    tables: Matrix
    wide: Matrix
    kernels: list[Matrix]
    biases: list[Matrix]


class _Batch(NamedTuple):
    ids: NDArray[np.int32]
    numbers: Matrix
    labels: Matrix


class PrunableRows:
    """See `pipelines.compression.search.Prunable`: `hidden_0`, `hidden_1`, ... and `embedding`, whose columns each
    table chooses for itself. Raises RequestError for rows that cannot be trained on.
    """

    metric: ClassVar[str] = "auc"
    drop: ClassVar[float] = 0.001
    batch_size: ClassVar[int] = 512

    def __init__(
        self,
        folder: ModelFolder,
        data: Any,
        *,
        config: Any,
        importance: str = "taylor",
        on_error: str = "raise",
        like: PrunableRows | None = None,
    ) -> None:
        """like: another model opened with the same log, which is not read again."""
        from zoo.recommenders.criteo.train import FINETUNE, started

        folder.ensure("fp32.onnx")
        weights, self.features, sized = started(folder.path, FINETUNE)
        self.folder, self.importance, self.config, fields = folder, importance, config, range(1, sized.categorical + 1)
        layers = [f"hidden_{k}" for k in range(len(sized.hidden))]
        self.network = _Network(
            np.stack([weights[f"deep/C{i}/embeddings"] for i in fields]),
            np.stack([weights[f"wide/C{i}/weights"][:, 0] for i in fields]),
            [weights[f"{name}/kernel"] for name in (*layers, "deep_logit")],
            [weights[f"{name}/bias"] for name in (*layers, "deep_logit")],
        )
        self.sized, self.layers = sized, layers
        self.groups: Widths = dict(zip((*layers, EMBEDDING), (*sized.hidden, sized.embedding_size), strict=True))
        self.tiles: Widths = dict.fromkeys(self.groups, TILE)
        counts = Counts(numeric=sized.numeric, categorical=sized.categorical, buckets=sized.buckets)
        scratch = Path(tempfile.gettempdir())
        self.log: RowStore = RowStore(data, counts, on_error, scratch) if like is None else like.log
        held = round(config.validation if config.validation >= 1 else config.validation * self.log.rows)
        if not 0 < held < self.log.rows:
            raise RequestError(
                f"found {self.log.rows} rows, wanted more than the {held} to hold out; set validation to a share"
            )
        self.split, self.digest = self.log.rows - held, self.log.digest
        self.held = self._encoded(self.log.part(self.split, self.log.rows))
        self._order: dict[str, Any] = {}

    def _encoded(self, pieces: Iterable[Rows]) -> _Batch:
        parts = [(self.features.encode(rows), rows.labels) for rows in pieces]
        labels = [np.asarray(each, np.float32) for _, each in parts]
        ids, numbers = (np.concatenate([inputs[name] for inputs, _ in parts]) for name in ("ids", "numbers"))
        return _Batch(ids, numbers, np.concatenate(labels))

    def _seen(self, count: int) -> _Batch:
        return self._encoded(self.log.part(max(0, self.split - count), self.split))

    def _removed(self, name: str, width: int) -> NDArray[np.int64]:
        """The least important units of a layer; of the embedding, [fields, columns]."""
        if not self._order:
            scores = _importances(self.network, self._seen(SEEN), self.importance)
            self._order = {each: np.argsort(scores[each], axis=-1, kind="stable") for each in scores}
        gone = self.groups[name] - width
        return np.sort(self._order[name][..., :gone], axis=-1)

    def _cut(self, widths: Widths) -> _Network:
        """The network without its least important units."""
        tables, wide, kernels, biases = self.network
        kernels, biases = list(kernels), list(biases)
        for k, name in enumerate(self.layers):
            gone = self._removed(name, widths.get(name, self.groups[name]))
            kernels[k] = np.delete(kernels[k], gone, 1)
            biases[k] = np.delete(biases[k], gone)
            kernels[k + 1] = np.delete(kernels[k + 1], gone, 0)
        fields, size = len(tables), self.groups[EMBEDDING]
        gone = self._removed(EMBEDDING, widths.get(EMBEDDING, size))
        if gone.size:
            kept = np.stack([np.setdiff1d(np.arange(size), each) for each in gone])
            tables = np.take_along_axis(tables, kept[:, None, :], 2)
            rows = [(i * size + kept[i]) for i in range(fields)]
            kernels[0] = kernels[0][np.concatenate([*rows, np.arange(fields * size, len(kernels[0]))])]
        return _Network(tables, wide, kernels, biases)

    def loss(self, widths: Widths) -> float:
        """LogLoss of the held-out rows, see `Prunable`."""
        logits = _forward(self._cut(widths), self.held)[0]
        return round(logloss(self.held.labels, 1 / (1 + np.exp(-logits.astype(np.float64)))), 6)

    def save(self, widths: Widths, folder: Path) -> None:
        """model.weights.h5, train.json and calibration.npz of the cut network."""
        from dataclasses import asdict, replace

        from zoo.recommenders.criteo.model import assign, build_model
        from zoo.recommenders.criteo.train import save_network

        tables, wide, kernels, biases = self._cut(widths)
        hidden = tuple(len(each) for each in biases[:-1])
        config = replace(self.sized, hidden=hidden, embedding_size=tables.shape[2])
        weights = {f"deep/C{i + 1}/embeddings": each for i, each in enumerate(tables)}
        weights |= {f"wide/C{i + 1}/weights": each[:, None] for i, each in enumerate(wide)}
        for name, kernel, bias in zip((*self.layers, "deep_logit"), kernels, biases, strict=True):
            weights |= {f"{name}/kernel": kernel, f"{name}/bias": bias}
        model = build_model(self.features, config)
        assign(model, weights)
        folder.mkdir(parents=True, exist_ok=True)
        save_network(model, folder)
        seen = self._seen(KEPT)
        with replacing(folder / SAMPLES) as temporary:
            np.savez(temporary, ids=seen.ids, numbers=seen.numbers)
        before = record_of(self.folder.path)
        known = {key: before[key] for key in ("rows", "metrics") if key in before}
        settings = asdict(config) | {"hidden": list(hidden)}
        write_json(folder / "train.json", {**known, "config": settings, "features": self.features.to_json()})

    def quality(self, pipeline: GraphPipeline) -> dict[str, float]:
        """{"auc", "logloss", "accuracy"} of an opened model on the held-out rows."""
        found = pipeline.predict({"ids": self.held.ids, "numbers": self.held.numbers})["probability"]
        return click_metrics(self.held.labels, found[:, 0])


def _forward(network: _Network, batch: _Batch) -> tuple[Matrix, list[Matrix]]:
    """(logits [n], what goes into every layer: [n, its inputs])."""
    fields = np.arange(len(network.tables))
    vectors = network.tables[fields, batch.ids].reshape(len(batch.ids), -1)
    x = np.concatenate([vectors, batch.numbers], 1)
    inputs = []
    for kernel, bias in zip(network.kernels, network.biases, strict=True):
        inputs.append(x)
        x = x @ kernel + bias
        if len(inputs) < len(network.kernels):
            x = np.maximum(x, 0)
    return x[:, 0] + network.wide[fields, batch.ids].sum(1), inputs


def _importances(network: _Network, batch: _Batch, kind: str) -> dict[str, NDArray[np.float64]]:
    """{group: how much each unit matters}; of the embedding [fields, size].

    taylor: the mean over rows of (h dL/dh)^2, the first-order change of a row's loss where the unit gives 0 (Molchanov
    et al. 2019). activation: the mean of |h|.
    """
    logits, inputs = _forward(network, batch)
    back = (1 / (1 + np.exp(-logits)) - batch.labels)[:, None]
    scores = {}
    for k in reversed(range(len(inputs))):
        back = back @ network.kernels[k].T
        told = np.abs(inputs[k]) if kind == "activation" else np.square(inputs[k] * back)
        scores[f"hidden_{k - 1}" if k else EMBEDDING] = told.mean(0, dtype=np.float64)
        back = back * (inputs[k] > 0)
    fields, size = len(network.tables), network.tables.shape[2]
    scores[EMBEDDING] = scores[EMBEDDING][: fields * size].reshape(fields, size)
    return scores
