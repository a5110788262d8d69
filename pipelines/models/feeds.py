"""Feeds of an ONNX graph from .npz files: one batch, or one feed per run if inputs share no sample axis."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.batches import Batch, joined, length
from pipelines.core.errors import RequestError
from pipelines.engines.session import Port
from pipelines.graph import query, sample_axis
from pipelines.models.npz import read_arrays, require_samples

LABEL = "label"  # name of the label array in an evaluation .npz
logger = logging.getLogger(__name__)


def fixed_batch(model: ir.Model) -> int | None:
    """Returns the fixed batch size of a graph.

    Args:
        model: ONNX graph.

    Returns:
        Batch size; None if it is dynamic or differs between inputs.
    """
    sizes = {
        (query.dimensions(value) or [None])[0]
        for value in model.graph.inputs
        if value.name not in model.graph.initializers
    }
    return sizes.pop() if len(sizes) == 1 else None


def shares_sample_axis(model: ir.Model) -> bool:
    """Returns whether the first axis of all inputs is the sample axis, see `pipelines.graph.sample_axis`.

    Args:
        model: ONNX graph.
    """
    return sample_axis.is_shared(model.graph)


def _inputs(model: ir.Model) -> list[ir.Value]:
    """Returns the inputs of a graph without initializers."""
    return [value for value in model.graph.inputs if value.name not in model.graph.initializers]


def read_feeds(model: ir.Model, data: Any, label: bool = False) -> list[Batch]:
    """Reads .npz files as feeds of a graph: one batch if all samples fit into one, otherwise one feed per run.

    A file holds the graph's inputs if its shapes fit. Otherwise it holds feeds stacked along an additional first axis;
    a feed may lack the batch axis. Arrays of other dtypes are cast, with a warning, if no value is lost.

    Args:
        model: ONNX graph.
        data: .npz files (see `npz_files`).
        label: Whether the files may have an array `LABEL`, which is kept.

    Returns:
        Feeds {graph input: array}.

    Raises:
        RequestError: A file does not fit the graph.
    """
    paths = npz_files(data)
    dims = {str(value.name): query.dimensions(value) for value in _inputs(model)}
    ports, batched, feeds, messages = input_ports(model), shares_sample_axis(model), list[Batch](), dict[str, None]()
    for path in paths:
        arrays = read_arrays(path)
        labels = {LABEL: arrays.pop(LABEL)} if label and LABEL in arrays and LABEL not in dims else {}
        if set(arrays) != set(dims):
            raise _misfit(ports, arrays, path, label)
        for name in dims:
            arrays[name] = _cast(name, arrays[name], ports[name].dtype, path, messages)
        if all(_admits(array.shape, dims[name], batched) for name, array in arrays.items()):
            if batched:
                require_samples(path, {**arrays, **labels})
            feeds.append({**arrays, **labels})
            continue
        if labels:
            raise _misfit(ports, arrays, path, label)
        stacked = _unstacked(arrays, dims)
        if not stacked:
            raise _misfit(ports, arrays, path, label)
        feeds += stacked
    for message in messages:
        logger.warning("%s", message)
    alike = {tuple((name, array.dtype, array.shape[1:]) for name, array in sorted(feed.items())) for feed in feeds}
    return [joined(feeds)] if batched and len(alike) == 1 else feeds


def npz_files(data: Any) -> list[Path]:
    """Finds .npz files.

    Args:
        data: Path of a file or folder, or a list of them.

    Returns:
        Paths; the files of a folder in the order of their names.

    Raises:
        RequestError: There are no .npz files.
    """
    paths = []
    for entry in data if isinstance(data, list | tuple) else [data]:
        path = Path(entry)
        paths += sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not paths:
        raise RequestError(f"no .npz among {data}; give an .npz with one array per graph input, or a folder of them")
    return paths


def _admits(shape: Sequence[int], dims: Sequence[int | None] | None, batched: bool) -> bool:
    """Returns whether an array fits the dimensions of an input (None: dynamic); `batched` ignores the first one."""
    if dims is None:
        return True
    pairs = list(zip(shape, dims, strict=False))
    return len(shape) == len(dims) and all(dim in (None, size) for size, dim in pairs[1 if batched else 0 :])


def _unstacked(arrays: Batch, dims: dict[str, list[int | None] | None]) -> list[Batch]:
    """Splits arrays along their first axis into feeds of the graph; [] if they do not fit."""
    if {array.ndim > 0 for array in arrays.values()} != {True} or len({len(array) for array in arrays.values()}) > 1:
        return []
    shapes = {name: _sample_shape(array.shape[1:], dims[name]) for name, array in arrays.items()}
    return [
        {name: np.asarray(array[i]).reshape(shapes[name] or ()) for name, array in arrays.items()}
        for i in range(length(arrays) if None not in shapes.values() else 0)
    ]


def _sample_shape(shape: tuple[int, ...], dims: list[int | None] | None) -> tuple[int, ...] | None:
    """Returns the shape of a feed, with the batch axis added if it is missing; None if it does not fit."""
    if _admits(shape, dims, False):
        return shape
    for axis, dim in enumerate(dims or []):
        longer = (*shape[:axis], 1, *shape[axis:])
        if dim in (None, 1) and _admits(longer, dims, False):
            return longer
    return None


def _cast(name: str, array: NDArray[Any], dtype: Any, path: Path, messages: dict[str, None]) -> NDArray[Any]:
    """Casts an array to the dtype of an input, and adds a message to `messages` if it differs.

    Casts between floats may round. Raises RequestError if another cast would change a value.
    """
    dtype = np.dtype(dtype)
    if array.dtype == dtype or array.dtype.kind not in "biuf" or dtype.kind not in "biuf":
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype)
        if array.dtype.kind == dtype.kind == "f":
            kept = bool((np.isfinite(result) | ~np.isfinite(array)).all())
        else:
            kept = bool(np.isfinite(array).all()) and np.array_equal(result.astype(array.dtype), array)
            kept = kept and (dtype.kind == "b" or np.array_equal(result < 0, array < 0))
    if not kept:
        raise RequestError(
            f"{path} holds {name} as {array.dtype}; expected {dtype}, which cannot hold its values; save it as {dtype}"
        )
    messages[f"{name} is cast from {array.dtype} to {dtype}, the dtype of the input ({path})"] = None
    return result


def input_ports(model: ir.Model) -> dict[str, Port]:
    """Returns the dtype and shape of every input of a graph, as `Session.inputs`.

    Args:
        model: ONNX graph.
    """
    inputs = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    return {
        str(value.name): Port(ir.DataType(value.dtype or 1).numpy(), tuple(query.dimensions(value) or ()))
        for value in inputs
    }


def _misfit(ports: dict[str, Port], arrays: Batch, source: Any, label: bool = False) -> RequestError:
    """Returns the error for arrays of `source` that do not fit the inputs; `label`: whether labels are allowed."""
    actual = ", ".join(f"{name} {array.dtype} [{', '.join(map(str, array.shape))}]" for name, array in arrays.items())
    expected = ", ".join(
        f"{name} {port.dtype} [{', '.join(str(size or 'n') for size in port.shape)}]" for name, port in ports.items()
    )
    more = f", and {LABEL} if known" if label else ""
    return RequestError(f"{source} holds {actual or 'nothing'}; expected the graph's inputs, {expected}{more}")
