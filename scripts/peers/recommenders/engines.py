"""Recommenders in the engines of the peers and of this project, each in a process of its own."""

from __future__ import annotations

import gc
import importlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import zoo
from pipelines.models.family import network_of
from scripts.peers import processes
from scripts.peers.engines import fbgemm, onnx_runtime, open_vino, pytorch

Array = NDArray[Any]
Batch = dict[str, Array]
Turn = tuple[Array, float]  # seconds of every call; the share of the turn for which the process had the core

TURN_SECONDS = 0.1
POOL_ROWS, POOL_BATCHES = 32768, 64
COMPARED_ROWS = 2048  # rows of a pool whose probabilities are compared
CALIBRATION_BATCH, CALIBRATION_BATCHES = 256, 8  # rows of a batch, batches of each kind of ids
ZIPF = 1.1
REFERENCE = "onnxruntime-fp32"
PACKAGES = ("torch", "torchao", "zentorch", "fbgemm_gpu-cpu", "tensorflow-cpu", "tensorflow", "nncf")


# -------------------------------------------------------------------------------------------------------------- inputs


def draw_ids(kind: str, rows: int, fields: int, buckets: int, seed: int = 0) -> NDArray[np.int32]:
    """Draws bucket numbers.

    Args:
        kind: "uniform": every bucket is as likely. "zipf": the bucket of rank r = 1, 2, ... of a field has a
            probability proportional to r^-1.1; which bucket has which rank is a random permutation of each field, the
            same for every seed.
        rows: Number of rows.
        fields: Number of columns.
        buckets: Number of buckets of each field.
        seed: Seed of the rows.

    Returns:
        int32 [rows, fields].
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
class Inputs:
    """A model by name or folder, the folder of files made from it, and the pool of its inputs."""

    model: str
    scratch: Path

    kinds = ("log",)  # of ids
    autotune = False  # torch times its own int8 kernels against oneDNN's

    @property
    def fp32(self) -> Path:
        """The frozen float graph."""
        return zoo.load(self.model).ensure("fp32.onnx")

    @property
    def stock(self) -> Path:
        """The same, quantized by onnxruntime."""
        return self.scratch / "stock.onnx"

    def pool(self, kind: str, rows: int) -> Batch:
        """Draws rows at random from those that the model keeps of its log for calibration."""
        with np.load(zoo.load(self.model).path / "calibration.npz") as kept:
            columns = {name: kept[name] for name in kept.files}
        drawn = np.random.default_rng(0).integers(0, len(next(iter(columns.values()))), rows)
        return {name: np.ascontiguousarray(column[drawn]) for name, column in columns.items()}

    def batches(self, kind: str, size: int) -> list[Batch]:
        """Returns the pool of inputs in batches: `POOL_ROWS` rows or `POOL_BATCHES` batches, whichever is more."""
        rows = size * max(POOL_ROWS // size, POOL_BATCHES)
        pool = self.pool(kind, rows)
        return [{name: column[start : start + size] for name, column in pool.items()} for start in range(0, rows, size)]

    def samples(self) -> list[Batch]:
        """Returns batches of calibration, of all kinds of ids."""
        return [batch for kind in self.kinds for batch in self.batches(kind, CALIBRATION_BATCH)[:CALIBRATION_BATCHES]]

    def torch_network(self) -> Any:
        """Returns the trained network, from its inputs to the probability of each label."""
        import torch

        from zoo.recommenders.models.multitask.outputs import chained, first_of, parents_of

        network = network_of(zoo.load(self.model))[1]

        class Probabilities(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def forward(self, ids: Any, numbers: Any, scales: Any) -> Any:
                return chained(first_of(self.network(ids, numbers, scales)), parents_of(network))

        return Probabilities().eval()

    def torch_inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Returns a batch as the arguments of `torch_network`."""
        import torch

        empty = np.zeros((len(batch["ids"]), 0), np.float32)
        return tuple(torch.from_numpy(batch.get(name, empty)) for name in ("ids", "numbers", "scales"))


@dataclass(frozen=True)
class DrawnInputs(Inputs):
    """Inputs of a Wide & Deep model of hashed categories, drawn without a log."""

    fields: int
    buckets: int
    numeric: int

    kinds = ("zipf", "uniform")
    autotune = True

    @property
    def weights(self) -> Path:
        """The weights as TensorFlow gets them, see `save_weights`."""
        return self.scratch / "weights.npz"

    def pool(self, kind: str, rows: int) -> Batch:
        """Draws {"ids": int32 [rows, fields], "numbers": float32 [rows, numeric] in [0, 1)}."""
        numbers = np.random.default_rng(2).random((rows, self.numeric), dtype=np.float32)
        return {"ids": draw_ids(kind, rows, self.fields, self.buckets), "numbers": numbers}


