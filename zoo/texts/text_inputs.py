"""Inputs of text encoders: rows of texts or pairs, their tokens, calibration rows and examples."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.engines.native.texts import NativeTexts
from pipelines.models.folder import ModelFolder
from pipelines.models.line_pipeline import LinePipeline, benchmark_samples
from zoo.texts.data import text_files, tokenizer
from zoo.texts.data.prompts import Prompts
from zoo.texts.data.templates import TemplateTokenizer
from zoo.texts.data.tokenizer import Tokenizer, Tokens
from zoo.texts.models.config import ModelConfig

CALIBRATION_LENGTH = 128  # tokens of a calibration row
EXAMPLES = (
    "The museum opens at nine and closes at five.",
    "How do I reset the password of my account?",
    "A man is playing a guitar on the street corner while people walk past him.",
    "Shares fell for a third day as investors waited for the figures on inflation.",
    "Fold the egg whites into the batter, pour it into the mould and bake it for forty minutes, until a knife comes "
    "out clean.",
    "Rain",
)


class TextInputs(LinePipeline[NativeTexts]):
    """Reads texts or pairs of texts, and tokenizes them.

    Attributes:
        TEXTS_PER_ROW: 1 for texts, 2 for pairs.
        INVALID: Value that fills the results of an invalid row.
        columns: Columns of tables, see `read_columns`.
        config: Configuration of the network.
        max_length: Maximum number of tokens of a text.
        tokenizer: Tokenizer of the model.
        prompts: Prompts of the model.
        prompt: Default prefix of every text, or of the first text of a pair.
    """

    TEXTS_PER_ROW: ClassVar[int]
    INVALID: ClassVar[float] = 0.0
    columns: Sequence[str] = ()

    def __init__(self, folder: ModelFolder, *arguments: Any, **options: Any) -> None:
        features = folder.preprocessing
        try:
            self.config = ModelConfig.from_json(features["form"])
            self.max_length = int(features["max_length"])
        except KeyError as error:
            raise RequestError(f"the card of {folder.card.name} lacks {error}; import the model again") from error
        super().__init__(folder, *arguments, **options)
        path = folder.verify(tokenizer.FILE)
        sizes, lower = (self.config.vocabulary, self.max_length), bool(features.get("lower"))
        template = features.get("template")
        self.tokenizer = (
            TemplateTokenizer(path, *sizes, lower, template)
            if template
            else Tokenizer(path, *sizes, lower, pairs=self.TEXTS_PER_ROW == 2, left_out=features.get("left_out", ""))
        )
        self.prompts = Prompts(features)
        self.prompt = self.prompts.default

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """Token ids, attention mask and, for pairs, token types: int64 [n, longest]."""
        return {name: (np.dtype(np.int64), (None, None)) for name in self.config.inputs}

    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """Tokenizes and pads texts or pairs of texts.

        Args:
            raw: A text or pair, or an iterable of them. Only a `Path` or a list of paths names files.

        Returns:
            Array by graph input, int64 [n, longest].

        Raises:
            RequestError: There are no texts, or one is invalid; the message has its number.
        """
        rows = list(self.input_rows(self._as_list(raw), names=False))
        if not rows:
            raise RequestError("found no texts; give at least one")
        require_valid(rows)
        return self.tokenize([row.texts for row in rows]).padded(self.config.inputs)

    def _as_list(self, raw: Any) -> Any:
        """Wraps a single text or pair in a list."""
        if isinstance(raw, str) and not isinstance(raw, os.PathLike) and self.TEXTS_PER_ROW == 1:
            return [raw]
        is_pair = isinstance(raw, tuple) and self.TEXTS_PER_ROW == 2 and len(raw) == 2
        return [raw] if is_pair and all(isinstance(text, str) for text in raw) else raw

    def read_columns(self, names: Sequence[str]) -> None:
        """See `Pipeline.read_columns`."""
        self.columns = tuple(names)

    def rows(self, data: Any, columns: Sequence[str] = (), *, names: bool = True) -> Iterator[text_files.Row]:
        """Reads rows of texts, see `zoo.texts.data.text_files.read_rows`.

        Args:
            data: Files, or rows of texts.
            columns: Columns of tables; default: those of `read_columns`.
            names: Whether a str is the name of a file.

        Returns:
            Iterator over the rows.
        """
        return text_files.read_rows(data, self.TEXTS_PER_ROW, columns or self.columns, names=names)

    def input_rows(self, data: Any, columns: Sequence[str] = (), *, names: bool = True) -> Iterator[text_files.Row]:
        """Reads rows to compute: those of `rows`, which calibration reads too, with the errors of the task.

        Args:
            data: See `rows`.
            columns: See `rows`.
            names: See `rows`.

        Returns:
            Iterator over the rows.
        """
        return self.rows(data, columns, names=names)

    def parse_columns(self, option: str | None) -> list[str]:
        """Splits the option --column into names.

        Args:
            option: A column, or two separated by a comma for pairs; None for the default columns.

        Returns:
            The names; [] for the default columns.

        Raises:
            RequestError: The number of names differs from the texts of a row.
        """
        if not option:
            return []
        names = [option] if self.TEXTS_PER_ROW == 1 else [name.strip() for name in option.split(",")]
        if len(names) != self.TEXTS_PER_ROW:
            raise RequestError(f"found {len(names)} columns in --column {option}; expected two, such as query,text")
        return names

    def count_rows(self, inputs: Any, *, column: str | None = None, **options: Any) -> int:
        """See `Pipeline.count_rows`: the number of rows of a file, including invalid rows."""
        return sum(1 for _ in self.rows([inputs], self.parse_columns(column)))

    def tokenize(
        self, rows: Sequence[tuple[str, ...]], prompt: str | None = None, max_length: int | None = None
    ) -> Tokens:
        """Tokenizes rows of texts.

        Args:
            rows: Texts, or pairs of texts, as tuples.
            prompt: Prefix of every text, or of the first text of a pair; None for the default prompt of the model.
            max_length: Maximum number of tokens of a text; None for that of the model.

        Returns:
            The tokens.
        """
        prefix = self.prompts.prefix(prompt)
        return self.tokenizer([self.tokenizer.prompted(texts, prefix) for texts in rows], max_length)

    @property
    def _outcome(self) -> str:
        """What becomes of an invalid row, for the log."""
        return f"; its row is {'zeros' if self.INVALID == 0 else 'empty'}"

    # ------------------------------------------------------------------------------------------------------ calibration

    def calibration(self, data: Any, count: int, on_error: str = "raise") -> dict[str, NDArray[Any]]:
        """Returns calibration rows without padding: texts with their special tokens are concatenated and cut into rows.

        Padding is avoided because its activations would otherwise dominate the observed ranges of short texts.

        Args:
            data: Files of texts.
            count: Maximum number of rows of `CALIBRATION_LENGTH` tokens.
            on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

        Returns:
            Inputs of the graph, int64 [rows, tokens].

        Raises:
            RequestError: There are no texts.
        """
        rows = list(itertools.islice(self.rows(data), 16 * count))
        self.report_errors(map(row_error, rows), Counter(), on_error, self._outcome)
        texts = [row.texts for row in rows if not row.error]
        if not texts:
            raise RequestError(f"found no texts in {data}; calibration needs some")
        return self.tokenize(texts).packed(self.config.inputs, min(CALIBRATION_LENGTH, self.max_length), count)

    def example(self, count: int, data: Any = None) -> list[Any]:
        """Returns texts or pairs for a benchmark.

        Args:
            count: Number of samples; repeated if there are too few.
            data: Files of texts; None for English examples.

        Returns:
            Texts, or pairs of texts.

        Raises:
            RequestError: The data hold no texts.
        """
        is_pair = self.TEXTS_PER_ROW > 1
        examples = [(EXAMPLES[1], text) if is_pair else text for text in EXAMPLES]
        rows = self.rows(data) if data is not None else ()
        valid = (row.texts if is_pair else row.texts[0] for row in rows if not row.error)
        return benchmark_samples(examples, valid, data, "texts", count)


def row_error(row: text_files.Row) -> tuple[str, str]:
    """Returns the location and error of a row, for `LinePipeline.report_errors`."""
    return row.location, row.error


def require_valid(rows: Sequence[text_files.Row]) -> None:
    """Raises RequestError for the first invalid row."""
    if invalid := next((row for row in rows if row.error), None):
        raise RequestError(f"{invalid.location} {invalid.error}")
