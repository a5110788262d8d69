"""Benchmark of image classifiers from image files to classes, as in DAWNBench: accuracy, latency, throughput."""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.benchmark import Configuration, memory_mb
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from pipelines.data.images import decode, prepare
from pipelines.models.pipeline import graph_file
from zoo.vision.data.datasets import Item
from zoo.vision.data.sources import content, unlabelled_images
from zoo.vision.inference import INPUT, ImagePipeline
from zoo.vision.metrics import class_metrics, find_labelled, rank_images

SCENARIOS = ("single-stream", "offline")
BATCHES = (1, 4, 16)
BLOCK = 10  # images that one pipeline classifies before the next pipeline's turn
PROBE = 64  # images to time a batch size on
ROUNDS = 3  # rounds of the throughput measurement
STEPS = ("decode", "preprocess", "model", "postprocess")

logger = logging.getLogger(__name__)


def run_scenario(
    pipelines: Sequence[ImagePipeline],
    data: Any,
    *,
    scenario: str = SCENARIOS[0],
    count: int = 1000,
    min_accuracy: Mapping[str, float | None] | None = None,
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """Measures the accuracy of every pipeline on all images, then times the pipelines in turn on a subset.

    Args:
        pipelines: Pipelines to compare.
        data: Images as in `find_labelled`; unlabelled images have no accuracy.
        scenario: "single-stream" measures latency image by image and then throughput; "offline" measures throughput
            only.
        count: Number of images to time, evenly spaced in the data.
        min_accuracy: Minimum accuracy {"top1", "top5"} of every pipeline.
        price_per_hour: Price of the machine per hour.

    Returns:
        {"scenario", "samples" (of the accuracy), "images" (timed), "results": [{"engine", "precision", "threads",
        "top1", "top5", "latency_ms": {"mean", "p50", "p90", "p99"} from the content of a file to its classes,
        "split_ms": mean of every stage, "offline": {"images_per_second", "batch_size", "workers" (decoding threads),
        "by_batch"}, "model_mb" (file), "memory_mb" (see `pipelines.analysis.benchmark.memory_mb`, batch size 1),
        "cost_per_million" (images, in the unit of `price_per_hour`)}]}.

    Raises:
        ZooError: The accuracy of a pipeline is below `min_accuracy`.
        RequestError: An image is unreadable, or `min_accuracy` is given without labels.
    """
    if scenario not in SCENARIOS:
        raise RequestError(f"unknown scenario {scenario!r}; choose {' or '.join(SCENARIOS)}")
    if count < 1:
        raise RequestError(f"count is {count}; expected at least 1 image")
    minimums = {name: share for name, share in (min_accuracy or {}).items() if share is not None}
    images, labels = _images(pipelines[0], data, minimums)
    for pipe in pipelines:
        pipe.predict(pipe.blank())  # engine "auto" selects an engine
    results: list[dict[str, Any]] = [
        {"engine": opened.engine, "precision": opened.precision, "threads": opened.threads} for opened in pipelines
    ]
    if labels is not None:
        for result, metrics in zip(results, _accuracy(pipelines, images, labels, minimums), strict=True):
            result |= metrics
    count = min(count, len(images))
    chosen = [images[index * len(images) // count] for index in range(count)]
    if scenario == SCENARIOS[0]:
        for result, times in zip(results, _one_by_one(pipelines, chosen), strict=True):
            whole = times.sum(axis=1)
            result["latency_ms"] = _rounded(
                {"mean": whole.mean()} | {f"p{q}": np.percentile(whole, q) for q in (50, 90, 99)}
            )
            result["split_ms"] = _rounded(dict(zip(STEPS, times.mean(axis=0), strict=True)))
    for pipe, result, offline in zip(pipelines, results, _offline(pipelines, chosen), strict=True):
        result["offline"] = offline
        path = graph_file(pipe.folder, pipe.precision, pipe.engine)
        result["model_mb"] = round(path.stat().st_size / 1e6, 4)
        result["memory_mb"] = memory_mb(Configuration(pipe.engine, pipe.precision, path), pipe.blank(), pipe.threads)
        if price_per_hour is not None:
            result["cost_per_million"] = round(price_per_hour / 3600 / offline["images_per_second"] * 1e6, 4)
    return {"scenario": scenario, "samples": 0 if labels is None else len(labels), "images": count, "results": results}


def _images(
    pipeline: ImagePipeline, data: Any, minimums: Mapping[str, float]
) -> tuple[Sequence[Path | Item], NDArray[np.int64] | None]:
    try:
        return find_labelled(pipeline, data)
    except RequestError as error:
        if minimums:
            asked = " and ".join(f"--min-{name}" for name in minimums)
            raise RequestError(f"{asked} asks for the labels of the images: {error}") from error
        images = unlabelled_images(data)
        logger.warning("no accuracy: %s", error)
        return images, None


def _accuracy(
    pipelines: Sequence[ImagePipeline], images: Sequence[Any], labels: NDArray[np.int64], minimums: Mapping[str, float]
) -> list[dict[str, float]]:
    ranked, _ = rank_images({str(index): pipeline for index, pipeline in enumerate(pipelines)}, images, labels)
    metrics = [class_metrics(ranks) for ranks in ranked.values()]
    for pipeline, quality in zip(pipelines, metrics, strict=True):
        for name, share in minimums.items():
            if quality[name] < share:
                who = f"{pipeline.folder.card.name} in {pipeline.precision}, {pipeline.engine}"
                raise ZooError(
                    f"{who}: {name} is {quality[name]:.4f} on {len(labels):,} images, expected {share:g} or more; "
                    "nothing was timed"
                )
    return metrics


def _one_by_one(pipelines: Sequence[ImagePipeline], images: Sequence[Path | Item]) -> list[NDArray[np.float64]]:
    """Measures the latency of images one by one; milliseconds, float64 [images, steps], of every pipeline."""
    times: list[list[list[float]]] = [[] for _ in pipelines]
    with progress("classifying one by one", len(images)) as advance:
        for start in range(0, len(images), BLOCK):
            block = [content(image) for image in images[start : start + BLOCK]]
            for pipeline, taken in zip(pipelines, times, strict=True):
                _steps(pipeline, block[-1])  # warms the caches after the turns of other pipelines
                taken += [_steps(pipeline, data) for data in block]
            advance(len(block))
    return [np.array(taken) for taken in times]


def _steps(pipeline: ImagePipeline, data: bytes) -> list[float]:
    """Measures the milliseconds of every step from the content of a file to its classes."""
    times = [time.perf_counter()]
    decoded = decode(data, smallest=pipeline.smallest)
    times.append(time.perf_counter())
    pixels = prepare(decoded, pipeline.spec)
    times.append(time.perf_counter())
    out = pipeline.predict({INPUT: pixels[None]})
    times.append(time.perf_counter())
    pipeline.postprocess(out)
    times.append(time.perf_counter())
    return [1e3 * (after - before) for before, after in itertools.pairwise(times)]


def _offline(pipelines: Sequence[ImagePipeline], images: Sequence[Path | Item]) -> list[dict[str, Any]]:
    tried: list[dict[int, float]] = [{} for _ in pipelines]
    probe = images[:PROBE]
    for size in BATCHES:
        for pipeline, rates in zip(pipelines, tried, strict=True):
            rates[size] = len(probe) / _seconds(pipeline, probe, size)
    best = [max(rates, key=lambda size, rates=rates: rates[size]) for rates in tried]  # type: ignore[misc]
    seconds = [0.0] * len(pipelines)
    with progress("classifying as a stream", ROUNDS) as advance:
        for turn in range(min(ROUNDS, len(images))):
            for index, pipeline in enumerate(pipelines):
                seconds[index] += _seconds(pipeline, images[turn::ROUNDS], best[index])
            advance(1)
    return [
        {
            "images_per_second": round(len(images) / taken, 2),
            "batch_size": size,
            "workers": pipeline.workers,
            "by_batch": {str(size): round(rate, 2) for size, rate in rates.items()},
        }
        for pipeline, taken, size, rates in zip(pipelines, seconds, best, tried, strict=True)
    ]


def _seconds(pipeline: ImagePipeline, images: Sequence[Path | Item], batch_size: int) -> float:
    """Measures the seconds from files to classes, with decoding threads."""
    sized = copy.copy(pipeline)
    sized.batch_size = batch_size
    sized.predict(sized.blank())  # compiled and warm
    start = time.perf_counter()
    with closing(sized.stream(images)) as batches:
        for batch in batches:
            sized.postprocess(sized.predict({INPUT: batch.pixels}))
    return time.perf_counter() - start


def _rounded(milliseconds: Mapping[str, Any]) -> dict[str, float]:
    return {name: round(float(value), 5) for name, value in milliseconds.items()}
