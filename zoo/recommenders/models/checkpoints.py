"""Reads trained recommenders from model folders."""

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
from pipelines.graph import edit, io
from pipelines.models.hub import CARD, Card
from zoo.recommenders.data.features import Features
from zoo.recommenders.models.layers import Embeddings, empty_tables
from zoo.training.runs import fill

MODEL = "model.pt"
Build = Callable[[Features, Any], nn.Module]


def training_record(folder: Path) -> dict[str, Any]:
    """Reads settings and features of a model, with or without its checkpoint.

    Args:
        folder: Model folder.

    Returns:
        {"config", "features", ...} from train.json or from the card; "config" is {} for an imported graph.

    Raises:
        RequestError: The card has no training settings.
    """
    if (folder / "train.json").is_file():
        return read_json(folder / "train.json")  # type: ignore[no-any-return]
    card = read_json(folder / CARD)
    if "from" in card.get("weights", {}):  # it came as a graph, and was not trained here
        return {"config": {}, "features": card["preprocessing"]}
    try:
        return {"config": card["training"]["config"], "features": card["preprocessing"]}
    except (KeyError, TypeError) as error:
        raise RequestError(f"{folder} lacks its training settings; start from a model folder of zoo train") from error


def weights_of(model: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of a network from its exported graph.

    Args:
        model: Network; provides the values that are used only in training.
        path: fp32.onnx of the network.

    Returns:
        State dict of the network.
    """
    graph = io.load(path)
    edit.expand_fp16(graph)
    tensors = {name: value.const_value for name, value in graph.graph.initializers.items()}
    arrays = {name: torch.from_numpy(tensor.numpy().copy()) for name, tensor in tensors.items() if tensor is not None}
    renamed = getattr(model, "renamed", None)
    return state_of(model, arrays if renamed is None else renamed(arrays))


def state_of(model: nn.Module, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts exported weights to a state dict.

    Args:
        model: Network; provides the values that are used only in training.
        arrays: {name of the initializer given by `export`: tensor}.

    Returns:
        State dict of the network.
    """
    own = model.state_dict()
    state = {name: arrays.get(name, tensor) for name, tensor in own.items() if not name.endswith((".weight", ".bias"))}
    for path_of, module in model.named_modules():
        if isinstance(module, Embeddings):
            names = [f"{path_of}.{name}.table" for name in module.tables]
            if all(name in arrays for name in names):
                state[f"{path_of}.weight"] = torch.cat([arrays[name] for name in names])
        elif isinstance(module, nn.Linear | nn.LayerNorm):
            state |= {name: arrays[name] for kind in ("weight", "bias") if (name := f"{path_of}.{kind}") in arrays}
            if (kernel := f"{path_of}.kernel") in arrays:
                state[f"{path_of}.weight"] = arrays[kernel].T
        elif (restored := getattr(module, "restored", None)) is not None:
            state |= restored(arrays, path_of)
    return state


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
        features = Features.from_json(Card.shared(folder / CARD, about["features"]))
        del about
        state = torch.load(folder / MODEL, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    except RequestError:
        raise
    except Exception as error:  # torch, zipfile and pickle raise their own kinds for every sort of damage
        raise RequestError(f"{folder} holds no trained recommender ({one_line(error)}); train it again") from error
    with empty_tables():
        model = build(features, config)
    fill(model, state, folder / MODEL, assign=True)  # they are mapped from the file
    return model.eval(), features


def restore_config(settings: type[Any], config: Mapping[str, Any]) -> Any:
    """Restores the settings that a model was trained with.

    Settings that the family no longer has are ignored; those that it did not have yet get the values of `absent`.

    Args:
        settings: Dataclass of the family's settings.
        config: {name: plain value}.

    Returns:
        Instance of `settings`.
    """
    names = {field.name for field in fields(settings)}
    return settings(**from_plain({**settings.absent, **{k: setting for k, setting in config.items() if k in names}}))


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
