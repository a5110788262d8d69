"""The road from a checkpoint to int8, stage by stage: each leaves a file in the model's folder, and only what is missing or stale is made.

    checkpoint -> fp32.onnx -> rewritten.onnx -> calibration.json -> int8.onnx

build.json in the folder records what each stage was made from (SHA-256 of its inputs) and what it reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from pipelines import files, graph
from pipelines.calibrate import Batch, CalibrationTable, calibrate
from pipelines.entry import Entry, QuantRecipe
from pipelines.errors import RequestError
from pipelines.hub import CARD, Card
from pipelines.quantize import quantize
from pipelines.rewrite import rewrite

logger = logging.getLogger(__name__)

STAGES = ("fp32.onnx", "rewritten.onnx", "calibration.json", "int8.onnx")
HALF = "fp16.onnx"  # the weights of a shipped model, see graph.compress_fp16
SAMPLES = "calibration.npz"
RECORD = "build.json"
QUANTIZATION = "quantization.json"


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model's files, its card, and the entry that knows what to do with them."""

    path: Path
    card: Card
    entry: Entry

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What the card binds to the weights."""
        return dict(self.card.details.get("preprocessing", {}))

    def given(self, name: str) -> bool:
        """Whether the file came with the card, verified, rather than being built here."""
        return any(each.name == name for each in self.card.files)

    def ensure(self, name: str) -> Path:
        """The path of a file of this folder, made by its stage (and those before it) where it is missing or stale."""
        if name in STAGES and not self.given(name):
            build(self, until=name)
        path = self.path / name
        if not path.is_file():
            raise RequestError(f"{self.path} holds no {name}; train or download the model again")
        return path

    @property
    def record(self) -> dict[str, Any]:
        """build.json, or {} where nothing was built here yet."""
        path = self.path / RECORD
        return dict(files.read_json(path)) if path.is_file() else {}

    @property
    def recipe(self) -> QuantRecipe:
        """The recipe int8.onnx is made by: the one last used here, else the entry's; its observer is that of calibration.json."""
        record = self.record
        kept = record.get("int8.onnx", {}).get("recipe")
        recipe = QuantRecipe(**kept | {"keep_float": tuple(kept["keep_float"])}) if kept else self.entry.recipe
        return replace(recipe, observer=record.get("calibration.json", {}).get("observer", recipe.observer))


def open_folder(path: str | Path, entries: Callable[[str], Entry]) -> ModelFolder:
    """Open a model folder. Raises RequestError where it has no valid card or the entry is unknown."""
    path = Path(path)
    if not (path / CARD).is_file():
        raise RequestError(f"{path} is no model folder (it has no {CARD}); make one with: zoo train, or zoo download NAME")
    card = Card.read(path / CARD)
    return ModelFolder(path, card, entries(card.entry))


def build(folder: ModelFolder, *, until: str = STAGES[-1], force: bool = False) -> dict[str, str]:
    """Run the stages up to `until`. Returns {file: "given" | "kept" | "made"}; `force` makes every one anew.

    Two processes may build one folder at once: the second waits, and finds the work done.
    """
    outcome: dict[str, str] = {}
    with filelock.FileLock(folder.path / ".build.lock"):
        for stage in STAGES[: STAGES.index(until) + 1]:
            if folder.given(stage):
                outcome[stage] = "given"
            elif not force and _fresh(folder, stage):
                outcome[stage] = "kept"
            else:
                _make(folder, stage)
                outcome[stage] = "made"
    return outcome


def _inputs(folder: ModelFolder, stage: str) -> list[str]:
    if stage == "fp32.onnx":
        return [HALF] if folder.given(HALF) else [folder.entry.checkpoint]
    return {"rewritten.onnx": ["fp32.onnx"], "calibration.json": ["rewritten.onnx"], "int8.onnx": ["rewritten.onnx", "calibration.json"]}[
        stage
    ]


def _digests(folder: ModelFolder, stage: str) -> dict[str, str]:
    found = {}
    for name in _inputs(folder, stage):
        path = folder.path / name
        if not path.is_file():
            raise RequestError(f"{path} is missing, {stage} is made from it; train or download the model again")
        found[name] = files.sha256(path)
    return found


def _fresh(folder: ModelFolder, stage: str) -> bool:
    made_from = folder.record.get(stage, {}).get("inputs")
    return (folder.path / stage).is_file() and made_from == _digests(folder, stage)


