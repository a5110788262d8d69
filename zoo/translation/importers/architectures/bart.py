"""BART (Lewis et al. 2020) and mBART (Liu et al. 2020)."""

from __future__ import annotations

import functools

from zoo.translation.importers.architectures.base import BART, Architecture, bart_config

ARCHITECTURES = (
    Architecture(
        names=("BartForConditionalGeneration",),
        read=functools.partial(bart_config, embedding_norm=True, final_norm=False),
        **BART,
    ),
    Architecture(
        names=("MBartForConditionalGeneration",),
        read=functools.partial(bart_config, embedding_norm=True, final_norm=True),
        pre_norm=True,
        **BART,
    ),
)