# ------------------------------------------------------------------------------------------------------------- engines


class Call(NamedTuple):
    """The calls of an engine: `prepare` makes its inputs from arrays (not timed), `run` [n, 1] for each label."""

    prepare: Callable[[Batch], Any]
    run: Callable[[Any], Iterable[Any]]


Opened = Callable[[int], Call]  # by batch size


def _arrays(batch: Batch) -> Any:
    return batch


def _onnxruntime(path: Path) -> Opened:
    session = onnx_runtime.session(path)
    return lambda size: Call(_arrays, lambda batch: session.run(None, batch))


def _openvino(model: Any) -> Opened:
    """Compiles a model per batch size: dynamic shapes cost a third."""

    def open_size(size: int) -> Call:
        shapes = {port.any_name: [size, port.partial_shape[1].get_length()] for port in model.inputs}
        request = open_vino.infer_request(model, shapes)
        return Call(_arrays, lambda batch: request.infer(batch, share_inputs=True, share_outputs=True).to_tuple())

    return open_size


def _openvino_qdq(inputs: Inputs) -> Opened:
    """Opens the file that onnxruntime's quantizer wrote in OpenVINO."""
    import openvino as ov

    return _openvino(ov.Core().read_model(str(inputs.stock)))


def torch_int8(inputs: Inputs, backend: str = "inductor") -> Opened:
    """Quantizes by torchao and compiles per batch size, weights frozen."""
    import torch
    import torch._inductor.config as inductor

    inductor.freezing = True
    inductor.cpp_wrapper = True  # less Python a call
    if inputs.autotune:
        inductor.max_autotune = True
        inductor.max_autotune_gemm_backends = "CPP,ATEN"
    samples = [inputs.torch_inputs(batch) for batch in inputs.samples()]
    rows = {0: torch.export.Dim("rows", min=1, max=1 << 20)}
    converted = pytorch.quantize(inputs.torch_network(), samples, dynamic_shapes=(rows,) * len(samples[0]))
    return _compiled(inputs, converted, backend)


def zentorch_fp32(inputs: Inputs) -> Opened:
    """Compiles the network in float by AMD's plugin of torch, weights frozen."""
    importlib.import_module("zentorch")  # registers the backend
    pytorch.use_one_thread()
    return _compiled(inputs, inputs.torch_network(), "zentorch")


def zentorch_int8(inputs: Inputs) -> Opened:
    """Compiles the network that torchao quantized by AMD's plugin of torch."""
    importlib.import_module("zentorch")
    return torch_int8(inputs, "zentorch")


def fbgemm_int8(inputs: Inputs) -> Opened:
    """Compiles the network in float by Inductor, its embeddings in FBGEMM's int8 bags."""
    pytorch.use_one_thread()
    return _compiled(inputs, fbgemm.replace_embeddings(inputs.torch_network()), "inductor")


def _compiled(inputs: Inputs, network: Any, backend: str) -> Opened:
    import torch

    def open_size(size: int) -> Call:
        torch.compiler.reset()  # no guards of the other sizes
        compiled: Any = torch.compile(network, backend=backend, dynamic=False)
        return Call(inputs.torch_inputs, lambda tensors: (compiled(*tensors),))

    return open_size


def save_weights(inputs: DrawnInputs) -> None:
    """Writes the weights of the network in torch as arrays: kernels [in, out], and the tables of all fields in one."""
    from torch import nn

    network = network_of(zoo.load(inputs.model))[1]
    arrays = {
        "table": network.embeddings.weight,
        "wide": network.wide.weight,
        "offsets": network.embeddings.offsets.int(),
    }
    for index, layer in enumerate(layer for layer in network.deep if isinstance(layer, nn.Linear)):
        arrays |= {f"kernel_{index}": layer.weight.T, f"bias_{index}": layer.bias}
    np.savez(inputs.weights, **{name: np.ascontiguousarray(array.detach().numpy()) for name, array in arrays.items()})


