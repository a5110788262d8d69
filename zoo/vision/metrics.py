"""Quality of image classifiers: top-1 and top-5 accuracy, and the difference between int8 and fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.metrics import LEVEL, RESAMPLES, Floats, against_fp32, interval
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from zoo.vision.data.datasets import HELD_OUT, Item, find_images
from zoo.vision.data.sources import log_unreadable
from zoo.vision.inference import INPUT, OUTPUT, ImagePipeline

TOP = (1, 5)  # k of the top-k accuracies


def evaluate(pipelines: Mapping[str, ImagePipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Compares the accuracy of several precisions on the same images.

    Args:
        pipelines: Pipelines by precision, fp32 first.
        data: Labelled images (see `find_labelled`).
        on_error: "raise" to stop at the first unreadable image, "skip" to leave it out.

    Returns:
        Report of `compare_classes`, "samples" and "skipped".

    Raises:
        RequestError: The data are unusable.
    """
    images, labels = find_labelled(next(iter(pipelines.values())), data)
    ranked, skipped = rank_images(pipelines, images, labels, on_error)
    return {"samples": len(images) - skipped, "skipped": skipped, **compare_classes(ranked)}


def find_labelled(pipeline: ImagePipeline, data: Any) -> tuple[list[Item], NDArray[np.int64]]:
    """Finds the labelled images of a data set; if it is split, its held-out images.

    A label is a class name of the model, or a class number not counting the background. If the model has no class names
    and the data have as many labels as it has classes, labels are assigned in sorted order.

    Args:
        pipeline: Pipeline of the model.
        data: Labelled images (see `zoo.vision.data.datasets.open_images`).

    Returns:
        The images, and their class indices, int64 [n].

    Raises:
        RequestError: A label is no class of the model.
    """
    items = find_images(data)
    chosen = next((name for name in HELD_OUT if name in {item.split for item in items}), None)
    items = [item for item in items if chosen is None or item.split == chosen]
    labels = sorted({item.label for item in items})
    names, classes = pipeline.class_names, pipeline.names(pipeline.classes)
    index = {name: i for i, name in enumerate(classes)}
    if names is None or not set(labels) <= index.keys():
        if all(label.isdecimal() for label in labels):
            index = {label: int(label) + pipeline.background for label in labels}
        elif names is None and len(labels) == len(classes) - pipeline.background:
            index = {label: i + pipeline.background for i, label in enumerate(labels)}
    if unknown := [label for label in labels if not 0 <= index.get(label, -1) < len(classes)]:
        what = (
            f"names {', '.join(classes[:3])}, ..."
            if names
            else f"numbers its classes 0 to {len(classes) - 1 - pipeline.background}"
        )
        examples = ", ".join(unknown[:10]) + (", ..." if len(unknown) > 10 else "")
        raise RequestError(
            f"{len(unknown)} of the {len(labels)} labels are no class of {pipeline.folder.card.name}: {examples}; "
            f"it {what}"
        )
    return items, np.array([index[item.label] for item in items], np.int64)


def rank_images(
    pipelines: Mapping[str, ImagePipeline], images: Sequence[Item], labels: NDArray[np.int64], on_error: str = "raise"
) -> tuple[dict[str, Ranked], int]:
    """Ranks the classes of labelled images in every pipeline. Every image is decoded once.

    Args:
        pipelines: Pipelines by precision.
        images: The images.
        labels: Class indices, int64 [n].
        on_error: "raise" to stop at the first unreadable image, "skip" to leave it out.

    Returns:
        Ranks by precision, and the number of unreadable images.
    """
    parts: dict[str, list[Ranked]] = {name: [] for name in pipelines}
    faults: list[str] = []
    start = 0
    with (
        closing(next(iter(pipelines.values())).stream(images, on_error)) as batches,
        progress("evaluating images", len(images)) as advance,
    ):
        for batch in batches:
            well = [not fault for fault in batch.faults]
            faults += [fault for fault in batch.faults if fault]
            right = labels[start : start + len(well)][well]
            start += len(well)
            for name, pipeline in pipelines.items() if len(right) else ():
                parts[name].append(rank(pipeline.predict({INPUT: batch.pixels})[OUTPUT], right))
            advance(len(well))
    log_unreadable(len(faults), len(images) - len(faults), faults)
    ranked = {name: Ranked(*map(np.concatenate, zip(*part, strict=True))) for name, part in parts.items()}
    return ranked, len(faults)


class Ranked(NamedTuple):
    """Predictions for n images: the top class, and the rank of the right class (0: top), both int64 [n]."""

    first: NDArray[np.int64]
    place: NDArray[np.int64]


def rank(logits: Floats, labels: NDArray[np.int64]) -> Ranked:
    """Ranks the correct classes by logit; among equal logits, the lower class index is first, as in argmax.

    Args:
        logits: float [n, classes].
        labels: Correct classes, int64 [n].

    Returns:
        Top classes and ranks.

    Raises:
        ZooError: A logit is not finite.
    """
    if not np.isfinite(logits).all():
        raise ZooError("the model computes NaN or infinite logits; check its weights and the input")
    right = logits[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    return Ranked(
        logits.argmax(axis=1).astype(np.int64),
        ((logits > right) | ((logits == right) & earlier)).sum(axis=1, dtype=np.int64),
    )


def class_metrics(ranked: Ranked) -> dict[str, float]:
    """Computes top-1 and top-5 accuracy.

    Args:
        ranked: Ranks of n images.

    Returns:
        {"top1", "top5"}, shares from 0 to 1.
    """
    return {f"top{k}": float((ranked.place < k).mean()) for k in TOP}


def compare_classes(outputs: Mapping[str, Ranked], seed: int = 0) -> dict[str, Any]:
    """Compares several precisions with fp32 on the same images.

    Args:
        outputs: Ranks by precision, fp32 first.
        seed: Seed of the bootstrap.

    Returns:
        {"metrics": by precision, "difference": {"top1", "top5": int8 - fp32, "agreement": share of images with the same
        top class}, "interval": 95% paired bootstrap intervals (see `pipelines.analysis.metrics.interval`)}; differences
        of further precisions are listed under "others".

    Raises:
        RequestError: There are no images.
    """
    if not len(next(iter(outputs.values())).place):
        raise RequestError("found no images; accuracy needs some")
    return against_fp32(outputs, class_metrics, lambda fp32, other: _compare_ranked(fp32, other, seed))


def _compare_ranked(a: Ranked, b: Ranked, seed: int) -> dict[str, Any]:
    """Compares b with a; see `compare_classes`. Each metric is the mean over images of values in {-1, 0, 1}."""
    values = {f"top{k}": (b.place < k).astype(np.int64) - (a.place < k) for k in TOP} | {
        "agreement": (a.first == b.first).astype(np.int64)
    }
    rng = np.random.default_rng(seed)
    intervals: dict[str, Any] = {"level": LEVEL, "resamples": RESAMPLES}
    for name, value in values.items():  # a bootstrap sample is a multinomial draw of the counts of values
        kinds, counts = np.unique(value, return_counts=True)
        means = rng.multinomial(len(value), counts / len(value), RESAMPLES) @ kinds / len(value)
        intervals[name] = interval(means)
    return {"difference": {name: float(value.mean()) for name, value in values.items()}, "interval": intervals}
