"""Build stages from a checkpoint to int8; each writes a file in the model's folder if it is missing or stale.

    checkpoint -> fp32.onnx -> rewritten.onnx -> calibration.json -> int8.onnx -> native.onnx (on demand)

build.json in the folder records the inputs (SHA-256), the result (SHA-256) and the report of each stage.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipelines.core import files, machine
from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.models import unlisted
from pipelines.models.family import Freezable, Lowerable, OnnxImportable
from pipelines.models.hub import CARD
from pipelines.models.npz import own_samples, rows_of, scales_of
from pipelines.models.protocols import ShipsSamples
from pipelines.models.record import (
    BUILD_STAGES,
    HALF,
    MAKING,
    NATIVE,
    QUANTIZATION,
    RECORD,
    SAMPLES,
    SCALES,
    STAGES,
    TRAINED,
    recipe_of,
)
from pipelines.quantization.recipe import QuantRecipe

if TYPE_CHECKING:  # imported in the stages: running a finished model does not need them and saves 60 MB
    import onnx_ir as ir

    from pipelines.models.folder import ModelFolder
    from pipelines.quantization.calibration.table import CalibrationTable
    from pipelines.quantization.quantizer import QuantReport

logger = logging.getLogger(__name__)

# Increment it when the digest of a table or graph changes (tests/pipelines/models/test_table_version.py).
TABLE_VERSION = 1
NATIVE_FORM = 9  # version of native.onnx; increment it when its steps change


def build(folder: ModelFolder, *, until: str = BUILD_STAGES[-1], force: bool = False) -> dict[str, str]:
    """Runs the stages up to a file.

    Two processes may build one folder at once: the second waits for the first. A complete folder may be read-only.

    Args:
        folder: Model folder.
        until: File of the last stage.
        force: Run every stage again.

    Returns:
        "given", "kept", "made" or "replaced" by file; "replaced" is an int8.onnx from elsewhere, which stays.

    Raises:
        RequestError: The build would lose a calibration on the user's own data, or write over a file from elsewhere.
    """
    stages = STAGES[: STAGES.index(until) + 1]
    if not force:
        states: dict[str, str] = {}
        for stage in stages:
            if (state := _state(folder, stage, until)) == "stale":
                break
            states[stage] = state
        else:
            return states
    with _locked(folder):
        return _build(folder, stages, force)


def _build(folder: ModelFolder, stages: tuple[str, ...], force: bool = False) -> dict[str, str]:
    if force and "calibration.json" in stages:
        _require_no_own_data(folder, folder.recipe.observer)
    outcome: dict[str, str] = {}
    for stage in stages:
        state = "stale" if force and not folder.is_listed(stage) else _state(folder, stage, stages[-1])
        if state == "stale":
            _run_stage(folder, stage, force)
            machine.trim()  # graphs are reference cycles that hold the weights
            state = "made"
        outcome[stage] = state
    remove_intermediate_files(folder, stages[-1])
    return outcome


@contextlib.contextmanager
def _locked(folder: ModelFolder) -> Iterator[None]:
    """Holds the lock of the folder; one process at a time writes its files and build.json."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(folder.path / ".build.lock", f"another process builds {folder.path}"))
        except OSError as error:
            raise RequestError(
                f"cannot write {folder.path}: {error.strerror or error}; copy the model to a folder you may write"
            ) from error
        yield


def _state(folder: ModelFolder, stage: str, until: str) -> str:
    """Returns whether a stage is "given", "kept", "replaced" or "stale"; earlier stages must not be stale."""
    if folder.is_listed(stage):
        folder.verify(stage)
        return "given"
    if unlisted.is_replaced(folder, stage) and unlisted.use_replaced(folder, stage):
        if until == NATIVE:
            raise RequestError(
                f"the engine native would compute {folder.card.name} from rewritten.onnx, and {folder.path / stage} is "
                f"from elsewhere; choose onnxruntime or openvino, or rebuild it: zoo build {folder.path} --force"
            )
        return "replaced"
    return "kept" if _is_fresh(folder, stage) or (until != stage and _is_unneeded(folder, stage, until)) else "stale"


