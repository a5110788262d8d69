"""Training on a Ray cluster: Ray Train starts the processes, which train a family as under torchrun, with gloo.

Each worker trains in its own folder. After every checkpoint, rank 0 copies its folder to the shared storage. If a
worker is lost, new workers start from the last copy. The finished model is copied from the storage to the output
folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import zoo
from pipelines.core.console import console, print_line
from pipelines.core.errors import RequestError, ZooError, error_of_process, one_line
from pipelines.core.files import require_place
from zoo.api.paths import Model
from zoo.distributed import remote_files
from zoo.distributed.ray.connection import connect, parse_count
from zoo.training import runs

MAX_LOSSES = 10  # of workers without a new checkpoint, after which the training fails
LOCAL_STORAGE = ".{name}.ray"  # default storage, in the parent folder of the output


class WorkerError(Exception):
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
        workers: Number of processes, or "MIN:MAX" for as many as are available.
        cores: Cores per worker.
        address: Cluster address or "auto"; None for a local cluster.
        storage: Shared folder or fsspec URL for checkpoints; None for a folder next to `output`.
        resume: Continue from the checkpoints in `storage`.
        **options: Options of `zoo.train` or `zoo.finetune`.

    Returns:
        Metrics on the held-out data, and counts.

    Raises:
        RequestError: An option is invalid, or the family has no distributed training.
        ZooError: The training fails, or workers are lost repeatedly.
    """
    from zoo.api.training_settings import require_trainable

    count = parse_count(workers, "workers")
    if cores < 1:
        raise RequestError(f"found {cores} cores, expected 1 or more for each worker")
    entry = zoo.entry(str(model)) if verb == "train" else zoo.entry_of(model)
    trainer_of = require_trainable(entry)
    if not trainer_of.processes:
        raise RequestError(f"found {entry.name}, expected a family with distributed training")
    folder = Path(output).absolute()
    runs.require_free_run(folder)
    require_place(folder / "card.json")
    max_workers = count if isinstance(count, int) else count[1]
    ray = connect(address, max_workers * cores)
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    with _checkpoint_storage(storage, folder, resume) as (system, path), _console_actor(ray) as console_actor:
        train_loop_config = {
            "console": console_actor,
            "verb": verb,
            "model": str(Path(model).absolute()) if Path(model).is_dir() else str(model),
            "data": data,
            "name": folder.name,
            "working_directory": str(Path.cwd()),
            "options": options,
        }
        trainer = TorchTrainer(
            _train_loop,
            torch_config=TorchConfig(backend="gloo"),
            train_loop_config=train_loop_config,
            scaling_config=train.ScalingConfig(num_workers=count, resources_per_worker={"CPU": cores}),
            run_config=train.RunConfig(
                name=folder.name,
                storage_path=path,
                storage_filesystem=system,
                checkpoint_config=train.CheckpointConfig(num_to_keep=1),
                logging_config=train.LoggingConfig(log_level="ERROR"),
            ),
        )
        result = _fit(ray, train, trainer, lambda: _last_checkpoint(system, path, folder.name))
        _copy_checkpoint(result.checkpoint, folder)
        system.delete_dir(f"{path}/{folder.name}")
    return dict(result.return_value)


def _train_loop(config: Mapping[str, Any]) -> dict[str, Any]:
    """Trains in a worker. Returns the metrics."""
    from ray import train

    from zoo import api

    is_first = train.get_context().get_world_rank() == 0
    if is_first:
        console.file = cast("IO[str]", _ConsoleStream(config["console"]))
    with tempfile.TemporaryDirectory(prefix="train-", dir=Path.cwd()) as scratch:
        folder = Path(scratch) / config["name"]  # the model is named after the folder
        with contextlib.suppress(OSError):
            os.chdir(config["working_directory"])  # of the driver, for relative paths
        if checkpoint := train.get_checkpoint():
            checkpoint.to_directory(folder)

        def report(output: Path) -> None:
            train.report({}, checkpoint=train.Checkpoint.from_directory(output) if is_first else None)

        try:
            with runs.checkpoint_hook(report):
                command = getattr(api, config["verb"])
                resume = checkpoint is not None
                metrics = command(config["model"], config["data"], folder, resume=resume, **config["options"])
        except ZooError as error:
            raise WorkerError(str(error), error.exit_code) from error
        report(folder)
        return dict(metrics)


