"""Quantization-aware fine-tuning of recommenders: the trained network computes the same as int8.onnx will.

`pipelines.quantization.training.qat` describes the method. Embedding tables are fake-quantized together with the
embeddings read from them. A layer that reads embeddings and numbers is split in two, as by `SplitNumbers`. model.pt
keeps the names of the family; the trained ranges are stored next to it. Layers that the family's recipe keeps float
stay float, as do layers that read numbers of the log, which are unbounded. The error bound on probabilities is not
applied, because it would make trained layers float.
"""

from __future__ import annotations

import copy
import operator
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn

import zoo
from pipelines.models.folder import ModelFolder
from pipelines.models.npz import read_npz
from pipelines.models.record import SAMPLES, TRAINED
from pipelines.quantization.algorithms.error_bound import open_layers
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.recipe import QuantRecipe
from pipelines.quantization.training import qat
from pipelines.quantization.training.qat import Range
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.data.features import Features
from zoo.recommenders.export.fx_export import TENSOR, export, trace
from zoo.recommenders.models.layers import SelectColumns
from zoo.recommenders.models.multitask.outputs import parents_of
from zoo.training.runs import QAT_RATE, require_qat

HEAD = "head"  # the network without its layers, in the student: its `losses` and their counts
PARTS = ("embeddings", "numbers")  # of a split layer


def for_qat(config: Any, start: Any, processes: int) -> Any:
    """Adapts training settings to quantization-aware training.

    Args:
        config: Training settings.
        start: Model to start from; None if there is none.
        processes: Number of training processes.

    Returns:
        The settings with the learning rate multiplied by `QAT_RATE`.

    Raises:
        RequestError: There is no model to start from, or more than one process.
    """
    require_qat(start, processes)
    return replace(config, learning_rate=config.learning_rate * QAT_RATE)


class FakeQuantization:
    """Fake quantization of the networks of a model folder, with its recipe and calibration table."""

    def __init__(self, folder: ModelFolder, features: Features) -> None:
        self.features, self.base_recipe = features, folder.own_recipe
        self.passes = folder.entry.passes
        self.table = CalibrationTable.load(folder.ensure("calibration.json"))

    def recipe(self, model: ir.Model) -> QuantRecipe:
        """Returns the recipe that quantizes the rewritten graph.

        Args:
            model: Rewritten graph.

        Returns:
            The family's recipe with the layers that stay float, without error bound, bias correction and range search.
        """
        opened = tuple(re.escape(name) for name in open_layers(model))
        kept = tuple(dict.fromkeys((*self.base_recipe.keep_float, *opened)))
        options: Any = {"observer": "minmax", "search": False, "correct": False, "bound": 0.0}
        return replace(self.base_recipe, keep_float=kept, **options)

    def rewritten(self, network: nn.Module, steps: fx.Graph | None = None) -> ir.Model:
        """Exports and rewrites the graph that will be quantized.

        Args:
            network: Float network.
            steps: Trace of the network; receives the names of the tensors, see `export`. None: traced here.

        Returns:
            Float32 graph after the rewrites.
        """
        model = export(network, self.features, steps)
        rewrite(model, self.passes(self.features.to_json()))
        return model

    def prepare(self, network: nn.Module) -> fx.GraphModule:
        """Creates a fake-quantized copy of a network for training.

        Args:
            network: Float network; it is not changed.

        Returns:
            Copy with the same inputs and outputs.
        """
        self.network, model = network, self.rewritten(network)

        def traced(copied: nn.Module) -> fx.GraphModule:
            self.rewritten(copied, steps := trace(copied))
            made = fx.GraphModule(copied, steps)
            _split(made, _results(model), self.features.shape[1])
            return made

        example, recipe = self._example(), self.recipe(model)
        student = qat.prepare(
            network,
            example,
            recipe,
            lower=lambda made: (model, _tensors(made, model)),
            trace=traced,
            ranges=self.table.tensors,
        )
        head = copy.copy(network)
        head._modules, head._buffers = {}, {name: buf.clone() for name, buf in network.named_buffers(recurse=False)}
        student.add_module(HEAD, head)
        student.parents = parents_of(network)  # type: ignore[assignment]
        if hasattr(head, "losses"):
            student.losses = head.losses
        return student

    def save_ranges(self, student: nn.Module, folder: Path) -> None:
        """Saves the trained ranges in a model folder, where `pipelines.models.stages` finds them.

        Ranges of tensors that stay float come from the calibration samples of the folder.

        Args:
            student: Fake-quantized network after training.
            folder: Model folder.
        """
        self.network.load_state_dict(float_weights(student))
        model = self.rewritten(self.network)
        trained = qat.table(student, self._example())
        table = qat.completed(trained, model, list(read_npz(folder / SAMPLES)[0]))
        replace(table, recipe=self.recipe(model).to_json()).save(folder / TRAINED)

    def _example(self) -> tuple[torch.Tensor, ...]:
        kinds = (torch.int32, torch.float32, torch.float32)
        return tuple(torch.zeros(2, width, dtype=kind) for width, kind in zip(self.features.shape, kinds, strict=True))


