"""Sessions: engines behind one protocol, the choice among them by timing, and plan files.

`load` opens model files and plan files in any engine. The package imports `core`, `graph` and `kernels`. Its public
names are loaded at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.engines.catalog import load
    from pipelines.engines.plan import Candidate, PlannedSession, build, open_plan, read_plan
    from pipelines.engines.quickest import QuickestSession
    from pipelines.engines.session import BatchError, Executed, Port, Runnable, Session
    from pipelines.engines.stock import available
    from pipelines.engines.timing import Choice, choose, measure

__all__ = [
    "BatchError",
    "Candidate",
    "Choice",
    "Executed",
    "PlannedSession",
    "Port",
    "QuickestSession",
    "Runnable",
    "Session",
    "available",
    "build",
    "choose",
    "load",
    "measure",
    "open_plan",
    "read_plan",
]

_MODULES = {
    "load": "catalog",
    "Candidate": "plan",
    "PlannedSession": "plan",
    "build": "plan",
    "open_plan": "plan",
    "read_plan": "plan",
    "QuickestSession": "quickest",
    "BatchError": "session",
    "Executed": "session",
    "Port": "session",
    "Runnable": "session",
    "Session": "session",
    "available": "stock",
    "Choice": "timing",
    "choose": "timing",
    "measure": "timing",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
