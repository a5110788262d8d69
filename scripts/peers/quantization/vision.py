"""Image networks quantized by this project, onnxruntime and NNCF: accuracy on photos, and speed.

Weights are those of the models that ship, photos those of the development data: every fifth photo of
data/imagenet/nips17 calibrates, the rest tests, in its centre crop and in four other views: mirrored, and at three
corners. All settings are post-training only, calibrate on the same photos and get the same float file: fp32.onnx from
the normalized image on.

The report has top-1 and its drop, the agreement (share of photos, and of all views, with the label of fp32), the SQNR
of the logits against fp32 in dB, and CPU seconds and peak memory of the quantization in its own process, on one core;
every core quantizes a file at once. Then every int8 file is timed at batch 1 in onnxruntime and OpenVINO, in turn, on
one thread and one core. NNCF quantizes the model as OpenVINO converts it, whose results only OpenVINO runs; "nncf-onnx"
is its quantizer of ONNX files. Needs the `train` and `peers` extras. A setting that fails is left out, with its error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import zoo
from pipelines.core import machine
from pipelines.core.progress import progress
from pipelines.data.images import labelled
from pipelines.data.preprocess import Preprocess
from pipelines.graph import io
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import SHARED as PASSES
from scripts.peers import harness, processes
from scripts.peers.quantization import settings
from scripts.peers.quantization.settings import Array, nncf, nncf_onnx, onnxruntime_static
from scripts.peers.vision import float_networks
from scripts.peers.vision.float_networks import CALIBRATE_EVERY, Work, crop, photo_folder, resize

Quantized = tuple[list[dict[str, Any]], dict[str, Path], dict[str, str]]  # of `settings.quantize_all`
CHUNK = 10  # photos of a batch of calibration
MODELS = ("resnet50-imagenet", "mobilenet-v1-imagenet", "mobilenet-v2-imagenet")
ENGINES = ("onnxruntime", "openvino")
PACKAGES = ("nncf", "pillow", "torch")


def views(path: Path, spec: Preprocess) -> Array:
    """Returns the centre crop of a photo, the same mirrored, and three corners, uint8 [5, size, size, 3]."""
    photo = Image.open(path).convert("RGB")
    middle, whole = np.asarray(crop(photo, spec)), resize(photo, spec)
    right, bottom = whole.width - spec.size, whole.height - spec.size
    corners = [(0, 0), (right, bottom), (right, 0)]
    boxes = [(left, top, left + spec.size, top + spec.size) for left, top in corners]
    return np.stack([middle, middle[:, ::-1], *(np.asarray(whole.crop(box)) for box in boxes)])


# ------------------------------------------------------------------------------------------------------------ settings


def own(observer: str, *, correct: bool = True) -> settings.Quantize:
    """Returns the quantizer of this project as `zoo quantize --search`: passes, search, calibration, corrections."""

    def make(work: Work, target: Path) -> dict[str, Any]:
        model, samples = io.load(work.fp32), work.batches(CHUNK)
        rewrite(model, [pass_type() for pass_type in PASSES])
        recipe = QuantRecipe(observer=observer, search=correct, correct=correct)
        table = make_table(model, recipe, samples)
        int8, report = quantize(model, recipe, table)
        io.save(int8, target.with_suffix(".onnx"))
        return {"equalized": len(table.equalization), "layers_corrected": len(table.bias), "operators": report.counts()}

    return make


SETTINGS: dict[str, settings.Quantize] = {
    "zoo": own("auto"),
    "zoo-minmax": own("minmax"),
    "zoo-plain": own("minmax", correct=False),
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
    return SETTINGS[setting](work, target) | settings.used()


# ----------------------------------------------------------------------------------------------------------- measuring


def outputs(path: Path, engine: str, work: Work, pixels: Array) -> Array:
    """Returns the logits of every view, float32 [n, 5, 1000]; a class for background is left out."""
    run = settings.RUNS[engine](path, machine.cores(), [1, 3, work.spec.size, work.spec.size])
    logits = np.concatenate([run(work.batch(view[None]))[0] for photo in pixels for view in photo])
    return logits[:, -1000:].reshape(*pixels.shape[:2], -1)


def accuracy(views: Array, reference_views: Array, labels: Array) -> dict[str, float]:
    """Returns top-1, its drop and the agreement in percent, and the SQNR in dB."""
    y, reference = views[:, 0], reference_views[:, 0]
    predicted, expected = y.argmax(axis=1), reference.argmax(axis=1)
    top1, exact = (100 * float((classes == labels).mean()) for classes in (predicted, expected))
    sqnr = 10 * np.log10(np.square(reference).sum() / np.square(reference - y).sum())
    return {
        "top1": round(top1, 2),
        "drop": round(exact - top1, 2),
        "agreement": round(100 * float((predicted == expected).mean()), 2),
        "agreement_of_views": round(100 * float((views.argmax(axis=2) == reference_views.argmax(axis=2)).mean()), 2),
        "sqnr_db": round(float(sqnr), 2),
    }


class Network(NamedTuple):
    """A network and its test photos.

    Attributes:
        name: Name of the model.
        work: The float file, and the calibration photos.
        calibrated: Number of calibration photos.
        pixels: Views of the test photos, see `views`.
        labels: Their labels.
        reference: Logits of the float file, see `outputs`.
    """

    name: str
    work: Work
    calibrated: int
    pixels: Array
    labels: Array
    reference: Array


def prepared(name: str, limit: int, folder: Path) -> Network:
    """Returns a network with `limit` photos; its float file is written to `folder`."""
    paths, labels, _ = labelled(photo_folder())
    tested = np.arange(min(limit, len(paths))) % CALIBRATE_EVERY != 0
    work = float_networks.prepare(name, folder / name, paths[:limit:CALIBRATE_EVERY])
    pixels = np.stack([views(path, work.spec) for path, other in zip(paths, tested, strict=False) if other])
    reference = outputs(work.fp32, "onnxruntime", work, pixels)
    return Network(name, work, int((~tested).sum()), pixels, labels[: len(tested)][tested], reference)


def quantized(network: Network, setting: str, folder: Path, core: int, advance: harness.Advance) -> Quantized:
    """Quantizes a network by a setting on one core and judges the file, see `settings.quantize_all`."""

    def build(setting: str, target: Path) -> dict[str, Any]:
        facts = processes.in_process(_make, setting, network.work, target, cores={core})
        path = settings.written(target)
        engines = ENGINES[1:] if path.suffix == ".xml" else ENGINES if setting == "zoo" else ENGINES[:1]
        logits = {engine: outputs(path, engine, network.work, network.pixels) for engine in engines}
        return {"accuracy": {e: accuracy(y, network.reference, network.labels) for e, y in logits.items()}, **facts}

    return settings.quantize_all(folder / network.name, [setting], build, advance)


def compare(network: Network, made: Sequence[Quantized], rounds: int) -> dict[str, Any]:
    """Returns all measurements of a network with its quantized files."""
    results = [row for rows, _, _ in made for row in rows]
    files = {setting: path for _, paths, _ in made for setting, path in paths.items()}
    work, pixels = network.work, network.pixels
    times: dict[str, dict[str, list[float]]] = {}
    if rounds:
        x = work.batch(np.random.default_rng(0).integers(0, 256, (1, *pixels.shape[2:]), dtype=np.uint8))
        timed = {"fp32": work.fp32} | files, ENGINES, x, rounds, [1, *pixels.shape[-1:], *pixels.shape[2:4]]
        times = processes.in_process(settings.time_files, *timed, cores={processes.last_core()})
    ratios = {
        engine: {key: harness.ratio(taken, by_setting["zoo"]) for key, taken in by_setting.items() if key != "zoo"}
        for engine, by_setting in times.items()
        if "zoo" in by_setting
    }
    return {
        "model": network.name,
        "photos": {"calibration": network.calibrated, "test": len(pixels)},
        "fp32_top1": round(100 * float((network.reference[:, 0].argmax(axis=1) == network.labels).mean()), 2),
        "results": results,
        "left_out": {setting: why for _, _, reasons in made for setting, why in reasons.items()},
        "ahead": _ahead(results),
        "milliseconds": harness.medians(times),
        "times_as_fast": ratios,
    }


def _ahead(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns agreement and SQNR minus those of the best peer; the lower figure of this project's engines counts."""
    ahead = {}
    for key in ("agreement", "agreement_of_views", "sqnr_db"):
        figures = {row["setting"]: [scores[key] for scores in row["accuracy"].values()] for row in results}
        peers = [figure for name, numbers in figures.items() if not name.startswith("zoo") for figure in numbers]
        if "zoo" in figures and peers:
            ahead[key] = round(min(figures["zoo"]) - max(peers), 2)
    return ahead


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.names("models", "model", zoo.names(), MODELS)
    parser.names("--settings", "setting", SETTINGS)
    parser.count("--photos", 500, "photos, of which every fifth calibrates", least=2)
    parser.count("--rounds", 9, "turns of each engine, 0: no timing", least=0)
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [`compare`], "environment"}."""
    facts = harness.environment(*PACKAGES, rounds=args.rounds)
    steps = len(args.models) * len(args.settings)
    with harness.folder(args.work) as folder, progress("comparing", steps) as advance:
        networks = [prepared(name, args.photos, folder) for name in args.models]
        jobs = list(itertools.product(networks, args.settings))
        files = processes.on_all_cores(lambda job, core: quantized(*job, folder, core, advance), jobs)
        count = len(args.settings)
        made = {name: files[i * count : (i + 1) * count] for i, name in enumerate(args.models)}
        return harness.gather(
            "models", networks, lambda network: compare(network, made[network.name], args.rounds), args.output, facts
        )
