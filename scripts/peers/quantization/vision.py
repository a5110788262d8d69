"""Quantize ResNet-50, MobileNet-V1 and V2 by this project, onnxruntime and NNCF; compare accuracy on photos, and speed,
in one report.

    python scripts/peers/quantization/vision.py [MODEL,...] [--settings NAME,...] [--photos 500] [--rounds 9] [--work DIR] [-o FILE]

Weights and photos are those of the development data ($ZOO_SHARED, by default ../shared): every fifth photo of
data/imagenet/nips17 calibrates, the rest tests, in the middle of each and in `VIEWS` - 1 other views: mirrored, and at
the corners. All settings are post- training only, calibrate on the same photos and are given the same float file, as
tf2onnx and torch write it. Photos are decoded by PIL, the short side brought to 256 (bilinear), the middle 224 x 224
cut out.

Told of each: top-1 and its drop, agreement (share of photos whose label is that of fp32; and of all views, of which
chance moves it less), SQNR of the logits against fp32 in dB, seconds and peak memory of the quantization in a process
of its own. Then every int8 file is timed at batch 1 in onnxruntime and OpenVINO, in turn, on one thread and one core.
NNCF's bias correction is skipped in silence on models of core.read_model(onnx); `openvino.convert_model` is used here,
whose results only OpenVINO runs; "nncf-onnx" is its quantizer of ONNX files. Needs the `train` and `peers` extras. A
setting that fails is told of as left out, with its error.
"""

from __future__ import annotations

import csv
import gc
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pipelines.core import files, machine
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.graph import io
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import SHARED as PASSES
from scripts.peers import harness
from scripts.peers.quantization.published_networks import (
    SIZE,
    convert_mobilenet_v1,
    convert_mobilenet_v2,
    convert_resnet50,
)

Array = NDArray[Any]
SHARED = Path(os.environ.get("ZOO_SHARED", Path(__file__).resolve().parents[4] / "shared"))
CALIBRATE_EVERY, CHUNK = 5, 10
VIEWS = 5  # of a photo that tests
SHORT_SIDE = 256
TURN_SECONDS = 0.5
PACKAGES = ("nncf", "pillow", "tf2onnx", "torch", "tensorflow-cpu")


# -------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Network:
    """Weights and the preprocessing bound to them: pixels uint8 [n, 224, 224, 3] RGB become (pixels - mean) /
    deviation.
    """

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
    """The development data's photos. Raises RequestError where there are none."""
    folder = SHARED / "data" / "imagenet" / "nips17"
    if not (folder / "labels.csv").is_file():
        raise RequestError(f"no photos at {folder}; set ZOO_SHARED to the folder that holds data/imagenet/nips17")
    return folder


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
    """What the process of one setting is given."""

    model: str
    fp32: Path
    pixels: Path  # those to calibrate on, .npy

    def batches(self, size: int = CHUNK) -> list[dict[str, Array]]:
        """The calibration samples."""
        pixels = np.load(self.pixels)
        name = str(io.load(self.fp32).graph.inputs[0].name)
        return [{name: NETWORKS[self.model].prepare(pixels[at : at + size])} for at in range(0, len(pixels), size)]


def ours(observer: str, *, correct: bool = True) -> Callable[[Work, Path], dict[str, Any]]:
    """This project, as `zoo quantize --search` does it: shared passes, what the search keeps, calibration,
    corrections.
    """

    def make(work: Work, target: Path) -> dict[str, Any]:
        model, samples = io.load(work.fp32), work.batches()
        rewrite(model, [each() for each in PASSES])
        recipe = QuantRecipe(observer=observer, search=correct, correct=correct)
        table = make_table(model, recipe, samples)
        int8, report = quantize(model, recipe, table)
        io.save(int8, target.with_suffix(".onnx"))
        return {"equalized": len(table.equalization), "layers_corrected": len(table.bias), "operators": report.counts()}

    return make


def onnxruntime(method: str, **options: Any) -> Callable[[Work, Path], dict[str, Any]]:
    """onnxruntime's quantize_static, as its documentation says: pre-processed, QDQ, weights per channel."""

    def make(work: Work, target: Path) -> dict[str, Any]:
        from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        batches = iter(work.batches(1))

        class Reader(CalibrationDataReader):  # type: ignore[misc]
            def get_next(self) -> Any:
                return next(batches, None)

        with tempfile.TemporaryDirectory() as scratch:
            prepared = Path(scratch) / "prepared.onnx"
            quant_pre_process(str(work.fp32), str(prepared), skip_symbolic_shape=True)
            types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
            how = {"calibrate_method": CalibrationMethod[method], "extra_options": options}
            quantize_static(prepared, target.with_suffix(".onnx"), Reader(), **types, **how)
        return {}

    return make