def fake_quantization(start_from: Any, features: Features) -> FakeQuantization:
    """Creates the fake quantization of a trained model.

    Args:
        start_from: Name or folder of the model that training starts from.
        features: Features of the network.

    Returns:
        Its fake quantization.
    """
    return FakeQuantization(zoo.load(start_from), features)


def float_weights(student: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the trained float weights of a fake-quantized network.

    Args:
        student: Fake-quantized network, see `FakeQuantization.prepare`.

    Returns:
        State dict of the float network.
    """
    state = {name.removeprefix(f"{HEAD}."): tensor for name, tensor in qat.weights(student).items()}
    for path, module in student.named_modules():
        if isinstance(module, _Split):
            state[f"{path}.weight"] = torch.cat([state.pop(f"{path}.{part}.weight") for part in PARTS], 1)
            if (bias := state.pop(f"{path}.embeddings.bias", None)) is not None:
                state[f"{path}.bias"] = bias
    return state


class _Split(nn.Module):
    """Linear layer [e; x] W + b as two layers, e W_e + b and x W_x, whose sum is a separate operator."""

    def __init__(self, whole: nn.Linear, width: int) -> None:
        super().__init__()
        cuts = torch.tensor_split(whole.weight.detach(), [width], 1)
        for part, weight, biased in zip(PARTS, cuts, (whole.bias is not None, False), strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=biased)
            layer.weight = nn.Parameter(weight.clone())
            if biased:
                layer.bias = whole.bias
            self.add_module(part, layer)


def _split(traced: fx.GraphModule, tensors: set[str], width: int) -> None:
    """Splits the layers that are split in the graph of `tensors`; `width` is the number of all numbers."""
    for node in list(traced.graph.nodes):
        name = node.meta.get(TENSOR)
        layer = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(layer, nn.Linear) or not {f"{name}.{part}" for part in PARTS} <= tensors:
            continue
        joined: Any = node.args[0]
        flat, numbers = joined.args[0]
        chosen = traced.get_submodule(str(numbers.target)) if numbers.op == "call_module" else None
        split = _Split(layer, layer.in_features - (len(chosen.chosen) if isinstance(chosen, SelectColumns) else width))
        traced.set_submodule(str(node.target), split)
        with traced.graph.inserting_before(node):
            halves = [
                traced.graph.call_module(f"{node.target}.{part}", (operand,))
                for part, operand in zip(PARTS, (flat, numbers), strict=True)
            ]
            summed = traced.graph.call_function(operator.add, tuple(halves))
        for part, half in zip(PARTS, halves, strict=True):
            half.meta[TENSOR] = f"{name}.{part}"
        summed.meta[TENSOR] = name
        node.replace_all_uses_with(summed)
        traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()


def _tensors(traced: fx.GraphModule, model: ir.Model) -> dict[str, int]:
    """Returns {tensor of the rewritten graph: index of the range that observes it}."""
    names = _results(model)
    indices: dict[str, int] = {}
    for node in traced.graph.nodes:
        observer = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(observer, Range) and isinstance(source := node.args[0], fx.Node):
            name = str(source.meta.get(TENSOR))
            if name in names:
                indices.setdefault(name, observer.index)
    return indices


def _results(model: ir.Model) -> set[str]:
    """Names of the operator outputs of a graph."""
    return {str(value.name) for node in model.graph for value in node.outputs}
