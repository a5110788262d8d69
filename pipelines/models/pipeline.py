"""Raw input -> arrays -> model -> results: the same shape for every task.

A family's pipeline is a `GraphPipeline` where a result takes one call of the graph, else a `Pipeline` of its own that
says how its results are computed, such as a beam search.
"""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.core import files, machine
from pipelines.core.batches import Batch, cut, joined, whole_number
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines import catalog, stock
from pipelines.engines.quickest import Option, QuickestSession
from pipelines.engines.session import BF16, Session
from pipelines.engines.timing import Choice, choose
from pipelines.kernels import extension
from pipelines.models.folder import NATIVE, ModelFolder

logger = logging.getLogger(__name__)

# the rewritten graph computes what fp32.onnx does, faster
PRECISIONS = {"fp32": "rewritten.onnx", "int8": "int8.onnx", BF16: "rewritten.onnx"}


def model_file(precision: str, engine: str) -> str:
    """The file of a model folder that runs in this precision and engine.

    Raises RequestError for a precision that is unknown, or that the engine or the CPU has not.
    """
    if precision not in PRECISIONS:
        raise RequestError(f"unknown precision {precision!r}; choose {' or '.join(PRECISIONS)}")
    stock.require_precision(precision, "openvino" if engine == "auto" else engine)
    if engine != "native":
        return PRECISIONS[precision]
    if precision != "int8":
        raise RequestError(f"the engine native computes in int8, not {precision}; choose onnxruntime or openvino")
    return NATIVE


def graph_file(folder: ModelFolder, precision: str, engine: str) -> Path:
    """The graph of a model folder that runs in this precision and engine, made where it is missing: for the engine
    native native.onnx, where the family has such a form, or else int8.onnx, which the engine maps itself.

    Raises RequestError as `model_file`, and where it cannot be made.
    """
    name = model_file(precision, engine)
    return folder.ensure(PRECISIONS[precision] if name == NATIVE and not folder.entry.native else name)


class Pipeline(abc.ABC):
    """One model in one precision and engine; `__call__` chains preprocess, predict and postprocess.

    engine: "onnxruntime", "openvino", "native", or "auto", the quickest on this machine. threads: intra-op threads.
    batch_size: samples the model sees at once (`BATCH_SIZE` if None); `predict` takes any number. model: an ONNX file
    with the inputs and outputs of rewritten.onnx that is computed in place of the folder's own, see `over`.
    Raises RequestError for an unknown precision or engine, or a batch size or thread count below 1.
    """

    BATCH_SIZE: ClassVar[int] = 512
    CALIBRATION: ClassVar[int] = 4096  # samples that ranges are chosen on, unless told
    ON_ERROR: ClassVar[str] = "raise"  # what `run` does about bad input unless told: "raise", or "skip"
    ENGINES: ClassVar[tuple[str, ...]] = catalog.ENGINES  # that compute it
    # what input is cut into by `zoo run --shard`: "file" (each whole), "files" (images), or what has positions: "lines"
    # of text, "rows" of logs, "texts" (files whole, too)
    PARTS: ClassVar[str] = "file"
    in_parts: bool = False  # whether `run` gets parts of an input: that nothing in one is good is no error then
    first_row: int = 0  # the position of the first row that `run` gets, where rows have positions
    TUNED: ClassVar[tuple[str, ...]] = tuple(stock.STOCK)  # those of them that compute any int8 form of its graph

    def __init__(
        self,
        folder: ModelFolder,
        precision: str = "int8",
        engine: str = "auto",
        threads: int = 1,
        batch_size: int | None = None,
        *,
        model: Path | None = None,
    ) -> None:
        if model is None:
            model_file(precision, engine)  # raises for what there is not
        batch_size = whole_number("batch size", self.BATCH_SIZE if batch_size is None else batch_size)
        machine.require_threads(threads)
        self.folder, self.precision, self.threads, self.batch_size = folder, precision, threads, batch_size
        self.requested = engine
        if precision == "int8" and engine != "native" and not machine.has_vnni():
            logger.warning("%s", machine.NO_VNNI)
        self._open(engine, model)

    @classmethod
    def over(
        cls, folder: ModelFolder, model: Path, engine: str, threads: int = 1, batch_size: int | None = None
    ) -> Self:
        """A pipeline of the folder that computes the ONNX file `model`, float or int8, in place of the folder's own.

        engine: one of `TUNED`; for what that does not compute, such as a float graph in "native", a stock engine.
        """
        return cls(folder, "fp32", engine, threads, batch_size, model=model)

    @classmethod
    def engines(cls, folder: ModelFolder) -> list[str]:
        """Those of `ENGINES` that this machine and the folder's model have."""
        return [each for each in cls.ENGINES if each in stock.available() or (each == "native" and extension.isas())]

    @classmethod
    def quickest(cls, folder: ModelFolder, precision: str, batch: Batch, threads: int) -> str:
        """The engine that "auto" takes for a batch of this size."""
        return cls(folder, precision, "auto", threads).engine

    def read_columns(self, names: Sequence[str]) -> None:
        """Take samples from these columns of tables. Raises RequestError for a family whose input has no names to
        choose.
        """
        raise RequestError(f"--column is of encoders of texts; {self.folder.card.name} is a {self.folder.entry.name}")

    @property
    def path(self) -> Path:
        """The folder with the model's files."""
        return self.folder.path

    def __call__(self, raw: Any) -> Any:
        """Raw input -> results."""
        return self.postprocess(self.predict(self.preprocess(raw)))

    @abc.abstractmethod
    def _open(self, engine: str, model: Path | None) -> None:
        """Make ready to compute `model`, or the folder's own files where it is None."""

    @property
    @abc.abstractmethod
    def engine(self) -> str:
        """The engine in use; "auto" before the first batch decides."""

    @abc.abstractmethod
    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """A path or raw values -> {graph input: C-contiguous array, first axis = samples}."""

    @abc.abstractmethod
    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """{graph input: array [n, ...]} -> {output: array [n, ...]}, for any number of samples.

        Raises RequestError where names, dtypes or shapes are not the graph's.
        """

    @abc.abstractmethod
    def postprocess(self, out: dict[str, NDArray[Any]]) -> Any:
        """Arrays of the model -> results for a person."""

    @abc.abstractmethod
    def run(self, inputs: Any, output: str | Path, on_error: str = "raise") -> dict[str, Any]:
        """Raw input of any size -> a file of results, in constant memory and input order; returns a summary."""

    def count_rows(self, inputs: Any, **options: Any) -> int:
        """How many positions an input takes up, those left out counted; asked where `PARTS` says that there are such.

        options: those of `run`.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def calibration(self, data: Any, count: int, on_error: str = "raise") -> dict[str, NDArray[Any]]:
        """Up to `count` samples of raw `data` as inputs of the graph, to calibrate on."""

    @abc.abstractmethod
    def example(self, count: int, data: Any = None) -> Any:
        """`count` raw samples for a benchmark, of `data` or else the model's own."""

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


