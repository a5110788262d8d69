"""Pipeline of models with a schema: rows of any click log to click probabilities."""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import whole_number
from pipelines.core.errors import RequestError
from pipelines.data.text import TextForm
from pipelines.models.folder import ModelFolder
from zoo.recommenders.data import sources
from zoo.recommenders.data.cell_values import CellForm
from zoo.recommenders.data.columns import nested
from zoo.recommenders.data.csv_reader import RowReader
from zoo.recommenders.data.encoding import Floats, Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import HEAD, Log, open_log, open_logs
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.inference import PROBABILITY, ROWS_IN_FLIGHT, ClickPipeline
from zoo.recommenders.ranking.catalogue import Catalogue, best
from zoo.recommenders.ranking.order import SCORE, Order
from zoo.recommenders.ranking.precomputed import Precomputed, is_quicker, limit
from zoo.recommenders.ranking.sides import Sides

SAMPLES = ("sample.csv.gz", "sample.tsv.gz")  # rows that ship with a model; those without a header in the second


class LogPipeline(ClickPipeline):
    """Scores rows of a log; see `zoo.pipeline`.

    Rows are sources of `zoo.recommenders.data.logs.open_log`, or a list of them. With a schema without a header they
    are sources of `zoo.recommenders.data.line_reader.read_lines`.
    """

    def __init__(self, folder: ModelFolder, *arguments: Any, **options: Any) -> None:
        super().__init__(folder, *arguments, **options)
        self.features = Features.from_json(folder.preprocessing)
        if len(labels := self.features.schema.labels) > 1:
            self.outputs = {f"{PROBABILITY}_{label}": label for label in labels}

    @property
    def headerless(self) -> bool:
        """Whether text is rows alone, so that several texts are one."""
        return not self.features.schema.header

    @property
    def separators(self) -> dict[str, str]:
        """See `ClickPipeline.separators`."""
        return {name: form.separator for name, form in self.features.schema.forms.items()}

    @property
    def parsed_columns(self) -> Sequence[str]:
        """See `ClickPipeline.parsed_columns`."""
        names = () if self.headerless else self.features.schema.feature_names
        return names if RowReader.of(self.features, [dict.fromkeys(names)]) is not None else ()

    def typical_row(self) -> dict[str, str] | bytes:
        """A row of the commonest values, see `Schema.typical_row`; a line of zeros where there is no header."""
        return _zeros(self.features) if self.headerless else self.features.schema.typical_row()

    def rows(
        self,
        inputs: Any,
        on_error: str = "raise",
        errors: ErrorLog | None = None,
        batch_rows: int = 65536,
        seconds: defaultdict[str, float] | None = None,
        labelled: bool = False,
        keep: Sequence[str] = (),
    ) -> Iterator[Rows]:
        """See `ClickPipeline.rows` and `Features.read`."""
        options: dict[str, Any] = {"on_error": on_error, "errors": errors, "batch_rows": batch_rows, "seconds": seconds}
        options |= {"labelled": labelled, "weighted": labelled and bool(self.weighted(inputs))}
        return self.features.read(inputs, with_label=self.with_label, keep=keep, **options)

    def weighted(self, data: Any) -> bool | None:
        """See `ClickPipeline.weighted` and `Features.weighted`."""
        return self.features.weighted(data)

    def encode(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """Encodes rows as the graph's inputs.

        Args:
            rows: Encoded rows.

        Returns:
            {"ids": int32 [n, columns], "numbers": float32 [n, numbers], "scales": float32 [n, lists]}; inputs without
            columns are omitted.
        """
        return self.features.encode(rows)

    def text_form(self, stream: Any) -> TextForm:
        """Returns how a text holds rows: CSV by its header, JSON objects and rows without a header by lines.

        Args:
            stream: Bytes of the text, read from their start.

        Returns:
            Form of the text.

        Raises:
            RequestError: The text has no row.
        """
        if self.headerless:
            if not stream.read(1):
                raise RequestError("found no row, expected at least one")
            return TextForm()
        log = open_log(io.BytesIO(stream.readline()))
        return (
            TextForm(header=log.header, delimiter=log.delimiter, blank=False)
            if log.header and log.kind == "csv"
            else TextForm(blank=False)
        )

    def log_of_first_row(self, stream: Any) -> Log | None:
        """Returns the log of a text whose first rows alone have the columns: JSON lines, or the Criteo format.

        Args:
            stream: Bytes of the text, read from their start.

        Returns:
            The log with its columns; None for CSV with a header, and for schemas without a header.
        """
        if self.headerless:
            return None
        first = stream.readline()
        log = open_log(io.BytesIO(first))
        if log.kind == "jsonl":  # its columns are the keys of its first lines, and of others until none is missing
            log = open_log(io.BytesIO(first + b"".join(itertools.islice(stream, HEAD - 1))))
            names = dict.fromkeys(log.columns)
            for number, line in enumerate(stream, HEAD + 1):
                if names.keys() >= set(self.features.schema.feature_names):
                    break
                names |= dict.fromkeys(nested.json_object(log.path, number, line) if line.strip() else ())
            return replace(log, columns=tuple(names))
        return None if log.header else log

    def label_in(self, lines: Iterable[bytes] = (), columns: Sequence[str] = ()) -> bool | None:
        """Tells whether rows without a header begin with a label; None for logs with a header.

        Args:
            lines: Lines of a text file; the first line with a possible number of columns decides.
            columns: Column names of a table.

        Returns:
            Whether there is a label, or None.
        """
        if not self.headerless:
            return None
        kinds = [(column.kind, column.name) for column in self.features.raw.schema.columns if column.kind != "label"]
        if columns:
            return sources.choose_columns("the table", list(columns), kinds)[1]
        widths = (line.count(b"\t") + 1 for line in lines)
        return next((width > len(kinds) for width in widths if width in (len(kinds), len(kinds) + 1)), None)

    def columns_of(self, names: Sequence[str]) -> list[str]:
        """See `ClickPipeline.columns_of`."""
        if self.headerless:
            kinds = [
                (column.kind, column.name) for column in self.features.raw.schema.columns if column.kind != "label"
            ]
            return [name for name in sources.choose_columns("the table", list(names), kinds)[0] if name]
        self.features.require(Log("the input", "rows", "", tuple(names)))
        columns = {column.name for column in self.features.schema.columns}
        return [name for name in names if name in columns]

    # --- ranking

    @cached_property
    def sides(self) -> Sides:
        """The columns of users and of items. Raises RequestError for a model without columns of items."""
        return Sides(self.features)

    def catalogue(self, items: Any, distinct: bool = True, precompute: bool | None = None) -> Catalogue:
        """Reads and encodes items once, for `rank`, and precomputes the part of the model that depends on them alone.

        Args:
            items: Source with the items' columns, one row an item, see `Features.read`.
            distinct: Keep the first row of every id alone; False keeps all rows, also those without an id.
            precompute: Whether the native engine precomputes the part of the model that depends on items alone; None:
                if a timed ranking gets faster. An item takes hundreds of bytes to kilobytes, a catalogue at most an
                eighth of the machine's memory; larger catalogues are not precomputed.

        Returns:
            The catalogue.

        Raises:
            RequestError: There is no item, or the model has no columns of items.
        """
        return Catalogue.read(self.sides, items, distinct, precompute=lambda rows: self.precomputed(rows, precompute))

    def precomputed(self, items: Rows, precompute: bool | None = None) -> Precomputed | None:
        """Precomputes the part of the model that depends on items alone, see `catalogue`.

        Args:
            items: The items' side.
            precompute: See `catalogue`.

        Returns:
            What is computed; None where the rows are used.
        """
        if precompute is False:
            return None
        session, user = self.session, self.sides.absent_user
        computed = session.precompute(len(items), self._joined(user, items, None), self.sides.user.shared, limit())
        if computed is None:
            return None
        if precompute or is_quicker(
            computed,
            len(items),
            self.sides.user_row(user),
            lambda positions: self._probabilities(self._joined(user, items, positions)),
        ):
            return Precomputed(session, computed)
        return None

    def rank(
        self,
        user: Any,
        items: Any,
        top: int | None = None,
        *,
        ids: Iterable[Any] | None = None,
        exclude: Any = (),
        by: str | None = None,
    ) -> list[dict[str, Any]]:
        """Ranks items for one user by the probability of a click, or of other labels.

        The user's columns, and those of the context, are read, looked up and computed once. The probabilities have the
        same bits as those of full rows.

        Args:
            user: {column: value} of the columns that are not the items', or a source of one row.
            items: Source with the items' columns, or a catalogue.
            top: Number of items to return; None for all.
            ids: Ids of the items of a catalogue to rank; None for all of them.
            exclude: Ids of items that are not returned, as those that the user has seen.
            by: Of several labels, the one that orders the items, or a weighted sum, see `ranking.order.Order`; None
                for the first label.

        Returns:
            [{"row": position of the item in the source, or in the catalogue, "item": its id, if the model has a column
            of ids, "probability": float}, ...], the most probable first, equal ones in the order of the items. Of
            several labels there is "probability_LABEL" of each and, for a weighted sum, "score".

        Raises:
            RequestError: A column or an id is missing, or there is no item to rank.
        """
        columns = self.rank_columns(user, items, top, ids=ids, exclude=exclude, by=by)
        plain = [values if isinstance(values, list) else values.tolist() for values in columns.values()]
        names = list(columns)
        return [dict(zip(names, values)) for values in zip(*plain, strict=True)]  # noqa: B905 (checked by the other zip)

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
        """Ranks items, see `rank`, and returns columns.

        Args:
            user: See `rank`.
            items: See `rank`.
            top: See `rank`.
            ids: See `rank`.
            exclude: See `rank`.
            by: See `rank`.

        Returns:
            {"row": int64 [n], "item": list of n texts, if there are ids, "probability": float32 [n]}; probabilities of
            several labels as in `rank`.

        Raises:
            RequestError: See `rank`.
        """
        if top is not None:
            top = whole_number("top", top)
        exclude = list(exclude)
        order = Order.of(by, self.features.schema.labels or tuple(self.outputs.values()))
        at_last = not exclude and isinstance(items, list) and bool(items) and isinstance(items[0], dict)  # ids are read
        catalogue, positions, batch = None, None, self.sides.inputs(user, items) if at_last and ids is None else None
        if batch is not None:
            shares = self._probabilities([batch])
        else:
            catalogue = self.candidates(items, ids, not at_last)
            positions = catalogue.without(exclude, None if ids is None else catalogue.find(ids))
            shares = self._of_catalogue(user, catalogue, positions)
        scores = order.scores(list(shares.values()))
        first = best(scores, top)
        rows = first if positions is None else positions[first]
        if catalogue is None or at_last:
            names = self.sides.ids([items[row] for row in rows.tolist()])
        else:
            names = catalogue.ids(rows)
        if order.summed:
            shares = {SCORE: scores, **shares}
        results = {name: column[first] for name, column in shares.items()}
        return {"row": rows, **({} if names is None else {"item": names}), **results}

    def candidates(self, items: Any, ids: Any, named: bool = True) -> Catalogue:
        """Reads the items of a ranking.

        Args:
            items: Source with the items' columns, or a catalogue.
            ids: Ids of the items of a catalogue to rank, or None.
            named: Whether the ids of a source are read.

        Returns:
            The catalogue, or all rows of the source as one.

        Raises:
            RequestError: There is no item, or there are ids besides a source.
        """
        if isinstance(items, Catalogue):
            return items
        if ids is not None:
            raise RequestError("found ids and items, expected ids of a catalogue")
        if isinstance(items, list) and not items:
            raise RequestError("found no item to rank, expected one or more")
        return Catalogue.read(self.sides, items, distinct=False, named=named)

    def _of_catalogue(self, user: Any, catalogue: Catalogue, positions: NDArray[np.int64] | None) -> dict[str, Floats]:
        """Probabilities of the labels of a user and the items at these positions, or all items, by output."""
        precomputed = catalogue.precomputed
        if precomputed is None or precomputed.session is not self.session:
            return self._probabilities(self._joined(self.sides.read_user(user), catalogue.rows, positions))
        chosen = np.arange(len(catalogue)) if positions is None else positions
        out = precomputed.items.run(chosen, self.sides.user_inputs(user))
        return {name: out[name].reshape(-1) for name in self.outputs}

    def _joined(
        self, user: Rows, items: Rows, positions: NDArray[np.int64] | None
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Inputs of the user and the items at these positions, or all items, in batches."""
        for begin in range(0, len(items) if positions is None else len(positions), ROWS_IN_FLIGHT):
            chosen: Any = slice(begin, begin + ROWS_IN_FLIGHT)
            yield self.sides.join(user, items, chosen if positions is None else positions[chosen])

    def _probabilities(self, batches: Iterable[Mapping[str, NDArray[Any]]]) -> dict[str, Floats]:
        """Probabilities of the labels of one user's items, by output."""
        outs = [self.predict_shared(batch, self.sides.user.shared) for batch in batches]
        if len(outs) == 1:
            return {name: outs[0][name].reshape(-1) for name in self.outputs}
        none = [np.zeros(0, np.float32)]
        return {name: np.concatenate([out[name].reshape(-1) for out in outs] or none) for name in self.outputs}

    @property
    def last_ids(self) -> NDArray[Any]:
        """The largest id of each column of `ids`, int64 [columns]."""
        return self.features.last_ids

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """Dtype and shape of the inputs, as the features have them."""
        return dict(self.features.inputs)

    def example(self, count: int, data: str | Path | None = None) -> list[Any]:
        """Reads raw rows for a benchmark; rows repeat if the log has fewer.

        Args:
            count: Number of rows.
            data: Log; None: the sample shipped with the model.

        Returns:
            Rows as {column: text}; tab-separated lines without a header.

        Raises:
            RequestError: There is no sample or no row.
        """
        place = data or self.path / SAMPLES[self.headerless]
        if data is None and not Path(place).is_file():
            raise RequestError(f"{self.path} holds no {Path(place).name}; name your rows with --data FILE")
        rows = _lines(place, count) if self.headerless else _rows(place, count, self.features.schema.forms)
        return [rows[index % len(rows)] for index in range(count)]


def _rows(log: str | Path, count: int, forms: Mapping[str, CellForm]) -> list[dict[str, Any]]:
    """Up to `count` first rows of a log."""
    batch = next(open_logs(log)[0].batches(forms=forms), None)
    if batch is None or not batch.num_rows:
        raise RequestError(f"{log} holds no row; name a log with some")
    return batch.slice(0, count).to_pylist()  # type: ignore[no-any-return]


def _lines(data: str | Path, count: int) -> list[bytes]:
    """Up to `count` first lines of a text file. Raises RequestError where it is no text."""
    name, kind, place = sources.locate(data)
    if kind != "text":
        raise RequestError(
            f"found {name} as rows of a benchmark, expected text; give a TSV file, plain or .gz, with --data"
        )
    lines = (line for block in sources.blocks(name, place) for line in block.removesuffix(b"\n").split(b"\n"))
    return list(itertools.islice(lines, count))


def _zeros(features: Features) -> bytes:
    """A row of zeros without a label, as a line."""
    return b"\t".join(b"0" for column in features.raw.schema.columns if column.kind != "label")
