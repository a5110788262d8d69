"""Sessions of a translation model's graphs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engines.catalog import load
from pipelines.engines.session import Session
from pipelines.models.pipeline import PRECISIONS
from pipelines.models.stages import ModelFolder, derived_graph

if TYPE_CHECKING:  # onnx, which the native engine does not need
    from zoo.translation.search.step_graph import Cache

ENCODER = (["source"], ["memory"])  # where its part of the graph begins and ends


def split_sessions(path: Path, engine: str, threads: int = 1, precision: str = "") -> tuple[Session, Session]:
    """Sessions of the encoder (source -> memory) and the decoder (source, memory, target -> logits) of a graph as
    `freeze` writes it.
    """
    from pipelines.graph import edit, io

    whole = io.load(path)
    cuts = (ENCODER, (["source", "memory", "target"], ["logits"]))
    encoder, decoder = (
        load(path, engine, threads, precision, io.serialized(edit.extract(whole, *cut))) for cut in cuts
    )
    return encoder, decoder


def is_int8(path: Path) -> bool:
    """Whether an ONNX file holds int8 weights."""
    import onnx_ir as ir

    from pipelines.graph import io

    return any(value.dtype == ir.DataType.INT8 for value in io.load(path).graph.initializers.values())


def search_session(folder: ModelFolder, model: Path | None, engine: str, threads: int, precision: str) -> Session:
    """A session of the beam search as one graph. Raises RequestError where the decoder has no such form."""
    from pipelines.graph import io  # with onnx, which the native engine does not need
    from zoo.translation.search.kv_cache import incremental
    from zoo.translation.search.loop_graph import FORM, search

    if model is None:
        source = PRECISIONS[precision]
        path = derived_graph(folder, source, "search", FORM, lambda graph: search(incremental(graph)))
        return load(path, engine, threads, precision)
    with tempfile.TemporaryDirectory() as scratch:
        path = io.save_mapped(search(incremental(io.load(model))), Path(scratch) / model.name, io.PAGE)
        return load(path, engine, threads)  # the weights are mapped: their file may go


def step_sessions(
    folder: ModelFolder, model: Path | None, engine: str, threads: int, precision: str
) -> tuple[Session, Session, list[Cache]]:
    """Sessions of the encoder and of a decoding step, and its caches. Raises RequestError where the decoder has no
    such form.
    """
    from pipelines.graph import io
    from zoo.translation.search.kv_cache import Incremental, caches_of, incremental, step_of
    from zoo.translation.search.loop_graph import FORM

    made: list[Incremental] = []

    def both(graph: Any) -> Incremental:
        made[:] = made or [incremental(graph)]
        return made[0]

    if model is None:
        source = PRECISIONS[precision]
        forms: dict[str, Callable[[Any], Any]] = {
            "encoder": lambda graph: both(graph).encoder,
            "step": lambda graph: step_of(both(graph)),
        }
        paths = [derived_graph(folder, source, kind, FORM, make) for kind, make in forms.items()]
        sessions = [load(path, engine, threads, precision) for path in paths]
        return sessions[0], sessions[1], caches_of(io.load(paths[1]))
    found = both(io.load(model))
    with tempfile.TemporaryDirectory() as scratch:
        parts = {"encoder": found.encoder, "step": step_of(found)}
        paths = [io.save_mapped(each, Path(scratch) / f"{kind}.onnx", io.PAGE) for kind, each in parts.items()]
        sessions = [load(path, engine, threads) for path in paths]
    return sessions[0], sessions[1], found.caches
