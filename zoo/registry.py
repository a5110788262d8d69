"""Model families and pretrained models: those of this package, and those of other packages.

Another package adds families and models by entry points of its metadata: in the group `int8_zoo.families` a family's
name = "module:FAMILY", in the group `int8_zoo.models` any name = "package", whose folder holds NAME/card.json and the
files that ship.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.models.family import Family
    from pipelines.models.hub import Hub

SHIPPED = Path(__file__).parent / "weights"
FAMILIES, MODELS = "int8_zoo.families", "int8_zoo.models"  # groups of entry points
BUILT_IN = {
    "wide-deep": "zoo.recommenders.models.wide_deep:WIDE_DEEP",
    "deepfm": "zoo.recommenders.models.deepfm:DEEPFM",
    "dcn-v2": "zoo.recommenders.models.dcn_v2:DCN_V2",
    "dlrm": "zoo.recommenders.models.dlrm:DLRM_FAMILY",
    "autoint": "zoo.recommenders.models.autoint:AUTOINT",
    "finalmlp": "zoo.recommenders.models.finalmlp:FINALMLP",
    "gdcn": "zoo.recommenders.models.gdcn:GDCN_FAMILY",
    "two-tower": "zoo.recommenders.models.two_tower:TWO_TOWER",
    "din": "zoo.recommenders.models.sequences.din:DIN_FAMILY",
    "bst": "zoo.recommenders.models.sequences.bst:BST_FAMILY",
    "sasrec": "zoo.recommenders.models.sequences.sasrec:SASREC",
    "mmoe": "zoo.recommenders.models.multitask.mmoe:MMOE",
    "ple": "zoo.recommenders.models.multitask.ple:PLE_FAMILY",
    "esmm": "zoo.recommenders.models.multitask.esmm:ESMM_FAMILY",
    "ranker": "zoo.recommenders.models.ranker:RANKER",
    "resnet50": "zoo.vision.models.resnet:RESNET50",
    "resnet26d": "zoo.vision.models.resnet:RESNET26D",
    "mobilenet-v1": "zoo.vision.models.mobilenet:MOBILENET_V1",
    "mobilenet-v2": "zoo.vision.models.mobilenet:MOBILENET_V2",
    "mobilenet-v3": "zoo.vision.models.efficientnet:MOBILENET_V3",
    "efficientnet-lite": "zoo.vision.models.efficientnet:EFFICIENTNET_LITE",
    "convnext": "zoo.vision.models.convnext:CONVNEXT",
    "vit": "zoo.vision.models.vision_transformer:VIT",
    "image-network": "zoo.vision.networks.family:IMAGE_NETWORK",
    "multi-vector-encoder": "zoo.texts.family:MULTI_VECTOR_ENCODER",
    "sparse-encoder": "zoo.texts.family:SPARSE_ENCODER",
    "fill-mask": "zoo.texts.family:FILL_MASK",
    "sentence-encoder": "zoo.texts.family:SENTENCE_ENCODER",
    "cross-encoder": "zoo.texts.family:CROSS_ENCODER",
    "zero-shot-classification": "zoo.texts.family:ZERO_SHOT",
    "text-classification": "zoo.texts.family:TEXT_CLASSIFICATION",
    "token-classification": "zoo.texts.family:TOKEN_CLASSIFICATION",
    "question-answering": "zoo.texts.family:QUESTION_ANSWERING",
    "transformer-mt": "zoo.translation.models.transformer:TRANSFORMER_MT",
}

NETWORK_OPTIONS = ("task", "labels", "preprocess", "confidence", "iou")  # of .onnx files, see `zoo.pipeline`
FORMER_NAMES = {"wide-deep-log": "wide-deep"}  # of families, in cards that earlier versions wrote

logger = logging.getLogger(__name__)


def hub() -> Hub:
    """Returns the pretrained models: the ones of this package, then the ones of other packages (`MODELS`)."""
    from importlib.metadata import entry_points

    from pipelines.models.hub import Hub

    folders = [SHIPPED]
    for point in entry_points(group=MODELS):
        try:
            spec = importlib.util.find_spec(point.value)
        except Exception:  # whatever the import of another package raises
            spec = None
        if spec is None or not spec.submodule_search_locations:
            logger.warning(
                "the models %s are left out: there is no package %s; install it again", point.name, point.value
            )
            continue
        folders += map(Path, spec.submodule_search_locations)
    return Hub(*folders)


def names() -> list[str]:
    """Returns the names of the pretrained models."""
    return hub().names()


def locations() -> dict[str, str]:
    """Returns {family: "module:attribute"} of all families; built-in families take precedence."""
    from importlib.metadata import entry_points  # which takes longer than all else that this module imports

    return {point.name: point.value for point in entry_points(group=FAMILIES)} | BUILT_IN


def entry(name: str) -> Family:
    """Opens a family.

    Args:
        name: Name of the family, e.g. "wide-deep", or its name in an earlier version.

    Returns:
        The family.

    Raises:
        RequestError: There is no such family, or the package of it is broken.
    """
    from pipelines.core.errors import RequestError, nearest, one_line
    from pipelines.models.family import Family

    name = FORMER_NAMES.get(name, name)
    paths = BUILT_IN if name in BUILT_IN else locations()  # installed packages are searched for other families only
    if name not in paths:
        raise RequestError(f"unknown model family {name!r}; {nearest(name, paths)}choose one of {', '.join(paths)}")
    try:
        module, attribute = paths[name].split(":")
        family = getattr(importlib.import_module(module), attribute)
        if not isinstance(family, Family) or family.name != name:
            raise TypeError(f"it is no Family of the name {name}")
    except Exception as error:  # whatever the import of another package raises
        if name in BUILT_IN:
            raise
        raise RequestError(
            f"the family {name} cannot be opened as {paths[name]}: {one_line(error)}; repair or uninstall its package"
        ) from error
    return family


def entries() -> dict[str, Family]:
    """Returns all families by name, without families that cannot be opened."""
    from pipelines.core.errors import RequestError

    families = {}
    for name in locations():
        try:
            families[name] = entry(name)
        except RequestError as error:
            logger.info("%s", error)
    return families


def located(model: str | Path) -> str | Path:
    """Returns the folder of a model of the Hugging Face Hub, fetched at first use; other models as they are given.

    Args:
        model: Name of a pretrained model, path of a model folder, or hf://ORG/NAME[@REVISION].

    Raises:
        RequestError: There is no such repository, or no importer reads its model.
    """
    if not str(model).startswith("hf://"):
        return model
    folder: Path = importlib.import_module("zoo.api.importing").hub_folder(str(model))
    return folder


def entry_of(model: str | Path) -> Family:
    """Returns the family of a model, without fetching or checking its files.

    Args:
        model: Name of a pretrained model, path of a model folder, hf://ORG/NAME[@REVISION], which is fetched, or path
            of an .onnx file.

    Raises:
        RequestError: There is no such model.
    """
    from pipelines.core.files import is_onnx
    from pipelines.models.hub import CARD, Card

    model = located(model)
    if is_onnx(model):
        return entry("image-network")
    card = Card.read(Path(model) / CARD) if Path(model).is_dir() else hub().card(str(model))
    return entry(card.entry)
