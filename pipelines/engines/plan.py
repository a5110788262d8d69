"""Plan files: the engine chosen for this machine by timing, with the compiled model, like TensorRT's engine files.

A plan file is an uncompressed .zip: plan.json (timings, the choice for each batch size, the machine) and a compiled
model per batch size, OpenVINO's exported model or ONNX Runtime's optimized graph in .ort format. It refers to the model
files that it was built from.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import files, machine
from pipelines.core.batches import Batch, cut, joined, length
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.core.progress import progress
from pipelines.engines.agreement import require_alike, require_correct_as_opened
from pipelines.engines.contexts import Asynchronous
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.engines.openvino.session import OpenVinoSession, Requests, library
from pipelines.engines.session import Executed, Port, Session
from pipelines.engines.stock import available
from pipelines.engines.timing import REFERENCE, measure
from pipelines.kernels import extension

logger = logging.getLogger(__name__)

FORMAT = 1  # version of plan files
CONTENTS = "plan.json"
_FORM: dict[str, type] = {  # required fields of CONTENTS
    "machine": str,
    "environment": dict,
    "models": dict,
    "inputs": list,
    "candidates": list,
    "threads": list,
    "profiles": list,
}
_PROFILE: dict[str, type] = {
    "engine": str,
    "precision": str,
    "threads": int,
    "batch_size": int,
    "path": str,
    "outputs": list,
    "compiled": int,
}
Opener = Callable[[Path, str, int, str], Session]  # model file, engine, threads, precision


@dataclass(frozen=True)
class Candidate:
    """One model file in one engine that a plan may choose.

    Attributes:
        engine: Name of the engine.
        precision: Name of the precision, for reports; "bf16" runs a float file in bfloat16.
        path: Model file.
    """

    engine: str
    precision: str
    path: Path


def build(
    candidates: Sequence[Candidate],
    batches: Sequence[Batch],
    threads: Sequence[int],
    output: str | Path,
    opener: Opener,
) -> dict[str, Any]:
    """Times every candidate with every thread count on every batch, in turn, and writes the plan file.

    Args:
        candidates: Model files and engines.
        batches: One batch per batch size, array [samples, ...] for every graph input.
        threads: Thread counts to try.
        output: Plan file to write.
        opener: Opens a candidate.

    Returns:
        The plan: {"format", "machine", "environment", "models": {path: {"bytes", "modified", "sha256"}},
        "samples_first" (in all outputs), "inputs", "candidates", "timings": [{"engine", "precision", "threads",
        "batch_size", "milliseconds", "samples_per_second"}] (medians), "profiles": the fastest timing per batch size
        with "path", "outputs" and "compiled" (bytes of the compiled model, 0 without one), "failed": errors of
        candidates that do not run}. Paths are relative to the folder of the file.

    Raises:
        RequestError: There are no candidates.
        ZooError: No candidate runs.
    """
    if not candidates:
        raise RequestError(f"none of the engines asked for computes this model; choose among {', '.join(available())}")
    folder = Path(output).resolve().parent
    with files.replacing(output) as temporary:
        timings: list[dict[str, Any]] = []
        profiles: list[dict[str, Any]] = []
        blobs: list[bytes] = []
        failed: list[str] = []
        samples_first = True
        with progress("timing batch sizes", len(batches)) as advance:
            for batch in sorted(batches, key=length):
                rows, best, session = _timed(candidates, batch, threads, opener, failed)
                results = session.run(batch)
                samples_first &= all(np.shape(array)[:1] == (length(batch),) for array in results.values())
                timings += rows
                blobs.append(_compiled(session, batch))
                path = _relative(_file_of(candidates, best), folder)
                profiles.append({**best, "path": path, "outputs": list(results), "compiled": len(blobs[-1])})
                advance(1)
        paths = sorted({candidate.path for candidate in candidates})
        plan = {
            "format": FORMAT,
            "machine": machine.fingerprint(),
            "kernels": extension.isas(),
            "environment": machine.environment(),
            "models": {_relative(path, folder): files.identity(path) for path in paths},
            "samples_first": samples_first,
            "inputs": [
                {name: [str(array.dtype), list(array.shape)] for name, array in batch.items()} for batch in batches
            ],
            "candidates": [asdict(candidate) | {"path": _relative(candidate.path, folder)} for candidate in candidates],
            "threads": list(threads),
            "timings": timings,
            "profiles": profiles,
            "failed": sorted(set(failed)),
        }
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(zipfile.ZipInfo(CONTENTS), json.dumps(plan, indent=2))
            for profile, blob in zip(profiles, blobs, strict=True):
                if blob:
                    archive.writestr(zipfile.ZipInfo(_member(profile)), blob)
    return plan


def _timed(
    candidates: Sequence[Candidate], batch: Batch, threads: Sequence[int], opener: Opener, failed: list[str]
) -> tuple[list[dict[str, Any]], dict[str, Any], Session]:
    """The timings of a batch, the fastest one and its session."""
    sessions, rows = _open_all(candidates, batch, threads, opener, failed)
    if not sessions:
        raise ZooError(f"no engine runs the model: {'; '.join(failed)}")
    size = length(batch)
    for row, milliseconds in zip(rows, measure(sessions, batch), strict=True):
        row["milliseconds"] = round(milliseconds, 4)
        row["samples_per_second"] = round(size / milliseconds * 1e3, 1)
    best, session = min(zip(rows, sessions, strict=True), key=lambda pair: float(pair[0]["milliseconds"]))
    return rows, best, session


def _file_of(candidates: Sequence[Candidate], timing: Mapping[str, Any]) -> Path:
    return next(
        entry.path for entry in candidates if (entry.engine, entry.precision) == (timing["engine"], timing["precision"])
    )


def open_plan(path: str | Path, opener: Opener) -> PlannedSession:
    """Opens a plan file.

    If the CPU, cores, a library version or the model changed, it logs a warning and rebuilds the plan, timed on
    zeros. If the file cannot be written, the new plan is used but not kept.

    Args:
        path: Plan file.
        opener: Opens a model file in an engine.

    Returns:
        The session.

    Raises:
        RequestError: The file is no plan, or it must be rebuilt and its model is missing.
    """
    path = Path(path)
    plan = read_plan(path)
    if reason := stale(path, plan):
        logger.warning("%s: %s; rebuilding it", path, reason)
        plan, path = _rebuild(path, plan, opener)
    return PlannedSession(path, plan, opener)


def read_plan(path: str | Path) -> dict[str, Any]:
    """Reads plan.json of a plan file, see `build`.

    Args:
        path: Plan file.

    Returns:
        The plan.

    Raises:
        RequestError: The file is no plan of this version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            plan: dict[str, Any] = json.loads(archive.read(CONTENTS))
        if plan["format"] != FORMAT:
            raise ValueError(f"format {plan['format']!r}, expected {FORMAT}")
        _require_form(plan)
    except Exception as error:  # zipfile, zlib and json raise their own kinds for every sort of damage
        raise RequestError(
            f"{path} is not a plan of this version ({error}); make one with: zoo plan MODEL -o {path}"
        ) from error
    return plan


