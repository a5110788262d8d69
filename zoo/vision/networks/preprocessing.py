"""Finds the preprocessing of an image network: given, beside the file, or by the convention of its exporter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.core.batches import Batch, joined
from pipelines.core.errors import RequestError
from pipelines.data.images import as_pixels
from zoo.vision.networks.conventions import Signature, read_signature
from zoo.vision.networks.heads import CLASSIFY, DETECT, EMBED, SEGMENT
from zoo.vision.networks.transforms import (
    AS_IS,
    CROP,
    LETTERBOX,
    STRETCH,
    ImageTransform,
    beside,
    read_transform,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def find_transform(signature: Signature, task: str | None, path: Path | None) -> ImageTransform:
    """Finds the preprocessing of a network.

    Args:
        signature: Its signature.
        task: Task that the user asked for; None for that of the network.
        path: JSON file of the preprocessing; None to look beside the file, then by the exporter's convention:
            Ultralytics' metadata (letterbox, for classification a crop), YOLO's output (letterbox), torchvision's
            detectors and the authors' RT-DETR.

    Returns:
        The transform, for the size of the file's input.

    Raises:
        RequestError: There is none, or it is for another size.
    """
    sides = signature.sides
    transform = read_transform(path) if path is not None else beside(signature.path) or _by_convention(signature, task)
    if transform is None:
        height, width = (side or 224 for side in sides)
        size = {"size": height, "resize": height * 8 // 7} if height == width else {"size": [height, width]}
        raise RequestError(
            f"{signature.path} does not say how images are prepared; give the preprocessor_config.json of "
            "transformers, the config.json of timm, or a file such as "
            f"{json.dumps({**size, 'mean': MEAN, 'std': STD})}: --preprocess FILE.json"
        )
    fixed = [side for side in sides if side is not None]
    if transform.size != (0, 0):
        if any(side not in (None, own) for side, own in zip(sides, transform.size, strict=True)):
            raise RequestError(
                f"{signature.path} takes images of {_text(sides)}, the preprocessing gives {_text(transform.size)}; "
                "give another one with --preprocess FILE.json"
            )
        return transform
    if len(fixed) == 2:  # an image of any size, for an input of one
        return replace(transform, size=(fixed[0], fixed[1]), fit=STRETCH, resize=())
    if fixed:
        raise RequestError(f"{signature.path} takes images of {_text(sides)}; give a size with --preprocess FILE.json")
    return transform


def prepared_batches(
    file: Path, preprocess: Path | None, paths: Iterable[Path], size: int, skipped: list[str] | None = None
) -> Iterator[Batch]:
    """Prepares images for a network as `zoo run` does, as samples of a calibration.

    Args:
        file: ONNX file.
        preprocess: See `find_transform`.
        paths: Images.
        size: Images of a batch; one, if the network takes any size.
        skipped: Collects errors of unreadable images, which are then skipped.

    Yields:
        Array of every input; also the sizes of the images, where the network takes them.

    Raises:
        RequestError: The preprocessing is unknown, or an image is unreadable (without `skipped`).
    """
    signature = read_signature(file)
    transform = find_transform(signature, None, preprocess)
    port = signature.inputs[signature.image]
    size = size if transform.size != (0, 0) else 1
    batch: list[Batch] = []
    for path in paths:
        try:
            pixels = as_pixels(path)
        except RequestError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
            continue
        resized, place = transform.apply(pixels)
        values = np.ascontiguousarray(transform.values(resized, port.dtype))
        values = values.transpose(1, 2, 0) if signature.channels_last else values
        sizes = {name: np.array([(place.width, place.height)], other.dtype) for name, other in signature.inputs.items()}
        batch.append(sizes | {signature.image: values[None] if signature.batched else values})
        if len(batch) == size:
            yield joined(batch) if size > 1 else batch[0]
            batch = []
    if batch:
        yield joined(batch)


def _by_convention(signature: Signature, task: str | None) -> ImageTransform | None:
    metadata = signature.metadata
    own = metadata.get("task")
    size = _size(signature)
    if "names" in metadata and ("stride" in metadata or own):  # Ultralytics
        vectors = all(len(port.shape) == 2 for port in signature.outputs.values())
        if size is None:
            raise RequestError(f"{signature.path} takes images of any size; give one with --preprocess FILE.json")
        if own == CLASSIFY:
            return ImageTransform(size, CROP, size[:1] if size[0] == size[1] else size)
        if vectors:  # YOLOv5's classifiers, whose metadata have no task
            return ImageTransform(size, CROP, size[:1], mean=MEAN, std=STD)
        detr = "RTDETR" in metadata.get("head", "") or "rtdetr" in metadata.get("description", "").lower().replace(
            "-", ""
        )
        return ImageTransform(size, STRETCH if detr else LETTERBOX)
    if not signature.batched:  # torchvision's detectors resize and normalize themselves
        return ImageTransform((0, 0), AS_IS)
    if task in (CLASSIFY, EMBED):
        return None
    if (
        len(signature.inputs) == 2 and size is not None
    ):  # the authors' RT-DETR and D-FINE: the sizes are the other input
        return ImageTransform(size, STRETCH)
    ranks = sorted(len(port.shape) for port in signature.outputs.values())
    if task in (None, DETECT, SEGMENT) and ranks in ([3], [3, 4]) and size is not None:  # YOLO without metadata
        return ImageTransform(size, LETTERBOX)
    return None


def _size(signature: Signature) -> tuple[int, int] | None:
    """Height and width of the input, or of Ultralytics' imgsz for a free one."""
    height, width = signature.sides
    sizes = signature.literal("imgsz")
    if isinstance(sizes, int):
        sizes = [sizes, sizes]
    if (
        isinstance(sizes, list | tuple)
        and len(sizes) == 2
        and all(isinstance(side, int) and side > 0 for side in sizes)
    ):
        height, width = height or sizes[0], width or sizes[1]
    return None if height is None or width is None else (height, width)


def _text(sides: tuple[int | None, ...]) -> str:
    return " x ".join("any" if side is None else str(side) for side in sides)
