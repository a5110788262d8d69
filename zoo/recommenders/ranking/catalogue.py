"""Catalogue: the items of a model, read and encoded once, and found by their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.ranking.precomputed import Precomputed
from zoo.recommenders.ranking.sides import Sides


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Encoded items.

    Attributes:
        rows: The items' side of the model's inputs, n rows.
        names: Ids of the items, text [n]; None if the model has no column that names them.
        precomputed: What a model has computed of them, if that makes its rankings quicker.
    """

    rows: Rows
    names: pa.Array | None
    precomputed: Precomputed | None = None

    @classmethod
    def read(
        cls,
        sides: Sides,
        items: Any,
        distinct: bool = True,
        named: bool = True,
        precompute: Callable[[Rows], Precomputed | None] = lambda _: None,
    ) -> Catalogue:
        """Reads items.

        Args:
            sides: Columns of the model.
            items: Source with the items' columns.
            distinct: Keep the first row of every id, and no row without an id; False keeps all rows.
            named: Whether the ids of all rows are read.
            precompute: Called with the items' rows.

        Returns:
            The catalogue.

        Raises:
            RequestError: There is no item, a column is missing, or `distinct` needs ids that the model has none of.
        """
        key = sides.features.key.name if distinct else sides.key * named  # an error where there is none
        parts: list[Rows] = []
        names: list[pa.Array] = []
        seen: set[str] = set()
        for rows, texts in sides.item.read(items, key):
            if distinct and texts is not None:
                kept = [index for index, text in enumerate(texts.to_pylist()) if _is_new(text, seen)]
                if len(kept) < len(rows):
                    rows, texts = rows[np.array(kept, np.int64)], texts.take(pa.array(kept, pa.int64()))
            if texts is not None:
                names.append(texts.cast(pa.large_string()))
            parts.append(rows)
        if not sum(map(len, parts)):
            where = items if isinstance(items, str | Path) else "the input"
            by = f", named by {key}" if key else ""
            raise RequestError(f"{where} holds no item; expected one a row{by}")
        all_rows = Rows.concatenate(parts)
        catalogue = cls(all_rows, pa.concat_arrays(names) if names else None, precompute(all_rows))
        if distinct:
            catalogue.find(())  # tabulates the ids now, not in the first request
        return catalogue

    @cached_property
    def places(self) -> dict[str, int]:
        """The first position of every id, in the order of the items."""
        places: dict[str, int] = {}
        for position, text in enumerate(() if self.names is None else self.names.to_pylist()):
            if text is not None:
                places.setdefault(text, position)
        return places

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, ids: Iterable[Any]) -> NDArray[np.int64]:
        """Finds items.

        Args:
            ids: Their ids, texts or whole numbers; or items of a catalogue, which are not looked up by their ids if
                both catalogues have the same ones.

        Returns:
            Positions, int64 [n].

        Raises:
            RequestError: An id is not in the catalogue.
        """
        if isinstance(ids, FoundItems) and self._has_ids_of(ids.catalogue):
            return ids.positions
        texts, places = list(ids), self.places
        try:
            return np.fromiter(map(places.__getitem__, texts), np.int64, len(texts))
        except (KeyError, TypeError):  # an id is not there, or is no text
            texts = [*map(str, texts)]
        if unknown := [text for text in texts if text not in places]:
            raise RequestError(
                f"found no item {', '.join(unknown[:3])}{f' and {len(unknown) - 3} more' * (len(unknown) > 3)} in the "
                f"catalogue of {len(self):,} items"
            )
        return np.array([places[text] for text in texts], np.int64)

    def find_texts(self, ids: Any) -> FoundItems | None:
        """Finds items by different ids, given as texts.

        Args:
            ids: Their ids.

        Returns:
            The items; None for other values than a list of such ids of the catalogue, and without native kernels.
        """
        native = extension.native()
        if native is None or type(ids) is not list:
            return None
        positions = native.distinct_positions(self.places, ids, len(self))
        return None if positions is None else FoundItems(self, positions)

    def _has_ids_of(self, other: Catalogue) -> bool:
        """Whether the items of both catalogues have the same ids in the same order; kept for the last catalogue."""
        if self is other:
            return True
        if not self._compared or self._compared[0][0] is not other:
            names = self.names
            self._compared[:] = [(other, names is not None and other.names is not None and names.equals(other.names))]
        return self._compared[0][1]

    @cached_property
    def _texts(self) -> list[str | None]:
        """The ids of all items; texts of `places` where all differ."""
        assert self.names is not None
        return [*self.places] if len(self.places) == len(self) else self.names.to_pylist()

    @cached_property
    def _compared(self) -> list[tuple[Catalogue, bool]]:
        return []

    def without(self, ids: Iterable[Any], positions: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Leaves items out.

        Args:
            ids: Ids of the items to leave out; those that are not in the catalogue are ignored.
            positions: Positions to choose from, int64 [n]; None for all items.

        Returns:
            The positions that are left; None for all items.
        """
        names = {str(name) for name in ids}
        left_out = [place for name in names if (place := self.places.get(name)) is not None] if names else []
        if not left_out:
            return positions
        chosen = np.arange(len(self)) if positions is None else positions
        assert self.names is not None  # there are places
        if len(self.places) == len(self):
            return np.asarray(chosen[~np.isin(chosen, left_out)])
        texts = self.names.take(pa.array(chosen)).to_pylist()
        return np.asarray(chosen[np.array([text not in names for text in texts], bool)])  # rows of an id repeat

    def ids(self, positions: NDArray[np.int64]) -> list[str | None] | None:
        """Ids of items.

        Args:
            positions: Positions, int64 [n].

        Returns:
            Their ids; None if the model has no column that names items.
        """
        if self.names is None:
            return None
        texts = self._texts
        return [texts[position] for position in positions.tolist()]


@dataclass(frozen=True, eq=False)
class FoundItems:
    """Items of a catalogue that were retrieved; iterating gives their ids.

    Attributes:
        catalogue: The catalogue.
        positions: Their positions, int64 [n].
    """

    catalogue: Catalogue
    positions: NDArray[np.int64]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.catalogue.ids(self.positions) or self.positions.tolist())


def _is_new(text: str | None, seen: set[str]) -> bool:
    """Whether an id was not there before, and is now among those seen."""
    if text is None or text in seen:
        return False
    seen.add(text)
    return True


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
    if (native := extension.native()) is not None:
        return native.largest(np.ascontiguousarray(scores), top)  # type: ignore[no-any-return]
    least = np.partition(scores, -top)[-top]
    candidates = np.flatnonzero(scores >= least)
    return candidates[np.argsort(-scores[candidates], kind="stable")][:top]
