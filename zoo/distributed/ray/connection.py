"""Connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from pipelines.core.errors import RequestError, one_line, requires


def library() -> Any:
    """The module ray. Raises RequestError where it is not installed."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a warning with every start
    with requires("a cluster", "int8-zoo[ray]"):
        import ray
    return ray


def connect(address: str | None = None, cores: int | None = None) -> Any:
    """Connects to a Ray cluster.

    Args:
        address: Cluster address; "auto" for the one of RAY_ADDRESS or of this machine; None for a local cluster, which
            ends with the process.
        cores: Number of cores of a local cluster; None for all.

    Returns:
        The module `ray`.

    Raises:
        RequestError: There is no cluster at the address, or Ray is not installed.
    """
    ray = library()
    if not ray.is_initialized():
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": False}
        try:
            if address is None:
                ray.init(include_dashboard=False, num_cpus=cores, **options)
            else:
                ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(f"found no Ray cluster at {address}: {one_line(error)[:200]}") from error
    return ray


@contextlib.contextmanager
def connected(address: str | None = None, cores: int | None = None) -> Iterator[Any]:
    """Connects to a Ray cluster for the duration of a block; a local cluster ends with it.

    Args:
        address: See `connect`.
        cores: See `connect`.
    """
    before = library().is_initialized()
    try:
        yield connect(address, cores)
    finally:
        if not before:  # Ray's own, at the end of the process, sleeps first
            library().shutdown()


def counts_of(text: str | int, what: str) -> int | tuple[int, int]:
    """Parses a count, "4" -> 4, or a range of counts, "2:8" -> (2, 8).

    Args:
        text: Text of the count.
        what: Name of the option, for the message.

    Raises:
        RequestError: The text is neither.
    """
    least, colon, most = str(text).partition(":")
    try:
        found = int(least), int(most) if colon else int(least)
    except ValueError:
        found = 0, 0
    if not 0 < found[0] <= found[1]:
        raise RequestError(f"found {text} {what}, wanted a count such as 4, or the least and the most, such as 2:8")
    return found if colon else found[0]
