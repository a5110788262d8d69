"""A parallel map by threads that keeps the order, lazy at both ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """`function` of every item, in order, computed by `workers` threads; 0: by the caller's thread.

    At most two items a thread are under way. Whatever ends the iteration, an exception of `function` or of `items` too,
    it ends with all threads gone; close the iterator to end it early.
    """
    if not workers:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(workers)
    under_way: deque[Future[Result]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(function, item))
            if len(under_way) == 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
