"""Optional protocols of pipelines: splitting of the input for several processes, and ranking of items.

`Draftable`, `ModulesExportable`, `HuggingFaceExportable` and `ShipsSamples` are protocols of families, as those of
`pipelines.models.family`.

`Pipeline.PARTS` names the kind of the parts. A pipeline whose parts are "rows" is a `ShardableRows`, one whose parts
are "files" a `ShardableFiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.data.text import TextForm

if TYPE_CHECKING:
    from pipelines.models.folder import ModelFolder
    from pipelines.quantization.calibration.table import CalibrationTable
    from pipelines.quantization.recipe import QuantRecipe


@runtime_checkable
class Draftable(Protocol):
    """A family whose models verify the proposals of a small draft (speculative decoding)."""

    def draft_config(self) -> Any:
        """Default settings of the training of a draft."""

    def train_draft(self, folder: ModelFolder, data: Any, config: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Trains a draft for a model.

        Args:
            folder: The model folder.
            data: Training data.
            config: Settings.

        Returns:
            (entries of the card's preprocessing, {file name: content}).
        """


class NoRow(RequestError):
    """An input without valid rows.

    Args:
        message: Error message.
        left_out: Number of invalid rows.
    """

    def __init__(self, message: str, left_out: int = 0) -> None:
        super().__init__(message)
        self.left_out = left_out


@runtime_checkable
class ShardableRows(Protocol):
    """A pipeline that scores rows of logs.

    Attributes:
        with_label: Whether rows have a label, if the first row of the whole input decides that.
        outputs: {column of a probability: its label}.
    """

    with_label: bool | None
    outputs: Mapping[str, str]

    def text_form(self, stream: Any) -> TextForm:
        """Detects the text format of rows.

        Args:
            stream: Binary stream.
        """

    def log_of_first_row(self, stream: Any) -> Any | None:
        """Reads the header of a log.

        Args:
            stream: Binary stream.

        Returns:
            The log (`columns`, `delimiter`) if only its first line has the columns, else None.
        """

    def label_in(self, lines: Iterable[bytes] = (), columns: Sequence[str] = ()) -> bool | None:
        """Detects whether rows have a label.

        Args:
            lines: First lines of text.
            columns: Columns of a table.

        Returns:
            Whether there is a label; None if it cannot be detected.
        """

    def files(self, source: str) -> list[str]:
        """Lists the files that a source stands for, in the order in which `Pipeline.run` reads them.

        Args:
            source: File, folder or pattern.

        Returns:
            Paths.
        """

    def part_of_log(self, path: Path, delimiter: str, columns: Sequence[str]) -> Any:
        """Returns the input of `Pipeline.run` for a part without a header.

        Args:
            path: File of the rows.
            delimiter: Delimiter of text; "" for JSON lines.
            columns: Names of the columns.
        """

    def write_no_rows(self, output: Path, left_out: int, **options: Any) -> dict[str, Any]:
        """Writes the empty results of a part without valid rows.

        Args:
            output: File to write.
            left_out: Number of invalid rows.
            **options: Options of `run` for the family.

        Returns:
            Summary of `Pipeline.run` without the engine.
        """

    def rows(self, inputs: Any) -> Iterator[Any]:
        """Reads rows.

        Args:
            inputs: Input of `Pipeline.run`.

        Yields:
            Blocks of rows.
        """

    def score(self, rows: Any) -> Any:
        """Scores rows.

        Args:
            rows: Block of n rows.

        Returns:
            Probabilities, float32 [n].
        """


@runtime_checkable
class ShardableFiles(Protocol):
    """A pipeline that takes files one by one."""

    def items(self, files: Iterable[tuple[str, Callable[[], bytes]]]) -> Any:
        """Returns the input of `Pipeline.run` for files.

        Args:
            files: Names in the results, and functions that read the bytes.
        """


