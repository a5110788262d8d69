"""The forms of a recommender in native kernels, and the choice of the fastest one on this machine."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import files, machine
from pipelines.core.batches import Batch
from pipelines.core.derived import derived, existing
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines.native import recommender_files
from pipelines.engines.native.recommender_files import ClickModel
from pipelines.engines.native.recommenders import ProgramGraph, ProgramSession
from pipelines.engines.quickest import Option
from pipelines.engines.timing import UNSETTLED_SECONDS, choose
from pipelines.kernels import extension
from pipelines.kernels.recommenders.native import SharedInputs

logger = logging.getLogger(__name__)
SIZES = (1, 64, 512)  # batch sizes that forms are timed at
RANKED_ITEMS = 512  # items of a ranking that forms are timed at
SUFFIX = ".form"
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
        """The form that all processes of this machine run.

        The first process that opens the model times the forms (`_decided`) and stores the choice beside the model, or
        under ZOO_HOME. Other processes use this choice without timing. A choice made under load is timed again after
        `timing.UNSETTLED_SECONDS`, and replaced, with a warning, by a form that is faster by more than `MARGIN` on a
        free CPU. The first form runs where the choice cannot be kept.
        """
        if len(self.names) == 1:
            return self.names[0]
        machine_key = hashlib.sha256(repr((machine.cpu(), extension.isas())).encode()).hexdigest()[:8]
        place = ([self.path.parent], f"chosen-{machine_key}", recommender_files.VERSION)
        try:
            if kept := existing(self.path, *place, SUFFIX, _is_current):
                return str(files.read_json(kept)["form"])
            decided = self._decided()  # outside the lock of derived files, since timings have another

            def keep(_: Path, path: Path) -> None:
                files.write_json(path, self._replaced(_read_choice(path), *decided))

            return str(files.read_json(derived(self.path, *place, keep, SUFFIX, _is_current))["form"])
        except ZooError as error:
            logger.warning("the form of %s is not chosen: %s; %s runs", self.path, error, self.names[0])
            return self.names[0]

    def _decided(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the fastest form by its times at all of `SIZES`, relative to the fastest at that size.

        The times of a model that ranks items include that of `RANKED_ITEMS` items of one user, whose inputs are shared.
        The first of `names` up to `MARGIN` slower is chosen. Timings are those of `timing.choose`, under its lock; they
        hold for all models of the same structure, as for those with other weights. The first form is chosen where
        tables lie beyond memory.

        Returns:
            {"form", "settled": whether the CPU was free, "made": seconds since 1970}, and the times of the forms.
        """
        if machine.beyond_memory(self.path):
            return {"form": self.names[0], "settled": False, "made": time.time()}, {}
        openers = {name: functools.partial(self._open, 1, name, timed=True) for name in self.names}
        digest, model = f"forms {_structure(self._models)}", self._models[0]
        with recommender_files.readable(self.path):
            choices = [choose(digest, openers, random_batch(model, size), finest=self.names) for size in SIZES]
            if model.shared is not None:
                rankers = {name: functools.partial(_Ranker, opener, model.shared) for name, opener in openers.items()}
                digest = f"{digest} sharing {model.shared}"
                choices.append(choose(digest, rankers, random_batch(model, RANKED_ITEMS), finest=self.names))
        times = {
            name: sum(choice.milliseconds.get(name, np.inf) / min(choice.milliseconds.values()) for choice in choices)
            for name in self.names
        }
        form = next(name for name, share in times.items() if share <= (1 + MARGIN) * min(times.values()))
        logger.info("%s runs in the form %s", self.path, form)
        settled = all(choice.settled for choice in choices)
        return {"form": form, "settled": settled, "made": time.time()}, times

    def _replaced(self, kept: dict[str, Any], choice: dict[str, Any], times: dict[str, float]) -> dict[str, Any]:
        """Returns a new choice; it has the form that was kept unless a settled timing shows that another is faster."""
        form = kept.get("form", choice["form"])
        if form == choice["form"] or form not in self.names:
            return choice
        if not choice["settled"] or times[form] <= (1 + MARGIN) * times[choice["form"]]:
            return {**choice, "form": form}
        logger.warning(
            "%s runs in the form %s from now on, which is faster than %s on this machine: results differ in the last "
            "digits; --form %s keeps the form before",
            *(self.path, choice["form"], form, form),
        )
        return choice

    def _read(self) -> list[ClickModel]:
        with recommender_files.readable(self.path):
            return list(recommender_files.opened(self.path))

    def _open(self, threads: int, form: str, *, timed: bool = False) -> ProgramSession:
        if self._timed and not timed:  # mapped anew, so that no tables of other forms stay in memory
            self._models, self._timed = self._read(), False
        self._timed |= timed
        model = next(model for model in self._models if model.form == form)
        with recommender_files.readable(self.path):
            return ProgramSession(ProgramGraph(self.path, threads, model), validate=not timed)


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


def _read_choice(path: Path) -> dict[str, Any]:
    """Returns a choice that is kept; {} if it is missing or damaged."""
    try:
        choice = files.read_json(path)
        return choice if isinstance(choice["form"], str) and isinstance(choice["made"], float) else {}
    except (KeyError, OSError, TypeError, ZooError):
        return {}


def _is_current(path: Path) -> bool:
    """Whether a choice that is kept is still used: for good if it was made on a free CPU."""
    kept = _read_choice(path)
    return bool(kept) and (kept.get("settled") is True or 0 <= time.time() - kept["made"] < UNSETTLED_SECONDS)


def _structure(models: Sequence[ClickModel]) -> str:
    """Returns a key of the times of forms: their steps, and the sizes of their arrays rounded to powers of two."""
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
        width = (size, *(side or 1 for side in shape[1:]))
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
