"""Nomic-BERT (Nussbaum et al. 2024, "Nomic Embed"): BERT with rotary positions, SwiGLU and no biases.

Public models have the configuration of custom code with the names of GPT-2 (n_embd, n_layer, ...); those of
transformers 5 have its usual names.
"""

from __future__ import annotations

from functools import partial

from pipelines.core.errors import RequestError
from zoo.texts.models.architectures import bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Rows, native_config
from zoo.texts.models.config import Attention, ModelConfig

GATED = {"swiglu": "swish", "geglu": "gelu"}
MULTIPLE = 256  # of the units of a gated feed-forward, to which the custom code rounds up
UNBIASED = {
    "qkv_proj_bias": ("query", "key", "value", "output"),
    "mlp_fc1_bias": ("gate", "up"),
    "mlp_fc2_bias": ("down",),
}

LINEAR = tuple(name for names in UNBIASED.values() for name in names)


def _read(file: ConfigFile) -> ModelConfig:
    if every := file.get("moe_every_n_layers"):
        raise RequestError(
            f"it is a mixture of experts (moe_every_n_layers is {every}), which is not supported; expected a dense "
            "network, such as nomic-embed-text-v1.5"
        )
    custom = "n_embd" in file.values
    for key, expected in (
        ("activation_function", tuple(GATED)),
        ("rotary_emb_interleaved", (False,)),
        ("rotary_emb_scale_base", ()),
        ("prenorm", (False,)),
        ("parallel_block", (False,)),
        ("use_rms_norm", (False,)),
        ("causal", (False,)),
    ):
        file.require(key, *expected)
    width, heads = file.get("n_embd", "hidden_size", default=768), file.get("n_head", "num_attention_heads", default=12)
    hidden = file.get("n_inner", "intermediate_size", default=4 * width if custom else 3072)
    positions = file.get("n_positions", "max_position_embeddings", default=2048)
    if file.get("rotary_scaling_factor"):  # a longer text would change the frequencies of all of its batch
        positions = min(positions, file.get("max_trained_positions", default=2048))
    head_size = file.get("head_dim", default=width // heads)
    size = int(head_size * file.get("rotary_emb_fraction", default=0.0 if custom else 1.0))
    gate = (
        GATED[file.get("activation_function", default="swiglu")]
        if custom
        else file.activation("hidden_act", default="silu")
    )
    return ModelConfig(
        "nomic_bert",
        layers=file.get("n_layer", "num_hidden_layers", default=12),
        width=width,
        heads=heads,
        hidden=-(-hidden // MULTIPLE) * MULTIPLE if custom else hidden,
        vocabulary=file.get("vocab_size", default=30528),
        positions=positions,
        types=file.get("type_vocab_size", default=2),
        activation=gate,
        epsilon=float(file.get("layer_norm_epsilon", "layer_norm_eps", default=1e-5 if custom else 1e-12)),
        attention=Attention(head_size=0 if head_size * heads == width else head_size),
        absolute=False,
        rotary=file.rotary(size, file.get("rotary_emb_base", default=1000.0)),
        gated=True,
        unbiased=tuple(name for key, names in UNBIASED.items() if not file.get(key, default=custom) for name in names),
    )


NAMES = {"token": bert.NAMES["token"], "type": bert.NAMES["type"], "embedding_norm": "emb_ln"}
PARTS: dict[str, str | Rows] = {
    "query": Rows("attn.Wqkv", 0, 3),
    "key": Rows("attn.Wqkv", 1, 3),
    "value": Rows("attn.Wqkv", 2, 3),
    "output": "attn.out_proj",
    "attention_norm": "norm1",
    "gate": "mlp.fc12",
    "up": "mlp.fc11",
    "down": "mlp.fc2",
    "norm": "norm2",
}
ARCHITECTURE = Architecture(
    "nomic_bert",
    ("nomic_bert",),
    _read,
    NAMES,
    "encoder.layers.{}",
    PARTS,
    bert.HEAD,
    native=partial(native_config, "nomic_bert", LINEAR),
)
