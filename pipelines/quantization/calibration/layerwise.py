"""Layer-wise execution: computes a graph layer by layer over samples, in bounded memory, and runs subgraphs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from pipelines.core.batches import Batch, cut, joined, length
from pipelines.core.errors import RequestError
from pipelines.graph import edit, query, reference_session, sample_axis
from pipelines.graph.infer import infer_shapes

Array = NDArray[Any]
CHUNK = 8  # samples computed at once, where the largest tensor of so many takes no more than `ROOM`
ROOM = 40_000_000  # bytes
HELD = 2**26  # bytes of values that are held in memory; further ones are stored on disk


def chunk_size(model: ir.Model, sample: Batch, room: int = ROOM) -> int:
    """Returns how many samples to compute at once: `CHUNK`, or fewer if the largest float tensor is too large.

    Args:
        model: Float model.
        sample: Batch of the graph's inputs; its first sample is run.
        room: Memory limit of one tensor, in bytes.

    Returns:
        Number of samples, at least 1.
    """
    copy = model.clone()
    infer_shapes(copy)
    graph, taken = copy.graph, query.used_names(copy.graph)
    values = [value for node in graph for value in node.outputs if query.is_float(value)]
    if not values:
        return CHUNK
    sizes = [edit.node("Size", [value], f"{value.name}.size", dtype=ir.DataType.INT64, taken=taken) for value in values]
    for value in (output for node in graph for output in node.outputs):
        value.shape = None  # inference may have guessed
    graph.extend(sizes)
    graph.outputs[:] = [node.outputs[0] for node in sizes]
    session = reference_session.lean_session(copy, "its correction needs", prepack=False)
    one = {name: array[:1] for name, array in sample.items()}
    largest = 4 * max(int(size) for size in reference_session.run(session, one))
    return min(CHUNK, max(room // max(largest, 1), 1))


def sample_chunks(
    model: ir.Model, samples: Iterable[Batch], chunk_samples: int = CHUNK, room: int = ROOM
) -> Iterator[Batch]:
    """Yields samples in chunks of equal size.

    Samples keep their batches if the inputs share no first axis.

    Args:
        model: Float model; a batch size that its inputs fix is used.
        samples: Batches, array [samples, ...] for every graph input.
        chunk_samples: Size of a chunk; 0: as `chunk_size` computes it.
        room: Memory limit for `chunk_size`, in bytes.

    Yields:
        Batches of the chunk size; a last, smaller batch is yielded only for a dynamic batch size.

    Raises:
        RequestError: The names of the samples differ from those of the inputs.
    """
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    expected = {str(value.name) for value in inputs}
    sizes = {(query.dimensions(value) or [0])[0] for value in inputs}  # None: dynamic, 0: no axis
    shared = len(sizes) == 1 and 0 not in sizes and sample_axis.is_shared(model.graph)
    size = fixed = (sizes.pop() or -1) if shared else 0
    leftover: list[Batch] = []
    for batch in samples:
        if set(batch) != expected:
            raise RequestError(f"the samples hold {', '.join(batch)}; the graph takes {', '.join(sorted(expected))}")
        if not size or len({len(array) for array in batch.values()}) > 1:
            yield batch
            continue
        if size < 0 and length(batch):
            size = chunk_samples or chunk_size(model, batch, room)
        if leftover and any(leftover[0][name].shape[1:] != array.shape[1:] for name, array in batch.items()):
            if fixed < 0:  # no batch has samples of two shapes
                yield leftover[0]
            leftover = []
        for chunk in cut(joined([*leftover, batch]) if leftover else batch, size):
            if length(chunk) == size:
                leftover = []
                yield chunk
            else:
                leftover = [chunk]
    if leftover and fixed < 0:
        yield leftover[0]


@dataclass(frozen=True)
class DrawnSamples:
    """An evenly drawn part of samples, in chunks, for repeated iteration; neighbouring samples may be alike.

    Attributes:
        model: Float model.
        samples: Batches, iterated several times.
        stride: Interval of the drawn chunks.
    """

    model: ir.Model
    samples: Iterable[Batch]
    stride: int

    def __iter__(self) -> Iterator[Batch]:
        return (chunk for i, chunk in enumerate(sample_chunks(self.model, self.samples)) if i % self.stride == 0)


def drawn(model: ir.Model, samples: Iterable[Batch], count: int | None, max_samples: int | None) -> Iterable[Batch]:
    """Draws samples evenly.

    Args:
        model: Float model.
        samples: Batches, iterated several times.
        count: Number of samples; None: unknown, no sample is left out.
        max_samples: Maximum number of samples; None: all.

    Returns:
        `samples`, or a part of them with at least one chunk.
    """
    if max_samples is None or count is None or count <= max_samples:
        return samples
    return DrawnSamples(model, samples, -(-count // max(max_samples, CHUNK)))


def subgraph(
    model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], examples: Sequence[Array] = ()
) -> ir.Model:
    """Copies a subgraph, so that it takes and computes arrays of any shape.

    Args:
        model: Model that contains the subgraph.
        inputs: Inputs of the subgraph.
        outputs: Outputs of the subgraph.
        examples: Arrays that give the dtypes of `inputs`, if these are not inputs of the graph.

    Returns:
        The subgraph.
    """
    part = edit.extract(model, [str(value.name) for value in inputs], [str(value.name) for value in outputs])
    for value, array in zip(part.graph.inputs, examples, strict=False):
        value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    for value in (*part.graph.inputs, *part.graph.outputs):
        value.shape = None  # inference may have guessed
    return part


def subgraph_session(
    model: ir.Model,
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    examples: Sequence[Array] = (),
    quick: bool = False,
) -> ort.InferenceSession:
    """Opens an onnxruntime session of a subgraph.

    Args:
        model: See `subgraph`.
        inputs: See `subgraph`.
        outputs: See `subgraph`.
        examples: See `subgraph`.
        quick: See `reference_session.options`.

    Returns:
        The session.
    """
    part = subgraph(model, inputs, outputs, examples)
    return reference_session.session(part, "its correction needs", reference_session.options(quick, lean=True))


class LayerwiseRun:
    """Computes a model layer by layer over all samples.

    Values are held in memory up to `HELD` bytes; further ones are stored on disk, one file per value and chunk.

    Args:
        model: Model to compute.
        layers: Names of the operators to compute, in graph order; nothing downstream of one is ready before it.
        folder: Folder for the files.
    """

    def __init__(self, model: ir.Model, layers: Iterable[str], folder: Path) -> None:
        self.model, self.folder, self.chunks, self.written = model, Path(tempfile.mkdtemp(dir=folder)), 0, 0
        self.nodes: dict[str, ir.Node] = {}
        for node in model.graph:  # as the quantizer names operators that have no name of their own
            self.nodes[str(node.name if node.name and node.name not in self.nodes else node.outputs[0].name)] = node
        self.order = {node: i for i, node in enumerate(model.graph)}
        self.waiting = {self.nodes[name]: None for name in layers if name in self.nodes}
        self.stored: dict[ir.Value, Path] = {}
        self._forms: dict[Path, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._held: dict[Path, Array] = {}
        self._room = HELD

    def feed(self, batch: Batch) -> None:
        """Stores one chunk of the graph's inputs.

        Args:
            batch: Array [samples, ...] for every graph input.
        """
        for value in self.model.graph.inputs:
            if not value.is_initializer():
                self._write(value, self.chunks, batch[str(value.name)].copy())  # not the whole batch it is a part of
        self.chunks += 1

    def ready(self, node: ir.Node) -> bool:
        """Returns whether every layer upstream of `node` has been computed.

        Args:
            node: Operator of the model.
        """
        return not self._cone(node)[2]

    def compute(self, layer: ir.Node) -> None:
        """Computes and stores the output of the next layer, and deletes tensors that no later layer reads.

        Args:
            layer: The next layer.
        """
        ends = {node for value in self.model.graph.outputs if (node := value.producer()) is not None}
        needed = {value for node in {*self.waiting, *ends} for value in self._cone(node)[0]}
        for value in [value for value in self.stored if value not in needed]:
            for chunk in range(self.chunks):
                self._delete(self._file(value, chunk))
            del self.stored[value]
        self.waiting.pop(layer, None)
        if layer.outputs[0] in self.stored:
            return
        inputs, inner, _ = self._cone(layer)
        varies = set(inputs)
        for node in inner:
            if varies.intersection(query.values_read(node)):
                varies.update(node.outputs)
        shared = [value for node in inner for value in node.outputs if value in varies and len(value.uses()) > 1]
        values = list(dict.fromkeys((*shared, layer.outputs[0])))
        for chunk, arrays in enumerate(self._run(inputs, values)):
            for value, array in zip(values, arrays, strict=True):
                if isinstance(array, np.ndarray) and array.dtype != object:  # sequences and strings are computed again
                    self._write(value, chunk, array)

    def run(self, node: ir.Node) -> Iterator[Array]:
        """Yields the first output of a ready node, chunk by chunk.

        Args:
            node: Operator.

        Returns:
            Iterator over arrays [samples, ...].
        """
        return self.values(node.outputs[0])

    def values(self, value: ir.Value) -> Iterator[Array]:
        """Yields a graph input, or a value of a ready producer, chunk by chunk.

        Args:
            value: Value of the model.

        Returns:
            Iterator over arrays [samples, ...].
        """
        producer = value.producer()
        if value in self.stored or producer is None:
            return (self._read(value, chunk) for chunk in range(self.chunks))
        return (arrays[0] for arrays in self._run(self._cone(producer)[0], [value]))

    def ahead(self, values: Sequence[ir.Value]) -> Iterator[list[Array]]:
        """Yields values chunk by chunk; layers upstream that are not computed yet are run with their present weights.

        Args:
            values: Values of the model.

        Yields:
            One array per value.
        """
        ends = [producer for value in values if value not in self.stored and (producer := value.producer()) is not None]
        inputs = dict.fromkeys(value for end in ends for value in self._cone(end, ahead=True)[0])
        computed = [value for value in dict.fromkeys(values) if value not in self.stored and value.producer()]
        for chunk, arrays in enumerate(self._run(list(inputs), computed)):
            results = dict(zip(computed, arrays, strict=True))
            yield [results[value] if value in results else self._read(value, chunk) for value in values]

    def add(self, layer: ir.Node, shift: Array, axis: int) -> None:
        """Adds a shift per channel to the stored output of a layer.

        Args:
            layer: Computed layer.
            shift: Float [channels], in units of the output.
            axis: Channel axis of the output.
        """
        value = layer.outputs[0]
        if not shift.any():
            return
        for chunk in range(self.chunks):
            array = self._read(value, chunk)
            per_channel = shift.astype(array.dtype).reshape(-1, *[1] * (array.ndim - 1 - axis % array.ndim))
            self._write(value, chunk, array + per_channel)

    def _cone(self, end: ir.Node, ahead: bool = False) -> tuple[list[ir.Value], list[ir.Node], bool]:
        """Returns the stored values upstream of `end`, the operators between, and whether a layer is missing.

        ahead: what is upstream of layers that wait, too.
        """
        inputs: dict[ir.Value, None] = {}
        inner, todo, blocked = {end}, [end], False
        while todo:
            for value in query.values_read(todo.pop()):
                producer = value.producer()
                if value in self.stored:
                    inputs[value] = None
                elif producer in self.order and producer not in inner:
                    waits = producer in self.waiting
                    blocked |= waits
                    if ahead or not waits:
                        inner.add(producer)
                        todo.append(producer)
        return list(inputs), sorted(inner, key=self.order.__getitem__), blocked

    def _run(self, inputs: list[ir.Value], outputs: list[ir.Value]) -> Iterator[list[Array]]:
        """Computes the values `outputs` from the stored `inputs`, chunk by chunk."""
        session = subgraph_session(self.model, inputs, outputs, [self._read(value, 0) for value in inputs])
        for chunk in range(self.chunks):
            yield reference_session.run(session, {str(value.name): self._read(value, chunk) for value in inputs})

    def _file(self, value: ir.Value, chunk: int) -> Path:
        return self.stored[value].with_suffix(f".{chunk}")

    def _read(self, value: ir.Value, chunk: int) -> Array:
        path = self._file(value, chunk)
        if path in self._held:
            return self._held[path]
        dtype, shape = self._forms[path]
        array: Array = np.fromfile(path, dtype).reshape(shape)
        return array

    def _write(self, value: ir.Value, chunk: int, array: Array) -> None:
        if value not in self.stored:
            self.written += 1
            self.stored[value] = self.folder / str(self.written)
        path = self._file(value, chunk)
        self._delete(path)
        if array.nbytes <= self._room:
            self._held[path] = array
            self._room -= array.nbytes
        else:
            array.tofile(path)
            self._forms[path] = array.dtype, array.shape

    def _delete(self, path: Path) -> None:
        """Deletes a chunk of a value, if there is one."""
        if (array := self._held.pop(path, None)) is not None:
            self._room += array.nbytes
        elif self._forms.pop(path, None) is not None:
            path.unlink()
