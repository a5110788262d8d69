"""Opens sources of rows as streams: plain or gzip text files, stdin, Parquet, and data sets on disk or on the hub.

Folders and patterns stand for their files, see `expand`.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import mark_temporary, starts_with
from pipelines.data.text_files import STDIN, open_text
from zoo.recommenders.data.cell_values import decoded
from zoo.recommenders.data.columns import nested
from zoo.training.runs import datasets

BLOCK = 1 << 19  # bytes a block: it and its arrays stay in the cache, and the overhead a call vanishes
MAX_LINE_BYTES = 16 << 20  # bytes a line
PARQUET = b"PAR1"  # first bytes of a Parquet file
OTHER_FORMATS = {  # first bytes of files that hold no text
    b"PK\3\4": "a zip archive or a workbook of Excel; unzip it, or save it as CSV",
    b"\xd0\xcf\x11\xe0": "a workbook of Excel; save it as CSV",
    b"BZh": "compressed by bzip2; run: bunzip2 FILE",
    b"\xfd7zXZ": "compressed by xz; run: unxz FILE",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; run: unzstd FILE",
    b"ARROW1": "an Arrow (Feather) file; save it as Parquet",
    b"\xff\xff\xff\xff": "an Arrow stream; save it as Parquet",
    b"ORC": "an ORC file; save it as Parquet",
    b"Obj\1": "an Avro file; save it as Parquet",
    b"SQLite format 3": "a database of SQLite; export its table as CSV",
}
_SPOOLED: list[tuple[Any, Any]] = []  # (stdin, its copy)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_FILE_NAME = re.compile(r"\.(tsv|txt|csv|gz|parquet)$", re.IGNORECASE)
_PATTERN = re.compile(r"[*?\[]")
_PARTITION = re.compile(r"([^=]+)=(.*)")  # a folder of a Hive partition: column=value
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_TRANSACTIONS = ("_delta_log", "_temporary", ".hoodie")  # folders of tables whose files are not all valid

Partition = tuple[tuple[str, str | None], ...]  # (column, value) pairs of a path


def expand(source: str | os.PathLike[str]) -> list[tuple[str, Partition]]:
    """Lists the files that a source stands for.

    A folder stands for all files in it and below, a pattern (*, ?, [...], **) for all files and folders that match, in
    natural order (day2 before day10). Empty files, and files and folders whose names begin with "_" or "." are left
    out, such as the _SUCCESS and the checksums that Spark writes. Folders named column=value are Hive partitions.

    Args:
        source: File, folder, pattern, "-", or data set; folders written by `datasets` stand for themselves.

    Returns:
        (path, columns of its Hive partitions); [(source, ())] for a source that is no file.

    Raises:
        RequestError: A folder has no file, or has files of other versions or of an unfinished job; or no file matches.
    """
    name = os.fspath(source)
    if name == "-":
        return [(name, ())]
    path = Path(name)
    if path.is_dir() and not _is_saved(path):
        return [(file, partition(file)) for file in _files(path)]
    if path.exists() or not _PATTERN.search(name):
        return [(name, partition(name) if path.is_file() else ())]
    matches = sorted(glob.glob(name, recursive=True), key=_natural)  # noqa: PTH207 (absolute patterns, too)
    files = [file for match in matches for file in (_files(Path(match)) if Path(match).is_dir() else [match])]
    if not files:
        raise RequestError(f"found no file that matches {name}")
    return [(file, partition(file)) for file in dict.fromkeys(files)]


def require_text(path: Path) -> None:
    """Checks that a file is none of `OTHER_FORMATS`.

    Args:
        path: The file.

    Raises:
        RequestError: It is one.
    """
    if kind := next((text for magic, text in OTHER_FORMATS.items() if starts_with(path, magic)), ""):
        raise RequestError(f"found {path} to be {kind}; expected CSV, TSV, JSON lines (plain or .gz) or Parquet")


def _files(folder: Path) -> list[str]:
    """The files in a folder and below, in natural order."""
    files = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        if unsound := [folder for folder in _TRANSACTIONS if folder in folders]:
            what = "holds an unfinished job" if unsound == ["_temporary"] else "is a table with versions"
            raise RequestError(
                f"found {unsound[0]} in the folder {parent}, which {what}: some of its files may be invalid; expected "
                "a folder of finished files, or name the files"
            )
        folders[:] = [folder for folder in folders if folder[0] not in "_."]
        paths = [Path(parent, name) for name in names if name[0] not in "_."]
        files += [str(path) for path in paths if path.is_file() and path.stat().st_size]
    if not files:
        raise RequestError(
            f"found the folder {folder} without files of rows, expected some, or a folder written by "
            "datasets.save_to_disk"
        )
    return sorted(files, key=_natural)


def _natural(text: str) -> list[tuple[int, str]]:
    """Key that sorts numbers in names by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def partition(path: str) -> Partition:
    """Returns the columns of the Hive partitions in a path.

    Args:
        path: Path of a file; names and values in it are URL-quoted.

    Returns:
        (column, value) pairs; None for a missing value.
    """
    pairs = [(unquote(m[1]), unquote(m[2])) for part in Path(path).parts[:-1] if (m := _PARTITION.fullmatch(part))]
    return tuple({name: None if value in (_NO_VALUE, "") else value for name, value in pairs}.items())


