"""Pruning groups of a recommender: coupled weights, their importance, and the network without some of them.

Groups are found in the traced network as in torch-pruning (Fang et al. 2023, "DepGraph: Towards Any Structural
Pruning"), extended to embedding tables. Every column of every value has a number. Elementwise operators equate the
numbers of their operands; dot products equate the numbers of the same column in all their vectors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.recommenders.data.features import Features
from zoo.recommenders.export.fx_export import trace
from zoo.training.runs import fill

if TYPE_CHECKING:
    from torch import Tensor, fx, nn

FIXED = 0  # the number of columns that are of no unit: of the log's numbers, of logits
Numbers = NDArray[np.int64]
WidthSetting = tuple[str, int | None]  # name of a setting that is a layer width, and its index if it holds several


class PruningGroups:
    """Prunable units of a network built from `features` and `config`.

    The class attribute `widths` of the network maps its settings to the layers whose widths they are.

    Attributes:
        inputs: {path of a linear layer or table: unit of every input column}.
        outputs: {path of a linear layer or table: unit of every output column}; for tables [fields, size].
        groups: {path of the first layer: units, int64 [sets, width]}. The same number of units is removed from every
            set, because all sets have the same width; the units may differ.
        count: Number of units.

    Raises:
        RequestError: The network has an unsupported layer; the message has its path.
    """

    def __init__(self, network: nn.Module, features: Features, config: Any) -> None:
        self.inputs: dict[str, Numbers] = {}
        self.outputs: dict[str, Numbers] = {}
        self._parents = [FIXED]  # of each number a smaller one that it equals, or itself
        self._settings: dict[str, WidthSetting] = {}
        values: dict[Any, Any] = {}
        for node in trace(network).nodes:
            match node.op:
                case "placeholder":
                    values[node] = np.zeros(features.shape[1], np.int64) if node.target == "numbers" else None
                case "output":
                    logits = values[node.args[0][0] if isinstance(node.args[0], tuple) else node.args[0]]
                    self._union(logits, np.full(len(logits), FIXED))
                case "call_module":
                    module = network.get_submodule(str(node.target))
                    values[node] = self._module(str(node.target), module, [values[argument] for argument in node.args])
                case _:
                    values[node] = self._function(node, values)
        roots = np.array([self._find(number) for number in range(len(self._parents))])
        self.count = len(roots)
        self.inputs = {path: roots[numbers] for path, numbers in self.inputs.items()}
        self.outputs = {path: roots[numbers] for path, numbers in self.outputs.items()}
        self.groups = self._grouped(network, config)

    def _module(self, path: str, module: Any, read: list[Any]) -> Numbers:
        match type(module).__name__:
            case "Embeddings":
                self.outputs[path] = self._new_columns(module.width).reshape(-1, module.size)
                places = {field.name: place for place, field in enumerate(module.pooled)}
                for field, columns in zip(module.pooled, self.outputs[path], strict=True):
                    if module.owner(field) in places:  # a table that several fields read loses the same columns
                        self._union(self.outputs[path][places[module.owner(field)]], columns)
                return self.outputs[path].ravel()
            case "Linear":
                self.inputs[path], self.outputs[path] = read[0], self._new_columns(module.out_features)
                return self.outputs[path]
            case "ReLU" | "Dropout" | "Sigmoid" | "L2Normalize":
                return np.asarray(read[0])
            case "ConstantGates":
                self.inputs[path] = self.outputs[path] = read[0]
                return np.asarray(read[0])
            case "SelectColumns":
                return np.asarray(read[0][module.chosen.numpy()])
            case "FactorizationMachine" | "DotInteraction":
                first, *others = read[0].reshape(-1, module.size)
                for other in others:
                    self._union(first, other)
                return np.full(len(getattr(module, "pairs", (0,))), FIXED)
            case "RowDot":
                self._union(*read)
                return np.array([FIXED])
            case "FirstOrder":
                return np.array([FIXED])
            case "NumberVectors" | "JoinFields" | "SplitFields" | "FieldAttention" | "BilinearHeads":
                return self._uncut(module, read[0])
            case "GatedSum":
                gates, first, *others = read
                self._union(gates, np.full(len(gates), FIXED))
                for other in others:
                    self._union(first, other)
                return np.asarray(first)
        raise RequestError(f"{path} is a {type(module).__name__}, whose columns cannot be cut")

    def _uncut(self, module: Any, columns: Numbers) -> Numbers:
        """Fixes the columns that a layer on the vectors of fields reads, and returns those of its result."""
        for number in columns.tolist():
            self._union(np.array([FIXED]), np.array([number]))
        match type(module).__name__:
            case "NumberVectors":
                width = module.count * module.size
            case "JoinFields":
                width = module.fields * module.size
            case "SplitFields":
                width = module.size
            case "FieldAttention":
                width = module.heads * module.size
            case _:
                width = module.weight.shape[0] * module.weight.shape[2]
        return np.full(width, FIXED)

    def _function(self, node: fx.Node, values: Mapping[Any, Any]) -> Numbers:
        match getattr(node.target, "__name__", ""), node.args:
            case "cat", (list(parts), 1):
                return np.concatenate([values[part] for part in parts])
            case "mul", (a, float()):
                return np.asarray(values[a])
            case (("add" | "mul"), (a, b)):
                self._union(values[a], values[b])
                return np.asarray(values[a])
        raise RequestError(f"{node} is {node.target}, whose columns cannot be cut")

    def _new_columns(self, count: int) -> Numbers:
        first = len(self._parents)
        self._parents += range(first, first + count)
        return np.arange(first, first + count)

    def _find(self, number: int) -> int:
        while self._parents[number] != number:
            number = self._parents[number]
        return number

    def _union(self, a: Numbers, b: Numbers) -> None:
        for one, other in zip(a.tolist(), b.tolist(), strict=True):
            first, last = sorted((self._find(one), self._find(other)))
            self._parents[last] = first

    def _grouped(self, network: Any, config: Any) -> dict[str, Numbers]:
        """Returns the sets of units of every setting by its first layer, without sets with a fixed column."""
        order = [name for name, _ in network.named_modules()]
        layers: dict[WidthSetting, list[str]] = {}
        for pattern, settings in network.widths.items():
            sizes = {name: getattr(config, name) for name in settings}
            slots: list[WidthSetting] = []
            for name, size in sizes.items():
                slots += [(name, index) for index in range(len(size))] if isinstance(size, tuple) else [(name, None)]
            for path in (name for name in fnmatch.filter(order, pattern) if name.count(".") == pattern.count(".")):
                own = [name for name in order if name in self.outputs and f"{name}.".startswith(f"{path}.")]
                for slot, layer in zip(slots, own, strict=False):
                    layers.setdefault(slot, []).append(layer)
        grouped = {}
        for slot, paths in layers.items():
            sets = np.unique(np.concatenate([np.atleast_2d(self.outputs[path]) for path in paths]), axis=0)
            if (sets != FIXED).all():
                name = min(paths, key=order.index)
                grouped[name], self._settings[name] = sets, slot
        return {name: grouped[name] for name in order if name in grouped}

    def config(self, config: Any, widths: Mapping[str, int]) -> Any:
        """Returns the settings of the pruned network.

        Args:
            config: Settings of the network.
            widths: {group: width}.

        Returns:
            Settings with these widths.
        """
        for group, width in widths.items():
            name, index = self._settings[group]
            sizes = getattr(config, name)
            config = replace(config, **{name: width if index is None else (*sizes[:index], width, *sizes[index + 1 :])})
        return config

    def pruned(self, network: nn.Module, features: Features, config: Any, removed: Numbers) -> nn.Module:
        """Removes units from a network.

        Args:
            network: Network of these units.
            features: Features of the network.
            config: Settings of the pruned network.
            removed: Units to remove, int64 [m].

        Returns:
            New network in evaluation mode.
        """
        keep = ~np.isin(np.arange(self.count), removed)

        def part(module: Any, path: str, weight: Tensor) -> Tensor:
            if path not in self.outputs:
                return weight
            kept = keep[self.outputs[path]]
            if path not in self.inputs:
                columns = {field.name: mask for field, mask in zip(module.pooled, kept, strict=True)}
                return _stacked(
                    [
                        module.table(number)[:, columns[field.name]]
                        for number, field in enumerate(module.fields)
                        if module.owner(field) == field.name
                    ]
                )
            return weight[kept][:, keep[self.inputs[path]]] if weight.ndim > 1 else weight[kept]

        return rebuilt(network, features, config, part)


def _stacked(tables: list[Tensor]) -> Tensor:
    import torch

    return torch.cat(tables)


def rebuilt(
    network: nn.Module, features: Features, config: Any, part: Callable[[Any, str, Tensor], Tensor]
) -> nn.Module:
    """Creates a network of the same class with other features or settings, with weights computed from `network`.

    Args:
        network: Original network.
        features: Features of the new network.
        config: Settings of the new network.
        part: Called with a module, its path and its weight; returns the new weight.

    Returns:
        New network in evaluation mode. Buffers used only in training are newly initialized.
    """
    made = type(network)(features, config)
    state = dict(made.state_dict())
    for path, module in network.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            state[f"{path}.{name}"] = part(module, path, weight.detach()).contiguous()
    fill(made, state, "the network that is cut")
    return made.eval()


def importances(
    network: nn.Module, units: PruningGroups, batches: Iterable[Mapping[str, Tensor]], kind: str
) -> NDArray[np.float64]:
    """Computes the importance of every unit.

    "taylor": sum over rows of (sum over the unit's columns of y dL/dy)^2, the first-order change of a row's loss if the
    unit outputs 0 (Molchanov et al. 2019). "activation": sum of |y|. y is the output of the unit's layers and tables.

    Args:
        network: Network of the units.
        units: Pruning groups of the network.
        batches: Rows from `zoo.recommenders.training.row_store.RowStore`.
        kind: "taylor" or "activation".

    Returns:
        Importances, float64 [units.count].
    """
    import torch

    from zoo.recommenders.models.multitask.outputs import first_of, label_losses, parents_of

    importance, outputs = torch.zeros(units.count, dtype=torch.float64), {}

    def watch(path: str) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            outputs[path] = output

        return network.get_submodule(path).register_forward_hook(hook)

    hooks = [watch(path) for path in units.outputs]
    places = {path: torch.from_numpy(numbers.ravel()) for path, numbers in units.outputs.items()}
    for batch in batches:
        logits = first_of(network.eval()(batch["ids"], batch["numbers"], batch["scales"]))
        values = list(outputs.values())
        if kind == "activation":
            parts = [value.detach().abs() for value in values]
        else:
            losses = label_losses(logits, batch["label"], parents_of(network)) @ batch["weight"]
            slopes = torch.autograd.grad(losses, values)
            parts = [value.detach() * slope for value, slope in zip(values, slopes, strict=True)]
        changes = torch.zeros(len(logits), units.count, dtype=torch.float64)
        for path, part in zip(outputs, parts, strict=True):
            summed = part.reshape(len(logits), -1, part.shape[1]).sum(1)  # layers on fields have a row per field
            changes.index_add_(1, places[path], summed.double())
        importance += (changes if kind == "activation" else changes.square()).sum(0)
    for handle in hooks:
        handle.remove()
    return importance.numpy()
