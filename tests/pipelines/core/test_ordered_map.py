"""The ordered parallel map."""

import threading
import time

import pytest

from pipelines.core.ordered_map import ordered_map


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_in_order_is_a_map(workers: int) -> None:
    before = threading.enumerate()

    def slow_first(x: int) -> int:
        time.sleep(0.02 if x % 4 == 0 else 0)
        return x * x

    assert list(ordered_map(slow_first, iter(range(30)), workers)) == [x * x for x in range(30)]
    made = []
    mapped = ordered_map(slow_first, (made.append(x) or x for x in range(30)), workers)
    assert [next(mapped), next(mapped)] == [0, 1]
    assert len(made) <= 2 * workers + 2, "what is under way is bounded"
    mapped.close()
    assert not [thread for thread in threading.enumerate() if thread not in before]
