"""Raw input -> arrays -> model -> results: the same shape for every task."""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core import files, machine
from pipelines.core.batches import Batch, cut, joined
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines.session import BF16, Session
from pipelines.engines.stock import candidates as stock_candidates
from pipelines.engines.stock import require_precision
from pipelines.engines.timing import Plan, choose
from pipelines.kernels import extension
from pipelines.models.build import NATIVE, ModelFolder

logger = logging.getLogger(__name__)

# the rewritten graph computes what fp32.onnx does, faster
PRECISIONS = {"fp32": "rewritten.onnx", "int8": "int8.onnx", BF16: "rewritten.onnx"}


def model_file(precision: str, engine: str) -> str:
    """The file of a model folder that runs in this precision and engine.

    Raises RequestError for a precision that is unknown, or that the engine or the CPU has not.
    """
    if precision not in PRECISIONS:
        raise RequestError(f"unknown precision {precision!r}; choose {' or '.join(PRECISIONS)}")
    require_precision(precision, "openvino" if engine == "auto" else engine)
    if engine != "native":
        return PRECISIONS[precision]
    if precision != "int8":
        raise RequestError(f"the engine native computes in int8, not {precision}; choose onnxruntime or openvino")
    return NATIVE


def load(path: Path, name: str, *options: Any) -> Session:
    """See `pipelines.engines.catalog.load`, which is imported with onnx only here: translation in native code does
    without.
    """
    from pipelines.engines import catalog

    return catalog.load(path, name, *options)


def choose_engine(folder: ModelFolder, precision: str, batch: Batch, threads: int, *, fresh: bool = False) -> Plan:
    """The quickest engine for this batch on this machine, by timing (see `pipelines.engines.timing.choose`); native
    kernels where there are any.
    """
    digest, candidates = _candidates(folder, precision, threads)
    return choose(digest, candidates, batch, threads, fresh=fresh)


def open_quickest(folder: ModelFolder, precision: str, batch: Batch, threads: int) -> Session:
    """A session in the engine of `choose_engine`; where a choice remembered from before cannot be opened now, in the
    quickest that can.
    """
    digest, candidates = _candidates(folder, precision, threads)
    while True:
        name = choose(digest, candidates, batch, threads).engine
        try:
            return candidates[name]()
        except ZooError as error:
            if len(candidates) == 1:
                raise
            logger.warning("the engine %s is left out: %s", name, error)
            del candidates[name]


def _candidates(folder: ModelFolder, precision: str, threads: int) -> tuple[str, dict[str, Callable[[], Session]]]:
    """The digest of the model and the engines that may run it."""
    path = folder.ensure(PRECISIONS[precision])
    found = stock_candidates(path, threads, precision)
    if precision == "int8" and folder.entry.native and extension.isas():
        found["native"] = lambda: load(folder.ensure(NATIVE), "native", threads)
    return files.sha256(path), found