def locate(source: Any) -> tuple[str, str, Any]:
    """Finds a source without opening it.

    Args:
        source: Path, "-" for stdin, or data set on the hub ("org/name"), see `line_reader.read_lines`.

    Returns:
        (name for messages, kind: "text", "parquet", "saved" or "hub", location).

    Raises:
        RequestError: There is no such source.
    """
    if not isinstance(source, str | os.PathLike):
        raise RequestError(f"found {type(source).__name__} among the sources, expected paths only or rows only")
    name = os.fspath(source)
    path = Path(name)
    if name == "-":
        return "stdin", "text", None
    if path.is_dir():
        if _is_saved(path):
            return name, "saved", (path, None)
        raise RequestError(f"found the folder {name}, expected a file or a folder written by datasets.save_to_disk")
    if path.exists():
        return (name, "parquet", (path,)) if _is_parquet(path) else (name, "text", path)
    folder, _, split = name.rpartition(":")
    if folder and _is_saved(Path(folder)):
        return name, "saved", (Path(folder), split)
    if _HUB_ID.fullmatch(name) and not _FILE_NAME.search(name) and not name.startswith("."):
        repository, _, split = name.partition(":")
        return name, "hub", (repository, split)
    raise RequestError(
        f"found no file {name}; expected a file or folder of rows, - for stdin, or a data set of the hub (ORG/NAME)"
    )


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def _is_parquet(path: Path) -> bool:
    if path.suffix == ".parquet" or not path.is_file():  # a pipe can be read only once
        return path.suffix == ".parquet"
    return starts_with(path, PARQUET)


