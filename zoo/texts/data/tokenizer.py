"""Tokenization by the tokenizer.json of a model."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import Panic, RequestError, catch_panics, one_line, requires
from pipelines.data.tokenization import MAX_TOKEN_CHARACTERS, TRIAL
from zoo.texts.models.config import IDS, MASK, TYPES

FILE = "tokenizer.json"
FACTORS = (1, 8, 40)  # of the characters that are looked at: more if they gave fewer tokens than the limit
MIN_COVERAGE = 0.97  # share of the embedding's rows with a token: some are padded to a round number
SPARE = 128  # rows without a token in any case
SHORT_ROWS, SHORT_LENGTHS = 8, (2, 3, 4, 8)  # of calibration: every eighth row has the attention of a short text
Ints = NDArray[np.int32]


class Tokens(NamedTuple):
    """Tokens of several texts, concatenated without padding.

    Attributes:
        ids: Token ids, int32 [tokens].
        types: Token type ids, int32 [tokens].
        lengths: Number of tokens of each text, int64 [texts].
        truncated: Whether a text was truncated, bool [texts].
        context: What the pipeline of a task keeps of its texts, such as the offsets of the tokens.
        attended: How many of the first tokens of a text all its tokens attend to, int64 [texts]; None: all. The others
            are computed, but not attended to (query expansion of ColBERT).
    """

    ids: Ints
    types: Ints
    lengths: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    context: Any = None
    attended: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, encodings: Sequence[Any], truncated: Sequence[bool], context: Any = None) -> Tokens:
        """Concatenates encodings of the library tokenizers.

        Args:
            encodings: Encodings of texts or of windows of texts.
            truncated: Whether each of them was truncated.
            context: See `Tokens`.

        Returns:
            The tokens.
        """
        lengths = [len(encoding) for encoding in encodings]
        ids, types = (
            np.fromiter(itertools.chain.from_iterable(numbers), np.int32, sum(lengths))
            for numbers in ([encoding.ids for encoding in encodings], [encoding.type_ids for encoding in encodings])
        )
        return cls(ids, types, np.array(lengths, np.int64), np.array(truncated, np.bool_), context)

    @classmethod
    def concatenated(cls, parts: Sequence[Tokens]) -> Tokens:
        """Concatenates the tokens of several groups of texts.

        Args:
            parts: Tokens, at least one group.

        Returns:
            The tokens of all texts in order, without context.
        """
        if len(parts) == 1:
            return parts[0]
        ids, types, lengths, truncated = (
            np.concatenate(arrays) for arrays in zip(*(part[:4] for part in parts), strict=True)
        )
        attended = [part.lengths if part.attended is None else part.attended for part in parts]
        is_partial = any(part.attended is not None for part in parts)
        return cls(ids, types, lengths, truncated, None, np.concatenate(attended) if is_partial else None)

    def without(self, token: int | None, empty: int) -> Tokens:
        """Leaves out a token; texts without tokens get one.

        Args:
            token: Id of the token; None to leave out none.
            empty: Id of the token of a text that has none.
        """
        kept = np.ones(len(self.ids), np.bool_) if token is None else self.ids != token
        texts = np.repeat(np.arange(len(self.lengths)), self.lengths)
        lengths = np.bincount(texts[kept], minlength=len(self.lengths))
        starts = (np.cumsum(lengths) - lengths)[lengths == 0]
        ids, types = np.insert(self.ids[kept], starts, empty), np.insert(self.types[kept], starts, 0)
        return Tokens(ids, types, np.maximum(lengths, 1), self.truncated, self.context)

    def first(self, count: int) -> Tokens:
        """Returns the tokens of the first texts, all with attention mask 1.

        Args:
            count: Number of texts.
        """
        end = int(self.lengths[:count].sum())
        return Tokens(self.ids[:end], self.types[:end], self.lengths[:count], self.truncated[:count])

    def batches(self, texts: int, tokens: int) -> Iterator[tuple[Tokens, NDArray[np.int64], NDArray[np.int64]]]:
        """Yields texts of about one length, the shortest first.

        Args:
            texts: Maximum number of texts of a batch.
            tokens: Maximum number of tokens of a padded batch of several texts.

        Yields:
            The tokens of a batch, the numbers of its texts, and the numbers of its tokens.
        """
        order, ends = np.argsort(self.lengths, kind="stable"), np.cumsum(self.lengths)
        start = 0
        while start < len(order):
            size = min(texts, len(order) - start)
            while size > 1 and size * self.lengths[order[start + size - 1]] > tokens:
                size -= 1
            rows = order[start : start + size]
            indices = np.concatenate([np.arange(ends[i] - self.lengths[i], ends[i]) for i in rows])
            attended = None if self.attended is None else self.attended[rows]
            arrays = self.ids[indices], self.types[indices], self.lengths[rows], self.truncated[rows]
            yield Tokens(*arrays, attended=attended), rows, indices
            start += size

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Which columns of the padded texts are tokens, bool [texts, longest]."""
        mask: NDArray[np.bool_] = np.arange(int(self.lengths.max(initial=1))) < self.lengths[:, None]
        return mask

    def padded(self, inputs: Sequence[str]) -> dict[str, NDArray[np.int64]]:
        """Pads the tokens to the longest text.

        Args:
            inputs: Names of the graph's inputs, among `IDS`, `MASK` and `TYPES`.

        Returns:
            Array by input name, int64 [texts, longest].
        """
        mask = self.mask
        batch = {name: np.zeros(mask.shape, np.int64) for name in inputs}
        for name, values in ((IDS, self.ids), (MASK, 1), (TYPES, self.types)):
            if name in batch:
                batch[name][mask] = values
        if self.attended is not None and MASK in batch:
            batch[MASK] *= np.arange(mask.shape[1]) < self.attended[:, None]
        return batch

    def spread(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Pads rows of tokens to the longest text.

        Args:
            rows: A row a token, float32 [tokens, n].

        Returns:
            float32 [texts, longest, n], zeros at padding.
        """
        mask = self.mask
        spread = np.zeros((*mask.shape, rows.shape[-1]), np.float32)
        spread[mask] = rows
        return spread

    def packed(self, inputs: Sequence[str], length: int, count: int) -> dict[str, NDArray[np.int64]]:
        """Cuts the concatenated tokens into rows of equal length, to calibrate on.

        In one of `SHORT_ROWS` rows all tokens attend to the first few alone (`SHORT_LENGTHS` in turn), as in short
        texts: the results of their attention have a larger range than means of many tokens.

        Args:
            inputs: Names of the graph's inputs, among `IDS`, `MASK` and `TYPES`.
            length: Tokens per row.
            count: Maximum number of rows.

        Returns:
            Array by input name, int64 [rows, length].
        """
        length = min(length, len(self.ids))
        rows = min(len(self.ids) // length, count)
        attended = np.full(rows, length)
        short = np.arange(SHORT_ROWS - 1, rows, SHORT_ROWS)
        attended[short] = np.resize(SHORT_LENGTHS, len(short))
        mask = np.arange(length) < attended[:, None]
        arrays = {IDS: self.ids, TYPES: self.types, MASK: mask.ravel()}
        return {name: arrays[name][: rows * length].reshape(rows, length).astype(np.int64) for name in inputs}


class Tokenizer:
    """Tokenizer of a model; a call tokenizes texts or pairs of texts.

    Attributes:
        SPECIAL_TOKENS: Whether texts get the special tokens of the model.
        size: Number of tokens of the vocabulary.
    """

    SPECIAL_TOKENS: ClassVar[bool] = True

    def __init__(
        self,
        path: Path,
        vocabulary: int,
        max_length: int,
        lower: bool = False,
        *,
        pairs: bool = False,
        left_out: str = "",
    ) -> None:
        """Opens a tokenizer.

        Args:
            path: The tokenizer.json.
            vocabulary: Rows of the model's token embedding.
            max_length: Maximum number of tokens of a text, special tokens included.
            lower: Whether texts are lowercased first. Whitespace at their ends stays, as in sentence-transformers 6.2.
            pairs: Whether to tokenize pairs of texts.
            left_out: Token that a call leaves out; "" for none. A text without tokens has the last row.

        Raises:
            RequestError: The file is damaged, or belongs to another model.
        """
        with requires("tokenization", "int8-zoo[texts]"):
            import tokenizers
        try:
            with catch_panics(quiet=True):
                self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
                self._tokenizer.encode(TRIAL, TRIAL if pairs else None)  # normalizers and templates fail here
        except Exception as error:  # the library raises Exception itself
            raise RequestError(f"cannot read {path} ({one_line(error)}); copy it from the model again") from error
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocabulary or size < min(MIN_COVERAGE * vocabulary, vocabulary - SPARE):
            raise RequestError(
                f"{path} is of another model: it has {size:,} tokens, the largest {largest:,}, the model embeddings of "
                f"{vocabulary:,}"
            )
        self.size, self._vocabulary = size, vocabulary
        self._left_out = self.number(left_out) if left_out else None
        self._path, self._lower, self._max_length, self._lock = path, lower, max_length, threading.Lock()
        self._direction = (self._tokenizer.truncation or {}).get("direction", "right")
        self._tokenizer.no_padding()
        try:
            with catch_panics(quiet=True):
                self._tokenizer.enable_truncation(max_length, direction=self._direction)
        except Exception as error:  # there are more special tokens
            raise RequestError(f"{path} cannot cut texts to {max_length} tokens ({one_line(error)})") from error

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a text, special tokens included."""
        return self._max_length

    def require_length(self, length: Any, pairs: bool) -> int:
        """Checks a maximum number of tokens.

        Args:
            length: The number; None for that of the model.
            pairs: Whether pairs of texts are tokenized.

        Returns:
            The number.

        Raises:
            RequestError: It is no whole number, above that of the model, or leaves no token beside the special tokens.
        """
        if length is None:
            return self._max_length
        least = self._tokenizer.num_special_tokens_to_add(pairs) + 1
        if type(length) is not int or not least <= length <= self._max_length:
            raise RequestError(f"found max length {length!r:.40}; expected {least} to {self._max_length} tokens")
        return length

    @functools.cached_property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of the special tokens before and behind every single text."""
        encoding = self.encode("a")
        inner = [i for i, special in enumerate(encoding.special_tokens_mask) if not special] or [0]
        return tuple(encoding.ids[: inner[0]]), tuple(encoding.ids[inner[-1] + 1 :])

    def encode(self, text: str, special_tokens: bool = True) -> Any:
        """Tokenizes one text without truncation.

        Args:
            text: The text; the caller bounds its length.
            special_tokens: Whether to add the special tokens of the model.

        Returns:
            `tokenizers.Encoding`, with the offsets of its tokens in characters.

        Raises:
            RequestError: The tokenizer fails, because its file is damaged.
        """
        with self._unlimited() as tokenizer:
            return tokenizer.encode(text.lower() if self._lower else text, add_special_tokens=special_tokens)

    def origins(self, text: str) -> Sequence[int]:
        """Returns the positions in a text of the characters that the offsets of `encode` count.

        Args:
            text: The text; if it is lowercased, İ (U+0130) becomes two characters.

        Returns:
            A position for each of these characters, and the length of the text.
        """
        if not self._lower or len(text.lower()) == len(text):
            return range(len(text) + 1)
        return [*(i for i, character in enumerate(text) for _ in character.lower()), len(text)]

    def decode(self, texts: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Converts token ids to texts.

        Args:
            texts: Token ids of every text; unknown ids are left out.
            skip_special_tokens: Whether to leave out special tokens.

        Returns:
            The texts.

        Raises:
            RequestError: The tokenizer fails, because its file is damaged.
        """
        with self._unlimited() as tokenizer:
            decoded: list[str] = tokenizer.decode_batch(texts, skip_special_tokens=skip_special_tokens)
            return decoded

    @contextlib.contextmanager
    def _unlimited(self) -> Iterator[Any]:
        """The library's tokenizer without truncation, for this thread alone."""
        try:
            with catch_panics(), self._lock:
                self._tokenizer.no_truncation()
                yield self._tokenizer
        except Panic as error:
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> RequestError:
        return RequestError(f"{self._path} fails ({one_line(error)}); copy it from the model again")

    def __call__(
        self,
        texts: Sequence[str] | Sequence[tuple[str, str]],
        max_length: int | None = None,
        direction: str | None = None,
        offsets: bool = False,
    ) -> Tokens:
        """Tokenizes texts, or pairs of texts; the longer text of a pair is truncated first.

        Args:
            texts: Texts, or pairs of texts.
            max_length: Maximum number of tokens, special tokens included; None for that of the model.
            direction: End at which texts are truncated, "left" or "right"; None for that of the model.
            offsets: Whether the encodings, the context of the tokens, have the offsets of tokens.

        Returns:
            The tokens.

        Raises:
            RequestError: The tokenizer fails, because its file is damaged.
        """
        most, end = max_length or self._max_length, direction or self._direction
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        try:
            with catch_panics(), self._lock:  # the library keeps the maximum as a state
                self._tokenizer.enable_truncation(most, direction=end)
                encodings = self._encode(texts, most, end, encode)
        except Panic as error:
            raise self._failure(error) from error
        size = FACTORS[-1] * MAX_TOKEN_CHARACTERS * most
        truncated = [
            bool(encoding.overflowing) or self._has_more(text, size, end)
            for encoding, text in zip(encodings, texts, strict=True)
        ]
        tokens = Tokens.of(encodings, truncated, encodings)
        if self._left_out is None and all(encodings):
            return tokens
        return tokens.without(self._left_out, self._vocabulary - 1)

    def prompted(self, texts: Sequence[str], prompt: str) -> Any:
        """Returns a row as a call takes it, its first text behind a prompt.

        Args:
            texts: A text, or a pair of texts.
            prompt: The prompt; "" for none.
        """
        return prompt + texts[0] if len(texts) == 1 else (prompt + texts[0], *texts[1:])

    def windows(
        self, texts: Sequence[Any], stride: int, max_length: int | None = None, *, strategy: str = "longest_first"
    ) -> list[list[Any]]:
        """Tokenizes texts, or pairs of texts, into windows that overlap; no text is truncated.

        Args:
            texts: Texts, or pairs of texts.
            stride: Tokens that two windows share.
            max_length: Maximum number of tokens of a window, special tokens included; None for that of the model.
            strategy: What is divided, as the library tokenizers names it: "longest_first" or "only_second".

        Returns:
            Encodings of the windows of every text, in order.

        Raises:
            RequestError: The windows have no room for the stride or for the first text, or the tokenizer fails.
        """
        most = max_length or self._max_length
        room = most - self._tokenizer.num_special_tokens_to_add(not isinstance(texts[0], str)) if len(texts) else most
        if type(stride) is not int or not 0 <= stride < room:
            raise RequestError(f"found the stride {stride!r:.40}; expected 0 to {room - 1} tokens")
        try:
            with catch_panics(), self._lock:
                self._tokenizer.enable_truncation(most, stride=stride, strategy=strategy, direction=self._direction)
                encodings = self._tokenizer.encode_batch([self._lowered(text) for text in texts])
        except Panic as error:
            raise self._failure(error) from error
        except Exception as error:  # the library raises Exception itself, for a first text without room for a second
            raise RequestError(
                f"cannot divide texts into windows of {most} tokens ({one_line(error)}); use shorter first texts"
            ) from error
        return [[encoding, *encoding.overflowing] for encoding in encodings]

    def count(self, text: str, limit: int) -> int:
        """Returns the number of tokens of a text without special tokens, at most about `limit` of a long text.

        Args:
            text: The text.
            limit: Number of tokens up to which the caller counts.
        """
        return len(self.encode(text[: FACTORS[-1] * MAX_TOKEN_CHARACTERS * limit], special_tokens=False).ids)

    def token(self, number: int) -> str:
        """Returns the text of a token, such as ##ing.

        Args:
            number: Token id.
        """
        return self._tokenizer.id_to_token(number) or ""

    def number(self, token: str) -> int | None:
        """Returns the id of a token; None for no token.

        Args:
            token: Text of the token, such as [MASK].
        """
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def join(self, tokens: Sequence[str]) -> str:
        """Joins the texts of tokens to readable text, as `convert_tokens_to_string` of transformers.

        Args:
            tokens: Texts of tokens.
        """
        decoder = self._tokenizer.decoder
        return str(decoder.decode(list(tokens))) if decoder is not None else " ".join(tokens)

    @property
    def marks_subwords(self) -> bool:
        """Whether tokens that continue a word begin with a prefix, such as ##."""
        return bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    def _lowered(self, text: Any) -> Any:
        """Returns a text or pair as it is tokenized."""
        if not self._lower:
            return text
        return text.lower() if isinstance(text, str) else tuple(part.lower() for part in text)

    def _encode(self, texts: Sequence[Any], most: int, end: str, encode: Callable[..., list[Any]]) -> list[Any]:
        """Encodes texts by the characters at the kept end, and by more of them where these gave too few tokens."""
        encodings: list[Any] = [None] * len(texts)
        rows = list(range(len(texts)))
        for factor in FACTORS:
            size = factor * MAX_TOKEN_CHARACTERS * most
            cut = [self._truncate(texts[i], size, end) for i in rows]
            encoded = encode(cut, add_special_tokens=self.SPECIAL_TOKENS)
            for i, encoding in zip(rows, encoded, strict=True):
                encodings[i] = encoding
            rows = [i for i in rows if not encodings[i].overflowing and self._has_more(texts[i], size, end)]
            if not rows:
                break
        return encodings

    def _truncate(self, text: str | tuple[str, str], size: int, end: str) -> str | tuple[str, str]:
        """Truncates by characters, which bounds the time of a very long text."""
        if not isinstance(text, str):
            return tuple(self._truncate(part, size, end) for part in text)  # type: ignore[return-value]
        text = text[: size + 1] if end == "right" else text[-size - 1 :]
        return text.lower() if self._lower else text

    @staticmethod
    def _has_more(text: str | Sequence[str], size: int, end: str) -> bool:
        """Returns whether a text has more than whitespace beyond the characters of `_truncate`."""
        beyond = slice(size + 1, None) if end == "right" else slice(-size - 1)
        parts = [text] if isinstance(text, str) else text
        return any(len(part) > size and bool(part[beyond].strip()) for part in parts)
