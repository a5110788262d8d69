"""FSMT, the models of fairseq for WMT19 (Ng et al. 2019) and WMT16 (Kasai et al. 2021); two vocabularies."""

from __future__ import annotations

import functools

from zoo.translation.importers.architectures.base import BART, Architecture, bart_config

TARGETS = "model.decoder.embed_tokens.weight"
ARCHITECTURES = (
    Architecture(
        names=("FSMTForConditionalGeneration",),
        read=functools.partial(bart_config, kind="relu", scaled=True, final_norm=False),
        positions="sinusoids",
        begins=False,
        bias=False,
        tied=False,
        **{
            **BART,
            "tables": (
                "model.encoder.embed_tokens.weight",
                TARGETS,
                TARGETS,
                "model.decoder.output_projection.weight",
            ),
        },
    ),
)
