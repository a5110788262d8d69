"""What a recommender learns from another one: its probabilities, as labels.

The cross entropy is linear in its label, so to mix the losses of the click and of the teacher's probability is to mix
the two labels (Hinton et al. 2015 at temperature 1).
"""

from __future__ import annotations

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
class Source:
    """The log that a student trains on, for a teacher to read by itself; on_error as in `Features.read`, folder: where
    its rows are kept."""

    data: Any
    on_error: str
    folder: Path


class Teacher:
    """A recommender that reads the same log. weight: the share of a label that it gives.

    features: the student's preprocessing as JSON. One of another, such as a larger vocabulary, reads `source` itself,
    once. Raises RequestError for a model of another task, or where it cannot read that.
    """

    def __init__(self, name: str, features: Mapping[str, Any], weight: float, source: Source | None = None) -> None:
        require_task(name, "clicks")
        self.weight, self.pipeline = weight, zoo.pipeline(name, "fp32", "onnxruntime", batch_size=4096)
        self.inputs, own = set(self.pipeline.input_ports), self.pipeline.folder.preprocessing
        self._read: NDArray[np.float32] | None = None  # probabilities of all rows, where it reads them itself
        if Features.from_json(own) != Features.from_json(features):
            if source is None or _order(own) != _order(features):
                raise RequestError(f"found the teacher {name} of another preprocessing, wanted the student's own")
            self._read = self._all(Features.from_json(own), source)

    def labels(
        self, batch: Mapping[str, NDArray[Any]], clicks: NDArray[Any], places: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Labels [n] between those of the log and what the teacher expects. batch: inputs of the student's graph.
        places: of the rows in the time order, which a teacher of another preprocessing needs."""
        wanted = self._expected(batch) if self._read is None else self._read[places]
        return ((1 - self.weight) * clicks + self.weight * wanted).astype(np.float32)

    def _expected(self, batch: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        given = {name: np.ascontiguousarray(each) for name, each in batch.items() if name in self.inputs}
        found: NDArray[np.float32] = self.pipeline.predict(given)["probability"][:, 0]
        return found

    def _all(self, features: Features, source: Source) -> NDArray[np.float32]:
        from zoo.recommenders.training.row_store import Store

        store = Store(features, source.data, source.on_error, source.folder)
        parts = store.parts(0, len(store))
        return np.concatenate([self._expected({name: x.numpy() for name, x in each.items()}) for each in parts])


def _order(preprocessing: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    columns = Features.from_json(preprocessing).schema.of(*ORDER)
    return sorted((each.kind, each.name, each.unit) for each in columns)