class Pipeline(abc.ABC):
    """One model in one precision and engine; `__call__` chains preprocess, predict and postprocess.

    engine: "onnxruntime", "openvino", "native", or "auto", which times them on the first batch (and remembers the
    result, see `plan`).
    threads: intra-op threads. batch_size: samples the model sees at once (`BATCH_SIZE` if None); `predict` takes any
    number and cuts it. Raises RequestError for an unknown precision or engine, or a batch size or thread count below 1.
    """

    BATCH_SIZE: ClassVar[int] = 512
    CALIBRATION: ClassVar[int] = 4096  # samples that ranges are chosen on, unless told
    ONE_CALL: ClassVar[bool] = (
        True  # a batch is one call of the graph that `zoo build` makes; else `zoo benchmark` times all of `predict`
    )
    ON_ERROR: ClassVar[str] = "raise"  # what `run` does about bad input unless told: "raise", or "skip"

    def __init__(
        self,
        folder: ModelFolder,
        precision: str = "int8",
        engine: str = "auto",
        threads: int = 1,
        batch_size: int | None = None,
    ) -> None:
        name = model_file(precision, engine)
        batch_size = self.BATCH_SIZE if batch_size is None else batch_size
        if batch_size < 1 or threads < 1:
            raise RequestError(f"batch size and threads must be 1 or more, not {batch_size} and {threads}")
        machine.require_threads(threads)
        self.folder, self.precision, self.threads, self.batch_size = folder, precision, threads, batch_size
        path = folder.ensure(name)
        if precision == "int8" and engine != "native" and not machine.has_vnni():
            logger.warning("%s", machine.NO_VNNI)
        self._session: Session | None = None if engine == "auto" else load(path, engine, threads, precision)

    @property
    def path(self) -> Path:
        """The folder with the model's files."""
        return self.folder.path

    @property
    def engine(self) -> str:
        """The engine in use; "auto" before the first batch decides."""
        return self._session.engine if self._session is not None else "auto"

    @abc.abstractmethod
    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """A path or raw values -> {graph input: C-contiguous array, first axis = samples}."""

    @abc.abstractmethod
    def postprocess(self, out: dict[str, NDArray[Any]]) -> Any:
        """Arrays of the model -> results for a person."""

    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """{graph input: array [n, ...]} -> {graph output: array [n, ...]}, cut into batches of `batch_size`.

        Raises RequestError where names, dtypes or shapes are not the graph's.
        """
        if self._check(batch) <= self.batch_size:
            return self._run(batch)
        return joined([self._run(each) for each in cut(batch, self.batch_size)])

    def __call__(self, raw: Any) -> Any:
        """Raw input -> results."""
        return self.postprocess(self.predict(self.preprocess(raw)))

    def session(self, batch: Batch) -> Session:
        """The session in use; the first call with `engine="auto"` chooses by timing `batch`."""
        if self._session is None:
            self._session = open_quickest(self.folder, self.precision, batch, self.threads)
        return self._session

    def use(self, session: Session) -> None:
        """Run `session` from now on: any model with the same inputs and outputs."""
        self._session = session

    def _run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        return self.session(batch).run(batch)

    @functools.cached_property
    def _ports(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """dtype and shape of one sample of every input whose sizes are all fixed."""
        fixed = {
            name: (dtype, tuple(d for d in shape[1:] if d is not None))
            for name, (dtype, shape) in self.input_ports.items()
        }
        return {name: each for name, each in fixed.items() if len(each[1]) == len(self.input_ports[name][1]) - 1}

    def _check(self, batch: Batch) -> int:
        counts = {0}
        if batch.keys() == self._ports.keys():  # nothing wrong, usually: found in two microseconds
            counts = {
                len(array)
                if isinstance(array, np.ndarray) and (array.dtype, array.shape[1:]) == self._ports[name] and array.ndim
                else 0
                for name, array in batch.items()
            }
        return counts.pop() if len(counts) == 1 and 0 not in counts else self._fault(batch)

    def _fault(self, batch: Batch) -> int:
        """The number of samples in a batch that `_check` did not pass at once. Raises RequestError for what is wrong
        with it.
        """
        if wrong := [name for name, array in batch.items() if not isinstance(array, np.ndarray) or not array.ndim]:
            raise RequestError(
                f"input {wrong[0]} is {type(batch[wrong[0]]).__name__}; wanted a numpy array, first axis = samples"
            )
        counts = {name: len(array) for name, array in batch.items()}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            raise RequestError(f"inputs hold {counts or 'no'} samples; wanted the same number, at least 1, in each")
        wanted = self.input_ports
        if set(batch) != set(wanted):
            raise RequestError(f"found inputs {', '.join(sorted(batch))}; the model takes {', '.join(wanted)}")
        for name, array in batch.items():
            dtype, shape = wanted[name]
            if (
                array.dtype != dtype
                or array.ndim != len(shape)
                or any(d is not None and d != n for d, n in zip(shape[1:], array.shape[1:], strict=True))
            ):
                expected = f"{dtype} [n, {', '.join(map(str, shape[1:]))}]"
                raise RequestError(f"input {name} is {array.dtype} {list(array.shape)}; wanted {expected}")
        return next(iter(counts.values()))

    @property
    @abc.abstractmethod
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """dtype and shape (None = any) of every graph input."""
