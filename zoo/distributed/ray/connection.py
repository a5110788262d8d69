"""Connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from pipelines.core.errors import RequestError, one_line, requires


def import_ray() -> Any:
    """Imports Ray.

    Returns:
        The module `ray`.

    Raises:
        RequestError: Ray is not installed.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns at every start
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
    ray = import_ray()
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

    Yields:
        The module `ray`.

    Raises:
        RequestError: See `connect`.
    """
    was_connected = import_ray().is_initialized()
    try:
        yield connect(address, cores)
    finally:
        if not was_connected:  # explicitly: Ray's shutdown at the end of the process sleeps first
            import_ray().shutdown()


def parse_count(text: str | int, option: str) -> int | tuple[int, int]:
    """Parses a count, "4" -> 4, or a range of counts, "2:8" -> (2, 8).

    Args:
        text: Text of the count.
        option: Name of the option, for the message.

    Returns:
        The count, or its minimum and maximum.

    Raises:
        RequestError: The text is neither.
    """
    first, colon, last = str(text).partition(":")
    try:
        minimum, maximum = int(first), int(last) if colon else int(first)
    except ValueError:
        minimum = maximum = 0
    if not 0 < minimum <= maximum:
        raise RequestError(f"found {text} {option}, expected a count such as 4, or a range such as 2:8")
    return (minimum, maximum) if colon else minimum
