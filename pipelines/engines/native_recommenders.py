"""Click models in native kernels: as one `ClickProgram`, or from `ParallelEmbedding` on, alone or with a stock engine
for the layers after it.
"""

from __future__ import annotations

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import forks
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, one_line
from pipelines.engines import recommender_files, stock
from pipelines.engines.contexts import Asynchronous
from pipelines.engines.quickest import Option
from pipelines.engines.recommender_files import ClickModel
from pipelines.engines.session import BatchError, Executed, Port, Session
from pipelines.kernels import extension
from pipelines.kernels.arrays import contiguous
from pipelines.kernels.recommenders import native
from pipelines.kernels.recommenders.operators import EmbeddingLayer
from pipelines.kernels.recommenders.program import ClickProgram

SMALL = 32  # samples
CHUNK = 64  # samples, the least that a thread is given
EMBEDDING = EmbeddingLayer.name


class _Opened:
    """A native.onnx opened: its inputs, those that the operator `first` is fed with, and threads.

    Large tables are the mapped file. Threads may share it, and forked processes.
    """

    def __init__(self, path: Path, threads: int, model: ClickModel) -> None:
        self.path, self.threads = path, threads
        self.inputs = {name: Port(np.dtype(dtype), tuple(shape)) for name, dtype, shape in model.inputs}
        self.fed, self.outputs = model.fed, model.outputs
        self._pool: ThreadPoolExecutor | None = None
        self.forked()
        forks.tell(self)

    def forked(self) -> None:
        """Threads of its own, which a forked process must make anew."""
        self._pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None

    def call(self, kernel: Any, batch: Batch) -> list[NDArray[Any]]:
        """The results of `kernel` on the batch, computed in as many parts as there are threads.

        Raises BatchError for an id that is no row of its field, before any table is read, and for other arrays.
        """
        try:
            return self._call(kernel, batch)
        except IndexError as error:
            raise BatchError(str(error)) from error
        except (TypeError, ValueError, KeyError) as error:
            raise BatchError(f"the native kernels cannot run {self.path} on this batch: {one_line(error)}") from error

    def _call(self, kernel: Any, batch: Batch) -> list[NDArray[Any]]:
        arrays = [None if name is None else contiguous(batch[name]) for name in self.fed]
        if self._pool is None or (count := len(batch[str(self.fed[0])])) < 2 * CHUNK:
            return _listed(kernel(*arrays))
        bounds = np.linspace(0, count, min(self.threads, count // CHUNK) + 1).astype(int)
        parts = [[None if each is None else each[a:b] for each in arrays] for a, b in itertools.pairwise(bounds)]
        try:
            results = [_listed(each) for each in self._pool.map(lambda part: kernel(*part), parts)]
        except IndexError:
            kernel(*arrays)  # names the row of the whole batch
            raise
        return [np.concatenate(each) for each in zip(*results, strict=True)]


class ProgramGraph(_Opened):
    """A native.onnx that is one `ClickProgram`."""

    def __init__(self, path: Path, threads: int, model: ClickModel, program: ClickProgram) -> None:
        super().__init__(path, threads, model)
        self.steps = [type(each).__name__ for each in program.steps]
        self.program = native.click_program(program)


class ClickGraph(_Opened):
    """`ParallelEmbedding` and, where they are plain int8 layers, those after it as native kernels."""

    def __init__(self, path: Path, threads: int, model: ClickModel, layer: EmbeddingLayer) -> None:
        super().__init__(path, threads, model)
        self.embedding = native.parallel_embedding(layer)
        layers = [native.linear(each) for each in model.layers]
        self.network = layers and native.click_network(self.embedding, layers, model.sigmoid)


class ProgramSession(Asynchronous):
    """A click program, in one call of the native kernels."""

    engine = "native"

    def __init__(self, graph: ProgramGraph) -> None:
        self._graph, self.threads, self.inputs = graph, graph.threads, graph.inputs

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """The outputs for a batch, see `Session`."""
        graph = self._graph
        if graph.threads > 1:
            found = graph.call(graph.program, batch)
        else:
            try:  # with no look at the arrays, which costs more than a sample
                found = _listed(graph.program(*[None if name is None else batch[name] for name in graph.fed]))
            except Exception:  # copied, or refused in words
                found = graph.call(graph.program, batch)
        return dict(zip(graph.outputs, found, strict=True))

    def executed(self, batch: Batch) -> list[Executed]:
        """The kernels that run, see `Session`."""
        graph = self._graph
        return [Executed(f"{i}", f"{step} {graph.program.isa}", "s16") for i, step in enumerate(graph.steps)]


class NativeSession(Asynchronous):
    """The whole network in native kernels. Raises RequestError where its layers have no such form."""

    engine = "native"

    def __init__(self, graph: ClickGraph) -> None:
        if not graph.network:
            raise RequestError(f"the layers of {graph.path} after {EMBEDDING} have no native form")
        self._graph, self.threads, self.inputs = graph, graph.threads, graph.inputs

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """The outputs for a batch, see `Session`."""
        return {self._graph.outputs[0]: self._graph.call(self._graph.network, batch)[0]}

    def executed(self, batch: Batch) -> list[Executed]:
        """The kernels that run, see `Session`."""
        isa = self._graph.embedding.isa
        return [Executed(EMBEDDING, f"{EMBEDDING} {isa}", "u8"), Executed("rest", f"Linear {isa}", "u8")]


class MixedSession(Asynchronous):
    """`ParallelEmbedding` in native kernels, the layers after it in a stock engine.

    The engine's uint8 input is the kernel's output buffer: nothing is copied in between.
    """

    engine = "native"

    def __init__(self, graph: ClickGraph, stock_engine: str) -> None:
        self._graph, self.threads, self.inputs = graph, graph.threads, graph.inputs
        rest = recommender_files.after_embedding(graph.path)
        self._hidden_names, self._names = rest.hidden, rest.inputs
        self._rest: Session = stock.STOCK[stock_engine](graph.path, graph.threads, rest.model)

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """The outputs for a batch, see `Session`."""
        return self._rest.run(self._hidden(batch))

    def executed(self, batch: Batch) -> list[Executed]:
        """The kernel and the engine's own operators, see `Session`."""
        first = Executed(EMBEDDING, f"{EMBEDDING} {self._graph.embedding.isa}", "u8")
        return [first, *self._rest.executed(self._hidden(batch))]

    def _hidden(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """The inputs of the layers after the embedding."""
        graph = self._graph
        values = {**batch, **dict(zip(self._hidden_names, graph.call(graph.embedding, batch), strict=False))}
        return {name: values[name] for name in self._names}


def options(path: Path, threads: int) -> dict[str, Option]:
    """The ways to run native.onnx: "native" in kernels alone, "native+ENGINE" with the layers in a stock engine.

    Where the network has a native form, small batches run in kernels alone: a call into a library costs more than it
    saves. Raises RequestError without kernels, and for a file that is missing, damaged or no such graph.
    """
    extension.required()
    with recommender_files.readable(path):
        graph = _opened(path, threads)
    if isinstance(graph, ProgramGraph):
        return {"native": Option(functools.partial(ProgramSession, graph), 0)}
    ways = {"native": Option(functools.partial(NativeSession, graph))} if graph.network else {}
    for name in filter(stock.exact, stock.available()):
        ways[f"native+{name}"] = Option(functools.partial(MixedSession, graph, name), SMALL + 1 if ways else 1)
    return ways


def _opened(path: Path, threads: int) -> ClickGraph | ProgramGraph:
    model = recommender_files.opened(path)
    if model.program is not None:
        return ProgramGraph(path, threads, model, model.program)
    assert model.embedding is not None
    return ClickGraph(path, threads, model, model.embedding)


def _listed(found: Any) -> list[NDArray[Any]]:
    return list(found) if isinstance(found, tuple) else [found]
