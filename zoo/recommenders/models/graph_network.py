"""An imported float ONNX graph as a torch network, for fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.nn import functional

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query
from zoo.recommenders.data.features import Features
from zoo.recommenders.models.layers import Embeddings, FirstOrder

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "Abs": torch.abs,
    "Add": torch.add,
    "Clip": torch.clamp,
    "Div": torch.div,
    "Elu": functional.elu,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Log": torch.log,
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Pow": torch.pow,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Selu": functional.selu,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Softplus": functional.softplus,
    "Softsign": functional.softsign,
    "Sqrt": torch.sqrt,
    "Sub": torch.sub,
    "Sum": lambda *values: reduce(torch.add, values),
    "Tanh": torch.tanh,
}


class GraphNetwork(nn.Module):
    """Network that computes logits as an imported TensorFlow graph does.

    Tables are `Embeddings`, weights of layers are `nn.Linear`, and biases are parameters. Other constants are not
    trained.

    Args:
        model: Float ONNX model with the inputs `ids` and `numbers` and the output `probability`.
        features: Encoding of the rows.

    Raises:
        RequestError: The graph has an operator that cannot be trained.
    """

    def __init__(self, model: ir.Model, features: Features) -> None:
        super().__init__()
        self.model, self.modules_of = model, nn.ModuleList()
        self.biases = nn.ParameterList()
        self._tables: dict[str, tuple[int, str]] = {}  # of an initializer: its place among the modules, and its kind
        self._biases: dict[str, int] = {}
        self._constants: dict[str, torch.Tensor] = {}
        (probability,) = model.graph.outputs
        end = probability.producer()
        if end is None or end.op_type != "Sigmoid":
            raise RequestError("the graph does not end in a Sigmoid; expected a click's probability")
        self._nodes, self._logit = [node for node in model.graph if node is not end], _name(end.inputs[0])
        for node in self._nodes:
            self._add(node, features)

    def _add(self, node: ir.Node, features: Features) -> None:
        """Makes the parameters of an operator."""
        arrays = {_name(source): array for source in node.inputs if (array := query.constant(source)) is not None}
        table = _name(node.inputs[0])
        if node.op_type == "Gather" and table in arrays:
            if table in self._tables:
                return
            column = node.inputs[1].producer().inputs[1]  # type: ignore[union-attr]
            field = features.fields[int(query.constant(column))]  # type: ignore[arg-type]
            width = arrays[table].shape[1]
            made = FirstOrder([field]) if width == 1 else Embeddings([field], width)
            self._keep(table, "table", made, made.weight, arrays[table])
        elif node.op_type == "MatMul" and (weight := _name(node.inputs[1])) in arrays:
            if weight not in self._tables:
                rows, columns = arrays[weight].shape
                layer = nn.Linear(rows, columns, bias=False)
                self._keep(weight, "kernel", layer, layer.weight, arrays[weight].T)
        elif node.op_type in FUNCTIONS or node.op_type in ("Gather", "Concat", "LeakyRelu"):
            for name, array in arrays.items():
                if node.op_type == "Add" and name.endswith("bias"):
                    self._biases.setdefault(name, len(self._biases))
                    if len(self.biases) < len(self._biases):
                        self.biases.append(nn.Parameter(torch.from_numpy(array.copy())))
                else:
                    self._constants[name] = torch.from_numpy(array.copy())
        else:
            raise RequestError(f"the operator {node.name} ({node.op_type}) is not trained here")

    def _keep(self, name: str, kind: str, module: nn.Module, weight: torch.Tensor, array: Any) -> None:
        with torch.no_grad():
            weight.copy_(torch.from_numpy(np.array(array)))
        self._tables[name] = len(self.modules_of), kind
        self.modules_of.append(module)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """See `TrainableRankingFamily.build`."""
        values: dict[str, Any] = {"ids": ids, "numbers": numbers, **self._constants}
        values |= {name: self.biases[number] for name, number in self._biases.items()}
        for node in self._nodes:
            inputs = [_name(value) for value in node.inputs]
            place = next((self._tables[name] for name in inputs if name in self._tables), None)
            if place is not None:
                module, kind = self.modules_of[place[0]], place[1]
                result = module(ids, scales) if kind == "table" else module(values[inputs[0]])
            elif node.op_type == "Gather":
                source, column = values[inputs[0]], values[inputs[1]]
                result = source[:, column.reshape(-1)] if column.ndim else source[:, column]
            elif node.op_type == "Concat":
                result = torch.cat([values[name] for name in inputs], 1)
            elif node.op_type == "LeakyRelu":
                result = functional.leaky_relu(values[inputs[0]], node.attributes.get_float("alpha", 0.01))
            else:
                result = FUNCTIONS[node.op_type](*(values[name] for name in inputs))
            values[_name(node.outputs[0])] = result
        return values[self._logit]

    def renamed(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Renames the weights of the graph as `export` names those of the network.

        Args:
            weights: {initializer of the graph: tensor}.

        Returns:
            {name from `export`: tensor}.
        """
        renamed = {}
        for name, (index, kind) in self._tables.items():
            module = self.modules_of[index]
            if kind == "table":
                renamed[f"modules_of.{index}.{module.fields[0].name}.table"] = weights[name]  # type: ignore[index,union-attr]
            else:
                renamed[f"modules_of.{index}.weight"] = weights[name].T.contiguous()
        return renamed

    def exported(self) -> ir.Model:
        """Returns the graph with the current weights."""
        model = self.model.clone()
        arrays = {name: self.biases[number] for name, number in self._biases.items()}
        for name, (index, kind) in self._tables.items():
            weight: Any = self.modules_of[index].weight
            arrays[name] = weight if kind == "table" else weight.T
        for name, array in arrays.items():
            trained = np.ascontiguousarray(array.detach().numpy(), np.float32)
            model.graph.initializers[name].const_value = ir.tensor(trained, name=name)
        return model


def opened(path: Any, features: Features) -> GraphNetwork:
    """Loads the network of a float ONNX file.

    Args:
        path: ONNX file.
        features: Encoding of the rows.

    Returns:
        The network.

    Raises:
        RequestError: The graph has an operator that cannot be trained.
    """
    from pipelines.graph import io

    model = io.load(path)
    edit.expand_fp16(model)
    return GraphNetwork(model, features)


def _name(value: ir.Value | None) -> str:
    return str(value.name) if value is not None else ""
