"""Rows of embedding tables that start from pre-trained vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from pipelines.core.console import print_line
from zoo.recommenders.data.columns.vectors import fitted, read_vectors
from zoo.recommenders.data.features import Features
from zoo.recommenders.models.layers import Embeddings, FirstOrder
from zoo.recommenders.training.trainer import Trainer
from zoo.training.runs import is_first

Vectors = Mapping[str, tuple[NDArray[Any], NDArray[Any]]]


def with_vectors(features: Features) -> tuple[Features, Vectors]:
    """Reads the vectors of all columns that name some.

    Args:
        features: Features of a new model.

    Returns:
        The features without the names of the files, and {column: (rows, vectors)}, see `read_vectors`.

    Raises:
        RequestError: A file cannot be used.
    """
    vectors = {}
    for field in features.fields:
        if field.column.table:
            rows, values = vectors[field.name] = read_vectors(field, path := Path(field.column.table))
            kind = field.column.encoding["type"]
            of = field.rows - (0 if kind == "id" else 2)
            if is_first():
                unit = {"hash": "buckets", "id": "rows"}.get(kind, "values")
                width = values.shape[1]
                print_line(f"{field.name}: {len(rows):,} of {of:,} {unit} start from {path.name}, of {width} columns")
    if not vectors:
        return features, {}
    columns = tuple(replace(column, table="") for column in features.schema.columns)
    return Features(replace(features.schema, columns=columns)), vectors


@torch.no_grad()
def fill_vectors(model: nn.Module, vectors: Vectors) -> None:
    """Writes vectors into the tables of a new network, in place. First-order weights stay.

    Args:
        model: Network.
        vectors: {column: (rows, vectors)}; vectors of another width than the tables are fitted to it, see `fitted`.
    """
    for module in model.modules():
        if isinstance(module, Embeddings) and not isinstance(module, FirstOrder):
            for number, field in enumerate(module.fields):
                if field.name in vectors:
                    rows, values = vectors[field.name]
                    module.table(number)[torch.from_numpy(rows)] = torch.from_numpy(fitted(values, module.size))
            module.clear()


def center_priors(trainer: Trainer, vectors: Vectors) -> None:
    """Sets the means of the priors of the rows of vectors to their values, instead of 0.

    Args:
        trainer: Trainer of a network after `fill_vectors`.
        vectors: See `fill_vectors`.
    """
    places = {id(weight): place for place, weight in enumerate(trainer.weights)}
    for module in trainer.model.modules():
        if isinstance(module, Embeddings) and not isinstance(module, FirstOrder):
            place = places[id(module.weight)]
            mean = torch.zeros_like(module.weight)
            for field, start in zip(module.fields, module.starts, strict=True):
                if field.name in vectors:
                    rows = torch.from_numpy(vectors[field.name][0]) + start
                    mean[rows] = module.weight.detach()[rows]
            trainer.start[place] = mean


def digest_of(vectors: Vectors) -> str:
    """Returns the SHA-256 of vectors and their rows.

    Args:
        vectors: {column: (rows, vectors)}.
    """
    digest = hashlib.sha256()
    for name, arrays in sorted(vectors.items()):
        digest.update(name.encode())
        for array in arrays:
            digest.update(array.tobytes())
    return digest.hexdigest()
