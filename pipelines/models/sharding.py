"""How the input of a model is cut into parts that other processes score: protocols that pipelines implement.

`Pipeline.PARTS` says what an input is cut into. A pipeline whose parts are "rows" is a `ShardableRows`, one whose parts
are "files" a `ShardableFiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pipelines.core.errors import RequestError
from pipelines.data.text import TextForm


class NoRow(RequestError):
    """An input without a row to use.

    Attributes:
        left_out: Number of rows that were left out because of faults.
    """

    def __init__(self, message: str, left_out: int = 0) -> None:
        super().__init__(message)
        self.left_out = left_out


@runtime_checkable
class ShardableRows(Protocol):
    """A pipeline that scores rows of logs.

    Attributes:
        with_label: Whether rows have a label, if the first row of the whole input decides that.
    """

    with_label: bool | None

    def text_form(self, stream: Any) -> TextForm:
        """Returns how the text of a stream of bytes holds rows."""

    def log_of_first_row(self, stream: Any) -> Any | None:
        """Returns the log of a stream (`columns`, `delimiter`) if its first row alone has the columns, else None."""

    def label_in(self, lines: Iterable[bytes] = (), columns: Sequence[str] = ()) -> bool | None:
        """Whether rows of these lines, or of a table with these columns, have a label; None: not decided here."""

    def part_of_log(self, path: Path, delimiter: str, columns: Sequence[str]) -> Any:
        """Returns the input of `Pipeline.run` for rows without the line that has their columns.

        Args:
            path: File of the rows.
            delimiter: Delimiter of text; "" for JSON lines.
            columns: Names of the columns.
        """

    def write_no_rows(self, output: Path, left_out: int) -> dict[str, Any]:
        """Writes the results of a part whose rows were all left out, and returns its summary without the engine."""

    def rows(self, inputs: Any) -> Iterator[Any]:
        """Reads rows."""

    def score(self, rows: Any) -> Any:
        """Scores rows: float32 [n]."""


@runtime_checkable
class ShardableFiles(Protocol):
    """A pipeline that takes files one by one."""

    def items(self, files: Iterable[tuple[str, Callable[[], bytes]]]) -> Any:
        """Returns the input of `Pipeline.run` for files.

        Args:
            files: Names in the results, and functions that read the bytes.
        """
