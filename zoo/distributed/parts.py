"""Deterministic splitting of inputs into parts that are scored independently."""

from __future__ import annotations

import glob
import gzip
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.core.errors import RequestError, one_line
from pipelines.core.progress import progress
from pipelines.data.images import SUFFIXES, listed, read
from pipelines.data.text import TextForm, pieces
from pipelines.models.pipeline import Pipeline
from pipelines.models.sharding import ShardableFiles, ShardableRows
from zoo.distributed import remote_files

BYTES = 32 << 20  # of text, at least, in a part
ROWS = 1 << 19  # of row groups, at least, in a part
PLAIN: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}  # read once, soon
FILES = 512  # images in a part


@dataclass(frozen=True)
class Part:
    """Some of the input. kind: "file", a whole one; "bytes" or "groups", those from `begin` to below `end` of a file
    (behind the `head` bytes of its header) or of a Parquet file's row groups; "files", the `images` of these names,
    relative ones in the folder `place`. first: the position of its first row in the whole input; None where rows have
    none. names: of a log whose first row alone tells them, the columns: of JSON lines or, with a `delimiter`, of rows.
    with_label: whether rows have a label, which the input's first row tells alone.
    """

    place: str
    kind: str = "file"
    begin: int = 0
    end: int = 0
    head: int = 0
    first: int | None = None
    names: Sequence[str] = ()
    delimiter: str = ""
    with_label: bool | None = None
    images: Sequence[str] = ()

    def __str__(self) -> str:
        if self.kind == "files":
            return f"{len(self.images)} images"
        return self.place if self.kind == "file" else f"{self.place}, {self.kind} {self.begin} to {self.end}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def opened(self) -> list[str]:
        """Where its images lie."""
        return [each if remote_files.is_url(each) else str(Path(self.place, each)) for each in self.images]


def cut(pipeline: Pipeline, inputs: Sequence[str], options: Mapping[str, Any]) -> list[Part]:
    """Splits the input into parts: fixed numbers of images, blocks of rows of large files, or whole files.

    A text file with rows is read once.

    Args:
        pipeline: Pipeline of the model.
        inputs: Paths, glob patterns, folders or URLs (see `zoo.distributed.remote_files.expand`).
        options: Options of `Pipeline.run`.

    Returns:
        The parts, in input order.

    Raises:
        RequestError: An input cannot be read, or there is nothing to score.
    """
    if pipeline.PARTS == "files":
        images = [image for each in inputs for image in _images(each)]
        # a plan of URLs is the same wherever it is made
        relative = any(not remote_files.is_url(each) and not Path(each).is_absolute() for each in images)
        folder = str(Path.cwd()) if relative else ""
        return [Part(folder, "files", images=images[at : at + FILES]) for at in range(0, len(images), FILES)]
    parts: list[Part] = []
    row = 0
    with progress("finding rows") as advance:
        for place in remote_files.expand(inputs):
            try:
                some = _of_file(pipeline, place, options)
            except RequestError as error:
                raise RequestError(str(error) if place in str(error) else f"{place}: {error}") from error
            except (EOFError, OSError, zlib.error) as error:  # a damaged .gz
                raise RequestError(f"{place} cannot be read: {one_line(error)}") from error
            for found, rows in some:
                if rows == 0 and pipeline.PARTS != "lines":  # alone it would be refused, beside others it is nothing
                    continue
                parts.append(replace(found, first=row if rows is not None else None))
                row += rows or 0
                advance(rows or 0)
    if not parts:
        raise RequestError(f"found no row in {', '.join(inputs)}; wanted at least one")
    label = next((each.with_label for each in parts if each.with_label is not None), None)
    return [replace(each, with_label=label) for each in parts]


def _images(place: str) -> list[str]:
    """The images that an input names, as one process would name them in its results."""
    if remote_files.is_url(place):
        return _remote_images(place)
    found = [str(each) for each in listed(place)]
    if place != "-" and Path(place).is_dir():
        return found
    return [str(Path(each)) for name in found for each in remote_files.expand([name])]


def _remote_images(place: str) -> list[str]:
    """The images of a URL: what it names, in a folder those with the suffixes of images."""
    found = remote_files.expand([place])
    if found == [place] or glob.has_magic(place):
        return found
    if not (images := [each for each in found if PurePosixPath(each).suffix.lower() in SUFFIXES]):
        raise RequestError(f"found no images in {place}; wanted files with the suffixes {' '.join(SUFFIXES)}")
    return images


