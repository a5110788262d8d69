"""Vectors of the columns of items, which add to those of their ids in training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from zoo.recommenders.data.encoding import Field
from zoo.recommenders.data.features import Features
from zoo.recommenders.models.layers import Embeddings


class ItemColumns(nn.Module):
    """Vector of an item's columns, found by its id: the pooled embeddings of its categories + W numbers.

    The columns are those of the tower "item". Their values come from rows with the item as candidate, so the items of a
    history, which are ids, have them too. They depend on the id alone: at the end of the training the table includes
    their vectors (`SASRec.end_training`), and the exported graph has no such inputs.

    Args:
        features: Encoding of the log.
        key: Category that identifies items.
        size: Size of the vectors.

    Attributes:
        ids: Table rows of the categories of every item, int32 [rows of the key's table, columns].
        scales: Reciprocals of list lengths, float32 [rows, lists].
        numbers: Numbers, float32 [rows, numbers].
        known: 1 for items that were read, float32 [rows, 1]; the vectors of others are 0.
    """

    ids: torch.Tensor
    scales: torch.Tensor
    numbers: torch.Tensor
    known: torch.Tensor

    def __init__(self, features: Features, key: Field, size: int) -> None:
        super().__init__()
        fields = [field for field in features.fields if field.column.tower == "item" and field.table != key.table]
        fields = [field for field in fields if not field.is_sequence]
        own = [index for index, number in enumerate(features.numbers) if number.tower == "item"]
        own += [len(features.numbers) + index for index, which in enumerate(features.indicators) if which in own]
        self.chosen = [column for field in fields for column in range(field.start, field.start + field.width)]
        self.means, self.own, self.key = [field.scale for field in fields if field.scale >= 0], own, key.start
        packed, start = [], 0
        for old in fields:
            packed.append(replace(old, start=start, scale=self.means.index(old.scale) if old.scale >= 0 else -1))
            start += old.width
        self.embeddings = Embeddings(packed, size)
        self.linear = nn.Linear(len(own), size, bias=False) if own else None
        if self.linear is not None:
            nn.init.normal_(self.linear.weight, 0, 0.01)
        self.register_buffer("ids", torch.zeros(key.rows, len(self.chosen), dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(key.rows, len(self.means)))
        self.register_buffer("numbers", torch.zeros(key.rows, len(own)))
        self.register_buffer("known", torch.zeros(key.rows, 1))

    @property
    def is_empty(self) -> bool:
        """Whether items have no columns besides their id."""
        return not self.chosen and not self.own

    def read(self, parts: Iterable[Mapping[str, torch.Tensor]], first: int) -> None:
        """Reads the columns of the items from rows; of several rows of an item the last one counts.

        Args:
            parts: Batches of rows: {"ids", "numbers", "scales"}.
            first: First id of an item.
        """
        arrays = self.ids.numpy(), self.numbers.numpy(), self.scales.numpy(), self.known.numpy()
        for part in parts:
            items = part["ids"][:, self.key].numpy()
            ids, numbers, scales, filled = arrays
            ids[items] = part["ids"][:, self.chosen].numpy()
            numbers[items] = part["numbers"][:, self.own].numpy()
            scales[items] = part["scales"][:, self.means].numpy()
            filled[items] = np.float32(1)
        self.known[:first] = 0

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """Computes the vectors.

        Args:
            items: Ids of items, int [n].

        Returns:
            float32 [n, size].
        """
        total = torch.zeros(len(items), self.embeddings.size)
        if self.chosen:
            vectors = self.embeddings(self.ids[items], self.scales[items])
            total = total + vectors.view(len(items), -1, self.embeddings.size).sum(1)
        if self.linear is not None:
            total = total + self.linear(self.numbers[items])
        return total * self.known[items]
