"""The engine for graphs that begin with an operator of the project's own: native kernels, and a stock engine where that
is quicker.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, one_line
from pipelines.engines import stock
from pipelines.engines.session import Executed, Port, Runnable, Session
from pipelines.engines.timing import choose, size_class
from pipelines.graph import io
from pipelines.kernels.arrays import contiguous
from pipelines.kernels.clicks import native
from pipelines.kernels.clicks.from_graph import EMBEDDING, dense_layers, embedding_layer
from pipelines.kernels.clicks.operators import DOMAIN

SMALL = 32  # samples; below it a call into a library costs more than it saves
CHUNK = 64  # samples, the least that a thread is given


class NativeSession:
    """`ParallelEmbedding` in native code; the layers after it in native code, too, or in onnxruntime or OpenVINO.

    Up to `SMALL` samples the whole network runs natively. For larger batches the three ways are timed, once a size
    class, and the choice is remembered like any plan; the last, shorter batch of a stream takes that of the batches
    before it. The rest's uint8 input is the kernel's output buffer, nothing is copied in between. Raises RequestError
    without kernels, or for a graph that has no such operator.
    """

    engine = "native"

    def __init__(self, path: Path, threads: int) -> None:
        self.path, self.threads = path, threads
        model = io.load_mapped(path)
        first = next((node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, EMBEDDING)), None)
        if first is None:
            raise RequestError(
                f"{path} has no {EMBEDDING} operator; the engine native runs the native.onnx of a model folder"
            )
        self.inputs = {str(value.name): _port(value) for value in model.graph.inputs}
        self._fed = [None if value is None else str(value.name) for value in first.inputs[:2]]
        self._between = [str(value.name) for value in first.outputs]
        self._output = str(model.graph.outputs[0].name)
        self._embedding = native.parallel_embedding(embedding_layer(first))
        layers = dense_layers(first)
        self._network = (
            None
            if layers is None
            else native.click_network(self._embedding, [native.linear(n) for n in layers[0]], layers[1])
        )
        self._rest, self._rest_inputs = _rest(model, first)
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._ways: dict[str, Runnable] = {}
        self._chosen: dict[int, str] = {}  # size class -> one of `_ways`
        self._lock = threading.Lock()  # one thread chooses and opens

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """See `Session`. Raises RequestError for an id that is no row of its field, before any table is read."""
        try:
            return self._way(batch).run(batch)
        except IndexError as error:
            raise RequestError(str(error)) from error
        except (TypeError, ValueError, KeyError) as error:
            raise RequestError(f"the native kernels cannot run {self.path} on this batch: {one_line(error)}") from error

    def executed(self, batch: Batch) -> list[Executed]:
        """See `Session`."""
        first, way = Executed(EMBEDDING, f"{EMBEDDING} {self._embedding.isa}", "u8"), self._way(batch)
        if isinstance(way, _Mixed):
            return [first, *way.rest.executed(way.between(batch))]
        return [first, Executed("rest", f"Linear {self._embedding.isa}", "u8")]

    def _way(self, batch: Batch) -> Runnable:
        if self._network is not None and len(next(iter(batch.values()), ())) <= SMALL:
            return self._open("native")
        size = size_class(batch)
        if size not in self._chosen:
            with self._lock:
                larger = [each for each in self._chosen if each >= size]
                self._chosen[size] = self._chosen[min(larger)] if larger else self._time(batch)
        return self._open(self._chosen[size])

    def _time(self, batch: Batch) -> str:
        names = [*(["native"] if self._network is not None else []), *filter(stock.exact, stock.available())]
        digest = hashlib.sha256(self._rest).hexdigest()
        return choose(digest, {name: functools.partial(self._open, name) for name in names}, batch, self.threads).engine

    def _open(self, name: str) -> Runnable:
        if name not in self._ways:
            kernel = functools.partial(self._call, self._network if name == "native" else self._embedding)
            if name == "native":
                self._ways[name] = _Whole(self._output, kernel)
            else:
                rest = stock.STOCK[name](self.path, self.threads, self._rest)
                self._ways[name] = _Mixed(rest, self._rest_inputs, self._between, kernel)
        return self._ways[name]

    def _call(self, kernel: Any, batch: Batch) -> list[NDArray[Any]]:
        """The results of `kernel` on the batch, computed in as many parts as there are threads."""
        arrays = [None if name is None else contiguous(batch[name]) for name in self._fed]
        if self._pool is None or (count := len(batch[str(self._fed[0])])) < 2 * CHUNK:
            return _listed(kernel(*arrays))
        bounds = np.linspace(0, count, min(self.threads, count // CHUNK) + 1).astype(int)
        parts = [[None if each is None else each[a:b] for each in arrays] for a, b in itertools.pairwise(bounds)]
        try:
            done = [_listed(each) for each in self._pool.map(lambda part: kernel(*part), parts)]
        except IndexError:
            kernel(*arrays)  # names the row of the whole batch
            raise
        return [np.concatenate(each) for each in zip(*done, strict=True)]


@dataclass(frozen=True)
class _Whole:
    """All in native code."""

    output: str
    kernel: Callable[[Batch], list[NDArray[Any]]]

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        return {self.output: self.kernel(batch)[0]}


@dataclass(frozen=True)
class _Mixed:
    """The embedding in native code, the rest in a stock engine."""

    rest: Session
    inputs: Sequence[str]
    outputs: Sequence[str]  # of the embedding
    kernel: Callable[[Batch], list[NDArray[Any]]]

    def between(self, batch: Batch) -> dict[str, NDArray[Any]]:
        found = {**batch, **dict(zip(self.outputs, self.kernel(batch), strict=False))}
        return {name: found[name] for name in self.inputs}

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        return self.rest.run(self.between(batch))


def _port(value: ir.Value) -> Port:
    assert value.dtype is not None and value.shape is not None
    return Port(value.dtype.numpy(), tuple(each if isinstance(each, int) else None for each in value.shape))


def _listed(found: Any) -> list[NDArray[Any]]:
    return list(found) if isinstance(found, tuple) else [found]


def _rest(model: ir.Model, first: ir.Node) -> tuple[bytes, list[str]]:
    """The model after `first`, whose outputs become inputs: stock ONNX, and the names of its inputs. `model` is used
    up.
    """
    main = model.graph
    fresh = [ir.Value(name=value.name, type=value.type, shape=value.shape) for value in first.outputs]
    for old, new in zip(first.outputs, fresh, strict=True):
        old.replace_all_uses_with(new)
    main.remove(first, safe=True)
    main.inputs.extend(fresh)
    RemoveUnusedNodesPass()(model)
    for value in [each for each in main.inputs if not each.uses()]:
        main.inputs.remove(value)
    for name in [name for name, value in main.initializers.items() if not value.uses()]:
        del main.initializers[name]
    model.opset_imports.pop(DOMAIN, None)
    return ir.to_proto(model).SerializeToString(), [str(value.name) for value in main.inputs]
