"""Progress of long work on stderr: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from pipelines.core import deadline
from pipelines.core.errors import plain

SECONDS = 30.0  # between lines


@contextlib.contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Context with a progress bar; a line every `SECONDS` if stderr is no terminal.

    Args:
        title: Title of the bar.
        total: Total in the unit of `advance` (rows, bytes, samples); None: a running count.

    Yields:
        `advance(amount)`, which raises TimeIsUp after a `deadline.limit`.
    """
    title = plain(title)
    if sys.stderr is None or not sys.stderr.isatty():
        yield _checked(_lines(title, total))
        return
    from rich.progress import (  # importing rich takes longer than a first photo
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from pipelines.core.console import console

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield _checked(lambda amount: bar.advance(task, amount))


def _checked(advance: Callable[[float], None]) -> Callable[[float], None]:
    """Returns an `advance` that raises `deadline.TimeIsUp` after the time limit."""

    def advance_and_check(amount: float) -> None:
        advance(amount)
        deadline.check()

    return advance_and_check


def _lines(title: str, total: float | None) -> Callable[[float], None]:
    """Returns an `advance` that prints a line every `SECONDS`."""
    begin = printed = time.monotonic()
    done = 0.0

    def advance(amount: float) -> None:
        nonlocal done, printed
        done += amount
        if (now := time.monotonic()) - printed >= SECONDS:
            from pipelines.core.console import print_line  # with rich

            printed = now
            of = "" if total is None else f" of {total:,.0f}"
            left = (now - begin) * (total - done) / done if total is not None and done else 0
            about = f", about {left:.0f} s left" if left > 0 else ""
            print_line(f"{title}: {done:,.0f}{of}, {now - begin:.0f} s{about}")

    return advance


@contextlib.contextmanager
def silent(title: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Context like `progress` that shows nothing, for all processes but one.

    Args:
        title: Not used.
        total: Not used.

    Yields:
        `advance(amount)`.
    """
    yield lambda amount: None
