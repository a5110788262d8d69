"""The extension module `_native`: whether it is there, for which instruction sets, and what to do where it is not."""

from __future__ import annotations

import importlib
from typing import Any

from pipelines.core.errors import RequestError


def native() -> Any:
    """The extension module, or None where the installation could not build it (see `missing`)."""
    try:
        return importlib.import_module("pipelines.kernels._native")
    except ImportError:
        return None


def isas() -> list[str]:
    """The versions that this build and this CPU run, quickest first: among "amx", "avx512", "avx2", "portable"; []
    without the extension.
    """
    module = native()
    return list(module.isas()) if module is not None else []


def missing() -> str:
    """Why there are no native kernels and what to do, in one line; "" where they are there."""
    if native() is not None:
        return ""
    try:
        reason = importlib.import_module("pipelines.kernels._unbuilt").REASON
    except ImportError:
        reason = f"no extension module for this Python in {__package__}"
    again = "pip install --force-reinstall --no-deps ."
    return f"{reason}; install a C++17 compiler (g++ 11 or newer), then run in the repository: {again}"


def required() -> Any:
    """The extension module. Raises RequestError, saying what was missing when it was to be built, where there is
    none.
    """
    module = native()
    if module is None:
        raise RequestError(f"there are no native kernels here: {missing()}")
    return module
