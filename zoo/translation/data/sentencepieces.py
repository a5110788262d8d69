"""Opens models of sentencepiece."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.core.errors import RequestError, one_line

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

TRIAL = "A text: é ½ ﬁ １ 漢字 🙂"  # tokenized when a tokenizer is opened


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
    if not content:  # which sentencepiece takes for a model that is set later
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
