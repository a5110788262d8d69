"""Output of commands: tables, trees, JSON and error messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import click

from pipelines.core.errors import plain

INTERRUPTED = 130  # 128 + SIGINT, as in shells


def show(report: Mapping[str, Any], as_json: bool) -> None:
    """Prints a report as JSON or as a tree.

    Args:
        report: Report of JSON types.
        as_json: Whether to print JSON.
    """
    emit(report, as_json, lambda: tree(report))


def emit(report: Any, as_json: bool, show: Callable[[], Any]) -> None:
    """Prints a report.

    Args:
        report: Report of JSON types.
        as_json: Print JSON on stdout.
        show: Prints the report for people, if not `as_json`.
    """
    if as_json:
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        show()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table.

    Args:
        columns: Headers.
        rows: Cells of every row.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*map(plain, row))
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 250).print(table)


def tree(value: Mapping[str, Any], depth: int = 0) -> None:
    """Prints names and values, nested values indented, a list of records with a line each.

    Args:
        value: The values by name.
        depth: Level of indentation.
    """
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            click.echo(f"{'  ' * depth}{key}:")
            tree(inner, depth + 1)
        elif isinstance(inner, list) and inner and all(isinstance(item, Mapping) for item in inner):
            click.echo(f"{'  ' * depth}{key}:")
            for item in inner:
                facts = [f"{name} {fact}" for name, fact in item.items() if not isinstance(fact, Mapping | list)]
                click.echo(plain(f"{'  ' * (depth + 1)}{', '.join(facts)}"))
        else:
            text = ", ".join(map(str, inner)) if isinstance(inner, list | tuple) else str(inner)
            click.echo(plain(f"{'  ' * depth}{key}: {text if len(text) < 400 else text[:400] + ' ...'}"))


def left_out(report: Mapping[str, Any]) -> None:
    """Prints the configurations that were not timed, with the reason.

    Args:
        report: Report with "failed".
    """
    for problem in report["failed"]:
        click.echo(f"left out: {problem}", err=True)


def percent(share: float | None) -> str:
    """Formats a fraction in percent; "" for None.

    Args:
        share: Fraction, 0 to 1.
    """
    return "" if share is None else f"{100 * share:.3f}%"


def count(value: int | None) -> str:
    """Formats a count with thousands separators; "" for None.

    Args:
        value: Count.
    """
    return "" if value is None else f"{value:,}"


def number(value: float | None, digits: int) -> str:
    """Formats a number; "" for None.

    Args:
        value: The number.
        digits: Number of decimal places.
    """
    return "" if value is None else f"{value:.{digits}f}"


def interval(bounds: Sequence[float] | None) -> str:
    """Formats a confidence interval; "" for None.

    Args:
        bounds: Lower and upper bound.
    """
    return f"[{bounds[0]:+.6f}, {bounds[1]:+.6f}]" if bounds else ""


def fail(message: str, code: int) -> NoReturn:
    """Exits with one line on stderr.

    Args:
        message: Error message.
        code: Exit code.
    """
    click.echo(plain(f"zoo: {' '.join(message.split())}"), err=True)
    sys.exit(code)
