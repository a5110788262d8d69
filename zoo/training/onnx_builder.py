"""A network in torch to ONNX: operators appended one by one, named by the path of their module.

Nothing of torch's own exporter takes part, so that a graph's digest depends on the network and its weights alone.
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
    """What the result of a module or function is called in the graph."""
    if node.op == "call_module":
        return str(node.target)
    kind = getattr(node.target, "__name__", str(node.target))
    around = next(reversed(node.meta.get("nn_module_stack", {})), "")
    return f"{around}.{kind}" if around else kind


class Writer:
    """Appends operators to one graph; a name that is taken gets a number."""

    def __init__(self, main: ir.Graph) -> None:
        self.main = main
        self.taken = query.used_names(main)

    def weight(self, name: str, array: NDArray[Any]) -> ir.Value:
        """An initializer, made at its first use."""
        found = self.main.initializers.get(name)
        return edit.initializer(self.main, name, array, self.taken) if found is None else found

    def add(self, op: str, inputs: Sequence[ir.Value | None], name: str, **attributes: Any) -> ir.Value:
        """Append an operator; returns its result, float unless `dtype` says otherwise."""
        node = edit.node(op, list(inputs), name, taken=self.taken, **{"dtype": ir.DataType.FLOAT, **attributes})
        self.main.append(node)
        return node.outputs[0]

    def layer(self, inputs: list[ir.Value], path: str, module: nn.Module) -> ir.Value:
        """Append what `module` computes after training. Raises RequestError for a kind that is not known here."""
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
