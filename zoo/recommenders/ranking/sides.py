"""The two sides of a ranking: columns of the user, with the context, and columns of the items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels.recommenders.native import SharedInputs
from zoo.recommenders.data.cell_values import LIST, as_texts
from zoo.recommenders.data.csv_reader import RowReader
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_logs
from zoo.recommenders.data.schema import FEATURES


@dataclass(frozen=True, eq=False)
class Side:
    """Columns of one side.

    Attributes:
        features: Encoding of these columns alone.
        ids: Their columns among the ids of the model, int64 [columns].
        numbers: Their columns among its numbers, int64 [numbers].
        scales: Their columns among its scales, int64 [lists].
    """

    features: Features
    ids: NDArray[np.int64]
    numbers: NDArray[np.int64]
    scales: NDArray[np.int64]

    @classmethod
    def of(cls, features: Features, item: bool) -> Side:
        """Selects the columns of the items, or all others: those of the user and of the context.

        Args:
            features: Encoding of all columns.
            item: Whether the items' columns are selected.
        """
        columns = tuple(each for each in features.schema.of(*FEATURES) if (each.tower == "item") == item)
        names = {column.name for column in columns}
        fields = [field for field in features.fields if field.name in names]
        numbers = [at for at, number in enumerate(features.numbers) if number.name in names]
        indicators = [
            len(features.numbers) + at for at, number in enumerate(features.indicators) if number in set(numbers)
        ]
        return cls(
            Features(replace(features.schema, columns=columns)),
            np.array([at for field in fields for at in range(field.start, field.start + field.width)], np.int64),
            np.array(numbers + indicators, np.int64),
            np.array([field.scale for field in fields if field.scale >= 0], np.int64),
        )

    @cached_property
    def shared(self) -> SharedInputs:
        """The inputs of this side."""
        return SharedInputs(tuple(self.ids.tolist()), tuple(self.numbers.tolist()), tuple(self.scales.tolist()))

    def read(self, source: Any, key: str = "") -> Iterator[tuple[Rows, pa.Array | None]]:
        """Reads and encodes rows of this side.

        Args:
            source: Source of the rows, see `Features.read`.
            key: Column of names, if they are wanted.

        Returns:
            Batches of encoded rows, and the texts of the key, null where missing; None without a key.

        Raises:
            RequestError: A column is missing.
        """
        schema, index = self.features.schema, 0
        names = schema.feature_names
        if (reader := RowReader.of(self.features, source)) is not None:
            texts = as_texts((row.get(key) for row in source), key, LIST) if key else None
            rows = Rows.concatenate(list(self.features.of_rows(reader)))
            yield rows, None if texts is None else schema.forms[key].apply(texts)
            return
        for log in open_logs(source):
            self.features.require(log)
            for batch in log.batches(names, forms=schema.forms):
                columns = dict(zip(names, batch.columns, strict=True))
                positions = np.arange(index, index + batch.num_rows)
                index += batch.num_rows
                yield self.features.encode_columns(columns, positions, labelled=False), columns.get(key)


class Sides:
    """The user's and the items' columns of a model.

    Args:
        features: Encoding of all columns.

    Raises:
        RequestError: The schema has no column of items.
    """

    def __init__(self, features: Features) -> None:
        self.features = features
        self.user, self.item = Side.of(features, item=False), Side.of(features, item=True)
        if not self.item.features.schema.columns or not features.schema.header:
            raise RequestError(
                'the schema has no column of items; give them "tower": "item" in the schema (zoo schema LOG -o '
                "schema.json, then zoo train --schema schema.json)"
            )

    @cached_property
    def key(self) -> str:
        """Column that names the items; "" if they have numbers alone."""
        try:
            return self.features.key.name
        except RequestError:
            return ""

    def ids(self, items: Sequence[Any]) -> list[str | None] | None:
        """Ids of rows of items.

        Args:
            items: {column: value} each.

        Returns:
            Their ids; None if the model has no column that names items.
        """
        if not self.key:
            return None
        key, forms = self.key, self.features.schema.forms
        if all(key in row for row in items):
            return [forms[key].text(row[key]) for row in items]
        (log,) = open_logs(list(items))
        return [text for batch in log.batches([key], forms=forms) for text in batch[0].to_pylist()]

    @cached_property
    def absent_user(self) -> Rows:
        """The user's side with missing values, one row."""
        return self.user.features.encode_columns({}, np.zeros(1, np.int64), labelled=False)

    def read_user(self, user: Any) -> Rows:
        """Encodes the user's side of a request.

        Args:
            user: {column: value}, or a source of one row; columns that the model does not have are ignored.

        Returns:
            One row.

        Raises:
            RequestError: A column is missing, or there is another number of rows.
        """
        names = [column.name for column in self.user.features.schema.columns]
        if not names:
            user = [{"": ""}]
        parts = [rows for rows, _ in self.user.read([user] if isinstance(user, dict) else user)]
        count = sum(map(len, parts))
        if count != 1:
            raise RequestError(f"found {count} users, expected one")
        return Rows.concatenate(parts)

    def join(self, user: Rows, items: Rows, chosen: slice | NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Inputs of the model for one user and n items.

        Args:
            user: The user's side, one row.
            items: The items' side.
            chosen: The rows of the items.

        Returns:
            {"ids", "numbers", "scales"}: C-contiguous arrays [n, columns]; inputs without columns are omitted.
        """
        batch = {}
        for name, (dtype, (_, width)) in self.features.inputs.items():
            columns = getattr(items, name)[chosen]
            array = batch[name] = np.empty((len(columns), int(width or 0)), dtype)
            array[:, getattr(self.item, name)] = columns
            array[:, getattr(self.user, name)] = getattr(user, name)
        return batch
