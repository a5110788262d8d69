"""What the native kernels need of a native.onnx, kept in a file of its own: opening that needs neither the graph nor
what reads graphs. Large tables stay where they are, in native.onnx.data.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipelines.core.derived import derived
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.core.files import mapped
from pipelines.kernels import program_file
from pipelines.kernels.recommenders.operators import DOMAIN, EmbeddingLayer, LinearLayer
from pipelines.kernels.recommenders.program import STEPS, ClickProgram

if TYPE_CHECKING:
    import onnx_ir as ir

logger = logging.getLogger(__name__)

# Bump it when the dataclasses below, those of the kernels, or what is read of a graph change;
# tests/engines/test_click_files.py fails where that is forgotten.
VERSION = 2
SUFFIX = ".zoo"


@dataclass(frozen=True, eq=False)
class ClickModel:
    """A click model for the native kernels: a `program`, or an `embedding` with the int8 `layers` after it, none where
    those are a stock engine's, through a sigmoid if asked.

    inputs: (name, dtype, shape) of the graph's inputs, None for a dynamic size. fed: which of them the first operator
    takes, in its order, None where it takes none. outputs: names of the graph's.
    """

    inputs: Sequence[tuple[str, str, Sequence[int | None]]]
    fed: Sequence[str | None]
    outputs: Sequence[str]
    program: ClickProgram | None = None
    embedding: EmbeddingLayer | None = None
    layers: Sequence[LinearLayer] = ()
    sigmoid: bool = False


CLASSES = {each.__name__: each for each in (ClickModel, ClickProgram, EmbeddingLayer, LinearLayer, *STEPS.values())}


class Rest(NamedTuple):
    """The layers after a `ParallelEmbedding` as a model of their own, in stock ONNX: its bytes, its inputs, and those
    of them that are the operator's outputs.
    """

    model: bytes
    inputs: list[str]
    hidden: list[str]


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises RequestError for what goes wrong in the block, where a damaged native.onnx fails anywhere."""
    try:
        yield
    except ZooError:
        raise
    except Exception as error:
        raise RequestError(f"{path} is not readable ({one_line(error)}); remove it, and it is made anew") from error


def opened(path: Path) -> ClickModel:
    """The click model of a native.onnx, from the file beside it, or in the cache, where it is kept at first use.

    Where none can be kept or it is damaged, the graph itself is read. Raises RequestError for a file that is missing,
    damaged or no such graph.
    """
    try:
        kept = derived(path, [path.parent], "clicks", VERSION, store, SUFFIX)
        (model,) = program_file.load(kept, CLASSES, VERSION, mapped(path))
    except ZooError as error:
        model = _model(_graph(path), path)
        logger.warning("%s; until then the graph is read, which takes longer", error)
    return model  # type: ignore[no-any-return]


def store(source: Path, path: Path) -> None:
    """Write what `opened` reads of the native.onnx `source` to `path`. Raises RequestError for another graph."""
    graph = _graph(source)
    tensors = [each.const_value for each in graph.graph.initializers.values()]
    outside = {(each.numpy().ctypes.data, each.nbytes): each.offset or 0 for each in tensors if _is_outside(each)}  # type: ignore[union-attr]
    program_file.save(path, (_model(graph, source),), CLASSES, VERSION, outside)


def after_embedding(path: Path) -> Rest:
    """The layers of a native.onnx after its `ParallelEmbedding`. Raises RequestError for a damaged file."""
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    model = _graph(path)
    with readable(path):
        main, first = model.graph, _first(model, path)
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
        content = ir.to_proto(model).SerializeToString()
    return Rest(content, [str(value.name) for value in main.inputs], [str(value.name) for value in fresh])


def _graph(path: Path) -> ir.Model:
    from pipelines.graph import io  # with onnx, which only the first use of a file needs

    return io.load_mapped(path)


def _is_outside(tensor: ir.TensorProtocol | None) -> bool:
    import onnx_ir as ir

    return isinstance(tensor, ir.ExternalTensor)


def _first(model: ir.Model, path: Path) -> ir.Node:
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type in (ClickProgram.name, EmbeddingLayer.name):
            return node
    raise RequestError(
        f"{path} has no {EmbeddingLayer.name} or {ClickProgram.name} operator; the engine native runs the native.onnx "
        "of a model folder"
    )


def _model(model: ir.Model, path: Path) -> ClickModel:
    from pipelines.kernels.recommenders.from_graph import click_program, dense_layers, embedding_layer

    with readable(path):
        first = _first(model, path)
        inputs = [(str(value.name), *_port(value)) for value in model.graph.inputs]
        if first.op_type == ClickProgram.name:
            outputs = [str(value.name) for value in first.outputs]
            return ClickModel(inputs, _names(first.inputs[:3]), outputs, click_program(first))
        layers, sigmoid = dense_layers(first) or ([], False)
        outputs = [str(value.name) for value in model.graph.outputs]
        return ClickModel(inputs, _names(first.inputs[:2]), outputs, None, embedding_layer(first), layers, sigmoid)


def _names(values: Sequence[ir.Value | None]) -> list[str | None]:
    return [None if value is None else str(value.name) for value in values]


def _port(value: ir.Value) -> tuple[str, list[int | None]]:
    """dtype and shape of an input."""
    assert value.dtype is not None and value.shape is not None
    return value.dtype.numpy().str, [each if isinstance(each, int) else None for each in value.shape]
