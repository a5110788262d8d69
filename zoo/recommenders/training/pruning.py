"""Structured pruning of recommenders: units of hidden layers, embedding columns, and low-frequency embedding rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.compression.search import TILE, Widths
from pipelines.core.errors import RequestError
from pipelines.core.files import write_json
from pipelines.core.plain import to_plain
from pipelines.models.family import network_of
from pipelines.models.npz import write_npz
from pipelines.models.record import SAMPLES
from zoo.recommenders.data.features import Features
from zoo.recommenders.metrics import label_metrics, unless_ones
from zoo.recommenders.models.checkpoints import MODEL
from zoo.recommenders.training import rare_rows
from zoo.recommenders.training.pruning_groups import PruningGroups, importances
from zoo.training.pruning import PrunableModel
from zoo.training.runs import record_of, save_weights

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zoo.recommenders.inference import ClickPipeline
    from zoo.recommenders.training.row_store import RowStore

SEEN, KEPT = 8192, 4096  # rows of importance, for calibration
AT_ONCE = 512  # rows


class PrunableRecommender(PrunableModel):
    """A trained recommender with the rows of its log, see `pipelines.compression.search.Prunable`.

    A group has the name of the first layer whose width it determines. Units shared by several layers or tables are
    removed from all of them.

    The data is a labelled log, as in `Features.read`; `held_out` of the settings splits its rows. Encoded rows of
    `like` are reused if the encodings are equal. Criteria of importance are in `pruning_groups.importances`.
    """

    metric = "auc"
    drop = 0.001
    batch_size = 512

    def open(self, data: Any, config: Any, on_error: str, like: PrunableRecommender | None) -> None:
        """See `PrunableModel`."""
        about, self.network = network_of(self.folder)
        self.sized = about["config"]
        self.features = Features.from_json(about["features"])
        self.units = PruningGroups(self.network, self.features, self.sized)
        self.groups: Widths = {name: group.shape[1] for name, group in self.units.groups.items()}
        self.tiles: Widths = dict.fromkeys(self.groups, TILE)
        self._data, self._on_error = data, on_error
        self._logs: dict[str, RowStore] = {} if like is None else like._logs
        self.log = self._read(self.features)
        self.split, self.digest = self.log.split(config.held_out), self.log.digest
        self._importances: NDArray[np.float64] | None = None

    def _read(self, features: Features) -> RowStore:
        """Returns the rows of the log in the encoding of these features."""
        from zoo.recommenders.training.row_store import RowStore

        key = json.dumps(features.to_json())
        if key not in self._logs:
            self._logs[key] = RowStore(features, self._data, self._on_error, Path(tempfile.gettempdir()) / "rows")
        return self._logs[key]

    def _removed_units(self, widths: Widths) -> NDArray[np.int64]:
        """Returns the least important units of groups that are pruned to these widths."""
        if self._importances is None:
            seen = self._rows(max(0, self.split - SEEN), self.split)
            self._importances = importances(self.network, self.units, seen, self.importance)
        removed = [np.zeros(0, np.int64)]
        for name, width in widths.items():
            for units in self.units.groups[name]:
                order = np.argsort(self._importances[units], kind="stable")
                removed.append(units[order[: len(units) - width]])
        return np.concatenate(removed)

    def _rows(self, start: int, stop: int) -> Iterator[dict[str, torch.Tensor]]:
        for begin in range(start, stop, AT_ONCE):
            yield self.log.rows(np.arange(begin, min(begin + AT_ONCE, stop)))

    def _pruned(self, widths: Widths) -> tuple[Any, nn.Module]:
        """Returns the settings and the network without the least important units."""
        config = self.units.config(self.sized, widths)
        return config, self.units.pruned(self.network, self.features, config, self._removed_units(widths))

    def loss(self, widths: Widths) -> float:
        """Computes the LogLoss of the held-out rows after pruning.

        Args:
            widths: {group: units to keep}.

        Returns:
            LogLoss in nats, rounded to 6 digits.
        """
        import torch

        from zoo.recommenders.models.multitask.outputs import probabilities

        _, network = self._pruned(widths)
        scores, labels, weights = [], [], []
        with torch.no_grad():
            for batch in self.log.parts(self.split, len(self.log)):
                results = network(batch["ids"], batch["numbers"], batch["scales"])
                scores.append(probabilities(network, results).numpy())
                labels.append(batch["label"].numpy())
                weights.append(batch["weight"].numpy())
        held_out = np.concatenate(labels), np.concatenate(scores), unless_ones(np.concatenate(weights))
        return round(float(label_metrics(*held_out, self.features.schema.labels)["logloss"]), 6)

    def save(self, widths: Widths, folder: Path) -> None:
        """Writes model.pt, train.json, schema.json and calibration.npz of the pruned network.

        Args:
            widths: {group: units to keep}.
            folder: Folder to write to.
        """
        self._save(self.features, *self._pruned(widths), folder)

    def prune_rows(self, min_count: int, folder: Path) -> dict[str, Any]:
        """Writes the model without low-frequency embedding rows, see `zoo.recommenders.training.rare_rows`.

        Args:
            min_count: Values that occur less often in the training rows are removed.
            folder: Folder to write to, as in `save`.

        Returns:
            {"least", "rows": [rows of all tables before, after], "columns": {category: rows of its table before,
            after}, "kept": categories without a vocabulary}.

        Raises:
            RequestError: No row can be removed.
        """
        from zoo.recommenders.training.row_store import CategoryCounts

        for column in (column for column in self.features.schema.columns if column.shares):
            raise RequestError(
                f"found the list {column.name} on the table of {column.shares}, expected tables of one column each to "
                "prune rows of; leave rows=N out"
            )
        counts = CategoryCounts(self.features, self.log, self.split, 1).counts
        names = rare_rows.with_vocabularies(self.features, self._data, counts, min_count)
        named = CategoryCounts(names, self._read(names), self.split, 1).counts
        features, network = rare_rows.prune(self.network, self.features, self.sized, counts, min_count, names, named)
        self._save(features, self.sized, network, folder)
        before, after = rare_rows.table_rows(self.features), rare_rows.table_rows(features)
        columns = {name: [before[name], after[name]] for name in before if after[name] < before[name]}
        rows = [sum(before.values()), sum(after.values())]
        return {"least": min_count, "rows": rows, "columns": columns, "kept": rare_rows.without_vocabulary(features)}

    def _save(self, features: Features, config: Any, network: nn.Module, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(folder / MODEL, network.state_dict())
        seen = self._read(features).rows(np.arange(max(0, self.split - KEPT), self.split))
        write_npz(folder / SAMPLES, {name: seen[name].numpy() for name in features.inputs})
        features.schema.save(folder / "schema.json")
        before = record_of(self.folder.path)
        recorded = {key: before[key] for key in ("rows", "metrics") if key in before}
        write_json(folder / "train.json", {**recorded, "config": to_plain(config), "features": features.to_json()})

    def quality(self, pipeline: ClickPipeline) -> dict[str, float]:
        """Evaluates a model on the held-out rows.

        Args:
            pipeline: Opened model.

        Returns:
            {"auc", "logloss", "accuracy", "calibration_error"}; for several labels their means, see `label_metrics`.
        """
        features, scores, labels, weights = Features.from_json(pipeline.folder.preprocessing), [], [], []
        for batch in self._read(features).parts(self.split, len(self.log)):
            arrays = {name: batch[name].numpy() for name in features.inputs}
            scores.append(pipeline.probabilities(arrays))
            labels.append(batch["label"].numpy())
            weights.append(batch["weight"].numpy())
        held_out = np.concatenate(labels), np.concatenate(scores), unless_ones(np.concatenate(weights))
        metrics = label_metrics(*held_out, features.schema.labels)
        return {name: value for name, value in metrics.items() if name != "labels"}
