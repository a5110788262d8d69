"""Lines of text to translate, and the files of their translations."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.core.files import replacing
from pipelines.data.tables import FORMATS, writing
from pipelines.data.text_files import STDIN
from zoo.translation.data.parallel_text import Tokens

MAX_NOTES = 8  # messages of a line that are shown
EXAMPLES = (
    "A man in a red jacket is riding a bicycle down the street.",
    "Two children are playing with a dog on the beach.",
    "A woman sits at a table and reads a newspaper.",
    "People wait for the train on a crowded platform.",
    "An old man is selling fruit at the market.",
)


Piece = str | tuple[tuple[float, str], ...]


class Line(NamedTuple):
    """A line of input.

    Attributes:
        where: Its place, for messages.
        text: The text.
        fault: The reason why it cannot be translated; "" if it can.
        parts: Tokens of the sentences that it is translated in.
        pieces: Its translation in order: text that is copied; or for the next of `parts` the words to insert into its
            translation, each with its place from 0 (first) to 1 (last).
        notes: What was left out or copied.
        prefix: Text that its translation begins with.
    """

    where: str
    text: str
    fault: str
    parts: tuple[Tokens, ...]
    pieces: tuple[Piece, ...] = ()
    notes: tuple[str, ...] = ()
    prefix: str = ""

    def join(self, translations: Iterable[str]) -> str:
        """Joins the translation of the line.

        Args:
            translations: The translations of its `parts`.

        Returns:
            The text.
        """
        following, texts = iter(translations), []
        for piece in self.pieces:
            if isinstance(piece, str):
                texts.append(piece)
                continue
            words = next(following).split(" ")
            count = len(words)
            for place, copied in reversed(piece):
                words.insert(round(place * count), copied)
            texts.append(" ".join(words))
        return " ".join(texts)

    @property
    def untranslated(self) -> str:
        """What was left out or copied, as one message; "" if nothing was."""
        more = len(self.notes) - MAX_NOTES
        return "; ".join(self.notes[:MAX_NOTES]) + (f"; and {more} more" if more > 0 else "")


@contextlib.contextmanager
def translation_writer(output: str | Path, scores: bool, numbers: bool) -> Iterator[Callable[..., None]]:
    """Context manager that writes translations; see `TranslationPipeline.run`.

    Args:
        output: A text file, "-" for stdout, or a table (.csv, .csv.gz, .jsonl, .parquet).
        scores: Whether scores are written to text.
        numbers: Whether line numbers are written to text.

    Yields:
        A function of line numbers, translations and scores, one list each.
    """
    if str(output).lower().endswith(FORMATS):
        with writing(output, {"line": np.int64, "translation": str, "score": np.float32}) as table:
            yield lambda *rows: table(
                {"line": np.array(rows[0]), "translation": rows[1], "score": np.array(rows[2], np.float32)}
            )
        return
    with contextlib.ExitStack() as stack:
        if str(output) == STDIN:
            file: Any = sys.stdout.buffer
        else:
            file = stack.enter_context(stack.enter_context(replacing(output)).open("wb"))

        def write(found: list[int], texts: list[str], values: list[float]) -> None:
            for line, text, value in zip(found, texts, values, strict=True):
                parts = [str(line)] * numbers + [f"{value:.4f}"] * scores + [text]
                file.write(("\t".join(parts) + "\n").encode())

        yield write
        file.flush()
