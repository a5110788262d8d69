"""Pipelines: raw input -> arrays -> model -> results, the same shape for every task.

A family's pipeline is a `GraphPipeline` if a result takes one call of the graph, otherwise a `Pipeline` of its own,
such as a beam search.
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
from pipelines.engines.timing import FLOAT, REFERENCE, Choice, choose
from pipelines.kernels import extension
from pipelines.models.family import Lowerable
from pipelines.models.folder import ModelFolder
from pipelines.models.record import NATIVE

logger = logging.getLogger(__name__)

# the rewritten graph computes what fp32.onnx does, faster
PRECISIONS = {"fp32": "rewritten.onnx", "int8": "int8.onnx", BF16: "rewritten.onnx"}


def model_file(precision: str, engine: str) -> str:
    """Returns the file of a model folder for a precision and engine.

    Args:
        precision: Name of the precision.
        engine: Name of the engine.

    Returns:
        File name.

    Raises:
        RequestError: The precision is unknown, or the engine or CPU does not have it.
    """
    if precision not in PRECISIONS:
        raise RequestError(f"unknown precision {precision!r}; choose {' or '.join(PRECISIONS)}")
    stock.require_precision(precision, "openvino" if engine == "auto" else engine)
    if catalog.base_engine(engine) != "native":
        return PRECISIONS[precision]
    if precision != "int8":
        raise RequestError(f"the engine native computes in int8, not {precision}; choose onnxruntime or openvino")
    return NATIVE


def graph_file(folder: ModelFolder, precision: str, engine: str) -> Path:
    """Returns the graph of a model folder for a precision and engine; it is made if missing.

    The engine "native" takes native.onnx if the family lowers its models, otherwise int8.onnx.

    Args:
        folder: Model folder.
        precision: Name of the precision.
        engine: Name of the engine.

    Returns:
        The path.

    Raises:
        RequestError: See `model_file`; or the file cannot be made.
    """
    name = model_file(precision, engine)
    return folder.ensure(PRECISIONS[precision] if name == NATIVE and not isinstance(folder.entry, Lowerable) else name)


class Pipeline(abc.ABC):
    """One model in one precision and engine; `__call__` chains preprocess, predict and postprocess.

    Args:
        folder: Model folder.
        precision: "fp32", "int8" or "bf16".
        engine: "onnxruntime", "openvino", "native", or "auto", the fastest on this machine; "native:FORM" for
            one form of a recommender.
        threads: Intra-op threads.
        batch_size: Samples per call of the model (default: `BATCH_SIZE`); `predict` takes any number.
        model: ONNX file with the inputs and outputs of rewritten.onnx to run instead of the folder's own, see `over`.

    Raises:
        RequestError: The precision or engine is unknown, or batch size or threads are below 1.
    """

    BATCH_SIZE: ClassVar[int] = 512  # default
    CALIBRATION: ClassVar[int] = 4096  # default number of calibration samples
    ON_ERROR: ClassVar[str] = "raise"  # default of `run` for invalid input: "raise" or "skip"
    ENGINES: ClassVar[tuple[str, ...]] = catalog.ENGINES  # engines that support the pipeline
    # parts of an input for `zoo run --shard`: "file" (whole files), "files" (images), or parts with positions: "lines"
    # of text, "rows" of logs, "texts" (whole files)
    PARTS: ClassVar[str] = "file"
    in_parts: bool = False  # whether `run` gets one part of an input; a part without valid input is no error
    first_row: int = 0  # position of the first row of the part
    TUNED: ClassVar[tuple[str, ...]] = tuple(stock.STOCK)  # engines that support any int8 version of its graph

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
            model_file(precision, engine)  # raises for unsupported combinations
        if catalog.base_engine(engine) != engine and not isinstance(folder.entry, Lowerable):
            raise RequestError(f"the native kernels have one form of a {folder.entry.name} model; leave --form out")
        batch_size = whole_number("batch size", self.BATCH_SIZE if batch_size is None else batch_size)
        machine.require_threads(threads)
        self.folder, self.precision, self.threads, self.batch_size = folder, precision, threads, batch_size
        self.requested = engine
        if precision == "int8" and catalog.base_engine(engine) != "native" and not machine.has_vnni():
            logger.warning("%s", machine.NO_VNNI)
        self._open(engine, model)

    @classmethod
    def over(
        cls, folder: ModelFolder, model: Path, engine: str, threads: int = 1, batch_size: int | None = None
    ) -> Self:
        """Opens a pipeline that runs an ONNX file instead of the folder's own.

        Args:
            folder: Model folder.
            model: Float or int8 ONNX file.
            engine: One of `TUNED`; a stock engine replaces one that cannot run the file, such as "native" for a float
                graph.
            threads: Intra-op threads.
            batch_size: Samples per call of the model.

        Returns:
            The pipeline.
        """
        return cls(folder, "fp32", engine, threads, batch_size, model=model)

    @classmethod
    def engines(cls, folder: ModelFolder) -> list[str]:
        """Returns the engines that the machine and the model support.

        Args:
            folder: Model folder.

        Returns:
            Names, a subset of `ENGINES`.
        """
        return [name for name in cls.ENGINES if name in stock.available() or (name == "native" and extension.isas())]

    @classmethod
    def quickest(cls, folder: ModelFolder, precision: str, batch: Batch, threads: int) -> str:
        """Returns the engine of "auto" for a batch of this size.

        Args:
            folder: Model folder.
            precision: Name of the precision.
            batch: Batch to time on.
            threads: Intra-op threads.
        """
        return cls(folder, precision, "auto", threads).engine

    def read_columns(self, names: Sequence[str]) -> None:
        """Selects the columns of tables that samples are read from.

        Args:
            names: Names of the columns.

        Raises:
            RequestError: The family's input has no columns to choose.
        """
        raise RequestError(
            f"--column requires a text encoder or a recommender; {self.folder.card.name} is a {self.folder.entry.name}"
        )

    @property
    def path(self) -> Path:
        """Folder with the model's files."""
        return self.folder.path

    def __call__(self, raw: Any) -> Any:
        """Runs all stages of the pipeline.

        Args:
            raw: Raw input of `preprocess`.

        Returns:
            Results of `postprocess`.
        """
        return self.postprocess(self.predict(self.preprocess(raw)))

    @abc.abstractmethod
    def _open(self, engine: str, model: Path | None) -> None:
        """Opens the sessions for `model`, or for the folder's files if it is None."""

    @property
    @abc.abstractmethod
    def engine(self) -> str:
        """Engine in use; "auto" before the first batch."""

    @abc.abstractmethod
    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """Converts raw input to arrays.

        Args:
            raw: A path or raw values.

        Returns:
            C-contiguous array [samples, ...] for every graph input.
        """

    @abc.abstractmethod
    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Runs the model on any number of samples.

        Args:
            batch: Array [n, ...] for every graph input.

        Returns:
            Array [n, ...] by output.

        Raises:
            RequestError: Names, dtypes or shapes are not those of the graph.
        """

    @abc.abstractmethod
    def postprocess(self, out: dict[str, NDArray[Any]]) -> Any:
        """Converts outputs to results.

        Args:
            out: Outputs of `predict`: {name: array, first axis = samples}.

        Returns:
            Results, one per sample.
        """

    @abc.abstractmethod
    def run(self, inputs: Any, output: str | Path, on_error: str = "raise") -> dict[str, Any]:
        """Processes raw input of any size to a file of results, in constant memory and input order.

        Args:
            inputs: Raw input.
            output: File to write.
            on_error: "raise", or "skip" for invalid samples.

        Returns:
            Summary of the run.
        """

    def count_rows(self, inputs: Any, **options: Any) -> int:
        """Returns the number of positions of an input, including skipped ones; needed if `PARTS` has positions.

        Args:
            inputs: Raw input.
            **options: Options of `run`.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def calibration(self, data: Any, count: int, on_error: str = "raise") -> dict[str, NDArray[Any]]:
        """Reads calibration samples.

        Args:
            data: Raw data.
            count: Largest number of samples.
            on_error: See `run`.

        Returns:
            Array [samples, ...] for every graph input.
        """

    @abc.abstractmethod
    def example(self, count: int, data: Any = None) -> Any:
        """Returns raw samples for a benchmark.

        Args:
            count: Number of samples.
            data: Raw data; None: the model's own.
        """

    @functools.cached_property
    def _ports(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Element type and shape of one sample, for inputs with static shapes."""
        fixed = {
            name: (dtype, tuple(d for d in shape[1:] if d is not None))
            for name, (dtype, shape) in self.input_ports.items()
        }
        return {name: port for name, port in fixed.items() if len(port[1]) == len(self.input_ports[name][1]) - 1}

    def check(self, batch: Batch) -> int:
        """Checks a batch and returns the number of samples.

        Args:
            batch: Array [n, ...] for every graph input.

        Raises:
            RequestError: Names, dtypes or shapes are not those of the graph.
        """
        counts = {0}
        if batch.keys() == self._ports.keys():  # fast path for valid batches, 2 microseconds
            counts = {
                len(array)
                if isinstance(array, np.ndarray) and (array.dtype, array.shape[1:]) == self._ports[name] and array.ndim
                else 0
                for name, array in batch.items()
            }
        return counts.pop() if len(counts) == 1 and 0 not in counts else self._fault(batch)

    def _fault(self, batch: Batch) -> int:
        """Checks a batch that `check` rejected; raises RequestError, or returns the number of samples."""
        if wrong := [name for name, array in batch.items() if not isinstance(array, np.ndarray) or not array.ndim]:
            raise RequestError(
                f"input {wrong[0]} is {type(batch[wrong[0]]).__name__}; expected a numpy array, first axis = samples"
            )
        counts = {name: len(array) for name, array in batch.items()}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            raise RequestError(f"inputs hold {counts or 'no'} samples; expected the same number, at least 1, in each")
        ports = self.input_ports
        if set(batch) != set(ports):
            raise RequestError(f"found inputs {', '.join(sorted(batch))}; the model takes {', '.join(ports)}")
        for name, array in batch.items():
            dtype, shape = ports[name]
            if (
                array.dtype != dtype
                or array.ndim != len(shape)
                or any(d is not None and d != n for d, n in zip(shape[1:], array.shape[1:], strict=True))
            ):
                sizes = ", ".join(["n", *("any" if size is None else str(size) for size in shape[1:])])
                kind = "text" if array.dtype == object else array.dtype
                raise RequestError(f"input {name} is {kind} {list(array.shape)}; expected {dtype} [{sizes}]")
        return next(iter(counts.values()))

    @property
    @abc.abstractmethod
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """Element type and shape (None: any size) of every graph input, by name."""


class GraphPipeline(Pipeline):
    """A pipeline whose `predict` is one call of the model's graph per batch, in a session.

    The engine "auto" is a `QuickestSession`; int8 also runs in the native kernels if they support the model.
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
        """Engine in use; "auto" before the first batch."""
        return self._session.engine

    @classmethod
    def engines(cls, folder: ModelFolder) -> list[str]:
        """Returns the installed stock engines, and "native" if the native kernels support the model.

        Args:
            folder: Model folder.

        Returns:
            Names of the engines.
        """
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
        """See `Pipeline`; the engine is chosen by timing."""
        return choose_engine(folder, precision, batch, threads).engine.partition("+")[0]

    @property
    def session(self) -> Session:
        """The session that runs the graph."""
        return self._session

    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """See `Pipeline.predict`; the graph runs in batches of `batch_size`."""
        if self.check(batch) <= self.batch_size:
            return self._session.run(batch)
        return joined([self._session.run(part) for part in cut(batch, self.batch_size)])

    def submit(self, batch: Batch) -> Future[dict[str, NDArray[Any]]]:
        """Runs `predict` in a context of its own, see `pipelines.engines.contexts.Asynchronous`.

        `contexts` is set on `session`.

        Args:
            batch: At most `batch_size` samples.

        Returns:
            Future of the outputs.

        Raises:
            RequestError: The batch is larger, or see `predict`.
        """
        if self.check(batch) > self.batch_size:
            raise RequestError(f"found more samples than the batch size {self.batch_size}; split the batch")
        return self._session.submit(batch)


@dataclass(frozen=True)
class Predictor:
    """A pipeline with the interface of a session: `run` is its `predict`."""

    pipeline: Pipeline

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Returns the outputs of `Pipeline.predict`.

        Args:
            batch: Array [n, ...] for every graph input.
        """
        return self.pipeline.predict(batch)


def open_quickest(folder: ModelFolder, precision: str, threads: int) -> QuickestSession:
    """Opens a session that runs each batch in the fastest engine, native kernels included.

    Args:
        folder: Model folder.
        precision: Name of the precision.
        threads: Intra-op threads.

    Returns:
        The session.
    """
    digest, options = _options(folder, precision, threads)
    return QuickestSession(digest, options, threads)


def choose_engine(folder: ModelFolder, precision: str, batch: Batch, threads: int, *, fresh: bool = False) -> Choice:
    """Returns the choice of `open_quickest` for this batch size, by timing (see `timing.choose`).

    Args:
        folder: Model folder.
        precision: Name of the precision.
        batch: Batch to time on.
        threads: Intra-op threads.
        fresh: Ignore the cache.
    """
    digest, options = _options(folder, precision, threads)
    openers = {
        name: option.open for name, option in options.items() if len(next(iter(batch.values()))) >= option.smallest
    }
    return choose(digest, openers, batch, threads, fresh=fresh)


def _options(folder: ModelFolder, precision: str, threads: int) -> tuple[str, dict[str, Option]]:
    """Returns the model's digest and its options on this machine: native kernels alone where weights exceed memory."""
    path = folder.ensure(PRECISIONS[precision])
    options = {name: Option(opener) for name, opener in stock.candidates(path, threads, precision).items()}
    if precision == "int8" and folder.has_float:
        floats = stock.candidates(folder.ensure(PRECISIONS["fp32"]), threads, "fp32")
        if not folder.imported:  # OpenVINO 2026.4 corrupts the heap on float files of small image networks
            floats = {name: opener for name, opener in floats.items() if name == REFERENCE}
        options |= {name + FLOAT: Option(opener) for name, opener in floats.items()}
    if precision == "int8" and extension.isas():
        try:
            native = catalog.native_options(graph_file(folder, precision, "native"), threads)
            alone = machine.beyond_memory(path) and all(option.smallest <= 1 for option in native.values())
            options = native if alone else options | native
        except ZooError as error:
            level = logging.WARNING if isinstance(folder.entry, Lowerable) else logging.INFO
            logger.log(level, "the engine native is left out: %s", error)
    return files.sha256(path), options
