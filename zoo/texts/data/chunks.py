"""Division of long texts into chunks at word boundaries."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.texts.data import vector_files
from zoo.texts.data.text_files import Row
from zoo.texts.data.tokenizer import Tokenizer

POOLINGS = ("none", "mean")
MAX_CHUNKS = 1 << 24
SEGMENT = 50_000  # characters that are tokenized at once
Write = Callable[[NDArray[np.float32], NDArray[np.int64]], None]


class Chunking(NamedTuple):
    """How texts are divided.

    Attributes:
        size: Maximum number of tokens of a chunk, special tokens and prompt included.
        stride: Number of tokens that a chunk shares with the one before.
        pooling: "none" for an embedding a chunk, "mean" for the mean of the chunks of a text.
    """

    size: int
    stride: int = 0
    pooling: str = "none"


class Chunks(NamedTuple):
    """Chunks of several texts.

    Attributes:
        texts: The chunks, in order.
        rows: Index of the text of every chunk, int64 [chunks].
        spans: First character of every chunk in its text and the one behind it, int64 [chunks, 2].
    """

    texts: list[str]
    rows: NDArray[np.int64]
    spans: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of chunks of every text, 1 or more, int64 [texts]."""
        return np.bincount(self.rows).astype(np.int64)

    def mean(self, vectors: NDArray[np.float32], normalize: bool) -> NDArray[np.float32]:
        """Returns the mean embedding of the chunks of every text.

        Args:
            vectors: Embeddings of the chunks, float32 [chunks, width].
            normalize: Whether to normalize the means to length 1.

        Returns:
            float32 [texts, width].
        """
        counts = self.counts
        sums = np.add.reduceat(vectors, np.cumsum(counts) - counts, axis=0, dtype=np.float64)
        means = (sums / counts[:, None]).astype(np.float32)
        return vector_files.normalize(means) if normalize else means


