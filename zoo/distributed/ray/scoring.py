"""Scoring on a Ray cluster: idle actors score the parts of a plan (`zoo.distributed.shards`).

An actor opens the model once, reads files itself and writes results to shared storage. Ray transfers part numbers and
summaries alone, so that an actor needs the memory of `zoo run`, and the driver little. A part that a lost actor did not
finish is scored by another one; manifests prevent that a part counts twice.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError, ZooError, error_of_process, one_line
from pipelines.core.progress import progress
from zoo.distributed import remote_files
from zoo.distributed.ray.connection import connected, import_ray
from zoo.distributed.shards import ShardedRun, merge_summaries

MAX_FAILURES = 3  # lost actors per part, and of actors in a row that do not start
START = -1  # task of an actor before it gets a part


def _actor_type(ray: Any) -> Any:
    @ray.remote(num_cpus=1)
    class Scorer:
        def open(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, None]:
            """Opens the model and the plan. Returns the process id, and no error."""
            self.run = ShardedRun(*arguments, **options)
            return os.getpid(), None

        def score(self, number: int) -> tuple[dict[str, Any] | None, tuple[str, int] | None]:
            """Scores a part. Returns its manifest, or message and exit code of the error."""
            try:
                return self.run.score(number), None
            except ZooError as error:
                return None, (str(error), error.exit_code)

    return Scorer


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
        **options: Options of `zoo.distributed.shards.ShardedRun`.

    Returns:
        Totals of the summaries, "parts", "kept" (parts scored before), "workers" and "lost" (failures of actors).

    Raises:
        RequestError: An option is invalid.
        ZooError: A part failed, or was lost with more than `MAX_FAILURES` actors.
    """
    if workers is not None and workers < 1:
        raise RequestError(f"found {workers} workers, expected 1 or more")
    import_ray()  # before the thread: two imports at once take longer
    with ThreadPoolExecutor(1) as executor:  # the plan is made while actors start
        planning = executor.submit(ShardedRun, model, inputs, output, **options)
        if address is None:  # a local cluster is forked, which would deadlock with a BLAS thread of the planning
            planning.result()
        with connected(address, workers) as ray:
            return _score_parts(ray, planning, model, output, workers, options)


def _score_parts(
    ray: Any,
    planning: Future[ShardedRun],
    model: str | Path,
    output: str | Path,
    workers: int | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Scores the parts of a plan that are not done yet; actors start while the plan is made."""
    actors = _Actors(ray, workers or int(ray.cluster_resources().get("CPU", 1)))
    try:
        run = planning.result()  # the plan must exist before actors open it
        missing = [number for number in range(len(run.parts)) if not run.is_done(number)]
        model_name = remote_files.absolute(str(model)) if Path(model).is_dir() else str(model)
        arguments = (model_name, run.plan["inputs"], remote_files.absolute(str(output)))
        actors.opening = arguments, {**options, "engine": run.plan["engine"]}
        workers = min(len(actors.created), max(len(missing), 1))
        actors.score(missing, workers)
    finally:
        actors.close()
    totals = merge_summaries([run.score(number) for number in range(len(run.parts))])  # reads the manifests
    counts = {"parts": len(run.parts), "kept": len(run.parts) - len(missing), "workers": workers, "lost": actors.lost}
    return {"model": run.plan["model"], **counts, **totals}


class _Actors:
    """Actors that score parts, and new ones for those that are lost.

    Args:
        ray: The package ray.
        count: Number of actors to create.

    Attributes:
        created: Actors without a task.
        opening: Arguments and options of the plan that actors open (`ShardedRun`).
        lost: Number of lost actors.
    """

    def __init__(self, ray: Any, count: int) -> None:
        self.ray, self.actor_type = ray, _actor_type(ray)
        self.created = deque(self.actor_type.remote() for _ in range(count))
        self.opening: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.lost = 0
        self._idle: deque[Any] = deque()
        self._busy: dict[Any, tuple[Any, int]] = {}  # by Ray's reference to the task: the actor, and its part or START
        self._failures: Counter[int] = Counter()  # of a part, or START

    def score(self, parts: Sequence[int], workers: int) -> None:
        """Scores parts.

        Args:
            parts: Numbers of the parts.
            workers: Number of actors at a time; those that were created beyond it are stopped.

        Raises:
            ZooError: A part cannot be scored, or too many actors were lost.
        """
        queued = deque(parts)
        with progress("scoring parts", len(queued)) as advance:
            for _ in range(workers if queued else 0):
                self._start()
            self._kill(self.created)
            while queued or any(number != START for _, number in self._busy.values()):
                while queued and self._idle:
                    actor, number = self._idle.popleft(), queued.popleft()
                    self._busy[actor.score.remote(number)] = actor, number
                (finished,), _ = self.ray.wait(list(self._busy), num_returns=1)
                actor, number = self._busy.pop(finished)
                try:
                    _, problem = self.ray.get(finished)
                except self.ray.exceptions.RayActorError as error:
                    self._count_loss(number, error)
                    queued.extend([] if number == START else [number])
                    self._start()
                    continue
                if problem is not None:
                    raise error_of_process(*problem)
                self._idle.append(actor)
                if number != START:
                    self._failures[START] = 0
                    advance(1)

    def close(self) -> None:
        """Stops all actors."""
        self._kill(deque([*self.created, *self._idle, *(actor for actor, _ in self._busy.values())]))

    def _start(self) -> None:
        actor = self.created.popleft() if self.created else self.actor_type.remote()
        arguments, options = self.opening
        self._busy[actor.open.remote(arguments, options)] = actor, START  # may have to wait for a node

    def _count_loss(self, number: int, error: Exception) -> None:
        """Counts an actor that was lost with its part, or START; raises ZooError after `MAX_FAILURES`."""
        self.lost += 1
        self._failures[number] += 1
        if self._failures[number] > MAX_FAILURES:
            task = (
                "actors cannot start" if number == START else f"part {number} was lost {self._failures[number]} times"
            )
            raise ZooError(f"{task}: {one_line(error)[:200]}") from error

    def _kill(self, actors: deque[Any]) -> None:
        while actors:
            self.ray.kill(actors.popleft())
