"""Validation of paths given by the user: models, inputs and outputs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.analysis import report_html
from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.models.folder import ModelFolder
from pipelines.models.hub import CARD
from pipelines.models.record import QUANTIZATION, RECORD, SAMPLES, STAGES
from zoo.huggingface.repository import ID, is_address

Model = str | Path


def open_model(model: Model, preprocess: Model | None, *data: Any) -> ModelFolder:
    """Opens a zoo model, which has its own preprocessing.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        preprocess: Must be None.
        *data: Data of the command, checked before files of the model are downloaded; strings in a list may be texts.

    Returns:
        The model folder.

    Raises:
        RequestError: `preprocess` is given, there is no such model, or data are missing or empty.
    """
    if preprocess is not None:
        raise RequestError(f"--preprocess is for ONNX files; {model} has its own preprocessing, leave the option out")
    for value in data:
        require_data(value if isinstance(value, str | Path) else [x for x in as_list(value) if isinstance(x, Path)])
    return zoo.load(model)


def files_of(folder: ModelFolder) -> list[Path]:
    """Returns the files of a model folder that no output may replace.

    Args:
        folder: Model folder.

    Returns:
        Paths, existing or not.
    """
    built = (*STAGES, SAMPLES, RECORD, QUANTIZATION, folder.weights, CARD)
    return [folder.path / name for name in (*built, *(file.name for file in folder.card.files))]


def require_data(data: Any) -> None:
    """Checks that files of data exist, before the work begins. Patterns, hub ids and URLs are checked as they are read.

    Args:
        data: One value, or a list or tuple of values.

    Raises:
        RequestError: A file is missing, or all of them are empty.
    """
    places = as_list(data)
    if places and all(map(_is_blank, places)):
        raise RequestError(f"found no data in {places[0]}, which is empty; expected samples")
    for place in places:
        if not isinstance(place, str | Path) or os.path.exists(place) or re.search(r"[*?\[:]|^-$", str(place)):  # noqa: PTH110
            continue
        if missing := [name for name in str(place).split(",") if not os.path.exists(name) and not ID.fullmatch(name)]:  # noqa: PTH110
            raise RequestError(
                f"found no file {missing[0]}; expected a file, a folder, - for stdin, or a hub id ORG/NAME"
            )


def _is_blank(place: Any) -> bool:
    """Whether a file has nothing but white space; files over 64 KiB have more."""
    if not isinstance(place, str | Path) or not os.path.isfile(place):  # noqa: PTH113
        return False
    with Path(place).open("rb") as file:
        return not file.read(1 << 16).strip() and not file.read(1)


def as_list(data: Any) -> Sequence[Any]:
    """Returns data as a list.

    Args:
        data: One value, or a list or tuple of values.

    Returns:
        `data` if it is a list or tuple, else [data].
    """
    return data if isinstance(data, list | tuple) else [data]


def labelled_sample(folder: ModelFolder) -> Path:
    """Returns the labelled sample that ships with a model.

    Args:
        folder: Model folder.

    Returns:
        Path of the sample.

    Raises:
        RequestError: None ships with it.
    """
    for file in folder.card.files:
        if file.name.startswith("sample."):
            return folder.ensure(file.name)
    raise RequestError(f"{folder.card.name} ships no labelled sample; pass labelled data (--data FILE)")


def is_file(model: Model) -> bool:
    """Returns whether a model is given as a file, such as an .onnx file.

    Args:
        model: Name, folder, file or hf:// address of a model.

    Raises:
        RequestError: The path ends in .onnx, but there is no such file.
    """
    path = Path(model)
    if is_address(model):
        return False
    if files.is_onnx(path) and not path.is_file():
        raise RequestError(
            f"no ONNX model at {path}; pass the path of an .onnx file, a model folder, or one of: "
            f"{', '.join(zoo.names())}"
        )
    return path.is_file()


def require_folder(model: Model) -> None:
    """Raises RequestError for an .onnx file, where only models with files of their own will do.

    Args:
        model: Name, folder, file or hf:// address of a model.
    """
    if files.is_onnx(model):
        raise zoo.hub().unknown(str(model))


def require_distinct(output: Model | None, *inputs: Any) -> None:
    """Checks that an output can be written and replaces no input.

    Args:
        output: Output path. None and "-" (stdout) always pass.
        *inputs: Input paths; values that are no path are ignored.

    Raises:
        RequestError: The output cannot be written, or is the same file as an input.
    """
    if output is None or str(output) == "-":
        return
    for source in inputs:
        if isinstance(source, str | os.PathLike) and _same(source, output):
            if str(output).endswith(".plan"):
                raise RequestError(f"found the plan {source}, expected a model; run: zoo plan MODEL -o {source}")
            raise RequestError(f"the output {output} would replace the input {source}; choose another output path")
    files.require_place(output)


def require_report(report_path: Model | None, output: Model, *inputs: Any, samples: bool = True) -> None:
    """Checks that a quantization report can be measured and written.

    Args:
        report_path: Path of the report; None always passes.
        output: Path of the int8 model.
        *inputs: Input paths.
        samples: Whether there are samples to measure on.

    Raises:
        RequestError: The format is unknown, there are no samples, or the path is used by another file.
    """
    if report_path is None:
        return
    report_html.require_format(report_path)
    if not samples:
        raise RequestError("a report needs samples; leave out --report, or give an .onnx file with --calibration-data")
    if _same(report_path, output):
        raise RequestError(f"the model and its report have the same path {output}; choose another one for the report")
    require_distinct(report_path, *inputs)


def _same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Returns whether two paths name the same file, which may not exist yet."""
    if os.path.exists(one) and os.path.exists(other):  # noqa: PTH110 (pathlib's raises for a name too long)
        return os.path.samefile(one, other)  # noqa: PTH121
    return os.path.realpath(one) == os.path.realpath(other)


def output_path(output: Model | None, kind: str = "an ONNX file") -> Path:
    """Returns an output as a path.

    Args:
        output: Path given by the user, or None.
        kind: Kind of the result, for the message.

    Returns:
        The path.

    Raises:
        RequestError: `output` is None.
    """
    if output is None:
        raise RequestError(f"{kind} needs an output path; give it with -o")
    return Path(output)
