"""The check of one form of a graph against ONNX Runtime, in a child process: OpenVINO may crash here."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelines.core.batches import Batch, length, resized
from pipelines.core.errors import ZooError, one_line
from pipelines.engines.agreement import ALIKE, LONG_AXIS, difference, largest_difference, stretched, tolerance, variants
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.engines.openvino.forms import DYNAMIC, Graph
from pipelines.engines.openvino.session import OpenVinoSession

BUDGET = 4.0  # seconds until no further batch size is checked; that of the caller always is
REFERENCE_SHARE = 0.25  # of the budget that ONNX Runtime may take for a further size
ROUNDING = 1e-3  # difference of a padded or longer batch, as a share of the power, that rounding may explain
AS_OPENED = "openvino (the file as it is)"


class _Uncached(OpenVinoSession):
    cached = False


def serve(idle: float) -> None:
    """Answers requests on stdin with results on stdout, both pickled, until stdin ends or none comes for a while.

    Args:
        idle: Seconds.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    while select.select([sys.stdin], [], [], idle)[0]:
        try:
            request = pickle.load(sys.stdin.buffer)  # of our own parent
        except EOFError:
            return
        os.environ["ZOO_HOME"] = str(request.pop("home"))  # of compiled models
        pickle.dump(_answer(request), answers)
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Checks a graph in OpenVINO, in one form or as users open it, or a model in native kernels."""
    if "opened" in request:
        return check_as_opened(request["graph"], request["opened"])
    if "native" not in request:
        return check(**request)
    from pipelines.engines.native import validation

    return validation.compare(request["native"], request["batch"], *request["others"])


def check_as_opened(graph: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Compares a file that OpenVINO opens with default settings with ONNX Runtime, in several shapes, see `variants`.

    Shapes that ONNX Runtime refuses are skipped.

    Args:
        graph: Fields of `forms.Graph`.
        batch: Example batch.

    Returns:
        {"difference", "fault", "refused", "sizes"}, see `child.probe`; {} if no shape is dynamic, no operator is int8,
        or ONNX Runtime refuses the model.
    """
    spec, result = Graph(**graph), {"difference": 0.0, "fault": "", "refused": False, "sizes": []}
    try:
        reference = OnnxRuntimeSession(spec.path, spec.threads, spec.model)
    except ZooError:
        return {}
    shapes: list[str] = []
    try:
        session = _Uncached(spec.path, spec.threads, spec.model, spec.precision)
        if (run := session.as_opened()) is None:
            return {}
        for example, compared in variants(session.inputs, batch, _affordable(reference, batch)):
            try:
                expected = reference.run(example)
            except ZooError:
                continue
            shapes.append(", ".join(f"{name} {list(array.shape)}" for name, array in example.items()))
            try:
                outputs = run(example)
            except ZooError:
                if compared:
                    raise
                run, shapes = session.as_opened() or run, []
                continue
            if compared:
                share, name = largest_difference(AS_OPENED, outputs, expected)
                if share > ALIKE and share > tolerance(reference, example, expected):
                    raise ZooError(difference(AS_OPENED, name, share))
    except ZooError as error:
        history = f", with {' after '.join(shapes[:-2:-1] + shapes[:1] * (len(shapes) > 1))}" if shapes else ""
        return result | {"difference": np.inf, "fault": one_line(error) + history}
    return result


def _affordable(reference: OnnxRuntimeSession, batch: Batch) -> int:
    """Returns the size of long batches that ONNX Runtime computes within a share of the budget, `LONG_AXIS` at most."""
    start = time.perf_counter()
    with contextlib.suppress(ZooError):
        reference.run(batch)
    seconds = (time.perf_counter() - start) / max(length(batch), 1)
    return int(np.clip(REFERENCE_SHARE * BUDGET / seconds, 2, LONG_AXIS))


