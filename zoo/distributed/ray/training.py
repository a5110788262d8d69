"""Training on a Ray cluster: Ray Train starts the processes and joins them by gloo; the families' own trainings run in
them as by hand, and checkpoints go to storage that all nodes reach.

Each worker trains in a folder of its own. After every checkpoint the first one copies the folder to the storage; where
a worker is lost, new ones start from the last copy. A finished model comes from the storage into the output folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import zoo
from pipelines.core.console import console, print_line
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.core.files import require_place
from zoo.api.paths import Model
from zoo.distributed import remote_files
from zoo.distributed.ray.connection import connect, counts_of
from zoo.training import runs

TRIES = 10  # losses of workers, without a new checkpoint between them, that end a training
LOCAL = ".{name}.ray"  # beside the output: the storage, where no other is named


class Fault(Exception):
    """A ZooError of a worker: its message and exit code."""


def train_on_ray(
    verb: str,
    model: Model,
    data: Any,
    output: Model,
    *,
    workers: str | int,
    cores: int = 1,
    address: str | None = None,
    storage: str | None = None,
    resume: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains on a Ray cluster, with the same result as the same number of processes under torchrun.

    Args:
        verb: "train" or "finetune".
        model: Name of the family ("train"), or model name or folder ("finetune").
        data: Training data, at the same path on all nodes.
        output: Folder of the new model.
        workers: Number of processes, or "MIN:MAX" to take what is available.
        cores: Cores per worker.
        address: Cluster address or "auto"; None for a local cluster.
        storage: Shared folder or fsspec URL for checkpoints; None for a folder beside `output`.
        resume: Continue from the checkpoints in `storage`.
        **options: Options of `zoo.train` or `zoo.finetune`.

    Returns:
        Metrics on the held-out data, and counts.

    Raises:
        RequestError: An option is invalid, or the family has no distributed training.
        ZooError: The training fails, or workers are lost repeatedly.
    """
    from zoo.api.training import trained_by
    from zoo.api.training_settings import require_trainable

    count = counts_of(workers, "workers")
    if cores < 1:
        raise RequestError(f"found {cores} cores, wanted 1 or more for each worker")
    entry = trained_by(str(model), data, **options) if verb == "train" else zoo.entry_of(model)
    trainer_of = require_trainable(entry)
    if not trainer_of.processes:
        raise RequestError(f"found {entry.name}, wanted a family that several processes train; this is one alone")
    folder = Path(output).absolute()
    runs.require_free(folder)
    require_place(folder / "card.json")
    most = count if isinstance(count, int) else count[1]
    ray = connect(address, most * cores)
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    with _stored(storage, folder, resume) as (system, place), _heard(ray) as listener:
        told = {
            "listener": listener,
            "verb": verb,
            "model": str(Path(model).absolute()) if Path(model).is_dir() else str(model),
            "data": data,
            "name": folder.name,
            "place": str(Path.cwd()),
            "options": options,
        }
        trainer = TorchTrainer(
            _work,
            torch_config=TorchConfig(backend="gloo"),
            train_loop_config=told,
            scaling_config=train.ScalingConfig(num_workers=count, resources_per_worker={"CPU": cores}),
            run_config=train.RunConfig(
                name=folder.name,
                storage_path=place,
                storage_filesystem=system,
                checkpoint_config=train.CheckpointConfig(num_to_keep=1),
                logging_config=train.LoggingConfig(log_level="ERROR"),
            ),
        )
        result = _fitted(ray, train, trainer, lambda: _last(system, place, folder.name))
        _bring(result.checkpoint, folder)
        system.delete_dir(f"{place}/{folder.name}")
    return dict(result.return_value)


def _work(told: Mapping[str, Any]) -> dict[str, Any]:
    """What each worker does. Returns the metrics."""
    from ray import train

    from zoo import api

    first = train.get_context().get_world_rank() == 0
    if first:
        console.file = cast("IO[str]", _Line(told["listener"]))
    with tempfile.TemporaryDirectory(prefix="train-", dir=Path.cwd()) as scratch:
        folder = Path(scratch) / told["name"]  # the model is named after it
        with contextlib.suppress(OSError):
            os.chdir(told["place"])  # relative names mean what they mean to the driver
        if found := train.get_checkpoint():
            found.to_directory(folder)

        def keep(output: Path) -> None:
            train.report({}, checkpoint=train.Checkpoint.from_directory(output) if first else None)

        try:
            with runs.keeping(keep):
                verb = getattr(api, told["verb"])
                metrics = verb(told["model"], told["data"], folder, resume=found is not None, **told["options"])
        except ZooError as error:
            raise Fault(str(error), error.exit_code) from error
        keep(folder)
        return dict(metrics)


