"""Readers of parallel text files."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError
from pipelines.data.text_files import decoded, read_lines
from zoo.training.runs import load_dataset

HELD_OUT = ("validation", "val", "valid", "dev", "test")  # splits of a data set, in order of preference
MAX_WARNINGS = 20  # errors that are reported one by one

Pair = tuple[str, str]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Faults(Counter[str]):
    """Counts of dropped lines or pairs by reason; the first `MAX_WARNINGS` are stored verbatim."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def add(self, reason: str, location: str = "") -> None:
        """Counts a dropped line.

        Args:
            reason: The reason.
            location: File and line, for messages.
        """
        self[reason] += 1
        if location and len(self.shown) < MAX_WARNINGS:
            self.shown.append(f"{location}: {reason}")


def sources(data: Any) -> list[str]:
    """Lists the sources of parallel text.

    Args:
        data: A path or hub id, or a list of them.

    Returns:
        The paths and hub ids.

    Raises:
        RequestError: There are none.
    """
    names = [
        os.fspath(source)
        for source in (data if isinstance(data, list | tuple) else [data])
        if isinstance(source, str | os.PathLike)
    ]
    if not names:
        raise RequestError("found no parallel text; name it with --data: a file of source TAB target, or SOURCE,TARGET")
    return names


def read_pairs(
    data: Any, languages: str = "", *, held_out: bool = False, on_error: str = "raise", faults: Faults | None = None
) -> Iterator[Pair]:
    """Reads the pairs of every line, without line ends.

    Args:
        data: A source or a list of sources: "SOURCE,TARGET" (two files of equally many lines), a file of source TAB
            target (further columns are ignored), plain or .gz, a .zip with such a file, a folder that `datasets` wrote,
            or the hub id org/name of a data set with columns of `languages`, or such keys in its column "translation".
        languages: "source-target", such as "en-de".
        held_out: Whether to read the validation or test split of data sets; other sources have no splits.
        on_error: "raise" stops at the first line that is no pair of UTF-8 texts, "skip" counts it in `faults`.
        faults: Counts of skipped lines.

    Yields:
        Source and target.

    Raises:
        RequestError: A source cannot be read; the message has the line's number.
    """
    for source in sources(data):
        for number, parsed in enumerate(_raw_pairs(source, languages, held_out), 1):
            if isinstance(parsed, tuple):
                yield parsed
            elif on_error == "raise":
                raise RequestError(
                    f"{source}, line {number}: {parsed}; repair it, or leave such lines out with --on-error skip"
                )
            elif faults is not None:
                faults.add(parsed, f"{source}, line {number}")


def _raw_pairs(source: str, languages: str, held_out: bool) -> Iterator[Pair | str]:
    """Yields pairs, and for an invalid line the reason."""
    path = Path(source)
    if path.is_dir():
        return _dataset(source, languages, held_out, lambda datasets: datasets.load_from_disk(source))
    if path.is_file():
        return _columns(path)
    first, comma, second = source.partition(",")
    if comma and Path(first).is_file() and Path(second).is_file():
        return _side_by_side(Path(first), Path(second))
    if _HUB_ID.fullmatch(source) and not source.startswith("."):
        from pipelines.core.settings import offline

        if offline():
            raise RequestError(f"found no file {source}, and ZOO_OFFLINE forbids to look for it on the hub")
        return _dataset(source, languages, held_out, lambda datasets: datasets.load_dataset(source))
    raise RequestError(
        f"found no {source}; expected a file of source TAB target, two files SOURCE,TARGET, either of them plain or "
        ".gz, a .zip, a folder "
        "written by datasets, or the hub id org/name of a data set"
    )


def _columns(path: Path) -> Iterator[Pair | str]:
    for line in _table_in(path) if path.suffix == ".zip" else read_lines(path):
        if line is None:
            yield "not UTF-8"
        elif "\t" not in line:
            yield "no TAB between source and target"
        else:
            source, target, *_ = line.split("\t")
            yield source, target


def _table_in(path: Path) -> Iterator[str | None]:
    """Yields the lines of the only member of a .zip whose first line has a TAB."""
    try:
        archive = zipfile.ZipFile(path)
        tables = [
            name for name in archive.namelist() if not name.endswith("/") and b"\t" in archive.open(name).readline()
        ]
        if len(tables) == 1:
            with archive.open(tables[0]) as file:
                yield from decoded(file)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RequestError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(tables) != 1:
        raise RequestError(
            f"found {len(tables)} files of source TAB target in {path}, expected one; unpack it and name the file"
        )


def _side_by_side(first: Path, second: Path) -> Iterator[Pair | str]:
    with closing(read_lines(first)) as left, closing(read_lines(second)) as right:
        nothing = object()
        while True:
            source, target = next(left, nothing), next(right, nothing)
            if source is nothing and target is nothing:
                return
            if source is nothing or target is nothing:
                raise RequestError(
                    f"found another number of lines in {first} than in {second}; expected translations line by line"
                )
            yield (source, target) if isinstance(source, str) and isinstance(target, str) else "not UTF-8"


def _dataset(name: str, languages: str, held_out: bool, load: Callable[[Any], Any]) -> Iterator[Pair | str]:
    dataset = load_dataset(name, load)
    if isinstance(dataset, dict):
        names = [split for split in (HELD_OUT if held_out else ("train",)) if split in dataset]
        if not names:
            return
        dataset = dataset[names[0]]
    elif held_out:
        return
    source, _, target = languages.partition("-")
    for row in dataset:
        texts = row.get("translation", row)
        if not isinstance(texts.get(source), str) or not isinstance(texts.get(target), str):
            raise RequestError(
                f"found {', '.join(texts)} in {name}, expected {languages or 'two languages'}; name them: --set "
                "languages=en-de"
            )
        yield texts[source], texts[target]
