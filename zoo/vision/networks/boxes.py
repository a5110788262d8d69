"""Boxes of detectors: non-maximum suppression, and the outputs of exporters decoded to boxes in pixels of the input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import ZooError

Floats = NDArray[np.float32]
MAX_DETECTIONS = 300  # detections of an image
CANDIDATES = 30_000  # boxes that enter the suppression


@dataclass(frozen=True)
class Detections:
    """Detections in an image, the highest score first.

    Attributes:
        boxes: float32 [n, 4], x and y of two corners.
        scores: float32 [n].
        classes: int64 [n].
        extra: Values of each box, such as mask coefficients, [n, ...].
    """

    boxes: Floats
    scores: Floats
    classes: NDArray[np.int64]
    extra: Floats

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> Detections:
        """Selects detections.

        Args:
            index: Positions, or a boolean for each.

        Returns:
            The selected detections.
        """
        return Detections(self.boxes[index], self.scores[index], self.classes[index], self.extra[index])


def suppress(boxes: Floats, scores: Floats, classes: NDArray[np.int64], iou: float) -> NDArray[np.int64]:
    """Non-maximum suppression within each class: torchvision's `batched_nms`, in float32.

    A box is left out if its intersection over union with a box of its class and a higher score is above `iou`; of equal
    scores, the first box is kept.

    Args:
        boxes: float32 [n, 4], x and y of two corners.
        scores: float32 [n].
        classes: int64 [n].
        iou: Threshold.

    Returns:
        Positions of the kept boxes, `MAX_DETECTIONS` at most, int64, the highest score first.
    """
    order = np.argsort(-scores, kind="stable")[:CANDIDATES]
    left, top, right, bottom = np.ascontiguousarray(boxes[order].T)
    kinds, areas = classes[order], (right - left) * (bottom - top)
    kept: list[np.int64] = []
    remaining = np.arange(len(order))
    while len(remaining) and len(kept) < MAX_DETECTIONS:
        first, remaining = remaining[0], remaining[1:]
        kept.append(first)
        width = np.minimum(right[first], right[remaining]) - np.maximum(left[first], left[remaining])
        height = np.minimum(bottom[first], bottom[remaining]) - np.maximum(top[first], top[remaining])
        shared = np.maximum(width, np.float32(0)) * np.maximum(height, np.float32(0))
        with np.errstate(invalid="ignore"):  # two empty boxes
            overlaps = shared / (areas[first] + areas[remaining] - shared) > np.float32(iou)
        remaining = remaining[~(overlaps & (kinds[remaining] == kinds[first]))]
    return order[np.array(kept, np.int64)]


def corners(boxes: Floats) -> Floats:
    """Converts boxes from centre and size to corners.

    Args:
        boxes: float32 [n, 4]: x and y of the centre, width, height.

    Returns:
        float32 [n, 4]: x and y of two corners.
    """
    half = boxes[:, 2:] / np.float32(2)
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def dense(rows: Floats, masks: int, objectness: bool, confidence: float, iou: float) -> Detections:
    """Decodes the dense outputs of YOLO networks: the best class of each anchor, then `suppress`.

    Args:
        rows: float32 [anchors, 4 + objectness + classes + masks]: centre, size, objectness, scores of the classes,
            mask coefficients.
        masks: Number of mask coefficients.
        objectness: Whether rows have an objectness (YOLOv5, v7), a factor of all scores.
        confidence: Scores are above it.
        iou: Threshold of the suppression.

    Returns:
        The detections.
    """
    first, last = 4 + objectness, rows.shape[1] - masks
    ceiling = rows[:, 4] if objectness else rows[:, first:last].max(axis=1)
    rows = rows[_above(ceiling, confidence)]  # most anchors end here
    scores = rows[:, first:last] * rows[:, 4:5] if objectness else rows[:, first:last]
    classes = scores.argmax(axis=1)
    best = scores[np.arange(len(rows)), classes]
    detections = Detections(corners(rows[:, :4]), best, classes, rows[:, last:])
    detections = detections.take(_above(best, confidence))
    return detections.take(suppress(detections.boxes, detections.scores, detections.classes, iou))


def selected(rows: Floats, confidence: float) -> Detections:
    """Decodes the output of networks that select boxes themselves (YOLOv10, YOLO26, exports with `nms=True`).

    Args:
        rows: float32 [n, 6 + masks]: two corners, score, class, mask coefficients.
        confidence: Scores are above it.

    Returns:
        The detections.
    """
    rows = rows[_above(rows[:, 4], confidence)][:MAX_DETECTIONS]
    return _ordered(Detections(rows[:, :4], rows[:, 4], rows[:, 5].astype(np.int64), rows[:, 6:]))


def queries(boxes: Floats, scores: Floats, size: tuple[int, int], confidence: float, per_class: bool) -> Detections:
    """Decodes boxes and scores of detection transformers, which need no suppression.

    Args:
        boxes: float32 [queries, 4], centre and size in shares of the input.
        scores: float32 [queries, classes].
        size: (height, width) of the input.
        confidence: Scores are above it.
        per_class: Whether a query may have several classes: the highest scores of all (RT-DETR, Deformable DETR);
            otherwise the best class of each (DETR).

    Returns:
        The detections.
    """
    height, width = size
    scaled = corners(boxes) * np.array([width, height, width, height], np.float32)
    count = scores.shape[1]
    require_numbers(scores)  # sorted behind all others
    if per_class:
        flat = np.argsort(-scores.ravel(), kind="stable")[: len(scores)]
        index, classes = flat // count, flat % count
    else:
        index, classes = np.arange(len(scores)), scores.argmax(axis=1)
    detections = Detections(scaled[index], scores[index, classes], classes, np.zeros((len(index), 0), np.float32))
    return _ordered(detections.take(_above(detections.scores, confidence)))


def listed(boxes: Floats, scores: Floats, classes: NDArray[np.int64], extra: Floats, confidence: float) -> Detections:
    """Filters boxes that a network has decoded itself, as torchvision's detectors do.

    Args:
        boxes: float32 [n, 4], x and y of two corners.
        scores: float32 [n].
        classes: int64 [n].
        extra: Values of each box, [n, ...].
        confidence: Scores are above it.

    Returns:
        The detections.
    """
    detections = Detections(boxes, scores, classes, extra)
    return _ordered(detections.take(_above(scores, confidence)))


def _above(scores: Floats, confidence: float) -> NDArray[np.bool_]:
    """Returns which scores are above a threshold; NaN would be no detection."""
    require_numbers(scores)
    return scores > np.float32(confidence)


def require_numbers(values: NDArray[Any]) -> None:
    """Checks that there is no NaN.

    Args:
        values: Outputs of a network.

    Raises:
        ZooError: A value is NaN.
    """
    if np.isnan(values).any():
        raise ZooError("the network computes NaN; check its weights and the input")


def _ordered(detections: Detections) -> Detections:
    return detections.take(np.argsort(-detections.scores, kind="stable")[:MAX_DETECTIONS])
