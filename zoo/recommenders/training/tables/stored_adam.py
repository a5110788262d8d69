"""Sparse Adam on the rows of a file, for tables that do not fit memory with the state of their optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from pipelines.core import machine
from pipelines.core.machine import BLOCK_ROWS
from zoo.recommenders.models.layers import Embeddings
from zoo.recommenders.training.tables.row_file import Records, RowFile
from zoo.recommenders.training.tables.sparse_adam import RowState, SparseAdam

COPIES = 4  # of a table in training: weights, their averages, and two moments
FIELDS = ("weight", "average", "first", "second")


def beyond_memory(model: torch.nn.Module) -> list[Embeddings]:
    """Returns the large tables of a network, if they and the state of their optimizer exceed `machine.table_memory`.

    Args:
        model: Network of `deferred_tables`.

    Returns:
        Modules with a parameter on the device "meta".
    """
    tables = [module for module in model.modules() if isinstance(module, Embeddings) and module.weight.is_meta]
    size = sum(table.weight.numel() * table.weight.element_size() * COPIES for table in tables)
    return tables if size > machine.table_memory() else []


class StoredAdam(SparseAdam):
    """`SparseAdam` with the rows that occurred in a `RowFile`; others are computed from their initial values.

    Results are those of `SparseAdam`, bit by bit: a row that occurs for the first time gets the initial value of its
    number and the missed steps of every `catch_up` before.

    Args:
        module: Tables with a parameter on the device "meta".
        path: File of the rows, replaced by an empty one at the first step, unless `restore` opens it.
        learning_rate: Learning rate.
        strength: Strength of the prior, whose mean is 0.
        ema: Momentum of the running average.

    Attributes:
        averaged: Whether `lookup` returns averages.
    """

    def __init__(self, module: Embeddings, path: Path, learning_rate: float, strength: float, ema: float) -> None:
        super().__init__(module.weight, learning_rate, strength, ema, module.padding)
        self.module, self.averaged, self.steps = module, False, 0
        size = (module.size,)
        self._file = RowFile(
            path, len(module.weight), [("last_step", "<i8"), *((name, "<f4", size) for name in FIELDS)]
        )
        self._is_open = False
        self._stops: list[int] = []  # steps that all rows were made up to
        self._used: list[tuple[torch.Tensor, torch.Tensor]] = []  # numbers and weights of the rows of the batch
        module.stored = self

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; see `RowFile.checkpoint`."""
        self._open()
        return {"stops": list(self._stops), "steps": self.steps, **self._file.checkpoint()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a checkpoint.

        Args:
            state: Result of `state`.

        Raises:
            RequestError: The file of the rows is missing or damaged.
        """
        self._stops, self.steps, self._is_open = list(state["stops"]), state["steps"], True
        self._file.restore({name: state[name] for name in ("count", "journal")})

    def snapshot(self, path: Path) -> dict[str, Any]:
        """Copies all rows to a file.

        Args:
            path: File to write.

        Returns:
            What `load_snapshot` needs.
        """
        self._open()
        self._file.copy(path)
        return {"file": path.name, "stops": list(self._stops), "steps": self.steps, "count": self._file.count}

    def load_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Continues with the rows of a snapshot.

        Args:
            snapshot: Result of `snapshot`.

        Raises:
            RequestError: The file is missing or damaged.
        """
        self._file.path = self._file.path.with_name(snapshot["file"])
        self.restore({**snapshot, "journal": 0})

    @torch.no_grad()
    def catch_up(self, number: int, start: torch.Tensor, average: torch.Tensor) -> None:
        """See `SparseAdam.catch_up`."""
        self._open()
        if self._stops[-1:] == [number]:
            return
        for records in self._file.blocks():
            rows, state = torch.from_numpy(records["row"].copy()), _state(records)
            self._apply_missed(state, rows, number, start)
            self._write(rows, state, average)
        self._stops.append(number)
        self.steps = number

    @torch.no_grad()
    def averages(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the running averages of rows after `catch_up`.

        Args:
            rows: Numbers of different rows, int64 [n].

        Returns:
            float32 [n, size].
        """
        return self._read(rows, self.weight).average

    def copy_to(self, table: torch.Tensor, chosen: torch.Tensor) -> None:
        """Writes the running averages of rows after `catch_up`, in blocks.

        Args:
            table: float32 [rows, size].
            chosen: Mask of the rows to write, bool [rows].
        """
        for first in range(0, len(table), BLOCK_ROWS):
            rows = first + torch.nonzero(chosen[first : first + BLOCK_ROWS])[:, 0]
            table[rows] = self.averages(rows)

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """See `zoo.recommenders.models.layers.TableRows`."""
        used, places = torch.unique(rows, return_inverse=True)
        with torch.no_grad():
            state = self._read(used, self.weight)
        weight = state.average if self.averaged else state.weight
        if torch.is_grad_enabled() and self.module.training:
            weight.requires_grad_()
            self._used.append((used, weight))
        return functional.embedding(places, weight, sparse=weight.requires_grad)

    def _open(self) -> None:
        if not self._is_open:
            self._file.create()
            self._is_open = True

    def _read(self, rows: torch.Tensor, average: torch.Tensor) -> RowState:
        self._open()
        stored, records = self._file.read(rows.numpy())
        state, new = _state(records), torch.from_numpy(np.flatnonzero(~stored))
        if len(new):
            weight = self.module.initial(rows[new])
            state.weight[new], state.average[new] = weight, weight
            state.first[new], state.second[new], state.last_step[new] = 0, 0, 0
            fresh = RowState(*(getattr(state, name)[new] for name in (*FIELDS, "last_step")))
            for stop in self._stops:
                self._apply_missed(fresh, rows[new], stop, torch.zeros(()))
            for name in (*FIELDS, "last_step"):
                getattr(state, name)[new] = getattr(fresh, name)
        return state

    def _write(self, rows: torch.Tensor, state: RowState, average: torch.Tensor) -> None:
        records = np.empty(len(rows), self._file.dtype)
        records["row"] = rows.numpy()
        for name in (*FIELDS, "last_step"):
            records[name] = getattr(state, name).numpy()
        self._file.write(records)

    def _take_gradient(self) -> torch.Tensor | None:
        used, self._used = self._used, []
        gradients = [(rows, weight.grad) for rows, weight in used if weight.grad is not None]
        parts = [(rows[gradient._indices()[0]], gradient._values()) for rows, gradient in gradients]
        if not parts:
            return None
        rows, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return torch.sparse_coo_tensor(rows[None], values, self.weight.shape, check_invariants=False)


def _state(records: Records) -> RowState:
    """Returns copies of the fields of records."""
    return RowState(*(torch.from_numpy(np.ascontiguousarray(records[name])) for name in (*FIELDS, "last_step")))
