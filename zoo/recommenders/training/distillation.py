"""Knowledge distillation of recommenders: the probabilities of a teacher are mixed into the labels.

Cross entropy is linear in the label. Mixing the losses of click and teacher is therefore the same as mixing the two
labels (Hinton et al. 2015, at temperature 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import zoo
from pipelines.core.errors import RequestError
from zoo.recommenders.data.features import Features
from zoo.training.runs import require_task

ORDER = ("label", "weight", "timestamp")  # the columns that say which rows are read, and in what order


@dataclass(frozen=True)
class LogSource:
    """Training log of a student, for a teacher with another preprocessing.

    Attributes:
        data: Source of the log, as in `Features.read`.
        on_error: As in `Features.read`.
        folder: Folder next to which the encoded rows are stored.
    """

    data: Any
    on_error: str
    folder: Path


class Teacher:
    """A recommender that provides labels for the training log of a student.

    A teacher with another preprocessing, such as a larger vocabulary, reads `source` itself, once.

    Args:
        name: Name or folder of the teacher model.
        features: Preprocessing of the student as JSON.
        weight: Share of the teacher in the labels, 0 to 1.
        source: Training log; required for a teacher with another preprocessing.
        shift: Shift of the logits of the first label in a log of sampled negatives, see `negative_sampling.log_odds`.

    Raises:
        RequestError: The teacher has another task, or it has another preprocessing and cannot read the log.
    """

    def __init__(
        self,
        name: str,
        features: Mapping[str, Any],
        weight: float,
        source: LogSource | None = None,
        shift: float = 0.0,
    ) -> None:
        require_task(name, "clicks")
        self.pipeline: Any = zoo.pipeline(name, "fp32", "onnxruntime", batch_size=4096)
        self.weight, self.odds = weight, math.exp(shift)
        self.inputs, own = set(self.pipeline.input_ports), self.pipeline.folder.preprocessing
        self._read: NDArray[np.float32] | None = None  # probabilities of all rows, where it reads them itself
        if Features.from_json(own) != Features.from_json(features):
            if source is None or _order(own) != _order(features):
                raise RequestError(f"found the teacher {name} of another preprocessing, expected the student's own")
            self._read = self._all(Features.from_json(own), source)

    def labels(
        self, batch: Mapping[str, NDArray[Any]], clicks: NDArray[Any], places: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Mixes the labels of the log with the probabilities of the teacher.

        Args:
            batch: Inputs of the student's graph.
            clicks: Labels of the log, [n], or [n, labels] with NaN where missing.
            places: Positions of the rows in time order, int64 [n]; required for a teacher with another preprocessing.

        Returns:
            (1 - weight) * clicks + weight * probabilities, float32 of the shape of `clicks`.
        """
        expected = self._expected(batch) if self._read is None else self._read[places]
        return ((1 - self.weight) * clicks + self.weight * expected).astype(np.float32)

    def _expected(self, batch: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        arrays = {name: np.ascontiguousarray(array) for name, array in batch.items() if name in self.inputs}
        probabilities: NDArray[np.float32] = self.pipeline.probabilities(arrays)
        if self.odds != 1:
            first = probabilities if probabilities.ndim == 1 else probabilities[:, 0]
            first[...] = first * self.odds / (1 - first + first * self.odds)
        return probabilities

    def _all(self, features: Features, source: LogSource) -> NDArray[np.float32]:
        from zoo.recommenders.training.row_store import RowStore

        store = RowStore(features, source.data, source.on_error, source.folder)
        parts = store.parts(0, len(store))
        return np.concatenate([self._expected({name: x.numpy() for name, x in part.items()}) for part in parts])


def _order(preprocessing: Mapping[str, Any]) -> tuple[list[tuple[str, str, str]], tuple[str, ...]]:
    schema = Features.from_json(preprocessing).schema
    return sorted((column.kind, column.name, column.unit) for column in schema.of(*ORDER)), schema.labels
