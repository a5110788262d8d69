"""Recommenders in native kernels, each one `ClickProgram`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import forks, machine
from pipelines.core.batches import Batch
from pipelines.core.errors import ZooError, one_line
from pipelines.engines.contexts import Asynchronous
from pipelines.engines.native import recommender_files
from pipelines.engines.native.recommender_files import ClickModel
from pipelines.engines.native.validation import Expected, NativeModel, Run, validate
from pipelines.engines.session import BatchError, Executed, Port
from pipelines.kernels.arrays import contiguous
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.native import SharedInputs
from pipelines.kernels.recommenders.tables.cached_tables import cached_tables

CHUNK = 64  # minimum samples per thread
MOST_SCORES = 1 << 30  # bytes; they take some seconds to compute


class ProgramGraph:
    """An open native.onnx with its threads; threads and forked processes may share it.

    Large tables are the memory-mapped file. If together they exceed `machine.table_memory`, rows are read
    from the file and the often used ones are cached; such a program computes one batch at a time.

    Args:
        path: The native.onnx.
        threads: Number of threads.
        model: Its click model.

    Attributes:
        inputs: dtype and shape of every graph input, by name.
        form: Name of the form.
        rows: Number of table rows that the ids of every column select from.
        fed: Names of the inputs that the program takes, in its order; None for an input that it does not take.
        outputs: Names of the outputs.
        cached: Tables that are read from the file; None if all fit into memory.
    """

    def __init__(self, path: Path, threads: int, model: ClickModel) -> None:
        self.path, self.threads = path, threads
        self.inputs = {name: Port(np.dtype(dtype), tuple(shape)) for name, dtype, shape in model.inputs}
        self.fed, self.outputs, self.form = model.fed, model.outputs, model.form
        self.steps = [type(step).__name__ for step in model.program.steps]
        self.rows = model.program.rows
        memory, rows_memory = machine.table_memory(), recommender_files.rows_memory()
        self.cached = cached_tables(model.program, memory, rows_memory)
        self.program = native.click_program(model.program, cached=self.cached)
        self._model, self._sharing = model, dict[SharedInputs, Any]()
        self._pool: ThreadPoolExecutor | None = None
        self.forked()
        forks.register(self)

    def forked(self) -> None:
        """Starts threads of its own, as a forked process must."""
        self._pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None

    def sharing(self, shared: SharedInputs | None) -> Any:
        """Returns the program for samples that have some inputs in common; it is made once.

        Args:
            shared: These inputs; None for the plain program.
        """
        if shared is None or self.cached:  # cached rows are in memory once
            return self.program
        if (made := self._sharing.get(shared)) is None:
            made = self._sharing[shared] = native.click_program(self._model.program, shared=shared)
        return made

    def ranking(self, shared: SharedInputs, count: int, limit: int) -> Any:
        """Returns the program for items, whose inputs are all but the shared ones.

        Args:
            shared: The other inputs.
            count: Number of items.
            limit: Bytes that they may take.

        Returns:
            The program, with the scores of all pairs if they fit; None if the items do not fit.
        """
        for kept in (native.SCORES, native.RECORDS):
            program = native.click_program(self._model.program, shared=shared, items=kept)
            if count * program.item_bytes <= limit and count * program.score_bytes <= MOST_SCORES:
                return program
        return None

    def call(self, batch: Batch, shared: SharedInputs | None = None) -> list[NDArray[Any]]:
        """Runs the program on a batch, split among the threads.

        Args:
            batch: Array [samples, ...] for every graph input.
            shared: Inputs that are the same in all samples.

        Returns:
            The results of the program.

        Raises:
            BatchError: An id is no row of its field (checked before any table is read), or an array does not fit.
        """
        with self._errors():
            return self._call(batch, self.sharing(shared))

    def fill(self, program: Any, items: Any, first: int, batch: Batch) -> None:
        """Precomputes items.

        Args:
            program: Program of `ranking`.
            items: Its items.
            first: Position of the first of these items.
            batch: Inputs of the items.

        Raises:
            BatchError: See `call`.
        """
        with self._errors():
            program.fill(items, first, *self._arrays(batch))

    def rank(self, program: Any, items: Any, positions: NDArray[np.int64], user: Batch) -> list[NDArray[Any]]:
        """Runs a program of `ranking`, split among the threads.

        Args:
            program: The program.
            items: Its items.
            positions: Positions of items, int64 [n].
            user: Shared inputs, one row.

        Returns:
            The results of the program.

        Raises:
            BatchError: See `call`.
        """
        with self._errors():
            arrays = self._arrays(user)
            if self._pool is None or (count := len(positions)) < 2 * CHUNK:
                return _listed(program.rank(items, positions, *arrays))
            parts = np.array_split(positions, min(self.threads, count // CHUNK))
            results = self._pool.map(lambda part: _listed(program.rank(items, part, *arrays)), parts)
            return [np.concatenate(parts) for parts in zip(*results, strict=True)]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Converts the errors of the kernels to errors of a batch."""
        try:
            yield
        except IndexError as error:
            raise BatchError(str(error)) from error
        except (TypeError, ValueError, KeyError) as error:
            raise BatchError(f"the native kernels cannot run {self.path} on this batch: {one_line(error)}") from error
        except RuntimeError as error:  # of reading cached tables
            raise ZooError(one_line(error)) from error

    def _arrays(self, batch: Batch) -> list[NDArray[Any] | None]:
        return [None if name is None else contiguous(batch[name]) for name in self.fed]

    def _call(self, batch: Batch, program: Any) -> list[NDArray[Any]]:
        arrays = self._arrays(batch)
        if self._pool is None or (count := len(batch[str(self.fed[0])])) < 2 * CHUNK:
            return _listed(program(*arrays))
        bounds = np.linspace(0, count, min(self.threads, count // CHUNK) + 1).astype(int)
        parts = [[None if array is None else array[a:b] for array in arrays] for a, b in itertools.pairwise(bounds)]
        try:
            results = [_listed(outputs) for outputs in self._pool.map(lambda part: program(*part), parts)]
        except IndexError:
            program(*arrays)  # names the row of the whole batch
            raise
        return [np.concatenate(pieces) for pieces in zip(*results, strict=True)]


class ProgramSession(Asynchronous):
    """Session of a click program: one call of the native kernels per batch.

    The kernels are validated against the int8.onnx beside the native.onnx before the first batch.

    Args:
        graph: The open native.onnx.
        validate: Whether to validate, see `validation.validate`.
    """

    engine = "native"

    def __init__(self, graph: ProgramGraph, *, validate: bool = True) -> None:
        self._graph, self.threads, self.inputs = graph, graph.threads, graph.inputs
        model = NativeModel(unvalidated, graph.path, graph.path.with_name("int8.onnx"), graph.threads, (graph.form,))
        if graph.cached:  # too large for a stock engine
            model = replace(model, reference=graph.path, expected=in_numpy)
        self._unvalidated = model if validate else None

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes the outputs of a batch, see `Runnable.run`."""
        self._validate(batch)
        graph = self._graph
        if graph.threads > 1:
            results = graph.call(batch)
        else:
            try:  # fast path without checks of the arrays
                results = _listed(graph.program(*[None if name is None else batch[name] for name in graph.fed]))
            except Exception:  # converts the arrays, or raises a clear error
                results = graph.call(batch)
        return dict(zip(graph.outputs, results, strict=True))

    def run_shared(self, batch: Batch, shared: SharedInputs) -> dict[str, NDArray[Any]]:
        """See `Asynchronous.run_shared`."""
        self._validate(batch)
        return dict(zip(self._graph.outputs, self._graph.call(batch, shared), strict=True))

    def precompute(self, count: int, batches: Iterable[Batch], shared: SharedInputs, limit: int) -> ProgramItems | None:
        """See `Asynchronous.precompute`."""
        program = self._graph.ranking(shared, count, limit)
        if program is None:
            return None
        made, first = ProgramItems(self._graph, program, program.items(count)), 0
        for batch in batches:
            self._validate(batch)
            self._graph.fill(program, made.items, first, batch)
            first += len(batch[str(self._graph.fed[0])])
        return made

    def _validate(self, batch: Batch) -> None:
        """Holds the kernels to the reference, before the first batch."""
        if self._unvalidated is not None:
            validate(self._unvalidated, batch)
            self._unvalidated = None

    def executed(self, batch: Batch) -> list[Executed]:
        """Lists the kernels that run, see `Session.executed`."""
        graph = self._graph
        return [Executed(f"{i}", f"{step} {graph.program.isa}", "s16") for i, step in enumerate(graph.steps)]

    def sibling(self) -> ProgramSession:
        """Returns another session of the same graph."""
        return ProgramSession(self._graph, validate=self._unvalidated is not None)

    def varied(self, batch: Batch, seed: int) -> Batch:
        """Returns a batch with other ids, drawn uniformly from the rows of their tables, for timings.

        Args:
            batch: Batch of the model.
            seed: Seed of the ids.
        """
        name, rows = str(self._graph.fed[0]), self._graph.rows
        ids = np.random.default_rng(seed).integers(0, np.maximum(rows, 1), np.shape(batch[name]), batch[name].dtype)
        return {**batch, name: ids}


@dataclass(frozen=True, eq=False)
class ProgramItems:
    """Items with everything that a program computes from them without a user, see `PrecomputedItems`.

    Attributes:
        graph: Graph of the program.
        program: Program of `ProgramGraph.ranking`.
        items: Its items.
    """

    graph: ProgramGraph
    program: Any
    items: Any

    @property
    def nbytes(self) -> int:
        """See `PrecomputedItems`."""
        return int(self.items.nbytes)

    def run(self, positions: NDArray[np.int64], user: Batch) -> dict[str, NDArray[Any]]:
        """See `PrecomputedItems`."""
        results = self.graph.rank(self.program, self.items, positions, user)
        return dict(zip(self.graph.outputs, results, strict=True))


def unvalidated(path: Path, threads: int, form: str) -> Run:
    """Opens a native.onnx for `validation.compare`.

    Args:
        path: The native.onnx.
        threads: Number of threads.
        form: Name of the form.

    Returns:
        Its `run`.
    """
    model = next(candidate for candidate in recommender_files.opened(path) if candidate.form == form)
    return ProgramSession(ProgramGraph(path, threads, model), validate=False).run


def in_numpy(path: Path, _: int, form: str, **__: Any) -> Expected:
    """Opens the numpy reference of a native.onnx for `validation.compare`.

    Args:
        path: The native.onnx.
        form: Name of the form.

    Returns:
        A function to the outputs of a batch.
    """
    model = next(candidate for candidate in recommender_files.opened(path) if candidate.form == form)

    def outputs(batch: Batch, _: Batch) -> dict[str, NDArray[Any]]:
        arrays: list[Any] = [None if name is None else batch[name] for name in model.fed]
        return dict(zip(model.outputs, reference.run(model.program, *arrays), strict=True))

    return outputs


def _listed(results: Any) -> list[NDArray[Any]]:
    return list(results) if isinstance(results, tuple) else [results]