class DividedRows:
    """Divides the rows of a file as they are read, and assigns the embeddings of chunks to them as they are written.

    Args:
        tokenizer: Tokenizer of the model.
        chunking: How texts are divided.
        prompt: Prefix that every chunk will get.

    Attributes:
        texts: Number of rows read.

    Raises:
        RequestError: See `require_chunking`.
    """

    def __init__(self, tokenizer: Tokenizer, chunking: Chunking, prompt: str) -> None:
        require_chunking(tokenizer, chunking, prompt)
        self._tokenizer, self._chunking, self._prompt = tokenizer, chunking, prompt
        self._read: deque[int] = deque()  # rows of the chunks that were not written yet
        self.texts = 0

    def divided(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yields a row for every chunk of a text; invalid rows are passed through.

        Args:
            rows: Rows of one text each.
        """
        for row in rows:
            parts = [row]
            if not row.error:
                texts = divide(self._tokenizer, row.texts, self._chunking, self._prompt).texts
                parts = [row._replace(texts=(text,)) for text in texts]
            for part in parts:
                self._read.append(self.texts)
                yield part
            self.texts += 1

    @contextlib.contextmanager
    def writing(self, write: Write, first: int, normalize: bool) -> Iterator[Write]:
        """Context manager that writes embeddings of chunks, or their means, with the numbers of their rows.

        Args:
            write: Writes embeddings and row numbers, from 1.
            first: Index of the first row.
            normalize: Whether to normalize means to length 1.

        Yields:
            `write` for the chunks in the order of `divided`; its row numbers are not used.
        """
        pooled = self._chunking.pooling == "mean"
        vectors, rows = np.zeros((0, 0), np.float32), np.zeros(0, np.int64)  # of a row whose chunks are not all there

        def write_chunks(results: NDArray[np.float32], _: NDArray[np.int64]) -> None:
            nonlocal vectors, rows
            own = np.array([self._read.popleft() for _ in results], np.int64)
            if not pooled:
                write(results, own + first + 1)
                return
            vectors, rows = (np.concatenate([vectors, results]), np.append(rows, own)) if len(rows) else (results, own)
            complete = int(np.searchsorted(rows, rows[-1]))
            write_means(complete)
            vectors, rows = vectors[complete:], rows[complete:]

        def write_means(count: int) -> None:
            if count:
                numbers, indices = np.unique(rows[:count], return_inverse=True)
                means = Chunks([], indices, np.zeros((0, 2), np.int64)).mean(vectors[:count], normalize)
                write(means, numbers + first + 1)

        yield write_chunks
        write_means(len(rows))


def require_chunking(tokenizer: Tokenizer, chunking: Chunking, prompt: str = "") -> int:
    """Checks how texts are to be divided.

    Args:
        tokenizer: Tokenizer of the model.
        chunking: How.
        prompt: Prefix of every chunk.

    Returns:
        Number of tokens of a chunk beside special tokens and the prompt.

    Raises:
        RequestError: The size is out of range, leaves no room for the stride, or the pooling is unknown.
    """
    size = tokenizer.require_length(chunking.size, pairs=False)
    before, after = tokenizer.frame
    room = size - len(before) - len(after) - (len(tokenizer.encode(prompt, False).ids) if prompt else 0)
    if type(chunking.stride) is not int or not 0 <= chunking.stride < room:
        raise RequestError(
            f"found the stride {chunking.stride!r:.40} for chunks of {size} tokens; expected 0 to {max(room - 1, 0)}"
        )
    if chunking.pooling not in POOLINGS:
        raise RequestError(f"found the pooling {chunking.pooling!r:.40} of chunks; expected {' or '.join(POOLINGS)}")
    return room


def divide(
    tokenizer: Tokenizer, texts: Sequence[str], chunking: Chunking, prompt: str = "", max_chunks: int = MAX_CHUNKS
) -> Chunks:
    """Divides texts into chunks, between words where a word fits into a chunk.

    Texts of more than `SEGMENT` characters are tokenized in segments, which bounds the memory; chunks of two segments
    share no tokens.

    Args:
        tokenizer: Tokenizer of the model.
        texts: The texts; an empty one is one chunk.
        chunking: How.
        prompt: Prefix that every chunk will get.
        max_chunks: Maximum number of chunks.

    Returns:
        The chunks, without the prompt.

    Raises:
        RequestError: There are more chunks; or see `require_chunking`.
    """
    room = require_chunking(tokenizer, chunking, prompt)
    chunks: list[str] = []
    rows: list[int] = []
    spans: list[tuple[int, int]] = []
    for row, text in enumerate(texts):
        own = (
            (begin + origins[start], begin + origins[end])
            for begin, segment in _segments(text)
            for origins in [tokenizer.origins(segment)]
            for start, end in _spans(tokenizer.encode(segment, special_tokens=False), room, chunking.stride)
        )
        places = [*itertools.islice(own, max_chunks - len(chunks) + 1)] or [(0, len(text))]
        if len(chunks) + len(places) > max_chunks:
            raise RequestError(
                f"found more than {max_chunks:,} chunks of {chunking.size} tokens with the stride {chunking.stride}; "
                "expected fewer texts, larger chunks or a smaller stride"
            )
        chunks += [text[start:end] for start, end in places]
        rows += [row] * len(places)
        spans += places
    return Chunks(chunks, np.array(rows, np.int64), np.array(spans, np.int64).reshape(-1, 2))


def _segments(text: str) -> Iterator[tuple[int, str]]:
    """Parts of a text of at most `SEGMENT` characters and their positions; cut at whitespace if there is any."""
    start = 0
    while len(text) - start > SEGMENT:
        end = start + SEGMENT
        blank = next((i for i in range(end, start, -1) if text[i].isspace()), end)
        yield start, text[start:blank]
        start = blank
    yield start, text[start:]


def _spans(encoding: Any, room: int, stride: int) -> Iterator[tuple[int, int]]:
    """First character of every chunk of a text, and the one behind it."""
    offsets, words = encoding.offsets, encoding.word_ids
    start, count = 0, len(offsets)
    while start < count:
        end = min(start + room, count)
        word_end = _word_start(words, end, start, -1)
        end = word_end if word_end > start else end
        yield offsets[start][0], offsets[end - 1][1]
        if end == count:
            break
        start = max(_word_start(words, max(end - stride, start + 1), end, 1), start + 1)


def _word_start(words: Sequence[int | None], place: int, bound: int, step: int) -> int:
    """The first token of a word at or beyond a place, in steps up to a bound."""
    while place != bound and 0 < place < len(words) and words[place] is not None and words[place] == words[place - 1]:
        place += step
    return place
