"""Modules that are imported where a test uses them: every process that runs tests reads all test files first."""

import importlib.util
import pkgutil
import types
from typing import Any

import pytest


class _Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for its marks at all that a test file names
            raise AttributeError(name)
        return pkgutil.resolve_name(f"{self.__name__}.{name}")


def module(name: str, reason: str) -> Any:
    """The module of that name, imported by the first use; the file's tests skip where its package is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(reason, allow_module_level=True)
    return _Lazy(name)
