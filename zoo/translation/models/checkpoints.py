"""Reads trained networks from model folders, to continue training or as teachers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import zoo
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError
from pipelines.core.files import copy_file, read_json
from pipelines.graph import edit, io, query
from pipelines.models.family import network_of
from pipelines.models.hub import CARD
from zoo.training.runs import fill
from zoo.translation.data.parallel_text import Vocabulary
from zoo.translation.data.vocabularies import ImportedVocabulary, open_vocabulary
from zoo.translation.train_config import FROZEN, TrainingConfig

if TYPE_CHECKING:
    import torch

    from zoo.translation.models.transformer import Transformer

MODEL = "model.pt"
STATE = "checkpoint/state.pt"


def read_features(folder: Path) -> dict[str, Any]:
    """Reads the features of a model folder.

    Args:
        folder: A folder that training, `zoo import` or `zoo download` wrote.

    Returns:
        The features, and "source": the file of the weights.

    Raises:
        RequestError: The folder holds no translation model.
    """
    if (folder / CARD).is_file() and not (folder / MODEL).is_file():
        opened = zoo.load(folder)
        if opened.restorable:
            opened.verify(opened.weights)
    if (folder / MODEL).is_file() and (folder / "train.json").is_file():
        features, source = read_json(folder / "train.json").get("features"), folder / MODEL
    else:
        features, source = read_json(folder / CARD).get("preprocessing"), folder / "fp32.onnx"
        if features and not source.is_file():  # removed after the next stage was built, see `Family.transient`
            zoo.load(folder).ensure(source.name)
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


def inherited_features(folder: Path) -> dict[str, Any]:
    """Returns the features that a model with the same vocabulary inherits.

    Args:
        folder: The model folder.

    Returns:
        "shortlist" and "search", if the folder has them.
    """
    card = folder / CARD
    features = read_json(card).get("preprocessing", {}) if card.is_file() else {}
    return {name: features[name] for name in ("shortlist", "search") if name in features}


def copy_shortlist(features: Mapping[str, Any], folder: Path, output: Path) -> None:
    """Copies the shortlist to a new model folder, if there is one.

    Args:
        features: Result of `inherited_features(folder)`.
        folder: The model folder.
        output: The new model folder.
    """
    if (name := features.get("shortlist")) is not None:
        copy_file(folder / name, output / name)


def require_own(folder: str | Path, about: dict[str, Any]) -> None:
    """Checks that a model can be pruned.

    Args:
        folder: Its folder, for the message.
        about: Its features, see `read_features`.

    Raises:
        RequestError: The model was imported from another toolkit.
    """
    if "arch" not in about:
        raise RequestError(
            f"{folder} was imported from another toolkit, whose models cannot be pruned; distill it into a model of "
            f"the zoo: zoo train transformer-mt --teacher {folder}"
        )


def read_weights(source: Path, model: Transformer) -> dict[str, torch.Tensor]:
    """Reads a state dict.

    Args:
        source: A file of training or a frozen graph, whose weights of linear layers are transposed.
        model: The network that it is for.

    Returns:
        {name: weight}.
    """
    import torch
    from torch import nn

    if source.name == MODEL:
        return dict(torch.load(source, map_location="cpu", weights_only=True)["state_dict"])
    loaded = io.load(source)
    edit.expand_fp16(loaded)
    values = {name: query.constant(value) for name, value in loaded.graph.initializers.items()}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    arrays = {
        name: array.T if name in linear else array
        for name, array in values.items()
        if array is not None and name in model.state_dict()
    }
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}


def load_model(folder: str | Path, build: type[Transformer]) -> tuple[Transformer, Vocabulary | ImportedVocabulary]:
    """Reads the trained network of a model folder.

    Args:
        folder: The model folder.
        build: Class of the network.

    Returns:
        The network in evaluation mode, and its vocabulary.

    Raises:
        RequestError: The folder holds no translation model.
    """
    about = read_features(Path(folder))
    vocabulary = open_vocabulary(Path(folder), about)
    return open_network(about, vocabulary, build).eval(), vocabulary


def open_network(
    about: Mapping[str, Any],
    vocabulary: Vocabulary | ImportedVocabulary,
    build: type[Transformer],
    dropout: float = 0.0,
) -> Transformer:
    """Returns the network of a model folder with its weights.

    Args:
        about: Features of the folder, see `read_features`.
        vocabulary: Its vocabulary.
        build: Class of the network.
        dropout: Dropout probability.
    """
    from zoo.translation.models.config import ModelConfig

    pre_norm = bool(about["pre_norm"])
    if "form" in about:
        sizes: dict[str, Any] = {"vocabulary": len(vocabulary), "source_vocabulary": vocabulary.sources}
        model = build(ModelConfig.from_json(about["form"]), pre_norm=pre_norm, dropout=dropout, **sizes)
    else:
        model = build.of(about["arch"], len(vocabulary), pre_norm=pre_norm, dropout=dropout)
    fill(model, read_weights(about["source"], model), about["source"])
    return model


def _load(name: str) -> tuple[Transformer, Vocabulary | ImportedVocabulary]:
    """Loads the network and vocabulary of a model by its name or folder."""
    folder = zoo.load(name)
    return network_of(folder)[1], open_vocabulary(folder.path, read_features(folder.path))


def load_teacher(
    config: TrainingConfig, student: Transformer, vocabulary: Vocabulary | ImportedVocabulary
) -> Transformer:
    """Opens the teacher of soft targets.

    Args:
        config: The training recipe.
        student: The network to train.
        vocabulary: The student's vocabulary.

    Returns:
        The teacher, without gradients.

    Raises:
        RequestError: The vocabularies differ, or with `hints` the shapes of the decoders.
    """
    teacher, teacher_vocabulary = _load(config.teacher)
    teacher.requires_grad_(False)
    if (teacher_vocabulary.pieces, teacher_vocabulary.source_pieces) != (vocabulary.pieces, vocabulary.source_pieces):
        raise RequestError(
            f"{config.teacher} has {len(teacher_vocabulary)} pieces, which differ from the student's "
            f"{len(vocabulary)}; soft needs the same vocabulary: --set inherit=true"
        )
    sizes, own = ((network.config.decoder, network.config.width) for network in (teacher, student))
    if config.hints and sizes != own:
        raise RequestError(
            f"{config.teacher} has {sizes[0]} layers of width {sizes[1]} in its decoder, the student {own[0]} of "
            f"{own[1]}; hints need the same: --set hints=0"
        )
    return teacher


def inherit(model: Transformer, config: TrainingConfig) -> None:
    """Initializes a network, in place, with the teacher's weights of the same names and shapes.

    Args:
        model: The network to train.
        config: The training recipe.

    Raises:
        RequestError: The encoder is to stay frozen, but is not the teacher's.
    """
    teacher, _ = _load(config.teacher)
    own, inherited = model.state_dict(), teacher.state_dict()
    same = {name: tensor for name, tensor in inherited.items() if name in own and own[name].shape == tensor.shape}
    lost = [name for name in own if name.startswith(FROZEN) and name not in same]
    if config.frozen and (lost or _encoding(model) != _encoding(teacher)):
        raise RequestError(
            f"found frozen for {config.arch}, whose encoder differs from that of {config.teacher}; leave frozen "
            "out, or name an arch with the same encoder"
        )
    model.load_state_dict(same, strict=False)
    print_line(f"{len(same)} of {len(own)} weights are initialized from the teacher")


def _encoding(network: Transformer) -> tuple[Any, ...]:
    """Returns the properties of an encoder that its weights do not show."""
    model_config = network.config
    layers = (
        model_config.encoder,
        model_config.heads,
        model_config.activation,
        model_config.epsilon,
        network.pre_norm,
        model_config.final_norm,
        model_config.norm,
        model_config.attention_scale,
        model_config.bucket_distance,
        model_config.shared_buckets,
    )
    return *layers, model_config.scaled, model_config.embedding_norm, model_config.shared_source, model_config.positions
