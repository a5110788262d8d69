"""Lines of text to translate, and the files of their translations."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.core.files import replacing
from pipelines.data.tables import FORMATS, writing
from pipelines.data.text_files import STDIN
from zoo.translation.data.markup import Markup
from zoo.translation.data.tokens import Tokens

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
        texts: Text of each of `parts`.
        markup: Tags and placeholders to write into the translation; None: none.
    """

    where: str
    text: str
    fault: str
    parts: tuple[Tokens, ...]
    pieces: tuple[Piece, ...] = ()
    notes: tuple[str, ...] = ()
    prefix: str = ""
    texts: tuple[str, ...] = ()
    markup: Markup | None = None

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
        """A message with the omitted and copied text; "" if there is none."""
        more = len(self.notes) - MAX_NOTES
        return "; ".join(self.notes[:MAX_NOTES]) + (f"; and {more} more" if more > 0 else "")


class Translation(NamedTuple):
    """A translation of a line.

    Attributes:
        text: The text.
        score: Mean score of its tokens.
        alignment: Pairs "i-j" of source word i and target word j, counted from 0, words between blanks (the format of
            Pharaoh); None if it is not asked for.
        word_scores: Log probability of each word between blanks; None if they are not asked for.
    """

    text: str
    score: float
    alignment: str | None = None
    word_scores: list[float] | None = None

    def columns(self) -> dict[str, Any]:
        """Returns its values by the names that results and tables have."""
        columns: dict[str, Any] = {"translation": self.text, "score": float(np.float32(self.score))}
        if self.alignment is not None:
            columns["alignment"] = self.alignment
        if self.word_scores is not None:
            columns["word_scores"] = self.word_scores
        return columns


def score_text(scores: Sequence[float]) -> str:
    """Writes the scores of words, as files and tables have them.

    Args:
        scores: The scores.

    Returns:
        The scores, separated by blanks.
    """
    return " ".join(f"{score:.4f}" for score in scores)


@contextlib.contextmanager
def translation_writer(
    output: str | Path, scores: bool, numbers: bool, alignments: bool = False, word_scores: bool = False
) -> Iterator[Callable[[Sequence[int], Sequence[Translation]], None]]:
    """Context manager that writes translations; see `TranslationPipeline.run`.

    Args:
        output: A text file, "-" for stdout, or a table (.csv, .csv.gz, .jsonl, .parquet).
        scores: Whether scores are written to text.
        numbers: Whether line numbers are written to text.
        alignments: Whether translations have an alignment.
        word_scores: Whether translations have scores of words.

    Yields:
        A function of line numbers and translations.
    """
    if str(output).lower().endswith(FORMATS):
        kinds = {"line": np.int64, "translation": str, "score": np.float32}
        kinds |= dict.fromkeys(("alignment",) * alignments + ("word_scores",) * word_scores, str)
        with writing(output, kinds) as table:

            def add(lines: Sequence[int], translations: Sequence[Translation]) -> None:
                columns: dict[str, Any] = {
                    "line": np.array(lines),
                    "translation": [translation.text for translation in translations],
                }
                columns["score"] = np.array([translation.score for translation in translations], np.float32)
                if alignments:
                    columns["alignment"] = [translation.alignment or "" for translation in translations]
                if word_scores:
                    columns["word_scores"] = [score_text(translation.word_scores or ()) for translation in translations]
                table(columns)

            yield add
        return
    with contextlib.ExitStack() as stack:
        if str(output) == STDIN:
            file: Any = sys.stdout.buffer
        else:
            file = stack.enter_context(stack.enter_context(replacing(output)).open("wb"))

        def write(lines: Sequence[int], translations: Sequence[Translation]) -> None:
            for line, translation in zip(lines, translations, strict=True):
                parts = [str(line)] * numbers + [f"{translation.score:.4f}"] * scores + [translation.text]
                parts += [translation.alignment or ""] * alignments + [
                    score_text(translation.word_scores or ())
                ] * word_scores
                file.write(("\t".join(parts) + "\n").encode())

        yield write
        file.flush()