def nncf(preset: str, *, fast: bool = True, onnx: bool = False) -> Callable[[Work, Path], dict[str, Any]]:
    """NNCF's post-training quantization of the model as OpenVINO converts it, or, `onnx`, of the file itself."""

    def make(work: Work, target: Path) -> dict[str, Any]:
        import nncf as library  # type: ignore[import-untyped]
        import onnx as onnx_library
        import openvino as ov

        samples = work.batches(1)
        options = {
            "preset": library.QuantizationPreset(preset),
            "subset_size": len(samples),
            "fast_bias_correction": fast,
        }
        if onnx:
            made = library.quantize(onnx_library.load(work.fp32), library.Dataset(samples), **options)
            onnx_library.save(made, target.with_suffix(".onnx"))
        else:
            ov.save_model(
                library.quantize(ov.convert_model(work.fp32), library.Dataset(samples), **options),
                target.with_suffix(".xml"),
                compress_to_fp16=False,
            )
        return {}

    return make


SETTINGS: dict[str, Callable[[Work, Path], dict[str, Any]]] = {
    "zoo": ours("auto"),
    "zoo-minmax": ours("minmax"),
    "zoo-plain": ours("minmax", correct=False),
    "onnxruntime-minmax": onnxruntime("MinMax"),
    "onnxruntime-percentile": onnxruntime("Percentile", CalibPercentile=99.99),
    "onnxruntime-entropy": onnxruntime("Entropy"),
    "nncf-default": nncf("performance"),
    "nncf-mixed": nncf("mixed"),
    "nncf-default-exact": nncf("performance", fast=False),
    "nncf-mixed-exact": nncf("mixed", fast=False),
    "nncf-onnx": nncf("performance", onnx=True),
}


def _make(setting: str, work: Work, target: Path) -> dict[str, Any]:
    start = time.perf_counter()
    facts = SETTINGS[setting](work, target)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**facts, "seconds": round(time.perf_counter() - start, 1), "peak_mb": round(peak)}


def _convert(name: str, target: Path) -> None:
    NETWORKS[name].convert(SHARED / "weights" / NETWORKS[name].weights, target)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Run in a process of its own: libraries disturb each other's threads, and its peak memory is its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


# ----------------------------------------------------------------------------------------------------------- measuring


def onnxruntime_session(path: Path, threads: int) -> Callable[[Array], Array]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})[0]


def openvino_session(path: Path, threads: int, size: int = SIZE) -> Callable[[Array], Array]:
    import openvino as ov

    options = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }
    model = ov.Core().read_model(path)
    model.reshape([1, 3, size, size])
    request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
    return lambda x: request.infer([x], share_inputs=True)[0]


ENGINES = {"onnxruntime": onnxruntime_session, "openvino": openvino_session}


def outputs(path: Path, engine: str, network: Network, pixels: Array) -> Array:
    """Of every view by itself, float32 [n, VIEWS, classes], background classes left out."""
    run = ENGINES[engine](path, machine.cores())
    found = np.concatenate([run(network.prepare(view[None])) for photo in pixels for view in photo])[
        :, network.background :
    ]
    return found.reshape(*pixels.shape[:2], -1)


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


def time_in_turn(sessions: Mapping[str, Callable[[Any], Any]], x: Any, rounds: int) -> dict[str, list[float]]:
    """{name: CPU milliseconds a call, one number a round}; each round gives every session a turn."""
    taken: dict[str, list[float]] = {name: [] for name in sessions}
    for run in sessions.values():
        run(x)
    gc.disable()
    for _ in range(rounds):
        for name, run in sessions.items():
            calls, start, cpu = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - start < TURN_SECONDS or calls < 3:
                run(x)
                calls += 1
            taken[name].append((time.process_time() - cpu) / calls * 1e3)
    gc.enable()
    return taken


