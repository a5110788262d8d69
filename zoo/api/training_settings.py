"""Training settings given as text, trainable families, and the cards of trained models."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, write_json
from pipelines.core.settings import BOOLEANS
from pipelines.models.family import Family, Trainable
from pipelines.models.folder import ModelFolder
from pipelines.models.hub import CARD, Card, CardFile
from zoo.training.runs import is_first
from zoo.training.settings import require_kept


def require_trainable(family: Family) -> Trainable:
    """Checks that a family trains models.

    Args:
        family: Family.

    Returns:
        The family.

    Raises:
        RequestError: The family has no training; the message names the families of the task that have.
    """
    if isinstance(family, Trainable):
        return family
    able = [name for name, entry in zoo.entries().items() if isinstance(entry, Trainable) and entry.task == family.task]
    raise RequestError(f"{family.name} models are only imported, not trained; train one of {', '.join(sorted(able))}")


def configured(family: str, defaults: Any, settings: Mapping[str, str]) -> Any:
    """Applies settings given as text to the training configuration of a family.

    Args:
        family: Name of the family, for messages.
        defaults: Configuration of the family (a dataclass instance).
        settings: Training settings {name: value as text}.

    Returns:
        A copy of `defaults` with the settings, converted to the types of the defaults.

    Raises:
        RequestError: A setting is unknown, or its value has another type.
    """
    values = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    if "qat" in settings and "qat" not in values:
        raise RequestError(f"{family} has no quantization-aware training (--qat); these families do: {_qat_families()}")
    if "columns" in settings and "columns" not in values:
        raise RequestError(f"--column requires a text encoder, found the family {family}; leave it out")
    if unknown := [name for name in settings if name not in values]:
        raise RequestError(f"{family} has no training setting {', '.join(unknown)}; choose among {', '.join(values)}")
    return dataclasses.replace(defaults, **{name: convert(name, text, values[name]) for name, text in settings.items()})


def finetuned(folder: ModelFolder, settings: Mapping[str, str]) -> Any:
    """Applies settings given as text to the fine-tuning configuration of a model.

    Args:
        folder: Model folder to fine-tune.
        settings: Training settings {name: value as text}.

    Returns:
        The configuration.

    Raises:
        RequestError: A setting is invalid, or would change a setting that fine-tuning must keep (`KEPT`).
    """
    entry, details = folder.entry, folder.card.details
    trained = details.get("training", {}).get("config", {})
    defaults = require_trainable(entry).finetune_config()
    config = configured(entry.name, defaults, settings)
    own = {
        **dataclasses.asdict(defaults),
        **trained,
        **details.get("weights", {}),
        **details.get("preprocessing", {}),
    }
    for name in getattr(defaults, "KEPT", ()):
        if name in settings:
            require_kept(name, getattr(config, name), own[name], folder.card.name)
        elif name in trained:
            config = dataclasses.replace(config, **{name: own[name]})
    return config


def convert(name: str, text: str, like: Any) -> Any:
    """Converts the text of a setting to the type of its default.

    Args:
        name: Name of the setting, for messages.
        text: Value as text; comma-separated for tuples.
        like: Default value.

    Returns:
        The value, of the type of `like`.

    Raises:
        RequestError: The text is no value of this type.
    """
    try:
        if isinstance(like, bool):
            return BOOLEANS[text.lower()]
        if isinstance(like, tuple):
            return tuple(type(like[0])(part) for part in text.split(",") if part)
        return type(like)(text)
    except (KeyError, ValueError):
        shown = ",".join(map(str, like)) if isinstance(like, tuple) else like
        raise RequestError(f"setting {name} is {text!r}; expected a value like {shown}") from None


def _qat_families() -> str:
    able = []
    for name, entry in zoo.entries().items():
        with contextlib.suppress(RequestError):  # its framework is not installed
            able += [name] if isinstance(entry, Trainable) and hasattr(entry.finetune_config(), "qat") else []
    return ", ".join(able)


def write_trained_card(folder: Path, entry: str, description: str) -> None:
    """Writes the card of a folder written by a training.

    Args:
        folder: Model folder with train.json.
        entry: Name of the family.
        description: Description of the model.
    """
    if not is_first():
        return
    trained = read_json(folder / "train.json")
    details = {
        "preprocessing": trained["features"],
        "training": {key: trained[key] for key in ("rows", "metrics", "config") if key in trained},
        **{key: trained[key] for key in ("classes", "shapes", "imported") if key in trained},
    }
    write_card(folder, entry, description, details)


def write_card(
    folder: Path,
    entry: str,
    description: str,
    details: Mapping[str, Any],
    files: Sequence[CardFile] = (),
    *,
    name: str = "",
) -> None:
    """Writes the card of a model folder; the model is named after the folder.

    Args:
        folder: Model folder.
        entry: Name of the family.
        description: Description of the model.
        details: Details of the card: "preprocessing", "training", "weights", ...
        files: Files that ship with the model.
        name: Replaces the name of the folder.
    """
    name = name or folder.resolve().name
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip("._-") or entry
    write_json(folder / CARD, Card(name, entry, description, tuple(files), details).to_json())
