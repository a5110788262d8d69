"""Quantization-aware fine-tuning of translation models.

Every linear layer computes as in int8.onnx; `pipelines.quantization.training.qat` describes the rounding. Inputs that
the quantizer leaves in float, embeddings, products of attention, normalization and sums are float in both. The state
dict has the names of the float network; the trained ranges are stored beside model.pt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import nn

from pipelines.graph import io
from pipelines.models.folder import ModelFolder
from pipelines.models.npz import read_npz
from pipelines.models.record import SAMPLES, TRAINED
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.quantization.training import qat
from pipelines.rewrites.driver import rewrite
from zoo.training.runs import QAT_RATE, require_qat
from zoo.translation.export.freeze import export
from zoo.translation.export.rewrites import passes

if TYPE_CHECKING:
    from zoo.translation.models.transformer import Transformer

MOMENTUM = 0.05  # of the ranges
LAST = "last"  # the input of the logits layer, see `zoo.translation.export.freeze.export`


def settled(config: Any, start: Any, processes: int) -> Any:
    """Returns the recipe with the precision and learning rate of quantization-aware training.

    Args:
        config: The training recipe.
        start: The model to start from; None without one.
        processes: Number of processes.

    Raises:
        RequestError: The recipe is not supported.
    """
    require_qat(start, processes, config.precision)
    return replace(config, precision="fp32", learning_rate=config.learning_rate * QAT_RATE)


def prepare(model: Transformer, folder: ModelFolder) -> None:
    """Replaces the linear layers of a network by layers with rounding, in place; ranges begin with the calibration's.

    Args:
        model: The network, with the weights of `folder`.
        folder: The model folder to start from.
    """
    recipe, bits = recipe_of(folder), 7 if folder.own_recipe.reduced_range else 8
    table = CalibrationTable.load(folder.ensure("calibration.json"))
    read, rewritten = _graphs(model)
    ranges = CalibrationTable(io.digest(rewritten), recipe.observer, table.samples, "", table.tensors)
    int8, _ = quantize(rewritten, recipe, ranges)
    rounded = {name.removesuffix(".scale") for name in int8.graph.initializers}
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.set_submodule(path, _Linear(layer, _range(read[path], rounded, recipe), bits))
    model.project = _Output(_range(LAST, rounded, recipe), bits)
    qat.start_ranges(model, table.tensors)


def recipe_of(folder: ModelFolder) -> QuantRecipe:
    """Returns the quantization recipe of the trained model.

    Args:
        folder: The model folder to start from.
    """
    return replace(folder.own_recipe, observer="minmax", search=False, correct=False)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the trained float weights of a prepared network.

    Args:
        model: The prepared network.

    Returns:
        State dict of the float network.
    """
    return {name.replace(".layer.", "."): tensor for name, tensor in qat.weights(model).items()}


def save_ranges(model: Transformer, start: ModelFolder, folder: Path) -> None:
    """Writes the trained ranges to a model folder; tensors that stay float get the ranges of its calibration samples.

    Args:
        model: The prepared network.
        start: The model folder that training started from.
        folder: The model folder.
    """
    plain = type(model)(model.config, model.embedding.num_embeddings, pre_norm=model.pre_norm, dropout=0.0)
    plain.load_state_dict(weights(model))
    _, rewritten = _graphs(plain)
    ranges = [module for module in model.modules() if isinstance(module, qat.Range) and module.active]
    tensors = {module.tensor: module.range() for module in ranges}
    trained = CalibrationTable("", "minmax", 0, "", tensors, recipe=recipe_of(start).to_json())
    qat.completed(trained, rewritten, list(read_npz(folder / SAMPLES)[0])).save(folder / TRAINED)


class _Linear(nn.Module):
    """Linear layer with rounded inputs and weights."""

    def __init__(self, inner: nn.Linear, reads: qat.Range, bits: int) -> None:
        super().__init__()
        self.range, self.layer = reads, qat.Layer(inner, None, "", bits)
        self.layer.active = reads.active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes float32 [..., inputs] -> float32 [..., outputs]."""
        return self.layer(self.range(x))  # type: ignore[no-any-return]


class _Output(nn.Module):
    """Output layer with rounding; its weights may be those of the embeddings."""

    def __init__(self, reads: qat.Range, bits: int) -> None:
        super().__init__()
        self.range, self.bits = reads, bits

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes float32 [..., width] -> logits [..., vocabulary]."""
        x = self.range(x)
        return F.linear(x, qat.rounded(weight, self.bits) if self.range.active else weight, bias)


def _range(tensor: str, rounded: set[str], recipe: QuantRecipe) -> qat.Range:
    """Returns the range of a layer's input; layers of one input observe the same values."""
    made = qat.Range(0, MOMENTUM, recipe.symmetric)
    made.tensor, made.active = tensor, tensor in rounded
    return made


def _graphs(model: Transformer) -> tuple[dict[str, str], ir.Model]:
    """Returns the input tensor of each linear layer, and the graph to quantize."""
    exported = export(model)
    read = {str(node.name): str(node.inputs[0].name) for node in exported.graph if node.inputs and node.inputs[0]}
    rewrite(exported, passes())
    return read, exported
