"""Inputs cut into parts: the same ones whoever cuts them, each to be scored alone, anywhere, in any order."""

from __future__ import annotations

import glob
import gzip
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.core.errors import RequestError, one_line
from pipelines.core.progress import progress
from pipelines.data.images import SUFFIXES, listed
from pipelines.data.text import TextForm, pieces
from pipelines.models.pipeline import Pipeline
from zoo.clicks.logs import Log
from zoo.clicks.predict import ClickPipeline
from zoo.images.data import Item
from zoo.scoring import places

BYTES = 32 << 20  # of text, at least, in a part
ROWS = 1 << 19  # of row groups, at least, in a part
PLAIN: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}  # read once, soon
FILES = 512  # images in a part


@dataclass(frozen=True)
class Part:
    """Some of the input. kind: "file", a whole one; "bytes" or "groups", those from `begin` to below `end` of a file
    (behind the `head` bytes of its header) or of a Parquet file's row groups; "files", images by their paths, which
    stand in `place` a line each. first: the position of its first row in the whole input; None where rows have none.
    names: of JSON lines, the columns, which the file's first line names alone.
    """

    place: str
    kind: str = "file"
    begin: int = 0
    end: int = 0
    head: int = 0
    first: int | None = None
    names: Sequence[str] = ()

    def __str__(self) -> str:
        if self.kind == "files":
            return f"{self.place.count(chr(10)) + 1} images"
        return self.place if self.kind == "file" else f"{self.place}, {self.kind} {self.begin} to {self.end}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def cut(pipeline: Pipeline, inputs: Sequence[str]) -> list[Part]:
    """The parts of `inputs` (see `places.expand`) as the model of this pipeline takes them: images by their number,
    rows of text and of Parquet where they are large, every other file whole.

    Text that has rows is read once. Raises RequestError for what cannot be read.
    """
    if pipeline.PARTS == "files":
        images = [
            str(image) for each in inputs for image in (_remote_images(each) if places.is_url(each) else listed(each))
        ]
        return [Part("\n".join(images[at : at + FILES]), "files") for at in range(0, len(images), FILES)]
    parts: list[Part] = []
    counted = pipeline.PARTS == "rows"
    row = 0
    with progress("finding rows") as advance:
        for place in places.expand(inputs):
            try:
                some = _of_file(pipeline, place)
            except RequestError as error:
                raise RequestError(f"{place}: {error}") from error
            except (EOFError, OSError, zlib.error) as error:  # a damaged .gz
                raise RequestError(f"{place} cannot be read: {one_line(error)}") from error
            for found, rows in some:
                parts.append(Part(**{**found.to_json(), "first": row if counted else None}))
                row += rows
                advance(rows)
    return parts


def _remote_images(place: str) -> list[str]:
    """The images of a URL: what it names, in a folder those with the suffixes of images."""
    found = places.expand([place])
    if found == [place] or glob.has_magic(place):
        return found
    if not (images := [each for each in found if PurePosixPath(each).suffix.lower() in SUFFIXES]):
        raise RequestError(f"found no images in {place}; wanted files with the suffixes {' '.join(SUFFIXES)}")
    return images


def _of_file(pipeline: Pipeline, place: str) -> list[tuple[Part, int]]:
    """The parts of one file, and how many rows each has."""
    if not isinstance(pipeline, ClickPipeline) and pipeline.PARTS != "lines":
        return [(Part(place), 0)]
    with places.opened(place) as stream:
        magic = stream.read(4)
        stream.seek(0)
        if magic == b"PAR1":
            return _of_parquet(place, stream)
        packed = magic[:2] == b"\x1f\x8b"
        if packed and not isinstance(pipeline, ClickPipeline):
            return [(Part(place), 0)]
        text: Any = gzip.GzipFile(fileobj=stream) if packed else stream
        form = pipeline.text_form(text) if isinstance(pipeline, ClickPipeline) else TextForm()
        text.seek(0)
        names = pipeline.names(text) if isinstance(pipeline, ClickPipeline) else ()
        text.seek(0)
        some = pieces(text, form, BYTES)
        if some is None:
            assert isinstance(pipeline, ClickPipeline)
            with reading(Part(place)) as path:
                return [(Part(place), pipeline.count_rows(path))]
        if packed or len(some) < 2:
            return [(Part(place), sum(each.rows for each in some))]
        head = some[0].begin
        return [(Part(place, "bytes", each.begin, each.end, head, names=names), each.rows) for each in some]


def _of_parquet(place: str, stream: Any) -> list[tuple[Part, int]]:
    try:
        about = pq.ParquetFile(stream).metadata
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"cannot read {place} as Parquet: {one_line(error)}") from error
    sizes = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
    found: list[tuple[Part, int]] = []
    begin = rows = 0
    for at, size in enumerate(sizes, 1):
        rows += size
        if rows >= ROWS or at == len(sizes):
            found.append((Part(place, "groups", begin, at), rows))
            begin, rows = at, 0
    return found if len(found) > 1 else [(Part(place), rows) for _, rows in found]


@contextmanager
def reading(part: Part) -> Iterator[Any]:
    """What `Pipeline.run` takes for a part; copies go with the block."""
    with tempfile.TemporaryDirectory(prefix="zoo-part-") as folder:
        copy = Path(folder) / Path(part.place.splitlines()[0]).name
        if part.kind == "files":
            names = part.place.split("\n")
            yield [
                Item(each, "", "", partial(places.content, each)) if places.is_url(each) else Path(each)
                for each in names
            ]
        elif part.kind == "bytes":
            places.copy(part.place, copy, part.head, part.begin, part.end)
            yield Log(copy, "jsonl", "", tuple(part.names)) if part.names else copy
        elif part.kind == "groups":
            with (
                places.opened(part.place) as stream,
                pq.ParquetFile(stream) as file,
                pq.ParquetWriter(copy, file.schema_arrow, **PLAIN) as writer,
            ):
                for batch in file.iter_batches(row_groups=range(part.begin, part.end)):
                    writer.write_batch(batch)
            yield copy
        else:
            yield places.copy(part.place, copy) if places.is_url(part.place) else part.place
