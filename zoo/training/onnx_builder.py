"""Builds ONNX graphs from torch modules: operators are appended one by one and named by the path of their module.

torch's exporter is not used, so that the digest of a graph depends only on the network and its weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query

if TYPE_CHECKING:
    from torch import fx, nn

OPSET = 18


def path_of(node: fx.Node) -> str:
    """Returns the name of the result of a module or function in the graph.

    Args:
        node: Node of a torch.fx graph.
    """
    if node.op == "call_module":
        return str(node.target)
    kind = getattr(node.target, "__name__", str(node.target))
    around = next(reversed(node.meta.get("nn_module_stack", {})), "")
    return f"{around}.{kind}" if around else kind


class Writer:
    """Appends operators to a graph; names that exist already get a number.

    Args:
        main: Graph to extend.
    """

    def __init__(self, main: ir.Graph) -> None:
        self.main = main
        self.taken = query.used_names(main)

    def weight(self, name: str, array: NDArray[Any]) -> ir.Value:
        """Adds an initializer, or returns the existing one of this name.

        Args:
            name: Name of the initializer.
            array: Values.

        Returns:
            Value of the initializer.
        """
        initializer = self.main.initializers.get(name)
        return edit.initializer(self.main, name, array, self.taken) if initializer is None else initializer

    def constant(self, name: str, value: NDArray[Any] | Sequence[int] | float) -> ir.Value:
        """Adds a constant as an initializer, or returns the existing one of this name.

        Args:
            name: Name of the initializer.
            value: Array, integers, or a number, which becomes float32.

        Returns:
            Value of the initializer.
        """
        return self.weight(name, np.array(value, np.float32) if isinstance(value, float) else np.asarray(value))

    def add(self, op: str, inputs: Sequence[ir.Value | None], name: str, **attributes: Any) -> ir.Value:
        """Appends an operator.

        Args:
            op: Operator type.
            inputs: Inputs; None for an omitted optional input.
            name: Name of the node and its output.
            **attributes: Attributes of the operator, and `dtype`, the type of the output (default: float32).

        Returns:
            First output of the operator.
        """
        node = edit.node(op, list(inputs), name, taken=self.taken, **{"dtype": ir.DataType.FLOAT, **attributes})
        self.main.append(node)
        return node.outputs[0]

    def activation(self, x: ir.Value, path: str, kind: str, one: str = "one") -> ir.Value:
        """Appends an activation.

        Args:
            x: Input, float32.
            path: Prefix of the names.
            kind: "relu", "swish", "tanh", "gelu", or "gelu_tanh", its approximation.
            one: Name of the float constant 1.

        Returns:
            Result, of the shape of the input.
        """
        if kind == "relu":
            return self.add("Relu", [x], f"{path}.relu")
        if kind == "swish":
            return self.add("Mul", [x, self.add("Sigmoid", [x], f"{path}.sigmoid")], f"{path}.swish")
        if kind == "tanh":
            return self.add("Tanh", [x], f"{path}.tanh")
        if kind == "gelu":  # x (1 + erf(x / sqrt 2)) / 2
            inner = self.add("Div", [x, self.constant("sqrt2", math.sqrt(2))], f"{path}.deviations")
            share = self.add("Erf", [inner], f"{path}.erf")
        else:  # x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
            cube = self.add("Pow", [x, self.constant("three", 3.0)], f"{path}.cube")
            cube = self.add("Mul", [cube, self.constant("cubic", 0.044715)], f"{path}.cubic")
            inner = self.add("Add", [x, cube], f"{path}.inner")
            inner = self.add("Mul", [inner, self.constant("slope", math.sqrt(2 / math.pi))], f"{path}.slope")
            share = self.add("Tanh", [inner], f"{path}.tanh")
        share = self.add("Add", [share, self.constant(one, 1.0)], f"{path}.share")
        product = self.add("Mul", [x, share], f"{path}.twice")
        return self.add("Mul", [product, self.constant("half", 0.5)], f"{path}.gelu")

    def rms_norm(
        self, x: ir.Value, path: str, weight: tuple[str, NDArray[Any]], epsilon: float, result: str = ""
    ) -> ir.Value:
        """Appends the division by the root of the mean square (Zhang and Sennrich 2019), and a weight.

        Args:
            x: Input, float32.
            path: Prefix of the names.
            weight: Name and values of the weight, float32 [columns].
            epsilon: Added to the mean square.
            result: Name of the output; default: `path`.

        Returns:
            Output, of the shape of the input.
        """
        square = self.add("Mul", [x, x], f"{path}.square")
        mean = self.add("ReduceMean", [square, self.constant("last", [-1])], f"{path}.mean", keepdims=1)
        mean = self.add("Add", [mean, self.constant("epsilon", float(epsilon))], f"{path}.mean.epsilon")
        unit = self.add("Div", [x, self.add("Sqrt", [mean], f"{path}.root")], f"{path}.unit")
        return self.add("Mul", [unit, self.weight(*weight)], result or path)

    def distances(self, length: ir.Value, furthest: int, prefix: str = "") -> ir.Value:
        """Appends the distance of each key from each query, positive for keys after it.

        Args:
            length: Number of tokens, int64 [1].
            furthest: Added to the distances.
            prefix: Prefix of the names.

        Returns:
            int64 [tokens, tokens].
        """
        dtype = ir.DataType.INT64
        count = self.add("Squeeze", [length], f"{prefix}count", dtype=dtype)
        bounds = [self.constant("zero.int", np.array(0)), count, self.constant("one.int", np.array(1))]
        keys = self.add("Range", bounds, f"{prefix}places", dtype=dtype)
        queries = self.add("Unsqueeze", [keys, self.constant("columns", [1])], f"{prefix}place", dtype=dtype)
        ahead = self.add("Sub", [keys, queries], f"{prefix}ahead", dtype=dtype)
        offset = self.constant(f"{prefix}furthest", np.array(furthest))
        return self.add("Add", [ahead, offset], f"{prefix}distance", dtype=dtype)

    def layer(self, inputs: list[ir.Value], path: str, module: nn.Module) -> ir.Value:
        """Appends the inference form of a torch module.

        Args:
            inputs: Inputs of the module.
            path: Path of the module in the network, the prefix of its names.
            module: Identity, Dropout, Linear, ReLU or Sigmoid.

        Returns:
            Output of the module.

        Raises:
            RequestError: The module is of another type.
        """
        match type(module).__name__:
            case "Identity" | "Dropout":
                return inputs[0]
            case "Linear":
                weights = [
                    self.weight(f"{path}.{key}", np.array(tensor.cpu())) for key, tensor in module.state_dict().items()
                ]
                return self.add("Gemm", [*inputs, *weights], path, transB=1)
            case "ReLU" | "Sigmoid" as kind:
                return self.add(kind.capitalize(), inputs, path)
        raise RequestError(f"{path} is {module}, which has no ONNX form here")
