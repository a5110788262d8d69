"""Validation of native kernels against ONNX Runtime, before the first use of a model on a machine, in a child process.

Results are compared with those of int8.onnx at batch sizes from 1 to a large one and that of the caller, and in further
batches of other shapes, such as long texts. The results of a sample in a batch are compared with those of the sample
alone. The tolerance is larger for models that amplify rounding, measured with and without ONNX Runtime's optimizations.
The result is cached per machine.
"""

from __future__ import annotations

import contextlib
import functools
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
from pipelines.engines.agreement import (
    ALIKE,
    NOISY,
    WrongResultsError,
    difference,
    largest_difference,
    noise_of_rounding,
)
from pipelines.engines.openvino import child
from pipelines.kernels import extension

logger = logging.getLogger(__name__)

VERSION = 13  # of verdicts: bump it when the checks change, or the results of kernels
SIZES = (1, 2, 8, 128)  # batch sizes that models are checked at, unless they name others
BUDGET = 2.0  # seconds until no further batch size is checked; that of the caller always is
ROUNDING = 1000  # times the difference that optimizations of the reference make; native kernels differ by 40 times it
EXACT = 0.01  # difference of int8 kernels with the scales of the reference, as a share of the power; .006 was seen
DECIDED = 10  # times what rounded inputs or optimizations change in the reference; native kernels differ by 6 times it
MAP = 64  # values of a sample from which classes are compared
SAME = 1e-6  # difference of a sample alone and in a batch, as a share of the power; only float remainders have any
# the same, as a share of the difference of two samples: float parts before int8 layers may round otherwise
MIXED = 0.01
DIFFERS = "a sample in the batch differs from the sample alone"
Run = Callable[[Batch], dict[str, NDArray[Any]]]
# (batch, outputs of the kernels) -> outputs to compare with them
Expected = Callable[[Batch, Batch], dict[str, NDArray[Any]]]
_FAULTS: dict[str, str | None] = {}  # "" or the fault, by key; None: nothing could be compared
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
        limit: Difference as a share of the power up to which results agree. `EXACT` is for kernels that differ from the
            reference in rounding alone, and ten times what rounding makes in the reference is allowed, see
            `agreement.noise_of_rounding`.
    """

    open: Callable[..., Run]
    path: Path
    reference: Path
    threads: int
    names: Sequence[Any] = ()
    expected: Callable[..., Expected] = onnxruntime
    sizes: Sequence[int] = SIZES
    repeated: Sequence[int] = ()
    limit: float = ALIKE

    @property
    def key(self) -> str:
        """Digest of the files, the machine, and all that a verdict depends on."""
        digests = [files.digest(path) for path in (self.path, self.reference)]
        parts = (VERSION, digests, self.threads, machine.fingerprint(), extension.isas(), *self.names)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def validate(model: NativeModel, batch: Batch, *others: Batch) -> bool:
    """Validates native code against its reference, once per machine.

    Args:
        model: Model and its reference.
        batch: Example batch, whose samples are repeated; nothing is compared without samples.
        *others: Batches of other shapes.

    Returns:
        Whether the results were compared, now or before.

    Raises:
        WrongResultsError: The results differ from those of the reference.
    """
    if not model.reference.is_file() or not length(batch):
        return False
    with _LOCK:
        key = model.key
        if key not in _FAULTS:
            _FAULTS[key] = _remembered(model, key, batch, others)
    if _FAULTS[key]:
        raise WrongResultsError(
            f"the native kernels do not compute {model.path} correctly on this machine ({_FAULTS[key]}); use "
            "onnxruntime"
        )
    return _FAULTS[key] is not None


def textured(batch: Batch) -> Batch:
    """Returns a batch to validate image networks with: the same one, or noise in place of constants.

    Constants, such as zeros, hide exchanged axes.

    Args:
        batch: Example batch.
    """
    if any(np.ptp(array) for array in batch.values() if np.size(array)):
        return batch
    rng = np.random.default_rng(0)

    def noise(array: NDArray[Any]) -> NDArray[Any]:
        if array.dtype == np.uint8:
            return rng.integers(0, 256, array.shape, np.uint8)
        return rng.normal(0, 1, array.shape).astype(array.dtype) if array.dtype.kind == "f" else array

    return {name: noise(array) for name, array in batch.items()}


def _remembered(model: NativeModel, key: str, batch: Batch, others: Sequence[Batch]) -> str | None:
    """Returns the stored fault of an earlier validation, or validates and stores the fault; None without any."""
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
        return None
    fault = str(result["fault"]) if result["difference"] > model.limit else ""
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
        example = _Example(model, batch)
    except ZooError:
        return {}
    result: dict[str, Any] = {"difference": 0.0, "fault": "", "refused": False, "sizes": []}
    sizes = dict.fromkeys((example.count, *(model.sizes if example.first else ())))
    for samples, size in (*((batch, size) for size in sizes), *((other, length(other)) for other in others)):
        if samples is batch and result["sizes"] and example.is_slow(size):
            continue
        if (compared := example.compare(samples, size)) is None:
            continue
        share, fault = compared
        if share > result["difference"]:
            shape = f"of {size}" if samples is batch else f"of shape {list(next(iter(samples.values())).shape)}"
            result |= {"difference": float(share), "fault": f"with a batch {shape}, {fault}"}
        result["sizes"].append(size)
    is_free = set(model.sizes) <= set(result["sizes"])  # in its number of samples
    for size in model.repeated if example.first and is_free and result["difference"] <= model.limit else ():
        with contextlib.suppress(ZooError):
            if not example.repeats(size):
                result |= {"difference": np.inf, "fault": f"with a batch of {size}, {DIFFERS}"}
            result["sizes"].append(size)
    return result


class _Example:
    """Results of native code and of its reference on an example batch.

    Args:
        model: Model and its reference.
        batch: The batch.

    Attributes:
        count: Samples of the batch.
        first: Native results of its first sample alone; empty if the graph does not take one sample.

    Raises:
        ZooError: The batch does not run.
    """

    def __init__(self, model: NativeModel, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self._expect = self._open_reference()
        run, alone = model.open(model.path, model.threads, *model.names), resized(batch, 1)
        self._run: Run = lambda batch: self._comparable(run(batch))
        self._start, self.count = time.perf_counter(), length(batch)
        self._outputs = self._run(batch)
        self._expected = self._expect(batch, self._outputs)
        self._seconds = (time.perf_counter() - self._start) / self.count  # of a sample
        self._tolerance: float | None = None
        self.first = self._outputs if self.count == 1 else {}
        with contextlib.suppress(ZooError):  # a fixed batch size
            if self.count > 1:
                self.first = self._run(alone)
                self._expect(alone, self.first)

    def _open_reference(self, **options: Any) -> Expected:
        expect = self.model.expected(self.model.reference, self.model.threads, *self.model.names, **options)
        return lambda batch, outputs: self._comparable(expect(batch, outputs))

    def _comparable(self, outputs: Batch) -> dict[str, NDArray[Any]]:
        """Returns outputs with maps of classes as floats."""
        return {name: array.astype(np.float64) if self._is_map(array) else array for name, array in outputs.items()}

    def _is_map(self, array: NDArray[Any]) -> bool:
        """Whether an output has classes that are compared; one class alone may turn on the last bits of scores."""
        is_large = self.model.limit < ALIKE and array.dtype.kind in "iu" and array.size >= MAP * len(array)
        return is_large and not self._chooses

    @functools.cached_property
    def _chooses(self) -> bool:
        """Whether a network ranks scores: almost equal ones change their order with the last bits."""
        from pipelines.graph import io, query

        nodes = io.load(self.model.reference).graph.all_nodes()
        return any(query.is_op(node, "TopK", "NonMaxSuppression") for node in nodes)

    def is_slow(self, size: int) -> bool:
        """Whether the time for another batch of this size is up.

        Args:
            size: Number of samples.
        """
        return self._seconds * size > BUDGET / 2 or time.perf_counter() - self._start > BUDGET

    def compare(self, samples: Batch, size: int) -> tuple[float, str] | None:
        """Compares the results of samples, which are repeated.

        Args:
            samples: The example batch, or another one.
            size: Number of samples.

        Returns:
            The largest difference and its message; None if the graph does not take the batch.
        """
        batch, own = resized(samples, size), samples is self.batch
        try:
            outputs, expected = self._outputs, self._expected
            if not own or size != self.count:
                outputs = self._run(batch)
                expected = self._expect(batch, outputs)
            first = self.first if own or not self.first else self._run(resized(samples, 1))
        except ZooError:
            return None
        try:
            share, name = self._difference(outputs, expected)
            fault = difference("native", name, share)
        except ZooError as error:
            return np.inf, one_line(error)
        return (share, fault) if _all_repeat(outputs, first, size, length(samples)) else (np.inf, DIFFERS)

    def _difference(self, outputs: Batch, expected: Batch) -> tuple[float, str]:
        """The largest difference, as a share of the power of its output in the example, and the output."""
        limit = self.model.limit
        share, name = largest_difference("native", outputs, expected)
        if share > limit and self._chooses:
            share, name = largest_difference("native", outputs, expected, ordered=False)
        share *= min(1.0, _power(expected, name) / (_power(self._expected, name) or 1.0))  # one score may be near zero
        return (limit if limit < share <= self._explained() else share), name

    def _explained(self) -> float:
        """The difference that rounding explains, as a share of the power."""
        if self._tolerance is None:
            plain = self._open_reference(optimize=False)
            noise, _ = largest_difference("native", plain(self.batch, self._outputs), self._expected)
            self._tolerance = ROUNDING * noise
            if self.model.limit < ALIKE:
                moved = noise_of_rounding(lambda batch: self._expect(batch, {}), self.batch, self._expected)
                self._tolerance = min(NOISY, DECIDED * max(noise, moved))
        return self._tolerance

    def repeats(self, size: int) -> bool:
        """Whether samples in a repeated batch have the results of the first sample alone.

        Args:
            size: Number of samples.
        """
        return _all_repeat(self._run(resized(self.batch, size)), self.first, size, self.count)


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