def _of_file(pipeline: Pipeline, place: str, options: Mapping[str, Any]) -> list[tuple[Part, int | None]]:
    """The parts of one file, and how many rows each has, None where rows have no positions."""
    whole = Part(place)
    if pipeline.PARTS == "file":
        return [(whole, None)]
    if pipeline.PARTS == "texts":
        with reading(pipeline, whole) as path:
            return [(whole, pipeline.count_rows(path, **options))]
    form, piece = TextForm(), replace(whole, kind="bytes")
    with remote_files.opened(place) as stream:
        packed = Path(place).suffix == ".gz"  # which tells a translator
        if isinstance(pipeline, ShardableRows):
            magic = stream.read(4)
            stream.seek(0)
            if magic == b"PAR1":
                return _of_parquet(pipeline, place, stream)
            packed = magic[:2] == b"\x1f\x8b"
        text: Any = gzip.GzipFile(fileobj=stream) if packed else stream
        if isinstance(pipeline, ShardableRows):
            form = pipeline.text_form(text)
            text.seek(0)
            log = pipeline.told_by_first(text)
            text.seek(0)
            whole = replace(whole, with_label=pipeline.label_in(text))
            text.seek(0)
            names, delimiter = (log.columns, log.delimiter) if log else ((), "")
            piece = replace(whole, kind="bytes", names=names, delimiter=delimiter)
        some = pieces(text, form, BYTES)
        if some is None:
            with reading(pipeline, whole) as path:
                return [(whole, pipeline.count_rows(path))]
        if packed or len(some) < 2:
            return [(whole, sum(each.rows for each in some))]
        head = some[0].begin
        return [(replace(piece, begin=each.begin, end=each.end, head=head), each.rows) for each in some]


def _of_parquet(pipeline: ShardableRows, place: str, stream: Any) -> list[tuple[Part, int | None]]:
    try:
        file = pq.ParquetFile(stream)
        about, columns = file.metadata, file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"cannot read {place} as Parquet: {one_line(error)}") from error
    whole = Part(place, with_label=pipeline.label_in(columns=columns))
    sizes = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
    found: list[tuple[Part, int | None]] = []
    begin = rows = 0
    for at, size in enumerate(sizes, 1):
        rows += size
        if rows >= ROWS or at == len(sizes):
            found.append((replace(whole, kind="groups", begin=begin, end=at), rows))
            begin, rows = at, 0
    return found if len(found) > 1 else [(whole, rows) for _, rows in found]


@contextmanager
def reading(pipeline: Pipeline, part: Part) -> Iterator[Any]:
    """Opens the input of `Pipeline.run` for a part; local copies are removed at the end of the block.

    Args:
        pipeline: Pipeline of the model.
        part: Part of the input.

    Raises:
        RequestError: All images of the part are missing.
    """
    with tempfile.TemporaryDirectory(prefix="zoo-part-") as folder:
        copy = Path(folder) / Path(part.place).name
        if part.kind == "files":
            opened = part.opened()
            if not any(remote_files.is_url(each) or os.path.exists(each) for each in opened):  # noqa: PTH110
                raise RequestError(f"found no {opened[0]} here; run this where the images of the plan are")
            assert isinstance(pipeline, ShardableFiles)
            readers = [
                partial(remote_files.content, each) if remote_files.is_url(each) else partial(read, each, name)
                for name, each in zip(part.images, opened, strict=True)
            ]
            yield pipeline.items(zip(part.images, readers, strict=True))
        elif part.kind == "bytes":
            remote_files.copy(part.place, copy, part.head, part.begin, part.end)
            if part.names and isinstance(pipeline, ShardableRows):  # the line with the columns is in another part
                yield pipeline.part_of_log(copy, part.delimiter, part.names)
            else:
                yield copy
        elif part.kind == "groups":
            with (
                remote_files.opened(part.place) as stream,
                pq.ParquetFile(stream) as file,
                pq.ParquetWriter(copy, file.schema_arrow, **PLAIN) as writer,
            ):
                for batch in file.iter_batches(row_groups=range(part.begin, part.end)):
                    writer.write_batch(batch)
            yield copy
        else:
            yield remote_files.copy(part.place, copy) if remote_files.is_url(part.place) else part.place
