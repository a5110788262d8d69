"""The forms of a recommender in native kernels, and the choice of the fastest one on this machine."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines.native import recommender_files
from pipelines.engines.native.recommender_files import ClickModel
from pipelines.engines.native.recommenders import ProgramGraph, ProgramSession
from pipelines.engines.quickest import Option
from pipelines.engines.timing import choose
from pipelines.kernels import extension
from pipelines.kernels.recommenders.native import SharedInputs

logger = logging.getLogger(__name__)
SIZES = (1, 64, 512)  # batch sizes that forms are timed at
RANKED = 512  # items of a ranking that forms are timed at
MARGIN = 0.1  # part of the time by which a form may be slower that has finer integers


class Forms:
    """The forms of a native.onnx.

    One form runs batches of all sizes with any number of threads, so that a result depends on neither.

    Args:
        path: The native.onnx.

    Attributes:
        names: Names of the forms, the one with the finest integers first.

    Raises:
        RequestError: The kernels are missing, or the file is missing, damaged or has no click program.
    """

    def __init__(self, path: Path) -> None:
        extension.required()
        self.path = path
        self._models, self._timed = self._read(), False
        self.names = [model.form for model in self._models]

    def open(self, threads: int, form: str = "") -> ProgramSession:
        """Opens a form.

        Args:
            threads: Number of threads.
            form: Name of the form; "" for the chosen one.

        Raises:
            RequestError: The model has no such form.
        """
        form = form or self.chosen
        if form not in self.names:
            raise RequestError(f"found the form {form} for {self.path}; expected {', '.join(self.names)}")
        return self._open(threads, form)

    @functools.cached_property
    def chosen(self) -> str:
        """The fastest form by its times at all of `SIZES`, relative to the fastest at that size.

        The times of a model that ranks items include that of `RANKED` items of one user, whose inputs are shared. The
        first of `names` up to `MARGIN` slower is chosen. Timings are cached and repeated as those of engines are, see
        `timing.choose`; they hold for all models of the same structure, as for those with other weights. The first form
        runs where tables lie beyond memory.
        """
        if len(self.names) == 1 or machine.beyond_memory(self.path):
            return self.names[0]
        openers = {name: functools.partial(self._open, 1, name, timed=True) for name in self.names}
        digest, model = f"forms {_structure(self._models)}", self._models[0]
        try:
            with recommender_files.readable(self.path):
                choices = [choose(digest, openers, random_batch(model, size), finest=self.names) for size in SIZES]
                if model.shared is not None:
                    rankers = {
                        name: functools.partial(_Ranker, opener, model.shared) for name, opener in openers.items()
                    }
                    digest = f"{digest} sharing {model.shared}"
                    choices.append(choose(digest, rankers, random_batch(model, RANKED), finest=self.names))
        except ZooError as error:
            logger.warning("the forms of %s are not timed: %s", self.path, error)
            return self.names[0]
        times = [
            sum(each.milliseconds.get(name, np.inf) / min(each.milliseconds.values()) for each in choices)
            for name in self.names
        ]
        near = [name for name, time in zip(self.names, times, strict=True) if time <= (1 + MARGIN) * min(times)]
        logger.info("%s runs in the form %s", self.path, near[0])
        return near[0]

    def _read(self) -> list[ClickModel]:
        with recommender_files.readable(self.path):
            return list(recommender_files.opened(self.path))

    def _open(self, threads: int, form: str, *, timed: bool = False) -> ProgramSession:
        if self._timed and not timed:  # mapped anew, so that no tables of other forms stay in memory
            self._models, self._timed = self._read(), False
        self._timed |= timed
        model = next(each for each in self._models if each.form == form)
        with recommender_files.readable(self.path):
            return ProgramSession(ProgramGraph(self.path, threads, model), held=not timed)


class _Ranker:
    """A session of a form for rankings: all samples of a batch are items of one user.

    Args:
        opener: Opens the session.
        shared: Inputs of the user.
    """

    def __init__(self, opener: Callable[[], ProgramSession], shared: SharedInputs) -> None:
        self._session, self._shared = opener(), SharedInputs(*map(tuple, astuple(shared)))
        self.varied = self._session.varied

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Ranks the items of a batch, see `Asynchronous.run_shared`."""
        return self._session.run_shared(batch, self._shared)


def _structure(models: Sequence[ClickModel]) -> str:
    """Returns what the times of forms depend on: their steps, and the sizes of their arrays up to the factor 2."""
    sizes = [
        (type(step).__name__, key, value.dtype.str, value.size.bit_length())
        for model in models
        for step in model.program.steps
        for key, value in vars(step).items()
        if isinstance(value, np.ndarray)
    ]
    return hashlib.sha256(repr(([model.form for model in models], sizes)).encode()).hexdigest()


def random_batch(model: ClickModel, size: int) -> Batch:
    """Returns samples with ids drawn uniformly from the rows of their tables.

    Args:
        model: The model.
        size: Number of samples.
    """
    generator, batch = np.random.default_rng(0), {}
    for name, dtype, shape in model.inputs:
        width = (size, *(each or 1 for each in shape[1:]))
        if name == model.fed[0]:
            batch[name] = generator.integers(0, np.maximum(model.program.rows, 1), width, np.dtype(dtype))
        else:
            batch[name] = generator.random(width).astype(dtype)
    return batch


def options(path: Path, threads: int, form: str = "") -> dict[str, Option]:
    """Returns the way to run a native.onnx, "native".

    Args:
        path: The native.onnx.
        threads: Number of threads.
        form: Name of the form; "" for the fastest.

    Returns:
        Option by name, for `QuickestSession`.

    Raises:
        RequestError: The kernels are missing, the file is missing, damaged or has no click program, or no such form.
    """
    session = Forms(path).open(threads, form)
    return {"native": Option(session.sibling, 0)}
