"""Networks of image classifiers alone, beside the engines: batches of 1 and 16, one thread and two, the first call of
a fresh process, its memory, and each layer beside the limit of the machine.

    python scripts/peers/vision/image_networks.py [MODEL,...] [--rounds 9] [--work DIR] [-o FILE]

Systems: this project's int8.onnx in native kernels, onnxruntime and OpenVINO, and what OpenVINO's own quantizer (NNCF)
and LiteRT's converter made of the float network (`images.py`, whose `--work` folder this script shares). One input
again and again, in turn within one process pinned to one core, medians; of processor time with one thread, of the
clock's with two, in a process of its own.

"limit": products of int8 in registers alone, the same process (`zoo doctor --speed`); "share" of a network is its
products a second beside it. "labels": photos, and on how many the native label is onnxruntime's. "avx2": kernels for
AVX2 and OpenVINO held to AVX2 by oneDNN's own switch, weights of 7 bits, both exact; "avx2_8_bits": of 8, where
OpenVINO's products saturate; onnxruntime and LiteRT have no such switch. "first call": load and one image in a fresh
process, its files made before, the engine's libraries imported then; "process_ms" from the process's start.
"megabytes": its proportional share (PSS) after some calls.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.data.images import decode, labelled, prepare
from pipelines.data.preprocess import Preprocess
from pipelines.engines.catalog import load
from pipelines.kernels.images.from_graph import image_program
from pipelines.kernels.images.native import pack, product_limit
from pipelines.kernels.images.program import Convolution, ImageProgram
from scripts.peers import harness
from scripts.peers.quantization import vision
from scripts.peers.vision import images
from scripts.peers.vision.float_networks import Work, normalize

Array = NDArray[Any]
Call = Callable[[], Any]
MODELS = ("mobilenet-v1-imagenet", "mobilenet-v2-imagenet", "resnet50-imagenet", "resnet26d-cifar10")
OURS = ("native", "onnxruntime", "openvino")  # engines of this project's file
PEERS = ("openvino-int8", "litert-int8")
BATCH, SECONDS, FIRST_CALLS = 16, 0.4, 5
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
PACKAGES = ("nncf", "tensorflow-cpu")

# A fresh process with numpy: from there to the first result, the engine's libraries with it, and from the process's
# own start: {"ms", "process_ms", "megabytes"}.
FIRST = """
import time
import json, sys
import numpy as np
path, engine, size = sys.argv[1:]
x = np.full((1, 3, int(size), int(size)), 77, np.uint8)
start = time.perf_counter()
if engine == "nncf":
    import openvino as ov
    options = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    model = ov.Core().read_model(path)
    model.reshape(list(x.shape))
    request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
    run = lambda: request.infer([x.astype(np.float32)])
else:
    from pipelines.engines.catalog import load
    session = load(path, engine)
    run = lambda: session.run({next(iter(session.inputs)): x})
run()
taken = time.perf_counter() - start
lived = time.clock_gettime(time.CLOCK_BOOTTIME) - int(open("/proc/self/stat").read().rsplit(")")[1].split()[19]) / 100
for _ in range(5):
    run()
pss = next(line for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))
print(json.dumps({"ms": 1e3 * taken, "process_ms": 1e3 * lived, "megabytes": int(pss.split()[1]) * 1024 / 1e6}))
"""


def products(program: ImageProgram) -> list[int]:
    """Multiplications of an image, a step each; 0 for what is no convolution."""
    found = []
    for step in program.steps:
        if isinstance(step, Convolution):
            height, width = program.tensors[step.out][:2] if step.out >= 0 else (1, 1)
            found.append(height * width * step.weight.size)
        else:
            found.append(0)
    return found


def in_turn(calls: Mapping[str, Call], rounds: int, clock: Callable[[], float], images_a_call: int) -> dict[str, Any]:
    """{name: {"ms": an image, median and spread, "native_is": times as fast, the median over the rounds}}."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    gc.disable()
    for _ in range(rounds):
        for name, call in calls.items():
            count, start, began = 0, clock(), time.perf_counter()
            while time.perf_counter() - began < SECONDS or count < 3:
                call()
                count += 1
            taken[name].append((clock() - start) / count / images_a_call * 1e3)
    gc.enable()
    return {
        name: {
            "ms": harness.median(each),
            "native_is": round(float(np.median(np.divide(each, taken["native"]))), 3),
        }
        for name, each in taken.items()
    }


