"""Catalogue: the items of a model, read and encoded once, and found by their ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.ranking.sides import Sides


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Encoded items.

    Attributes:
        rows: The items' side of the model's inputs, n rows.
        names: Ids of the items, text [n]; None if the model has no column that names them.
        places: Position of every id.
    """

    rows: Rows
    names: pa.Array | None
    places: dict[str, int]

    @classmethod
    def read(cls, sides: Sides, items: Any, distinct: bool = True) -> Catalogue:
        """Reads items.

        Args:
            sides: Columns of the model.
            items: Source with the items' columns.
            distinct: Keep the first row of every id, and no row without an id; False keeps all rows.

        Returns:
            The catalogue.

        Raises:
            RequestError: There is no item, a column is missing, or `distinct` needs ids that the model has none of.
        """
        key = sides.features.key.name if distinct else sides.key  # an error where there is none
        parts: list[Rows] = []
        names: list[pa.Array] = []
        places: dict[str, int] = {}
        count = 0
        for rows, texts in sides.item.read(items, key):
            if texts is not None:
                kept: list[int] = []
                for at, text in enumerate(texts.to_pylist()):
                    if text is not None and text not in places:
                        places[text] = count + (len(kept) if distinct else at)
                        kept.append(at)
                if distinct and len(kept) < len(rows):
                    rows, texts = rows[np.array(kept, np.int64)], texts.take(pa.array(kept, pa.int64()))
                names.append(texts)
            parts.append(rows)
            count += len(rows)
        if not count:
            where = items if isinstance(items, str | Path) else "the rows given"
            named = f", named by {key}" if key else ""
            raise RequestError(f"{where} holds no item; expected one a row{named}")
        joined = pa.concat_arrays([each.cast(pa.large_string()) for each in names]) if names else None
        return cls(Rows.concatenate(parts), joined, places)

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, ids: Iterable[Any]) -> NDArray[np.int64]:
        """Finds items.

        Args:
            ids: Their ids, texts or whole numbers.

        Returns:
            Positions, int64 [n].

        Raises:
            RequestError: An id is not in the catalogue.
        """
        texts = [str(each) for each in ids]
        places = [self.places.get(text, -1) for text in texts]
        if unknown := [text for text, place in zip(texts, places, strict=True) if place < 0]:
            raise RequestError(
                f"found no item {', '.join(unknown[:3])}{f' and {len(unknown) - 3} more' * (len(unknown) > 3)} in the "
                f"catalogue of {len(self):,} items"
            )
        return np.array(places, np.int64)

    def without(self, ids: Iterable[Any], positions: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Leaves items out.

        Args:
            ids: Ids of the items to leave out; those that are not in the catalogue are ignored.
            positions: Positions to choose from, int64 [n]; None for all items.

        Returns:
            The positions that are left; None for all items.
        """
        left_out = [place for each in ids if (place := self.places.get(str(each))) is not None]
        if not left_out:
            return positions
        chosen = np.arange(len(self)) if positions is None else positions
        assert self.names is not None  # there are places
        if len(self.places) == len(self):
            return np.asarray(chosen[~np.isin(chosen, left_out)])
        names = {str(each) for each in ids}  # rows of an id repeat
        texts = self.names.take(pa.array(chosen)).to_pylist()
        return np.asarray(chosen[np.array([text not in names for text in texts], bool)])

    def ids(self, positions: NDArray[np.int64]) -> list[str | None] | None:
        """Ids of items.

        Args:
            positions: Positions, int64 [n].

        Returns:
            Their ids; None if the model has no column that names items.
        """
        return None if self.names is None else self.names.take(pa.array(positions)).to_pylist()


def best(scores: NDArray[np.float32], top: int | None) -> NDArray[np.int64]:
    """Orders scores.

    Args:
        scores: float32 [n].
        top: Number of scores to return; None for all.

    Returns:
        Positions of the largest scores in descending order, equal scores by position; int64 [top].
    """
    if top is None or top >= len(scores):
        return np.argsort(-scores, kind="stable")
    least = np.partition(scores, len(scores) - top)[len(scores) - top]
    candidates = np.flatnonzero(scores >= least)
    return candidates[np.argsort(-scores[candidates], kind="stable")][:top]
