"""XLM-R XL and XXL (Goyal et al. 2021): XLM-R with norms before attention and feed-forward."""

from __future__ import annotations

from zoo.texts.models.architectures import bert, roberta
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig, Norm


def _read(file: ConfigFile) -> ModelConfig:
    return bert.read_bert(
        file,
        "xlm_roberta_xl",
        layers=file.get("num_hidden_layers", default=36),
        width=file.get("hidden_size", default=2560),
        heads=file.get("num_attention_heads", default=32),
        hidden=file.get("intermediate_size", default=10240),
        vocabulary=file.get("vocab_size", default=250880),
        positions=file.get("max_position_embeddings", default=514),
        first_position=roberta.first_position(file),
        types=file.get("type_vocab_size", default=1),
        epsilon=float(file.get("layer_norm_eps", default=1e-5)),
        norm=Norm(place="pre", embedding=False, final=True),
    )


NAMES = {key: name for key, name in bert.NAMES.items() if key != "embedding_norm"}
NAMES |= {"final_norm": "encoder.LayerNorm"}
PARTS = {**bert.PARTS, "attention_norm": "attention.self_attn_layer_norm", "norm": "LayerNorm"}
ARCHITECTURE = Architecture("xlm_roberta_xl", ("xlm-roberta-xl",), _read, NAMES, bert.LAYER, PARTS, roberta.HEAD)
