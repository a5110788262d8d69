"""Stored programs of native.onnx files; they open without the graph and without a graph library.

Large tables stay in native.onnx.data.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core import machine, settings
from pipelines.core.derived import derived
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.core.files import mapped
from pipelines.kernels import program_file
from pipelines.kernels.recommenders.native import SharedInputs
from pipelines.kernels.recommenders.operators import DOMAIN, LinearLayer
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import STEPS
from pipelines.kernels.recommenders.steps.base import unread_tables

if TYPE_CHECKING:
    import onnx_ir as ir

logger = logging.getLogger(__name__)

# Bump it when the dataclasses below, those of the kernels, or the parts read of a graph change;
# tests/pipelines/engines/native/test_recommender_files.py fails where that is forgotten.
VERSION = 12
SHARED = "shared_inputs"  # key of the graph's metadata
SUFFIX = ".zoo"


@dataclass(frozen=True, eq=False)
class ClickModel:
    """A recommender for the native kernels, in one form.

    Attributes:
        form: Name of the form.
        inputs: (name, dtype, shape) of the graph's inputs, None for a dynamic size.
        fed: Names of the inputs for ids, numbers and scales; None for an input that the program lacks.
        outputs: Names of the graph's outputs.
        program: What the kernels compute.
        shared: Inputs that all samples of a ranking share; None for a model that ranks no items.
    """

    form: str
    inputs: Sequence[tuple[str, str, Sequence[int | None]]]
    fed: Sequence[str | None]
    outputs: Sequence[str]
    program: ClickProgram
    shared: SharedInputs | None = None


CLASSES = {kind.__name__: kind for kind in (ClickModel, ClickProgram, LinearLayer, SharedInputs, *STEPS.values())}


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
        raise RequestError(f"{path} is not readable ({one_line(error)}); remove it, it is rebuilt") from error


def opened(path: Path) -> Sequence[ClickModel]:
    """Reads the click model of a native.onnx from stored programs, which are written at first use.

    The programs are stored beside the file or in the cache. If they cannot be stored or are damaged, the graph is read.

    Args:
        path: The native.onnx.

    Returns:
        The click model in all its forms, one at least.

    Raises:
        RequestError: The file is missing, damaged or has no click program.
    """
    try:
        kept = derived(path, [path.parent], "clicks", VERSION, store, SUFFIX)
        beyond = machine.beyond_memory(path)
        with unread_tables() if beyond else contextlib.nullcontext():
            models: Sequence[ClickModel] = program_file.load(
                kept, CLASSES, VERSION, mapped(path), huge_pages=not beyond
            )
    except ZooError as error:
        models = _models(_graph(path), path)
        logger.warning("%s; until then the graph is read, which takes longer", error)
    return models


def rows_memory() -> int:
    """Returns the bytes of cached rows of a process; without a setting there may be a process on every core."""
    return settings.table_memory() or machine.table_memory() // machine.cores()


def note_shared(model: ir.Model, shared: SharedInputs) -> None:
    """Notes in a native.onnx the inputs that all samples of a ranking share.

    Args:
        model: The graph.
        shared: These inputs.
    """
    model.metadata_props[SHARED] = json.dumps(asdict(shared))


def store(source: Path, path: Path) -> None:
    """Writes the click model of a native.onnx, for `opened`.

    Args:
        source: The native.onnx.
        path: File to write.

    Raises:
        RequestError: The graph has no click program.
    """
    graph = _graph(source)
    tensors = [weight.const_value for weight in graph.graph.initializers.values()]
    outside = {(table.numpy().ctypes.data, table.nbytes): table.offset or 0 for table in tensors if _is_outside(table)}  # type: ignore[union-attr]
    program_file.save(path, _models(graph, source), CLASSES, VERSION, outside)


def _graph(path: Path) -> ir.Model:
    from pipelines.graph import io  # with onnx, which only the first use of a file needs

    return io.load_mapped(path)


def _is_outside(tensor: ir.TensorProtocol | None) -> bool:
    import onnx_ir as ir

    return isinstance(tensor, ir.ExternalTensor)


def _models(model: ir.Model, path: Path) -> list[ClickModel]:
    from pipelines.kernels.recommenders import parallel_embedding
    from pipelines.kernels.recommenders.from_graph import click_program

    models = []
    with readable(path):
        inputs = [(str(value.name), *_port(value)) for value in model.graph.inputs]
        outputs = [str(value.name) for value in model.graph.outputs]
        shared = SharedInputs(**json.loads(text)) if (text := model.metadata_props.get(SHARED)) else None
        for node in model.graph:
            if (node.domain, node.op_type) == (DOMAIN, ClickProgram.name):
                fed, program = _names(node.inputs[:3]), click_program(node)
                models.append(ClickModel(str(node.name), inputs, fed, outputs, program, shared))
            elif (node.domain, node.op_type) == (DOMAIN, parallel_embedding.PARALLEL_EMBEDDING) and not models:
                program = parallel_embedding.program_of(node)
                return [ClickModel("folded", inputs, [*_names(node.inputs[:2]), None], outputs, program)]
    if not models:
        raise RequestError(
            f"{path} has no {ClickProgram.name} operator; the engine native runs the native.onnx of a model folder"
        )
    return models


def _names(values: Sequence[ir.Value | None]) -> list[str | None]:
    return [None if value is None else str(value.name) for value in values]


def _port(value: ir.Value) -> tuple[str, list[int | None]]:
    """Returns dtype and shape of an input."""
    assert value.dtype is not None and value.shape is not None
    return value.dtype.numpy().str, [size if isinstance(size, int) else None for size in value.shape]
