"""MarianMT (Junczys-Dowmunt et al. 2018), as in OPUS-MT."""

from __future__ import annotations

import functools

from zoo.translation.importers.architectures.base import BART, Architecture, bart_config

ARCHITECTURES = (
    Architecture(
        names=("MarianMTModel",),
        read=functools.partial(bart_config, final_norm=False),
        positions="interleaved rates",
        **BART,
    ),
)
