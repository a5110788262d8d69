"""What all readers of click logs share: rows left out, and the time that reading takes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")

HOPELESS, BAD_SHARE = 1_000_000, 0.99  # rows left out, and the share of all rows, from which on reading ends


@dataclass
class ErrorLog:
    """Rows left out by `read_rows(on_error="skip")`: how many of each kind (columns, label, number), and the first few
    messages.
    """

    limit: int = 5
    counts: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def add(self, kind: str, message: str) -> None:
        """Count one row."""
        self.counts[kind] += 1
        if len(self.messages) < self.limit:
            self.messages.append(message)

    @property
    def total(self) -> int:
        """Rows left out."""
        return self.counts.total()

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.counts.items()))
        rows = "1 row" if self.total == 1 else f"{self.total} rows"
        return f"{rows} left out ({kinds}); first: {self.messages[0]}" if self.total else "no rows left out"


def timed(items: Iterable[Item], seconds: defaultdict[str, float], name: str) -> Iterator[Item]:
    """The same items; `seconds[name]` counts the time in which they were made."""
    iterator = iter(items)
    while True:
        begin = time.perf_counter()
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            seconds[name] += time.perf_counter() - begin
        yield item
