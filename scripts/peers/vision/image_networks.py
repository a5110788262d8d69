"""Networks of image classifiers alone, in the engines of the peers and of this project.

Measured: batches of 1 and 16, one thread and two, the first call of a fresh process, its memory, and each layer beside
the limit of the machine. Systems: this project's int8.onnx in native kernels, onnxruntime and OpenVINO, and the files
that OpenVINO's own quantizer (NNCF) and LiteRT's converter made of the float network (`images`, whose `--work` folder
this comparison shares). One input again and again, in turn within one process pinned to one core, medians; of processor
time with one thread, of the clock's with two, in a process of its own.

"limit" is the rate of int8 products in registers, in the same process (`zoo doctor --speed`); "share" is the rate of a
network's products divided by it. "labels" has the number of photos, and of photos with the same label in native code
and in onnxruntime. "avx2": kernels for AVX2 and OpenVINO limited to AVX2 by oneDNN's own switch, weights of 7 bits,
both exact; "avx2_8_bits": of 8, where OpenVINO's products saturate; onnxruntime and LiteRT have no such switch. "first
call": load and one image in a fresh process, its files made before, the engine's libraries imported then; "process_ms"
from the process's start. "megabytes": its proportional share (PSS) after some calls.
"""

from __future__ import annotations

import functools
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

import zoo
from pipelines.core.progress import progress
from pipelines.data.images import decode, labelled, prepare
from pipelines.data.preprocess import Preprocess
from pipelines.engines.catalog import load
from pipelines.graph import io
from pipelines.kernels.images.mapping.from_graph import image_program
from pipelines.kernels.images.native import pack, product_limit
from pipelines.kernels.images.program import ImageProgram
from pipelines.kernels.images.steps import Convolution
from scripts.peers import harness, processes
from scripts.peers.vision import images
from scripts.peers.vision.float_networks import Work, normalize, photo_folder

Array = NDArray[Any]
Call = Callable[[], Any]
MODELS = ("mobilenet-v1-imagenet", "mobilenet-v2-imagenet", "resnet50-imagenet", "resnet26d-cifar10")
OURS = ("native", "onnxruntime", "openvino")  # engines of this project's file
PEERS = ("openvino-int8", "litert-int8")
BATCH, FIRST_CALLS, CALIBRATED = 16, 5, 300
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
PACKAGES = ("nncf", "tensorflow-cpu")
UNPRINTED = ("layers",)

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
    """Returns the multiplications of an image by step; 0 for steps other than convolutions."""

    def of(step: Any) -> int:
        height, width = program.tensors[step.out][:2] if step.out >= 0 else (1, 1)
        return int(height * width * step.weight.size)

    return [of(step) if isinstance(step, Convolution) else 0 for step in program.steps]


def in_turn(
    calls: Mapping[str, Call], rounds: int, images_a_call: int, clock: Callable[[], float] = time.process_time
) -> dict[str, Any]:
    """{name: {"ms": an image, median and spread, "native_is": times as fast, the median over the rounds}}."""
    times = {name: np.divide(taken, images_a_call) for name, taken in harness.in_turn(calls, rounds, clock).items()}
    return {
        name: {"ms": harness.median(taken), "native_is": harness.ratio(taken, times["native"])}
        for name, taken in times.items()
    }


def calls(work: Work, threads: int, batch: int) -> dict[str, Call]:
    """Returns every system's call on one batch; the peers' files take one image."""
    int8 = zoo.load(work.model).ensure("int8.onnx")
    x = np.random.default_rng(0).integers(0, 256, (batch, 3, work.spec.size, work.spec.size), dtype=np.uint8)
    systems: dict[str, Call] = {}
    for engine in OURS:
        session = load(int8, engine, threads)
        systems[engine] = functools.partial(session.run, {next(iter(session.inputs)): x})
    if batch == 1:
        normalized = np.ascontiguousarray(normalize(x.transpose(0, 2, 3, 1), work.spec).transpose(0, 3, 1, 2))
        path = images.target_of(work, "openvino-int8")
        if path.is_file():
            systems["openvino-nncf"] = functools.partial(
                images.openvino_session(path, threads, work.spec.size), normalized
            )
        path = images.target_of(work, "litert-int8")
        if path.is_file() and threads == 1:
            last = np.ascontiguousarray(normalized.transpose(0, 2, 3, 1))
            systems["litert"] = functools.partial(images.open_litert(work, path).run, last)
    return systems


def alone(work: Work, rounds: int) -> dict[str, Any]:
    """Measures one thread: {"limit", "products" (1e6 an image), "share", "layers", "batch_1", "batch_16"}."""
    program = image_program(io.load(zoo.load(work.model).ensure("int8.onnx")))
    limit, counts = product_limit(), products(program)
    measured = {f"batch_{batch}": in_turn(calls(work, 1, batch), rounds, batch) for batch in (1, BATCH)}
    limit = max(limit, product_limit())
    rate = sum(counts) / measured["batch_1"]["native"]["ms"]["median"] / 1e6
    size = (1, *program.shape)
    x = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    seconds = pack(program).open().time_steps(x=x, seconds=2.0)
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
        **measured,
        "layers": layers,
    }


