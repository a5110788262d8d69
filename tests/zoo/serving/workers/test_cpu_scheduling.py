"""Work beside requests: at a low priority, while the thread that asks for it keeps its own."""

import os
import threading

import pytest

from zoo.serving.workers.cpu_scheduling import NICE, at_low_priority


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_priority_of_the_calling_thread_stays() -> None:
    before, threads = priority(), threading.enumerate()
    assert at_low_priority(priority) == NICE
    assert priority() == before and threading.enumerate() == threads


def test_its_exceptions_are_raised() -> None:
    with pytest.raises(KeyboardInterrupt):
        at_low_priority(interrupted)


def interrupted() -> None:
    raise KeyboardInterrupt