def _make(folder: ModelFolder, stage: str) -> None:
    start = time.perf_counter()
    _digests(folder, stage)  # says what is missing
    match stage:
        case "fp32.onnx":
            said = _expand(folder) if folder.given(HALF) else dict(folder.entry.part("freeze")(folder.path))
        case "rewritten.onnx":
            said = _rewrite(folder)
        case "calibration.json":
            if folder.record.get(stage, {}).get("own_data"):
                logger.warning("the graph of %s changed: its calibration on own data gives way to one on the training samples", folder.path)
            said = _calibrate(folder, folder.recipe.observer)
        case _:
            said = _quantize(folder, folder.recipe)
    note(folder, stage, {"seconds": round(time.perf_counter() - start, 2), **said})


def note(folder: ModelFolder, stage: str, said: dict[str, Any]) -> None:
    """Record in build.json what a stage was made from and what it reported."""
    record = folder.record
    record[stage] = {"inputs": _digests(folder, stage), **said}
    files.write_json(folder.path / RECORD, {name: record[name] for name in STAGES if name in record})


def _expand(folder: ModelFolder) -> dict[str, Any]:
    model = graph.load(folder.path / HALF)
    graph.expand_fp16(model)
    graph.save(model, folder.path / "fp32.onnx")
    return {"weights": "float16 values"}


def _rewrite(folder: ModelFolder) -> dict[str, Any]:
    model = graph.load(folder.path / "fp32.onnx")
    report = rewrite(model, folder.entry.part("rewrites")(folder.preprocessing))
    graph.save(model, folder.path / "rewritten.onnx")
    return report.to_json()


def _calibrate(folder: ModelFolder, observer: str) -> dict[str, Any]:
    path = folder.path / SAMPLES
    if not path.is_file():
        raise RequestError(f"{folder.path} holds no {SAMPLES}; calibrate on your data with: zoo calibrate {folder.path} --data FILE")
    samples, total = read_npz(path)
    table = calibrate(graph.load(folder.path / "rewritten.onnx"), samples, observer, total)
    table.save(folder.path / "calibration.json")
    return {"observer": observer, "samples": table.samples}


def _quantize(folder: ModelFolder, recipe: QuantRecipe) -> dict[str, Any]:
    model = graph.load(folder.path / "rewritten.onnx")
    result, report = quantize(model, recipe, CalibrationTable.load(folder.path / "calibration.json"))
    graph.save(result, folder.path / "int8.onnx")
    files.write_json(folder.path / QUANTIZATION, report.to_json())
    return {"recipe": recipe.to_json(), "precisions": report.counts()}


def set_recipe(folder: ModelFolder, recipe: QuantRecipe) -> None:
    """Make int8.onnx stale and have it made by `recipe` next; with another observer the calibration, too.

    Raises RequestError where the folder was calibrated on data that is not at hand to do so.
    """
    record = folder.record
    calibrated = record.get("calibration.json", {})
    if calibrated.get("observer", recipe.observer) != recipe.observer:
        if calibrated.get("own_data"):
            raise RequestError(
                f"{folder.path} was calibrated on own data with {calibrated['observer']}; "
                f"run: zoo calibrate {folder.path} --data FILE --observer {recipe.observer}"
            )
        del record["calibration.json"]
    record["int8.onnx"] = {"recipe": recipe.to_json()}
    files.write_json(folder.path / RECORD, record)


def read_npz(path: str | Path, batch_size: int = 256) -> tuple[Iterator[Batch], int]:
    """(batches, number of samples) of an .npz with one array per graph input, first axis = samples; RequestError for anything else."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: np.asarray(archive[name]) for name in archive.files}
    except Exception as error:  # numpy, zipfile and zlib raise their own kinds for every sort of damage
        raise RequestError(f"cannot read {path} as .npz: {error}; it must hold one array per graph input") from error
    counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if not counts or len(set(counts.values())) > 1 or 0 in counts.values():
        raise RequestError(
            f"{path} holds arrays of {counts or 'nothing'} samples; wanted one array per graph input, all with the same number of samples"
        )
    total = next(iter(counts.values()))
    return ({name: array[start : start + batch_size] for name, array in arrays.items()} for start in range(0, total, batch_size)), total
