"""Console on stderr for modules that import rich."""

from __future__ import annotations

from rich.console import Console

console = Console(stderr=True, markup=False, highlight=False)


def print_line(text: str) -> None:
    """Prints a line to stderr; long lines are not wrapped.

    Args:
        text: Text of the line.
    """
    console.print(text, soft_wrap=True)
