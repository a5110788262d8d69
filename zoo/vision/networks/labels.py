"""Class names of image networks: files, shipped lists, and the metadata and configurations of exporters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.vision.networks.conventions import Signature
from zoo.vision.networks.transforms import folders

ROOM = Path(__file__).parent.parent
LISTS = {"imagenet": ROOM / "imagenet.txt", "coco": ROOM / "coco.txt", "coco91": ROOM / "coco.txt"}
UNUSED = (0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # of COCO's numbers to 90: the background, and what has no class


def class_names(signature: Signature, source: str | Path | None) -> list[str] | None:
    """Returns the class names of a network.

    Args:
        signature: Its signature.
        source: File of names, or a name of `LISTS`; None for those of the network: the metadata of Ultralytics, or
            config.json of transformers or timm beside the file.

    Returns:
        The names; None if there are none.

    Raises:
        RequestError: The file cannot be read, or holds no names.
    """
    if source is not None:
        return _of_file(source)
    if (names := _listed(signature.literal("names"))) is not None:
        return names
    for folder in folders(signature.path):
        config = folder / "config.json"
        value = read_json(config) if config.is_file() else None
        if isinstance(value, Mapping) and (names := _listed(value.get("id2label") or value.get("label_names"))):
            return names
    return None


def _of_file(source: str | Path) -> list[str]:
    if str(source) in LISTS:
        names = _lines(LISTS[str(source)])
        if source == "coco91":
            for index in UNUSED:
                names.insert(index, "" if index else "background")
        return names
    path = Path(source)
    if path.suffix == ".json":
        value = read_json(path)
        own = _listed(value.get("id2label", value) if isinstance(value, Mapping) else value)
        if own is None:
            raise RequestError(f'{path} holds no class names; expected a list, or {{"0": "person", ...}}')
        return own
    names = _lines(path)
    if not names:
        raise RequestError(f"{path} holds no class names; expected one a line")
    return names


def _lines(path: Path) -> list[str]:
    """Names of a file; an empty line between others is a class without a name."""
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"cannot read the class names {path} ({getattr(error, 'strerror', None) or error}); expected one a "
            f"line, JSON, or one of {', '.join(LISTS)}"
        ) from error
    return [line.strip() or f"class {i}" for i, line in enumerate(lines)] if any(lines) else []


def _listed(value: Any) -> list[str] | None:
    """Names of a list, or of {number: name}; numbers without a name are classes without one."""
    if isinstance(value, Mapping) and value and all(re.fullmatch(r"[0-9]{1,6}", str(key)) for key in value):
        numbered = {int(key): name for key, name in value.items()}
        return [str(numbered.get(i, f"class {i}")) for i in range(max(numbered) + 1)]
    if isinstance(value, list | tuple) and value:
        return [str(name) for name in value]
    return None
