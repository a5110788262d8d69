"""Image networks quantized by this project, onnxruntime and NNCF: accuracy on photos, and speed.

Weights and photos are those of the development data: every fifth photo of data/imagenet/nips17 calibrates, the rest
tests, in its middle and in `VIEWS` - 1 other views: mirrored, and at the corners. All settings are post-training only,
calibrate on the same photos and get the same float file, as tf2onnx and torch write it. Photos are decoded by PIL, the
short side brought to 256 (bilinear), the middle 224 x 224 cut out.

Reported of each: top-1 and its drop, agreement (share of photos whose label is that of fp32; and of all views, where
chance moves it less), SQNR of the logits against fp32 in dB, seconds and peak memory of the quantization in a process
of its own. Then every int8 file is timed at batch 1 in onnxruntime and OpenVINO, in turn, on one thread and one core.
NNCF quantizes the model as OpenVINO converts it, whose results only OpenVINO runs; "nncf-onnx" is its quantizer of ONNX
files. Needs the `train` and `peers` extras. A setting that fails is left out, with its error.
"""

from __future__ import annotations

import csv
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core import machine
from pipelines.core.progress import progress
from pipelines.graph import io
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import SHARED as PASSES
from scripts.peers import harness, processes
from scripts.peers.quantization import settings
from scripts.peers.quantization.published_networks import (
    SIZE,
    convert_mobilenet_v1,
    convert_mobilenet_v2,
    convert_resnet50,
)
from scripts.peers.quantization.settings import Array, nncf, nncf_onnx, onnxruntime_static

CALIBRATE_EVERY, CHUNK = 5, 10
VIEWS = 5  # of a photo that tests
SHORT_SIDE = 256
ENGINES = ("onnxruntime", "openvino")
PACKAGES = ("nncf", "pillow", "tf2onnx", "torch", "tensorflow-cpu")


# -------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Network:
    """Weights and their preprocessing: pixels uint8 [n, 224, 224, 3] RGB become (pixels - mean) / deviation."""

    weights: str
    convert: Callable[[Path, Path], None]
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    bgr: bool = False
    background: int = 0  # classes before the first of ImageNet's 1,000

    def prepare(self, pixels: Array) -> Array:
        """The graph's input, float32 [n, 3, 224, 224]."""
        ordered = (pixels[..., ::-1] if self.bgr else pixels).astype(np.float32)
        scaled: Array = (ordered - np.asarray(self.mean, np.float32)) / np.asarray(self.deviation, np.float32)
        return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


HALF = (127.5, 127.5, 127.5)
NETWORKS = {
    "resnet50": Network(
        "resnet50_keras_imagenet.weights.h5", convert_resnet50, (103.939, 116.779, 123.68), (1.0, 1.0, 1.0), bgr=True
    ),
    "mobilenet_v1": Network("mobilenet_v1_1.0_224_imagenet.tflite", convert_mobilenet_v1, HALF, HALF, background=1),
    "mobilenet_v2": Network(
        "mobilenet_v2-b0353104.pth", convert_mobilenet_v2, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    ),
}


def photo_folder() -> Path:
    """The photos of the development data.

    Raises:
        RequestError: They are missing.
    """
    return harness.development_data("data/imagenet/nips17/labels.csv").parent


