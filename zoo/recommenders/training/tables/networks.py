"""New networks with large tables in memory or in files, and the file of weights of a trained one."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipelines.core.errors import RequestError
from pipelines.core.files import replacing
from zoo.recommenders.data.features import Features
from zoo.recommenders.models.checkpoints import Build
from zoo.recommenders.models.layers import Embeddings, deferred_tables
from zoo.recommenders.training.row_store import CategoryCounts
from zoo.recommenders.training.tables.stored_adam import COPIES, beyond_memory
from zoo.recommenders.training.trainer import Trainer


def new_network(build: Build, features: Features, config: Any, processes: int) -> nn.Module:
    """Creates an untrained network.

    Args:
        build: Creates the network from features and settings.
        features: Features of the network.
        config: Its settings.
        processes: Number of processes that train together.

    Returns:
        The network. Large tables beyond `machine.table_memory` are on the device "meta".

    Raises:
        RequestError: Tables that need a file cannot be trained so.
    """
    with deferred_tables():
        model = build(features, config)
    if not beyond_memory(model):
        for module in model.modules():
            if isinstance(module, Embeddings) and module.weight.is_meta:
                module.materialize()
    elif processes > 1:
        require_in_memory(build, features, config, "training in several processes")
    elif hasattr(model, "begin_training") or hasattr(model, "end_training"):
        require_in_memory(build, features, config, f"training of {type(model).__name__}")
    return model


def require_in_memory(build: Build, features: Features, config: Any, action: str) -> None:
    """Checks that the tables of a network fit memory in training.

    Args:
        build: Creates the network from features and settings.
        features: Features of the network.
        config: Its settings.
        action: What needs them in memory, for the message.

    Raises:
        RequestError: They do not.
    """
    with deferred_tables():
        tables = beyond_memory(build(features, config))
    if tables:
        rows, size = sum(len(m.weight) for m in tables), sum(m.weight.numel() * 4 * COPIES for m in tables)
        raise RequestError(
            f"found tables of {rows:,} rows beyond the memory for tables; {action} keeps them in memory with the state "
            f"of their optimizer: set ZOO_TABLE_MEMORY={-(-size // 10**6)}MB where there is as much"
        )


@contextlib.contextmanager
def tables_in_file(trainer: Trainer, categories: CategoryCounts, path: Path) -> Iterator[None]:
    """Context in which the tables of `Trainer.stored` are those of a new file of weights, which is written at its end.

    The file has the format of `zoo.training.runs.save_weights`. Its tables are mapped and written in blocks.

    Args:
        trainer: Trainer with tables in files; without one the context does nothing.
        categories: Rows that are known; others get the weights of the unknown category by `copy_unknown`.
        path: File to write.
    """
    if not trainer.stored:
        yield
        return
    with replacing(path) as temporary:
        tensors = _mapped(temporary, trainer.model)
        for name, module in trainer.model.named_modules():
            if isinstance(module, Embeddings) and module.weight.is_meta:
                weight = tensors[f"{name}.weight"]
                for table in trainer.stored.values():
                    if table.module is module:
                        table.copy_to(weight, categories.known_rows(module))
                module.weight, module.stored = nn.Parameter(weight), None
        yield
        with torch.no_grad():
            for name, tensor in trainer.model.state_dict().items():
                if tensors[name].data_ptr() != tensor.data_ptr():
                    tensors[name].copy_(tensor)


def _mapped(path: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Creates a file with the weights of a model, all zero, and returns them as writable maps of the file."""
    kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    with FakeTensorMode():
        empty = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}
    with path.open("wb") as stream:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save({"state_dict": empty}, stream)
        stream.flush()
        os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)  # a full disk is found now
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        tensors: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)[
            "state_dict"
        ]
    return tensors
