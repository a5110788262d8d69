"""The family of image networks that are one ONNX file, and the folder of such a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pipelines.core.errors import RequestError
from pipelines.models import family
from pipelines.models.family import RunOption
from pipelines.models.folder import ModelFolder
from pipelines.models.hub import Card

if TYPE_CHECKING:
    from pipelines.models.pipeline import Pipeline
    from pipelines.rewrites.driver import Rewrite
    from zoo.serving.handlers.base import Handler
    from zoo.vision.networks.conventions import Signature
    from zoo.vision.networks.heads import Thresholds
    from zoo.vision.networks.transforms import ImageTransform


@dataclass(frozen=True, kw_only=True)
class NetworkFamily(family.Family, family.Servable):
    """Image networks that are one ONNX file, as exported elsewhere or quantized by `zoo quantize`."""

    task: str = "images"
    checkpoint: str = "model.onnx"
    run_options: tuple[RunOption, ...] = (
        RunOption("draw", str, None, "Folder for copies of the images with boxes, masks and labels drawn on them."),
    )
    summary: str = "{images:,} images, {skipped:,} left out, {images_per_second:,.0f} images/s, {precision} in {engine}"

    def pipeline(self) -> type[Pipeline]:
        """See `Family`."""
        from zoo.vision.networks.pipeline import NetworkPipeline

        return NetworkPipeline

    def passes(self, preprocessing: Mapping[str, Any]) -> Sequence[Rewrite]:
        """See `Family`."""
        from zoo.vision.export.rewrites import passes

        return passes(preprocessing)

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Family`; the quality of an ONNX file is that of `zoo quantize` and `zoo tune`."""
        raise RequestError("zoo evaluate takes no .onnx file; zoo tune --evaluation-data measures its quality")

    def for_model(self, preprocessing: Mapping[str, Any]) -> Self:
        """See `Family`: with the task of the network."""
        return replace(self, task=str(preprocessing.get("task", self.task)))

    def handler(self) -> type[Handler]:
        """See `Servable`."""
        from zoo.serving.handlers.image_handler import NetworkHandler

        return NetworkHandler


IMAGE_NETWORK = NetworkFamily(
    name="image-network", title="Image network: detection, segmentation, classification or embeddings by an ONNX file"
)


@dataclass(frozen=True, kw_only=True)
class NetworkFile(ModelFolder):
    """An ONNX file as a model: it runs as it is, and nothing is built.

    Attributes:
        file: The file.
        signature: Its inputs, outputs and metadata.
        task: Task that the user asked for; None for that of the network.
        transform: Preprocessing.
        labels: Class names; None if there are none.
        thresholds: Thresholds of detections.
    """

    file: Path
    signature: Signature
    task: str | None
    transform: ImageTransform
    labels: list[str] | None
    thresholds: Thresholds

    @property
    def has_float(self) -> bool:
        """See `ModelFolder`: there is one file."""
        return False

    def ensure(self, name: str) -> Path:
        """See `ModelFolder`: every graph is the file."""
        return self.file

    def verify(self, name: str) -> Path:
        """See `ModelFolder`."""
        return self.file


def open_network(
    path: str | Path,
    *,
    task: str | None = None,
    labels: str | Path | None = None,
    preprocess: str | Path | None = None,
    confidence: float | None = None,
    iou: float | None = None,
) -> NetworkFile:
    """Opens an ONNX file as a model for images.

    Args:
        path: ONNX file.
        task: "detect", "segment", "classify" or "embed"; None for that of the network.
        labels: Class names: a file of one a line or JSON, or "imagenet", "coco" or "coco91"; None for those of the
            network.
        preprocess: JSON file of the preprocessing; None for that of the network.
        confidence: Scores of detections are above it; None for 0.25.
        iou: Threshold of the non-maximum suppression; None for 0.7.

    Returns:
        The model.

    Raises:
        RequestError: The file takes no image, its preprocessing is unknown, or an option is invalid.
    """
    from zoo.vision.networks.conventions import read_signature
    from zoo.vision.networks.heads import TASKS, Thresholds
    from zoo.vision.networks.labels import class_names
    from zoo.vision.networks.preprocessing import find_transform

    path = Path(path)
    if task is not None and task not in TASKS:
        raise RequestError(f"unknown task {task!r}; choose one of {', '.join(TASKS)}")
    limits = {"confidence": confidence, "iou": iou}
    for name, value in limits.items():
        if value is not None and not 0 <= value <= 1:
            raise RequestError(f"--{name} is {value}; expected 0 to 1")
    signature = read_signature(path)
    transform = find_transform(signature, task, None if preprocess is None else Path(preprocess))
    thresholds = Thresholds(**{name: value for name, value in limits.items() if value is not None})
    own = IMAGE_NETWORK.for_model({"task": task or signature.metadata.get("task", IMAGE_NETWORK.task)})
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "network"
    card = Card(name, own.name, signature.metadata.get("description", "").strip() or f"Image network {path.name}", ())
    return NetworkFile(
        path=path.absolute().parent,
        card=card,
        entry=own,
        file=path,
        signature=signature,
        task=task,
        transform=transform,
        labels=class_names(signature, labels),
        thresholds=thresholds,
    )
