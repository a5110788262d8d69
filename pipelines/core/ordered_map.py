"""Work in order, by threads, while the caller makes the next and uses the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def ordered_map(function: Callable[[Given], Made], items: Iterable[Given], workers: int) -> Generator[Made, None, None]:
    """`function` of every item, in order, from `workers` threads while the caller makes the next items; 0: from the
    caller's thread.

    At most two items a thread are under way. Whatever ends the iteration, an exception of `function` or of `items` too,
    it ends with all threads gone; close the iterator to end it early.
    """
    if not workers:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(workers)
    under_way: deque[Future[Made]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(function, item))
            if len(under_way) == 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
