"""Initialization of an image classifier from the weights of a model folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.compression.channels import resize
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, sha256
from pipelines.graph import edit, io
from zoo.training.runs import fill

if TYPE_CHECKING:
    from torch import nn

MODEL = "model.pt"


def describe(folder: Path) -> dict[str, Any]:
    """Reads the description of the network in a model folder.

    Args:
        folder: Model folder.

    Returns:
        {"source": file of the weights, "features": preprocessing} and, if known, "arch", "width", "classes" (names or
        their number) and "shapes" (of a pruned network).

    Raises:
        RequestError: The folder holds no image model.
    """
    source = folder / MODEL
    if (folder / "train.json").is_file():
        about = read_json(folder / "train.json")
    else:  # published, or trained here and shipped without model.pt
        card, source = read_json(folder / "card.json"), folder / "fp32.onnx"
        about = {
            **card.get("training", {}).get("config", {}),
            **card,
            **card.get("weights", {}),
            "features": card.get("preprocessing"),
        }
    if not about.get("features") or not source.is_file():
        raise RequestError(f"found no image model in {folder}; start from one that zoo train or zoo download wrote")
    return {key: about[key] for key in ("arch", "width", "classes", "shapes", "features") if key in about} | {
        "source": source
    }


def load_weights(model: nn.Module, about: dict[str, Any], classes: Sequence[str] | int) -> str:
    """Loads the weights of a model folder into a network.

    The head (last linear layer) is not loaded if the classes differ.

    Args:
        model: The network.
        about: Description of the folder (see `describe`).
        classes: Classes of the network, or their number.

    Returns:
        Digest of the weights.
    """
    import torch
    from torch import nn

    source: Path = about["source"]
    own = model.state_dict()
    if source.name == MODEL:
        state = torch.load(source, map_location="cpu", weights_only=True)["state_dict"]
    else:
        loaded = io.load(source)
        edit.expand_fp16(loaded)
        values = {name: value.const_value for name, value in loaded.graph.initializers.items()}
        state = {
            name: torch.from_numpy(tensor.numpy().copy())
            for name, tensor in values.items()
            if name in own and tensor is not None
        }
    head = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    if about.get("classes") != classes:
        state |= {name: own[name] for name in own if name.startswith(f"{head}.")}
    fill(model, state, source)
    return sha256(source)


def network(folder: Path, build: Callable[..., nn.Module]) -> tuple[dict[str, Any], nn.Module]:
    """Opens the trained network of a model folder.

    Args:
        folder: Model folder.
        build: Builds the network (see `zoo.vision.export.freeze.freeze`).

    Returns:
        Description of the folder (see `describe`), and the network in inference mode.

    Raises:
        RequestError: The folder holds no network.
    """
    about = describe(folder)
    try:
        classes = about["classes"]
        count = classes if isinstance(classes, int) else len(classes)
        model = resize(build(about["arch"], count, about.get("width", 1)), about.get("shapes", {}))
    except (KeyError, TypeError) as error:
        raise RequestError(
            f"{folder} does not say what network it holds ({error!r}); train or download the model again"
        ) from error
    load_weights(model, about, classes)
    return about, model.eval()
