"""Tables that stay in their file because they do not fit into memory; their often used rows are cached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.kernels.program_file import MappedFile
from pipelines.kernels.recommenders.steps import Gather, QuantizedGather

if TYPE_CHECKING:
    from pipelines.kernels.recommenders.program import ClickProgram

MIN_CACHED_BYTES = 2**20  # bytes of a table that is read from the file; smaller ones stay mapped


@dataclass(frozen=True)
class CachedTables:
    """Tables of a program in a file whose rows are read when they are looked up.

    Attributes:
        path: The file.
        tables: (address of the mapped array, its offset in the file, bytes of memory for its rows).
    """

    path: Path
    tables: tuple[tuple[int, int, int], ...]


def cached_tables(program: ClickProgram, memory: int, rows_memory: int | None = None) -> CachedTables | None:
    """Selects the mapped tables of a program if together they exceed the memory for tables.

    Args:
        program: Program whose tables are views of a `MappedFile`.
        memory: Bytes for tables.
        rows_memory: Bytes for cached rows, divided in proportion to the sizes of the tables; None: `memory`.

    Returns:
        The tables to cache; None if all of them fit.
    """
    path, steps = _lookups(program)
    total = sum(step.table.nbytes for _, step in steps)
    if total <= memory or path is None:
        return None
    places = {step.table.ctypes.data: (file.offset(step.table), step.table.nbytes) for file, step in steps}
    room = memory if rows_memory is None else rows_memory
    tables = tuple((address, offset, room * size // total) for address, (offset, size) in places.items())
    return CachedTables(path, tables)


def _lookups(program: ClickProgram) -> tuple[Path | None, list[tuple[MappedFile, Gather | QuantizedGather]]]:
    """Returns the file with the largest tables, and the lookups of large tables in it."""
    files: dict[Path, list[tuple[MappedFile, Gather | QuantizedGather]]] = {}
    for step in program.steps:
        if isinstance(step, Gather | QuantizedGather) and step.table.nbytes >= MIN_CACHED_BYTES:
            file: object = step.table.base
            if isinstance(file, MappedFile):
                files.setdefault(file.path, []).append((file, step))
    return max(files.items(), key=lambda item: sum(step.table.nbytes for _, step in item[1]), default=(None, []))
