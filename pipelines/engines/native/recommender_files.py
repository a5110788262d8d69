"""Stored programs of native.onnx files, so that opening one needs neither the graph nor a graph library.

Large tables stay in native.onnx.data.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core import machine, settings
from pipelines.core.derived import derived
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.core.files import mapped
from pipelines.kernels import program_file
from pipelines.kernels.recommenders.operators import DOMAIN, LinearLayer
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import STEPS
from pipelines.kernels.recommenders.steps.base import unread_tables

if TYPE_CHECKING:
    import onnx_ir as ir

logger = logging.getLogger(__name__)

# Bump it when the dataclasses below, those of the kernels, or what is read of a graph change;
# tests/pipelines/engines/native/test_recommender_files.py fails where that is forgotten.
VERSION = 5
SUFFIX = ".zoo"


@dataclass(frozen=True, eq=False)
class ClickModel:
    """A recommender for the native kernels.

    Attributes:
        inputs: (name, dtype, shape) of the graph's inputs, None for a dynamic size.
        fed: Which of them the program takes as ids, numbers and scales; None where it takes none.
        outputs: Names of the graph's outputs.
        program: What the kernels compute.
    """

    inputs: Sequence[tuple[str, str, Sequence[int | None]]]
    fed: Sequence[str | None]
    outputs: Sequence[str]
    program: ClickProgram


CLASSES = {each.__name__: each for each in (ClickModel, ClickProgram, LinearLayer, *STEPS.values())}


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Context that turns errors on a damaged native.onnx into a RequestError.

    Args:
        path: The native.onnx, for messages.

    Raises:
        RequestError: Any error inside the block.
    """
    try:
        yield
    except ZooError:
        raise
    except Exception as error:
        raise RequestError(f"{path} is not readable ({one_line(error)}); remove it, and it is made anew") from error


def opened(path: Path) -> ClickModel:
    """Reads the click model of a native.onnx from a stored program, which is written at first use.

    The program is stored beside the file or in the cache. If it cannot be stored or is damaged, the graph is read.

    Args:
        path: The native.onnx.

    Returns:
        The click model.

    Raises:
        RequestError: The file is missing, damaged or has no click program.
    """
    try:
        kept = derived(path, [path.parent], "clicks", VERSION, store, SUFFIX)
        beyond = mapped(path).is_file() and mapped(path).stat().st_size > table_memory()
        with unread_tables() if beyond else contextlib.nullcontext():
            (model,) = program_file.load(kept, CLASSES, VERSION, mapped(path))
    except ZooError as error:
        model = _model(_graph(path), path)
        logger.warning("%s; until then the graph is read, which takes longer", error)
    return model  # type: ignore[no-any-return]


def table_memory() -> int:
    """Returns the bytes that tables may take in memory: $ZOO_TABLE_MEMORY, or half of what this process may take."""
    return settings.table_memory() or machine.available_memory() // 2


def store(source: Path, path: Path) -> None:
    """Writes the click model of a native.onnx, for `opened`.

    Args:
        source: The native.onnx.
        path: File to write.

    Raises:
        RequestError: The graph has no click program.
    """
    graph = _graph(source)
    tensors = [each.const_value for each in graph.graph.initializers.values()]
    outside = {(each.numpy().ctypes.data, each.nbytes): each.offset or 0 for each in tensors if _is_outside(each)}  # type: ignore[union-attr]
    program_file.save(path, (_model(graph, source),), CLASSES, VERSION, outside)


def _graph(path: Path) -> ir.Model:
    from pipelines.graph import io  # with onnx, which only the first use of a file needs

    return io.load_mapped(path)


def _is_outside(tensor: ir.TensorProtocol | None) -> bool:
    import onnx_ir as ir

    return isinstance(tensor, ir.ExternalTensor)


def _first(model: ir.Model, path: Path) -> ir.Node:
    from pipelines.kernels.recommenders.parallel_embedding import PARALLEL_EMBEDDING

    for node in model.graph:
        if node.domain == DOMAIN and node.op_type in (ClickProgram.name, PARALLEL_EMBEDDING):
            return node
    raise RequestError(
        f"{path} has no {ClickProgram.name} operator; the engine native runs the native.onnx of a model folder"
    )


def _model(model: ir.Model, path: Path) -> ClickModel:
    from pipelines.kernels.recommenders import parallel_embedding
    from pipelines.kernels.recommenders.from_graph import click_program

    with readable(path):
        first = _first(model, path)
        inputs = [(str(value.name), *_port(value)) for value in model.graph.inputs]
        outputs = [str(value.name) for value in model.graph.outputs]
        if first.op_type == ClickProgram.name:
            return ClickModel(inputs, _names(first.inputs[:3]), outputs, click_program(first))
        return ClickModel(inputs, [*_names(first.inputs[:2]), None], outputs, parallel_embedding.program_of(first))


def _names(values: Sequence[ir.Value | None]) -> list[str | None]:
    return [None if value is None else str(value.name) for value in values]


def _port(value: ir.Value) -> tuple[str, list[int | None]]:
    """Returns dtype and shape of an input."""
    assert value.dtype is not None and value.shape is not None
    return value.dtype.numpy().str, [each if isinstance(each, int) else None for each in value.shape]
