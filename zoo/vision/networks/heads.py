"""Heads of image networks: how the outputs of one image become detections, a map of classes, scores or an embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.vision.networks import boxes, masks
from zoo.vision.networks.boxes import Detections, Floats
from zoo.vision.networks.transforms import Placement

DETECT, SEGMENT, CLASSIFY, EMBED = "detect", "segment", "classify", "embed"
TASKS = (DETECT, SEGMENT, CLASSIFY, EMBED)
SIGMOID, SOFTMAX = "Sigmoid", "Softmax"
Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of detections.

    Attributes:
        confidence: Scores are above it.
        iou: Threshold of the non-maximum suppression.
    """

    confidence: float = 0.25
    iou: float = 0.7


class DetectionHead:
    """A head that gives boxes, and with `masked` instance masks."""

    @property
    def masked(self) -> bool:
        """Whether there are masks."""
        return False

    @property
    def original(self) -> bool:
        """Whether boxes are in pixels of the image, not of the input."""
        return False

    @property
    def alone(self) -> bool:
        """Whether outputs have no axis of the batch, so that images are computed one by one."""
        return False

    def detections(self, out: Outputs, size: tuple[int, int], thresholds: Thresholds) -> Detections:
        """Decodes the outputs of one image.

        Args:
            out: Outputs without the axis of the batch.
            size: (height, width) of the input.
            thresholds: Thresholds.

        Returns:
            Detections in pixels of the input.
        """
        raise NotImplementedError

    def instance_masks(self, out: Outputs, detections: Detections, place: Placement) -> list[NDArray[np.bool_]]:
        """Computes the masks of detections.

        Args:
            out: Outputs without the axis of the batch.
            detections: Detections, with boxes in pixels of the image.
            place: Place of the image in the input.

        Returns:
            A mask of the image's size for each.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class DenseHead(DetectionHead):
    """A box for every anchor: YOLOv8 to v12 [4 + classes, anchors], YOLOv5 and v7 [anchors, 5 + classes].

    Attributes:
        output: Name of the output.
        channels_first: Whether the axis of the anchors is the last.
        objectness: Whether anchors have an objectness.
        prototypes: Name of the output with mask prototypes, "" for none.
    """

    output: str
    channels_first: bool
    objectness: bool
    prototypes: str = ""

    @property
    def masked(self) -> bool:
        """Whether there are masks."""
        return bool(self.prototypes)

    def detections(self, out: Outputs, size: tuple[int, int], thresholds: Thresholds) -> Detections:
        """See `DetectionHead`."""
        rows = out[self.output].astype(np.float32, copy=False)
        count = len(out[self.prototypes]) if self.prototypes else 0
        return boxes.dense(
            rows.T if self.channels_first else rows, count, self.objectness, thresholds.confidence, thresholds.iou
        )

    def instance_masks(self, out: Outputs, detections: Detections, place: Placement) -> list[NDArray[np.bool_]]:
        """See `DetectionHead`."""
        prototypes = out[self.prototypes].astype(np.float32, copy=False)
        return masks.of_prototypes(prototypes, detections.extra, detections.boxes, place)


@dataclass(frozen=True)
class SelectedHead(DenseHead):
    """Boxes that the network selects: [n, 6 + masks] of corners, score and class (YOLOv10, YOLO26, `nms=True`).

    Attributes:
        shares: Whether boxes are centre and size in shares of the input (RT-DETR of Ultralytics).
    """

    shares: bool = False

    def detections(self, out: Outputs, size: tuple[int, int], thresholds: Thresholds) -> Detections:
        """See `DetectionHead`."""
        rows = out[self.output].astype(np.float32)
        if self.shares:
            rows[:, :4] = boxes.corners(rows[:, :4]) * np.array([size[1], size[0]] * 2, np.float32)
        return boxes.selected(rows, thresholds.confidence)


@dataclass(frozen=True)
class QueryHead(DetectionHead):
    """Boxes and class scores of queries: DETR and RT-DETR, as transformers and Ultralytics export them.

    Attributes:
        boxes: Output of the boxes, [queries, 4], or [queries, 4 + classes].
        scores: Output of the scores; that of the boxes if they are one.
        activation: `SIGMOID`, `SOFTMAX` or "" if the scores are probabilities.
        no_object: Whether the last class is none.
        per_class: See `boxes.queries`.
    """

    boxes: str
    scores: str
    activation: str
    no_object: bool
    per_class: bool

    def detections(self, out: Outputs, size: tuple[int, int], thresholds: Thresholds) -> Detections:
        """See `DetectionHead`."""
        places, scores = (out[name].astype(np.float32, copy=False) for name in (self.boxes, self.scores))
        if self.boxes == self.scores:
            places, scores = places[:, :4], places[:, 4:]
        scores = activated(scores, self.activation)
        if self.no_object:
            scores = scores[:, :-1]
        return boxes.queries(places, scores, size, thresholds.confidence, self.per_class)


@dataclass(frozen=True)
class ListedHead(DetectionHead):
    """Boxes, scores and labels that the network has decoded itself: torchvision's detectors, the authors' RT-DETR.

    Attributes:
        boxes: Output of the boxes, [n, 4].
        scores: Output of the scores, [n].
        labels: Output of the classes, [n].
        masks: Output of masks, [n, 1, height, width], "" for none.
        original: Whether boxes are in pixels of the image, of a network that takes its size.
    """

    boxes: str
    scores: str
    labels: str
    masks: str = ""
    original: bool = False

    @property
    def alone(self) -> bool:
        """See `DetectionHead`."""
        return not self.original

    @property
    def masked(self) -> bool:
        """Whether there are masks."""
        return bool(self.masks)

    def detections(self, out: Outputs, size: tuple[int, int], thresholds: Thresholds) -> Detections:
        """See `DetectionHead`."""
        classes = out[self.labels].astype(np.int64, copy=False)
        extra = np.arange(len(classes))[:, None].astype(np.float32)  # which of the masks is its own
        places, scores = (out[name].astype(np.float32, copy=False) for name in (self.boxes, self.scores))
        return boxes.listed(places, scores, classes, extra, thresholds.confidence)

    def instance_masks(self, out: Outputs, detections: Detections, place: Placement) -> list[NDArray[np.bool_]]:
        """See `DetectionHead`."""
        rows, columns = (0, place.height), (0, place.width)
        return [
            masks.resampled(out[self.masks][int(index)].astype(np.float32), place, rows, columns)[0] > 0.5
            for index in detections.extra[:, 0]
        ]


@dataclass(frozen=True)
class MapHead:
    """Semantic segmentation: logits [classes, rows, columns], or classes [rows, columns].

    Attributes:
        output: Name of the output.
        threshold: Limit of a network with one channel, the foreground.
    """

    output: str
    threshold: float = 0.0

    def map(self, out: Outputs, place: Placement) -> NDArray[np.int64]:
        """Computes the class of every pixel of an image.

        Args:
            out: Outputs without the axis of the batch.
            place: Place of the image in the input.

        Returns:
            int64 [height, width]; -1 for the background of a network with one channel.
        """
        values = out[self.output]
        if values.dtype.kind != "f":
            return masks.class_map(values.reshape(values.shape[-2:]), place)
        values = values.astype(np.float32, copy=False)
        if len(values) == 1:  # background and foreground
            values = np.concatenate([np.full_like(values, self.threshold), values])
            return masks.class_map(values, place) - 1
        return masks.class_map(values, place)


@dataclass(frozen=True)
class ClassHead:
    """Classification: logits or probabilities [classes].

    Attributes:
        output: Name of the output.
        activation: `SOFTMAX`, or "" if the scores are probabilities.
    """

    output: str
    activation: str


@dataclass(frozen=True)
class EmbeddingHead:
    """Embeddings.

    Attributes:
        output: Name of the output.
        pooling: "" for a vector; "cls" for the first token, "mean" for the mean of tokens [tokens, width]; "pixels" for
            the mean of features [width, rows, columns].
    """

    output: str
    pooling: str

    def embedding(self, out: Outputs) -> Floats:
        """Computes the embedding of an image.

        Args:
            out: Outputs without the axis of the batch.

        Returns:
            float32 [width].
        """
        values: Floats = out[self.output].astype(np.float32, copy=False)
        if self.pooling == "cls":
            values = values[0]
        elif self.pooling:
            values = values.mean(axis=0 if self.pooling == "mean" else (1, 2))
        boxes.require_numbers(values)
        return values.ravel()


Head = DetectionHead | MapHead | ClassHead | EmbeddingHead


def activated(logits: Floats, activation: str) -> Floats:
    """Applies an activation to logits.

    Args:
        logits: float32 [..., classes].
        activation: `SIGMOID`, `SOFTMAX` or "" for none.

    Returns:
        float32 of the same shape.
    """
    scores = logits
    if activation == SIGMOID:
        with np.errstate(over="ignore"):
            scores = np.float32(1) / (np.float32(1) + np.exp(-logits))
    elif activation == SOFTMAX:
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = powers / powers.sum(axis=-1, keepdims=True)
    return scores
