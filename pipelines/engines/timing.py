"""The choice of the fastest engine on this machine, by timing, with a cache."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from pipelines.core import files, machine, settings
from pipelines.core.batches import Batch, length
from pipelines.core.errors import ZooError
from pipelines.engines.agreement import ALIKE, require_alike, require_correct_as_opened
from pipelines.engines.session import BatchError, Runnable
from pipelines.kernels import extension

logger = logging.getLogger(__name__)
REPEATS = 9
BUDGET_MS = 300.0  # time limit of the repetitions
ROUNDS = 2  # of timings before a choice
MIN_CPU_SHARE = 0.8  # CPU seconds of a second, below which other processes were in the way
UNSETTLED_SECONDS = 600.0  # seconds until a choice is timed again where the rounds differed or the CPU was busy
MAX_AGE_SECONDS = 7 * 86400.0  # seconds until any choice is timed again
VARIANTS = 64  # samples of a timing at least, where batches can be varied
MARGIN = 0.05  # gain, as a share of its time, by which another engine replaces the one before
FLOAT = "+fp32"  # behind the name of an engine that runs the float file of an int8 model
MAX_FLOAT_RATIO = 4.0  # a float file that is this many times slower than int8 in one engine is not tried in others
REFERENCE = "onnxruntime"  # engine that others are validated against; the first that runs if it does not


@dataclass(frozen=True)
class Choice:
    """The engine for one model file, thread count and batch size on this machine.

    Attributes:
        engine: Name of the engine.
        threads: Intra-op threads.
        batch_size: Size class of the batch, see `size_class`.
        milliseconds: Median time of a batch by candidate.
        machine: Fingerprint of the machine.
        settled: Whether repeated timings agreed, on a CPU that was free.
        made: Time of the choice, in seconds since 1970.
    """

    engine: str
    threads: int
    batch_size: int
    milliseconds: dict[str, float]
    machine: str
    settled: bool = field(default=False, compare=False)
    made: float = field(default=0.0, compare=False)

    @property
    def holds(self) -> bool:
        """Whether the choice is still used; it is timed again after a while, soon if it was made under load."""
        return 0 <= time.time() - self.made < (MAX_AGE_SECONDS if self.settled else UNSETTLED_SECONDS)


def choose(
    digest: str,
    candidates: Mapping[str, Callable[[], Runnable]],
    batch: Batch,
    threads: int = 1,
    *,
    finest: Sequence[str] = (),
    fresh: bool = False,
) -> Choice:
    """Times candidates on a batch, in turn, and caches the choice under ZOO_HOME.

    One process times at a time; others wait and take its choice. A choice made under load is used for ten minutes, any
    other for a week; then it is timed again, and stays unless another candidate is faster by more than `MARGIN`.

    A cached choice applies to the same digest, candidates, threads, size class, CPU, native kernels and library
    versions. Candidates that cannot be opened or do not run are left out. Those whose names end in `FLOAT` run the
    float file of an int8 model: they agree with each other, and must be faster than int8 by more than `MARGIN`.
    Sessions that can vary a batch (`varied`) are timed, like the others, on variants of it, so that no run finds the
    table rows of the one before in the cache.

    Args:
        digest: Digest of the model that all candidates run.
        candidates: Opener by name.
        batch: Batch to time on.
        threads: Intra-op threads of the candidates.
        finest: Candidates of which the first runs unless another is faster by more than `MARGIN`.
        fresh: Ignore the cache.

    Returns:
        The choice.

    Raises:
        ZooError: No candidate runs.
        BatchError: The batch is wrong for every candidate.
    """
    size = size_class(batch)
    key = hashlib.sha256(
        f"{digest} {sorted(candidates)} {threads} {size} {machine.fingerprint()} {extension.isas()} {ALIKE}".encode()
    ).hexdigest()[:16]
    path = settings.home() / "plans" / f"{key}.json"
    if not fresh and (kept := _read_choice(path, candidates)) and kept.holds:
        return kept
    if len(candidates) == 1:
        return Choice(next(iter(candidates)), threads, size, {}, machine.fingerprint())
    with _timing_lock():
        kept = None if fresh else _read_choice(path, candidates)
        if kept and kept.holds:  # of a process that was first
            return kept
        milliseconds, settled = _rounds(candidates, batch, finest)
        best = _winner(milliseconds, finest)
        if kept and milliseconds.get(kept.engine, np.inf) <= (1 + MARGIN) * milliseconds[best]:
            best = kept.engine
        rounded = {name: round(ms, 4) for name, ms in milliseconds.items()}
        chosen = Choice(best, threads, size, rounded, machine.fingerprint(), settled, time.time())
        if _complete(milliseconds, candidates):  # a failure may be temporary
            try:
                files.write_json(path, asdict(chosen))
            except ZooError as error:
                fault = str(error).partition("; ")[0]  # without the advice about outputs
                logger.warning(
                    "the choice of an engine is not cached: %s; set ZOO_HOME to a folder you may write", fault
                )
    return chosen


@contextlib.contextmanager
def _timing_lock() -> Iterator[None]:
    """Context in which no other process of this cache times engines, unless the cache cannot be written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            settings.home().mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.locked(settings.home() / ".timing.lock", "another process times engines"))
        yield


