"""Quantization-aware fine-tuning of image classifiers: the trained network simulates the future int8.onnx.

See `pipelines.quantization.training.qat` for the method. In the model folder, model.pt has the parameter names of the
family, and qat.json has the trained ranges by the tensor names of rewritten.onnx, which are module paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn

from pipelines.core.errors import RequestError
from pipelines.data.preprocess import Preprocess
from pipelines.models.record import TRAINED
from pipelines.quantization.recipe import QuantRecipe
from pipelines.quantization.training import qat
from pipelines.quantization.training.qat import distillation_loss, freeze_ranges, weights
from pipelines.rewrites.driver import rewrite
from zoo.training.onnx_builder import path_of
from zoo.training.runs import QAT_RATE, require_qat
from zoo.vision.export.fx_export import export
from zoo.vision.export.rewrites import passes
from zoo.vision.train_config import TrainConfig

__all__ = ["distillation_loss", "effective_config", "freeze_ranges", "prepare", "save_ranges", "weights"]
RECIPE = QuantRecipe(observer="minmax", correct=False)  # trained ranges and weights are kept as they are


def effective_config(config: TrainConfig, start: Any, same_classes: bool, processes: int) -> TrainConfig:
    """Returns the effective configuration of a quantization-aware training.

    Args:
        config: Configuration given by the user.
        start: Model to start from, or None.
        same_classes: Whether this model has the classes of the data.
        processes: Number of training processes.

    Raises:
        RequestError: Quantization-aware training does not support the configuration.
    """
    require_qat(start, processes, config.precision)
    if config.distilled and not config.teacher and not same_classes:
        raise RequestError(
            "found distillation from a model of other classes; fine-tune without qat first, then that model with it"
        )
    return replace(config, precision="fp32", learning_rate=config.learning_rate * (QAT_RATE if same_classes else 1))


def prepare(network: nn.Module, features: Mapping[str, Any]) -> fx.GraphModule:
    """Returns a copy of a network for quantization-aware training, which simulates the int8 model.

    The input is not rounded, because pixels are uint8 already. If the means are no whole pixels, the rounding of the
    first layer's bias by `FoldInputNormalization` is not simulated; see `pipelines.quantization.training.qat` for
    further differences.

    Args:
        network: Float network, normalized float32 [n, 3, size, size] -> logits [n, classes].
        features: Preprocessing (see `Preprocess`).

    Returns:
        The network to train, of the same inputs and outputs.
    """
    preprocess = Preprocess.from_json(features)
    model = export(network, preprocess)
    rewrite(model, passes())
    student = qat.prepare(network, _example(features), RECIPE, lower=lambda traced: (model, _tensors(traced, model)))
    first = next(layer for node in student.graph.nodes if isinstance(layer := _module(student, node), qat.Layer))
    std = preprocess.std[::-1] if preprocess.channels == "BGR" else preprocess.std
    first.input_scale = 1 / torch.tensor(std).view(3, 1, 1)  # FoldInputNormalization folds it into the weights
    return student


def save_ranges(student: nn.Module, features: Mapping[str, Any], folder: Path) -> None:
    """Writes the trained ranges to a model folder; `pipelines.models.stages` uses them.

    Args:
        student: Trained network (see `prepare`).
        features: Preprocessing (see `Preprocess`).
        folder: Model folder.
    """
    replace(qat.table(student, _example(features)), recipe=RECIPE.to_json()).save(folder / TRAINED)


def _example(features: Mapping[str, Any]) -> torch.Tensor:
    return torch.zeros(1, 3, features["size"], features["size"])


def _module(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else None


def _tensors(traced: fx.GraphModule, model: ir.Model) -> dict[str, int]:
    """{tensor of the rewritten graph: index of the range that observes it}."""
    computed = {str(value.name) for node in model.graph for value in node.outputs}
    indices = {}
    for node in traced.graph.nodes:
        if isinstance(observer := _module(traced, node), qat.Range) and isinstance(source := node.args[0], fx.Node):
            layer = _module(traced, source)
            name = path_of(source) if not isinstance(layer, qat.Layer) or layer.norm is None else layer.norm_path
            last = any(user.op == "output" for user in node.users)
            indices[str(model.graph.outputs[0].name) if last else name] = observer.index
    return {name: index for name, index in indices.items() if name in computed}
