"""Pegasus (Zhang et al. 2020), which summarizes."""

from __future__ import annotations

import functools

from zoo.translation.importers.architectures.base import BART, Architecture, bart_config

ARCHITECTURES = (
    Architecture(
        names=("PegasusForConditionalGeneration",),
        read=functools.partial(bart_config, final_norm=True),
        pre_norm=True,
        positions="interleaved rates",
        begins=False,
        **BART,
    ),
)