def _is_unneeded(folder: ModelFolder, stage: str, until: str) -> bool:
    """Returns whether a file is not needed up to a stage: the stages that read it are fresh (`Family.transient`)."""
    record = folder.record.get(stage)
    if stage not in folder.entry.transient or record is None or record.get(MAKING) or (folder.path / stage).exists():
        return False
    if not _has_same_inputs(folder, stage, record):
        return False
    readers = [reader for reader in STAGES[: STAGES.index(until) + 1] if stage in _inputs(folder, reader)]
    return all(
        _is_fresh(folder, reader) or (reader != until and _is_unneeded(folder, reader, until)) for reader in readers
    )


def remove_intermediate_files(folder: ModelFolder, kept: str = "") -> None:
    """Removes files that no following stage reads any more, see `Family.transient`.

    Weights that can be made again are removed with them once int8.onnx is there, unless they are a link to the file
    that was imported.

    Args:
        folder: Model folder.
        kept: Name of a file to keep.
    """
    for name in folder.entry.transient:
        if name == kept or folder.is_listed(name) or not (folder.path / name).is_file():
            continue
        readers = [stage for stage in BUILD_STAGES if not folder.is_listed(stage) and name in _inputs(folder, stage)]
        if all(_is_fresh(folder, stage) or _is_unneeded(folder, stage, BUILD_STAGES[-1]) for stage in readers):
            with contextlib.suppress(OSError):  # a read-only folder
                (folder.path / name).unlink()
    if folder.restorable and kept != "fp32.onnx" and _is_fresh(folder, "int8.onnx"):
        weights = folder.path / folder.weights
        if weights.is_file() and weights.stat().st_nlink == 1 and _is_unneeded(folder, "fp32.onnx", BUILD_STAGES[-1]):
            with contextlib.suppress(OSError):
                weights.unlink()


def _has_same_inputs(folder: ModelFolder, stage: str, record: Mapping[str, Any]) -> bool:
    """Returns whether a stage was made from the files that are there, or from the same ones of another version."""
    digests = _digests(folder, stage, record)
    return record["inputs"].keys() == digests.keys() and all(
        was == digests[name] or was in folder.record.get(name, {}).get("former", ())
        for name, was in record["inputs"].items()
    )


def _inputs(folder: ModelFolder, stage: str) -> list[str]:
    if stage == "fp32.onnx":
        return [HALF] if folder.is_listed(HALF) else [folder.weights]
    return {
        "rewritten.onnx": ["fp32.onnx"],
        "calibration.json": ["rewritten.onnx", *([TRAINED] if (folder.path / TRAINED).is_file() else [])],
        "int8.onnx": ["rewritten.onnx", "calibration.json"],
        NATIVE: ["rewritten.onnx", "calibration.json", *([SCALES] if (folder.path / SCALES).is_file() else [])],
    }[stage]


def _digests(folder: ModelFolder, stage: str, record: Mapping[str, Any]) -> dict[str, str]:
    digests = {}
    for name in _inputs(folder, stage):
        path = folder.path / name
        if not path.is_file() and record and name in folder.entry.transient and name in folder.record:
            digests[name] = str(folder.record[name].get("sha256"))
            continue
        listed = folder.card.file(name) if folder.restorable and name == folder.weights else None
        if not path.is_file() and record and listed:
            digests[name] = str(listed.sha256)
            continue
        if not path.is_file():
            raise RequestError(f"{path} is missing, which {stage} is built from; train or download the model again")
        digests[name] = unlisted.digest(path, record)
    return digests


def _is_fresh(folder: ModelFolder, stage: str) -> bool:
    path, record = folder.path / stage, folder.record.get(stage)
    if (
        record is None
        or record.get(MAKING)
        or not path.is_file()
        or record.get("sha256") != unlisted.digest(path, record)
    ):
        return False
    if not _has_same_inputs(folder, stage, record):
        return False
    if stage == NATIVE:
        data = files.mapped(path)
        return (
            record.get("form", 1) == NATIVE_FORM
            and recipe_of(record.get("recipe")) == folder.recipe
            and data.is_file()
            and record.get("data_sha256") == unlisted.digest(data, record)
        )
    graph = folder.path / "rewritten.onnx"
    if stage == "calibration.json" and record.get("reader") != _reader() and graph.is_file():
        try:  # another version may read the files differently
            _table(path).require(_graph(graph))
        except RequestError:
            return False
    return True


