"""Tokenizers of texts: sentencepiece, the library tokenizers, Moses with byte pairs, words and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.errors import RequestError, catch_panics, one_line, requires
from pipelines.data.tokenization import TRIAL

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

WORD_END = "</w>"  # ends pieces that end a word, in byte pairs within words


def open_sentencepiece(content: bytes, name: str | Path) -> SentencePieceProcessor:
    """Opens a sentencepiece model and tokenizes a text.

    Args:
        content: Content of the file.
        name: Its name, for messages.

    Returns:
        The model.

    Raises:
        RequestError: The file is empty, damaged, or of another format.
    """
    import sentencepiece

    again = "train, download or import the model again"
    if not content:  # sentencepiece expects a later model then, and raises no error
        raise RequestError(f"{name} is no vocabulary of sentencepiece: it is empty; {again}")
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        model.encode(TRIAL)
    except RuntimeError as error:
        raise RequestError(f"{name} is no vocabulary of sentencepiece ({one_line(error)}); {again}") from error
    return model


class Pieces:
    """Texts in pieces of a sentencepiece model, for `zoo.translation.alignment.spans`."""

    _pieces: SentencePieceProcessor

    def split_source(self, text: str) -> tuple[str, int, list[str], int]:
        """Splits a source into pieces.

        Args:
            text: The text.

        Returns:
            The prompt before it, the number of tokens before, the pieces of both, and the number of tokens behind them.
        """
        return "", 0, list(self._pieces.encode(text, out_type=str)), 1

    def join_source(self, pieces: Sequence[str]) -> str:
        """Joins pieces of a source.

        Args:
            pieces: The pieces.

        Returns:
            The text.
        """
        return str(self._pieces.decode_pieces(list(pieces)))

    def target_piece(self, token: int) -> str:
        """Returns the piece of a target token; "" for a special one.

        Args:
            token: The token.
        """
        return "" if self._pieces.is_control(int(token)) else str(self._pieces.id_to_piece(int(token)))


class SentencePieceTokenizer:
    """Tokenizer of a sentencepiece model."""

    def __init__(self, content: bytes, name: str) -> None:
        self._pieces = open_sentencepiece(content, name)

    def tokenize(self, text: str) -> list[str]:
        """Splits a text into pieces.

        Args:
            text: The text.

        Returns:
            The pieces.
        """
        return list(self._pieces.encode(text, out_type=str))

    def detokenize(self, pieces: list[str]) -> str:
        """Joins pieces to a text.

        Args:
            pieces: The pieces.

        Returns:
            The text.
        """
        return str(self._pieces.decode_pieces(pieces)).replace("▁", " ").strip()


class LibraryTokenizer:
    """Tokenizer of the library tokenizers, from tokenizer.json."""

    def __init__(self, content: bytes, name: str) -> None:
        with requires(name, "int8-zoo[import]"):
            import tokenizers
        try:
            with catch_panics(quiet=True):
                self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
                self._tokenizer.encode(TRIAL)
        except Exception as error:  # the library raises Exception itself
            raise RequestError(f"{name} is no vocabulary of tokenizers ({one_line(error)}); copy it again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def tokenize(self, text: str) -> list[str]:
        """Splits a text into pieces.

        Args:
            text: The text.

        Returns:
            The pieces.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=False).tokens)

    def pieces_of(self, words: Sequence[str]) -> list[str]:
        """Splits words into pieces.

        Args:
            words: The words.

        Returns:
            The pieces of all words.
        """
        return list(self._tokenizer.encode(words, is_pretokenized=True, add_special_tokens=False).tokens)

    def detokenize(self, pieces: list[str]) -> str:
        """Joins pieces to a text.

        Args:
            pieces: The pieces.

        Returns:
            The text.
        """
        tokens = [self._tokenizer.token_to_id(piece) for piece in pieces]
        return str(self._tokenizer.decode([token for token in tokens if token is not None])).strip()


