"""Quality metrics of int8 models against the float model: a task metric and the SQNR on evaluation samples."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.metrics import auc
from pipelines.analysis.report import sqnr
from pipelines.core import deadline
from pipelines.core.batches import Batch, cut, length
from pipelines.core.errors import RequestError
from pipelines.engines.session import Runnable


@dataclass(frozen=True)
class QualityDrop:
    """Quality that int8 loses against the float model.

    Attributes:
        drop: Drop of the metric as a share: 0.005 is half a percentage point.
        sqnr_db: SQNR of the outputs in dB, None if unknown.
        metrics: The metric of "fp32" and "int8" in its own units.
    """

    drop: float
    sqnr_db: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class QualityMetric(Protocol):
    """Compares int8 models with the float model on evaluation data.

    Attributes:
        digest: Digest of the evaluation data.
        name: Name of the metric, such as "top1"; "" before the first call if the outputs decide.
        example: Batch that latency is measured on.
    """

    digest: str  # names the evaluation data
    name: str
    example: Batch  # the batch that latency is measured on

    def __call__(self, fp32: Any, int8: Any) -> QualityDrop:
        """Compares two models on all evaluation samples.

        Args:
            fp32: Float model, opened by the search's opener.
            int8: Int8 model, opened alike.

        Returns:
            The quality drop of `int8`.
        """


class MetricError(RequestError):
    """Evaluation samples or labels that no model can be evaluated on.

    It ends a search, which otherwise skips trials that fail.
    """


class OutputMetric:
    """Metric of the first float output on evaluation samples as arrays, with or without labels.

    With labels, the metric is "top1" for outputs [n, classes] and integer labels [n], "auc" for one score per sample
    and labels of 0 and 1, and "r2" for labels of the output's shape. Without labels, it is "agreement" for outputs [n,
    classes], the share of samples with the float model's arg-max, and "closeness" = 1 - |y - x| / |x| (Euclidean norms)
    for other outputs.

    Args:
        arrays: Array [n, ...] for every graph input.
        labels: Labels [n, ...], or None.
        batch_size: Samples per run.

    Raises:
        RequestError: The number of labels differs from the number of samples.
    """

    def __init__(self, arrays: Batch, labels: NDArray[Any] | None = None, batch_size: int = 1) -> None:
        self._arrays, self._labels, self._batch_size = arrays, labels, batch_size
        count = length(arrays)
        if labels is not None and len(labels) != count:
            raise RequestError(f"found {len(labels)} labels for {count} samples; expected one label per sample")
        self.example: Batch = {name: array[:batch_size] for name, array in arrays.items()}
        self.name = "" if labels is not None else "agreement"
        self.digest = _digest(arrays if labels is None else {**arrays, "": labels})
        self._fp32: dict[str, NDArray[Any]] = {}

    def __call__(self, fp32: Runnable, int8: Runnable) -> QualityDrop:
        """Compares the outputs of two sessions; the float one runs only at the first call.

        Args:
            fp32: Session of the float model.
            int8: Session of the int8 model.

        Returns:
            The quality drop, infinite if int8 computes NaN or infinity.

        Raises:
            MetricError: The float model computes NaN or infinity, the shapes of the outputs differ, or the labels do
                not fit.
        """
        self._fp32 = self._fp32 or self._run(fp32)
        x, y = self._fp32, self._run(int8)
        first = _compared(x, y)
        if not _is_finite(x[first]):
            raise MetricError(
                "the float model computes NaN or infinity on the evaluation samples; check the samples and the model"
            )
        if x[first].shape != y[first].shape:
            raise MetricError(
                f"output {first} has shape {x[first].shape} of the float model and {y[first].shape} of an int8 one, "
                "which cannot be compared; evaluate the model without the operator that selects results"
            )
        if not _is_finite(y[first]):
            return QualityDrop(float("inf"))
        self.name, score = _metric(x[first], self._labels)
        scores = {"fp32": score(x[first]), "int8": score(y[first])}
        floats = [name for name in x if x[name].dtype.kind == "f" and x[name].shape == y[name].shape]
        db = sqnr([x[name] for name in floats], [y[name] for name in floats])
        return QualityDrop(scores["fp32"] - scores["int8"], db, scores)

    def _run(self, session: Runnable) -> dict[str, NDArray[Any]]:
        outputs = []
        for batch in cut(self._arrays, self._batch_size):
            deadline.check()
            outputs.append(session.run({name: np.ascontiguousarray(array) for name, array in batch.items()}))
        return _joined(outputs)


class FeedMetric(OutputMetric):
    """Metric of the first output on feeds that are run one by one, see `OutputMetric` without labels.

    For graphs whose inputs share no sample axis, and for samples of several shapes. Outputs of several shapes are
    compared value by value.

    Args:
        feeds: Feeds, array for every graph input.
    """

    def __init__(self, feeds: Sequence[Batch]) -> None:
        self._feeds, self._labels, self._fp32 = feeds, None, {}
        self.name = "agreement"
        self.digest = hashlib.sha256("".join(map(_digest, feeds)).encode()).hexdigest()
        self.example = feeds[0]

    def _run(self, session: Runnable) -> dict[str, NDArray[Any]]:
        outputs = []
        for feed in self._feeds:
            deadline.check()
            outputs.append(session.run({name: np.asarray(array, order="C") for name, array in feed.items()}))
        return _joined(outputs)


def _joined(outputs: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Returns the outputs of all runs that are tensors, along the first axis, or flat if their shapes differ."""
    arrays = {}
    for name, example in outputs[0].items():
        if isinstance(example, np.ndarray):  # neither a sequence nor a map
            parts = [output[name] for output in outputs]
            alike = all(part.ndim for part in parts) and len({part.shape[1:] for part in parts}) == 1
            arrays[name] = np.concatenate(parts if alike else [part.ravel() for part in parts])
    return arrays


