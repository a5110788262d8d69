"""A lazy parallel map by threads that keeps the order."""

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
    """Applies a function to every item in threads; results keep the order.

    At most two items per thread are in flight. All threads have ended when the iteration ends, also by an exception of
    `function` or `items`; close the generator to end it early.

    Args:
        function: Function of an item.
        items: Items.
        workers: Number of threads; 0: the caller's thread.

    Yields:
        Results in order.
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
