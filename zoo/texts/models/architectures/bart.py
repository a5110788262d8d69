"""BART (Lewis et al. 2020) with a head: the decoder reads the text once more, and its last token is classified."""

from __future__ import annotations

from pipelines.core.errors import RequestError
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig

OFFSET = 2  # rows of the position embedding before that of the first token
HEADS = ("BartForSequenceClassification", "BartForQuestionAnswering")


def _read(file: ConfigFile) -> ModelConfig:
    names = file.get("architectures", default=[])
    if not set(names) & set(HEADS):
        arch = ", ".join(map(str, names)) or "no architecture"
        raise RequestError(f"found {arch}, expected {' or '.join(HEADS)}; for text to text, add a language model head")
    width, heads = file.get("d_model", default=1024), file.get("encoder_attention_heads", default=16)
    if (others := file.get("decoder_attention_heads", default=16)) != heads:
        raise RequestError(f"its decoder has {others!r:.60} attention heads, expected those of its encoder, {heads}")
    return ModelConfig(
        "bart",
        layers=file.get("encoder_layers", default=12),
        width=width,
        heads=heads,
        hidden=file.get("encoder_ffn_dim", default=4096),
        vocabulary=file.get("vocab_size", default=50265),
        positions=file.get("max_position_embeddings", default=1024) + OFFSET,
        first_position=OFFSET,
        activation=file.activation("activation_function"),
        epsilon=1e-5,
        embedding_scale=width**0.5 if file.get("scale_embedding") else 1.0,
        decoder=file.get("decoder_layers", default=12),
        start_token=file.get("decoder_start_token_id", "eos_token_id", default=2),
    )


NAMES = {
    "token": "shared",
    "position": "encoder.embed_positions",
    "embedding_norm": "encoder.layernorm_embedding",
    "decoder_position": "decoder.embed_positions",
    "decoder_embedding_norm": "decoder.layernorm_embedding",
}
PARTS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "cross.query": "encoder_attn.q_proj",
    "cross.key": "encoder_attn.k_proj",
    "cross.value": "encoder_attn.v_proj",
    "cross.output": "encoder_attn.out_proj",
    "cross_norm": "encoder_attn_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "norm": "final_layer_norm",
}
ARCHITECTURE = Architecture(
    "bart",
    ("bart",),
    _read,
    NAMES,
    "encoder.layers.{}",
    PARTS,
    {"dense": "classification_head.dense", "classifier": "classification_head.out_proj"},
    head_pooling="last",
    decoder="decoder.layers.{}",
)
