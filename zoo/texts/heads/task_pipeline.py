"""Base class of the pipelines of text tasks whose results are labels, entities or answers."""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.data.tables import writing
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.text_pipeline import Floats, TextPipeline, Write

CLASSIFIER, SPARSE_ENCODER, MULTI_VECTOR = "classifier", "sparse encoder", "multi-vector encoder"


class TaskPipeline(TextPipeline):
    """Computes the results of a task with the field names of transformers; see `zoo.pipeline`.

    A result is a dict, or a list of dicts. `run` writes a line for each dict.

    Attributes:
        COLUMNS: Columns that `run` writes after "row", with their types.
        API_KIND: Kind of the model in the text APIs of servers: `CLASSIFIER`, `SPARSE_ENCODER`, `MULTI_VECTOR`, or "".
        max_tokens: Maximum number of tokens of a text; None for that of the model.
    """

    TEXTS_PER_ROW: ClassVar[int] = 1
    COLUMNS: ClassVar[Mapping[str, Any]]
    API_KIND: ClassVar[str] = ""
    max_tokens: int | None = None

    @property
    def names(self) -> list[str]:
        """Labels of the model, in the order of its outputs."""
        return [str(name) for name in self.folder.preprocessing["names"]]

    def tokenize(
        self, rows: Sequence[tuple[str, ...]], prompt: str | None = None, max_length: int | None = None
    ) -> Tokens:
        """See `TextPipeline.tokenize`: texts, or pairs of texts; prompts are of sentence encoders alone."""
        texts: list[Any] = [row[0] if len(row) == 1 else row for row in rows]
        return self.tokenizer(texts, max_length)

    @abc.abstractmethod
    def decode(self, outputs: Floats, tokens: Tokens) -> list[Any]:
        """Computes the results of texts.

        Args:
            outputs: What `compute` returns.
            tokens: What `tokenize` returns.

        Returns:
            A result a text.
        """

    @abc.abstractmethod
    def with_options(self) -> Self:
        """Returns the pipeline with the options of a call, which are keywords; raises RequestError for invalid ones."""

    def configured(self, *, max_length: int | None = None, **options: Any) -> Self:
        """Returns the pipeline with the options of one call.

        Args:
            max_length: Maximum number of tokens of a text; None for that of the model.
            **options: Values of attributes.

        Returns:
            A copy over the same model.

        Raises:
            RequestError: An option is out of range.
        """
        made = copy.copy(self)
        made.max_tokens = self.tokenizer.require_length(max_length, self.TEXTS_PER_ROW > 1)
        for name, value in options.items():
            setattr(made, name, value)
        return made

    def text_options(self, prompt: str | None = None, max_length: int | None = None) -> dict[str, Any]:
        """See `TextPipeline.text_options`; `configured` has set the length."""
        return {"max_length": self.tokenizer.require_length(max_length or self.max_tokens, self.TEXTS_PER_ROW > 1)}

    def filled(self, errors: Sequence[str], outputs: Floats, tokens: Tokens) -> list[Any]:
        """See `TextPipeline.filled`: a result a text, None for an invalid one."""
        if outputs.ndim == 3:  # padded, as `predict` returns them
            mask = np.arange(outputs.shape[1]) < tokens.lengths[:, None]
            outputs = outputs[mask]
        results = iter(self.decode(outputs, tokens))
        return [None if error else next(results) for error in errors]

    def results(self, errors: Sequence[str], outputs: Floats, tokens: Tokens) -> list[Any]:
        """See `TextPipeline.results`: {"error"} for an invalid text."""
        results = self.filled(errors, outputs, tokens)
        return [{"error": error} if error else result for error, result in zip(errors, results, strict=True)]

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[Any]:
        """See `Pipeline.postprocess`; the results need the texts: call the pipeline itself.

        Args:
            out: Outputs of `predict`.

        Raises:
            RequestError: In any case.
        """
        raise RequestError(f"results of {self.folder.card.name} need the texts beside the outputs; call the pipeline")

    def lines(self, result: Any) -> list[dict[str, Any]]:
        """Returns the lines that `run` writes of a result.

        Args:
            result: A result of `decode`.
        """
        return result if isinstance(result, list) else [result]

    @contextlib.contextmanager
    def _writer(self, output: str | Path) -> Iterator[Write]:
        with writing(output, {"row": np.int64, **self.COLUMNS}) as write_table:

            def write(results: list[Any], rows: NDArray[np.int64]) -> None:
                numbered = [
                    (int(row), line)
                    for row, result in zip(rows, results, strict=True)
                    for line in ([{}] if result is None else self.lines(result))
                ]
                columns = {name: [line.get(name) for _, line in numbered] for name in self.COLUMNS}
                write_table({"row": [row for row, _ in numbered], **columns})

            yield write

    @property
    def _outcome(self) -> str:
        return "; its row is empty"


def as_names(option: str, value: Any) -> list[Any]:
    """Returns the value of an option that takes a list of names.

    Args:
        option: Name of the option.
        value: Its value.

    Raises:
        RequestError: It is no list.
    """
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise RequestError(f"found {option} {value!r:.40}; expected a list of texts")
    return list(value)
