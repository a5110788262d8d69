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
from pipelines.models.protocols import ShardableFiles, ShardableRows
from zoo.distributed import remote_files

MIN_PART_BYTES = 32 << 20  # of text
MIN_PART_ROWS = 1 << 19  # of row groups
IMAGES_PER_PART = 512
# options of a Parquet file that is read once
PARQUET_OPTIONS: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}


@dataclass(frozen=True)
class Part:
    """A part of the input; the attributes are keys of the plan file.

    Attributes:
        place: Path or URL of the file; for "files", the folder of relative names, or "".
        kind: "file" for a whole file, "bytes" for a range of bytes, "groups" for a range of row groups of a Parquet
            file, "files" for `images`.
        begin: Start of the range.
        end: End of the range, exclusive.
        head: Length of the header of the file in bytes, which "bytes" copies in front of the range.
        first: Position of its first row in the whole input; None if rows have no positions.
        names: Columns, if the first row of the log alone has them.
        delimiter: Delimiter of such a log; "" for JSON lines.
        with_label: Whether rows have a label, if the first row of the whole input decides that.
        images: Names of the images.
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
        """Returns the attributes as plain values."""
        return asdict(self)

    def image_paths(self) -> list[str]:
        """Returns paths and URLs of the images."""
        return [image if remote_files.is_url(image) else str(Path(self.place, image)) for image in self.images]


def split_inputs(pipeline: Pipeline, inputs: Sequence[str], options: Mapping[str, Any]) -> list[Part]:
    """Splits the input into parts: fixed numbers of images, blocks of rows of large files, or entire files.

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
        images = [image for name in inputs for image in _images(name)]
        # URLs and absolute paths need no folder, so that their plan is the same wherever it is made
        relative = any(not remote_files.is_url(name) and not Path(name).is_absolute() for name in images)
        folder = str(Path.cwd()) if relative else ""
        return [
            Part(folder, "files", images=images[i : i + IMAGES_PER_PART])
            for i in range(0, len(images), IMAGES_PER_PART)
        ]
    parts: list[Part] = []
    row = 0
    with progress("finding rows") as advance:
        for path in _files(pipeline, inputs):
            try:
                file_parts = _split_file(pipeline, path, options)
            except RequestError as error:
                raise RequestError(str(error) if path in str(error) else f"{path}: {error}") from error
            except (EOFError, OSError, zlib.error) as error:  # a damaged .gz
                raise RequestError(f"{path} cannot be read: {one_line(error)}") from error
            for part, rows in file_parts:
                if rows == 0 and pipeline.PARTS != "lines":  # a part without rows cannot be scored alone
                    continue
                parts.append(replace(part, first=row if rows is not None else None))
                row += rows or 0
                advance(rows or 0)
    if not parts:
        raise RequestError(f"found no row in {', '.join(inputs)}; expected at least one")
    label = next((part.with_label for part in parts if part.with_label is not None), None)
    return [replace(part, with_label=label) for part in parts]


def _files(pipeline: Pipeline, inputs: Sequence[str]) -> list[str]:
    """The files of the inputs, each once; those of rows in the order of a single process."""
    files = remote_files.expand(inputs)
    if not isinstance(pipeline, ShardableRows):
        return files
    lists = [remote_files.expand([name]) if remote_files.is_url(name) else pipeline.files(name) for name in inputs]
    return list(dict.fromkeys(path for paths in lists for path in paths))


def _images(name: str) -> list[str]:
    """The images of an input, named as in the results of a single process."""
    if remote_files.is_url(name):
        return _remote_images(name)
    images = [str(image) for image in listed(name)]
    if name != "-" and Path(name).is_dir():
        return images
    return [str(Path(path)) for image in images for path in remote_files.expand([image])]


def _remote_images(url: str) -> list[str]:
    """The files of a URL; of a folder, those with the suffixes of images."""
    files = remote_files.expand([url])
    if files == [url] or glob.has_magic(url):
        return files
    if not (images := [file for file in files if PurePosixPath(file).suffix.lower() in SUFFIXES]):
        raise RequestError(f"found no images in {url}; expected files with the suffixes {' '.join(SUFFIXES)}")
    return images


