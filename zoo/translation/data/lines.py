"""Lines of text to translate, and the files of their translations."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.core.files import replacing
from pipelines.data.tables import FORMATS, writing
from pipelines.data.text_files import STDIN
from zoo.translation.data.parallel_text import Tokens

EXAMPLES = (
    "A man in a red jacket is riding a bicycle down the street.",
    "Two children are playing with a dog on the beach.",
    "A woman sits at a table and reads a newspaper.",
    "People wait for the train on a crowded platform.",
    "An old man is selling fruit at the market.",
)


class Line(NamedTuple):
    """A line of input.

    Attributes:
        where: Its place, for messages.
        text: The text.
        fault: The reason why it cannot be translated; "" if it can.
        parts: Tokens of the sentences that it is translated in.
    """

    where: str
    text: str
    fault: str
    parts: tuple[Tokens, ...]


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
