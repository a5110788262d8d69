"""Declaration of a transformers architecture for the importer, and the configuration that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.translation.importers.huggingface_folder import CONFIG, Folder
from zoo.translation.models.config import ModelConfig

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "swish",  # scaled, see `QUICK`
    "swish": "swish",
    "silu": "swish",
    "tanh": "tanh",
}
QUICK = 1.702  # quick_gelu is x sigmoid(1.702 x): swish of 1.702 x, divided by 1.702
SIDES = ("encoder", "decoder")
Parts = Mapping[str, str]  # {our module in a layer: theirs}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How transformers configures and stores an encoder-decoder Transformer.

    Attributes:
        names: Names of its classes.
        read: Reads config.json as a configuration, without what the tables of embeddings show.
        parts: Returns the modules in a layer of a side, "encoder" or "decoder".
        layer: Name of a layer, with `{side}` and `{i}`.
        modules: {our module: theirs} outside of the layers.
        tables: Names of the embeddings of source and target, those that both share, and the output weights.
        tied: Whether config.json says which tables are shared; else the weights show it.
        pre_norm: Whether layers are pre-LN.
        positions: Position encodings: "interleaved rates", "sinusoids", "learned", or "" for none.
        offset: Rows of a learned table before the first position.
        begins: Whether sources begin with the start token.
        bias: Whether the logits have a bias, `final_logits_bias`.
        words: Whether vocab.json and merges.txt are byte pairs within words, not of bytes.
    """

    names: tuple[str, ...]
    read: Callable[[Folder], ModelConfig]
    parts: Callable[[ModelConfig, str], Parts]
    layer: str
    modules: Parts
    tables: tuple[str, str, str, str]
    tied: bool = True
    pre_norm: bool = False
    positions: str = "learned"
    offset: int = 2
    begins: bool = True
    bias: bool = True
    words: bool = False

    def name(self, parameter: str, config: ModelConfig) -> str:
        """Returns the name of a tensor of the network's layers and norms.

        Args:
            parameter: Name in the state dict of `Transformer`.
            config: Configuration of the network.
        """
        module, _, kind = parameter.rpartition(".")
        side, _, inner = module.partition(".")
        if side in SIDES and inner:
            i, _, part = inner.partition(".")
            return f"{self.layer.format(side=side, i=i)}.{self.parts(config, side)[part]}.{kind}"
        return f"{self.modules[module]}.{kind}"


def activation(folder: Folder, name: str) -> str:
    """Returns the activation of feed-forward layers.

    Args:
        folder: The folder; an unknown activation is added to its faults.
        name: Its name in config.json.

    Returns:
        A key of `zoo.translation.models.layers.ACTIVATIONS`.
    """
    if name not in ACTIVATIONS:
        folder.faults.append(f"found the activation {name}, expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.get(name, "relu")


def bart_config(folder: Folder, *, kind: str = "gelu", scaled: bool = False, **options: Any) -> ModelConfig:
    """Reads the configuration of an architecture with the keys of BART.

    Args:
        folder: The folder; wrong sizes are added to its faults.
        kind: Default activation.
        scaled: Whether embeddings are scaled by default.
        **options: Further values of the configuration.

    Returns:
        The configuration.
    """
    sizes: dict[str, Any] = {
        name: folder.whole(key)
        for name, key in {
            "encoder": "encoder_layers",
            "decoder": "decoder_layers",
            "width": "d_model",
            "hidden": "encoder_ffn_dim",
            "heads": "encoder_attention_heads",
            "decoder_hidden": "decoder_ffn_dim",
            "decoder_heads": "decoder_attention_heads",
        }.items()
    }
    for heads in {sizes["heads"], sizes["decoder_heads"]}:
        if sizes["width"] % heads or sizes["width"] % 2:
            folder.faults.append(f"{CONFIG} has d_model {sizes['width']}, which {heads} heads cannot share")
    for side in ("hidden", "heads"):
        if sizes[f"decoder_{side}"] == sizes[side]:
            sizes[f"decoder_{side}"] = 0
    positions = folder.whole("max_position_embeddings", default=1024)
    return ModelConfig(
        **sizes,
        activation=activation(folder, str(folder.config.get("activation_function", kind))),
        scaled=bool(folder.config.get("scale_embedding", scaled)),
        output_bias=True,
        positions=(positions, positions),
        **options,
    )


def bart_parts(config: ModelConfig, side: str) -> Parts:
    """Returns the modules in a layer of an architecture with the names of BART.

    Args:
        config: Configuration of the network.
        side: "encoder" or "decoder".
    """
    blocks = {"attention": "self_attn"} | ({"cross": "encoder_attn"} if side == "decoder" else {})
    parts = {"feed.inner": "fc1", "feed.outer": "fc2", "around_feed.norm": "final_layer_norm"}
    for ours, theirs in blocks.items():
        parts[f"around_{ours}.norm"] = f"{theirs}_layer_norm"
        for part, projection in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "out")):
            parts[f"{ours}.{part}"] = f"{theirs}.{projection}_proj"
    return parts


BART: dict[str, Any] = {  # names of tensors that most architectures share
    "parts": bart_parts,
    "layer": "model.{side}.layers.{i}",
    "modules": {
        "source_norm": "model.encoder.layernorm_embedding",
        "target_norm": "model.decoder.layernorm_embedding",
        "encoder_norm": "model.encoder.layer_norm",
        "decoder_norm": "model.decoder.layer_norm",
    },
    "tables": (
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "model.shared.weight",
        "lm_head.weight",
    ),
}
