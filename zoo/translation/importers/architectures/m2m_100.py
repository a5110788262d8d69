"""M2M-100 (Fan et al. 2021) and NLLB (NLLB Team 2022)."""

from __future__ import annotations

import functools

from zoo.translation.importers.architectures.base import BART, Architecture, bart_config

ARCHITECTURES = (
    Architecture(
        names=("M2M100ForConditionalGeneration",),
        read=functools.partial(bart_config, kind="relu", scaled=True, final_norm=True),
        pre_norm=True,
        positions="sinusoids",
        bias=False,
        **BART,
    ),
)
