"""Base class of pipelines over lines of text: native code or a stock engine, invalid lines, sentences to benchmark."""

from __future__ import annotations

import abc
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines.agreement import WrongResultsError
from pipelines.engines.native.validation import NativeModel, validate
from pipelines.engines.session import BF16
from pipelines.kernels import extension
from pipelines.kernels.transformer import program_file
from pipelines.models.folder import derived
from pipelines.models.pipeline import PRECISIONS, Pipeline

logger = logging.getLogger(__name__)
Native = TypeVar("Native")


class LinePipeline(Pipeline, Generic[Native]):
    """A pipeline over lines of text with native code of its own.

    The engine "native" computes int8 in native code; "auto" takes it where the kernels are built, else onnxruntime, and
    for bf16 OpenVINO.

    Attributes:
        MAX_WARNINGS: Number of invalid lines that are logged one by one.
    """

    MAX_WARNINGS: ClassVar[int] = 20
    _native: Native | None
    _unvalidated: NativeModel | None = None  # native code and its reference until the validation

    def _open(self, engine: str, model: Path | None) -> None:
        """Opens the native code; a stock engine if it is asked for, or if the graph has no native form."""
        self._native, self._requested = None, engine
        self._engine = engine if engine != "auto" else "openvino" if self.precision == BF16 else "onnxruntime"
        if engine == "native" or (engine == "auto" and self.precision == "int8" and model is None and extension.isas()):
            try:
                self._native = self._open_native(model)
                self._engine = "native"
                machine.trim()
                return
            except RequestError as error:
                if engine == "native" and model is None:
                    raise
                if model is None:
                    self.folder.ensure(PRECISIONS[self.precision])  # raises if the model itself is missing
                self._engine = "onnxruntime"
                log = logger.info if engine == "auto" else logger.warning
                log("%s; falling back to onnxruntime", error)
        self._open_stock(model)

    @abc.abstractmethod
    def _open_native(self, model: Path | None) -> Native:
        """Opens native code for `model`, or for the folder's files. Raises RequestError for an unsupported graph."""

    @abc.abstractmethod
    def _open_stock(self, model: Path | None) -> None:
        """Opens the sessions of the stock engine `_engine` for `model`, or for the folder's files if it is None."""

    def _validate(self, *examples: Callable[[], Batch]) -> None:
        """Validates the native code against ONNX Runtime once; the engine "auto" falls back to it on a difference.

        Args:
            *examples: Functions that return batches, see `validation.validate`.

        Raises:
            WrongResultsError: The native code is wrong, and the requested engine is native.
        """
        model, self._unvalidated = self._unvalidated, None
        if model is None:
            return
        batches = [example() for example in examples]
        try:
            validate(model, *batches)
        except WrongResultsError as error:
            if self._is_near_float(model, batches):
                return
            if self._requested == "native":
                self._unvalidated = model
                raise
            logger.warning("%s", str(error).replace("; use onnxruntime", "; falling back to onnxruntime"))
            self._native, self._engine = None, "onnxruntime"
            self._open_stock(None)

    def _float_reference(self) -> Path | None:
        """Returns the float graph of an int8 model, made if missing; None: there is none."""
        return None

    def _is_near_float(self, model: NativeModel, batches: Sequence[Batch]) -> bool:
        """Returns whether the native code agrees with the float graph, so that the int8 of ONNX Runtime is wrong."""
        try:
            reference = self._float_reference()
            if reference is not None:
                validate(replace(model, reference=reference), *batches)
        except ZooError:
            return False
        return reference is not None

    def _program(self, store: Callable[[Path, Path], object]) -> Path:
        """Returns the path of the folder's native program; it is made if missing.

        Args:
            store: Writes the program; takes the paths of the graph and of the program.
        """
        source, version = PRECISIONS[self.precision], program_file.VERSION
        return derived(self.folder, source, "native", version, store, program_file.SUFFIX)

    @property
    def engine(self) -> str:
        """The engine in use."""
        return self._engine

    def report_errors(
        self, lines: Iterable[tuple[str, str]], errors: Counter[str], on_error: str, outcome: str = ""
    ) -> None:
        """Counts and logs invalid lines.

        Args:
            lines: Location and error of each line; "" if it is valid.
            errors: Counts by error, which are added to.
            on_error: "raise" at the first invalid line, or "skip".
            outcome: Treatment of an invalid line, for the log.

        Raises:
            RequestError: A line is invalid, for "raise".
        """
        for location, error in lines:
            if not error:
                continue
            if on_error == "raise":
                raise RequestError(f"{location} {error}")
            errors[error] += 1
            if errors.total() <= self.MAX_WARNINGS:
                logger.warning("%s %s%s", location, error, outcome)


def benchmark_samples(examples: Sequence[Any], valid: Iterable[Any], data: Any, kind: str, count: int) -> list[Any]:
    """Returns samples for a benchmark.

    Args:
        examples: Samples if there are no data.
        valid: Valid samples of the data.
        data: Source of `valid`, for the message; None for `examples`.
        kind: What the samples are, for the message.
        count: Number of samples; repeated if there are too few.

    Returns:
        The samples.

    Raises:
        RequestError: The data hold no valid samples.
    """
    samples = list(examples if data is None else itertools.islice(valid, count))
    if not samples:
        raise RequestError(f"found no {kind} in {data}")
    return list(itertools.islice(itertools.cycle(samples), count))