def _fit(ray: Any, train: Any, trainer: Any, last_checkpoint: Callable[[], str]) -> Any:
    """Runs a trainer, and restarts it from the last checkpoint if workers are lost. Returns its result."""
    losses, previous = 0, last_checkpoint()
    while True:
        try:
            return trainer.fit()
        except train.WorkerGroupError as error:
            causes = [getattr(failure, "_base_exc", failure) for failure in error.worker_failures.values()]
            for cause in causes:
                if isinstance(cause, WorkerError):
                    raise error_of_process(*cause.args) from error
            current = last_checkpoint()
            losses, previous = (1 if current != previous else losses + 1), current
            lost = next((cause for cause in causes if isinstance(cause, ray.exceptions.RayActorError)), causes[0])
            reason = one_line(lost)[:200]
            if losses >= MAX_LOSSES:
                raise ZooError(f"lost workers {losses} times without a new checkpoint: {reason}") from error
            start = "the last checkpoint" if current else "the beginning"
            print_line(f"lost a worker ({reason}); going on from {start}")
        except train.TrainingFailedError as error:
            raise ZooError(f"training on Ray failed: {one_line(error)[:300]}") from error


class _ConsoleStream(io.TextIOBase):
    """A text stream that sends complete lines to the console actor."""

    def __init__(self, console_actor: Any) -> None:
        self._actor, self._text = console_actor, ""

    def write(self, text: str) -> int:
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            self._actor.add.remote(line)
        return len(text)


@contextlib.contextmanager
def _console_actor(ray: Any) -> Iterator[Any]:
    """An actor that receives lines, which this process prints once a second.

    Ray's own forwarding (`log_to_driver`) prints the output of all its processes.
    """

    class ConsoleActor:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def add(self, line: str) -> None:
            self.lines.append(line)

        def take(self) -> list[str]:
            lines, self.lines = self.lines, []
            return lines

    this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    actor = ray.remote(num_cpus=0)(ConsoleActor).options(scheduling_strategy=this_node).remote()
    stopped = threading.Event()

    def print_lines() -> None:
        last = False
        while not last:
            last = stopped.wait(1)
            for line in ray.get(actor.take.remote()):
                print_line(line)

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield actor
    finally:
        stopped.set()
        thread.join(10)
        ray.kill(actor)


@contextlib.contextmanager
def _checkpoint_storage(storage: str | None, folder: Path, resume: bool) -> Iterator[tuple[Any, str]]:
    """Yields the Arrow file system and the path of checkpoints.

    Raises RequestError if it has checkpoints of another training, or none to resume from.
    """
    from pyarrow import fs

    is_default = storage is None
    location = str(folder.parent / LOCAL_STORAGE.format(name=folder.name)) if storage is None else storage
    if remote_files.is_url(location):
        system, path = remote_files.file_system(location)
        system = fs.PyFileSystem(fs.FSSpecHandler(system))
    else:
        system, path = fs.LocalFileSystem(), str(Path(location).absolute())
    try:
        checkpoint = _last_checkpoint(system, path, folder.name)
        if resume and not checkpoint:
            raise RequestError(f"found no checkpoint of {folder.name} in {location}; train without --resume")
        if checkpoint and not resume:
            raise RequestError(
                f"found a training of {folder.name} in {location}; go on with --resume, or choose another output"
            )
        system.create_dir(path, recursive=True)
    except OSError as error:
        raise RequestError(f"cannot keep checkpoints in {location}: {one_line(error)}") from error
    try:
        yield system, path
    finally:
        if is_default and not _last_checkpoint(system, path, folder.name):
            shutil.rmtree(path, ignore_errors=True)


def _last_checkpoint(system: Any, storage: str, name: str) -> str:
    """Path of Ray's last checkpoint in a storage; "" if there is none."""
    from ray import train

    try:
        checkpoint = train.Result.from_path(f"{storage}/{name}", system).checkpoint
    except RuntimeError:  # no such folder, or no list of checkpoints in it
        return ""
    return str(checkpoint.path) if checkpoint else ""


def _copy_checkpoint(checkpoint: Any, folder: Path) -> None:
    """Copies the files of a checkpoint to a new or empty folder, atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        copied = Path(scratch) / folder.name
        checkpoint.to_directory(copied)
        copied.rename(folder)
