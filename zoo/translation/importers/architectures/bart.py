"""BART (Lewis et al. 2020), mBART (Liu et al. 2020), PLBART (Ahmad et al. 2021) and MVP (Tang et al. 2023)."""

from __future__ import annotations

import functools
from typing import Any

from zoo.translation.importers.architectures.base import BART, Architecture, bart_config
from zoo.translation.importers.huggingface_folder import CONFIG, Folder
from zoo.translation.models.config import ModelConfig


def _post_norm(folder: Folder, **options: Any) -> ModelConfig:
    """Reads a post-LN network with normalized embeddings."""
    if folder.config.get("use_prompt"):
        folder.faults.append(f"{CONFIG} has use_prompt, trained keys and values before each layer's own")
    return bart_config(folder, embedding_norm=True, final_norm=False, **options)


ARCHITECTURES = (
    Architecture(names=("BartForConditionalGeneration", "MvpForConditionalGeneration"), read=_post_norm, **BART),
    Architecture(
        names=("PLBartForConditionalGeneration",), read=functools.partial(_post_norm, scaled=True), begins=False, **BART
    ),
    Architecture(
        names=("MBartForConditionalGeneration",),
        read=functools.partial(bart_config, embedding_norm=True, final_norm=True),
        pre_norm=True,
        **BART,
    ),
)