def limited_to_avx2(work: Work, rounds: int) -> dict[str, Any]:
    """Measures AVX2 alone on the same files: {"avx2": weights of 7 bits, "avx2_8_bits"}."""
    measured = {}
    for name, path in {"avx2": seven_bits(work), "avx2_8_bits": zoo.load(work.model).ensure("int8.onnx")}.items():
        program, session = image_program(io.load(path)), load(path, "openvino", 1)
        x = np.random.default_rng(0).integers(0, 256, (1, *program.shape), dtype=np.uint8)
        both = {
            "native": functools.partial(pack(program, "avx2").open(), x, 1),
            "openvino": functools.partial(session.run, {next(iter(session.inputs)): x}),
        }
        measured[name] = in_turn(both, rounds, 1)
    return measured


def seven_bits(work: Work) -> Path:
    """Writes this project's file with weights of 7 bits, whose products are exact without VNNI."""
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
    """Counts the photos whose native label is that of onnxruntime."""
    model = zoo.load(work.model)
    sessions = [load(model.ensure("int8.onnx"), engine, 1) for engine in ("native", "onnxruntime")]
    spec, equal = Preprocess.from_json(model.preprocessing), 0
    for photo in photos:
        x = prepare(decode(photo), spec)[None]
        first, second = (next(iter(session.run({next(iter(session.inputs)): x}).values())) for session in sessions)
        equal += int(first.argmax() == second.argmax())
    return {"photos": len(photos), "equal": equal}


def two_threads(work: Work, rounds: int) -> dict[str, Any]:
    """Measures two threads, by the clock, and one of this project's beside them."""
    measured = {}
    for batch in (1, BATCH):
        one = {"native-one-thread": calls(work, 1, batch)["native"]}
        measured[f"batch_{batch}"] = in_turn(calls(work, 2, batch) | one, rounds, batch, time.perf_counter)
    return measured


def first_calls(work: Work) -> dict[str, Any]:
    """Measures fresh processes in turn: {system: {"ms", "process_ms", "megabytes"}}, medians."""
    int8 = str(zoo.load(work.model).ensure("int8.onnx"))
    ways = {engine: (int8, engine) for engine in OURS}
    if (path := images.target_of(work, "openvino-int8")).is_file():
        ways["openvino-nncf"] = str(path), "nncf"
    core = str(processes.last_core())
    # with bytecode, as pip compiles packages
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(FIRST_CALLS):
        for name, way in ways.items():
            command = ["taskset", "-c", core, sys.executable, "-c", FIRST, *way, str(work.spec.size)]
            done = subprocess.run(command, check=True, capture_output=True, env=kept | processes.ONE_THREAD)
            results[name].append(json.loads(done.stdout))
    return {
        name: {key: harness.median([run[key] for run in runs], 1) for key in ("ms", "process_ms", "megabytes")}
        for name, runs in results.items()
    }


def compare(name: str, photos: Sequence[Path], rounds: int, scratch: Path, advance: harness.Advance) -> dict[str, Any]:
    """Returns all measurements of one model."""
    cores, core = os.sched_getaffinity(0), {processes.last_core()}
    work, _, left_out = images.built(name, PEERS, photos[:CALIBRATED], scratch, advance)
    log = work.fp32.with_name("networks.log")
    limited = processes.ONE_THREAD | AVX2
    measured = {"model": name, **processes.on_one_core(alone, work, rounds, cores=core, log=log)}
    advance(1)
    measured |= processes.in_process(limited_to_avx2, work, rounds, cores=core, log=log, environment=limited)
    measured["labels"] = processes.on_one_core(labels, work, photos, cores=core, log=log)
    measured["first_call"] = first_calls(work)
    if len(cores) > 1:
        measured["two_threads"] = processes.in_process(two_threads, work, rounds, cores=cores, log=log)
    advance(1)
    return measured | {"left_out": left_out}


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.names("models", "model", zoo.names(), MODELS)
    parser.count("--rounds", 9, "turns of each system")
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [`compare`], "environment"}."""
    photos = labelled(photo_folder()).paths
    facts = harness.environment(*PACKAGES, rounds=args.rounds)
    steps = len(args.models) * (len(PEERS) + 2)
    with harness.folder(args.work) as scratch, progress("measuring", steps) as advance:

        def one(name: str) -> dict[str, Any]:
            return compare(name, photos, args.rounds, scratch, advance)

        return harness.gather("models", args.models, one, args.output, facts)
