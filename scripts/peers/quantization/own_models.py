"""Quantize ONNX files that other people wrote, by the default command of this project, by onnxruntime and by NNCF;
compare accuracy, size, speed and cost in one report.

    python scripts/peers/quantization/own_models.py FOLDER [MODEL,...] [--settings NAME,...] [--rounds 9] [--work DIR] [-o FILE]

FOLDER holds, of every model, NAME.onnx, NAME.calib.npz and NAME.test.npz: an array for every input of the graph, its
first axis counts samples. A sample is of the input's rank, or lacks its batch axis. No setting is told more of a model
than its file and its samples; peers get the file brought to opset 13 where it is older.

Told of each: SQNR of all outputs against the float file's in onnxruntime, in dB, over all test samples one at a time,
in both engines, which open the files as they are (shapes stay dynamic); the agreement of the first output, see
`agreement`; size; CPU seconds and peak memory of the quantization in a process of its own, on one core. Then all files
of a model are timed on one test sample in each engine, in turn, on one thread and one core; in this project's native
kernels those that have such a form. NNCF quantizes the model as
OpenVINO converts it (on other models its bias correction is skipped in silence), so that OpenVINO alone runs the
result. A setting that fails is told of as left out, with its error. Needs the `peers` extra.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pipelines.core import files, machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from pipelines.engines import catalog
from pipelines.graph import io
from scripts.peers import harness
from scripts.peers.quantization import vision

Array = NDArray[Any]
Feed = dict[str, Array]
Run = Callable[[Feed], list[Array]]
ROOT = Path(__file__).resolve().parents[3]
OPSET = 13  # the first with QuantizeLinear per channel
PACKAGES = ("nncf", "onnx")


# ------------------------------------------------------------------------------------------------------------- samples


def ranks(path: Path) -> dict[str, int]:
    """Of the graph's inputs, in order."""
    return {str(each.name): len(each.shape or ()) for each in io.load(path).graph.inputs}


def feeds(path: Path, samples: Path) -> list[Feed]:
    """The samples of an .npz as feeds of the graph, one sample each."""
    wanted = ranks(path)
    with np.load(samples) as arrays:
        columns = {name: arrays[name] for name in wanted}
    count = min(map(len, columns.values()))
    return [
        {
            name: np.asarray(array[at]) if array.ndim - 1 == wanted[name] else array[at : at + 1]
            for name, array in columns.items()
        }
        for at in range(count)
    ]


@dataclass(frozen=True)
class Work:
    """What the process of one setting is given; `fp32` is brought to `OPSET` for the peers."""

    original: Path
    fp32: Path
    samples: Path

    def batches(self, _: int = 1) -> list[Feed]:
        """The calibration samples, each for itself."""
        return feeds(self.fp32, self.samples)


def modernize(path: Path, target: Path) -> None:
    """The file at `OPSET` or later."""
    import onnx

    proto = onnx.load(path)
    version = next(each.version for each in proto.opset_import if each.domain in ("", "ai.onnx"))
    onnx.save(proto if version >= OPSET else onnx.version_converter.convert_version(proto, OPSET), target)


# ------------------------------------------------------------------------------------------------------------ settings


