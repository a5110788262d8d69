"""Time the Wide & Deep model in the engines of its peers and in this project's: same weights, same inputs, one thread,
in turn.

    python scripts/peers/recommenders/wide_deep.py [MODEL] [--batch-size 512,64,1] [--ids zipf,uniform] [--peers NAME,...] [--rounds
    15] [-o FILE]

Every engine lives in a process of its own (TensorFlow, torch and OpenVINO disturb each other's threads), all pinned to
one core, and only one of them works at a time: a round gives each a turn of 0.1 s. Batches come from a pool of 32,768
rows or 64 batches, whichever is more, in order, so that no call finds the table rows of the last one in the cache by
chance. What is timed is one call, inputs ready to probabilities; inputs of torch and TensorFlow are their own tensors
beforehand. Engines that read a graph get fp32.onnx as it was frozen; torch and TensorFlow get the same weights with the
embedding tables of all fields in one, which is faster there than one lookup a field.

Engines that quantize by themselves calibrate on 4,096 rows drawn as those they are timed on: the ranges fit, and where
the probabilities differ from fp32, it is not for want of better samples. This project's int8 model keeps the ranges of
its training data. Needs the `train` and `peers` extras; an engine that cannot be opened is left out, and the report
says why.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import zoo
from pipelines.core import files, machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from scripts.peers import harness
from scripts.peers.recommenders.wide_deep_networks import Array, Network, tensorflow_network, torch_network

Turn = tuple[Array, float]  # seconds of every call; the share of the turn for which the process had the core

TURN_SECONDS = 0.1
POOL_ROWS, POOL_BATCHES = 32768, 64
COMPARED_ROWS = 2048  # probabilities are compared on so many rows of a pool
CALIBRATION_BATCH, CALIBRATION_BATCHES = 256, 8  # rows of a batch, batches of each kind of ids
ZIPF = 1.1
IDS = ("zipf", "uniform")
REFERENCE = "onnxruntime-fp32"
PACKAGES = ("torch", "torchao", "tensorflow-cpu", "tensorflow", "nncf")


# -------------------------------------------------------------------------------------------------------------- inputs


def draw_ids(kind: str, rows: int, fields: int, buckets: int, seed: int = 0) -> NDArray[np.int32]:
    """Bucket numbers, int32 [rows, fields].

    "uniform": every bucket is as likely. "zipf": the bucket of rank r = 1, 2, ... of a field has a probability
    proportional to r^-1.1; which bucket has which rank is a random permutation of each field, the same for every
    `seed`.
    """
    random = np.random.default_rng(seed)
    if kind == "uniform":
        return random.integers(0, buckets, (rows, fields), dtype=np.int32)
    cumulated = np.cumsum(np.arange(1, buckets + 1) ** -ZIPF)
    ranks = np.searchsorted(cumulated, random.random((rows, fields)) * cumulated[-1], side="right")
    permuted = np.random.default_rng(1).permuted(np.tile(np.arange(buckets, dtype=np.int32), (fields, 1)), axis=1)
    ids: NDArray[np.int32] = permuted[np.arange(fields), ranks]
    return ids


@dataclass(frozen=True)
class Work(harness.Work):
    """What every process is given: the model and its sizes."""

    fields: int
    buckets: int
    numeric: int

    def network(self) -> Network:
        """The weights."""
        return Network.read(self.fp32, self.fields)

    def samples(self) -> list[dict[str, Array]]:
        """Batches to calibrate on, of both kinds of ids."""
        return [batch for kind in IDS for batch in self.batches(kind, CALIBRATION_BATCH)[:CALIBRATION_BATCHES]]

    def batches(self, kind: str, size: int) -> list[dict[str, Array]]:
        """The pool of inputs in batches of `size`: {"ids": int32 [size, fields], "numbers": float32 [size, numeric] in
        [0, 1)}.
        """
        rows = size * max(POOL_ROWS // size, POOL_BATCHES)
        ids = draw_ids(kind, rows, self.fields, self.buckets)
        numbers = np.random.default_rng(2).random((rows, self.numeric), dtype=np.float32)
        return [{"ids": ids[at : at + size], "numbers": numbers[at : at + size]} for at in range(0, rows, size)]


def stock_quantize(source: str | Path, target: str | Path, samples: Iterable[Batch]) -> None:
    """Quantize an ONNX file by onnxruntime's own quantizer, as its documentation says: pre-processed, QDQ, MinMax,
    weights per channel.
    """
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    batches = iter(samples)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return next(batches, None)

    with tempfile.TemporaryDirectory() as scratch:
        prepared = Path(scratch) / "prepared.onnx"
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)  # merges MatMul and Add
        quantize_static(
            prepared,
            target,
            Reader(),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
        )


# ------------------------------------------------------------------------------------------------------------- engines


class Call(NamedTuple):
    """How one batch size is run: `prepare` makes the engine's inputs of a batch of arrays (not timed), `run` the
    probabilities of those.
    """

    prepare: Callable[[dict[str, Array]], Any]
    run: Callable[[Any], Any]


Opened = Callable[[int], Call]  # by batch size


def _as_it_is(batch: dict[str, Array]) -> Any:
    return batch


def _onnxruntime(path: Path) -> Opened:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda size: Call(_as_it_is, lambda batch: session.run(None, batch)[0])


def _openvino(model: Any) -> Opened:
    """Compiled for each batch size by itself: dynamic shapes cost a third."""
    import openvino as ov

    options = {
        "INFERENCE_NUM_THREADS": 1,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }

    def open_size(size: int) -> Call:
        static = model.clone()
        static.reshape({port.any_name: [size, port.partial_shape[1].get_length()] for port in static.inputs})
        request = ov.Core().compile_model(static, "CPU", options).create_infer_request()
        return Call(_as_it_is, lambda batch: request.infer(batch, share_inputs=True, share_outputs=True)[0])

    return open_size


def onnxruntime_fp32(work: Work) -> Opened:
    """The frozen graph."""
    return _onnxruntime(work.fp32)


def onnxruntime_int8(work: Work) -> Opened:
    """The frozen graph, quantized by onnxruntime."""
    return _onnxruntime(work.stock)


def openvino_qdq(work: Work) -> Opened:
    """What onnxruntime's quantizer wrote, in OpenVINO."""
    import openvino as ov

    return _openvino(ov.Core().read_model(str(work.stock)))


