"""Common parts of training runs: settings, data sets, output folders, checkpoints, curves and torchrun processes."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from pipelines.core import files, machine, settings
from pipelines.core.errors import RequestError, one_line, requires
from pipelines.core.files import read_json, replacing, require_place, sha256
from pipelines.models.hub import CARD

if TYPE_CHECKING:
    import torch

TABLE_ROWS = "checkpoint/rows-*"  # rows of tables beyond memory, which are nothing without a checkpoint
DISTILLATION_TARGETS = "checkpoint/distilled.*"  # cached teacher outputs, costly and reused by a new training
QAT_FROZEN = 0.3  # last share of the steps of QAT, with frozen ranges and BatchNorm statistics
QAT_RATE = 0.1  # factor of the learning rate of fine-tuning, if the prediction target is the same

_LOCKS: dict[Path, filelock.BaseFileLock] = {}  # locked output folders of this process


def require_free_run(output: Path, allow_targets: bool = False) -> None:
    """Checks that an output folder is new or empty.

    Args:
        output: Folder to train into.
        allow_targets: Whether the folder may contain cached distillation targets.

    Raises:
        RequestError: The folder is in use.
    """
    if not (allow_targets and output.is_dir() and not any(training_files(output))):
        files.require_free(output, "choose another, or resume the training with --resume")


def training_files(output: Path) -> list[Path]:
    """Lists the contents of a training folder, except cached distillation targets, table rows and `checkpoint` itself.

    Args:
        output: Folder of a training.

    Returns:
        Paths.
    """
    paths = (*output.iterdir(), *output.glob("checkpoint/*"))
    kept = [path for path in paths if path != output / "checkpoint"]
    return [path for path in kept if not path.match(DISTILLATION_TARGETS) and not path.match(TABLE_ROWS)]


def require_output(output: Path, state: str, resume: bool) -> None:
    """Checks an output folder and locks it: no other process can train into it until this process ends.

    Args:
        output: Folder to train into.
        state: Path of the checkpoint in the folder.
        resume: True requires the checkpoint; False requires a new or empty folder, apart from cached distillation
            targets.

    Raises:
        RequestError: The checkpoint is missing, or the folder is in use or not writable.
    """
    if resume and not (output / state).is_file():
        raise RequestError(f"found no {state} in {output} to resume from; train without --resume")
    if not resume:
        require_free_run(output, allow_targets=True)
    require_place(output / state)
    if is_first():
        _lock(output.resolve())


def _lock(output: Path) -> None:
    lock = settings.home() / "locks" / f"{hashlib.sha256(bytes(output)).hexdigest()[:16]}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        _LOCKS.setdefault(output, filelock.FileLock(lock)).acquire(timeout=0)
    except filelock.Timeout as error:
        raise RequestError(f"found another training in {output}; wait for it, or choose another folder") from error
    except OSError:
        return  # training does not need a writable cache


_CHECKPOINT_HOOKS: list[Callable[[Path], None]] = []


@contextlib.contextmanager
def checkpoint_hook(hook: Callable[[Path], None]) -> Iterator[None]:
    """Context with a hook that every process calls after every checkpoint of a distributed training.

    Args:
        hook: Called with the output folder.
    """
    _CHECKPOINT_HOOKS.append(hook)
    try:
        yield
    finally:
        _CHECKPOINT_HOOKS.remove(hook)


def checkpointed(output: Path) -> None:
    """Calls the hooks of `checkpoint_hook`; all processes call it after rank 0 has written a checkpoint.

    Args:
        output: Folder of the training.
    """
    for hook in _CHECKPOINT_HOOKS:
        hook(output)


def record_of(folder: Path) -> dict[str, Any]:
    """Reads the training record of a model folder: train.json, or "training" in the card of a published model.

    Args:
        folder: Model folder.

    Returns:
        The record; {} if there is none.
    """
    trained = folder / "train.json"
    record: dict[str, Any] = read_json(trained) if trained.is_file() else read_json(folder / CARD).get("training", {})
    return record


def provenance(seed: int, files: Iterable[Path], **versions: str) -> dict[str, Any]:
    """Returns the origin of a model, for the training record.

    Args:
        seed: Seed of the training.
        files: Sources of the data; those that are no files are left out.
        versions: Versions of further libraries.

    Returns:
        {"seed", "data": [{"file", "sha256"}], "versions": {library: version}}.
    """
    import numpy as np
    import torch

    return {
        "seed": seed,
        "data": [{"file": path.name, "sha256": sha256(path)} for path in files if path.is_file()],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            **versions,
        },
    }


def require_qat(start: object, processes: int, precision: str = "fp32") -> None:
    """Checks the options of quantization-aware training.

    Args:
        start: Model to start from; None if there is none.
        processes: Number of training processes.
        precision: Training precision.

    Raises:
        RequestError: There is no model to start from, more than one process, or bf16 precision.
    """
    if start is None:
        raise RequestError("found qat without a trained model to start from; run: zoo finetune MODEL --qat")
    if processes > 1:
        raise RequestError(f"found {processes} processes, expected one: qat does not support torchrun")
    if precision == "bf16":
        raise RequestError(
            "found precision bf16 with qat, expected fp32 (or auto): bfloat16 is too coarse for the steps of int8"
        )


def require_task(teacher: str | Path, task: str) -> None:
    """Checks that a teacher has the task of its student.

    Args:
        teacher: Name or folder of the teacher model.
        task: Task of the student.

    Raises:
        RequestError: The tasks differ.
    """
    import zoo

    if (own := zoo.entry_of(teacher).task) != task:
        raise RequestError(f"found the teacher {teacher} of the task {own}, expected a model of the task {task}")


def require_same_run(
    path: Path, checkpoint_run: Mapping[str, Any], run: Mapping[str, Any], added: Mapping[str, Any] | None = None
) -> None:
    """Checks that a checkpoint belongs to a run.

    Args:
        path: Checkpoint, for the message.
        checkpoint_run: Run of the checkpoint: {"config": settings, "data", "start"}.
        run: Current run, in the same form.
        added: {setting that checkpoints of earlier versions lack: its value there}.

    Raises:
        RequestError: The runs differ; the message lists the differences.
    """
    before = {**(added or {}), **checkpoint_run["config"]}
    different = [
        f"{name} {before.get(name)} (now {value})" for name, value in run["config"].items() if before.get(name) != value
    ]
    different += [f"other {name}" for name in ("data", "start") if checkpoint_run[name] != run[name]]
    if different:
        raise RequestError(
            f"found a checkpoint in {path} made with {', '.join(different)}; resume with the same, or train into an "
            "empty folder"
        )


def datasets() -> Any:
    """Imports the library `datasets`.

    Raises:
        RequestError: It is not installed.
    """
    with requires("reading a data set", "int8-zoo[train]"):
        import datasets
    # it logs two lines per attempt; the final error is reported
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    return datasets


def load_dataset(name: str, load: Callable[[Any], Any]) -> Any:
    """Loads a data set with the `datasets` library.

    Args:
        name: Name of the data set, for the message.
        load: Called with the library; returns the data set.

    Returns:
        Result of `load`.

    Raises:
        RequestError: The data set cannot be loaded.
    """
    library = datasets()
    try:
        return load(library)
    except Exception as error:  # dozens of types for missing data sets, network errors and invalid folders
        raise RequestError(
            f"cannot load the data set {name}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error


def plot_curves(
    path: Path,
    history: Sequence[Mapping[str, Any]],
    left_axis: Mapping[str, tuple[str, str]],
    right: Mapping[str, tuple[str, str]],
    axes: tuple[str, str],
    best: int | None = None,
) -> None:
    """Plots learning curves as a PNG, with two vertical axes.

    Args:
        path: PNG file.
        history: Records of the epochs, each with the key "epoch".
        left_axis: {key of the records: (label, matplotlib style)} for the left axis.
        right: The same for the right axis.
        axes: Labels of the left and right axis.
        best: Epoch to mark; None: no mark.
    """
    from matplotlib.figure import Figure  # pyplot would need a window system
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    epochs, first = [entry["epoch"] for entry in history], figure.subplots()
    for scale, lines, name in ((first, left_axis, axes[0]), (first.twinx(), right, axes[1])):
        for key, (label, style) in lines.items():
            scale.plot(
                epochs, [entry[key] for entry in history], style, label=label, marker="o" if len(epochs) == 1 else ""
            )
        scale.set_ylabel(name)
    first.set_xlabel("epoch")
    first.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if best is not None:
        first.axvline(best, color="grey", linewidth=0.8)
    figure.legend(loc="outside upper center", ncols=len(left_axis) + len(right))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, metadata={"Software": None})


def is_first() -> bool:
    """Whether this process writes files: the only process, or rank 0 under torchrun."""
    return os.environ.get("RANK", "0") == "0"


# --------------------------------------------------------------------------------------------------------------- torch


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """The training processes under torchrun, or a single process.

    Attributes:
        rank: Rank of this process.
        count: Number of processes.
        device: Device of this process.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=_cpu)

    def same(self, value: Any) -> Any:
        """Broadcasts a value.

        Args:
            value: Value of this process.

        Returns:
            The value of rank 0.
        """
        from torch import distributed

        values = [value]
        if self.count > 1:
            distributed.broadcast_object_list(values, device=self.device)
        return values[0]

    def checkpointed(self, output: Path) -> None:
        """See `checkpointed`."""
        checkpointed(output)


