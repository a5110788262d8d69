"""Exports a trained recommender of any family to fp32.onnx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import read_json
from pipelines.core.plain import from_plain
from pipelines.graph import io, query
from zoo.recommenders.data.features import Features
from zoo.recommenders.export.fx_export import export
from zoo.recommenders.training.train import MODEL, training_record, weights_of
from zoo.training.runs import fill


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
        "parameters": sum(each.numel() for each in model.parameters()),
        "operators": query.op_counts(exported),
        "bytes": {each.name: each.stat().st_size for each in (folder / checkpoint, path)},
    }


def load_checkpoint(
    folder: Path, build: Callable[[Features, Any], nn.Module], settings: type[Any]
) -> tuple[nn.Module, Features]:
    """Loads the trained network of a folder.

    Args:
        folder: Folder with model.pt and train.json.
        build: Creates the network from features and settings.
        settings: Dataclass of the family's settings.

    Returns:
        Network in evaluation mode, and its features.

    Raises:
        RequestError: A file is missing or damaged, or does not fit the network.
    """
    about = read_json(folder / "train.json")
    try:
        config = restore_config(settings, about["config"])
        features = Features.from_json(about["features"])
        state = torch.load(folder / MODEL, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    except RequestError:
        raise
    except Exception as error:  # torch, zipfile and pickle raise their own kinds for every sort of damage
        raise RequestError(f"{folder} holds no trained recommender ({one_line(error)}); train it again") from error
    model = build(features, config)
    fill(model, state, folder / MODEL)
    return model.eval(), features


def restore_config(settings: type[Any], config: Mapping[str, Any]) -> Any:
    """Restores the settings that a model was trained with. Settings that the family no longer has are ignored.

    Args:
        settings: Dataclass of the family's settings.
        config: {name: plain value}.

    Returns:
        Instance of `settings`.
    """
    known = {each.name for each in fields(settings)}
    return settings(**from_plain({name: value for name, value in config.items() if name in known}))


def load_network(
    folder: Path, build: Callable[[Features, Any], nn.Module], settings: type[Any]
) -> tuple[dict[str, Any], nn.Module]:
    """Loads the network of a folder with fp32.onnx, with or without its checkpoint.

    Args:
        folder: Model folder.
        build: Creates the network from features and settings.
        settings: Dataclass of the family's settings.

    Returns:
        ({"features": preprocessing, "config": settings}, trained network in evaluation mode).
    """
    about = training_record(folder)
    config = restore_config(settings, about["config"])
    model = build(Features.from_json(about["features"]), config)
    fill(model, weights_of(model, folder / "fp32.onnx"), folder)
    return {"features": about["features"], "config": config}, model.eval()
