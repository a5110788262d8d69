"""Exports a trained recommender of any family to fp32.onnx."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from pipelines.graph import io, query
from zoo.recommenders.data.features import Features
from zoo.recommenders.export.fx_export import export
from zoo.recommenders.models.checkpoints import MODEL, load_checkpoint


def freeze(folder: str | Path, build: Callable[[Features, Any], nn.Module], settings: type[Any]) -> dict[str, Any]:
    """Writes fp32.onnx (see `export`) from model.pt and train.json. Equal weights give equal bytes.

    Args:
        folder: Model folder.
        build: Creates the network from features and settings.
        settings: Dataclass of the family's settings.

    Returns:
        {"parameters", "operators": {type: count}, "bytes": {file: bytes}}.

    Raises:
        RequestError: A file is missing or damaged, or does not fit the network.
    """
    folder = Path(folder)
    return write_graph(*load_checkpoint(folder, build, settings), folder, MODEL)


def write_graph(model: nn.Module, features: Features, folder: Path, checkpoint: str) -> dict[str, Any]:
    """Writes fp32.onnx of a network.

    Args:
        model: Network in evaluation mode.
        features: Features of the network.
        folder: Folder to write to.
        checkpoint: Name of the file with the weights, for its size.

    Returns:
        As `freeze`.
    """
    own = getattr(model, "exported", None)
    exported = export(model, features) if own is None else own()
    path = io.save(exported, folder / "fp32.onnx")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "operators": query.op_counts(exported),
        "bytes": {file.name: file.stat().st_size for file in (folder / checkpoint, path)},
    }