def _winner(milliseconds: Mapping[str, float], finest: Sequence[str]) -> str:
    """Returns the fastest candidate; int8 before the float file, and `finest` in their order, up to `MARGIN`."""
    best = min(milliseconds, key=milliseconds.__getitem__)
    int8 = [name for name in milliseconds if not name.endswith(FLOAT)]
    quickest = min(int8, key=milliseconds.__getitem__, default=best)
    if milliseconds[quickest] <= (1 + MARGIN) * milliseconds[best]:
        best = quickest
    near = [name for name in finest if milliseconds.get(name, np.inf) <= (1 + MARGIN) * milliseconds[best]]
    return near[0] if best in near else best


def watch_cpu() -> Callable[[], bool]:
    """Returns a function that tells whether other processes have taken the CPU from this one since the call."""
    wall, cpu = time.perf_counter(), time.process_time()
    return lambda: time.process_time() - cpu < MIN_CPU_SHARE * (time.perf_counter() - wall)


def _rounds(
    candidates: Mapping[str, Callable[[], Runnable]], batch: Batch, finest: Sequence[str]
) -> tuple[dict[str, float], bool]:
    """Times candidates in rounds.

    Args:
        candidates: Opener by name.
        batch: Batch to time on.
        finest: See `choose`.

    Returns:
        Milliseconds of the best round by candidate; and whether all rounds have the same winner and the process was not
        kept from the CPU.
    """
    floats = {name: opener for name, opener in candidates.items() if name.endswith(FLOAT)}
    sessions = _agreeing({name: opener for name, opener in candidates.items() if name not in floats}, batch)
    sessions |= _float_sessions(floats, sessions, batch)
    was_busy = watch_cpu()
    rounds = [measure(list(sessions.values()), batch, REPEATS // 2 + 1) for _ in range(ROUNDS)]
    busy = was_busy()
    winners = {_winner(dict(zip(sessions, times, strict=True)), finest) for times in rounds}
    return dict(zip(sessions, np.min(rounds, axis=0).tolist(), strict=True)), len(winners) == 1 and not busy


def _float_sessions(
    floats: Mapping[str, Callable[[], Runnable]], sessions: Mapping[str, Runnable], batch: Batch
) -> dict[str, Runnable]:
    """Opens the float file in the reference engine, and in the others unless it is hopelessly slower there."""
    ordered = sorted(floats, key=lambda name: name != REFERENCE + FLOAT)
    try:
        opened = _agreeing({name: floats[name] for name in ordered[:1]}, batch) if ordered else {}
        if opened:
            *int8, float_ms = measure([*sessions.values(), *opened.values()], batch, 1)
            if float_ms <= MAX_FLOAT_RATIO * min(int8):
                opened = _agreeing(floats, batch)
    except BatchError:
        raise
    except ZooError as error:
        logger.info("the float file is left out: %s", error)
        return {}
    return opened


def _complete(milliseconds: Mapping[str, float], candidates: Mapping[str, object]) -> bool:
    """Whether all candidates were timed, but for float files that were not tried in every engine."""
    left_out = candidates.keys() - milliseconds.keys()
    return milliseconds.keys() <= candidates.keys() and all(name.endswith(FLOAT) for name in left_out)


def _read_choice(path: Path, candidates: Mapping[str, object]) -> Choice | None:
    """Reads a cached choice, or None; files of other versions and damaged files are removed."""
    if not path.is_file():
        return None
    try:
        choice = Choice(**files.read_json(path))
        if choice.engine in candidates and _complete(choice.milliseconds, candidates):
            return choice
    except (AttributeError, TypeError, ZooError):
        pass
    path.unlink(missing_ok=True)
    return None


def time_each(candidates: Mapping[str, Callable[[], Runnable]], batch: Batch) -> dict[str, float]:
    """Times every candidate that opens and runs, in turn; the others are logged.

    Args:
        candidates: Opener by name.
        batch: Batch to time on.

    Returns:
        Median milliseconds by candidate.

    Raises:
        ZooError: No candidate runs.
    """
    sessions = _agreeing(candidates, batch)
    return dict(zip(sessions, measure(list(sessions.values()), batch), strict=True))


def _agreeing(candidates: Mapping[str, Callable[[], Runnable]], batch: Batch) -> dict[str, Runnable]:
    """Opens the candidates that run and agree with the first of them; raises ZooError if there is none."""
    sessions: dict[str, Runnable] = {}
    expected: Batch = {}
    problems = []
    for name, opener in sorted(candidates.items(), key=lambda candidate: candidate[0].removesuffix(FLOAT) != REFERENCE):
        try:
            session = opener()
            outputs = session.run(batch)
            require_alike(name, outputs, expected, next(iter(sessions.values()), session), batch)
            if REFERENCE in sessions:
                require_correct_as_opened(session, batch)
        except BatchError:
            raise
        except ZooError as error:
            problems.append(str(error))
            logger.warning("the engine %s is left out: %s", name, error)
        else:
            sessions[name] = session
            expected = expected or outputs
    if not sessions:
        raise ZooError(f"no engine runs the model: {'; '.join(problems)}")
    return sessions


def size_class(batch: Batch) -> int:
    """Returns the number of samples rounded up to a power of two.

    Args:
        batch: Batch.
    """
    return 1 << max(length(batch) - 1, 0).bit_length()


def measure(sessions: Sequence[Runnable], batch: Batch, repeats: int = REPEATS) -> list[float]:
    """Times sessions in turn, on variants of the batch if a session can vary it (`varied`).

    Args:
        sessions: Sessions of one model.
        batch: Batch to time on.
        repeats: Runs of each session, at most.

    Returns:
        Median milliseconds of a run per session.
    """
    times: list[list[float]] = [[] for _ in sessions]
    varied = next((session.varied for session in sessions if hasattr(session, "varied")), None)
    count = 1 if varied is None else max(VARIANTS // max(length(batch), 1), 1)
    start = time.perf_counter()
    for repeat in range(repeats + 1):
        batches = [batch if varied is None else varied(batch, repeat * count + number) for number in range(count)]
        for session, taken in zip(sessions, times, strict=True):
            before = time.perf_counter()
            for variant in batches:
                session.run(variant)
            if repeat:  # the first round warms up
                taken.append((time.perf_counter() - before) / count * 1e3)
        if repeat >= 3 and (time.perf_counter() - start) * 1e3 > BUDGET_MS * len(sessions):
            break
    return [float(np.median(taken)) for taken in times]