def photos(limit: int) -> tuple[Array, Array]:
    """(pixels uint8 [n, VIEWS, 224, 224, 3], labels int64 [n]) of the first `limit` photos; the first view is the
    middle.
    """
    from PIL import Image

    folder = photo_folder()
    with (folder / "labels.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))[:limit]
    pixels = np.empty((len(rows), VIEWS, SIZE, SIZE, 3), np.uint8)
    for at, row in enumerate(rows):
        image = Image.open(folder / row["file"]).convert("RGB")
        scale = SHORT_SIDE / min(image.size)
        width, height = (round(side * scale) for side in image.size)
        right, bottom = width - SIZE, height - SIZE
        corners = (right // 2, bottom // 2), (right // 2, bottom // 2), (0, 0), (right, bottom), (right, 0)
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels[at] = [np.asarray(resized.crop((left, top, left + SIZE, top + SIZE))) for left, top in corners]
        pixels[at, 1] = pixels[at, 0, :, ::-1]
    return pixels, np.array([int(row["label"]) for row in rows])


# ------------------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Work:
    """What the process of one setting gets: the network's name, its float file, pixels of calibration (.npy)."""

    model: str
    fp32: Path
    pixels: Path

    def batch(self, pixels: Array) -> dict[str, Array]:
        """Pixels as the graph's input."""
        return {str(io.load(self.fp32).graph.inputs[0].name): NETWORKS[self.model].prepare(pixels)}

    def batches(self, size: int = CHUNK) -> list[dict[str, Array]]:
        """The calibration samples."""
        pixels = np.load(self.pixels)
        return [self.batch(pixels[at : at + size]) for at in range(0, len(pixels), size)]


def zoo(observer: str, *, correct: bool = True) -> settings.Quantize:
    """This project, as `zoo quantize --search` quantizes: shared passes, search, calibration, corrections."""

    def make(work: Work, target: Path) -> dict[str, Any]:
        model, samples = io.load(work.fp32), work.batches()
        rewrite(model, [each() for each in PASSES])
        recipe = QuantRecipe(observer=observer, search=correct, correct=correct)
        table = make_table(model, recipe, samples)
        int8, report = quantize(model, recipe, table)
        io.save(int8, target.with_suffix(".onnx"))
        return {"equalized": len(table.equalization), "layers_corrected": len(table.bias), "operators": report.counts()}

    return make


SETTINGS: dict[str, settings.Quantize] = {
    "zoo": zoo("auto"),
    "zoo-minmax": zoo("minmax"),
    "zoo-plain": zoo("minmax", correct=False),
    "onnxruntime-minmax": onnxruntime_static("MinMax"),
    "onnxruntime-percentile": onnxruntime_static("Percentile", CalibPercentile=99.99),
    "onnxruntime-entropy": onnxruntime_static("Entropy"),
    "nncf-default": nncf(preset="performance"),
    "nncf-mixed": nncf(preset="mixed"),
    "nncf-default-exact": nncf(preset="performance", fast_bias_correction=False),
    "nncf-mixed-exact": nncf(preset="mixed", fast_bias_correction=False),
    "nncf-onnx": nncf_onnx(preset="performance"),
}


def _make(setting: str, work: Work, target: Path) -> dict[str, Any]:
    start = time.perf_counter()
    facts = SETTINGS[setting](work, target)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**facts, "seconds": round(time.perf_counter() - start, 1), "peak_mb": round(peak)}


def _convert(name: str, target: Path) -> None:
    NETWORKS[name].convert(harness.development_data("weights") / NETWORKS[name].weights, target)


# ----------------------------------------------------------------------------------------------------------- measuring


def outputs(path: Path, engine: str, work: Work, pixels: Array) -> Array:
    """Logits of every view by itself, float32 [n, VIEWS, classes], background classes left out."""
    run = settings.RUNS[engine](path, machine.cores(), [1, 3, SIZE, SIZE])
    found = np.concatenate([run(work.batch(view[None]))[0] for photo in pixels for view in photo])
    return found[:, NETWORKS[work.model].background :].reshape(*pixels.shape[:2], -1)


def accuracy(views: Array, reference_views: Array, labels: Array) -> dict[str, float]:
    """Top-1, its drop and the agreement in percent; SQNR in dB."""
    y, reference = views[:, 0], reference_views[:, 0]
    found, wanted = y.argmax(axis=1), reference.argmax(axis=1)
    top1, exact = (100 * float((each == labels).mean()) for each in (found, wanted))
    sqnr = 10 * np.log10(np.square(reference).sum() / np.square(reference - y).sum())
    return {
        "top1": round(top1, 2),
        "drop": round(exact - top1, 2),
        "agreement": round(100 * float((found == wanted).mean()), 2),
        "agreement_of_views": round(100 * float((views.argmax(axis=2) == reference_views.argmax(axis=2)).mean()), 2),
        "sqnr_db": round(float(sqnr), 2),
    }


def compare(
    name: str, chosen: Sequence[str], limit: int, rounds: int, folder: Path, advance: harness.Advance
) -> dict[str, Any]:
    """Everything measured of one model."""
    pixels, labels = photos(limit)
    tested = np.arange(len(pixels)) % CALIBRATE_EVERY != 0
    work = Work(name, folder / f"{name}-fp32.onnx", folder / "calibration.npy")
    np.save(work.pixels, pixels[~tested, 0])
    if not work.fp32.is_file():
        processes.in_process(_convert, name, work.fp32)
    reference = outputs(work.fp32, "onnxruntime", work, pixels[tested])
    top1 = round(100 * float((reference[:, 0].argmax(axis=1) == labels[tested]).mean()), 2)

    def build(setting: str, target: Path) -> dict[str, Any]:
        facts = processes.in_process(_make, setting, work, target)
        path = settings.written(target)
        engines = ENGINES[1:] if path.suffix == ".xml" else ENGINES if setting == "zoo" else ENGINES[:1]
        judged = {
            engine: accuracy(outputs(path, engine, work, pixels[tested]), reference, labels[tested])
            for engine in engines
        }
        return {"accuracy": judged, **facts}

    results, paths, left_out = settings.quantize_all(folder / name, chosen, build, advance)
    times: dict[str, dict[str, list[float]]] = {}
    if rounds:
        x = work.batch(np.random.default_rng(0).integers(0, 256, (1, SIZE, SIZE, 3), dtype=np.uint8))
        timed = {"fp32": work.fp32} | paths, ENGINES, x, rounds, [1, 3, SIZE, SIZE]
        times = processes.in_process(settings.time_files, *timed, cores={processes.last_core()})
    ratios = {
        engine: {key: harness.ratio(each, found["zoo"]) for key, each in found.items() if key != "zoo"}
        for engine, found in times.items()
        if "zoo" in found
    }
    return {
        "model": name,
        "photos": {"calibration": int((~tested).sum()), "test": int(tested.sum())},
        "fp32_top1": top1,
        "results": results,
        "left_out": left_out,
        "ahead": _ahead(results),
        "milliseconds": harness.medians(times),
        "times_as_fast": ratios,
    }


def _ahead(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """This project's agreement and SQNR minus the best peer's; the lower figure of its engines counts."""
    found = {}
    for key in ("agreement", "agreement_of_views", "sqnr_db"):
        figures = {row["setting"]: [each[key] for each in row["accuracy"].values()] for row in results}
        peers = [figure for name, each in figures.items() if not name.startswith("zoo") for figure in each]
        if "zoo" in figures and peers:
            found[key] = round(min(figures["zoo"]) - max(peers), 2)
    return found


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.names("models", "model", NETWORKS)
    parser.names("--settings", "setting", SETTINGS)
    parser.count("--photos", 500, "photos, of which every fifth calibrates", least=2)
    parser.count("--rounds", 9, "turns of each engine, 0: no timing", least=0)
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [`compare`], "environment"}."""
    facts = harness.environment(*PACKAGES, rounds=args.rounds)
    steps = len(args.models) * len(args.settings)
    with harness.folder(args.work) as folder, progress("comparing", steps) as advance:

        def one(name: str) -> dict[str, Any]:
            return compare(name, args.settings, args.photos, args.rounds, folder, advance)

        return harness.gather("models", args.models, one, args.output, facts)
