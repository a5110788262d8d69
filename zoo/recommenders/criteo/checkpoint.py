"""What a run of training keeps on disk between its epochs and within them, to go on from."""

from __future__ import annotations

import contextlib
import json
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.core.files import replacing
from zoo.training.runs import require_same_run

CHECKPOINT_SECONDS = 300.0  # between checkpoints within an epoch
STATES = (
    "run",
    "phase",
    "epoch",
    "batch",
    "loss",
    "trained",
    "seconds",
    "history",
    "best",
)  # what a checkpoint keeps as JSON


@dataclass
class Checkpoint:
    """Where a run stands.

    phase: search or refit. epoch: whole ones done; `batch` batches of the next are, with the sum of losses `loss`.
    variables: the trainer's, in its order. trained: rows of all steps. seconds: of reading the source, waiting for
    batches, steps, evaluating, saving.
    """

    run: dict[str, Any]
    phase: str = "search"
    epoch: int = 0
    batch: int = 0
    loss: float = 0.0
    trained: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    best_weights: list[Any] = field(default_factory=list)
    variables: list[Any] = field(default_factory=list)

    @property
    def stale(self) -> int:
        """Epochs since the best one."""
        return self.epoch - self.best["epoch"] if self.best else 0

    def note(self, epoch: dict[str, Any], weights: list[Any], min_delta: float) -> None:
        """Add an epoch to the history; see `TrainConfig` for when it is the best."""
        self.history.append(epoch)
        if not self.best or epoch["logloss"] < self.best["logloss"] - min_delta:
            self.best, self.best_weights = epoch, weights

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Count the seconds of what is done under it."""
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin

    def save(self, path: Path | None, variables: Sequence[Any]) -> None:
        """Write everything, whole or not at all; nothing where there is no path."""
        self.saved = time.monotonic()
        if path is None:
            return
        with self.clock("save"):
            arrays = {f"variable{i}": variable.numpy() for i, variable in enumerate(variables)}
            arrays |= {f"best{i}": array for i, array in enumerate(self.best_weights)}
            text = json.dumps({name: getattr(self, name) for name in STATES})
            with replacing(path) as temporary:
                np.savez(temporary, state=np.array(text), **arrays)

    def save_now_and_then(self, path: Path | None, variables: Sequence[Any]) -> None:
        """Write everything where the last time was long ago."""
        if time.monotonic() - self.saved >= CHECKPOINT_SECONDS:
            self.save(path, variables)

    @classmethod
    def load(cls, path: Path, run: dict[str, Any]) -> Checkpoint:
        """Read a checkpoint of the run `run`. Raises RequestError where it is broken or another run's, naming what
        differs.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                state = json.loads(str(file["state"]))
                lists = [[file[name] for name in file.files if name.startswith(kind)] for kind in ("best", "variable")]
        except (OSError, ValueError, KeyError, EOFError, RecursionError, zipfile.BadZipFile) as error:
            raise RequestError(
                f"cannot read the checkpoint {path} ({error}); train again into an empty folder"
            ) from error
        require_same_run(path, state["run"], run)
        state["seconds"] = defaultdict(float, state["seconds"])
        return cls(**state, best_weights=lists[0], variables=lists[1])
