"""Pipeline of next-item recommenders: the best items for histories, without those of the history."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.core.batches import whole_number
from pipelines.core.errors import RequestError
from zoo.recommenders import metrics
from zoo.recommenders.data.encoding import Field, Rows
from zoo.recommenders.ranking.catalogue import Catalogue, best
from zoo.recommenders.retrieval.index import FaissIndex, ItemIndex, quantized
from zoo.recommenders.retrieval.inference import TwoTowerPipeline

BLOCK = 4096  # rows whose items are ranked together


class NextItemPipeline(TwoTowerPipeline):
    """Finds the next items of histories; see `zoo.pipeline`."""

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "raise",
        *,
        keep: str | Sequence[str] | None = None,
        items: str | None = None,
        top: int = 10,
        faiss: str | None = None,
    ) -> dict[str, Any]:
        """Writes row, rank, item and score of the best next items of every history; see `TwoTowerPipeline.run`.

        Args:
            inputs: Rows with the history.
            output: File to write.
            on_error: "raise", or "skip" to leave out faulty rows.
            keep: Not supported.
            items: Log with the items to find; None for all items that the model knows.
            top: Number of items per row.
            faiss: Kind of FAISS index, see `FaissIndex`; None: exact search.

        Returns:
            Summary of the run.

        Raises:
            RequestError: An option or a row does not fit.
        """
        if keep:
            raise RequestError("found --keep, which a run that lists next items does not support; leave it out")
        catalogue = self.known_items if items is None else self.catalogue(items)
        vectors = self.item_vectors(catalogue)
        index = FaissIndex(vectors, faiss) if faiss else ItemIndex(vectors)
        self._places = self._places_of(catalogue)
        return self.find(inputs, output, on_error, list(catalogue.places), index, top)

    @cached_property
    def sequence(self) -> Field:
        """The history: the first sequence of the schema."""
        return next(field for field in self.features.fields if field.is_sequence and not field.is_gaps)

    @property
    def key(self) -> Field:
        """Category that identifies items: that of the history's table."""
        return next(field for field in self.features.fields if field.name == self.sequence.column.shares)

    @cached_property
    def known_items(self) -> Catalogue:
        """All items of the model. Raises RequestError where their ids are hashed."""
        key = self.key
        if key.column.encoding["type"] != "vocabulary":
            raise RequestError(
                f"the ids of {key.name} are not listed in the model ({key.column.encoding['type']}); name the items "
                "with --items"
            )
        values = key.values.cast(pa.large_string())
        side = self.sides.item.features
        rows = side.encode_columns({key.name: values}, np.arange(len(values)), labelled=False)
        return Catalogue(rows, values)

    def _places_of(self, catalogue: Catalogue) -> NDArray[np.int64]:
        """Position in a catalogue of every id of the table, int64 [rows]; -1 for others."""
        side = self.sides.item.features
        column = next(field.start for field in side.fields if field.name == self.key.name)
        places = np.full(self.key.rows, -1, np.int64)
        places[catalogue.rows.ids[:, column]] = np.arange(len(catalogue))
        places[[0, self.sequence.last]] = -1
        return places

    def history_places(self, ids: NDArray[np.int32], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Finds the items of histories in a catalogue.

        Args:
            ids: Ids of encoded rows, int32 [n, columns].
            places: Position of every id, int64 [rows of the table].

        Returns:
            Positions, -1 for ids that are not in the catalogue, int64 [n, places of a sequence].
        """
        start = self.sequence.start
        return np.asarray(places[ids[:, start : start + self.sequence.width]])

    def best(
        self, rows: Rows, index: ItemIndex | FaissIndex, top: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See `TwoTowerPipeline.best`; items of the history are left out."""
        seen = self.history_places(rows.ids, self._places)
        size = len(np.unique(self._places[self._places >= 0]))
        best, scores = index.top(self.vectors(rows, "user"), min(top + seen.shape[1], size))
        old = (best[:, :, None] == seen[:, None]).any(2)
        order = np.argsort(old, axis=1, kind="stable")[:, :top]
        left = np.take_along_axis(old, order, 1)
        best = np.where(left, -1, np.take_along_axis(best, order, 1))
        return best, np.where(left, np.float32(-np.inf), np.take_along_axis(scores, order, 1))

    def ranks(self, data: Any, on_error: str = "raise") -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
        """Ranks the item of every clicked row among all known items outside its history.

        Args:
            data: Labelled rows.
            on_error: "raise", or "skip" to leave out faulty rows.

        Returns:
            Ranks from 1 on, int64 [n], rows with an unknown item left out, equal scores ranked before; and the rows'
            weights.

        Raises:
            RequestError: No clicked row has a known item.
        """
        catalogue = self.known_items
        places, items = self._places_of(catalogue), self.item_vectors(catalogue)
        items = quantized(items).astype(np.float32) if self.precision == "int8" else items
        ranks: list[NDArray[np.int64]] = []
        weights: list[NDArray[np.float32]] = []
        for batch in self.rows(data, on_error, labelled=True, batch_rows=BLOCK):
            own = places[batch.ids[:, self.key.start]]
            chosen = np.flatnonzero((batch.labels == 1) & (own >= 0))
            if not len(chosen):
                continue
            rows, own = batch[chosen], own[chosen, None]
            users = self.vectors(rows, "user")
            users = quantized(users).astype(np.float32) if self.precision == "int8" else users
            scores = users @ items.T
            mine = np.take_along_axis(scores, own, 1)
            seen = self.history_places(rows.ids, places)
            np.put_along_axis(scores, np.where(seen < 0, own, seen), -np.inf, 1)
            np.put_along_axis(scores, own, -np.inf, 1)
            ranks.append(1 + (scores >= mine).sum(1))
            weights.append(rows.weights)
        if not ranks:
            raise RequestError("found no clicked row with an item that the model knows, expected some to rank")
        return np.concatenate(ranks), metrics.unless_ones(np.concatenate(weights))

    def precomputed(self, items: Rows, precompute: bool | None = None) -> None:
        """See `LogPipeline.precomputed`: the items' embeddings are those of their index.

        Args:
            items: Not used.
            precompute: Not used.
        """

    def rank_columns(
        self,
        user: Any,
        items: Any,
        top: int | None = None,
        *,
        ids: Iterable[Any] | None = None,
        exclude: Any = (),
        by: str | None = None,
    ) -> dict[str, Any]:
        """Ranks items by their cosine with the history, which is encoded once; see `LogPipeline.rank_columns`.

        Items of the history are left out of a catalogue.

        Args:
            user: {column: value} with the history.
            items: Source with the items' columns, or a catalogue.
            top: Number of items to return; None for all.
            ids: Ids of the items of a catalogue to rank; None for all of them.
            exclude: Ids of items that are not returned.
            by: Not supported: there is one score.

        Returns:
            {"row", "item", "probability": logistic function of the cosine, float32 [n]}.

        Raises:
            RequestError: See `LogPipeline.rank_columns`.
        """
        if by is not None:
            raise RequestError(f"found by={by!r}, but next items have one score; leave by out")
        top = None if top is None else whole_number("top", top)
        catalogue = self.candidates(items, ids)
        rows = self.sides.join(self.sides.read_user(user), catalogue.rows, slice(1))
        slope, bias = self._line(catalogue)
        if catalogue is items and ids is None and top is not None:
            chosen, scores = self.nearest(rows, catalogue, top, exclude)
        else:
            positions = np.arange(len(catalogue)) if ids is None else catalogue.find(ids)
            left = catalogue.without(exclude, positions)
            positions = positions if left is None else left
            if catalogue is items:
                positions = positions[~np.isin(positions, self.seen(rows, catalogue))]
            vector, codes = np.asarray(self.predict(rows)["user"]), self.indexed(catalogue).codes[positions]
            scores = (codes.astype(np.float32) @ quantized(vector)[0].astype(np.float32)) / np.float32(127 * 127)
            first = best(scores, top)
            chosen, scores = positions[first], scores[first]
        names = catalogue.ids(chosen)
        probability = (1 / (1 + np.exp(-(slope * scores + bias)))).astype(np.float32)
        return {"row": chosen, **({} if names is None else {"item": names}), "probability": probability}

    def seen(self, rows: dict[str, NDArray[Any]], catalogue: Catalogue) -> NDArray[np.int64]:
        """See `TwoTowerPipeline.seen`: the items of the history."""
        if self._placed[0] is not catalogue:
            self._placed = catalogue, self._places_of(catalogue)
        return np.asarray(self.history_places(rows["ids"], self._placed[1])[0])

    def _line(self, catalogue: Catalogue) -> tuple[float, float]:
        """(slope, bias) of the logit by the cosine, kept for the last catalogue."""
        if self._lined[0] is not catalogue:
            items = self.known_items if self.key.column.encoding["type"] == "vocabulary" else catalogue
            out = self.predict(self.sides.join(self.sides.absent_user, items.rows, slice(BLOCK)))
            cosine = (out["user"] * out["item"]).sum(1, dtype=np.float64)
            p = out["probability"].ravel().astype(np.float64)
            alike = len(p) < 2 or np.ptp(cosine) < 1e-6
            line = (1.0, 0.0) if alike else np.polyfit(cosine, np.log(p / (1 - p)), 1)
            self._lined = catalogue, (float(line[0]), float(line[1]))
        return self._lined[1]

    _lined: tuple[Catalogue | None, tuple[float, float]] = (None, (1.0, 0.0))
    _placed: tuple[Catalogue | None, NDArray[np.int64]] = (None, np.zeros(0, np.int64))
    _places: NDArray[np.int64] = np.zeros(0, np.int64)