def calls(work: Work, threads: int, batch: int) -> dict[str, Call]:
    """Every system's call on one batch. The peers' files take one image."""
    int8 = zoo.load(work.model).ensure("int8.onnx")
    x = np.random.default_rng(0).integers(0, 256, (batch, 3, work.spec.size, work.spec.size), dtype=np.uint8)
    found: dict[str, Call] = {}
    for engine in OURS:
        session = load(int8, engine, threads)
        found[engine] = functools.partial(session.run, {next(iter(session.inputs)): x})
    if batch == 1:
        normalized = np.ascontiguousarray(normalize(x.transpose(0, 2, 3, 1), work.spec).transpose(0, 3, 1, 2))
        path = images.target_of(work, "openvino-int8")
        if path.is_file():
            found["openvino-nncf"] = functools.partial(
                vision.openvino_session(path, threads, work.spec.size), normalized
            )
        path = images.target_of(work, "litert-int8")
        if path.is_file() and threads == 1:
            last = np.ascontiguousarray(normalized.transpose(0, 2, 3, 1))
            found["litert"] = functools.partial(images.open_litert(work, path).run, last)
    return found


def alone(work: Work, rounds: int) -> dict[str, Any]:
    """One thread: {"limit", "products" (1e6 an image), "share", "layers", "batch_1", "batch_16"}."""
    from pipelines.graph import io

    program = image_program(io.load(zoo.load(work.model).ensure("int8.onnx")))
    limit, counts = product_limit(), products(program)
    found = {f"batch_{batch}": in_turn(calls(work, 1, batch), rounds, time.process_time, batch) for batch in (1, BATCH)}
    limit = max(limit, product_limit())
    rate = sum(counts) / found["batch_1"]["native"]["ms"]["median"] / 1e6
    size = (1, *program.shape)
    x = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    seconds = pack(program).open().time_steps(x, 2.0)
    layers = []
    for step, count, spent in zip(program.steps, counts, seconds, strict=True):
        layer: dict[str, Any] = {"step": type(step).__name__, "us": round(1e6 * spent, 1)}
        if isinstance(step, Convolution):
            layer |= {
                "input": list(program.tensors[step.x]),
                "kernel": list(step.weight.shape),
                "groups": step.groups,
                "strides": list(step.strides),
                "gmac_per_second": round(count / spent / 1e9, 1),
                "of_limit": round(count / spent / 1e9 / limit, 2),
            }
        layers.append(layer)
    return {
        "limit_gmac_per_second": round(limit, 1),
        "products": round(sum(counts) / 1e6, 1),
        "gmac_per_second": round(rate, 1),
        "share": round(rate / limit, 3),
        **found,
        "layers": layers,
    }


def held_to_avx2(work: Work, rounds: int) -> dict[str, Any]:
    """One thread, AVX2 alone, both on the same files: {"avx2": weights of 7 bits, "avx2_8_bits"}."""
    from pipelines.graph import io

    found = {}
    for name, path in {"avx2": seven_bits(work), "avx2_8_bits": zoo.load(work.model).ensure("int8.onnx")}.items():
        program, session = image_program(io.load(path)), load(path, "openvino", 1)
        x = np.random.default_rng(0).integers(0, 256, (1, *program.shape), dtype=np.uint8)
        both = {
            "native": functools.partial(pack(program, "avx2").open(), x, 1),
            "openvino": functools.partial(session.run, {next(iter(session.inputs)): x}),
        }
        found[name] = in_turn(both, rounds, time.process_time, 1)
    return found


def seven_bits(work: Work) -> Path:
    """This project's file with weights of 7 bits, whose products are exact without VNNI."""
    from pipelines.graph import io
    from pipelines.quantization.calibration.table import CalibrationTable
    from pipelines.quantization.quantizer import quantize

    folder = zoo.load(work.model)
    float_model, table = (
        io.load(folder.ensure("rewritten.onnx")),
        CalibrationTable.load(folder.ensure("calibration.json")),
    )
    int8, _ = quantize(float_model, replace(folder.own_recipe, reduced_range=True), table)
    return io.save(int8, work.fp32.with_name("int8-7-bit.onnx"))


def labels(work: Work, photos: Sequence[Path]) -> dict[str, int]:
    """On how many photos the native label is onnxruntime's: the same integers."""
    model = zoo.load(work.model)
    sessions = [load(model.ensure("int8.onnx"), engine, 1) for engine in ("native", "onnxruntime")]
    wanted, equal = Preprocess.from_json(model.preprocessing), 0
    for photo in photos:
        x = prepare(decode(photo), wanted)[None]
        first, second = (next(iter(each.run({next(iter(each.inputs)): x}).values())) for each in sessions)
        equal += int(first.argmax() == second.argmax())
    return {"photos": len(photos), "equal": equal}