def _compared(x: Mapping[str, NDArray[Any]], y: Mapping[str, NDArray[Any]]) -> str:
    """Returns the name of the output that is evaluated: the first of floats, or the first if there is none.

    An output of another shape in the int8 model, which may select other rows, comes last.
    """
    if not x:
        raise MetricError("no output of the model is a tensor; evaluate the model without its last operator")
    return min(x, key=lambda name: (x[name].shape != y[name].shape, x[name].dtype.kind != "f"))


def _is_finite(x: NDArray[Any]) -> bool:
    return x.dtype.kind not in "fc" or bool(np.isfinite(x).all())


def _digest(arrays: Batch) -> str:
    sha = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        sha.update(f"{name} {array.dtype} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).tobytes() if array.dtype != object else repr(array.tolist()).encode())
    return sha.hexdigest()


def _metric(x: NDArray[Any], labels: NDArray[Any] | None) -> tuple[str, Callable[[NDArray[Any]], float]]:
    """Returns the metric for outputs of the shape of `x`, and the function that computes it; 1 is best."""
    if x.dtype.kind not in "f":  # class numbers or names
        truth = x if labels is None else labels
        if truth.shape != x.shape:
            raise MetricError(
                f"found labels {list(truth.shape)} for outputs {list(x.shape)}; expected one label per output"
            )
        return "agreement" if labels is None else "top1", lambda y: float(np.mean(y == truth))
    classes = x.ndim == 2 and x.shape[1] > 1
    if labels is None:
        if classes:
            return "agreement", lambda y: float((y.argmax(1) == x.argmax(1)).mean())
        norm = max(float(np.linalg.norm(x.astype(np.float64))), 1e-30)
        return "closeness", lambda y: 1 - float(np.linalg.norm((y - x).astype(np.float64))) / norm
    if classes and labels.dtype.kind in "iu" and labels.ndim == 1:
        if not 0 <= labels.min() <= labels.max() < x.shape[1]:
            raise MetricError(
                f"found labels {labels.min()} to {labels.max()}; expected 0 to {x.shape[1] - 1}, for outputs "
                f"{list(x.shape)}"
            )
        return "top1", lambda y: float((y.argmax(1) == labels).mean())
    described = f"labels {labels.dtype} {list(labels.shape)} for outputs {list(x.shape)}"
    expected = "class numbers [n] for outputs [n, classes], or values like the output's"
    if labels.dtype.kind not in "biuf" or not np.isfinite(labels).all():
        raise MetricError(f"found {described}, not all of them numbers; expected {expected}")
    if labels.size == x.size == len(x) and set(np.unique(labels)) == {0, 1}:
        return "auc", lambda y: auc(labels.ravel().astype(np.float64), y.ravel().astype(np.float64))
    if labels.shape == x.shape or labels.size == x.size:
        truth = labels.reshape(x.shape).astype(np.float64)
        variance = float(((truth - truth.mean()) ** 2).sum()) or 1.0
        return "r2", lambda y: 1 - float(((y - truth) ** 2).sum()) / variance
    raise MetricError(f"found {described}; expected {expected}")