def _run_stage(folder: ModelFolder, stage: str, force: bool = False) -> None:
    start = time.perf_counter()
    for name in _inputs(folder, stage):
        if folder.fetch and folder.is_listed(name) and not (folder.path / name).is_file():
            folder.fetch(name)
    _digests(folder, stage, {})  # raises if an input is missing
    with unlisted.kept(folder, stage, replace=force):
        _mark_unfinished(folder, stage)
        match stage:
            case "fp32.onnx":
                report = _expand(folder) if folder.is_listed(HALF) else _freeze(folder)
            case "rewritten.onnx":
                report = _rewrite(folder)
            case "calibration.json":
                report = _save_table(folder, *_calibrate(folder, folder.recipe))
            case "native.onnx":
                report = _native(folder)
            case _:
                report = _save_int8(folder, *_quantize(folder, folder.recipe, _table(folder.path / "calibration.json")))
    _record_reports(folder, {stage: {"seconds": round(time.perf_counter() - start, 2), **report}})


def _mark_unfinished(folder: ModelFolder, *stages: str) -> None:
    """Records that files of stages are being written; they are not foreign if `_record_reports` is never reached."""
    record = folder.record
    if listed := [stage for stage in stages if stage in record]:
        record |= {stage: {**record[stage], MAKING: True} for stage in listed}
        files.write_json(folder.path / RECORD, record)


def _record_reports(folder: ModelFolder, reports: Mapping[str, dict[str, Any]]) -> None:
    """Records inputs, result and report of stages in build.json."""
    noted = {}
    for stage, report in reports.items():
        names = [*_inputs(folder, stage), stage, *([files.mapped(Path(stage)).name] if stage == NATIVE else [])]
        identities = {name: files.identity(folder.path / name) for name in names}
        inputs = {name: identities[name]["sha256"] for name in _inputs(folder, stage)}
        noted[stage] = {"inputs": inputs, "sha256": identities[stage]["sha256"], "files": identities, **report}
        before = folder.record.get(stage, {})
        if stage in folder.entry.transient and before.get("inputs") == inputs:  # made again, perhaps by another version
            former = {*before.get("former", ()), before["sha256"]} - {identities[stage]["sha256"]}
            noted[stage] |= {"former": sorted(former)} if former else {}
    record = folder.record | noted
    files.write_json(folder.path / RECORD, {name: record[name] for name in STAGES if name in record})


def _table(path: Path) -> CalibrationTable:
    from pipelines.quantization.calibration.table import CalibrationTable

    return CalibrationTable.load(path)


def _graph(path: Path) -> ir.Model:
    from pipelines.graph import io

    return io.load(path)


def _native(folder: ModelFolder) -> dict[str, Any]:
    from pipelines.engines.native.forms import Forms
    from pipelines.engines.native.recommender_files import note_shared
    from pipelines.graph import io

    if not isinstance(folder.entry, Lowerable):
        raise RequestError(
            f"the native kernels do not support {folder.entry.name}; it runs in onnxruntime and openvino"
        )
    model, report, _ = _lowered(folder, folder.entry)
    if model is None:
        raise RequestError(
            f"{folder.card.name} does not run in the native kernels: {report['reason']}; it runs in onnxruntime and "
            "openvino"
        )
    if (shared := folder.entry.shared_inputs(folder.preprocessing)) is not None:
        note_shared(model, shared)
    path = io.save_mapped(model, folder.path / NATIVE)
    digest = files.sha256(files.mapped(path))
    if extension.isas() and folder.fetch is None:  # the card of a shipped model stays as it is
        form = {"name": Forms(path).chosen, "cpu": machine.environment()["cpu"]}
        files.write_json(folder.path / CARD, {**folder.card.to_json(), "form": form})
    return {"form": NATIVE_FORM, "recipe": folder.recipe.to_json(), "data_sha256": digest, **report}


