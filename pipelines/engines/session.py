"""The protocol of all engines: a session that runs batches with an explicit number of threads."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError

if TYPE_CHECKING:
    from pipelines.kernels.recommenders.native import SharedInputs

BF16 = "bf16"


class BatchError(RequestError):
    """The batch is wrong for every engine, so it is no reason to drop an engine."""


@dataclass(frozen=True)
class Executed:
    """One operator as an engine ran it.

    Attributes:
        name: Name of the operator.
        type: The engine's own operator type.
        precision: Element type that was computed in: "u8", "s8", "f32", ...
    """

    name: str
    type: str
    precision: str


@dataclass(frozen=True)
class Port:
    """An input or output of a model.

    Attributes:
        dtype: Element type.
        shape: Dimensions, None for a dynamic one.
    """

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


class PrecomputedItems(Protocol):
    """Items with the precomputed part of a model that depends on items alone."""

    @property
    def nbytes(self) -> int:
        """Memory of the items in bytes."""

    def run(self, positions: NDArray[np.int64], user: Batch) -> dict[str, NDArray[Any]]:
        """Computes the outputs of one user and items.

        Args:
            positions: Positions of the items, int64 [n].
            user: All inputs, one row; item inputs have any valid values.

        Returns:
            The outputs of `Runnable.run` for full rows, bit for bit.
        """


class Runnable(Protocol):
    """Computes batches."""

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes the outputs of a batch of any size, also 0.

        Args:
            batch: C-contiguous array [samples, ...] for every graph input.

        Returns:
            Array for every graph output, owned by the caller.

        Raises:
            RequestError: The engine refuses the batch.
        """


class Session(Runnable, Protocol):
    """A model ready to run."""

    @property
    def engine(self) -> str:
        """Name of the engine."""

    @property
    def threads(self) -> int:
        """Number of intra-op threads."""

    @property
    def inputs(self) -> dict[str, Port]:
        """Element type and shape of every graph input, by name."""

    def submit(self, batch: Batch) -> Future[dict[str, NDArray[Any]]]:
        """Runs a batch in a context of its own, see `pipelines.engines.contexts.Asynchronous`.

        Args:
            batch: Inputs; they must not change until the future is done.

        Returns:
            Future of the outputs.
        """

    def run_shared(self, batch: Batch, shared: SharedInputs) -> dict[str, NDArray[Any]]:
        """See `Asynchronous.run_shared`."""

    def precompute(
        self, count: int, batches: Iterable[Batch], shared: SharedInputs, limit: int
    ) -> PrecomputedItems | None:
        """See `Asynchronous.precompute`."""

    def executed(self, batch: Batch) -> list[Executed]:
        """Runs a batch once with the engine's own profiler.

        Args:
            batch: Batch to run.

        Returns:
            The operators that ran.
        """


def brief(error: Exception) -> str:
    """Shortens an engine's exception to one line without source locations.

    Args:
        error: Exception of an engine.
    """
    lines = [line for line in str(error).splitlines() if not line.startswith(("Exception from ", "Check '"))]
    return " ".join(" ".join(lines).split()) or type(error).__name__
