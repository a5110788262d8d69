"""The user's settings: environment variables, read at every call.

`ZOO_HOME` is the cache, `ZOO_OFFLINE=1` forbids the network, `ZOO_TABLE_MEMORY` limits the memory for embedding tables,
`ZOO_ISA` names the fastest instruction set that the native kernels may use, and `ZOO_MIRROR` is a folder or an http(s)
base URL that is tried before the public addresses; it holds files flat under the names of the cards. `HF_ENDPOINT` is
the address of the Hugging Face Hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipelines.core.errors import RequestError

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}  # values of options as text


def home() -> Path:
    """Returns the cache folder: $ZOO_HOME, else int8-zoo under $XDG_CACHE_HOME (if absolute) or ~/.cache."""
    try:
        if chosen := os.environ.get("ZOO_HOME"):
            return Path(chosen).expanduser().absolute()
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (cache if cache.is_absolute() else Path.home() / ".cache") / "int8-zoo"
    except RuntimeError as error:  # a container whose user has neither HOME nor an entry in /etc/passwd
        raise RequestError("found no home folder of this user; set ZOO_HOME to a folder that it may write") from error


def offline() -> bool:
    """Returns whether $ZOO_OFFLINE forbids the network (any value but an empty one, 0, false, no and off)."""
    return os.environ.get("ZOO_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off")


def mirror() -> str | None:
    """Returns $ZOO_MIRROR, a folder or an http(s) base URL; None if it is not set."""
    return os.environ.get("ZOO_MIRROR", "").strip() or None


def endpoint() -> str:
    """Returns the address of the Hugging Face Hub, $HF_ENDPOINT if it is set."""
    return (os.environ.get("HF_ENDPOINT", "").strip() or "https://huggingface.co").rstrip("/")


def isa() -> str:
    """Returns $ZOO_ISA, the fastest instruction set that the native kernels may use; "" for any."""
    return os.environ.get("ZOO_ISA", "")


def table_memory() -> int | None:
    """Returns $ZOO_TABLE_MEMORY in bytes; None if it is not set.

    Raises:
        RequestError: Its value is not a size.
    """
    text = os.environ.get("ZOO_TABLE_MEMORY", "").strip()
    try:
        return memory_bytes(text) if text else None
    except RequestError as error:
        raise RequestError(f"found ZOO_TABLE_MEMORY={text}, expected a size such as 4GB or 512MB") from error


def memory_bytes(text: str | int) -> int:
    """Parses a memory size.

    Args:
        text: Size such as "1GB", "512 MiB" or 1000000.

    Returns:
        The size in bytes.

    Raises:
        RequestError: The text is not a size, or is 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(text).strip(), re.IGNORECASE)
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if size <= 0:
        raise RequestError(f"the memory {text!r} is no size; write it like 1GB or 512MB")
    return size