def _lowered(folder: ModelFolder, family: Lowerable) -> tuple[ir.Model | None, dict[str, Any], Mapping[str, Any]]:
    """Returns the native form of rewritten.onnx; the error bound applies to the samples of an imported model."""
    model, table = _graph(folder.path / "rewritten.onnx"), _table(folder.path / "calibration.json")
    return family.lower(model, table, folder.recipe, scales_of(folder), rows_of(folder), folder.imported)


def native_form(folder: ModelFolder) -> dict[str, Any]:
    """Returns the report on the form for the native kernels, built or not; writes nothing.

    Args:
        folder: Model folder.

    Returns:
        {"fold": bool, "reason": one line, ...}, or {} for a family without one.

    Raises:
        RequestError: rewritten.onnx or calibration.json is missing.
    """
    if not isinstance(folder.entry, Lowerable) or NATIVE in folder.record:
        kept = ("fold", "reason", "forms", "refused", "tables")
        return {key: value for key, value in folder.record.get(NATIVE, {}).items() if key in kept}
    for name in ("rewritten.onnx", "calibration.json"):
        folder.verify(name)
    _, report, _ = _lowered(folder, folder.entry)
    return {key: value for key, value in report.items() if key != "quantization"}


def _freeze(folder: ModelFolder) -> dict[str, Any]:
    if not isinstance(folder.entry, Freezable):
        again = f" with: {folder.entry.command}" if isinstance(folder.entry, OnnxImportable) else ""
        raise RequestError(f"{folder.path} lacks its fp32.onnx; rebuild the model{again}")
    return dict(folder.entry.freeze(folder.path))


def _expand(folder: ModelFolder) -> dict[str, Any]:
    from pipelines.graph import edit, io

    model = _graph(folder.verify(HALF))
    edit.expand_fp16(model)
    io.save(model, folder.path / "fp32.onnx")
    return {"weights": "float16 values"}


def _rewrite(folder: ModelFolder) -> dict[str, Any]:
    from pipelines.graph import io
    from pipelines.rewrites.driver import rewrite

    model = _graph(folder.path / "fp32.onnx")
    report = rewrite(model, folder.entry.passes(folder.preprocessing))
    io.save(model, folder.path / "rewritten.onnx")
    return report.to_json()


def _calibrate(folder: ModelFolder, recipe: QuantRecipe) -> tuple[CalibrationTable, dict[str, Any]]:
    """Returns the calibration table and, on samples of the package, the quality of int8."""
    from pipelines.quantization.ptq import FITTED, make_table_of_file

    _require_no_own_data(folder, recipe.observer)
    path, trained = folder.path / "rewritten.onnx", folder.trained
    if trained is not None and (recipe.observer, recipe.search, recipe.correct) == (trained.observer, False, False):
        return _trained(folder, trained, _graph(path)), {}
    samples, total = own_samples(folder)
    entry = folder.entry if not (folder.path / SAMPLES).is_file() else None
    fitted = FITTED if isinstance(entry, ShipsSamples) else None
    table = folder.with_given_ranges(make_table_of_file(path, recipe, samples, total, fitted=fitted))
    if not isinstance(entry, ShipsSamples):
        return table, {}
    table, quality = entry.judged(folder, path, recipe, table)
    logger.info("%s, int8 calibrated on texts of the package: %s", folder.card.name, quality)
    return table, {"quality": quality}


def _trained(folder: ModelFolder, trained: CalibrationTable, model: ir.Model) -> CalibrationTable:
    """Returns the table of `model` with the trained ranges; missing ones are observed on the kept samples."""
    from pipelines.graph import io, query
    from pipelines.quantization.calibration.calibrate import calibrate

    # int8 tensors, which DequantizeLinear reads, have no ranges
    values = [
        *model.graph.inputs,
        *(value for node in model.graph if node.op_type != "DequantizeLinear" for value in node.outputs),
    ]
    names = [str(value.name) for value in values if query.is_float(value)]
    if unknown := trained.tensors.keys() - set(names):
        raise RequestError(
            f"{folder.path / TRAINED} has a range of {min(unknown)}, which the model lacks; fine-tune it again"
        )
    ranges = dict(trained.tensors)
    if missing := [name for name in names if name not in ranges]:
        logger.warning(
            "%s: no trained range for %s, observed on %s instead", folder.card.name, ", ".join(missing), SAMPLES
        )
        observed = calibrate(model, own_samples(folder)[0], trained.observer).tensors
        ranges |= {name: observed[name] for name in missing if name in observed}
    tensors = {name: ranges[name] for name in names if name in ranges}
    return replace(trained, graph=io.digest(model), tensors=tensors, recipe={})


