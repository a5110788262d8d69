"""Validation of native kernels against ONNX Runtime, before the first use of a model on a machine, in a child process.

Results are compared with those of int8.onnx at batch sizes from 1 to a large one and that of the caller, and in further
batches of other shapes, such as long texts. The results of a sample in a batch are compared with those of the sample
alone. The tolerance is larger for models that amplify rounding, measured with and without ONNX Runtime's optimizations.
The result is cached per machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import files, machine, settings
from pipelines.core.batches import Batch, length, resized
from pipelines.core.errors import ZooError, one_line
from pipelines.engines.agreement import ALIKE, WrongResultsError, difference, largest_difference
from pipelines.engines.openvino import child
from pipelines.kernels import extension

logger = logging.getLogger(__name__)

VERSION = 12  # of verdicts: bump it when the checks change, or the results of kernels
SIZES = (1, 2, 8, 128)  # batch sizes that models are checked at, unless they name others
BUDGET = 2.0  # seconds until no further batch size is checked; that of the caller always is
ROUNDING = 1000  # times the difference that optimizations of the reference make; native kernels differ by 40 times it
SAME = 1e-6  # difference of a sample alone and in a batch, as a share of the power; only float remainders have any
MIXED = (
    0.01  # the same, as a share of the difference of two samples: float parts before int8 layers may round otherwise
)
DIFFERS = "a sample in the batch differs from the sample alone"
Run = Callable[[Batch], dict[str, NDArray[Any]]]
# (batch, outputs of the kernels) -> outputs to compare with them
Expected = Callable[[Batch, Batch], dict[str, NDArray[Any]]]
_FAULTS: dict[str, str] = {}  # "" or the fault, by key
_LOCK = threading.RLock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def onnxruntime(path: Path, threads: int, *_: Any, optimize: bool = True) -> Expected:
    """Opens a reference in ONNX Runtime.

    Args:
        path: ONNX file.
        threads: Number of threads.
        optimize: Whether ONNX Runtime optimizes the graph.

    Returns:
        A function to the outputs of a batch.
    """
    from pipelines.engines.onnxruntime import OnnxRuntimeSession

    session = OnnxRuntimeSession(path, threads, optimize=optimize)
    return lambda batch, _: session.run(batch)


@dataclass(frozen=True)
class NativeModel:
    """A model in native kernels, and its reference.

    Attributes:
        open: Opens the native code; takes the path and the number of threads.
        path: File of the native code.
        reference: ONNX file with the same inputs and outputs, unless `expected` reads another.
        threads: Intra-op threads.
        names: Further arguments of `open` and `expected`, such as names of inputs.
        expected: Opens the reference; takes its path, the number of threads, `names`, and whether to optimize it.
        sizes: Batch sizes to check.
        repeated: Further batch sizes, at which samples are compared with the sample alone, not with the reference.
    """

    open: Callable[..., Run]
    path: Path
    reference: Path
    threads: int
    names: Sequence[Any] = ()
    expected: Callable[..., Expected] = onnxruntime
    sizes: Sequence[int] = SIZES
    repeated: Sequence[int] = ()

    @property
    def key(self) -> str:
        """Digest of the files, the machine, and all that a verdict depends on."""
        digests = [files.digest(path) for path in (self.path, self.reference)]
        parts = (VERSION, digests, self.threads, machine.fingerprint(), extension.isas(), *self.names)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def validate(model: NativeModel, batch: Batch, *others: Batch) -> None:
    """Validates native code against its reference, once per machine.

    Args:
        model: Model and its reference.
        batch: Example batch, whose samples are repeated; nothing is compared without samples.
        *others: Batches of other shapes.

    Raises:
        WrongResultsError: The results differ from those of the reference.
    """
    if not model.reference.is_file() or not length(batch):
        return
    with _LOCK:
        key = model.key
        if key not in _FAULTS:
            _FAULTS[key] = _remembered(model, key, batch, others)
    if _FAULTS[key]:
        raise WrongResultsError(
            f"the native kernels do not compute {model.path} correctly on this machine ({_FAULTS[key]}); use "
            "onnxruntime"
        )


def _remembered(model: NativeModel, key: str, batch: Batch, others: Sequence[Batch]) -> str:
    """Returns the stored fault of an earlier validation, or validates and stores the fault."""
    path = settings.home() / "verdicts" / f"native-{key}.json"
    if path.is_file():
        try:
            return str(files.read_json(path)["fault"])
        except (KeyError, TypeError, ZooError):
            path.unlink(missing_ok=True)
    few = {name: array[: max(*model.sizes, *model.repeated)] for name, array in batch.items()}
    # the child process may have been started in another folder
    absolute = replace(model, path=model.path.absolute(), reference=model.reference.absolute())
    request = {"native": absolute, "form": "native kernels", "batch": few, "others": others, "home": settings.home()}
    result = child.probe(request)
    if result is None:
        return ""
    fault = str(result["fault"]) if result["difference"] > ALIKE else ""
    try:
        files.write_json(path, {"fault": fault, "sizes": result["sizes"], "model": str(model.path)})
    except ZooError as error:
        logger.info("the validation of the native kernels is not cached: %s", error)
    return fault


def compare(model: NativeModel, batch: Batch, *others: Batch) -> dict[str, Any]:
    """Compares native code with its reference; runs in the child process.

    Args:
        model: Model and its reference.
        batch: Example batch.
        *others: Batches of other shapes; one that the reference does not run is left out.

    Returns:
        {"difference", "fault", "refused", "sizes"}, see `child.probe`; {} if the reference does not run the batch.
    """
    try:
        expect = model.expected(model.reference, model.threads, *model.names)
        run, alone = model.open(model.path, model.threads, *model.names), resized(batch, 1)
        start, count = time.perf_counter(), length(batch)
        computed = run(batch)
        whole = expect(batch, computed)
    except ZooError:
        return {}
    seconds = (time.perf_counter() - start) / count
    one = computed if count == 1 else {}
    noise: float | None = None  # that optimizations of the reference make
    with contextlib.suppress(ZooError):  # a fixed batch size
        if count > 1:
            one = run(alone)
            expect(alone, one)
    result: dict[str, Any] = {"difference": 0.0, "fault": "", "refused": False, "sizes": []}
    sizes = dict.fromkeys((count, *(model.sizes if one else ())))
    for samples, size in (*((batch, size) for size in sizes), *((other, length(other)) for other in others)):
        is_slow = seconds * size > BUDGET / 2 or time.perf_counter() - start > BUDGET
        if samples is batch and result["sizes"] and is_slow:
            continue
        example, same = resized(samples, size), samples is batch and size == count
        try:
            outputs = computed if same else run(example)
            expected = whole if same else expect(example, outputs)
            first = one if samples is batch or not one else run(resized(samples, 1))
        except ZooError:  # the graph does not take this size
            continue
        try:
            share, name = largest_difference("native", outputs, expected)
            if share > ALIKE and _chooses(model.reference):
                share, name = largest_difference("native", outputs, expected, ordered=False)
            share *= min(1.0, _power(expected, name) / (_power(whole, name) or 1.0))  # one score may be near zero
            if share > ALIKE:
                if noise is None:
                    plain = model.expected(model.reference, model.threads, *model.names, optimize=False)
                    noise, _ = largest_difference("native", plain(batch, run(batch)), whole)
                share = min(share, ALIKE) if share <= ROUNDING * noise else share
            fault = difference("native", name, share)
        except ZooError as error:
            share, fault = np.inf, one_line(error)
        else:
            if not _all_repeat(outputs, first, size, length(samples)):
                share, fault = np.inf, DIFFERS
        if share > result["difference"]:
            shape = "" if samples is batch else f" of shape {list(next(iter(example.values())).shape)}"
            result |= {"difference": float(share), "fault": f"with a batch{shape or f' of {size}'}, {fault}"}
        result["sizes"].append(size)
    is_free = set(model.sizes) <= set(result["sizes"])  # in its number of samples
    for size in model.repeated if one and is_free and result["difference"] <= ALIKE else ():
        with contextlib.suppress(ZooError):
            if not _all_repeat(run(resized(batch, size)), one, size, count):
                result |= {"difference": np.inf, "fault": f"with a batch of {size}, {DIFFERS}"}
            result["sizes"].append(size)
    return result


def _chooses(path: Path) -> bool:
    """Whether a network ranks scores: almost equal ones change their order with the last bits."""
    from pipelines.graph import io, query

    return any(query.is_op(node, "TopK", "NonMaxSuppression") for node in io.load(path).graph.all_nodes())


def _power(outputs: Batch, name: str) -> float:
    """Mean square of an output where it is finite; 0 for none."""
    values = outputs.get(name, np.zeros(0))
    values = values[np.isfinite(values)]
    return float(np.square(values, dtype=np.float64).mean()) if values.size else 0.0


def _all_repeat(outputs: Batch, alone: Batch, size: int, count: int) -> bool:
    return all(_repeats(outputs[name], array, size, count) for name, array in alone.items())


def _repeats(array: NDArray[Any], alone: NDArray[Any], size: int, count: int) -> bool:
    """Whether every sample of an output that repeats the first, after `count` others, equals the sample alone."""
    if array.dtype.kind != "f" or array.shape[:1] != (size,) or alone.shape != (1, *array.shape[1:]):
        return True
    same, others = array[::count], array[1:count]
    finite = np.isfinite(alone) & np.isfinite(same)
    apart = np.square(np.where(finite, same - alone, 0), dtype=np.float64).sum()
    power = np.square(np.where(finite, alone, 0), dtype=np.float64).sum()
    finite = finite[:1] & np.isfinite(others)
    spread = np.square(np.where(finite, others - alone, 0), dtype=np.float64).sum() / max(len(others), 1)
    return bool(apart <= max(SAME * power, MIXED * spread))