def openvino_nncf(work: Work) -> Opened:
    """The frozen graph, quantized by NNCF as its documentation does."""
    import nncf  # type: ignore[import-untyped]
    import openvino as ov

    samples = work.samples()
    return _openvino(nncf.quantize(ov.convert_model(str(work.fp32)), nncf.Dataset(samples), subset_size=len(samples)))


def torch_int8(work: Work) -> Opened:
    """Post-training quantization of the exported graph for Inductor on x86, compiled for each batch size by itself,
    weights frozen.
    """
    import torch
    import torch._inductor.config as inductor
    from torchao.quantization.pt2e import move_exported_model_to_eval  # type: ignore[import-untyped]
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # type: ignore[import-untyped]
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # type: ignore[import-untyped]

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    inductor.freezing = True
    inductor.max_autotune = True  # times its own int8 kernels against oneDNN's
    inductor.max_autotune_gemm_backends = "CPP,ATEN"
    inductor.cpp_wrapper = True  # less Python a call

    def prepare(batch: dict[str, Array]) -> Any:
        return torch.from_numpy(batch["ids"]), torch.from_numpy(batch["numbers"])

    samples = [prepare(batch) for batch in work.samples()]
    rows = {0: torch.export.Dim("rows", min=1, max=1 << 20)}
    exported = torch.export.export(torch_network(work.network()), samples[0], dynamic_shapes=(rows, rows)).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    for sample in samples:
        prepared(*sample)
    converted = move_exported_model_to_eval(convert_pt2e(prepared))

    def open_size(size: int) -> Call:
        torch.compiler.reset()  # no guards of the other sizes
        compiled: Any = torch.compile(converted, dynamic=False)
        return Call(prepare, lambda inputs: compiled(*inputs))

    return open_size


def tensorflow_fp32(work: Work) -> Opened:
    """TensorFlow with oneDNN, traced for each batch size by itself."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    function = tensorflow_network(work.network())

    def open_size(size: int) -> Call:
        shapes = tf.TensorSpec([size, work.fields], tf.int32), tf.TensorSpec([size, work.numeric], tf.float32)
        traced = function.get_concrete_function(*shapes)
        return Call(
            lambda batch: (tf.constant(batch["ids"]), tf.constant(batch["numbers"])), lambda inputs: traced(*inputs)
        )

    return open_size


def _zoo(engine: str, *, whole: bool = False) -> Callable[[Work], Opened]:
    """This project's int8 model: its session, or the `whole` call with the checks of its inputs."""

    def open_model(work: Work) -> Opened:
        def open_size(size: int) -> Call:
            opened = zoo.pipeline(work.model, "int8", engine, 1, size)
            run = opened.predict if whole else opened.session.run
            return Call(_as_it_is, lambda batch: run(batch)["probability"])

        return open_size

    return open_model


