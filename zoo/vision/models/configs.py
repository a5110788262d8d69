"""Architectures of fixed width, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pipelines.core.errors import RequestError

Config = TypeVar("Config")


def config_of(arch: str, width: float, configs: Mapping[str, Config], title: str) -> Config:
    """Returns the configuration of an architecture.

    Args:
        arch: Name of the architecture.
        width: Must be 1.
        configs: Configuration by name.
        title: What the architectures are, for the message.

    Raises:
        RequestError: `arch` is unknown, or `width` is not 1.
    """
    if arch not in configs:
        raise RequestError(f"no {title} {arch!r}; choose one of {', '.join(configs)}")
    if width != 1:
        raise RequestError(f"found the width {width:g} for {arch}, expected 1; leave it out")
    return configs[arch]