def _split_file(pipeline: Pipeline, path: str, options: Mapping[str, Any]) -> list[tuple[Part, int | None]]:
    """The parts of one file, and their numbers of rows; None if rows have no positions."""
    whole = Part(path)
    if pipeline.PARTS == "file":
        return [(whole, None)]
    if pipeline.PARTS == "texts":
        with open_part(pipeline, whole) as local:
            return [(whole, pipeline.count_rows(local, **options))]
    form, piece = TextForm(), replace(whole, kind="bytes")
    with remote_files.open_file(path) as stream:
        compressed = Path(path).suffix == ".gz"  # as translation does; logs are recognized by their content
        if isinstance(pipeline, ShardableRows):
            magic = stream.read(4)
            stream.seek(0)
            if magic == b"PAR1":
                return _split_parquet(pipeline, path, stream)
            compressed = magic[:2] == b"\x1f\x8b"
        text: Any = gzip.GzipFile(fileobj=stream) if compressed else stream
        if isinstance(pipeline, ShardableRows):
            form = pipeline.text_form(text)
            text.seek(0)
            log = pipeline.log_of_first_row(text)
            text.seek(0)
            whole = replace(whole, with_label=pipeline.label_in(text))
            text.seek(0)
            names, delimiter = (log.columns, log.delimiter) if log else ((), "")
            piece = replace(whole, kind="bytes", names=names, delimiter=delimiter)
        blocks = pieces(text, form, MIN_PART_BYTES)
        if blocks is None:
            with open_part(pipeline, whole) as local:
                return [(whole, pipeline.count_rows(local))]
        if compressed or len(blocks) < 2:
            return [(whole, sum(block.rows for block in blocks))]
        head = blocks[0].begin
        return [(replace(piece, begin=block.begin, end=block.end, head=head), block.rows) for block in blocks]


def _split_parquet(pipeline: ShardableRows, path: str, stream: Any) -> list[tuple[Part, int | None]]:
    try:
        file = pq.ParquetFile(stream)
        metadata, columns = file.metadata, file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"cannot read {path} as Parquet: {one_line(error)}") from error
    whole = Part(path, with_label=pipeline.label_in(columns=columns))
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    parts: list[tuple[Part, int | None]] = []
    begin = rows = 0
    for end, size in enumerate(sizes, 1):
        rows += size
        if rows >= MIN_PART_ROWS or end == len(sizes):
            parts.append((replace(whole, kind="groups", begin=begin, end=end), rows))
            begin, rows = end, 0
    return parts if len(parts) > 1 else [(whole, rows) for _, rows in parts]


@contextmanager
def open_part(pipeline: Pipeline, part: Part) -> Iterator[Any]:
    """Opens the input of `Pipeline.run` for a part; local copies are removed at the end of the block.

    Args:
        pipeline: Pipeline of the model.
        part: Part of the input.

    Yields:
        The input.

    Raises:
        RequestError: The file cannot be read, or all images of the part are missing.
    """
    with tempfile.TemporaryDirectory(prefix="zoo-part-") as folder:
        # folders NAME=VALUE, which are columns of logs
        partitions = [name for name in Path(part.place).parts[:-1] if "=" in name]
        local = Path(folder, *partitions, Path(part.place).name)
        local.parent.mkdir(parents=True, exist_ok=True)
        if part.kind == "files":
            paths = part.image_paths()
            if not any(remote_files.is_url(path) or os.path.exists(path) for path in paths):  # noqa: PTH110
                raise RequestError(f"found no {paths[0]} here; run this where the images of the plan are")
            assert isinstance(pipeline, ShardableFiles)
            readers = [
                partial(remote_files.read_bytes, path) if remote_files.is_url(path) else partial(read, path, name)
                for name, path in zip(part.images, paths, strict=True)
            ]
            yield pipeline.items(zip(part.images, readers, strict=True))
        elif part.kind == "bytes":
            remote_files.copy(part.place, local, part.head, part.begin, part.end)
            if part.names and isinstance(pipeline, ShardableRows):  # the line with the columns is in another part
                yield pipeline.part_of_log(local, part.delimiter, part.names)
            else:
                yield local
        elif part.kind == "groups":
            with (
                remote_files.open_file(part.place) as stream,
                pq.ParquetFile(stream) as file,
                pq.ParquetWriter(local, file.schema_arrow, **PARQUET_OPTIONS) as writer,
            ):
                for batch in file.iter_batches(row_groups=range(part.begin, part.end)):
                    writer.write_batch(batch)
            yield local
        else:
            yield remote_files.copy(part.place, local) if remote_files.is_url(part.place) else part.place