def _require_no_own_data(folder: ModelFolder, observer: str) -> None:
    """Raises RequestError if the folder was calibrated on own data, which a new calibration would lose."""
    if folder.record.get("calibration.json", {}).get("own_data"):
        raise RequestError(
            f"{folder.path} was calibrated on own data, which a new calibration needs; "
            f"run: zoo calibrate {folder.path} --data FILE --observer {observer}"
        )


def _save_table(
    folder: ModelFolder, table: CalibrationTable, facts: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    table.save(folder.path / "calibration.json")
    return {"observer": table.observer, "samples": table.samples, "reader": _reader(), **facts}


def _reader() -> str:
    """Returns the version of the code that checks tables against graphs; a passed check is not repeated."""
    return f"{TABLE_VERSION} {importlib.metadata.version('onnx-ir')}"


def _quantize(folder: ModelFolder, recipe: QuantRecipe, table: CalibrationTable) -> tuple[ir.Model, QuantReport]:
    from pipelines.quantization.quantizer import quantize

    return quantize(_graph(folder.path / "rewritten.onnx"), recipe, table)


def _save_int8(folder: ModelFolder, model: ir.Model, report: QuantReport) -> dict[str, Any]:
    from pipelines.graph import io

    io.save(model, folder.path / "int8.onnx")
    files.write_json(folder.path / QUANTIZATION, report.to_json())
    return {"recipe": report.recipe.to_json(), "precisions": report.counts()}


def set_table(folder: ModelFolder, table: CalibrationTable, *, own_data: bool) -> Path:
    """Writes a table as the folder's calibration.json and returns its path.

    Args:
        folder: Model folder.
        table: Calibration table.
        own_data: Whether it comes from samples outside the folder.
    """
    with _locked(folder):
        with unlisted.kept(folder, "calibration.json", replace=True):
            _mark_unfinished(folder, "calibration.json")
            report = _save_table(folder, table)
        _record_reports(folder, {"calibration.json": {**report, "own_data": own_data}})
    return folder.path / "calibration.json"


def set_recipe(folder: ModelFolder, recipe: QuantRecipe) -> None:
    """Makes int8.onnx by a recipe, which later builds keep; another observer calibrates again.

    On failure, int8.onnx, the table and the recipe do not change.

    Args:
        folder: Model folder.
        recipe: Quantization options.

    Raises:
        RequestError: A calibration on the user's own data would have to be repeated, or `quantize` refuses the recipe.
    """
    with _locked(folder):
        start = time.perf_counter()
        _build(folder, STAGES[:2])
        state = _state(folder, "calibration.json", "calibration.json")
        anew = state == "stale" or (state == "kept" and _needs_calibration(folder, recipe))
        table, facts = _calibrate(folder, recipe) if anew else (_table(folder.path / "calibration.json"), {})
        result = _quantize(folder, recipe, table)
        reports: dict[str, dict[str, Any]] = {}
        with contextlib.ExitStack() as stack:
            for stage in (*(["calibration.json"] if anew else []), "int8.onnx"):
                stack.enter_context(unlisted.kept(folder, stage, replace=True))
                _mark_unfinished(folder, stage)
            if anew:
                reports["calibration.json"] = _save_table(folder, table, facts)
            reports["int8.onnx"] = {"seconds": round(time.perf_counter() - start, 2), **_save_int8(folder, *result)}
        _record_reports(folder, reports)
        remove_intermediate_files(folder)


def _needs_calibration(folder: ModelFolder, recipe: QuantRecipe) -> bool:
    """Returns whether a recipe needs another calibration than the last recipe; corrections on own data are kept."""
    before, table = folder.recipe, _table(folder.path / "calibration.json")
    if recipe.observer != before.observer:
        return True
    fits = recipe.same_but_observer(table.recipe) if recipe.correct else not table.recipe
    return (not fits or recipe.search != before.search) and not folder.record["calibration.json"].get("own_data")