def tensorflow_network(weights: Mapping[str, Array]) -> Any:
    """Returns Wide & Deep in TensorFlow with constant weights.

    Args:
        weights: The arrays of `save_weights`.

    Returns:
        A tf.function (ids int32 [n, fields], numbers float32 [n, m]) -> probability [n, 1].
    """
    import tensorflow as tf

    last = sum(name.startswith("kernel_") for name in weights) - 1

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def wide_deep(ids: Any, numbers: Any) -> Any:
        rows = ids + weights["offsets"]
        embeddings = tf.gather(tf.constant(weights["table"]), rows)
        x = tf.concat([tf.reshape(embeddings, [-1, embeddings.shape[1] * embeddings.shape[2]]), numbers], 1)
        for index in range(last + 1):
            x = tf.nn.bias_add(tf.matmul(x, weights[f"kernel_{index}"]), weights[f"bias_{index}"])
            x = tf.nn.relu(x) if index < last else x
        return tf.sigmoid(x + tf.reduce_sum(tf.gather(tf.constant(weights["wide"]), rows), 1))

    return wide_deep


def tensorflow_fp32(inputs: DrawnInputs) -> Opened:
    """Opens TensorFlow with oneDNN, traced per batch size."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with np.load(inputs.weights) as kept:
        function = tensorflow_network(dict(kept))

    def open_size(size: int) -> Call:
        shapes = tf.TensorSpec([size, inputs.fields], tf.int32), tf.TensorSpec([size, inputs.numeric], tf.float32)
        traced = function.get_concrete_function(*shapes)
        return Call(
            lambda batch: (tf.constant(batch["ids"]), tf.constant(batch["numbers"])),
            lambda tensors: (traced(*tensors),),
        )

    return open_size


def _zoo(engine: str, *, whole: bool = False) -> Callable[[Inputs], Opened]:
    """Returns the opener of this project's int8 model: its session, or the `whole` call with the checks of inputs."""

    def open_model(inputs: Inputs) -> Opened:
        def open_size(size: int) -> Call:
            opened = zoo.pipeline(inputs.model, "int8", engine, 1, size)
            run = opened.predict if whole else opened.session.run
            return Call(_arrays, lambda batch: run(batch).values())

        return open_size

    return open_model


ENGINES: dict[str, Callable[[Any], Opened]] = {
    REFERENCE: lambda inputs: _onnxruntime(inputs.fp32),
    "onnxruntime-int8": lambda inputs: _onnxruntime(inputs.stock),
    "openvino-qdq": _openvino_qdq,
    "openvino-nncf": lambda inputs: _openvino(open_vino.quantize(inputs.fp32, inputs.samples())),
    "torch-int8": torch_int8,
    "zentorch-fp32": zentorch_fp32,
    "zentorch-int8": zentorch_int8,
    "fbgemm-int8": fbgemm_int8,
    "tensorflow-fp32": tensorflow_fp32,
    "zoo-onnxruntime": _zoo("onnxruntime"),
    "zoo-openvino": _zoo("openvino"),
    "zoo-native": _zoo("native"),
    "zoo-native-predict": _zoo("native", whole=True),
}


def joined(results: Iterable[Any]) -> NDArray[np.float32]:
    """Returns the outputs [n, 1] of a call as one array [n, labels], a copy."""
    columns = [np.asarray(result, np.float32) for result in results]
    return np.concatenate([column.reshape(len(column), -1) for column in columns], 1)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, inputs: Inputs) -> None:
        self.name, self.inputs = name, inputs
        self.opened: Callable[[int], Call]
        self.prepared: Iterator[Any]
        self.run: Callable[[Any], Any]

    def open(self) -> None:
        """Reads and quantizes the model."""
        self.opened = cache(ENGINES[self.name](self.inputs))

    def begin(self, kind: str, size: int) -> Array:
        """Prepares a batch size; returns the probabilities of the pool's first rows, float32 [n, labels]."""
        call = self.opened(size)
        prepared = [call.prepare(batch) for batch in self.inputs.batches(kind, size)]
        self.prepared, self.run = itertools.cycle(prepared), call.run
        first = prepared[: -(-COMPARED_ROWS // size)]
        probabilities = np.concatenate([joined(self.run(batch)) for batch in first])
        gc.collect()
        gc.freeze()  # a collection would look at every input again
        processes.reset_peak()
        return probabilities

    def turn(self) -> Turn:
        """Runs one turn, of one call at least."""
        self.run(next(self.prepared))  # caches warm again after the others' turns
        taken: list[float] = []
        begin, worked = time.perf_counter(), time.process_time()
        end = begin + TURN_SECONDS
        while (before := time.perf_counter()) < end or not taken:  # the core may have been another's for all of it
            self.run(next(self.prepared))
            taken.append(time.perf_counter() - before)
        return np.array(taken), (time.process_time() - worked) / (time.perf_counter() - begin)

    def memory(self) -> float:
        """Returns the peak resident memory since `begin`, in MB (10^6 bytes)."""
        return processes.memory_mb("VmHWM")
