"""T5 (Raffel et al. 2020) with FLAN-T5, MADLAD-400 and ByT5; mT5 (Xue et al. 2021); UMT5 (Chung et al. 2023).

RMS norms before attention and feed-forward, no biases, products of queries and keys without a scale, and a bias of
self-attention by relative position: of the first layer, which all share, or one a layer (UMT5).
"""

from __future__ import annotations

import functools

from zoo.translation.importers.architectures.base import Architecture, Parts, activation
from zoo.translation.importers.huggingface_folder import CONFIG, Folder
from zoo.translation.models.config import ModelConfig

GATED = "gated-"
MOST_TOKENS = 2048  # of a source and of a translation; the model itself has no limit


def _config(folder: Folder, *, feed: str, shared: bool, scales: bool) -> ModelConfig:
    """Reads config.json.

    Args:
        folder: The folder.
        feed: Default kind of feed-forward layers.
        shared: Whether all layers have the bias of the first one.
        scales: Whether tied output weights are scaled.
    """
    encoder = folder.whole("num_layers")
    decoder = folder.config.get("num_decoder_layers")
    feed = str(folder.config.get("feed_forward_proj", feed))
    name = feed.removeprefix(GATED)
    kind = "gelu_tanh" if feed == "gated-gelu" else activation(folder, name)
    buckets, furthest = (
        folder.whole(f"relative_attention_{key}", default)
        for key, default in (("num_buckets", 32), ("max_distance", 128))
    )
    if buckets < 4 or buckets % 4 or furthest <= buckets // 2:
        folder.faults.append(f"{CONFIG} has {buckets} buckets up to a distance of {furthest}, which hold no distances")
    width = folder.whole("d_model")
    scaled = folder.config.get("scale_decoder_outputs", folder.config.get("tie_word_embeddings", True))
    return ModelConfig(
        encoder=encoder,
        decoder=encoder if decoder is None else folder.whole("num_decoder_layers"),
        width=width,
        hidden=folder.whole("d_ff"),
        heads=folder.whole("num_heads"),
        activation=kind,
        scaled=False,
        final_norm=True,
        output_bias=True,
        positions=(MOST_TOKENS, MOST_TOKENS),
        epsilon=float(folder.config.get("layer_norm_epsilon", 1e-6)),
        head_size=folder.whole("d_kv", 64),
        norm="rms",
        attention_scale=1.0,
        buckets=buckets,
        bucket_distance=furthest,
        shared_buckets=shared,
        gated=feed.startswith(GATED),
        linear_bias=False,
        output_scale=width**-0.5 if scales and scaled else 1.0,
    )


def _parts(config: ModelConfig, side: str) -> Parts:
    blocks = {"attention": "SelfAttention"} | ({"cross": "EncDecAttention"} if side == "decoder" else {})
    parts = {"attention.relative": "layer.0.SelfAttention.relative_attention_bias"}
    for i, (ours, theirs) in enumerate(blocks.items()):
        parts[f"around_{ours}.norm"] = f"layer.{i}.layer_norm"
        for part in ("query", "key", "value", "output"):
            parts[f"{ours}.{part}"] = f"layer.{i}.{theirs}.{part[0]}"
    feed = f"layer.{len(blocks)}"
    inner = {"feed.gate": "wi_0", "feed.inner": "wi_1"} if config.gated else {"feed.inner": "wi"}
    parts |= {ours: f"{feed}.DenseReluDense.{theirs}" for ours, theirs in {**inner, "feed.outer": "wo"}.items()}
    return {**parts, "around_feed.norm": f"{feed}.layer_norm"}


def _architecture(name: str, *, feed: str = "gated-gelu", shared: bool = True, scales: bool = True) -> Architecture:
    return Architecture(
        names=(name,),
        read=functools.partial(_config, feed=feed, shared=shared, scales=scales),
        parts=_parts,
        layer="{side}.block.{i}",
        modules={"encoder_norm": "encoder.final_layer_norm", "decoder_norm": "decoder.final_layer_norm"},
        tables=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "shared.weight", "lm_head.weight"),
        tied=False,
        pre_norm=True,
        positions="",
        begins=False,
        bias=False,
    )


ARCHITECTURES = (
    _architecture("T5ForConditionalGeneration", feed="relu"),
    _architecture("MT5ForConditionalGeneration", scales=False),
    _architecture("UMT5ForConditionalGeneration", shared=False),
)
