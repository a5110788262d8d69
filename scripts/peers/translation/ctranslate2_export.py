"""Export of a translation model to CTranslate2's format: the same weights and pieces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.translation.data.parallel_text import Vocabulary
from zoo.translation.data.tokens import END, START, UNKNOWN

if TYPE_CHECKING:
    from zoo.translation.models.layers import Attention, Layer
    from zoo.translation.models.transformer import Transformer


def export(model: Transformer, vocabulary: Vocabulary, target: Path, quantization: str = "float32") -> None:
    """Writes a model folder of CTranslate2, whose translator takes pieces of sentencepiece without start and end.

    Args:
        model: The network in torch.
        vocabulary: Its pieces.
        target: Folder of the files; made where it is missing.
        quantization: Type of the weights, "float32" or "int8".
    """
    spec = specification(model, vocabulary)
    spec.optimize(None if quantization == "float32" else quantization)
    target.mkdir(parents=True, exist_ok=True)
    spec.save(str(target))


def specification(model: Transformer, vocabulary: Vocabulary) -> Any:
    """Returns the model as a `ctranslate2.specs.TransformerSpec`, validated."""
    from ctranslate2.specs import TransformerSpec  # type: ignore[import-untyped]
    from torch import nn

    names, form = vocabulary.pieces, model.config
    spec = TransformerSpec.from_config((form.encoder, form.decoder), form.heads, pre_norm=model.pre_norm)
    for side, layers, last in (
        (spec.encoder, model.encoder, model.encoder_norm),
        (spec.decoder, model.decoder, model.decoder_norm),
    ):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = _array(model.embedding.weight)
        side.position_encodings.encodings = _array(model.positions)
        if isinstance(last, nn.LayerNorm):
            _copy(side.layer_norm, last)
        for empty, layer in zip(side.layer, layers, strict=True):
            _layer(empty, layer)  # type: ignore[arg-type]
    spec.decoder.projection.weight = _array(model.embedding.weight)
    spec.config.layer_norm_epsilon = model.encoder[0].around_feed.norm.eps
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = (
        names[token] for token in (UNKNOWN, START, END)
    )
    spec.config.decoder_start_token, spec.config.add_source_eos = names[START], True
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.validate()
    return spec


def _array(tensor: Any) -> Any:
    return tensor.detach().cpu().float().numpy().copy()


def _copy(spec: Any, module: Any) -> None:
    """Copies a linear layer or a layer normalization."""
    weight, bias = ("gamma", "beta") if hasattr(spec, "gamma") else ("weight", "bias")
    setattr(spec, weight, _array(module.weight))
    setattr(spec, bias, _array(module.bias))


def _layer(spec: Any, layer: Layer) -> None:
    _attention(spec.self_attention, layer.attention, layer.around_attention.norm, fused=3)
    if hasattr(layer, "cross"):
        _attention(spec.attention, layer.cross, layer.around_cross.norm, fused=2)
    _copy(spec.ffn.layer_norm, layer.around_feed.norm)
    _copy(spec.ffn.linear_0, layer.feed.inner)
    _copy(spec.ffn.linear_1, layer.feed.outer)


def _attention(spec: Any, attention: Attention, norm: Any, fused: int) -> None:
    """Copies an attention, whose last `fused` of query, key and value are one linear layer."""
    from ctranslate2.converters import utils  # type: ignore[import-untyped]
    from ctranslate2.specs.common_spec import LinearSpec  # type: ignore[import-untyped]

    parts = [LinearSpec() for _ in range(3)]
    for part, module in zip(parts, (attention.query, attention.key, attention.value), strict=True):
        _copy(part, module)
    if fused < len(parts):
        _copy(spec.linear[0], attention.query)
    utils.fuse_linear(spec.linear[-2], parts[-fused:])
    _copy(spec.linear[-1], attention.output)
    _copy(spec.layer_norm, norm)
