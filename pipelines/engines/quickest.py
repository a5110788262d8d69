"""The engine "auto": a session that runs every batch in the fastest engine for its batch size."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from pipelines.core.batches import MAX_SAMPLES, Batch, length
from pipelines.core.errors import ZooError
from pipelines.engines.contexts import Asynchronous
from pipelines.engines.session import Executed, Port, PrecomputedItems, Session
from pipelines.engines.timing import FLOAT, Choice, choose, size_class

if TYPE_CHECKING:
    from pipelines.kernels.recommenders.native import SharedInputs

logger = logging.getLogger(__name__)


class Option(NamedTuple):
    """One way to run a model.

    Attributes:
        open: Opens the session.
        smallest: Smallest batch size that the option is tried for.
    """

    open: Callable[[], Session]
    smallest: int = 1


class QuickestSession(Asynchronous):
    """Times its options on a batch of every size class and remembers the choice, see `timing.choose`.

    The first batch of a smaller size class runs in the engine of the next larger class, so that the last batch of a
    stream is not timed. The second batch of the class is timed. If an option cannot be opened, the next fastest takes
    its place. Options whose names end in `FLOAT` compute the float model of an int8 file; where one of them is the
    fastest, a warning says so. Threads may share it.

    Args:
        digest: Digest of the model that all options compute.
        options: Option by name.
        threads: Intra-op threads of the options.

    Raises:
        ZooError: At a run, if no option is left.
    """

    def __init__(self, digest: str, options: Mapping[str, Option], threads: int = 1) -> None:
        self.threads = threads
        self._digest, self._options = digest, dict(options)
        self._chosen: dict[int, str] = {}  # size class -> name of an option
        self._borrowed: dict[int, str] = {}  # likewise, of classes that ran once, in the option of a larger class
        self._sessions: dict[str, Session] = {}
        self._only: Session | None = None  # session for all batch sizes, if there is one option
        self._engine = "auto"
        self._lock = threading.Lock()  # one thread chooses and opens

    @property
    def engine(self) -> str:
        """Engine of the last batch, with `FLOAT` behind it if it ran the float file; "auto" before the first."""
        return self._engine

    @property
    def alike(self) -> int:
        """Largest batch size up to which all batches run in one engine; 1 if sizes may differ."""
        smallest = sorted(option.smallest for option in self._options.values())
        return MAX_SAMPLES if len(smallest) == 1 else max(smallest[1] - 1, 1)

    @property
    def inputs(self) -> dict[str, Port]:
        """Element type and shape of every input, by name."""
        with self._lock:
            session = next(iter(self._sessions.values()), None) or self._open(next(iter(self._options)))
        return session.inputs

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes the outputs of a batch, see `Runnable.run`."""
        return (self._only or self.session(batch)).run(batch)

    def run_shared(self, batch: Batch, shared: SharedInputs) -> dict[str, NDArray[Any]]:
        """See `Asynchronous.run_shared`."""
        return self.session(batch).run_shared(batch, shared)

    def precompute(
        self, count: int, batches: Iterable[Batch], shared: SharedInputs, limit: int
    ) -> PrecomputedItems | None:
        """See `Asynchronous.precompute`; the engine is that of the first batch."""
        remaining = iter(batches)
        first = next(remaining, None)
        if first is None:
            return None
        return self.session(first).precompute(count, itertools.chain([first], remaining), shared, limit)

    def executed(self, batch: Batch) -> list[Executed]:
        """Lists the operators that the engine of this batch size runs, see `Session.executed`."""
        return self.session(batch).executed(batch)

    def session(self, batch: Batch) -> Session:
        """Returns the session for batches of this size.

        Args:
            batch: Batch to time the options on, if its size class is new.
        """
        size = size_class(batch)
        session = self._sessions.get(self._chosen.get(size, ""))
        if session is None:
            with self._lock:
                session = self._choose(size, batch)
        name = self._chosen.get(size) or self._borrowed[size]
        self._engine = session.engine + FLOAT * name.endswith(FLOAT)
        return session

    def leave_out_float(self) -> None:
        """Leaves out the options that compute the float model, where the int8 file itself is judged."""
        with self._lock:
            self._options = {name: option for name, option in self._options.items() if not name.endswith(FLOAT)}

    def sibling(self) -> QuickestSession:
        """Returns a session with the same choices and its own sessions, for another thread."""
        other = QuickestSession(self._digest, self._options, self.threads)
        other._chosen = dict(self._chosen)
        return other

    def _choose(self, size: int, batch: Batch) -> Session:
        """Opens the session for a batch whose size class has no choice yet."""
        while True:
            usable = [name for name, option in self._options.items() if length(batch) >= option.smallest]
            larger = min((other for other in self._chosen if other >= size), default=size)
            earlier, borrows = self._chosen.get(larger, ""), larger > size and size not in self._borrowed
            if earlier in usable and (larger == size or borrows):
                name = earlier
            elif len(usable) == 1:
                name = usable[0]
            else:
                openers = {name: functools.partial(self._open, name) for name in usable}
                choice = choose(self._digest, openers, batch, self.threads)
                name = choice.engine
                if name.endswith(FLOAT):
                    logger.warning("%s", _float_is_faster(choice))
            try:
                session = self._open(name)
            except ZooError as error:
                if len(usable) == 1:
                    raise
                logger.warning("the engine %s is left out: %s", name, error)
                del self._options[name]
                continue
            (self._borrowed if borrows and name == earlier else self._chosen)[size] = name
            if [option.smallest for option in self._options.values()] == [0]:
                self._only = session
            # frees sessions that were only timed
            self._sessions = {name: opened for name, opened in self._sessions.items() if name in self._chosen.values()}
            return session

    def _open(self, name: str) -> Session:
        if name not in self._sessions:
            self._sessions[name] = self._options[name].open()
        return self._sessions[name]


def leave_out_float(session: object) -> None:
    """Leaves out the options of a session that compute the float model, where the int8 file itself is judged.

    Args:
        session: Session of any kind.
    """
    if isinstance(session, QuickestSession):
        session.leave_out_float()


def _float_is_faster(choice: Choice) -> str:
    """The message for a batch size at which the float file is faster than the int8 file."""
    times = {name: ms for name, ms in choice.milliseconds.items() if not name.endswith(FLOAT)}
    name = min(times, key=times.__getitem__, default="")
    against = f", {choice.milliseconds[choice.engine]} ms against {times[name]} ms of int8 ({name})" if name else ""
    engine = choice.engine.removesuffix(FLOAT)
    return (
        f"batches of {choice.batch_size} run the float model ({engine}), which is faster here{against}; "
        f"--engine {name or 'onnxruntime'} keeps int8"
    )
