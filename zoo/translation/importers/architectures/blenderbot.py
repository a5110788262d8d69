"""Blenderbot and Blenderbot-small (Roller et al. 2021), which answer in a conversation."""

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
    Architecture(
        names=("BlenderbotSmallForConditionalGeneration",),
        read=functools.partial(bart_config, embedding_norm=True, target_norm_first=True, final_norm=False),
        offset=0,
        begins=False,
        words=True,
        **BART,
    ),
)