def _read(stream: Any, size: int) -> bytes:
    """Reads `size` bytes; fewer at the end of the stream.

    Makes one system call at a time: `read` on a pipe makes several without checking for Ctrl-C, and a signal between
    two of them would wait for the next bytes.
    """
    parts = []
    while size and (data := stream.read1(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def blocks(name: str, path: Path | None, padding: int = 0) -> Iterator[bytes]:
    """Reads a text file, plain or gzip, in blocks of whole lines of about `BLOCK` bytes.

    Args:
        name: Name of the file in messages.
        path: The file; None: stdin.
        padding: Number of zero bytes after every block.

    Returns:
        Blocks of whole lines.

    Raises:
        RequestError: The file is empty or has a line longer than `MAX_LINE_BYTES`.
    """
    tail, zeros = b"", bytes(padding)
    any_data = False
    with open_text(STDIN if path is None else path, name) as stream:
        while data := _read(stream, BLOCK):
            any_data = True
            cut = data.rfind(b"\n") + 1
            if cut:
                yield b"".join([tail, memoryview(data)[:cut], zeros])
                tail = data[cut:]
            else:
                tail += data
            if len(tail) > MAX_LINE_BYTES:
                size = f"{MAX_LINE_BYTES >> 20} MB"
                raise RequestError(f"found a line of over {size} in {name}, expected tab separated text")
    if not any_data:
        raise RequestError(f"found {name} empty, expected at least one row")
    if tail:
        yield tail + b"\n" + zeros


def parquet_names(name: str, path: Path) -> list[str]:
    """Returns the names of the columns of a Parquet file; the fields of structs are columns, see `nested.flat_table`.

    Args:
        name: Name of the file in messages.
        path: The file.

    Raises:
        RequestError: The file cannot be read.
    """
    import pyarrow.parquet as pq

    with _reading(name):
        return list(nested.flat_schema(pq.read_schema(path)).names)


def _parquet(name: str, path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Arrow tables of a Parquet file, with all columns or with some."""
    import pyarrow.parquet as pq

    with _reading(name), pq.ParquetFile(path) as file:
        if not file.metadata.num_rows:
            raise RequestError(f"found {name} empty, expected at least one row")
        for batch in nested.parquet_batches(file, 16384, columns):
            yield pa.Table.from_batches([batch])


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Converts errors of Arrow to RequestError."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"cannot read {name}: {_first_line(error)}") from error


def _saved(name: str, path: Path, split: str | None) -> Iterator[Any]:
    library = datasets()
    try:
        dataset = library.load_from_disk(str(path))
    except Exception as error:
        raise RequestError(f"cannot read the data set {name}: {_first_line(error)}") from error
    return _iterate(name, dataset, split)


def _hub(name: str, repository: str, split: str) -> Iterator[Any]:
    from pipelines.core.settings import offline

    if offline():
        raise RequestError(f"found no file {name}, and ZOO_OFFLINE forbids to look for it on the hub")
    library = datasets()
    try:
        dataset = library.load_dataset(repository, split=split or None, streaming=True)
    except Exception as error:  # dozens of types: no such data set, no such split, no network
        raise RequestError(f"found neither a file {name} nor that data set on the hub: {_first_line(error)}") from error
    return _iterate(name, dataset, None)


def _iterate(name: str, dataset: Any, split: str | None) -> Iterator[Any]:
    """Arrow tables of the only split, or of the one named."""
    if isinstance(dataset, dict):
        if (len(dataset) > 1) if split is None else (split not in dataset):
            raise RequestError(
                f"found the splits {', '.join(dataset)} in {name}, expected one of them: "
                f"{name.partition(':')[0]}:{next(iter(dataset))}"
            )
        dataset = dataset[split or next(iter(dataset))]
    elif split is not None:
        raise RequestError(f"found no splits in {name}, expected the folder without :{split}")
    empty = True
    try:
        for table in dataset.with_format("arrow").iter(batch_size=16384):
            empty = False
            yield table
    except Exception as error:
        raise ZooError(f"reading {name} failed: {_first_line(error)}; try again") from error
    if empty:
        raise RequestError(f"found {name} empty, expected at least one row")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tables(name: str, kind: str, place: Any, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Reads a source as Arrow tables of some thousand rows.

    Args:
        name: Name of the source in error messages.
        kind: "parquet" for a file, "saved" for a data set on disk, "hub" for a data set on the hub.
        place: Location as returned by `locate`.
        columns: Columns of a Parquet file to read, see `parquet_names`; None: all.

    Returns:
        Arrow tables in order.

    Raises:
        RequestError: The source cannot be read or is empty.
        ZooError: The hub fails while it is read.
    """
    if kind == "parquet":
        return _parquet(name, place[0], columns)
    return (_saved if kind == "saved" else _hub)(name, *place)


def choose_columns(name: str, names: list[str], columns: Sequence[tuple[str, str]]) -> tuple[list[str], bool]:
    """Chooses the columns of a table in the order of a row.

    Columns are found by name, in any case: by their own names; numbers also as I1, I2, ... or integer_feature_1, ...,
    categories as C1, ... or categorical_feature_1, ..., the label as label, click or clicked. If no column has such a
    name, they are chosen by position.

    Args:
        name: Name of the table in messages.
        names: Names of its columns.
        columns: Kind and name of every column of a row without its label; columns of the kind ignored are optional.

    Returns:
        Names of the columns of a row, "" for a missing ignored column; and whether the first column is the label.

    Raises:
        RequestError: Columns are missing, or a name occurs twice.
    """
    lower = [column.lower() for column in names]
    counts = Counter(lower)
    if twice := [column for column, key in zip(names, lower, strict=True) if counts[key] > 1]:
        raise RequestError(f"found the column {twice[0]} more than once in {name}, expected each name once")
    places = dict(zip(lower, names, strict=True))

    def keys_of(kind: str, *prefixes: str) -> list[str]:
        own = [column.lower() for column_kind, column in columns if column_kind == kind]
        candidates = [*([f"{prefix}{i + 1}" for i in range(len(own))] for prefix in prefixes), own]
        return max(candidates, key=lambda keys: sum(key in places for key in keys))

    by_kind = {"number": keys_of("number", "i", "integer_feature_")}
    by_kind |= {"category": keys_of("category", "c", "categorical_feature_"), "ignored": keys_of("ignored")}
    numeric, categorical = len(by_kind["number"]), len(by_kind["category"])
    needed = by_kind["number"] + by_kind["category"]
    missing = [key for key in needed if key not in places]
    if not missing:
        label = [places[key] for key in ("label", "click", "clicked") if key in places][:1]
        turns = {kind: iter(keys) for kind, keys in by_kind.items()}
        return label + [places.get(next(turns[kind]), "") for kind, _ in columns], bool(label)
    if len(missing) < len(needed):
        raise RequestError(f"found no column {', '.join(missing)[:80]} in {name}, expected all {len(needed)} by name")
    if len(names) in (len(columns), len(columns) + 1):
        return names, len(names) > len(columns)
    raise RequestError(
        f"found the columns {', '.join(names)[:80]} in {name}, expected label, I1 to I{numeric} and C1 to "
        f"C{categorical}"
    )


def without_dictionary(array: Any) -> Any:
    """Decodes dictionaries, and converts text to large_binary.

    Args:
        array: Arrow array.

    Returns:
        Arrow array without a dictionary.
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = decoded(array)
        kind = array.type
    text = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_string_view,
        pa.types.is_binary_view,
    )
    return array.cast(pa.large_binary()) if any(test(kind) for test in text) or pa.types.is_null(kind) else array


def spool_stdin(data: Any) -> Any:
    """Copies stdin to a temporary file, so that it can be read several times.

    Args:
        data: A source or a list of sources.

    Returns:
        The same sources, with "-" replaced by the file.
    """
    if isinstance(data, list | tuple):
        return [spool_stdin(source) for source in data]
    return str(spool()) if isinstance(data, str) and data == "-" else data


def spool() -> Path:
    """Returns a temporary file with the content of stdin; it is deleted with the process.

    Raises:
        RequestError: stdin is closed or empty.
    """
    if sys.stdin is None:
        raise RequestError("stdin is closed; name a file")
    for stdin, file in _SPOOLED:
        if stdin is sys.stdin:
            return Path(file.name)
    file = tempfile.NamedTemporaryFile(prefix="zoo-stdin-")  # noqa: SIM115 (open as long as the process)
    mark_temporary(file.name)
    _SPOOLED.append((sys.stdin, file))
    shutil.copyfileobj(sys.stdin.buffer, file, 4 * BLOCK)
    file.flush()
    if not Path(file.name).stat().st_size:
        raise RequestError("found nothing on stdin; expected rows, or name a file")
    return Path(file.name)
