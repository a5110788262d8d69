"""Paths that users give: which models and files they name, and where results may go."""

from __future__ import annotations

import os
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

Model = str | Path


def open_model(model: Model, preprocess: Model | None) -> ModelFolder:
    """`zoo.load`. Raises RequestError where the user brings a spec of images, which a zoo model has itself."""
    if preprocess is not None:
        raise RequestError(
            f"--preprocess describes the images of an ONNX file; {model} knows what it takes, leave the option out"
        )
    return zoo.load(model)


def used(folder: ModelFolder) -> list[Path]:
    """The files that a model folder lives on, which no output may replace."""
    built = (*STAGES, SAMPLES, RECORD, QUANTIZATION, folder.weights, CARD)
    return [folder.path / name for name in (*built, *(each.name for each in folder.card.files))]


def listed(data: Any) -> Sequence[Any]:
    """`data` as a list: itself, or a list of it alone."""
    return data if isinstance(data, list | tuple) else [data]


def is_file(model: Model) -> bool:
    """Whether a verb is given an ONNX file, not a model of the zoo. Raises RequestError for an .onnx path where no file
    is.
    """
    path = Path(model)
    if path.suffix == ".onnx" and not path.is_file():
        raise RequestError(
            f"no ONNX model at {path}; pass the path of an .onnx file, a model folder, or one of: "
            f"{', '.join(zoo.names())}"
        )
    return path.is_file()


def spare(output: Model | None, *inputs: Any) -> None:
    """Raise RequestError where `output` cannot be written, or is the same file as one of the inputs.

    None and "-" (stdout) are no file; inputs that are no path are passed over.
    """
    if output is None or str(output) == "-":
        return
    for each in inputs:
        if isinstance(each, str | os.PathLike) and _same(each, output):
            raise RequestError(
                f"the output {output} is the input {each}, which it would replace; choose another output path"
            )
    files.require_place(output)


def require_report(report_path: Model | None, output: Model, *inputs: Any, samples: bool = True) -> None:
    """Raise RequestError for a report that could not be measured, for want of samples, or not be written beside the
    model `output`.
    """
    if report_path is None:
        return
    report_html.require_format(report_path)
    if not samples:
        raise RequestError(
            "a report is measured on samples, and there are none; leave out --report, or give an .onnx file with "
            "--calibration-data"
        )
    if _same(report_path, output):
        raise RequestError(f"the model and its report are both {output}; choose another name for one of them")
    spare(report_path, *inputs)


def _same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths are of one file, which need not be there yet."""
    if os.path.exists(one) and os.path.exists(other):  # noqa: PTH110 (pathlib's raises for a name too long)
        return os.path.samefile(one, other)  # noqa: PTH121
    return os.path.realpath(one) == os.path.realpath(other)


def required(output: Model | None, what: str = "an ONNX file") -> Path:
    """`output` as a path. Raises RequestError where a user named none; what: what the result is of."""
    if output is None:
        raise RequestError(f"{what} needs a place for the result; give it with -o")
    return Path(output)
