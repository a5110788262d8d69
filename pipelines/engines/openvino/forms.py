"""Forms in which OpenVINO runs a graph, and the choice of the first one that is correct on this machine.

OpenVINO 2026.4 computes some graphs wrongly, or crashes, with small static batch sizes (`engine_quirks`). So a graph is
validated against ONNX Runtime before its first use, in a child process, at batch sizes 1, 2, 8, 64 and that of the
caller. A padded batch is compared too, since padding is wrong where the first axis is time or samples depend on each
other. For graphs with further dynamic axes, a long batch is compared after one of length 1. The result is cached per
machine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelines.core import files, machine, settings
from pipelines.core.batches import Batch
from pipelines.core.errors import ZooError
from pipelines.engines.agreement import ALIKE, WrongResultsError
from pipelines.engines.openvino import child

logger = logging.getLogger(__name__)

VERSION = 2  # of verdicts: bump it when the checks of `probe` change
STATIC = "static batch sizes"
UNFUSED = "static batch sizes, without compiled subgraphs"
DYNAMIC = "dynamic shapes"  # without compiled subgraphs and without a cache of compiled models
NEGLIGIBLE_DIFFERENCE = 1e-5  # difference from ONNX Runtime, as a share of the power, that needs no comparison of forms
FORMS = (STATIC, UNFUSED, DYNAMIC)  # the fastest first
SIZES = (1, 2, 8, 64)  # batch sizes that every graph is checked at
_PLAIN = {"SNIPPETS_MODE": "DISABLE"}
OPTIONS: dict[str, dict[str, str]] = {STATIC: {}, UNFUSED: _PLAIN, DYNAMIC: _PLAIN}
_VERDICTS: dict[Path, Verdict] = {}  # by file
_LOCK = threading.RLock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


@dataclass(frozen=True)
class Graph:
    """A graph as a session opens it.

    Attributes:
        path: ONNX file.
        model: Serialized model to open instead of the file, or None.
        threads: Intra-op threads.
        precision: "bf16", or any other name for float32.
        cached: Whether compiled models are cached on disk.
    """

    path: Path
    model: bytes | None
    threads: int
    precision: str
    cached: bool

    @property
    def key(self) -> str:
        """Digest of the graph, the machine, and all that a verdict depends on."""
        digest = files.digest(self.path) if self.model is None else hashlib.sha256(self.model).hexdigest()
        parts = (VERSION, digest, self.threads, self.precision, machine.fingerprint())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Verdict:
    """How a graph is run.

    Attributes:
        form: One of `FORMS`; "" if none is correct.
        sizes: Batch sizes where the form agreed with ONNX Runtime.
        faults: What was wrong, by form.
    """

    form: str = STATIC
    sizes: Sequence[int] = ()
    faults: dict[str, str] = field(default_factory=dict)


def correct_form(graph: Graph, batch: Batch, size: int, sizes: Sequence[int] = SIZES) -> str:
    """Returns the fastest form in which OpenVINO agrees with ONNX Runtime on this machine.

    The first call for a graph checks it at several batch sizes; later calls only check a new size.

    Args:
        graph: Graph.
        batch: Example batch, whose samples are repeated.
        size: Batch size of the caller; 0 if the inputs share no sample axis.
        sizes: Further batch sizes to check at the first call.

    Returns:
        One of `FORMS`.

    Raises:
        WrongResultsError: No form is correct.
    """
    with _LOCK:
        verdict = _read_verdict(graph)
        if verdict is None or (verdict.form and size not in verdict.sizes):
            others = [other for other in sizes if other != size] if size and verdict is None else []
            verdict = _validate(graph, verdict or Verdict(), batch, size, others)
    if not verdict.form:
        fault = next(iter(verdict.faults.values()))
        raise WrongResultsError(
            f"openvino does not compute {graph.path} correctly on this machine ({fault}); use onnxruntime"
        )
    return verdict.form


def _validate(graph: Graph, verdict: Verdict, batch: Batch, size: int, others: Sequence[int]) -> Verdict:
    """Probes the form of the verdict and, while a form differs from ONNX Runtime, the next one.

    Those are compared at the worst batch size first, and the best of them at all sizes.
    """
    sizes = [size, *others, *(other for other in verdict.sizes if other != size)]
    whole = {verdict.form: _probe(graph, verdict.form, batch, [size, *others])}
    if (first := whole[verdict.form]) is None:  # the batch is faulty, or there is no reference: nothing to compare
        return verdict
    probed = {verdict.form: first}
    if first["difference"] > NEGLIGIBLE_DIFFERENCE:
        worst = [first["worst"]] if "worst" in first else sizes
        for form in FORMS[FORMS.index(verdict.form) + 1 :]:
            probed[form] = _probe(replace(graph, cached=False), form, batch, worst) or first
    while True:
        limit = min(ALIKE, 10 * max(NEGLIGIBLE_DIFFERENCE, min(result["difference"] for result in probed.values())))
        form = next((form for form, result in probed.items() if result["difference"] <= limit), "")
        if not form or form in whole:
            break
        whole[form] = probed[form] = _probe(graph, form, batch, sizes) or first
    if not form and (all(result["refused"] for result in probed.values()) or not machine.has_vnni()):
        return replace(verdict, sizes=[*verdict.sizes, size])  # the session says why; or saturated, which is known
    kept = verdict.sizes if form == verdict.form else ()
    faults = verdict.faults
    if form != verdict.form:
        faults = faults | {name: result["fault"] for name, result in probed.items() if name != form}
    if form and form != verdict.form:
        logger.warning("%s runs in openvino with %s: %s", graph.path, form, next(iter(faults.values())))
    return _store(graph, Verdict(form, sorted({*kept, *probed[form]["sizes"]}) if form else [], faults))


def _probe(graph: Graph, form: str, batch: Batch, sizes: Sequence[int]) -> dict[str, Any] | None:
    return child.probe({"graph": asdict(graph), "form": form, "batch": batch, "sizes": sizes, "home": settings.home()})


def _file(graph: Graph) -> Path:
    return settings.home() / "verdicts" / f"{graph.key}.json"


def _read_verdict(graph: Graph) -> Verdict | None:
    """The verdict of this process or of an earlier one."""
    if (path := _file(graph)) not in _VERDICTS and path.is_file():
        try:
            verdict = Verdict(**files.read_json(path))
            if verdict.form in (*FORMS, "") and all(isinstance(size, int) for size in verdict.sizes):
                _VERDICTS[path] = verdict
        except (AttributeError, TypeError, ZooError):
            path.unlink(missing_ok=True)
    return _VERDICTS.get(path)


def _store(graph: Graph, verdict: Verdict) -> Verdict:
    path = _file(graph)
    _VERDICTS[path] = verdict
    try:
        files.write_json(path, asdict(verdict))
    except ZooError as error:
        logger.info("the validation of openvino is not cached: %s", error)
    return verdict
