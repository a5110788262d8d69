"""A graph computed layer by layer over samples that lie on disk, and pieces of a graph on their own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from pipelines.core.batches import Batch, cut, joined, length
from pipelines.core.errors import RequestError
from pipelines.graph import query, reference_session

Array = NDArray[Any]
CHUNK = 8  # samples computed at once


def chunks(model: ir.Model, samples: Iterable[Batch]) -> Iterator[Batch]:
    """The samples `CHUNK` at a time, or as many as the graph fixes; as they come where its inputs share no such
    number.
    """
    inputs = [each for each in model.graph.inputs if not each.is_initializer()]
    wanted = {str(each.name) for each in inputs}
    first = {(query.dimensions(each) or [0])[0] for each in inputs}  # None: dynamic, 0: no axis
    size = (first.pop() or CHUNK) if len(first) == 1 and 0 not in first else 0
    rest: list[Batch] = []
    for batch in samples:
        if set(batch) != wanted:
            raise RequestError(f"the samples hold {', '.join(batch)}; the graph takes {', '.join(sorted(wanted))}")
        if not size or len({len(array) for array in batch.values()}) > 1:
            yield batch
            continue
        for each in cut(joined([*rest, batch]), size):
            if length(each) == size:
                rest = []
                yield each
            else:
                rest = [each]
    if rest and size == CHUNK:
        yield rest[0]


def piece(
    model: ir.Model,
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    fed: Sequence[Array] = (),
    quick: bool = False,
) -> ort.InferenceSession:
    """The operators of `model` between values, opened. fed: arrays of the inputs' dtypes, where these are not the
    graph's own. quick: see
    `plain.options`."""
    part = ir.convenience.extract(
        model.graph, [str(each.name) for each in inputs], [str(each.name) for each in outputs]
    )
    for each, array in zip(part.inputs, fed, strict=False):
        each.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    for each in (*part.inputs, *part.outputs):
        each.shape = None  # inference may have guessed
    return reference_session.session(
        ir.Model(part, ir_version=model.ir_version), "its correction needs", reference_session.options(quick)
    )


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """The values that a node reads, those that its subgraphs take from around them too."""
    nodes = [node]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            nodes += ir.traversal.RecursiveGraphIterator(attribute.as_graph())
    return (value for each in nodes for value in each.inputs if value is not None)


class Walk:
    """A model computed piece by piece over all samples. What later pieces read lies on disk, one file a value and chunk
    of samples.

    layers: the operators that will be computed, one after the other; nothing behind one of them is ready before.
    """

    def __init__(self, model: ir.Model, layers: Iterable[str], folder: Path) -> None:
        self.model, self.folder, self.chunks, self.written = model, Path(tempfile.mkdtemp(dir=folder)), 0, 0
        self.nodes: dict[str, ir.Node] = {}
        for node in model.graph:  # as the quantizer names operators that have no name of their own
            self.nodes[str(node.name if node.name and node.name not in self.nodes else node.outputs[0].name)] = node
        self.order = {node: at for at, node in enumerate(model.graph)}
        self.waiting = {self.nodes[name]: None for name in layers if name in self.nodes}
        self.stored: dict[ir.Value, Path] = {}

    def feed(self, batch: Batch) -> None:
        """Store one chunk of the graph's inputs."""
        for value in self.model.graph.inputs:
            if not value.is_initializer():
                self._write(value, self.chunks, batch[str(value.name)])
        self.chunks += 1

    def ready(self, node: ir.Node) -> bool:
        """Whether all that `node` is computed from has been."""
        return not self._cone(node)[2]

    def compute(self, layer: ir.Node) -> None:
        """Compute and store the result of the next layer, forgetting what neither it nor later ones read."""
        ends = {each for value in self.model.graph.outputs if (each := value.producer()) is not None}
        needed = {value for node in {*self.waiting, *ends} for value in self._cone(node)[0]}
        for value in [each for each in self.stored if each not in needed]:
            for chunk in range(self.chunks):
                self._file(value, chunk).unlink()
            del self.stored[value]
        self.waiting.pop(layer, None)
        if layer.outputs[0] in self.stored:
            return
        inputs, inner, _ = self._cone(layer)
        varies = set(inputs)
        for node in inner:
            if varies.intersection(reads(node)):
                varies.update(node.outputs)
        shared = [value for node in inner for value in node.outputs if value in varies and len(value.uses()) > 1]
        values = list(dict.fromkeys((*shared, layer.outputs[0])))
        for chunk, arrays in enumerate(self._run(inputs, values)):
            for value, array in zip(values, arrays, strict=True):
                self._write(value, chunk, array)

    def run(self, node: ir.Node) -> Iterator[Array]:
        """The result of a node that is ready, chunk by chunk."""
        return self.values(node.outputs[0])

    def values(self, value: ir.Value) -> Iterator[Array]:
        """A value whose producer is ready, or an input of the graph, chunk by chunk."""
        producer = value.producer()
        if value in self.stored or producer is None:
            return (self._read(value, chunk) for chunk in range(self.chunks))
        return (arrays[0] for arrays in self._run(self._cone(producer)[0], [value]))

    def add(self, layer: ir.Node, shift: Array, axis: int) -> None:
        """Add `shift`, one number per output channel, to the stored result of `layer`."""
        value = layer.outputs[0]
        if shift.any():
            for chunk in range(self.chunks):
                array = self._read(value, chunk)
                self._write(
                    value,
                    chunk,
                    array + shift.astype(array.dtype).reshape(-1, *[1] * (array.ndim - 1 - axis % array.ndim)),
                )

    def _cone(self, end: ir.Node) -> tuple[list[ir.Value], list[ir.Node], bool]:
        """(stored values that `end` is computed from, the operators between in order, whether a layer among them is
        still waiting).
        """
        inputs: dict[ir.Value, None] = {}
        inner, todo, blocked = {end}, [end], False
        while todo:
            for value in reads(todo.pop()):
                producer = value.producer()
                if value in self.stored:
                    inputs[value] = None
                elif producer in self.order and producer not in inner:
                    if producer in self.waiting:
                        blocked = True
                    else:
                        inner.add(producer)
                        todo.append(producer)
        return list(inputs), sorted(inner, key=self.order.__getitem__), blocked

    def _run(self, inputs: list[ir.Value], outputs: list[ir.Value]) -> Iterator[list[Array]]:
        opened = piece(self.model, inputs, outputs, [self._read(each, 0) for each in inputs])
        for chunk in range(self.chunks):
            yield reference_session.run(opened, {str(each.name): self._read(each, chunk) for each in inputs})

    def _file(self, value: ir.Value, chunk: int) -> Path:
        return self.stored[value].with_suffix(f".{chunk}.npy")

    def _read(self, value: ir.Value, chunk: int) -> Array:
        array: Array = np.load(self._file(value, chunk))
        return array

    def _write(self, value: ir.Value, chunk: int, array: Array) -> None:
        if value not in self.stored:
            self.written += 1
            self.stored[value] = self.folder / str(self.written)
        np.save(self._file(value, chunk), array)
