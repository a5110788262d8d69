"""The library ray, and a cluster of it."""

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
    """The module ray, connected to the cluster at `address` ("auto": the one that RAY_ADDRESS or this machine names);
    None: one of this machine alone, of `cores` cores, which ends with the process. Raises RequestError where there is
    none.
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
    """`connect` for a time: a connection made here ends here, and with it a cluster of this machine alone."""
    before = library().is_initialized()
    try:
        yield connect(address, cores)
    finally:
        if not before:  # Ray's own, at the end of the process, sleeps first
            library().shutdown()


def counts_of(text: str | int, what: str) -> int | tuple[int, int]:
    """ "4" -> 4; "2:8" -> (2, 8), as many as there are. Raises RequestError for what is neither, naming `what`."""
    least, colon, most = str(text).partition(":")
    try:
        found = int(least), int(most) if colon else int(least)
    except ValueError:
        found = 0, 0
    if not 0 < found[0] <= found[1]:
        raise RequestError(f"found {text} {what}, wanted a count such as 4, or the least and the most, such as 2:8")
    return found if colon else found[0]
