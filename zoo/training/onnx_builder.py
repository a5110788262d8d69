"""Builds ONNX graphs from torch modules: operators are appended one by one and named by the path of their module.

torch's exporter is not used, so that the digest of a graph depends only on the network and its weights.
"""

from __future__ import annotations

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
        found = self.main.initializers.get(name)
        return edit.initializer(self.main, name, array, self.taken) if found is None else found

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

    def layer(self, inputs: list[ir.Value], path: str, module: nn.Module) -> ir.Value:
        """Appends the inference form of a torch module.

        Args:
            inputs: Inputs of the module.
            path: Path of the module in the network, the prefix of its names.
            module: Identity, Dropout, Linear or ReLU.

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
                    self.weight(f"{path}.{key}", np.array(each.cpu())) for key, each in module.state_dict().items()
                ]
                return self.add("Gemm", [*inputs, *weights], path, transB=1)
            case "ReLU":
                return self.add("Relu", inputs, path)
        raise RequestError(f"{path} is {module}, which has no ONNX form here")
