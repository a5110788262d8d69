"""onnxruntime as a reference: all optimizations off, so that each operator computes what the graph states."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, one_line
from pipelines.graph import large_weights, query

SHARED_WEIGHT_BYTES = 1 << 16  # minimum bytes of weights that sessions share
LARGEST = 64  # batch size that an exporter is expected to leave in a graph


def options(
    quick: bool = False, lean: bool = False, prepack: bool = True, shapes_first: bool = False
) -> ort.SessionOptions:
    """Returns session options with all optimizations off.

    Args:
        quick: Enable optimizations, for float graphs whose results alone count.
        lean: Take the memory of activations from one arena for all lean sessions, see `release`. Arenas of
            single sessions would add up; without an arena the system clears the pages of every run.
        prepack: Copy weights into the layout of the kernels. False saves the memory of the copies.
        shapes_first: Compute Shape and Size as soon as they can be, so that the values that they read can be freed.
    """
    settings = ort.SessionOptions()
    if shapes_first:
        settings.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    level = ort.GraphOptimizationLevel
    settings.graph_optimization_level = level.ORT_ENABLE_ALL if quick else level.ORT_DISABLE_ALL
    settings.log_severity_level = 4  # errors come as exceptions
    if lean:
        settings.enable_mem_pattern = False
        _register_arena()
        settings.add_session_config_entry("session.use_env_allocators", "1")
        settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if not prepack:
        settings.add_session_config_entry("session.disable_prepacking", "1")
    # on a busy machine threads would wait for each other
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return settings


@functools.cache
def _register_arena() -> None:
    """Registers the arena of all lean sessions; it grows by the requested sizes."""
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    extend = {"max_mem": 0, "arena_extend_strategy": 1, "initial_chunk_size_bytes": 1 << 16}
    arena = ort.OrtArenaCfg({**extend, "max_dead_bytes_per_chunk": 1 << 20})
    with contextlib.suppress(RuntimeError):  # there is one already
        ort.create_and_register_allocator(memory, arena)


def release() -> None:
    """Returns the idle memory of the arena of lean sessions, and that of freed objects, to the system."""
    gc.collect()  # frees sessions
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "shrink", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    opened = ort.InferenceSession(model.SerializeToString(), options(lean=True), providers=["CPUExecutionProvider"])
    shrinking = ort.RunOptions()
    shrinking.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    opened.run(None, {"x": np.zeros(1, np.float32)}, shrinking)
    del opened
    machine.trim()


class _Session(ort.InferenceSession):  # type: ignore[misc]
    """Session that gets large tables as inputs of every run: onnxruntime would copy initializers twice.

    Attributes:
        weights: Arrays that the session reads without owning them.
    """

    weights: Mapping[str, ort.OrtValue] = MappingProxyType({})

    def __init__(self, content: bytes, chosen: ort.SessionOptions, tables: dict[str, NDArray[Any]]) -> None:
        super().__init__(content, chosen, providers=["CPUExecutionProvider"])
        self._tables = tables

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        """See `onnxruntime.InferenceSession`."""
        return super().run(output_names, {**input_feed, **self._tables}, run_options)

    def get_inputs(self) -> list[Any]:
        """Returns the inputs of the model."""
        return [port for port in super().get_inputs() if port.name not in self._tables]


@dataclass(frozen=True)
class Serialized:
    """A model as onnxruntime reads it.

    Attributes:
        proto: Protobuf without the data of `tables`.
        tables: Large lookup tables, which are inputs of every run.
    """

    proto: onnx.ModelProto
    tables: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, model: ir.Model) -> Serialized:
        """Serializes a model.

        Args:
            model: Model; it is not changed.

        Returns:
            The protobuf and its tables.
        """
        proto, tables = large_weights.split_weights(model, large_weights.lookup_tables(model.graph))
        kept = [weight for weight in proto.graph.initializer if weight.name not in tables]
        for tensor in proto.graph.initializer:
            if tensor.name in tables:
                proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(kept)
        return cls(proto, tables)


def share_weights(main: ir.Graph) -> dict[str, ort.OrtValue]:
    """Moves large weights out of a graph, to be shared by sessions; serialization then stays below 2 GB.

    Args:
        main: Graph to change.

    Returns:
        The weights by name, for `SessionOptions.add_external_initializers`; sessions do not keep them alive.
    """
    shared, tables = {}, large_weights.lookup_tables(main)  # sessions read those where they lie
    for name, value in main.initializers.items():
        tensor = value.const_value
        if (
            tensor is not None
            and value.uses()
            and name not in tables
            and tensor.dtype == ir.DataType.FLOAT
            and tensor.nbytes >= SHARED_WEIGHT_BYTES
        ):
            shared[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensor.numpy()))
            value.const_value = ir.ExternalTensor(
                name, 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.numpy().shape), name=name
            )
    return shared


def lean_session(model: ir.Model, needed_by: str, *, quick: bool = False, prepack: bool = True) -> ort.InferenceSession:
    """Opens a session that maps the weights from the file, with `options(quick, lean=True, prepack)`.

    Args:
        model: Model to run; it is not changed.
        needed_by: See `session`.
        quick: See `options`.
        prepack: See `options`.

    Returns:
        The session.

    Raises:
        RequestError: onnxruntime cannot run the model.
    """
    copy, chosen = model.clone(), options(quick, lean=True, prepack=prepack)
    weights = share_weights(copy.graph)
    chosen.add_external_initializers(list(weights), list(weights.values()))
    opened = session(copy, needed_by, chosen)
    opened.weights = weights
    return opened


def session(
    model: ir.Model | Serialized, needed_by: str, chosen: ort.SessionOptions | None = None
) -> ort.InferenceSession:
    """Opens a session of a model.

    Args:
        model: Model to run.
        needed_by: Purpose, for the error message ("calibration needs").
        chosen: Session options; by default `options()`.

    Returns:
        The session.

    Raises:
        RequestError: onnxruntime cannot run the model.
    """
    try:
        content = model if isinstance(model, Serialized) else Serialized.of(model)
        return _Session(content.proto.SerializeToString(), chosen or options(), content.tables)
    except Exception as error:  # onnxruntime raises its own kinds
        raise RequestError(f"onnxruntime cannot run the model, which {needed_by}: {one_line(error)}") from error


def run(opened: ort.InferenceSession, batch: Batch, what: str = "samples") -> list[NDArray[Any]]:
    """Runs a batch.

    Args:
        opened: Session.
        batch: Array for every graph input.
        what: Name of the data that the batch is from, for the error message.

    Returns:
        All outputs, in order.

    Raises:
        RequestError: The batch does not fit the graph.
    """
    try:
        outputs: list[NDArray[Any]] = opened.run(None, dict(batch))
    except Exception as error:  # onnxruntime raises its own kinds
        raise RequestError(f"the {what} do not fit the graph: {one_line(error)}") from error
    return outputs


def computed(node: ir.Node, feeds: Mapping[str, NDArray[Any]], opset: int, position: int = 0) -> Any:
    """Computes a result of an operator.

    Args:
        node: The operator, without subgraphs.
        feeds: Array for each of its inputs, by name.
        opset: Version of the default operator set.
        position: Position of the result.

    Returns:
        The result: an array, unless it is a sequence.

    Raises:
        RequestError: onnxruntime cannot compute it.
    """
    result = "result" + "_" * max(map(len, feeds))
    proto = ir.to_proto(node)
    proto.output[position] = result
    try:
        inputs = [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in feeds.items()
        ]
        body = onnx.helper.make_graph([proto], "alone", inputs, [onnx.helper.make_empty_tensor_value_info(result)])
        opsets = [onnx.helper.make_opsetid("", opset)]
        chosen = options()
        chosen.intra_op_num_threads = 1
        model = onnx.helper.make_model(body, opset_imports=opsets, ir_version=10).SerializeToString()
        return ort.InferenceSession(model, chosen, providers=["CPUExecutionProvider"]).run(None, dict(feeds))[0]
    except Exception as error:  # onnxruntime raises its own kinds; ml_dtypes it does not know
        raise RequestError(f"onnxruntime cannot compute it: {one_line(error)[:200]}") from error


def fix_batch(model: ir.Model) -> str:
    """Fixes the batch size of the inputs if constants in the graph fix it.

    Such are an exporter's Reshape to [1, 1001], and a class token that was expanded to the batch of the trace before a
    Concat. Only graphs with such constants are run, on zeros, for sizes up to `LARGEST`.

    Args:
        model: Model to change.

    Returns:
        The finding in one line; "" if any number of samples is accepted or this cannot be tried.
    """
    inputs = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    shapes = [query.dimensions(value) or [0] for value in inputs]  # [0]: no batch to try
    targets = [query.constant(node.inputs[1]) for node in model.graph if node.op_type in ("Reshape", "Expand")]
    targets += [
        np.array(array.shape[:1])
        for node in model.graph
        if node.op_type == "Concat" and node.attributes.get_int("axis", 0) > 0
        for array in map(query.constant, node.inputs)
        if array is not None
    ]
    sizes = {int(target[0]) for target in targets if target is not None and target.size and 0 < target[0] <= LARGEST}
    if not sizes or any(shape[0] is not None or None in shape[1:] for shape in shapes):
        return ""
    samples = [
        (str(value.name), [size or 0 for size in shape[1:]], ir.DataType(value.dtype or 1).numpy())
        for value, shape in zip(inputs, shapes, strict=True)
    ]
    quiet = options()
    opened: list[ort.InferenceSession] = []

    def fault(size: int) -> str:
        try:
            opened[:] = opened or [session(model, "finding its batch size needs", quiet)]
            run(opened[0], {name: np.zeros([size, *shape], dtype) for name, shape, dtype in samples})
        except RequestError as error:
            return str(error)
        return ""

    other = next(count for count in range(2, LARGEST + 2) if count not in sizes)
    if not (problem := fault(other)) or (size := next((count for count in sorted(sizes) if not fault(count)), 0)) == 0:
        return ""
    for value in (*inputs, *model.graph.outputs):
        if (dimensions := query.dimensions(value)) and dimensions[0] is None and value.shape is not None:
            value.shape = ir.Shape([size, *value.shape[1:]])
    named = re.search(r"while running (\w+) node\. Name:'([^']*)'", problem)
    return f"the graph computes only batches of {size}" + (f" ({' '.join(named.groups()).strip()})" if named else "")