def _speed(paths: Mapping[str, Path], network: Network, rounds: int) -> dict[str, dict[str, list[float]]]:
    """{engine: {setting: milliseconds}} on one core and thread."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    x = network.prepare(np.random.default_rng(0).integers(0, 256, (1, SIZE, SIZE, 3), dtype=np.uint8))
    found = {}
    for engine, session in ENGINES.items():
        fit = {name: path for name, path in paths.items() if engine == "openvino" or path.suffix == ".onnx"}
        found[engine] = time_in_turn({name: session(path, 1) for name, path in fit.items()}, x, rounds)
    return found


def compare(
    name: str, settings: Sequence[str], limit: int, rounds: int, folder: Path, advance: Callable[[float], None]
) -> dict[str, Any]:
    """Everything measured of one model."""
    network = NETWORKS[name]
    pixels, labels = photos(limit)
    tested = np.arange(len(pixels)) % CALIBRATE_EVERY != 0
    work = Work(name, folder / f"{name}-fp32.onnx", folder / "calibration.npy")
    np.save(work.pixels, pixels[~tested, 0])
    if not work.fp32.is_file():
        apart(_convert, name, work.fp32)
    reference = outputs(work.fp32, "onnxruntime", network, pixels[tested])
    top1 = round(100 * float((reference[:, 0].argmax(axis=1) == labels[tested]).mean()), 2)
    results: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    paths = {"fp32": work.fp32}
    for setting in settings:
        kept = folder / f"{name}-{setting}.json"
        try:
            if not kept.is_file():
                facts = apart(_make, setting, work, folder / f"{name}-{setting}")
                path = made(folder, name, setting)
                engines = (
                    ("openvino",)
                    if path.suffix == ".xml"
                    else ("onnxruntime", "openvino")
                    if setting == "zoo"
                    else ("onnxruntime",)
                )
                measured = {
                    each: accuracy(outputs(path, each, network, pixels[tested]), reference, labels[tested])
                    for each in engines
                }
                files.write_json(kept, {"setting": setting, "accuracy": measured, **facts})
            results.append(files.read_json(kept))
            paths[setting] = made(folder, name, setting)
        except Exception as error:  # any library's own kinds
            left_out[setting] = harness.why(error)
        advance(1)
    times = apart(_speed, paths, network, rounds) if rounds else {}
    speed = {
        engine: {setting: harness.median(each) for setting, each in found.items()} for engine, found in times.items()
    }
    ratios = {
        engine: {
            setting: round(float(np.median(np.divide(each, found["zoo"]))), 3)
            for setting, each in found.items()
            if setting != "zoo"
        }
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
        "milliseconds": speed,
        "times_as_fast": ratios,
    }


def made(folder: Path, name: str, setting: str) -> Path:
    return next(each for suffix in (".onnx", ".xml") if (each := folder / f"{name}-{setting}{suffix}").is_file())


def _ahead(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """This project's agreement and SQNR less the best of its peers; the lower figure of its engines counts."""
    found = {}
    for key in ("agreement", "agreement_of_views", "sqnr_db"):
        own = [min(each[key] for each in row["accuracy"].values()) for row in results if row["setting"] == "zoo"]
        peers = [
            each[key] for row in results if not row["setting"].startswith("zoo") for each in row["accuracy"].values()
        ]
        if own and peers:
            found[key] = round(own[0] - max(peers), 2)
    return found


def table(report: Mapping[str, Any]) -> str:
    """The results as text."""
    line = "{:13} {:24} {:12} {:>6} {:>6} {:>9} {:>8} {:>7} {:>7} {:>7} {:>8} {:>8}".format
    lines = [
        line(
            "model",
            "setting",
            "engine",
            "top-1",
            "drop",
            "agreement",
            "of views",
            "SQNR dB",
            "s",
            "MB",
            "ORT ms",
            "OV ms",
        )
    ]
    for each in report["models"]:
        for row in each["results"]:
            speed = [
                each["milliseconds"].get(engine, {}).get(row["setting"], {}).get("median", "") for engine in ENGINES
            ]
            for engine, found in row["accuracy"].items():
                shown = (found[key] for key in ("top1", "drop", "agreement", "agreement_of_views", "sqnr_db"))
                lines.append(
                    line(each["model"], row["setting"], engine, *shown, row["seconds"], row["peak_mb"], *speed)
                )
        lines += [f"{each['model']}: {setting} left out: {why}" for setting, why in each["left_out"].items()]
        lines.append(f"{each['model']}: fp32 top-1 {each['fp32_top1']}; ahead of the best peer by {each['ahead']}")
    return "\n".join(lines)


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument(
        "models", nargs="?", default=",".join(NETWORKS), help=f"with commas, of {', '.join(NETWORKS)}; all by default"
    )
    parser.add_argument("--settings", default=",".join(SETTINGS), help=f"of {', '.join(SETTINGS)}; all by default")
    parser.add_argument(
        "--photos", type=int, default=500, help="so many photos, of which every fifth calibrates (default 500)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each engine, 0: no timing (default 9)")
    parser.add_argument(
        "--work", metavar="DIR", help="keep models and accuracies there; what is found there is not made again"
    )
    with harness.one_line("vision"):
        args = parser.parse_args()
        names, settings = (
            harness.listed("model", args.models, NETWORKS),
            harness.listed("setting", args.settings, SETTINGS),
        )
        facts = machine.environment(threads=1, rounds=args.rounds, peers=harness.versions(*PACKAGES))
        with harness.folder(args.work) as scratch, progress("comparing", len(names) * len(settings)) as advance:

            def measure(name: str) -> dict[str, Any]:
                return compare(name, settings, args.photos, args.rounds, scratch, advance)

            report = harness.gather("models", names, measure, args.output, facts)
        harness.show(report, table, args.json)


if __name__ == "__main__":
    main()