def _fitted(ray: Any, train: Any, trainer: Any, last: Any) -> Any:
    """The result of a trainer that goes on from its last checkpoint as often as workers are lost."""
    losses, before = 0, last()
    while True:
        try:
            return trainer.fit()
        except train.WorkerGroupError as error:
            said = [getattr(each, "_base_exc", each) for each in error.worker_failures.values()]
            for each in said:
                if isinstance(each, Fault):
                    message, code = each.args
                    raise (RequestError if code == RequestError.exit_code else ZooError)(message) from error
            now = last()
            losses, before = (1 if now != before else losses + 1), now
            reason = one_line(next((x for x in said if isinstance(x, ray.exceptions.RayActorError)), said[0]))[:200]
            if losses >= TRIES:
                raise ZooError(f"lost workers {losses} times without a new checkpoint: {reason}") from error
            at = "the last checkpoint" if now else "the beginning"
            print_line(f"lost a worker ({reason}); going on from {at}")
        except train.TrainingFailedError as error:
            raise ZooError(f"training on Ray failed: {one_line(error)[:300]}") from error


class _Line(io.TextIOBase):
    """A stream whose lines a listener gets."""

    def __init__(self, listener: Any) -> None:
        self._listener, self._text = listener, ""

    def write(self, text: str) -> int:
        """Whole lines go, at once."""
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            self._listener.hear.remote(line)
        return len(text)


@contextlib.contextmanager
def _heard(ray: Any) -> Iterator[Any]:
    """An actor that hears lines, which are said here once a second. Ray's own way says what all of its processes do."""

    class Listener:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def hear(self, line: str) -> None:
            self.lines.append(line)

        def new(self) -> list[str]:
            lines, self.lines = self.lines, []
            return lines

    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    listener = ray.remote(num_cpus=0)(Listener).options(scheduling_strategy=here).remote()
    ended = threading.Event()

    def say() -> None:
        over = False
        while not over:
            over = ended.wait(1)
            for line in ray.get(listener.new.remote()):
                print_line(line)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield listener
    finally:
        ended.set()
        thread.join(10)
        ray.kill(listener)


@contextlib.contextmanager
def _stored(storage: str | None, folder: Path, resume: bool) -> Iterator[tuple[Any, str]]:
    """(file system of Arrow, path) where checkpoints go. Raises RequestError where another training's are, or, to
    resume from, none.
    """
    from pyarrow import fs

    own = storage is None
    place = str(folder.parent / LOCAL.format(name=folder.name)) if storage is None else storage
    if remote_files.is_url(place):
        system, path = remote_files.file_system(place)
        system = fs.PyFileSystem(fs.FSSpecHandler(system))
    else:
        system, path = fs.LocalFileSystem(), str(Path(place).absolute())
    try:
        kept = _last(system, path, folder.name)
        if resume and not kept:
            raise RequestError(f"found no checkpoint of {folder.name} in {place}; train without --resume")
        if kept and not resume:
            raise RequestError(
                f"found a training of {folder.name} in {place}; go on with --resume, or choose another output"
            )
        system.create_dir(path, recursive=True)
    except OSError as error:
        raise RequestError(f"cannot keep checkpoints in {place}: {one_line(error)}") from error
    try:
        yield system, path
    finally:
        if own and not _last(system, path, folder.name):
            shutil.rmtree(path, ignore_errors=True)


def _last(system: Any, place: str, name: str) -> str:
    """The path of the last checkpoint that Ray knows of in a storage, "" where there is none."""
    from ray import train

    try:
        found = train.Result.from_path(f"{place}/{name}", system).checkpoint
    except RuntimeError:  # no such folder, or no list of checkpoints in it
        return ""
    return str(found.path) if found else ""


def _bring(checkpoint: Any, folder: Path) -> None:
    """A checkpoint's files as `folder`, which is new or empty; whole, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        found = Path(scratch) / folder.name
        checkpoint.to_directory(found)
        found.rename(folder)
