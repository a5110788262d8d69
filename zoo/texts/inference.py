"""Inference of text encoders: embeddings of texts, and scores of text pairs."""

from __future__ import annotations

import abc
import contextlib
import copy
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.data.tables import writing
from pipelines.engines import catalog
from pipelines.engines.native.texts import NativeTexts, store
from pipelines.engines.session import BF16, Session
from pipelines.kernels import extension
from pipelines.kernels.transformer import program_file
from pipelines.models.folder import ModelFolder
from pipelines.models.pipeline import PRECISIONS, Pipeline
from pipelines.models.stages import derived
from zoo.texts.data import text_files, vector_files
from zoo.texts.data import tokenizer as tokens
from zoo.texts.data.tokenizer import Tokenizer, Tokens
from zoo.texts.importers.huggingface import SIGMOID
from zoo.texts.models.config import EMBEDDING, IDS, MASK, SCORES, TYPES, Form

AT_ONCE = 16  # batches that are sorted together in a long file
MOST_TOKENS = 4096  # of a padded batch of a stock engine
CALIBRATION_LENGTH = 64  # tokens of a row of calibration
EXAMPLES = (
    "The museum opens at nine and closes at five.",
    "How do I reset the password of my account?",
    "A man is playing a guitar on the street corner while people walk past him.",
    "Shares fell for a third day as investors waited for the figures on inflation.",
    "Fold the egg whites into the batter, pour it into the mould and bake it for forty minutes, until a knife comes "
    "out clean.",
    "Rain",
)

logger = logging.getLogger(__name__)
Floats = NDArray[np.float32]