def two_threads(work: Work, rounds: int) -> dict[str, Any]:
    """Two threads, by the clock, and this project's own with one beside them."""
    found = {}
    for batch in (1, BATCH):
        one = {"native-one-thread": calls(work, 1, batch)["native"]}
        found[f"batch_{batch}"] = in_turn(calls(work, 2, batch) | one, rounds, time.perf_counter, batch)
    return found


def first_calls(work: Work) -> dict[str, Any]:
    """Fresh processes in turn: {system: {"ms", "megabytes"}}, medians."""
    int8 = str(zoo.load(work.model).ensure("int8.onnx"))
    ways = {engine: (int8, engine) for engine in OURS}
    if (path := images.target_of(work, "openvino-int8")).is_file():
        ways["openvino-nncf"] = str(path), "nncf"
    core = str(max(os.sched_getaffinity(0)))
    kept = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }  # pip's packages are compiled
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(FIRST_CALLS):
        for name, way in ways.items():
            command = ["taskset", "-c", core, sys.executable, "-c", FIRST, *way, str(work.spec.size)]
            said = subprocess.run(command, check=True, capture_output=True, env=kept | harness.ONE_THREAD)
            found[name].append(json.loads(said.stdout))
    return {
        name: {key: harness.median([each[key] for each in runs], 1) for key in ("ms", "process_ms", "megabytes")}
        for name, runs in found.items()
    }


def measure(name: str, photos: Sequence[Path], rounds: int, scratch: Path, advance: Callable[[float], None]) -> Any:
    """Everything of one model."""
    cores = os.sched_getaffinity(0)
    work, _, left_out = images.built(name, PEERS, photos[:300], scratch, advance)
    log = work.fp32.with_name("networks.log")
    one = {max(cores)}
    found = {"model": name, **images.apart(one, log, 0, alone, work, rounds)}
    advance(1)
    found |= images.apart(one, log, 0, held_to_avx2, work, rounds, environment=harness.ONE_THREAD | AVX2)
    found["labels"] = images.apart(one, log, 0, labels, work, photos)
    found["first_call"] = first_calls(work)
    if len(cores) > 1:
        found["two_threads"] = images.apart(cores, log, 0, two_threads, work, rounds, environment={})
    advance(1)
    return found | {"left_out": left_out}


def table(report: Mapping[str, Any]) -> str:
    """The results as text."""
    lines = []
    for model in report["models"]:
        lines.append(
            f"{model['model']}: {model['products']} million products, {model['gmac_per_second']} of "
            f"{model['limit_gmac_per_second']} GMAC/s: {model['share']:.2f}"
        )
        two = model.get("two_threads", {})
        parts = {key: model[key] for key in ("batch_1", f"batch_{BATCH}", "avx2", "avx2_8_bits")}
        for part, found in (parts | {f"two threads, {key}": each for key, each in two.items()}).items():
            figures = (f"{name} {each['ms']['median']:.3f} ms ({each['native_is']}x)" for name, each in found.items())
            lines.append(f"  {part}: {', '.join(figures)}")
        figures = (
            f"{name} {each['ms']['median']:.0f} ms {each['megabytes']['median']:.0f} MB"
            for name, each in model["first_call"].items()
        )
        lines.append(f"  first call: {', '.join(figures)}")
    return "\n".join(lines)


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument(
        "models", nargs="?", default=",".join(MODELS), help=f"with commas; {', '.join(MODELS)} by default"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each system (default 9)")
    parser.add_argument(
        "--work", metavar="DIR", help="keep the peers' models there; what is found there is not built again"
    )
    os.environ.setdefault("ZOO_MIRROR", str(vision.SHARED / "weights"))
    with harness.one_line("image_networks"):
        args = parser.parse_args()
        names = harness.listed("model", args.models, zoo.names())
        if args.rounds < 1:
            raise RequestError(f"found {args.rounds} rounds, wanted 1 or more")
        photos = labelled(vision.photo_folder()).paths
        facts = machine.environment(threads=1, rounds=args.rounds, peers=harness.versions(*PACKAGES))
        with harness.folder(args.work) as scratch, progress("measuring", len(names) * (len(PEERS) + 2)) as advance:

            def one(name: str) -> Any:
                return measure(name, photos, args.rounds, scratch, advance)

            report = harness.gather("models", names, one, args.output, facts)
        harness.show(report, table, args.json)


if __name__ == "__main__":
    main()
