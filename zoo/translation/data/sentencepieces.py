"""Opens models of sentencepiece."""

from __future__ import annotations

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
