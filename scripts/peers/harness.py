"""The harness of all comparisons: options, turns, medians, environment, reports and their tables.

A comparison is a module with a docstring, which is its help, `options(parser)`, which adds its options, and
`measure(args)`, which returns the report (None: no report). `scripts/peers/__main__.py` lists them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from pipelines.core import errors, files, machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.kernels import extension

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("ZOO_SHARED", ROOT.parent / "shared"))
TURN_SECONDS = 0.2

Advance = Callable[[float], None]  # of a progress bar
Key = TypeVar("Key")


# ------------------------------------------------------------------------------------------------------------- options


def require_known(kind: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises RequestError that lists the names that are not known."""
    allowed = list(allowed)
    if unknown := [name for name in names if name not in allowed]:
        raise RequestError(f"unknown {kind} {', '.join(unknown)}; choose among {', '.join(allowed)}")


def split_names(kind: str, text: str, allowed: Iterable[str] | None = None) -> list[str]:
    """Returns the comma-separated names of a text, without repetitions.

    Raises:
        RequestError: There is none, or one that is not known.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise RequestError(f"found an empty list, expected at least one {kind}")
    if allowed is not None:
        require_known(kind, names, allowed)
    return names


ONEDNN = {  # its names of instruction sets; onnxruntime has no such limit
    "avx512": "AVX512_CORE_VNNI",
    "avx_vnni_int8": "AVX2_VNNI_2",
    "avx_vnni": "AVX2_VNNI",
    "avx2": "AVX2",
}


class Parser(argparse.ArgumentParser):
    """Options of a comparison: --json and -o of every report, and kinds that several comparisons have.

    Values of the own kinds are read after the parsing, so that a wrong one is a RequestError of one line.
    """

    def __init__(self, name: str, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python scripts/peers {name}", description=description, formatter_class=formatter)
        self.readers: dict[str, Callable[[str], Any]] = {}
        self.add_argument("--json", action="store_true", help="print the report instead of its table")
        self.add_argument("-o", "--output", metavar="FILE", help="also write the report to this file")
        self.add_argument(
            "--isa",
            choices=ONEDNN,
            help="fastest instruction set of the native kernels (ZOO_ISA), and of OpenVINO (ONEDNN_MAX_CPU_ISA)",
        )

    def error(self, message: str) -> Any:
        """See argparse."""
        raise RequestError(message)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """See argparse."""
        parsed = super().parse_args(*args, **kwargs)
        for name, reader in self.readers.items():
            setattr(parsed, name, reader(getattr(parsed, name)))
        return parsed

    def _read(self, flag: str, default: str, text: str, reader: Callable[[str], Any]) -> None:
        optional: dict[str, Any] = {} if flag.startswith("-") else {"nargs": "?"}
        action = self.add_argument(flag, default=default, help=f"{text} (default {default})", **optional)
        self.readers[action.dest] = reader

    def names(self, flag: str, kind: str, allowed: Iterable[str] | None, default: Iterable[str] | None = None) -> None:
        """Adds an option of comma-separated names; None as `allowed` accepts all names."""
        choices = list(allowed or default or ())
        text = f"{kind}s, comma-separated, of {', '.join(choices)}".replace("%", "%%")
        self._read(flag, ",".join(default or choices), text, lambda value: split_names(kind, value, allowed))

    def numbers(self, flag: str, default: str, text: str) -> None:
        """Adds an option of comma-separated integers of 1 or more."""
        self._read(flag, default, f"{text}, comma-separated", lambda value: _numbers(flag, value, 1))

    def count(self, flag: str, default: int, text: str, least: int = 1) -> None:
        """Adds an option of one integer."""
        self._read(flag, str(default), text, lambda value: _numbers(flag, value, least, single=True)[0])

    def work(self) -> None:
        """Adds the folder of built models, which a later run reuses."""
        self.add_argument(
            "--work", metavar="DIR", help="folder of built models; models found there are not built again"
        )


def _numbers(flag: str, text: str, least: int, *, single: bool = False) -> list[int]:
    values = [int(value) if value.isdecimal() else -1 for value in split_names(flag, text)]
    if min(values) < least or (single and len(values) > 1):
        what = "a whole number" if single else "whole numbers"
        raise RequestError(f"found {flag} {text!r}, expected {what} of {least} or more")
    return values


# -------------------------------------------------------------------------------------------------------------- report


class Comparison(Protocol):
    """A module that measures; see the top."""

    __doc__: str | None

    def options(self, parser: Parser) -> None:
        """Adds the options."""

    def measure(self, args: argparse.Namespace) -> dict[str, Any] | None:
        """Returns the report."""


@contextlib.contextmanager
def one_line(name: str) -> Iterator[None]:
    """Ends the process with one line where the request is wrong or the work fails."""
    try:
        yield
    except ZooError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def run(name: str, comparison: Comparison, arguments: Sequence[str]) -> None:
    """Runs a comparison by its command line; prints the report and writes it."""
    with one_line(name):
        parser = Parser(name, comparison.__doc__)
        comparison.options(parser)
        args = parser.parse_args(arguments)
        if args.isa:  # also of the processes that the comparison starts
            os.environ.update(ZOO_ISA=args.isa, ONEDNN_MAX_CPU_ISA=ONEDNN[args.isa])
            extension.isas()
        use_development_weights()
        if (report := comparison.measure(args)) is None:
            return
        if args.output:
            files.write_json(args.output, report)
        print(json.dumps(report, indent=2) if args.json else table(report, getattr(comparison, "UNPRINTED", ())))


def gather(
    key: str, items: Iterable[Any], measure: Callable[[Any], Any], output: str | None, environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Measures the items one after the other.

    Returns:
        {key: [measure(item), ...], "environment"}. It is written to `output` after every item, so that earlier results
        survive a failure.
    """
    results: list[Any] = []
    report = {key: results, "environment": environment}
    for item in items:
        results.append(measure(item))
        if output:
            files.write_json(output, report)
    return report


