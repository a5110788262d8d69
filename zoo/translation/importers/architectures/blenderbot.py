"""Blenderbot (Roller et al. 2021), which answers in a conversation."""

from __future__ import annotations

import functools

from zoo.translation.importers.architectures.base import BART, Architecture, bart_config

ARCHITECTURES = (
    Architecture(
        names=("BlenderbotForConditionalGeneration",),
        read=functools.partial(bart_config, final_norm=True),
        pre_norm=True,
        offset=0,
        begins=False,
        **BART,
    ),
)
