"""Progress on long work: on stderr, and only where a person looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(stderr=True)


@contextlib.contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Show a bar titled `title` with time left; yields `advance(amount)`. Silent where stderr is no terminal.

    `total` is in whatever unit `advance` counts (rows, bytes, samples); None shows a running count.
    """
    if not console.is_terminal:
        yield lambda amount: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)


@contextlib.contextmanager
def silent(title: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """`progress` that shows nothing: for all processes but the one that does."""
    yield lambda amount: None