def zoo(work: Work, target: Path) -> dict[str, Any]:
    """The default command, as a user types it; its time and peak memory are the command's own."""
    command = [sys.executable, "-m", "zoo", "quantize", str(work.original)]
    command += ["--calibration-data", str(work.samples), "-o", str(target.with_suffix(".onnx"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ZooError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return {"first_line": (done.stdout.strip().splitlines() or [""])[0]}


def onnxruntime_dynamic(work: Work, target: Path) -> dict[str, Any]:
    """onnxruntime's quantize_dynamic: weights int8 per channel, activations quantized at run time."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(work.fp32, target.with_suffix(".onnx"), per_channel=True, weight_type=QuantType.QInt8)
    return {}


def nncf_transformer(work: Work, target: Path) -> dict[str, Any]:
    """NNCF with model_type=TRANSFORMER, which smooths outlier channels."""
    import nncf as library  # type: ignore[import-untyped]
    import openvino as ov

    samples = work.batches()
    made = library.quantize(
        ov.convert_model(work.fp32),
        library.Dataset(samples),
        model_type=library.ModelType.TRANSFORMER,
        subset_size=len(samples),
    )
    ov.save_model(made, target.with_suffix(".xml"), compress_to_fp16=False)
    return {}


SETTINGS: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    "zoo": zoo,
    "onnxruntime-static": vision.onnxruntime("MinMax"),
    "onnxruntime-dynamic": onnxruntime_dynamic,
    "nncf-default": vision.nncf("performance"),
    "nncf-transformer": nncf_transformer,
}


def _make(setting: str, work: Work, target: Path) -> dict[str, Any]:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    facts = SETTINGS[setting](work, target)
    used = resource.getrusage(resource.RUSAGE_CHILDREN if setting == "zoo" else resource.RUSAGE_SELF)
    return {**facts, "seconds": round(used.ru_utime + used.ru_stime, 1), "peak_mb": round(used.ru_maxrss / 1024)}


# ----------------------------------------------------------------------------------------------------------- measuring


def onnxruntime_session(path: Path, threads: int) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda feed: list(session.run(None, feed))


def openvino_session(path: Path, threads: int) -> Run:
    import openvino as ov

    options = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }
    compiled = ov.Core().compile_model(ov.Core().read_model(path), "CPU", options)
    request = compiled.create_infer_request()

    def run(feed: Feed) -> list[Array]:
        request.infer(feed)
        return [np.array(request.get_output_tensor(at).data) for at in range(len(compiled.outputs))]

    return run


def native_session(path: Path, threads: int) -> Run:
    """This project's kernels, where the file has such a form."""
    session = catalog.load(path, "native", threads)
    return lambda feed: list(session.run(feed).values())


ENGINES: dict[str, Callable[[Path, int], Run]] = {
    "onnxruntime": onnxruntime_session,
    "openvino": openvino_session,
    "native": native_session,
}


def sqnr(wanted: Sequence[Sequence[Array]], found: Sequence[Sequence[Array]]) -> float:
    """In dB over all floating-point outputs and samples, each output scaled to power 1 first, so that none hides."""
    noise = []
    for at, output in enumerate(wanted[0]):
        if output.dtype.kind != "f":
            continue
        signal = sum(float(np.square(each[at], dtype=np.float64).sum()) for each in wanted)
        error = sum(
            float(np.square(a[at].astype(np.float64) - b[at]).sum()) for a, b in zip(wanted, found, strict=True)
        )
        if signal:
            noise.append(error / signal)
    mean = float(np.mean(noise)) if noise else float("nan")
    return round(-10 * float(np.log10(max(mean, 1e-20))), 2)


def agreement(wanted: Sequence[Sequence[Array]], found: Sequence[Sequence[Array]]) -> dict[str, float]:
    """Of the first output: of classes (values in the last axis, at most two axes) the percentage of samples with the
    same largest one, or on the same side of .5 where there is one value; the mean cosine of the last axis in any case.
    """
    same, cosines = [], []
    for a, b in ((a[0], b[0]) for a, b in zip(wanted, found, strict=True)):
        a, b = (each.reshape(-1, each.shape[-1]).astype(np.float64) for each in (np.atleast_1d(a), np.atleast_1d(b)))
        same.append(((a > 0.5) == (b > 0.5)).mean() if a.shape[1] == 1 else (a.argmax(1) == b.argmax(1)).mean())
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosines.append(float(np.mean(((a * b).sum(1) + 1e-30) / (norms + 1e-30))))
    return {"agreement": round(100 * float(np.mean(same)), 2), "cosine": round(float(np.mean(cosines)), 5)}


def measured(path: Path, engine: str, samples: Sequence[Feed], wanted: Sequence[Sequence[Array]]) -> dict[str, Any]:
    """SQNR and agreement in one engine; what it says where it fails."""
    try:
        run = ENGINES[engine](path, machine.cores())
        found = [run(each) for each in samples]
        return {"sqnr_db": sqnr(wanted, found), **agreement(wanted, found)}
    except Exception as error:  # any engine's own kinds
        return {"failed": harness.why(error)}


def _speed(paths: Mapping[str, Path], feed: Feed, rounds: int) -> dict[str, dict[str, list[float]]]:
    """{engine: {setting: milliseconds}} on one core and thread."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = {}
    for engine, session in ENGINES.items():
        fit = {name: path for name, path in paths.items() if engine == "openvino" or path.suffix == ".onnx"}
        open_ones: dict[str, Any] = {}
        for name, path in fit.items():
            try:
                open_ones[name] = session(path, 1)
                open_ones[name](feed)
            except Exception:  # told of as failed above
                open_ones.pop(name, None)
        found[engine] = vision.time_in_turn(open_ones, feed, rounds)
    return found


def _size(path: Path) -> int:
    return path.stat().st_size + (path.with_suffix(".bin").stat().st_size if path.suffix == ".xml" else 0)


def _prepare(original: Path, target: Path, samples: Path) -> tuple[list[Feed], list[list[Array]]]:
    modernize(original, target)
    tested = feeds(target, samples)
    run = onnxruntime_session(original, machine.cores())
    return tested, [run(each) for each in tested]


def compare(
    name: str, source: Path, settings: Sequence[str], rounds: int, folder: Path, advance: Callable[[float], None]
) -> dict[str, Any]:
    """Everything measured of one model."""
    original = source / f"{name}.onnx"
    work = Work(original, folder / f"{name}-fp32.onnx", source / f"{name}.calib.npz")
    tested, wanted = vision.apart(_prepare, original, work.fp32, source / f"{name}.test.npz")
    results: list[dict[str, Any]] = [{"setting": "fp32", "bytes": _size(original)}]
    left_out: dict[str, str] = {}
    paths = {"fp32": original}
    for setting in settings:
        target, kept = folder / f"{name}-{setting}", folder / f"{name}-{setting}.json"
        try:
            if not kept.is_file():
                facts = vision.apart(_make, setting, work, target)
                path = vision.made(folder, name, setting)
                engines = ("openvino",) if path.suffix == ".xml" else tuple(ENGINES)
                accuracy = {each: vision.apart(measured, path, each, tested, wanted) for each in engines}
                files.write_json(kept, {"setting": setting, "bytes": _size(path), "accuracy": accuracy, **facts})
            results.append(files.read_json(kept))
            paths[setting] = vision.made(folder, name, setting)
        except Exception as error:  # any library's own kinds
            left_out[setting] = harness.why(error)
        advance(1)
    times = vision.apart(_speed, paths, tested[0], rounds) if rounds else {}
    return {
        "model": name,
        "samples": {"calibration": len(work.batches()), "test": len(tested)},
        "results": results,
        "left_out": left_out,
        "milliseconds": {
            engine: {setting: harness.median(each) for setting, each in found.items()}
            for engine, found in times.items()
        },
    }


# -------------------------------------------------------------------------------------------------------------- report


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Of the table: model, setting, SQNR in onnxruntime and OpenVINO, agreement and cosine (in onnxruntime where it
    runs the file), MB, milliseconds in both engines, seconds and MB of quantizing; those left out last.
    """
    found = []
    for model in report["models"]:
        for row in model["results"]:
            accuracy = row.get("accuracy", {})
            first: dict[str, Any] = next((each for each in accuracy.values() if "sqnr_db" in each), {})
            speed = [model["milliseconds"].get(e, {}).get(row["setting"], {}).get("median") for e in ENGINES]
            values: list[Any] = [model["model"], row["setting"]]
            values += [accuracy.get(engine, {}).get("sqnr_db") for engine in ("onnxruntime", "openvino")]
            values += [first.get("agreement"), first.get("cosine"), round(row["bytes"] / 1e6, 2), *speed]
            values += [row.get("seconds"), row.get("peak_mb")]
            found.append(["" if each is None else str(each) for each in values])
        found += [[model["model"], setting, f"left out: {why}"] for setting, why in model["left_out"].items()]
    return found


COLUMNS = (
    *("model", "setting", "SQNR ORT", "SQNR OV", "agreement", "cosine", "MB"),
    *("ORT ms", "OV ms", "native ms", "s", "peak MB"),
)


def table(report: Mapping[str, Any]) -> str:
    """The results as text."""
    line = "{:20} {:20} {:>9} {:>9} {:>9} {:>8} {:>7} {:>9} {:>9} {:>9} {:>7} {:>8}".format
    return "\n".join(
        line(*row) if len(row) == len(COLUMNS) else "{:20} {:20} {}".format(*row)
        for row in [list(COLUMNS), *rows(report)]
    )


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument("folder", help="with NAME.onnx, NAME.calib.npz and NAME.test.npz")
    parser.add_argument("models", nargs="?", help="with commas; all in the folder by default")
    parser.add_argument("--settings", default=",".join(SETTINGS), help=f"of {', '.join(SETTINGS)}; all by default")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each engine, 0: no timing (default 9)")
    parser.add_argument(
        "--work", metavar="DIR", help="keep models and accuracies there; what is found there is not made again"
    )
    with harness.one_line("own_models"):
        args = parser.parse_args()
        source = Path(args.folder)
        known = sorted(each.stem for each in source.glob("*.onnx") if (source / f"{each.stem}.calib.npz").is_file())
        if not known:
            raise RequestError(f"found no NAME.onnx beside a NAME.calib.npz in {source}; name a folder that holds them")
        names = harness.listed("model", args.models or ",".join(known), known)
        settings = harness.listed("setting", args.settings, SETTINGS)
        facts = machine.environment(threads=1, rounds=args.rounds, peers=harness.versions(*PACKAGES))
        with harness.folder(args.work) as scratch, progress("comparing", len(names) * len(settings)) as advance:

            def measure(name: str) -> dict[str, Any]:
                return compare(name, source, settings, args.rounds, scratch, advance)

            report = harness.gather("models", names, measure, args.output, facts)
        harness.show(report, table, args.json)


if __name__ == "__main__":
    main()
