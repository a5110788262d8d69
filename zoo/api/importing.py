"""Command that imports a model of another toolkit: import."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import settings
from pipelines.core.errors import RequestError, one_line, requires
from pipelines.core.files import require_place
from pipelines.models.family import Family, Importable, Importer
from pipelines.models.hub import CARD
from zoo.api.paths import Model, output_path
from zoo.api.training_settings import write_card

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def import_model(source: Model, output: Model | None, *, format: str | None = None, **options: Any) -> dict[str, Any]:
    """Imports a model of another toolkit as a model folder with its frozen graph, fp32.onnx.

    All problems of the model are reported together, before anything is written. No code of the model is executed.

    Args:
        source: A folder, a file, or a hub id ORG/NAME, which is downloaded.
        output: Folder of the new model.
        format: Format of `source`; None to detect it.
        **options: Options of the family's importer (`Importer.options`), e.g. `target_language`.

    Returns:
        {"model", "path", "family", "format", "parameters"} and the details of the importer.

    Raises:
        RequestError: The format or an option is unknown, or the model is not supported.
    """
    target = output_path(output, "an imported model")
    importers = [(entry, entry.importer()) for entry in zoo.entries().values() if isinstance(entry, Importable)]
    formats = {name: what for _, each in importers for name, what in each.formats.items()}
    if format is not None and format not in formats:
        raise RequestError(f"unknown format {format!r}; choose one of {', '.join(formats)}")
    require_place(target / CARD)
    path = _found(str(source), [pattern for _, each in importers for pattern in each.patterns])
    entry, importer, found = _recognized(path, format, importers)
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


def _recognized(
    path: Path, format: str | None, importers: Sequence[tuple[Any, Importer]]
) -> tuple[Family, Importer, str]:
    """Returns the family, importer and format of a model; raises RequestError if no importer recognizes it."""
    for entry, importer in importers:
        found = format if format in importer.formats else "" if format else importer.recognize(path)
        if found:
            return entry, importer, found
    expected = "; ".join(f"{what} ({name})" for _, each in importers for name, what in each.formats.items())
    raise RequestError(f"found no model in {path}, expected: {expected}")


def _found(source: str, patterns: list[str]) -> Path:
    """Returns the local path of a source; a hub id is downloaded.

    Args:
        source: Path, or hub id ORG/NAME.
        patterns: Patterns of the files to download.

    Raises:
        RequestError: There is no such path or hub id, or the download failed.
    """
    path = Path(source)
    if path.exists():
        return path
    if not HUB_ID.fullmatch(source):
        raise RequestError(f"found no {source}; expected a folder, a file, or the hub id ORG/NAME of a model")
    with requires(f"found no folder {source}; to fetch it as a hub id", "int8-zoo[import]"):
        import huggingface_hub
    try:
        return Path(
            huggingface_hub.snapshot_download(source, allow_patterns=patterns, local_files_only=settings.offline())
        )
    except Exception as error:  # errors of the library and its HTTP client, ValueError for an invalid name
        why = "it is not in the cache, and ZOO_OFFLINE forbids downloads" if settings.offline() else one_line(error)
        raise RequestError(f"found no folder {source}, and cannot download it from the hub: {why}") from error