class TextPipeline(Pipeline):
    """Computes something of every text, or pair of texts; see `zoo.pipeline`.

    engine: "native" computes int8 in native code without padding, and is what "auto" takes where there are kernels;
    else it is onnxruntime, for bf16 OpenVINO. batch_size: texts that a stock engine sees at once, padded.
    """

    BATCH_SIZE: ClassVar[int] = 32
    CALIBRATION: ClassVar[int] = 512
    ON_ERROR: ClassVar[str] = "skip"
    PARTS: ClassVar[str] = "texts"
    RESULT: ClassVar[str]  # the graph's output
    COUNT: ClassVar[int]  # texts of a sample
    NOTHING: ClassVar[float] = 0.0  # the numbers of what is no sample
    columns: Sequence[str] = ()  # of tables, where they are told

    def __init__(self, folder: ModelFolder, *arguments: Any, **options: Any) -> None:
        features = folder.preprocessing
        try:
            self.form = Form.from_json(features["form"])
            self.max_length = int(features["max_length"])
        except KeyError as error:
            raise RequestError(f"the card of {folder.card.name} lacks {error}; import the model again") from error
        super().__init__(folder, *arguments, **options)
        path = folder.verify(tokens.FILE)
        self.tokenizer = Tokenizer(path, self.form.vocabulary, self.max_length, bool(features.get("lower")))
        self.prompt = default_prompt(features)

    @property
    def width(self) -> int:
        """Numbers of a result."""
        return self.form.labels or self.form.width

    def _open(self, engine: str, model: Path | None) -> None:
        """The native encoder, else a session."""
        self._native: NativeTexts | None = None
        self._engine = engine if engine != "auto" else "openvino" if self.precision == BF16 else "onnxruntime"
        if engine == "native" or (engine == "auto" and self.precision == "int8" and model is None and extension.isas()):
            try:
                path = model
                if model is None:
                    source = PRECISIONS[self.precision]
                    path = derived(self.folder, source, "native", program_file.VERSION, store, program_file.SUFFIX)
                self._native = NativeTexts(path, self.threads)  # type: ignore[arg-type]
                self._engine = "native"
                machine.trim()
                return
            except RequestError as error:
                if engine == "native":
                    raise
                if model is None:
                    self.folder.ensure(PRECISIONS[self.precision])  # what is missing there is missing in any engine
                logger.warning("%s; onnxruntime computes instead", error)
        path = model or self.folder.ensure(PRECISIONS[self.precision])
        self._session: Session = catalog.load(path, self._engine, self.threads, self.precision)

    @property
    def engine(self) -> str:
        """The engine in use."""
        return self._engine

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """int64 [n, longest]: tokens, 1 where there is one, and, for pairs, which text it is of."""
        return {name: (np.dtype(np.int64), (None, None)) for name in self._inputs}

    @property
    def _inputs(self) -> tuple[str, ...]:
        return (IDS, MASK, *([TYPES] if self.form.labels and self.form.types > 1 else []))

    # ------------------------------------------------------------------------------------------------------------ texts

    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """Texts, or pairs of them, -> the graph's inputs, padded: int64 [n, longest].

        raw: one, a list of them, or a file. Raises RequestError for none, and for one that is empty, with its number.
        """
        found = list(self.items(self._listed(raw)))
        if not found:
            raise RequestError("found no texts; give at least one")
        if faulty := next((each for each in found if each.fault), None):
            raise RequestError(f"{faulty.where} {faulty.fault}")
        return self._padded(self.tokenize([each.texts for each in found]))

    def _listed(self, raw: Any) -> Any:
        """`raw`, one text or pair alone as a list of it."""
        if isinstance(raw, str) and not text_files._is_file(raw):
            return [raw]
        pair = isinstance(raw, tuple) and self.COUNT == 2 and len(raw) == 2
        return [raw] if pair and all(isinstance(each, str) for each in raw) else raw

    def read_columns(self, names: Sequence[str]) -> None:
        """See `Pipeline.read_columns`."""
        self.columns = tuple(names)

    def items(self, data: Any, columns: Sequence[str] = ()) -> Iterator[text_files.Item]:
        """See `zoo.texts.data.text_files.items`: the samples in files or lists."""
        return text_files.items(data, self.COUNT, columns or self.columns)

    def columns_of(self, column: str | None) -> list[str]:
        """The columns that --column names, with a comma between two. Raises RequestError for another number of them
        than a sample has texts.
        """
        names = [] if not column else [column] if self.COUNT == 1 else [each.strip() for each in column.split(",")]
        if len(names) not in (0, self.COUNT):
            raise RequestError(f"found {len(names)} columns in --column {column}; expected two, such as query,text")
        return names

    def count_rows(self, inputs: Any, *, column: str | None = None, **options: Any) -> int:
        """See `Pipeline.count_rows`: the number of rows of a file, including invalid rows."""
        return sum(1 for _ in self.items([inputs], self.columns_of(column)))

    def tokenize(self, texts: Sequence[tuple[str, ...]], prompt: str | None = None) -> Tokens:
        """Tokenizes samples.

        Args:
            texts: Texts, or pairs of texts.
            prompt: Prefix of every text, or of the first text of a pair; None for the default prompt of the model.
        """
        before = self.prompt if prompt is None else prompt
        return self.tokenizer(
            [before + each[0] for each in texts] if self.COUNT == 1 else [(before + each[0], each[1]) for each in texts]
        )

    def _padded(self, found: Tokens) -> dict[str, NDArray[Any]]:
        """The graph's inputs."""
        longest = int(found.lengths.max(initial=1))
        given = np.arange(longest) < found.lengths[:, None]
        batch = {name: np.zeros(given.shape, np.int64) for name in self._inputs}
        batch[IDS][given], batch[MASK][given] = found.ids, 1
        if TYPES in batch:
            batch[TYPES][given] = found.types
        return batch

    # ---------------------------------------------------------------------------------------------------------- compute

    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """{the graph's inputs: int64 [n, t]} -> {its output: float32 [n, width]}.

        Raises RequestError where the batch is none, or a token none of the model's.
        """
        self._check(batch)
        if len({array.shape for array in batch.values()}) > 1 or 0 in batch[IDS].shape:
            found = ", ".join(f"{name} {list(array.shape)}" for name, array in batch.items())
            raise RequestError(f"found {found}; expected one shape for all, of one token or more")
        ids, given = batch[IDS], batch[MASK] != 0
        kinds = batch.get(TYPES, np.zeros_like(ids))
        for name, array, most in ((IDS, ids, self.form.vocabulary), (TYPES, kinds, max(self.form.types, 1))):
            if (wrong := array[(array < 0) | (array >= most)]).size:
                raise RequestError(f"found {wrong[0]} in {name}, expected 0 to {most - 1}")
        if not given[:, 0].all() or (given[:, 1:] > given[:, :-1]).any():
            raise RequestError(f"{MASK} is not 1 for tokens, from the first on, and then 0")
        lengths = given.sum(axis=1)
        flat = Tokens(ids[given].astype(np.int32), kinds[given].astype(np.int32), lengths, lengths < 0)
        return {self.RESULT: self.compute(flat)}

    def compute(self, found: Tokens) -> Floats:
        """The graph's output for every sample, float32 [n, width]."""
        if self._native is not None:
            return self._native.compute(found.ids, found.types, found.lengths)
        results = np.zeros((len(found.lengths), self.width), np.float32)
        ends = np.cumsum(found.lengths)
        order = np.argsort(found.lengths, kind="stable")
        at = 0
        while at < len(order):
            size = min(self.batch_size, len(order) - at)
            while size > 1 and size * found.lengths[order[at + size - 1]] > MOST_TOKENS:
                size -= 1
            rows = order[at : at + size]
            places = np.concatenate([np.arange(ends[i] - found.lengths[i], ends[i]) for i in rows])
            part = Tokens(found.ids[places], found.types[places], found.lengths[rows], found.cut[rows])
            results[rows] = self._session.run(self._padded(part))[self.RESULT]
            at += size
        return results

    def of_texts(self, texts: Sequence[tuple[str, ...]]) -> Floats:
        """The graph's output for samples, float32 [n, width]."""
        window = AT_ONCE * self.batch_size
        parts = [self.compute(self.tokenize(texts[at : at + window])) for at in range(0, len(texts), window)]
        return np.concatenate(parts) if parts else np.zeros((0, self.width), np.float32)

    # -------------------------------------------------------------------------------------------------------------- run

    @abc.abstractmethod
    def _writing(self, output: str | Path) -> AbstractContextManager[Any]:
        """A context that yields write(results float32 [n, width], rows of input from 1 on, int64 [n])."""

    def _run(
        self, inputs: Any, output: str | Path, on_error: str, columns: Sequence[str], prompt: str | None = None
    ) -> dict[str, Any]:
        """`run` of both: each sample to a row of results, what is none to a row of `NOTHING`."""
        names = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        faults, start, count, cut, size = text_files.Faults(), time.perf_counter(), 0, 0, 0
        with self._writing(output) as write, progress("computing texts") as advance:
            found = self.items(names, columns)
            while window := list(itertools.islice(found, AT_ONCE * self.batch_size)):
                self._note(window, faults, on_error)
                good = [i for i, each in enumerate(window) if not each.fault]
                results = np.full((len(window), self.width), self.NOTHING, np.float32)
                if good:
                    given = self.tokenize([window[i].texts for i in good], prompt)
                    results[good] = self.compute(given)
                    cut, size = cut + int(given.cut.sum()), size + len(given.ids)
                write(results, np.arange(1, len(window) + 1) + (self.first_row + count))
                count += len(window)
                advance(len(window))
            if count == faults.total() and not self.in_parts:
                raise RequestError(
                    f"found no texts in {', '.join(map(str, names))}" + (f"; {count:,} rows are none" if count else "")
                )
        seconds = time.perf_counter() - start
        if cut:
            logger.warning("%d of %d texts are longer than %d tokens and were cut there", cut, count, self.max_length)
        return {
            "texts": count - faults.total(),
            "skipped": faults.total(),
            "cut": cut,
            "seconds": round(seconds, 3),
            "texts_per_second": round((count - faults.total()) / seconds, 1),
            "tokens_per_second": round(size / seconds, 1),
            "engine": self.engine,
            "precision": self.precision,
        }

    def _note(self, found: Sequence[text_files.Item], faults: text_files.Faults, on_error: str) -> None:
        """Name what is wrong, or stop there."""
        for each in found:
            if each.fault and on_error == "raise":
                raise RequestError(f"{each.where} {each.fault}")
            if each.fault:
                faults[each.fault] += 1
                if faults.total() <= text_files.SHOWN:
                    logger.warning(
                        "%s %s; its row is %s", each.where, each.fault, "zeros" if self.NOTHING == 0 else "empty"
                    )

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
        found = list(itertools.islice(self.items(data), 8 * count))
        self._note(found, text_files.Faults(), on_error)
        good = [each.texts for each in found if not each.fault]
        if not good:
            raise RequestError(f"found no texts in {data}; calibration needs some")
        return packed(self.tokenize(good), self._inputs, min(CALIBRATION_LENGTH, self.max_length), count)

    def example(self, count: int, data: Any = None) -> list[Any]:
        """Returns samples for a benchmark.

        Args:
            count: Number of samples; repeated if there are too few.
            data: Files of texts; None for English examples.

        Raises:
            RequestError: The data hold no texts.
        """
        some: list[Any] = [each if self.COUNT == 1 else (EXAMPLES[1], each) for each in EXAMPLES]
        if data is not None:
            read = itertools.islice((each for each in self.items(data) if not each.fault), count)
            some = [each.texts[0] if self.COUNT == 1 else each.texts for each in read]
            if not some:
                raise RequestError(f"found no texts in {data}")
        return list(itertools.islice(itertools.cycle(some), count))


