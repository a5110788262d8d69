"""Export of trained or published weights to fp32.onnx, shared by all image classifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipelines.compression.channels import resize
from pipelines.core.errors import RequestError, not_installed, one_line
from pipelines.core.files import read_json
from pipelines.data.preprocess import Preprocess
from pipelines.graph import io, query
from pipelines.models.hub import CARD
from zoo.training.runs import fill
from zoo.vision.export.fx_export import export

State = dict[str, torch.Tensor]
CHECKPOINT = "model.pt"


def freeze(
    folder: str | Path, build: Callable[..., nn.Module], formats: Mapping[str, Callable[[Path], State]] | None = None
) -> dict[str, Any]:
    """Writes fp32.onnx from the weights of a model folder (see `export`). The same weights give the same bytes.

    A folder with train.json holds model.pt of a training of this package. Otherwise the card names the weights ("file",
    "format"), the architecture ("arch", "width") and the classes.

    Args:
        folder: Model folder.
        build: Builds the network of (architecture, classes, width multiplier).
        formats: Further weight formats: functions from the file to a state dict.

    Returns:
        Name of the network, and its numbers of parameters, operators and bytes.

    Raises:
        RequestError: A file is missing or damaged, or does not fit the network; lists all mismatches.
    """
    folder = Path(folder)
    try:
        about = _about(folder)
        file, kind, arch = folder / about["file"], about["format"], about["arch"]
        preprocess = Preprocess.from_json(about["preprocessing"])
        network = build(arch, int(about["classes"]), float(about.get("width", 1)))
        model = resize(network, about.get("shapes", {}))
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"{folder} does not say what network it holds ({error!r}); train or download the model again"
        ) from error
    readers = {"torch": read_torch, **(formats or {})}
    if kind not in readers:
        raise RequestError(f"{folder / CARD}: weights are in the format {kind!r}; supported: {', '.join(readers)}")
    fill(model, _read(readers[kind], file), file)
    exported = export(model, preprocess)
    path = io.save(exported, folder / "fp32.onnx")
    return {
        "network": arch,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "operators": query.op_counts(exported),
        "bytes": {stored.name: stored.stat().st_size for stored in (file, path)},
    }


def _about(folder: Path) -> dict[str, Any]:
    """Returns {"file", "format", "arch", "classes" (number), "preprocessing"} and, if known, "width" and "shapes"."""
    if (folder / "train.json").is_file():
        trained = read_json(folder / "train.json")
        options = {key: trained[key] for key in ("arch", "width", "shapes") if key in trained}
        return {
            **options,
            "file": CHECKPOINT,
            "format": "torch",
            "classes": len(trained["classes"]),
            "preprocessing": trained["features"],
        }
    card = read_json(folder / CARD)
    return {**card["weights"], "classes": card["classes"], "preprocessing": card["preprocessing"]}


def _read(reader: Callable[[Path], State], file: Path) -> State:
    if not file.is_file():
        raise RequestError(f"{file} is missing; train or download the model again")
    try:
        return reader(file)
    except RequestError:
        raise
    except ModuleNotFoundError as error:
        raise not_installed(str(file), error.name, "int8-zoo[train]") from error
    except (
        Exception
    ) as error:  # torch, pickle, safetensors, h5py and flatbuffers raise their own kinds for every sort of damage
        raise RequestError(
            f"cannot read the weights in {file} ({one_line(error)}); train or download the model again"
        ) from error


def read_torch(file: Path) -> State:
    """Reads the state dict of a torch or safetensors file; a key "state_dict" or "model" around it is removed.

    Args:
        file: Path of the file.

    Returns:
        {name: tensor}.
    """
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(file))
    content = torch.load(file, map_location="cpu", weights_only=True)
    return dict(next((content[key] for key in ("state_dict", "model") if key in content), content))
