"""The user's settings, environment variables that are read at every call.

`ZOO_HOME` (the cache), `ZOO_OFFLINE=1` (no network), `ZOO_MIRROR` (a folder or an http(s) base URL that is asked
before the public address; files lie flat in it under the card's file names).
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The cache folder: $ZOO_HOME, else int8-zoo under $XDG_CACHE_HOME (if absolute, as specified) or ~/.cache."""
    if chosen := os.environ.get("ZOO_HOME"):
        return Path(chosen).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "int8-zoo"


def offline() -> bool:
    """Whether $ZOO_OFFLINE forbids the network (any value but an empty one, 0, false, no and off)."""
    return os.environ.get("ZOO_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off")


def mirror() -> str | None:
    """$ZOO_MIRROR as it stands, a folder or an http(s) base URL; None where it is not set."""
    return os.environ.get("ZOO_MIRROR", "").strip() or None