def check(graph: dict[str, Any], form: str, batch: Batch, sizes: Sequence[int]) -> dict[str, Any]:
    """Runs a graph in both engines at several batch sizes.

    Args:
        graph: Fields of `forms.Graph`.
        form: One of `forms.FORMS`.
        batch: Example batch, whose samples are repeated.
        sizes: Batch sizes; the first is the caller's, 0 if the inputs share no sample axis.

    Returns:
        {"difference", "fault", "refused", "sizes", "worst"}, see `child.probe`; {} if ONNX Runtime does not run the
        batch.
    """
    spec = Graph(**graph)
    try:
        reference = OnnxRuntimeSession(spec.path, spec.threads, spec.model)
        start = time.perf_counter()
        reference.run(resized(batch, sizes[0]))
    except ZooError:
        return {}
    seconds = (time.perf_counter() - start) / max(sizes[0], 1)
    dynamic: OpenVinoSession | None = None
    padded = form == DYNAMIC  # no batch is
    result: dict[str, Any] = {"difference": 0.0, "fault": "", "refused": False, "sizes": []}
    for size in sizes:
        if result["sizes"] and (seconds * size > REFERENCE_SHARE * BUDGET or time.perf_counter() - start > BUDGET):
            continue
        example = resized(batch, size)
        try:
            expected = reference.run(example)
        except ZooError:
            continue
        cached = spec.cached and size == sizes[0]
        for _ in range(1 + cached):  # compiled, and from the cache
            kind = OpenVinoSession if cached else _Uncached
            try:
                session = dynamic or kind(spec.path, spec.threads, spec.model, spec.precision, form=form)
                outputs = session.run(example)
            except ZooError as error:
                return {"difference": np.inf, "fault": one_line(error), "refused": True, "sizes": []}
            try:
                share, name = largest_difference("openvino", outputs, expected)
                if share > ALIKE and share <= tolerance(reference, example, expected):
                    share = ALIKE
                fault = difference("openvino", name, share)
            except ZooError as error:
                share, fault = np.inf, one_line(error)
            if share > result["difference"]:
                where = f"{form} of {size}" if size and form != DYNAMIC else form
                result |= {"difference": share, "fault": f"with {where}, {fault}", "worst": size}
        if result["difference"] > ALIKE:
            break
        if size > 1 and not padded and (fault := _fault_of_padding(session, reference, batch, size, share)):
            return result | {"difference": np.inf, "fault": f"with {form}, {fault}", "worst": size}
        padded |= size > 1
        result["sizes"].append(size)
        dynamic = session if form == DYNAMIC else None
    if result["sizes"] and (len(sizes) > 1 or not sizes[0]):
        few = resized(batch, min(sizes[0], 2))
        for _ in range(1 + spec.cached):
            if fault := _fault_of_growth(spec, form, reference, few, bool(sizes[0]), result["difference"]):
                return result | {"difference": np.inf, "fault": f"with {form}, {fault}", "worst": sizes[0]}
    return result


def _fault_of_padding(
    session: OpenVinoSession, reference: OnnxRuntimeSession, batch: Batch, size: int, exact: float
) -> str:
    """Returns the fault of half a batch that is padded to a compiled size, or ""; exact: difference of a full one."""
    if not session.pads:
        return ""
    half = resized(batch, (size + 1) // 2)
    try:
        share, name = largest_difference("openvino", session.run(half), reference.run(half))
    except ZooError as error:
        return f"a padded batch is wrong: {one_line(error)}"
    if share <= max(ROUNDING, 10 * exact):
        return ""
    return f"a padded batch is wrong, as samples depend on each other: {difference('openvino', name, share)}"


def _fault_of_growth(
    graph: Graph, form: str, reference: OnnxRuntimeSession, batch: Batch, batched: bool, exact: float
) -> str:
    """Returns the fault of a batch that is longer along dynamic axes than the first of a session, or "".

    OpenVINO 2026.4 wrote past a buffer of the first shape (attention over one key, and then over many), and computed
    recurrent layers wrongly from the cache, for more than one series.
    """
    free = {
        name: [axis for axis, size in enumerate(port.shape) if size is None and axis >= batched]
        for name, port in reference.inputs.items()
    }
    if not any(free.values()):
        return ""
    try:
        kind = OpenVinoSession if graph.cached else _Uncached
        session = kind(graph.path, graph.threads, graph.model, graph.precision, form=form)
        for size in (1, LONG_AXIS):
            example = {name: stretched(batch[name], axes, size) for name, axes in free.items()}
            expected = reference.run(example)
            share, name = largest_difference("openvino", session.run(example), expected)
    except ZooError:  # such lengths do not fit this graph
        return ""
    if share <= max(ROUNDING, 10 * exact):
        return ""
    return f"a batch of length {LONG_AXIS} after one of length 1 is wrong: {difference('openvino', name, share)}"
