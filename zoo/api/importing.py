"""The verb that makes a model folder of another toolkit's model: import."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import settings
from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import require_place
from pipelines.models.entry import Entry, Importer
from pipelines.models.hub import CARD
from zoo.api.paths import Model, required
from zoo.api.training import write_card

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def import_model(source: Model, output: Model | None, *, format: str | None = None, **options: Any) -> dict[str, Any]:
    """A model of another toolkit -> a model folder with its frozen graph, fp32.onnx.

    source: a folder, a file, or the hub id ORG/NAME of one, which is fetched. format: None to tell it by what is there.
    options: those of the family (`Importer.options`), e.g. target_language. Raises RequestError with all that is wrong
    with the model, before anything is written; nothing of it is executed.
    """
    target = required(output, "an imported model")
    importers = {entry: entry.part("importer") for entry in zoo.entries().values() if entry.importer}
    formats = {name: what for each in importers.values() for name, what in each.formats.items()}
    if format is not None and format not in formats:
        raise RequestError(f"unknown format {format!r}; choose one of {', '.join(formats)}")
    require_place(target / CARD)
    path = _found(str(source), importers)
    entry, found = _recognized(path, format, importers)
    importer = importers[entry]
    given = {name: value for name, value in options.items() if value}
    if unknown := given.keys() - set(importer.options):
        raise RequestError(f"{entry.name} has no option {', '.join(sorted(unknown))}")
    details, files = importer.write(path, target, format=found, **given)
    write_card(target, entry.name, f"{entry.title}; imported from {Path(source).name}", details, files)
    folder = zoo.load(target)
    folder.ensure("fp32.onnx")
    return {
        "model": folder.card.name,
        "path": str(target),
        "family": entry.name,
        "format": found,
        "parameters": folder.record["fp32.onnx"]["parameters"],
        **{key: each for key, each in details.items() if key != "preprocessing"},
    }


def _recognized(path: Path, format: str | None, importers: dict[Entry, Importer]) -> tuple[Entry, str]:
    """The family and the format of a model. Raises RequestError where none is known."""
    for entry, importer in importers.items():
        found = format if format in importer.formats else "" if format else importer.recognize(path)
        if found:
            return entry, found
    wanted = "; ".join(f"{what} ({name})" for each in importers.values() for name, what in each.formats.items())
    raise RequestError(f"found no model in {path}, wanted: {wanted}")


def _found(source: str, importers: dict[Entry, Importer]) -> Path:
    """The path of a model: itself, or of the copy of what has this id on the hub. Raises RequestError where it is
    neither.
    """
    path = Path(source)
    if path.exists():
        return path
    if not HUB_ID.fullmatch(source):
        raise RequestError(f"found no {source}; wanted a folder, a file, or the hub id ORG/NAME of a model")
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise RequestError(
            f"found no folder {source}; as a hub id it is fetched by huggingface_hub, which is not installed; run: pip "
            "install 'int8-zoo[import]'"
        ) from error
    patterns = [pattern for each in importers.values() for pattern in each.patterns]
    try:
        return Path(
            huggingface_hub.snapshot_download(source, allow_patterns=patterns, local_files_only=settings.offline())
        )
    except Exception as error:  # the library's own kinds, those of its HTTP client, ValueError for a name
        why = "ZOO_OFFLINE forbids to fetch what is not in the cache" if settings.offline() else one_line(error)
        raise RequestError(f"found no folder {source}, and cannot have it from the hub: {why}") from error
