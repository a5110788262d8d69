"""Scoring on a Ray cluster: the parts of `zoo.distributed`, each scored by whichever actor is idle.

An actor holds one session, streams files by itself and writes results to storage that all nodes share; nothing but
part numbers and summaries passes through Ray, so its memory stays what `zoo run` takes, and the driver's small. A part
counts once, by its manifest: what a lost actor had not finished is scored again by another.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.core.progress import progress
from zoo.distributed import remote_files
from zoo.distributed.ray.connection import connected, library
from zoo.distributed.shards import Work, merged

TRIES = 3  # of a part, by actors that are lost, and of starting actors
START = -1  # what an actor does before it has a part


def _scorer(ray: Any) -> Any:
    """The actor."""

    @ray.remote(num_cpus=1)
    class Scorer:
        def open(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, str]:
            """Open the model and the plan; the number of the process, and no fault."""
            self.work = Work(*arguments, **options)
            return os.getpid(), ""

        def score(self, number: int) -> tuple[dict[str, Any] | None, str]:
            """The manifest of a part, or why it cannot be scored."""
            try:
                return self.work.score(number), ""
            except ZooError as error:
                return None, f"{error.exit_code} {error}"

    return Scorer


def _end(ray: Any, actors: deque[Any]) -> None:
    while actors:
        ray.kill(actors.popleft())


def run_on_ray(
    model: str | Path,
    inputs: Sequence[str],
    output: str | Path,
    *,
    address: str | None = None,
    workers: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Scores all parts of the input on a Ray cluster, with single-core actors.

    Args:
        model: Name of a pretrained model, or path of a model folder that every node sees.
        inputs: Paths, glob patterns, folders or URLs that every node sees.
        output: Folder of the results, at the same path on every node.
        address: Cluster address or "auto"; None for a local cluster.
        workers: Number of actors; None for the cores of the cluster.
        **options: Options of `zoo.distributed.shards.Work`.

    Returns:
        Totals of the summaries, "parts", "kept" (parts scored before), "workers" and "lost" (failures of actors).

    Raises:
        RequestError: An option is invalid.
        ZooError: A part failed more than `TRIES` times.
    """
    if workers is not None and workers < 1:
        raise RequestError(f"found {workers} workers, wanted 1 or more")
    library()  # alone: two imports at once take longer, and actors begin only after this one
    with ThreadPoolExecutor(1) as beside:  # a plan takes as long as processes take to begin
        planning = beside.submit(Work, model, inputs, output, **options)
        if address is None:  # a cluster of this process is forked, which waits forever for a thread at work in BLAS
            planning.result()
        with connected(address, workers) as ray:
            return _scored(ray, planning, model, output, workers, options)


def _scored(
    ray: Any,
    planning: Future[Work],
    model: str | Path,
    output: str | Path,
    workers: int | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """`run_on_ray` on a cluster."""
    scorer = _scorer(ray)
    begun = deque(scorer.remote() for _ in range(workers or int(ray.cluster_resources().get("CPU", 1))))
    try:
        work = planning.result()  # before the actors look for its plan
    except BaseException:
        _end(ray, begun)
        raise
    waiting = deque(number for number in range(len(work.parts)) if not work.done(number))
    kept = len(work.parts) - len(waiting)
    count = min(len(begun), max(len(waiting), 1))
    given = {**options, "engine": work.plan["engine"]}
    named = remote_files.absolute(str(model)) if Path(model).is_dir() else str(model)
    arguments = (named, work.plan["inputs"], remote_files.absolute(str(output)))
    lost, tries = 0, dict.fromkeys((*waiting, START), 0)
    idle: deque[Any] = deque()
    busy: dict[Any, tuple[Any, int]] = {}  # what an actor is asked: its part, or START

    def start() -> None:
        actor = begun.popleft() if begun else scorer.remote()
        busy[actor.open.remote(arguments, given)] = actor, START  # it may wait for a node: parts go to those that live

    def failed(number: int, error: Exception) -> None:
        tries[number] += 1
        if tries[number] > TRIES:
            what = "actors cannot start" if number == START else f"part {number} was lost {tries[number]} times"
            raise ZooError(f"{what}: {one_line(error)[:200]}") from error
        if number != START:
            waiting.append(number)
        start()

    try:
        with progress("scoring parts", len(waiting)) as advance:
            for _ in range(count if waiting else 0):
                start()
            _end(ray, begun)
            while waiting or any(number != START for _, number in busy.values()):
                while waiting and idle:
                    actor, number = idle.popleft(), waiting.popleft()
                    busy[actor.score.remote(number)] = actor, number
                (ended,), _ = ray.wait(list(busy), num_returns=1)
                actor, number = busy.pop(ended)
                try:
                    found, fault = ray.get(ended)
                except ray.exceptions.RayActorError as error:
                    lost += 1
                    failed(number, error)
                    continue
                if found is None:
                    code, _, message = fault.partition(" ")
                    raise (RequestError if code == "2" else ZooError)(message)
                idle.append(actor)
                if number != START:
                    tries[START] = 0
                    advance(1)
    finally:
        _end(ray, deque([*begun, *idle, *(actor for actor, _ in busy.values())]))
    found = merged([work.score(number) for number in range(len(work.parts))])
    about = {"model": work.plan["model"], "parts": len(work.parts), "kept": kept, "workers": count, "lost": lost}
    return {**about, **found}