def limit_threads() -> None:
    """Limits torch to the processors of this process: it reads affinity, but no CPU quota of a control group."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > machine.cores():
        torch.set_num_threads(machine.cores())


@contextlib.contextmanager
def processes() -> Iterator[Processes]:
    """Joins the processes started by torchrun (RANK and WORLD_SIZE): gloo between CPUs, nccl between GPUs.

    Process groups that already exist, as under Ray, are kept. See `limit_threads`.
    """
    import torch
    from torch import distributed

    limit_threads()
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    if count == 1:
        yield Processes(device=device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if distributed.is_initialized():
        yield Processes(rank, count, device)
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(rank, count, device)
    finally:
        distributed.destroy_process_group()
        # Gloo's threads outlive the group (torch keeps it for DistributedDataParallel), and each needs the GIL to free
        # the tensors of its last collective: one that asks for it while Python ends aborts a process that did its work.
        time.sleep(0.2)


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a checkpoint atomically; see `load_checkpoint`.

    Args:
        path: File to write.
        state: Contents, for torch.
    """
    import torch

    with replacing(path) as temporary:
        torch.save(state, temporary)


def load_checkpoint(path: Path, run: Mapping[str, Any], added: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reads a checkpoint of a run.

    Args:
        path: Checkpoint written by torch.
        run: Current run, see `require_same_run`.
        added: {setting that checkpoints of earlier versions lack: its value there}.

    Returns:
        Contents of the checkpoint, with tensors on the CPU.

    Raises:
        RequestError: The checkpoint is damaged or belongs to another run.
    """
    import torch

    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        kept = state["run"]
    except Exception as error:  # torch, zipfile and pickle raise their own kinds for every sort of damage
        raise RequestError(
            f"cannot read the checkpoint {path} ({one_line(error)}); train again into an empty folder"
        ) from error
    require_same_run(path, kept, run, added)
    return state


def save_weights(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Writes {"state_dict": state} in torch's format. Equal weights give equal bytes.

    torch stores the name of the file in the archive; writing to a stream avoids this.

    Args:
        path: File to write.
        state: {name: tensor}.
    """
    import torch

    with replacing(path) as temporary, temporary.open("wb") as stream:
        torch.save({"state_dict": {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}}, stream)


def fill(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], source: str | Path, *, assign: bool = False
) -> None:
    """Loads weights into a model.

    Counters of batch normalization (`num_batches_tracked`) are optional.

    Args:
        model: Model to fill, in place.
        state: {name: tensor}.
        source: Origin of the weights, for the message.
        assign: Whether the tensors themselves become the weights, instead of their values.

    Raises:
        RequestError: Weights are missing, unexpected or of another shape; the message lists them.
    """
    expected = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    weights = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
    faults = {
        "missing": [name for name in expected if name not in weights],
        "unexpected": [name for name in weights if name not in expected],
        "of another shape": [
            f"{name} {list(weights[name].shape)}, expected {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
    }
    if any(faults.values()):
        message = "; ".join(f"{len(names)} {kind} ({_first(names)})" for kind, names in faults.items() if names)
        raise RequestError(f"the weights in {source} are not those of this network: {message}")
    model.load_state_dict(weights, strict=False, assign=assign)


def _first(names: Iterable[str], count: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