def default_prompt(features: Mapping[str, Any]) -> str:
    """What a model whose card has these features puts before each text unless told."""
    return str(features.get("prompts", {}).get(features.get("prompt", ""), ""))


def packed(found: Tokens, inputs: Sequence[str], length: int, count: int) -> dict[str, NDArray[Any]]:
    """Concatenates the tokens of texts and cuts them into rows.

    Args:
        found: Tokens of the texts.
        inputs: Names of the graph's inputs.
        length: Tokens per row.
        count: Maximum number of rows.

    Returns:
        Inputs of the graph, int64 [rows, length].
    """
    length = min(length, len(found.ids))
    rows = min(len(found.ids) // length, count)
    arrays = {IDS: found.ids, TYPES: found.types, MASK: np.ones_like(found.ids)}
    return {name: arrays[name][: rows * length].reshape(rows, length).astype(np.int64) for name in inputs}


class SentencePipeline(TextPipeline):
    """Texts to vectors; see `zoo.pipeline`."""

    RESULT: ClassVar[str] = EMBEDDING
    COUNT: ClassVar[int] = 1
    output_dtype: str = "float32"

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """[{"embedding": float32 [width]}, ...], one a text."""
        return [{"embedding": each} for each in out[EMBEDDING]]

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        output_dtype: str = "float32",
        prompt: str | None = None,
    ) -> dict[str, Any]:
        """Embeds texts in constant memory and input order.

        A row that is no text (invalid UTF-8, an empty line) is reported on stderr and becomes a row of zeros. Texts
        over the token limit are truncated and counted.

        Args:
            inputs: Text files with one text per line, tables, "-" for stdin, or a list of texts.
            output: .npy, .parquet or .jsonl file; "-" for JSON lines on stdout (see
                `zoo.texts.data.vector_files.writing`).
            on_error: "raise" to stop at the first invalid row, "skip" to write it as zeros.
            column: Column of the texts in tables.
            output_dtype: Dtype of the vectors (see `zoo.texts.data.vector_files.converted`).
            prompt: Prefix of every text, or the name of a prompt of the model; None for the default prompt.

        Returns:
            {"texts", "skipped", "cut", "seconds", "texts_per_second", "tokens_per_second", "engine", "precision"}.

        Raises:
            RequestError: There are no valid texts.
        """
        self.output_dtype = vector_files.require(output_dtype)
        known = self.folder.preprocessing.get("prompts", {})
        return self._run(inputs, output, on_error, self.columns_of(column), known.get(prompt, prompt))

    @contextlib.contextmanager
    def _writing(self, output: str | Path) -> Iterator[Any]:
        with vector_files.writing(output, self.width, self.output_dtype) as write:

            def converted(results: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
                write(vector_files.converted(results, self.output_dtype), rows)

            yield converted


class RankingPipeline(TextPipeline):
    """Pairs of texts to scores; see `zoo.pipeline`."""

    RESULT: ClassVar[str] = SCORES
    COUNT: ClassVar[int] = 2
    NOTHING: ClassVar[float] = float("nan")
    raw: bool = False

    @property
    def names(self) -> list[str]:
        """What the scores are of: "score" where there is one."""
        if self.form.labels == 1:
            return ["score"]
        told = self.folder.preprocessing.get("names", [])
        return told if len(set(told)) == self.form.labels else [f"score_{i}" for i in range(self.form.labels)]

    def activated(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [n, labels] as scores: their sigmoid where the model's card says so."""
        if self.raw or self.folder.preprocessing.get("activation") != SIGMOID:
            return logits
        with np.errstate(over="ignore"):
            return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """[{name of a score: its value}, ...], one a pair."""
        found = self.activated(out[SCORES]).tolist()
        return [dict(zip(self.names, each, strict=True)) for each in found]

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        raw: bool = False,
    ) -> dict[str, Any]:
        """Scores pairs of texts in constant memory and input order.

        Writes the columns row (from 1) and score, or one score per label. A row that is no pair has no scores (NaN).

        Args:
            inputs: Text files with TAB between the two texts, tables, "-" for stdin, or a list of pairs.
            output: .csv, .csv.gz, .jsonl or .parquet file; "-" for CSV on stdout.
            on_error: "raise" to stop at the first invalid row, "skip" to write it without scores.
            column: Columns of the texts in tables, e.g. "query,text".
            raw: Write logits instead of activated scores.

        Returns:
            Summary, as `SentencePipeline.run`.

        Raises:
            RequestError: The input is unusable.
        """
        columns = self.columns_of(column)
        chosen = copy.copy(self)  # for `raw` holds for this call alone
        chosen.raw = raw
        return chosen._run(inputs, output, on_error, columns)

    @contextlib.contextmanager
    def _writing(self, output: str | Path) -> Iterator[Any]:
        kinds = {"row": np.int64, **dict.fromkeys(self.names, np.float32)}
        with writing(output, kinds) as table:

            def write(logits: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
                found = self.activated(logits)
                columns = {name: np.ascontiguousarray(found[:, i]) for i, name in enumerate(self.names)}
                table({"row": rows, **columns})

            yield write
