"""Trained networks: read from model folders, to go on from or to learn from."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import zoo
from pipelines.core.console import console
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, replacing
from pipelines.graph import edit, io, query
from pipelines.models.hub import CARD
from zoo.training.runs import fill
from zoo.translation.data.parallel_text import Vocabulary
from zoo.translation.data.vocabularies import ImportedVocabulary, open_vocabulary
from zoo.translation.training.config import FROZEN, Settings

if TYPE_CHECKING:
    import torch

    from zoo.translation.models.transformer import Transformer

MODEL = "model.pt"
STATE = "checkpoint/state.pt"


def described(folder: Path) -> dict[str, Any]:
    """The features of a model folder, and "source": the file with its weights, of training or frozen."""
    if (folder / MODEL).is_file() and (folder / "train.json").is_file():
        features, source = read_json(folder / "train.json").get("features"), folder / MODEL
    else:
        features, source = read_json(folder / "card.json").get("preprocessing"), folder / "fp32.onnx"
    if (
        not isinstance(features, dict)
        or not {"pre_norm", "languages", "max_length"} <= features.keys()
        or not {"arch", "form"} & features.keys()
        or not source.is_file()
    ):
        raise RequestError(
            f"found no translation model in {folder}; start from one that zoo train or zoo download wrote"
        )
    return {**features, "source": source}


def kept_of(folder: Path) -> dict[str, Any]:
    """What a model that starts from this one, with its vocabulary, keeps of its features: its shortlist and search."""
    card = folder / CARD
    features = read_json(card).get("preprocessing", {}) if card.is_file() else {}
    return {name: features[name] for name in ("shortlist", "search") if name in features}


def copy_kept(kept: Mapping[str, Any], folder: Path, output: Path) -> None:
    """Copy the file of the shortlist among `kept_of(folder)`, if it is there."""
    if (name := kept.get("shortlist")) is not None:
        with replacing(output / name) as temporary:
            shutil.copyfile(folder / name, temporary)


def require_own(folder: str | Path, about: dict[str, Any]) -> None:
    """Raise RequestError for a model, as `described`, that came from another toolkit: no training goes on from it."""
    if "arch" not in about:
        raise RequestError(
            f"{folder} was imported from another toolkit, whose models cannot be trained on; teach one of the zoo's "
            f"own by it: zoo train transformer-mt --teacher {folder}"
        )


def state_of(source: Path, model: Transformer) -> dict[str, torch.Tensor]:
    """The state dict in a file that training or freezing wrote: frozen weights of linear layers are transposed."""
    import torch
    from torch import nn

    if source.name == MODEL:
        return dict(torch.load(source, map_location="cpu", weights_only=True)["state_dict"])
    loaded = io.load(source)
    edit.expand_fp16(loaded)
    values = {name: query.constant(each) for name, each in loaded.graph.initializers.items()}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = {
        name: array.T if name in linear else array
        for name, array in values.items()
        if array is not None and name in model.state_dict()
    }
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in found.items()}


def load_model(folder: str | Path) -> tuple[Transformer, Vocabulary | ImportedVocabulary]:
    """The trained network of a model folder, and its vocabulary. Raises RequestError where the folder holds none."""
    from zoo.translation.models.config import Form
    from zoo.translation.models.transformer import Transformer, build

    about = described(Path(folder))
    vocabulary = open_vocabulary(Path(folder), about)
    if "form" in about:
        sizes: dict[str, Any] = {"vocabulary": len(vocabulary), "source_vocabulary": vocabulary.sources}
        form = Form.from_json(about["form"])
        model = Transformer(form, pre_norm=about["pre_norm"], dropout=0.0, **sizes)
    else:
        model = build(about["arch"], len(vocabulary), pre_norm=about["pre_norm"])
    fill(model, state_of(about["source"], model), about["source"])
    return model.eval(), vocabulary


def _opened(name: str) -> tuple[Transformer, Vocabulary | ImportedVocabulary]:
    """The network of a model, by its name or folder, and its vocabulary."""
    folder = zoo.load(name)
    folder.ensure("fp32.onnx")
    return load_model(folder.path)


def teacher_of(config: Settings, student: Transformer, vocabulary: Vocabulary) -> Transformer:
    """The network whose distributions are learned. Raises RequestError for one of another vocabulary than the
    student's.
    """
    found, known = _opened(config.teacher)
    found.requires_grad_(False)
    if (known.pieces, known.source_pieces) != (vocabulary.pieces, vocabulary.source_pieces):
        raise RequestError(
            f"{config.teacher} has {len(known)} pieces that are not the student's {len(vocabulary)}; soft needs the "
            "same vocabulary: --set inherit=true"
        )
    sizes, own = ((each.form.decoder, each.form.width) for each in (found, student))
    if config.hints and sizes != own:
        raise RequestError(
            f"{config.teacher} has {sizes[0]} layers of width {sizes[1]} in its decoder, the student {own[0]} of "
            f"{own[1]}; hints need the same: --set hints=0"
        )
    return found


def inherit(model: Transformer, config: Settings) -> None:
    """Begin with the teacher's weights where names and shapes are the same. In place. Raises RequestError where that is
    not the whole encoder, which then cannot stay frozen.
    """
    teacher, _ = _opened(config.teacher)
    own, given = model.state_dict(), teacher.state_dict()
    same = {name: each for name, each in given.items() if name in own and own[name].shape == each.shape}
    lost = [name for name in own if name.startswith(FROZEN) and name not in same]
    if config.frozen and (lost or _encoding(model) != _encoding(teacher)):
        raise RequestError(
            f"found frozen for the encoder of {config.arch}, which is not that of {config.teacher}; leave it out, or "
            "take an arch with the same encoder"
        )
    model.load_state_dict(same, strict=False)
    console.print(f"{len(same)} of {len(own)} weights begin as the teacher's", highlight=False, soft_wrap=True)


def _encoding(network: Transformer) -> tuple[Any, ...]:
    """What an encoder computes with its weights, where their names and shapes do not tell."""
    form = network.form
    layers = (form.encoder, form.heads, form.activation, form.epsilon, network.pre_norm, form.final_norm)
    return *layers, form.scaled, form.embedding_norm, form.shared_source, form.positions
