"""Masks of instances and of classes in pixels of the image, and their run-length encoding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.vision.networks.boxes import require_numbers
from zoo.vision.networks.transforms import Placement

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
TILE = 4  # cells of a feature map whose pixels are computed together; few classes can be the largest in so few


def of_prototypes(prototypes: Floats, coefficients: Floats, boxes: Floats, place: Placement) -> list[Mask]:
    """Computes instance masks of prototypes (YOLACT, YOLOv5 to v12): sums of prototypes above 0, within the box.

    Args:
        prototypes: float32 [masks, rows, columns].
        coefficients: float32 [n, masks].
        boxes: Boxes in pixels of the image, float32 [n, 4].
        place: Place of the image in the input.

    Returns:
        A mask of the image's size for each box.
    """
    masks = []
    for weights, box in zip(coefficients, boxes, strict=True):
        logits = np.tensordot(weights, prototypes, 1)
        left, top = np.floor(box[:2]).astype(int)
        right, bottom = np.ceil(box[2:]).astype(int)
        mask = np.zeros((place.height, place.width), bool)
        if right > left and bottom > top:
            inside = resampled(logits[None], place, (top, bottom), (left, right))[0] > 0
            columns, rows = np.arange(left, right), np.arange(top, bottom)
            inside &= ((columns >= box[0]) & (columns < box[2]))[None] & ((rows >= box[1]) & (rows < box[3]))[:, None]
            mask[top:bottom, left:right] = inside
        masks.append(mask)
    return masks


def resampled(values: Floats, place: Placement, rows: tuple[int, int], columns: tuple[int, int]) -> Floats:
    """Interpolates feature maps of the input bilinearly at pixels of the image.

    Args:
        values: float32 [channels, rows, columns] over the input.
        place: Place of the image in the input.
        rows: First row of the image, and the row behind the last.
        columns: First column of the image, and the column behind the last.

    Returns:
        float32 [channels, rows, columns] of these pixels.
    """
    top, bottom, down = _neighbours(rows, place.scale[1], place.offset[1], place.size[0], values.shape[1], place.height)
    left, right, across = _neighbours(
        columns, place.scale[0], place.offset[0], place.size[1], values.shape[2], place.width
    )
    lines = values[:, top] * (np.float32(1) - down)[:, None] + values[:, bottom] * down[:, None]
    pixels: Floats = lines[:, :, left] * (np.float32(1) - across) + lines[:, :, right] * across
    return pixels


def class_map(values: NDArray[Any], place: Placement) -> NDArray[np.int64]:
    """Computes the class of every pixel of the image: the largest logit, interpolated bilinearly.

    The result is that of interpolating all logits; classes that cannot be the largest within a tile are left out.

    Args:
        values: Logits, float32 [classes, rows, columns] over the input; or classes, integers [rows, columns].
        place: Place of the image in the input.

    Returns:
        int64 [height, width].
    """
    indices = np.empty((place.height, place.width), np.int64)
    if values.ndim == 2:
        rows = _nearest(place.height, place.scale[1], place.offset[1], place.size[0], values.shape[0])
        columns = _nearest(place.width, place.scale[0], place.offset[0], place.size[1], values.shape[1])
        indices[...] = values[rows[:, None], columns]
        return indices
    # pixels of a tile of cells
    high = max(1, int(TILE * place.size[0] / (values.shape[1] * place.scale[1])))
    wide = max(1, int(TILE * place.size[1] / (values.shape[2] * place.scale[0])))
    for top in range(0, place.height, high):
        rows_ = top, min(top + high, place.height)
        upper, lower, _ = _neighbours(
            rows_, place.scale[1], place.offset[1], place.size[0], values.shape[1], place.height
        )
        for left in range(0, place.width, wide):
            columns_ = left, min(left + wide, place.width)
            first, last, _ = _neighbours(
                columns_, place.scale[0], place.offset[0], place.size[1], values.shape[2], place.width
            )
            tile = values[:, upper.min() : lower.max() + 1, first.min() : last.max() + 1].reshape(len(values), -1)
            classes = np.flatnonzero(tile.max(axis=1) >= tile.min(axis=1).max())
            if not len(classes):
                require_numbers(tile)
            inside = resampled(values[classes], place, rows_, columns_) if len(classes) > 1 else None
            indices[slice(*rows_), slice(*columns_)] = classes[0 if inside is None else inside.argmax(axis=0)]
    return indices


def _cells(
    pixels: tuple[int, int], scale: float, offset: int, side: int, cells: int, whole: int
) -> tuple[NDArray[np.float64], int, int]:
    """Position of pixels among the cells, within the first and the last cell that the image reaches."""
    ratio = cells / side
    first = min(max(math.floor(offset * ratio), 0), cells - 1)
    last = min(max(math.ceil((offset + whole * scale) * ratio) - 1, first), cells - 1)
    positions = ((np.arange(*pixels) + 0.5) * scale + offset) * ratio - 0.5
    return np.clip(positions, first, last), first, last


def _neighbours(
    pixels: tuple[int, int], scale: float, offset: int, side: int, cells: int, whole: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Cells before and behind the pixels of an axis, and the weight of the latter."""
    positions, _, last = _cells(pixels, scale, offset, side, cells, whole)
    before = np.floor(positions).astype(np.int64)
    return before, np.minimum(before + 1, last), (positions - before).astype(np.float32)


def _nearest(whole: int, scale: float, offset: int, side: int, cells: int) -> NDArray[np.int64]:
    positions, first, last = _cells((0, whole), scale, offset, side, cells, whole)
    return np.clip(np.floor(positions + 0.5).astype(np.int64), first, last)


def run_lengths(mask: Mask) -> dict[str, Any]:
    """Encodes a mask as COCO's compressed run lengths (pycocotools).

    Args:
        mask: bool [height, width].

    Returns:
        {"size": [height, width], "counts": text}.
    """
    flat = np.concatenate([[False], mask.ravel(order="F"), [False]])
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    counts = np.diff([0, *changes[changes < mask.size], mask.size]).tolist()
    text = []
    for i, count in enumerate(counts):
        value = count - counts[i - 2] if i > 2 else count
        while True:
            bits, value = value & 31, value >> 5
            more = value != (-1 if bits & 16 else 0)
            text.append(chr(48 + bits + 32 * more))
            if not more:
                break
    return {"size": list(mask.shape), "counts": "".join(text)}
