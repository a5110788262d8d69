"""The protocol that every engine has: a session that runs batches. Threads are always explicit."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError

BF16 = "bf16"


class BatchError(RequestError):
    """The batch is wrong, whatever the engine: no reason to leave an engine out."""


@dataclass(frozen=True)
class Executed:
    """One operator as an engine really ran it: its own type name and the element type it computed in ("u8", "s8",
    "f32", ...).
    """

    name: str
    type: str
    precision: str


@dataclass(frozen=True)
class Port:
    """An input or output of a model: dtype, and shape with None for what is dynamic."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


class Runnable(Protocol):
    """What takes batches."""

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """{graph input: C-contiguous array, first axis = samples} -> {graph output: array the caller owns}. Any batch
        size, also 0.

        Raises RequestError where the engine refuses the batch.
        """


class Session(Runnable, Protocol):
    """A model ready to run."""

    @property
    def engine(self) -> str:
        """The engine's name."""

    @property
    def threads(self) -> int:
        """Intra-op threads."""

    @property
    def inputs(self) -> dict[str, Port]:
        """dtype and shape of every input of the graph."""

    def submit(self, batch: Batch) -> Future[dict[str, NDArray[Any]]]:
        """`run` in a context of its own, see `pipelines.engines.contexts.Asynchronous`."""

    def executed(self, batch: Batch) -> list[Executed]:
        """Run once with the engine's own profiler on and say what ran."""


def brief(error: Exception) -> str:
    """What an engine's exception says, in one line and without the places in its source."""
    lines = [line for line in str(error).splitlines() if not line.startswith(("Exception from ", "Check '"))]
    return " ".join(" ".join(lines).split()) or type(error).__name__
