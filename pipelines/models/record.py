"""The files of a model folder and its record, build.json: the inputs and the report of each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.quantization.recipe import OBSERVERS, QuantRecipe

BUILD_STAGES = ("fp32.onnx", "rewritten.onnx", "calibration.json", "int8.onnx")
NATIVE = "native.onnx"
STAGES = (*BUILD_STAGES, NATIVE)
HALF = "fp16.onnx"  # float16 weights of a shipped model, see graph.compress_fp16
SAMPLES = "calibration.npz"
# ranges of quantization-aware training: a calibration table without a graph, with its recipe
TRAINED = "qat.json"
# {tensor: largest magnitude} of tensors with ranges that come with the model and override calibration
RANGES = "ranges.json"
# ranges of tables and orders of units of an earlier model, which the native form keeps, see `pipelines.deltas.scales`
SCALES = "scales.npz"
RECORD = "build.json"
QUANTIZATION = "quantization.json"
MAKING = "making"  # key of a stage's record while its file is written


def read_record(folder: Path) -> dict[str, Any]:
    """Reads build.json; invalid entries are dropped, so that their stages are rebuilt.

    Args:
        folder: Model folder.

    Returns:
        {stage: record}; {} if nothing was built.
    """
    try:
        record = files.read_json(folder / RECORD)
    except RequestError:
        return {}
    return (
        {stage: record[stage] for stage in STAGES if stage in record and _is_valid(stage, record[stage])}
        if isinstance(record, dict)
        else {}
    )


def _is_valid(stage: str, record: Any) -> bool:
    """Returns whether a record has the form that `pipelines.models.stages` writes."""
    if not isinstance(record, dict) or not isinstance(record.get("inputs"), dict):
        return False
    identities = record.get("files", {})  # see `files.identity`; missing in older records
    if not isinstance(identities, dict) or not all(
        isinstance(entry, dict) and {"bytes", "modified", "sha256"} <= entry.keys() for entry in identities.values()
    ):
        return False
    return {
        "calibration.json": record.get("observer") in OBSERVERS,
        "int8.onnx": recipe_of(record.get("recipe")) is not None,
    }.get(stage, True)


def recipe_of(settings: Any) -> QuantRecipe | None:
    """Reads a recipe.

    Args:
        settings: Result of `QuantRecipe.to_json`.

    Returns:
        The recipe; None for another value.
    """
    try:
        return QuantRecipe(**settings)
    except (KeyError, TypeError, ValueError):
        return None