def _require_form(plan: Mapping[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError for a plan that `build` cannot have written."""
    for key, kind in _FORM.items():
        if not isinstance(plan[key], kind) or not (plan[key] or key == "environment"):
            raise ValueError(f"found {key} {str(plan[key])[:40]!r}")
    for profile in plan["profiles"]:
        for key, kind in _PROFILE.items():
            if not isinstance(profile[key], kind) or (kind is int and profile[key] < (key != "compiled")):
                raise ValueError(f"found {key} {str(profile[key])[:40]!r} in a profile")
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name, (dtype, shape) in (item for batch in plan["inputs"] for item in batch.items()):
        if min(shape, default=1) < 0 or math.prod(shape) * np.dtype(dtype).itemsize > room:
            raise ValueError(f"found an input {name} of {dtype} {shape}")
    for was in plan["models"].values():
        if not (isinstance(was["bytes"], int) and isinstance(was["modified"], int) and isinstance(was["sha256"], str)):
            raise ValueError("found a model without bytes, modified and sha256")
    if not all(isinstance(entry[key], str) for entry in plan["candidates"] for key in ("engine", "precision", "path")):
        raise ValueError("found a candidate without engine, precision and path")


def stale(path: str | Path, stored: Mapping[str, Any]) -> str:
    """Returns why a plan does not hold on this machine, or "".

    Args:
        path: Plan file.
        stored: Result of `read_plan`.
    """
    if stored["machine"] != machine.fingerprint():
        made, here = stored["environment"], machine.environment()
        differs = [
            f"{key} {made.get(key)} (here {here[key]})" for key in ("cpu", "cores", "isa") if made.get(key) != here[key]
        ]
        versions = made.get("versions", {})
        differs += [
            f"{key} {versions.get(key)} (here {version})"
            for key, version in here["versions"].items()
            if versions.get(key) != version
        ]
        return f"made with {', '.join(differs) or 'another machine'}"
    if stored.get("kernels") != extension.isas():
        return f"made with the native kernels {stored.get('kernels')} (here {extension.isas()})"
    for name, was in stored["models"].items():
        model = Path(path).parent / name
        if model.is_file() and not files.same(model, was):
            return f"{model} has changed since"
    return ""


class PlannedSession(Asynchronous):
    """Session of a plan file: a batch runs in the profile of the next larger batch size; larger batches are cut.

    The engine of a profile is opened at its first use, from the compiled model if there is one. Threads may share it.

    Args:
        path: Plan file.
        plan: Result of `read_plan`.
        opener: Opens a model file in an engine.
    """

    engine = "plan"

    def __init__(self, path: Path, plan: dict[str, Any], opener: Opener) -> None:
        self.path, self.plan, self._opener = path, plan, opener
        self._sessions: dict[int, Session] = {}
        self._lock = threading.Lock()  # one thread opens
        self._profiles = {int(profile["batch_size"]): profile for profile in plan["profiles"]}
        self.threads = max(int(profile["threads"]) for profile in plan["profiles"])
        self._samples_first = bool(plan.get("samples_first", True))

    @property
    def inputs(self) -> dict[str, Port]:
        """Element type and shape of every input, by name."""
        return self._session(min(self._profiles)).inputs

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes the outputs of a batch of any size, see `Runnable.run`."""
        count, most = length(batch), max(self._profiles)
        if count <= most:
            return self._profile(count).run(batch)
        if not self._samples_first:
            raise RequestError(
                f"found a batch of {count}, and an output does not count samples first, so that parts of {most} cannot "
                f"be joined; plan with --batch-size {count}"
            )
        return joined([self.run(part) for part in cut(batch, most)])

    def executed(self, batch: Batch) -> list[Executed]:
        """Lists the operators that the profile of this batch size runs, see `Session.executed`."""
        most = max(self._profiles)
        return self._profile(min(length(batch), most)).executed({name: array[:most] for name, array in batch.items()})

    def _profile(self, count: int) -> Session:
        """The session of the next larger batch size."""
        return self._session(min(size for size in self._profiles if size >= count))

    def _session(self, size: int) -> Session:
        with self._lock:
            if size not in self._sessions:
                self._sessions[size] = self._open(self._profiles[size])
            return self._sessions[size]

    def _open(self, profile: Mapping[str, Any]) -> Session:
        model, threads = self.path.parent / profile["path"], int(profile["threads"])
        if not profile["compiled"]:
            return self._opener(model, profile["engine"], threads, profile["precision"])
        try:
            with zipfile.ZipFile(self.path) as archive:
                blob = archive.read(_member(profile))
        except Exception as error:  # zipfile and zlib raise their own kinds
            raise RequestError(
                f"cannot read {_member(profile)} in {self.path} ({one_line(error)}); run: zoo plan MODEL -o {self.path}"
            ) from error
        if profile["engine"] == "onnxruntime":
            return _Optimized(self.path, threads, blob)
        inputs, size = list(self.plan["inputs"][0]), int(profile["batch_size"])
        return _Imported(self.path, threads, blob, size, inputs, profile["outputs"], self._samples_first)


class _Optimized(OnnxRuntimeSession):
    """ONNX Runtime session of an optimized graph."""

    optimize = False


class _Imported(OpenVinoSession):
    """OpenVINO session of a model compiled for one batch size; smaller batches are padded."""

    def __init__(
        self,
        path: Path,
        threads: int,
        blob: bytes,
        size: int,
        inputs: Sequence[str],
        outputs: Sequence[str],
        samples_first: bool,
    ) -> None:
        ov = library()
        self.path, self.threads, self._fixed, self._outputs = path, threads, size, list(outputs)
        try:
            compiled = ov.Core().import_model(
                io.BytesIO(blob), "CPU", {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
            )
        except Exception as error:  # openvino raises RuntimeError with a page of text
            raise RequestError(f"openvino cannot load the compiled model of {path}: {one_line(error)}") from error
        self.inputs = {  # a tensor may have taken over names of others
            next(name for name in inputs if name in port.names): Port(
                np.dtype(port.element_type.to_dtype()), (None, *list(port.shape)[1:])
            )
            for port in compiled.inputs
        }
        self.batched, self._samples_first, self._lock = True, samples_first, threading.Lock()
        self._compiled = {size: Requests(compiled)}

    def _size(self, count: int) -> int:
        if count != self._fixed and not self._samples_first:
            raise RequestError(
                f"found a batch of {count}, and an output does not count samples first; {self.path} was planned for "
                f"{self._fixed}: plan with --batch-size {count}"
            )
        return self._fixed


def _open_all(
    candidates: Sequence[Candidate], batch: Batch, threads: Sequence[int], opener: Opener, failed: list[str]
) -> tuple[list[Session], list[dict[str, Any]]]:
    """Opens and runs every candidate with every thread count; failures are noted in `failed`."""
    sessions, rows = [], []
    references: dict[Path, tuple[Batch, Session]] = {}
    referenced: set[Path] = set()  # files that the reference engine runs
    for count in threads:
        for candidate in sorted(candidates, key=lambda candidate: candidate.engine != REFERENCE):
            try:
                session = opener(candidate.path, candidate.engine, count, candidate.precision)
                outputs = session.run(batch)
                expected = references.setdefault(candidate.path, (outputs, session))
                require_alike(candidate.engine, outputs, *expected, batch)
                if candidate.engine == REFERENCE:
                    referenced.add(candidate.path)
                elif candidate.path in referenced:
                    require_correct_as_opened(session, batch)
            except ZooError as error:
                failed.append(str(error))
                continue
            sessions.append(session)
            rows.append(
                {
                    "engine": candidate.engine,
                    "precision": candidate.precision,
                    "threads": count,
                    "batch_size": length(batch),
                }
            )
    return sessions, rows


def _compiled(session: Session, batch: Batch) -> bytes:
    """The session's model in the form that its engine loads fastest; b"" if there is none."""
    if not isinstance(session, OpenVinoSession | OnnxRuntimeSession):
        return b""
    try:
        return session.exported(length(batch))
    except ZooError as error:
        logger.info("%s", error)
        return b""


def _rebuild(path: Path, plan: Mapping[str, Any], opener: Opener) -> tuple[dict[str, Any], Path]:
    """A plan rebuilt from the same candidates, and its path."""
    candidates = [
        Candidate(entry["engine"], entry["precision"], path.parent / entry["path"]) for entry in plan["candidates"]
    ]
    if missing := [candidate.path for candidate in candidates if not candidate.path.is_file()]:
        raise RequestError(
            f"{path} must be rebuilt here, but its model is not at {missing[0]}; run: zoo plan MODEL -o {path}"
        )
    batches = [{name: np.zeros(shape, dtype) for name, (dtype, shape) in ports.items()} for ports in plan["inputs"]]
    try:
        return build(candidates, batches, plan["threads"], path, opener), path
    except RequestError as error:
        logger.warning("the rebuilt plan is not saved: %s", error)
        other = Path(tempfile.mkdtemp()) / path.name
        return build(candidates, batches, plan["threads"], other, opener), other


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path.resolve(), folder)


def _member(profile: Mapping[str, Any]) -> str:
    return f"{profile['batch_size']}.{'ort' if profile['engine'] == 'onnxruntime' else 'blob'}"
