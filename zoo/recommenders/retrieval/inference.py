"""Two-tower pipeline: click probabilities of rows, or the best items of users."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import whole_number
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.data.tables import writing
from zoo.recommenders.data.encoding import Field, Rows
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.inference import ROWS_IN_FLIGHT
from zoo.recommenders.log_pipeline import LogPipeline
from zoo.recommenders.ranking.catalogue import Catalogue, FoundItems
from zoo.recommenders.retrieval.index import FaissIndex, ItemIndex


class TwoTowerPipeline(LogPipeline):
    """Scores rows as `LogPipeline` does; with items, finds the best of them for every user."""

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
        """Scores rows; with `items`, writes row, rank, item and score of the best items of every user.

        The score is the cosine of the embeddings in int8. The search is exact without `faiss`; an index of FAISS may
        find fewer items.

        Args:
            inputs: Rows, as in `Features.read`; with `items`, only the columns of users are needed.
            output: File to write.
            on_error: "raise", or "skip" to leave out faulty rows.
            keep: See `ClickPipeline.run`; not with `items`.
            items: Log with the columns of items; an item is identified by its key column.
            top: Number of items per user.
            faiss: Kind of FAISS index, see `FaissIndex`; None: exact search.

        Returns:
            Summary of the run: counts, seconds and throughput.

        Raises:
            RequestError: An option or a row does not fit.
        """
        if items is None:
            if faiss is not None:
                raise RequestError(f"found --faiss {faiss} without a file of items; name it with --items FILE")
            return super().run(inputs, output, on_error, keep=keep)
        if keep:
            raise RequestError("found --keep and --items, expected one of them")
        names, index = self.index(items, faiss)
        return self.find(inputs, output, on_error, names, index, top)

    def find(
        self, inputs: Any, output: str | Path, on_error: str, names: list[str], index: ItemIndex | FaissIndex, top: int
    ) -> dict[str, Any]:
        """Writes row, rank, item and score of the best items of every user.

        Args:
            inputs: Rows with the columns of users.
            output: File to write.
            on_error: "raise", or "skip" to leave out faulty rows.
            names: Names of the items.
            index: Index of the items.
            top: Number of items per user.

        Returns:
            Summary of the run, see `run`.

        Raises:
            RequestError: A row does not fit, or `top` is below 1.
        """
        if top < 1:
            raise RequestError(f"found --top {top}, expected 1 or more")
        errors = ErrorLog()
        top = min(top, len(names))
        columns = {"row": np.int64, "rank": np.int64, "item": str, "score": np.float32}
        count, start, seconds = 0, time.perf_counter(), defaultdict[str, float](float)
        with writing(output, columns) as write, progress("finding items") as advance:
            for rows in self.features.read(
                inputs, on_error=on_error, errors=errors, tower="user", batch_rows=4096, seconds=seconds
            ):
                before = time.perf_counter()
                best, scores = self.best(rows, index, top)
                seconds["model"] += time.perf_counter() - before
                filled = best.ravel() >= 0
                write(
                    {
                        "row": np.repeat(rows.index + self.first_row, top)[filled],
                        "rank": np.tile(np.arange(1, top + 1), len(rows))[filled],
                        "item": [names[place] for place in best.ravel()[filled].tolist()],
                        "score": scores.ravel()[filled],
                    }
                )
                count += len(rows)
                advance(len(rows))
        wall = time.perf_counter() - start
        return {
            "rows": count,
            "items": len(names),
            "skipped": errors.total,
            "seconds": round(wall, 3),
            "rows_per_second": round(count / wall, 1),
            "split_us": {name: round(1e6 * took / count, 3) for name, took in {**seconds, "wall": wall}.items()},
            "engine": self.engine,
            "precision": self.precision,
        }

    def best(
        self, rows: Rows, index: ItemIndex | FaissIndex, top: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Finds the best items of users.

        Args:
            rows: Encoded rows of users.
            index: Index of the items.
            top: Number of items per user.

        Returns:
            See `ItemIndex.top`.
        """
        return index.top(self.vectors(rows, "user"), top)

    @property
    def key(self) -> Field:
        """Category that identifies items."""
        return self.features.key

    def vectors(self, rows: Rows, tower: str) -> NDArray[np.float32]:
        """Computes the embeddings of users or items.

        Args:
            rows: Encoded rows.
            tower: "user" or "item".

        Returns:
            L2-normalized embeddings, float32 [n, tower_size].
        """
        return np.asarray(self.predict(self.encode(rows))[tower])

    def index(self, items: Any, faiss: str | None = None) -> tuple[list[str], ItemIndex | FaissIndex]:
        """Builds the index of the distinct items of a log.

        Args:
            items: Log with the columns of items.
            faiss: Kind of FAISS index; None: exact search.

        Returns:
            Item names in order of their first row, and their index.

        Raises:
            RequestError: The log has no item.
        """
        catalogue = self.catalogue(items)
        joined = self.item_vectors(catalogue)
        return list(catalogue.places), FaissIndex(joined, faiss) if faiss else ItemIndex(joined)

    def retrieve(self, user: Any, catalogue: Catalogue, count: int = 1000, exclude: Iterable[Any] = ()) -> list[Any]:
        """Finds the items nearest to one user, candidates for a ranker.

        The items' embeddings are computed once for a catalogue and searched exactly in int8.

        Args:
            user: {column: value} of the columns that are not the items', or a source of one row.
            catalogue: Items, see `LogPipeline.catalogue`.
            count: Number of items.
            exclude: Ids of items that are left out.

        Returns:
            Ids of the items, the nearest first; those that a next-item model finds in the history are left out.

        Raises:
            RequestError: A column is missing, or `count` is below 1.
        """
        return list(self.retrieved(user, catalogue, count, exclude))

    def retrieved(self, user: Any, catalogue: Catalogue, count: int = 1000, exclude: Iterable[Any] = ()) -> FoundItems:
        """Finds the items nearest to one user, for `ids` of `rank`, which looks them up only in another catalogue.

        Args:
            user: See `retrieve`.
            catalogue: See `retrieve`.
            count: See `retrieve`.
            exclude: See `retrieve`.

        Returns:
            The items, the nearest first.

        Raises:
            RequestError: See `retrieve`.
        """
        rows = self.sides.join(self.sides.read_user(user), catalogue.rows, slice(1))
        return FoundItems(catalogue, self.nearest(rows, catalogue, whole_number("count", count), exclude)[0])

    def nearest(
        self, rows: dict[str, NDArray[Any]], catalogue: Catalogue, count: int, exclude: Iterable[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Finds the items nearest to one user, see `retrieve`.

        Args:
            rows: Inputs of the model, one row with the user.
            catalogue: Items.
            count: Number of items.
            exclude: Ids of items that are left out.

        Returns:
            Positions in the catalogue, int64 [n], and cosines, float32 [n].
        """
        places = [catalogue.places.get(str(name), -1) for name in exclude]
        left_out = np.union1d(np.array(places, np.int64), self.seen(rows, catalogue))
        vector, index = np.asarray(self.predict(rows)["user"]), self.indexed(catalogue)
        best, scores = index.top(vector, min(count + int((left_out >= 0).sum()), len(catalogue)))
        kept = np.flatnonzero(~np.isin(best[0], left_out))[:count]
        return best[0][kept], scores[0][kept]

    def seen(self, rows: dict[str, NDArray[Any]], catalogue: Catalogue) -> NDArray[np.int64]:
        """Returns the positions of items that a user is not shown again; -1 for others.

        Args:
            rows: Inputs of the model, one row with the user.
            catalogue: Items.
        """
        return np.zeros(0, np.int64)

    def indexed(self, catalogue: Catalogue) -> ItemIndex:
        """Returns the index of a catalogue; the index of the last catalogue is cached.

        Args:
            catalogue: Items.
        """
        kept, index = self._indexed
        if kept is not catalogue or index is None:
            index = ItemIndex(self.item_vectors(catalogue))
            self._indexed = catalogue, index
        return index

    _indexed: tuple[Catalogue | None, ItemIndex | None] = (None, None)

    def item_vectors(self, catalogue: Catalogue) -> NDArray[np.float32]:
        """Computes the embeddings of the items of a catalogue.

        Args:
            catalogue: The items.

        Returns:
            L2-normalized embeddings, float32 [items, size].
        """
        user = self.sides.absent_user
        parts = (catalogue.rows[start : start + ROWS_IN_FLIGHT] for start in range(0, len(catalogue), ROWS_IN_FLIGHT))
        return np.concatenate([self.predict(self.sides.join(user, part, slice(None)))["item"] for part in parts])
