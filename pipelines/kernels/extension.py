"""The extension module `_native`: its availability, instruction sets, and what to do if it is missing."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

from pipelines.core import settings
from pipelines.core.errors import RequestError


def native() -> Any:
    """Returns the extension module, or None if there is none for this installation and CPU (see `missing`)."""
    module = _built()
    return module if module is not None and _runs_here(module) else None


def _built() -> Any:
    """Returns the extension module, or None if the installation could not build it."""
    try:
        return importlib.import_module("pipelines.kernels._native")
    except ImportError:
        return None


@functools.cache
def _runs_here(module: Any) -> bool:
    """Whether this CPU runs an instruction set of the module; `make run` leaves out those slower than its CPU's."""
    return any(supported for *_, supported, _ in module.instruction_sets())


class InstructionSet(NamedTuple):
    """An instruction set that the kernels were built for.

    Attributes:
        name: Its name, of a folder of pipelines/kernels/isa/.
        needs: What it needs of a CPU.
        vnni: Whether one instruction multiplies bytes and sums in 32 bits.
        supported: Whether this CPU runs it.
        listed: Whether it is used without being named; models of other instruction sets, for tests, are not.
    """

    name: str
    needs: str
    vnni: bool
    supported: bool
    listed: bool


def isas() -> list[str]:
    """Returns the instruction sets of this build and CPU, fastest first, such as "avx512", "avx2", "portable".

    $ZOO_ISA excludes the instruction sets before the named one. Without the extension the list is empty.

    Raises:
        RequestError: $ZOO_ISA is none of them.
    """
    module = native()
    if module is None:
        return []
    names = list(module.isas())
    if not names:
        supported = ", ".join(isa.name for isa in instruction_sets() if isa.supported and isa.listed)
        expected = f"expected an instruction set of this CPU and build: {supported}"
        raise RequestError(f"found ZOO_ISA={settings.isa()}, {expected}")
    return names


def instruction_sets() -> list[InstructionSet]:
    """Returns the instruction sets of this build, fastest first, whatever the CPU; none without the extension."""
    module = native()
    sets: dict[str, InstructionSet] = {}
    for isa in map(InstructionSet._make, module.instruction_sets() if module is not None else []):
        if isa.name not in sets or (isa.supported and not sets[isa.name].supported):
            sets[isa.name] = isa  # a set may have two encodings
    return list(sets.values())


def has_vnni() -> bool:
    """Whether the kernels that run here multiply bytes by VNNI."""
    return any(isa.vnni for isa in instruction_sets() if isa.name in isas()[:1])


def missing() -> str:
    """Returns why there are no native kernels and what to do, or ""."""
    if native() is not None:
        return ""
    again = "run in the repository: pip install --force-reinstall --no-deps ."
    if _built() is not None:
        return f"make run built them for the CPU of another machine; {again}"
    try:
        reason = importlib.import_module("pipelines.kernels._unbuilt").REASON
    except ImportError:
        reason = f"no extension module for this Python in {__package__}"
    return f"{reason}; install a C++17 compiler (g++ 11 or newer), then {again}"


def required() -> Any:
    """Returns the extension module.

    Raises:
        RequestError: The module is missing; the message says what the build lacked.
    """
    module = native()
    if module is None:
        raise RequestError(f"the native kernels are not available: {missing()}")
    return module