def has_moses() -> bool:
    """Returns whether the library of Moses' words is installed."""
    try:
        import sacremoses  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


class MosesTokenizer:
    """Tokenizer of Moses (Koehn et al. 2007) with byte pairs within words, as of FSMT.

    The file is JSON: `language`, `lower` (whether text becomes lower case) and `pieces`, the content of tokenizer.json.
    Text needs the library sacremoses; a vocabulary opens without it.
    """

    def __init__(self, content: bytes, name: str) -> None:
        try:
            options: Mapping[str, Any] = json.loads(content)
            self._language, self._lower = str(options["language"]), bool(options["lower"])
            pieces = json.dumps(options["pieces"]).encode()
        except (ValueError, LookupError, TypeError) as error:
            raise RequestError(f"{name} is not what zoo import writes; import the model again") from error
        self._pieces = LibraryTokenizer(pieces, name)
        self._opened: tuple[Any, Any, Any] | None = None

    def _moses(self) -> tuple[Any, Any, Any]:
        """Returns normalizer, tokenizer and detokenizer of the language, opened at the first use."""
        if self._opened is None:
            with requires("text of a model with Moses' words", "int8-zoo[moses]"):
                import sacremoses
            normalizer = sacremoses.MosesPunctNormalizer(
                self._language, pre_replace_unicode_punct=True, post_remove_control_chars=True
            )
            self._opened = (
                normalizer,
                sacremoses.MosesTokenizer(self._language),
                sacremoses.MosesDetokenizer(self._language),
            )
        return self._opened

    def tokenize(self, text: str) -> list[str]:
        """Splits a text into pieces.

        Args:
            text: The text.

        Returns:
            The pieces.
        """
        normalizer, tokenizer, _ = self._moses()
        normal = normalizer.normalize(text.lower() if self._lower else text)
        return self._pieces.pieces_of(tokenizer.tokenize(normal, aggressive_dash_splits=True, escape=True))

    def detokenize(self, pieces: list[str]) -> str:
        """Joins pieces to a text.

        Args:
            pieces: The pieces.

        Returns:
            The text.
        """
        words = "".join(pieces).replace(WORD_END, " ").split()
        return str(self._moses()[2].detokenize(words))


class _WithoutFile:
    """A tokenizer that needs no file."""

    def __init__(self, content: bytes, name: str) -> None:
        pass


class ByteTokenizer(_WithoutFile):
    """Tokenizer of the bytes of UTF-8 (ByT5); it has no file."""

    def tokenize(self, text: str) -> list[str]:
        """Splits a text into pieces.

        Args:
            text: The text.

        Returns:
            The pieces, `<0x00>` to `<0xFF>`.
        """
        return [f"<0x{byte:02X}>" for byte in text.encode("utf-8", "ignore")]

    def detokenize(self, pieces: list[str]) -> str:
        """Joins pieces to a text.

        Args:
            pieces: The pieces.

        Returns:
            The text; bytes that are no UTF-8 are left out.
        """
        codes = [int(piece[3:5], 16) for piece in pieces if piece.startswith("<0x")]
        return bytes(codes).decode("utf-8", "ignore").strip()


class WhitespaceTokenizer(_WithoutFile):
    """Whitespace tokenizer of text that was tokenized before; it has no file."""

    def tokenize(self, text: str) -> list[str]:
        """Splits a text into pieces.

        Args:
            text: The text.

        Returns:
            The pieces.
        """
        return text.split()

    def detokenize(self, pieces: list[str]) -> str:
        """Joins pieces to a text.

        Args:
            pieces: The pieces.

        Returns:
            The text.
        """
        return " ".join(pieces)


# {name: tokenizer; it takes content and name of its file}
TOKENIZERS: dict[str, Callable[[bytes, str], Any]] = {
    "sentencepiece": SentencePieceTokenizer,
    "tokenizers": LibraryTokenizer,
    "moses": MosesTokenizer,
    "words": WhitespaceTokenizer,
    "bytes": ByteTokenizer,
}
