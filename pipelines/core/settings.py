"""The user's settings: environment variables, read at every call.

`ZOO_HOME` is the cache, `ZOO_OFFLINE=1` forbids the network, and `ZOO_MIRROR` is a folder or an http(s) base URL that
is tried before the public address; it holds files flat under the names of the cards.
"""

from __future__ import annotations

import os
from pathlib import Path

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}  # values of options as text


def home() -> Path:
    """Returns the cache folder: $ZOO_HOME, else int8-zoo under $XDG_CACHE_HOME (if absolute) or ~/.cache."""
    if chosen := os.environ.get("ZOO_HOME"):
        return Path(chosen).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "int8-zoo"


def offline() -> bool:
    """Returns whether $ZOO_OFFLINE forbids the network (any value but an empty one, 0, false, no and off)."""
    return os.environ.get("ZOO_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off")


def mirror() -> str | None:
    """Returns $ZOO_MIRROR, a folder or an http(s) base URL; None if it is not set."""
    return os.environ.get("ZOO_MIRROR", "").strip() or None
