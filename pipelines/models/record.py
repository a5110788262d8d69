"""The files of a model folder and its record, build.json: what each stage was made from and what it reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.quantization.recipe import OBSERVERS, QuantRecipe

ROAD = ("fp32.onnx", "rewritten.onnx", "calibration.json", "int8.onnx")
NATIVE = "native.onnx"
STAGES = (*ROAD, NATIVE)
HALF = "fp16.onnx"  # the weights of a shipped model, see graph.compress_fp16
SAMPLES = "calibration.npz"
# ranges of quantization-aware training: a table of no graph yet, with the recipe that they were trained for
TRAINED = "qat.json"
# {tensor: greatest magnitude} of tensors whose ranges came with the model, whatever samples say; of no tensor but those
RANGES = "ranges.json"
RECORD = "build.json"
QUANTIZATION = "quantization.json"


def read_record(folder: Path) -> dict[str, Any]:
    """Reads build.json; {} if nothing was built.

    Entries in another form than `note` writes are dropped, so that they are rebuilt.
    """
    try:
        record = files.read_json(folder / RECORD)
    except RequestError:
        return {}
    return (
        {stage: record[stage] for stage in STAGES if stage in record and _sound(stage, record[stage])}
        if isinstance(record, dict)
        else {}
    )


def _sound(stage: str, said: Any) -> bool:
    """Whether this is what `note` writes of a stage."""
    if not isinstance(said, dict) or not isinstance(said.get("inputs"), dict):
        return False
    identities = said.get("files", {})  # as `files.identity` gives them; none where an older version built
    if not isinstance(identities, dict) or not all(
        isinstance(each, dict) and {"bytes", "modified", "sha256"} <= each.keys() for each in identities.values()
    ):
        return False
    return {
        "calibration.json": said.get("observer") in OBSERVERS,
        "int8.onnx": recipe_of(said.get("recipe")) is not None,
    }.get(stage, True)


def recipe_of(kept: Any) -> QuantRecipe | None:
    """Reads the result of `QuantRecipe.to_json`; None for another value."""
    try:
        return QuantRecipe(**kept)
    except (KeyError, TypeError, ValueError):
        return None
