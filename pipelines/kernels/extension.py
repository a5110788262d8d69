"""The extension module `_native`: its availability, instruction sets, and what to do if it is missing."""

from __future__ import annotations

import importlib
from typing import Any

from pipelines.core.errors import RequestError


def native() -> Any:
    """Returns the extension module, or None if the installation could not build it (see `missing`)."""
    try:
        return importlib.import_module("pipelines.kernels._native")
    except ImportError:
        return None


def isas() -> list[str]:
    """Returns the instruction sets of this build and CPU, fastest first, among "amx", "avx512", "avx2", "portable".

    Without the extension the list is empty.
    """
    module = native()
    return list(module.isas()) if module is not None else []


def missing() -> str:
    """Returns why there are no native kernels and what to do, or ""."""
    if native() is not None:
        return ""
    try:
        reason = importlib.import_module("pipelines.kernels._unbuilt").REASON
    except ImportError:
        reason = f"no extension module for this Python in {__package__}"
    again = "pip install --force-reinstall --no-deps ."
    return f"{reason}; install a C++17 compiler (g++ 11 or newer), then run in the repository: {again}"


def required() -> Any:
    """Returns the extension module.

    Raises:
        RequestError: The module is missing; the message says what the build lacked.
    """
    module = native()
    if module is None:
        raise RequestError(f"there are no native kernels here: {missing()}")
    return module
