"""Engine sessions of a translation model's graphs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engines.catalog import load
from pipelines.engines.session import Session
from pipelines.models.folder import ModelFolder, derived_graph
from pipelines.models.pipeline import PRECISIONS
from zoo.translation.data.tokens import LOGITS, MEMORY, SOURCE, TARGET

if TYPE_CHECKING:  # onnx, which the native engine does not need
    from zoo.translation.search.step_graph import Cache

ENCODER = ([SOURCE], [MEMORY])  # inputs and outputs of the encoder's part of the graph


def split_sessions(path: Path, engine: str, threads: int = 1, precision: str = "") -> tuple[Session, Session]:
    """Opens encoder and decoder of a frozen graph, without caches.

    Args:
        path: A graph that `zoo.translation.export.freeze.export` wrote, rewritten or quantized.
        engine: Name of the engine.
        threads: Number of threads.
        precision: Precision in which the engine computes; "" for that of the graph.

    Returns:
        Sessions of the encoder (source -> memory) and of the decoder (source, memory, target -> logits).
    """
    from pipelines.graph import edit, io

    whole = io.load(path)
    cuts = (ENCODER, ([SOURCE, MEMORY, TARGET], [LOGITS]))
    encoder, decoder = (
        load(path, engine, threads, precision, io.serialized(edit.extract(whole, *cut))) for cut in cuts
    )
    return encoder, decoder


def is_int8(path: Path) -> bool:
    """Returns whether an ONNX file holds int8 weights.

    Args:
        path: The file.
    """
    import onnx_ir as ir

    from pipelines.graph import io

    return any(value.dtype == ir.DataType.INT8 for value in io.load(path).graph.initializers.values())


def search_session(
    folder: ModelFolder, model: Path | None, engine: str, threads: int, precision: str, banned: Sequence[int] = ()
) -> Session:
    """Opens beam search as one graph.

    Args:
        folder: The model folder; the graph is cached beside its source.
        model: Another ONNX file, or None for that of the folder.
        engine: Name of the engine.
        threads: Number of threads.
        precision: Precision of the folder's graph.
        banned: Tokens that are never chosen; the same in every call for a folder.

    Returns:
        The session, see `zoo.translation.search.loop_graph.search`.

    Raises:
        RequestError: No decoding step can be derived from the graph.
    """
    from pipelines.graph import io  # with onnx, which the native engine does not need
    from zoo.translation.search.kv_cache import incremental_model
    from zoo.translation.search.loop_graph import GRAPH_VERSION, search

    if model is None:
        source = PRECISIONS[precision]
        path = derived_graph(
            folder, source, "search", GRAPH_VERSION, lambda graph: search(incremental_model(graph), banned=banned)
        )
        return load(path, engine, threads, precision)
    with tempfile.TemporaryDirectory() as scratch:
        path = io.save_mapped(
            search(incremental_model(io.load(model)), banned=banned), Path(scratch) / model.name, io.PAGE
        )
        return load(path, engine, threads)  # the weights are mapped: their file may go


def step_sessions(
    folder: ModelFolder, model: Path | None, engine: str, threads: int, precision: str
) -> tuple[Session, Session, list[Cache]]:
    """Opens the encoder and the decoding step.

    Args:
        folder: The model folder; the graphs are cached beside their source.
        model: Another ONNX file, or None for that of the folder.
        engine: Name of the engine.
        threads: Number of threads.
        precision: Precision of the folder's graph.

    Returns:
        Sessions of encoder and step, and the caches of the step.

    Raises:
        RequestError: No decoding step can be derived from the graph.
    """
    from pipelines.graph import io
    from zoo.translation.search.kv_cache import IncrementalModel, incremental_model, read_caches, step_with_caches
    from zoo.translation.search.loop_graph import GRAPH_VERSION

    made: list[IncrementalModel] = []

    def both(graph: Any) -> IncrementalModel:
        made[:] = made or [incremental_model(graph)]
        return made[0]

    if model is None:
        source = PRECISIONS[precision]
        forms: dict[str, Callable[[Any], Any]] = {
            "encoder": lambda graph: both(graph).encoder,
            "step": lambda graph: step_with_caches(both(graph)),
        }
        paths = [derived_graph(folder, source, kind, GRAPH_VERSION, make) for kind, make in forms.items()]
        sessions = [load(path, engine, threads, precision) for path in paths]
        return sessions[0], sessions[1], read_caches(io.load(paths[1]))
    networks = both(io.load(model))
    with tempfile.TemporaryDirectory() as scratch:
        parts = {"encoder": networks.encoder, "step": step_with_caches(networks)}
        paths = [io.save_mapped(part, Path(scratch) / f"{kind}.onnx", io.PAGE) for kind, part in parts.items()]
        sessions = [load(path, engine, threads) for path in paths]
    return sessions[0], sessions[1], networks.caches
