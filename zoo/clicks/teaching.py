"""What a recommender learns from another one: its probabilities, as labels.

The cross entropy is linear in its label, so to mix the losses of the click and of the teacher's probability is to mix
the two labels (Hinton et al. 2015 at temperature 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import zoo
from pipelines.core.errors import RequestError
from zoo.training import require_task


class Teacher:
    """A recommender that reads the same inputs. weight: the share of a label that it gives.

    Raises RequestError for a model of another task, or of other preprocessing than `features`, a student's as JSON.
    """

    def __init__(self, name: str, features: Mapping[str, Any], weight: float) -> None:
        require_task(name, "clicks")
        self.weight, self.pipeline = weight, zoo.pipeline(name, "fp32", "onnxruntime", batch_size=4096)
        if self.pipeline.folder.preprocessing != dict(features):
            raise RequestError(f"found the teacher {name} of another preprocessing, wanted the student's own")
        self.inputs = set(self.pipeline.input_ports)

    def labels(self, batch: Mapping[str, NDArray[Any]], clicks: NDArray[Any]) -> NDArray[np.float32]:
        """Labels [n] between those of the log and what the teacher expects. batch: inputs of the graph."""
        given = {name: np.ascontiguousarray(each) for name, each in batch.items() if name in self.inputs}
        wanted = self.pipeline.predict(given)["probability"][:, 0]
        return ((1 - self.weight) * clicks + self.weight * wanted).astype(np.float32)