class GraphPipeline(Pipeline):
    """A pipeline whose `predict` is one call of the model's graph a batch, in a session.

    engine "auto": see `QuickestSession`; int8 also runs in the native kernels where the entry has such a form.
    """

    _session: Session

    def _open(self, engine: str, model: Path | None) -> None:
        if model is not None:
            self._session = catalog.load(model, engine, self.threads)
        elif engine == "auto":
            self._session = open_quickest(self.folder, self.precision, self.threads)
        else:
            path = graph_file(self.folder, self.precision, engine)
            self._session = catalog.load(path, engine, self.threads, self.precision)

    @property
    def engine(self) -> str:
        """The engine in use; "auto" before the first batch decides."""
        return self._session.engine

    @classmethod
    def engines(cls, folder: ModelFolder) -> list[str]:
        """The stock engines that are installed, and "native" where the model has such a form."""
        if not extension.isas():
            return stock.available()
        try:
            catalog.native_options(graph_file(folder, "int8", "native"), 1)
        except RequestError as error:
            logger.info("%s", error)
            return stock.available()
        return [*stock.available(), "native"]

    @classmethod
    def quickest(cls, folder: ModelFolder, precision: str, batch: Batch, threads: int) -> str:
        """The engine that "auto" takes for a batch of this size, by timing."""
        return choose_engine(folder, precision, batch, threads).engine.partition("+")[0]

    @property
    def session(self) -> Session:
        """What computes the graph."""
        return self._session

    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """{graph input: array [n, ...]} -> {graph output: array [n, ...]}, cut into batches of `batch_size`.

        Raises RequestError where names, dtypes or shapes are not the graph's.
        """
        if self._check(batch) <= self.batch_size:
            return self._session.run(batch)
        return joined([self._session.run(each) for each in cut(batch, self.batch_size)])

    def submit(self, batch: Batch) -> Future[dict[str, NDArray[Any]]]:
        """`predict` in a context of its own, for a batch of up to `batch_size` samples; see
        `pipelines.engines.contexts.Asynchronous`, whose `contexts` are set on `session`. Raises RequestError for a
        longer one, and as `predict`.
        """
        if self._check(batch) > self.batch_size:
            raise RequestError(f"found more than the batch size of {self.batch_size} samples in one call; cut them")
        return self._session.submit(batch)


@dataclass(frozen=True)
class Predictor:
    """A pipeline timed and compared like a session: `run` is its `predict`."""

    pipeline: Pipeline

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """The pipeline's arrays for a batch."""
        return self.pipeline.predict(batch)


def open_quickest(folder: ModelFolder, precision: str, threads: int) -> QuickestSession:
    """A session that runs each batch in the quickest engine; native kernels are among them where there are any."""
    digest, options = _options(folder, precision, threads)
    return QuickestSession(digest, options, threads)


def choose_engine(folder: ModelFolder, precision: str, batch: Batch, threads: int, *, fresh: bool = False) -> Choice:
    """The choice of `open_quickest` for this batch size, by timing (see `timing.choose`); `fresh` times anew."""
    digest, options = _options(folder, precision, threads)
    openers = {
        name: option.open for name, option in options.items() if len(next(iter(batch.values()))) >= option.smallest
    }
    return choose(digest, openers, batch, threads, fresh=fresh)


def _options(folder: ModelFolder, precision: str, threads: int) -> tuple[str, dict[str, Option]]:
    """The digest of the model and the ways to run it here."""
    path = folder.ensure(PRECISIONS[precision])
    options = {name: Option(opener) for name, opener in stock.candidates(path, threads, precision).items()}
    if precision == "int8" and extension.isas():
        try:
            options |= catalog.native_options(graph_file(folder, precision, "native"), threads)
        except ZooError as error:
            level = logging.WARNING if folder.entry.native else logging.INFO
            logger.log(level, "the engine native is left out: %s", error)
    return files.sha256(path), options
