"""Networks of transformers: opened from a model folder, pooled, and written into another."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, requires
from pipelines.core.files import replacing
from zoo.texts.models.architectures import ARCHITECTURES
from zoo.texts.models.config import ModelConfig
from zoo.texts.models.head import Head
from zoo.texts.models.tensor_file import TensorFile
from zoo.texts.models.weights import FILE


def require_trainable(config: ModelConfig, content: Mapping[str, Any]) -> None:
    """Raises RequestError for a network that transformers does not have.

    Args:
        config: Configuration of the network.
        content: Content of its config.json.
    """
    architecture, code = ARCHITECTURES[config.kind], content.get("auto_map")
    if not architecture.trainable or (code and architecture.native is None):
        part = f"custom code ({code})"[:80] if code else f"the network {config.kind}"
        raise RequestError(f"a model with {part} cannot be fine-tuned; expected a network that transformers has")
    if architecture.native:
        architecture.native(config, content)


def load_network(
    folder: Path, config: ModelConfig, content: Mapping[str, Any], head: Head | None, changes: Mapping[str, Any]
) -> torch.nn.Module:
    """Opens the network of a folder, with its dropout.

    Args:
        folder: Folder with config.json and weights.
        config: Configuration of the network.
        content: Content of config.json.
        head: Head of the new network; None: none.
        changes: Keys of config.json that differ, such as other labels, which get a new layer.

    Returns:
        The network, float32.

    Raises:
        RequestError: transformers is missing.
    """
    with requires("training text encoders", "int8-zoo[train]"):
        import transformers
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a new layer is a warning
    architecture, options = ARCHITECTURES[config.kind], dict(changes)
    if architecture.native:
        values = {**architecture.native(config, content), **changes}
        options = {"config": transformers.AutoConfig.for_model(values.pop("model_type"), **values)}
    if changes:
        options["ignore_mismatched_sizes"] = True
    loader = getattr(transformers, head.MODEL if head else architecture.encoder)
    network: torch.nn.Module = loader.from_pretrained(folder, local_files_only=True, dtype=torch.float32, **options)
    return network


def save_network(network: Any, layers: DenseLayers, folder: Path) -> dict[str, Any]:
    """Writes model.safetensors with the names of public models.

    Args:
        network: Network of transformers.
        layers: Its Dense layers, "dense.N" of the file.
        folder: Folder of the file.

    Returns:
        Content of the network's config.json.
    """
    from safetensors.torch import load_file, save_file

    dense = {f"dense.{name}": tensor.detach().cpu().contiguous() for name, tensor in layers.linear.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        network.save_pretrained(made, max_shard_size="1TB")
        content: dict[str, Any] = json.loads((Path(made) / "config.json").read_text())
        with replacing(folder / FILE) as temporary:
            if dense:
                save_file({**load_file(Path(made) / FILE), **dense}, temporary, {"format": "pt"})
            else:
                (Path(made) / FILE).replace(temporary)
    return content


class DenseLayers(torch.nn.Module):
    """The Dense layers after the pooling.

    Args:
        config: Configuration of the network.
        file: Its weights.
    """

    def __init__(self, config: ModelConfig, file: Path) -> None:
        super().__init__()
        self.config = config
        sizes = [config.width * len(config.poolings), *(dense.outputs for dense in config.dense)]
        self.linear = torch.nn.ModuleList(
            torch.nn.Linear(sizes[i], sizes[i + 1], dense.bias) for i, dense in enumerate(config.dense)
        )
        if config.dense:
            tensors = TensorFile(file)
            names = {name: f"dense.{name}" for name in self.linear.state_dict()}
            self.linear.load_state_dict({name: torch.from_numpy(tensors[file]) for name, file in names.items()})

    def arrays(self) -> list[dict[str, NDArray[np.float32]]]:
        """Returns the weights of every layer."""
        return [
            {name: tensor.detach().cpu().numpy() for name, tensor in linear.state_dict().items()}
            for linear in self.linear
        ]

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Computes embeddings.

        Args:
            pooled: Pooled rows, float32 [n, width].

        Returns:
            float32 [n, components].
        """
        functions = {"identity": lambda x: x, "gelu": F.gelu}
        for linear, dense in zip(self.linear, self.config.dense, strict=True):
            function = functions.get(dense.activation) or getattr(torch, dense.activation)
            pooled = function(linear(pooled))
        return pooled


def pool(hidden: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """Pools the last layer of texts that are padded on the right.

    Args:
        hidden: Last layer, float32 [n, tokens, width].
        mask: Attention mask, int64 [n, tokens].
        mode: One of `zoo.texts.models.config.POOLINGS`.

    Returns:
        float32 [n, width].
    """
    weights = mask[:, :, None].float()
    if mode == "cls":
        return hidden[:, 0]
    if mode == "last":
        return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]
    if mode == "max":
        return (hidden - 1e9 * (1 - weights)).max(1).values
    if mode == "weighted_mean":
        weights = weights.cumsum(1) * weights
    count = weights.sum(1)
    return (hidden * weights).sum(1) / (count.sqrt() if mode == "mean_sqrt_len" else count)