def environment(*packages: str, rounds: int, **facts: Any) -> dict[str, Any]:
    """Returns the machine, the versions of libraries and of `packages`, and facts of the run on one thread."""
    return machine.environment(threads=1, rounds=rounds, peers=versions(*packages), **facts)


def versions(*packages: str, folder: str = "") -> dict[str, str]:
    """Returns the versions of the packages that are installed.

    Args:
        *packages: Their names.
        folder: Folder of packages; "": those of this process.
    """
    installed = {}
    for package in packages:
        places = {"path": [folder]} if folder else {}
        for distribution in importlib.metadata.distributions(name=package, **places):
            installed.setdefault(package, distribution.version)
    return installed


def median(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Returns {"median", "spread": [minimum, maximum]}, rounded."""
    return {
        "median": round(float(np.median(values)), digits),
        "spread": [round(float(value), digits) for value in (min(values), max(values))],
    }


def medians(values: Mapping[str, Mapping[str, Sequence[float]]], digits: int = 3) -> dict[str, Any]:
    """Returns the `median` of every list in a mapping of mappings."""
    return {key: {name: median(numbers, digits) for name, numbers in inner.items()} for key, inner in values.items()}


def ratio(numerators: Sequence[float], denominators: Sequence[float], digits: int = 3) -> float:
    """Returns the median over the rounds of the ratios within a round."""
    return round(float(np.median(np.divide(numerators, denominators))), digits)


def table(report: Mapping[str, Any], unprinted: Sequence[str] = ()) -> str:
    """Returns a report as text: lists of results as aligned columns, other figures as lines of "key value"."""
    return "\n".join(_lines(report, (*unprinted, "environment"), ""))


def _lines(node: Mapping[str, Any], unprinted: Sequence[str], indent: str) -> Iterator[str]:
    shown = {key: value for key, value in node.items() if key not in unprinted}
    lists = {key: value for key, value in shown.items() if _is_records(value)}
    if cells := _cells({key: value for key, value in shown.items() if key not in lists}):
        yield indent + ", ".join(f"{key} {text}" for key, text in cells.items())
    for key, items in lists.items():
        if any(_is_records(value) for item in items for name, value in item.items() if name not in unprinted):
            for item in items:
                yield from _lines(item, unprinted, indent)
            continue
        rows = [_cells({name: value for name, value in item.items() if name not in unprinted}) for item in items]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        grid = [columns, *([row.get(column, "") for column in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        yield f"{indent}{key}:"
        for row in grid:
            yield f"{indent}  " + "  ".join(map(str.ljust, row, widths)).rstrip()


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _cells(node: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns the figures below a node by their paths; a median stands before its spread."""
    cells: dict[str, str] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and value.keys() == {"median", "spread"}:
            cells[prefix + key] = f"{value['median']:g} ({'..'.join(f'{end:g}' for end in value['spread'])})"
        elif isinstance(value, Mapping):
            cells |= _cells(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            cells[prefix + key] = "..".join(map(str, value))
        else:
            cells[prefix + key] = f"{value:,g}" if isinstance(value, float) else str(value)
    return cells


# ------------------------------------------------------------------------------------------------------------- running


@contextlib.contextmanager
def folder(path: str | None) -> Iterator[Path]:
    """The folder `path`, made where it is missing; without a path one that is deleted afterwards."""
    with contextlib.nullcontext(path) if path else tempfile.TemporaryDirectory() as place:
        Path(place).mkdir(parents=True, exist_ok=True)
        yield Path(place)


def development_data(name: str) -> Path:
    """Returns a file or folder of the development data.

    Raises:
        RequestError: It is missing.
    """
    path = SHARED / name
    if not path.exists():
        raise RequestError(f"found no {path}; set ZOO_SHARED to the folder that holds {name}")
    return path


def use_development_weights() -> None:
    """Takes float weights from the development data, unless $ZOO_MIRROR names another place."""
    os.environ.setdefault("ZOO_MIRROR", str(SHARED / "weights"))


def log_file(path: str) -> Path:
    """Returns the path of a log that a comparison reads.

    Raises:
        RequestError: There is no such file.
    """
    if not Path(path).is_file():
        raise RequestError(f"found no file {path}, expected a log of raw rows")
    return Path(path)


def reason(error: Exception) -> str:
    """Returns the error of any library in one line."""
    return str(error) if isinstance(error, ZooError) else f"{type(error).__name__}: {errors.one_line(error)}"[:300]


@contextlib.contextmanager
def leave_out(name: str, left_out: dict[str, str], fatal: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Records in `left_out` why the block failed, and continues; `fatal` errors are raised."""
    try:
        yield
    except fatal:
        raise
    except Exception as error:  # every library raises its own kinds
        left_out[name] = reason(error)
        print(f"{name} is left out: {left_out[name]}", file=sys.stderr)


def in_turn(
    calls: Mapping[Key, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[Key, list[float]]:
    """Times calls in turn within this process: a turn of `TURN_SECONDS`, or of one longer call, in every round.

    Returns:
        Milliseconds a call by `clock`, one number a round, of every call.
    """
    times: dict[Key, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    gc.disable()
    for _ in range(rounds):
        for name, call in calls.items():
            count, start, begin = 0, clock(), time.perf_counter()
            while count == 0 or time.perf_counter() - begin < TURN_SECONDS:
                call()
                count += 1
            times[name].append((clock() - start) / count * 1e3)
    gc.enable()
    return times