@runtime_checkable
class RetrievesItems(Protocol):
    """A pipeline that finds the candidates that another one ranks; see `TwoTowerPipeline.retrieve`."""

    def indexed(self, catalogue: Any) -> Any:
        """Builds the index of a catalogue once.

        Args:
            catalogue: Items, see `RanksItems.catalogue`.
        """

    def retrieve(self, user: Any, catalogue: Any, count: int = 1000, exclude: Iterable[Any] = ()) -> list[Any]:
        """Finds the items nearest to a user.

        Args:
            user: The user's raw values.
            catalogue: Items.
            count: Number of items.
            exclude: Ids of items that are left out.

        Returns:
            Ids of the items, the nearest first.
        """

    def retrieved(self, user: Any, catalogue: Any, count: int = 1000, exclude: Iterable[Any] = ()) -> Iterable[Any]:
        """Finds the items that `retrieve` finds, for a ranking of them.

        Args:
            user: See `retrieve`.
            catalogue: See `retrieve`.
            count: See `retrieve`.
            exclude: See `retrieve`.

        Returns:
            Argument `ids` of `RanksItems.rank_columns`, which is quicker than the ids.
        """


@runtime_checkable
class RanksItems(Protocol):
    """A pipeline that reads and computes the part of a user once for all items; see `LogPipeline.rank`."""

    def catalogue(self, items: Any, distinct: bool = True) -> Sized:
        """Reads and encodes items once.

        Args:
            items: Source of the items.
            distinct: Keep the first row of every id alone.

        Returns:
            The catalogue, an argument of `rank_columns`.
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
        """Ranks items for a user.

        Args:
            user: The user's raw values.
            items: Source of the items, or a catalogue.
            top: Number of items to return; None for all.
            ids: Ids of the items of a catalogue to rank; None for all.
            exclude: Ids of items that are not returned.
            by: Label that orders the items, or a weighted sum of labels; None for the first label.

        Returns:
            {"row": positions, "item": ids if there are any, "probability" (of several labels one column each)}, the
            best first.
        """


@runtime_checkable
class GraphImportable(Protocol):
    """A family that imports frozen TensorFlow graphs."""

    def from_graph(self, path: Any, data: Any, output: Path, **options: Any) -> dict[str, Any]:
        """Writes a folder that `Freezable.freeze` starts from.

        Args:
            path: GraphDef, SavedModel or Keras model.
            data: Rows to calibrate on.
            output: New folder.
            options: columns, output_node, on_error.

        Returns:
            Details of the model's card.
        """


@runtime_checkable
class ModulesExportable(Protocol):
    """Models that sentence-transformers can run, as a module of its own: `zoo export --to sentence-transformers`."""

    def export_modules(self, folder: ModelFolder, output: Path, precision: str, threads: int) -> dict[str, Any]:
        """Writes a folder for `SentenceTransformer`.

        Args:
            folder: Model folder.
            output: Folder to make.
            precision: "int8" or "fp32".
            threads: Number of intra-op threads.

        Returns:
            {"path", "files": {name: bytes}}.

        Raises:
            RequestError: The model embeds no texts.
        """


@runtime_checkable
class HuggingFaceExportable(Protocol):
    """Models that transformers can run: `zoo export --to huggingface`."""

    def export_huggingface(self, folder: ModelFolder, output: Path) -> dict[str, Any]:
        """Writes a folder for `from_pretrained`.

        Args:
            folder: Model folder.
            output: Folder to make.

        Returns:
            {"path", "files": {name: bytes}}.

        Raises:
            RequestError: The model does not come from transformers.
        """


@runtime_checkable
class ShipsSamples(Protocol):
    """Models that are calibrated on samples of the package where the folder has none and no data are given."""

    def samples(self, folder: ModelFolder) -> Batch:
        """Returns the calibration samples of a model, one array for every graph input.

        Args:
            folder: Model folder.
        """

    def judged(
        self, folder: ModelFolder, path: Path, recipe: QuantRecipe, table: CalibrationTable
    ) -> tuple[CalibrationTable, dict[str, Any]]:
        """Measures the quality of int8 on other samples of the package, and improves a table where it is low.

        Args:
            folder: Model folder.
            path: Its rewritten graph.
            recipe: Quantization options.
            table: Its calibration table.

        Returns:
            The table, and its quality.
        """