PEERS: dict[str, Callable[[Work], Opened]] = {
    REFERENCE: onnxruntime_fp32,
    "onnxruntime-int8": onnxruntime_int8,
    "openvino-qdq": openvino_qdq,
    "openvino-nncf": openvino_nncf,
    "torch-int8": torch_int8,
    "tensorflow-fp32": tensorflow_fp32,
    "zoo-onnxruntime": _zoo("onnxruntime"),
    "zoo-openvino": _zoo("openvino"),
    "zoo-native": _zoo("native"),
    "zoo-native-predict": _zoo("native", whole=True),
}


# ----------------------------------------------------------------------------------------------------------- processes


class Engine:
    """One engine in its own process."""

    def __init__(self, name: str, work: Work) -> None:
        self.name, self.work = name, work
        self.opened: Callable[[int], Call]
        self.inputs: Iterator[Any]
        self.run: Callable[[Any], Any]

    def open(self) -> None:
        """Read, quantize, or whatever the engine wants once."""
        self.opened = cache(PEERS[self.name](self.work))

    def begin(self, kind: str, size: int) -> Array:
        """Get ready for a batch size; returns the probabilities of the pool's first rows, float32 [n]."""
        call = self.opened(size)
        inputs = [call.prepare(batch) for batch in self.work.batches(kind, size)]
        self.inputs, self.run = itertools.cycle(inputs), call.run
        first = inputs[: -(-COMPARED_ROWS // size)]
        found = np.concatenate(
            [np.array(self.run(each), np.float32).ravel() for each in first]
        )  # array() copies what is shared
        gc.collect()
        gc.freeze()  # a collection would look at every input again
        harness.forget_peak()
        return found

    def turn(self) -> Turn:
        """One turn, of one call at least."""
        self.run(next(self.inputs))  # caches warm again after the others' turns
        taken: list[float] = []
        begin, worked = time.perf_counter(), time.process_time()
        end = begin + TURN_SECONDS
        while (before := time.perf_counter()) < end or not taken:  # the core may have been another's for all of it
            self.run(next(self.inputs))
            taken.append(time.perf_counter() - before)
        return np.array(taken), (time.process_time() - worked) / (time.perf_counter() - begin)

    def memory(self) -> float:
        """Peak resident memory since `begin`, in MB (10^6 bytes)."""
        return harness.peak_memory()


# -------------------------------------------------------------------------------------------------------------- report


def compare(
    model: str | Path,
    sizes: Sequence[int] = (512, 64, 1),
    kinds: Sequence[str] = IDS,
    peers: Sequence[str] = tuple(PEERS),
    rounds: int = 15,
) -> dict[str, Any]:
    """All `peers` in turn, for every batch size and kind of ids.

    Returns {"model", "results": [{"engine", "ids", "batch_size", "samples_per_second" (median of the rounds), "spread"
    (5th and 95th percentile of the same), "latency_ms": {"p50", "p95", "p99"} of single calls, "max_probability"
    (largest difference to onnxruntime fp32 on the pool's first rows), "core_share" (median share of a turn for which
    the process had the core: below 0.98 others were at work, and the figures are rough), "memory_mb" (peak of the
    process while timed, its inputs included)}], "ratios": [{"ids", "batch_size", "engine" of this project, "over":
    {peer: median over the rounds of its samples/s over the peer's}}], "left_out": {engine: reason}, "environment"}.
    Raises RequestError for wrong names, sizes or models, ZooError where no engine could be opened.
    """
    harness.require_known("engine", peers, PEERS)
    harness.require_known("ids", kinds, IDS)
    if min([*sizes, rounds]) < 1:
        raise RequestError(f"batch sizes {', '.join(map(str, sizes))} and rounds {rounds} must all be 1 or more")
    folder = zoo.load(model)
    if folder.card.entry != "wide-deep":
        raise RequestError(f"{model} is a {folder.card.entry} model; wanted a wide-deep one")
    features = folder.preprocessing
    core = max(os.sched_getaffinity(0))
    results: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []

    with tempfile.TemporaryDirectory() as scratch, harness.Workers() as workers:
        work = Work(str(model), Path(scratch), features["categorical"], features["buckets"], features["numeric"])
        work.network()  # fails here for a model of another kind, not once in every process
        if {"onnxruntime-int8", "openvino-qdq"} & set(peers):
            stock_quantize(work.fp32, work.stock, work.samples())
        for name in dict.fromkeys(peers):
            made, log = partial(Engine, name, work), work.scratch / f"{name}.log"
            workers.live[name] = harness.Worker(made, core, log, TORCHINDUCTOR_CACHE_DIR=str(work.scratch / "inductor"))
            workers.ask(name, "open")
        steps = [(size, kind) for size in sizes for kind in kinds]
        with progress("rounds", len(steps) * rounds) as advance:
            for size, kind in steps:
                found = workers.ask_all("begin", kind, size)
                turns: dict[str, list[Turn]] = {name: [] for name in found}
                for _ in range(rounds):
                    for name, turn in workers.ask_all("turn").items():
                        turns[name].append(turn)
                    advance(1)
                memory = workers.ask_all("memory")
                reference = _reference(work, kind, size)
                here = {"ids": kind, "batch_size": size}
                for name in memory:
                    error = float(np.abs(found[name] - reference).max())
                    results.append(
                        {
                            "engine": name,
                            **here,
                            **summary(size, turns[name]),
                            "max_probability": float(f"{error:.2e}"),
                        }
                    )
                    results[-1]["memory_mb"] = memory[name]
                ratios += [{**here, **each} for each in speedups({name: turns[name] for name in memory})]
    if not results:
        raise ZooError("no engine could be opened")
    where = machine.environment(threads=1, rounds=rounds, core=core, peers=harness.versions(*PACKAGES))
    return {
        "model": folder.card.name,
        "results": results,
        "ratios": ratios,
        "left_out": workers.left_out,
        "environment": where,
    }


def _reference(work: Work, kind: str, size: int) -> Array:
    batches = work.batches(kind, size)[: -(-COMPARED_ROWS // size)]
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return zoo.pipeline(work.model, "fp32", "onnxruntime").predict(whole)["probability"].ravel()


def summary(size: int, turns: Sequence[Turn]) -> dict[str, Any]:
    rates = _rates(turns) * size
    p50, p95, p99 = np.percentile(np.concatenate([taken for taken, _ in turns]) * 1e3, [50, 95, 99])
    return {
        "samples_per_second": round(float(np.median(rates)), 1),
        "spread": [round(float(np.percentile(rates, q)), 1) for q in (5, 95)],
        "latency_ms": {"p50": round(float(p50), 5), "p95": round(float(p95), 5), "p99": round(float(p99), 5)},
        "core_share": round(float(np.median([share for _, share in turns])), 3),
    }


def _rates(turns: Sequence[Turn]) -> Array:
    """Calls a second in each turn."""
    return np.array([1 / taken.mean() for taken, _ in turns])


def speedups(turns: Mapping[str, Sequence[Turn]]) -> Iterator[dict[str, Any]]:
    rates = {name: _rates(each) for name, each in turns.items()}
    peers = [name for name in rates if not name.startswith("zoo-")]
    for name in rates:
        if name not in peers:
            yield {
                "engine": name,
                "over": {peer: round(float(np.median(rates[name] / rates[peer])), 3) for peer in peers},
            }


def table(report: Mapping[str, Any]) -> str:
    """The results as text."""
    line = "{:8} {:>5}  {:19} {:>11} {:>23} {:>9} {:>9} {:>9} {:>6} {:>6}".format
    lines = [line("ids", "batch", "engine", "samples/s", "5..95%", "p50 us", "p99 us", "max diff", "core", "MB")]
    for each in report["results"]:
        low, high = each["spread"]
        p50, p99 = (f"{each['latency_ms'][key] * 1e3:,.1f}" for key in ("p50", "p99"))
        rate, spread = f"{each['samples_per_second']:,.0f}", f"{low:,.0f}..{high:,.0f}"
        others = f"{each['max_probability']:.1e}", f"{each['core_share']:.2f}", f"{each['memory_mb']:.0f}"
        lines.append(line(each["ids"], each["batch_size"], each["engine"], rate, spread, p50, p99, *others))
    return "\n".join(lines)


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument(
        "model",
        nargs="?",
        default="wide-deep-criteo",
        help="name of the zoo or a model folder (default wide-deep-criteo)",
    )
    parser.add_argument("--batch-size", default="512,64,1", help="several with commas (default 512,64,1)")
    parser.add_argument("--ids", default=",".join(IDS), help="how categories are drawn (default zipf,uniform)")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; all by default")
    parser.add_argument("--rounds", default="15", help="turns of each engine (default 15)")
    with harness.one_line("wide_deep"):
        args = parser.parse_args()
        sizes, (rounds, *_) = harness.numbers("batch size", args.batch_size), harness.numbers("rounds", args.rounds)
        report = compare(
            args.model, sizes, harness.listed("kind of ids", args.ids), harness.listed("engine", args.peers), rounds
        )
        if args.output:
            files.write_json(args.output, report)
        harness.show(report, table, args.json)


if __name__ == "__main__":
    main()
