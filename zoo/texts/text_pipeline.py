"""Base class of the pipelines of text encoders: batches, engines, and streaming of files."""

from __future__ import annotations

import abc
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.engines import catalog
from pipelines.engines.native.texts import NativeTexts, store, unpadded, unvalidated
from pipelines.engines.native.validation import NativeModel
from pipelines.engines.session import Session
from pipelines.models.pipeline import PRECISIONS
from zoo.texts.data import text_files
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.models.config import IDS, MASK, TYPES
from zoo.texts.text_inputs import EXAMPLES, TextInputs, require_valid, row_error

SORT_WINDOW = 16  # batches of a long file that are sorted by length together
MAX_BATCH_TOKENS = 4096  # tokens of a padded batch of a stock engine
EXAMPLE = 8  # texts that the native code is checked on
LONG, SHORT = 400, 5  # tokens of two more; the native code computes 192 rows at once

logger = logging.getLogger(__name__)
Floats = NDArray[np.float32]
Write = Callable[[Any, NDArray[np.int64]], None]  # what `filled` returns, numbers of the input rows from 1 [n]


class TextPipeline(TextInputs):
    """Computes embeddings of texts, or scores of text pairs; see `zoo.pipeline`.

    The engine "native" computes int8 in native code without padding; "auto" takes it where the kernels are built, else
    onnxruntime, and for bf16 OpenVINO. A stock engine computes padded batches of at most `batch_size` texts.

    Attributes:
        OUTPUT: Output of the graph.
        PER_TOKEN: Whether the output has a row a token, otherwise a row a text.
        EMBEDS: Whether the outputs are vectors that are compared by their cosine, otherwise scores.
        BATCH_TOKENS: Maximum number of tokens of a padded batch of a stock engine.
    """

    BATCH_SIZE: ClassVar[int] = 32
    BATCH_TOKENS: ClassVar[int] = MAX_BATCH_TOKENS
    CALIBRATION: ClassVar[int] = 256
    ON_ERROR: ClassVar[str] = "skip"
    PARTS: ClassVar[str] = "texts"
    OUTPUT: ClassVar[str]
    PER_TOKEN: ClassVar[bool] = False
    EMBEDS: ClassVar[bool] = False
    MAX_WARNINGS: ClassVar[int] = 5

    @property
    def per_token(self) -> bool:
        """Whether the output has a row a token."""
        return self.PER_TOKEN

    def _open_native(self, model: Path | None) -> NativeTexts:
        """Opens the native encoder. Raises RequestError for an unsupported graph."""
        path = model or self._program(store)
        if model is None:
            reference = self.folder.path / PRECISIONS[self.precision]
            names = (self.OUTPUT, IDS, MASK, TYPES)
            self._unvalidated = NativeModel(unvalidated, path, reference, self.threads, names, unpadded)
        return NativeTexts(path, self.threads)

    def _float_reference(self) -> Path | None:
        return self.folder.ensure(PRECISIONS["fp32"]) if self.precision == "int8" else None

    def _open_stock(self, model: Path | None) -> None:
        """Opens a session of a stock engine."""
        path = model or self.folder.ensure(PRECISIONS[self.precision])
        self._session: Session = catalog.load(path, self._engine, self.threads, self.precision)

    # ------------------------------------------------------------------------------------------------------------ texts

    def __call__(
        self, raw: Any, *, prompt: str | None = None, max_length: int | None = None, on_error: str = "raise"
    ) -> list[dict[str, Any]]:
        """Computes embeddings of texts, or scores of pairs, in windows: a long text pads no other window.

        Args:
            raw: See `preprocess`.
            prompt: Name of a prompt of the model, or a prefix with a blank or a colon; "" for none, None for the
                default.
            max_length: Maximum number of tokens of a text, special tokens included; None for that of the model.
            on_error: "raise" at the first invalid text, or "skip" to return its error.

        Returns:
            Results of `postprocess`, with "cut": whether the text was truncated. The result of an invalid text has
            "error", and zeros as embedding or NaN as scores.

        Raises:
            RequestError: There are no valid texts, a text is invalid, or an option is.
        """
        options = self.text_options(prompt, max_length)
        text_files.require_on_error(on_error)
        results: list[dict[str, Any]] = []
        rows = self.input_rows(self._as_list(raw), names=False)
        while window := list(itertools.islice(rows, SORT_WINDOW * self.batch_size)):
            if on_error == "raise":
                require_valid(window)
            valid = [row.texts for row in window if not row.error]
            tokens = self.tokenize(valid, **options)
            results += self.results([row.error for row in window], self.compute(tokens), tokens)
        if not results:
            raise RequestError("found no texts; give at least one")
        if all("error" in result for result in results):
            raise RequestError(f"found no valid text among {len(results):,}; text 1 {results[0]['error']}")
        return results

    def text_options(self, prompt: str | None, max_length: int | None) -> dict[str, Any]:
        """Checks options of a call.

        Args:
            prompt: See `__call__`.
            max_length: See `__call__`.

        Returns:
            Arguments of `tokenize`.

        Raises:
            RequestError: The model has no such prompt, or the length is out of range.
        """
        length = self.tokenizer.require_length(max_length, self.TEXTS_PER_ROW > 1)
        return {"prompt": None if prompt is None else self.prompts.resolve(prompt), "max_length": length}

    def results(self, errors: Sequence[str], outputs: Floats, tokens: Tokens) -> list[Any]:
        """Returns the results of texts, with those of invalid ones.

        Args:
            errors: Why each of n texts is invalid; "" if it is valid.
            outputs: What `compute` returns of the valid texts.
            tokens: Tokens of the valid texts.

        Returns:
            A result for each of the n texts, see `__call__`.
        """
        filled, cut = self.filled(errors, outputs, tokens), np.zeros(len(errors), np.bool_)
        cut[[i for i, error in enumerate(errors) if not error]] = tokens.truncated
        results: list[dict[str, Any]] = self.postprocess({self.OUTPUT: filled})
        return [
            {"cut": was_cut, **result, **({"error": error} if error else {})}
            for was_cut, result, error in zip(cut.tolist(), results, errors, strict=True)
        ]

    def filled(self, errors: Sequence[str], outputs: Floats, tokens: Tokens) -> Any:
        """Returns the rows that `run` writes, with those of invalid texts, see `results`.

        Args:
            errors: Why each of n texts is invalid; "" if it is valid.
            outputs: What `compute` returns of the valid texts.
            tokens: Tokens of the valid texts.

        Returns:
            Embeddings or logits, float32 [n, width], with `INVALID` for an invalid text.
        """
        filled = np.full((len(errors), self.config.output_size), self.INVALID, np.float32)
        filled[[i for i, error in enumerate(errors) if not error]] = outputs
        return filled

    # ---------------------------------------------------------------------------------------------------------- compute

    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes embeddings, or logits of pairs.

        Args:
            batch: Array by graph input, int64 [n, tokens].

        Returns:
            Array by output: float32 [n, width or labels], or [n, tokens, labels] with zeros at padding.

        Raises:
            RequestError: Shapes differ, a token is out of range, or the mask is not 1 for tokens and then 0.
        """
        self.check(batch)
        if len({array.shape for array in batch.values()}) > 1 or 0 in batch[IDS].shape:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in batch.items())
            raise RequestError(f"found {shapes}; expected one shape for all, of one token or more")
        ids, mask = batch[IDS], batch[MASK] != 0
        types = batch.get(TYPES, np.zeros_like(ids))
        for name, array, size in ((IDS, ids, self.config.vocabulary), (TYPES, types, max(self.config.types, 1))):
            if (invalid := array[(array < 0) | (array >= size)]).size:
                raise RequestError(f"found {invalid[0]} in {name}, expected 0 to {size - 1}")
        if not mask[:, 0].all() or (mask[:, 1:] > mask[:, :-1]).any():
            raise RequestError(f"{MASK} is not 1 for tokens, from the first on, and then 0")
        lengths = mask.sum(axis=1)
        tokens = Tokens(ids[mask].astype(np.int32), types[mask].astype(np.int32), lengths, lengths < 0)
        outputs = self.compute(tokens)
        return {self.OUTPUT: tokens.spread(outputs) if self.per_token else outputs}

    def compute(self, tokens: Tokens) -> Floats:
        """Computes embeddings of texts, or logits of pairs.

        Args:
            tokens: Tokens of n texts or pairs.

        Returns:
            float32 [n, width or labels], or [tokens, labels] of all texts, concatenated.
        """
        if not len(tokens.lengths):
            return np.zeros((0, self.config.output_size), np.float32)
        if self._native is not None:
            self._validate(lambda: tokens.first(EXAMPLE).padded(self.config.inputs), *self._long_examples())
        if self._native is not None:
            return self._native.compute(tokens.ids, tokens.types, tokens.lengths, tokens.attended)
        count = len(tokens.ids if self.per_token else tokens.lengths)
        results = np.zeros((count, self.config.output_size), np.float32)
        for part, rows, indices in tokens.batches(self.batch_size, self.BATCH_TOKENS):
            batch = part.padded(self.config.inputs)
            outputs = self._session.run(batch)[self.OUTPUT]
            if self.per_token:
                results[indices] = outputs[part.mask]
            else:
                results[rows] = outputs
        return results

    def _long_examples(self) -> list[Callable[[], Batch]]:
        """Returns functions that make batches of other lengths, which native code is checked with."""
        return [self._long_example]

    def _long_example(self) -> Batch:
        """Returns a text of several blocks of the native code, and a short one."""
        text = np.array(self.tokenizer.encode(" ".join(EXAMPLES)).ids, np.int32)
        long, short = np.resize(text, min(LONG, self.max_length)), text[: min(SHORT, self.max_length)]
        ids, lengths = np.concatenate([long, short]), np.array([len(long), len(short)])
        return Tokens(ids, np.zeros_like(ids), lengths, lengths < 0).padded(self.config.inputs)

    def compute_texts(self, rows: Sequence[tuple[str, ...]], prompt: str | None = None) -> Floats:
        """Tokenizes and computes rows of texts.

        Args:
            rows: Texts, or pairs of texts, as tuples.
            prompt: Prefix of every text, or of the first text of a pair; None for the default prompt of the model.

        Returns:
            float32 [n, width], or [n, labels], see `compute`.
        """
        window = SORT_WINDOW * self.batch_size
        parts = [self.compute(self.tokenize(rows[i : i + window], prompt)) for i in range(0, len(rows), window)]
        return np.concatenate(parts) if parts else np.zeros((0, self.config.output_size), np.float32)

    # -------------------------------------------------------------------------------------------------------------- run

    @abc.abstractmethod
    def _writer(self, output: str | Path) -> AbstractContextManager[Write]:
        """Context manager that writes results to a file."""

    def _run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str,
        columns: Sequence[str],
        prompt: str | None,
        max_length: int | None,
    ) -> dict[str, Any]:
        """Writes a row of results for every row of input; invalid rows are filled with `INVALID`."""
        options = self.text_options(prompt, max_length)
        names = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        errors, started, count, truncated, size = Counter[str](), time.perf_counter(), 0, 0, 0
        with self._writer(output) as write, progress("computing texts") as advance:
            rows = self.input_rows(names, columns)
            while window := list(itertools.islice(rows, SORT_WINDOW * self.batch_size)):
                self.report_errors(map(row_error, window), errors, on_error, self._outcome)
                tokens = self.tokenize([row.texts for row in window if not row.error], **options)
                truncated, size = truncated + int(tokens.truncated.sum()), size + len(tokens.ids)
                results = self.filled([row.error for row in window], self.compute(tokens), tokens)
                write(results, np.arange(1, len(window) + 1) + (self.first_row + count))
                count += len(window)
                advance(len(window))
            if count == errors.total() and not self.in_parts:
                raise RequestError(
                    f"found no texts in {text_files.describe(names)}" + (f"; {count:,} rows are none" if count else "")
                )
        seconds = time.perf_counter() - started
        if truncated:
            logger.warning("%d of %d texts were truncated to %d tokens", truncated, count, options["max_length"])
        return {
            "texts": count - errors.total(),
            "skipped": errors.total(),
            "cut": truncated,
            "seconds": round(seconds, 3),
            "texts_per_second": round((count - errors.total()) / seconds, 1),
            "tokens_per_second": round(size / seconds, 1),
            "engine": self.engine,
            "precision": self.precision,
        }
