"""Export of a torch image classifier to ONNX by torch.fx; layers and values are named after module paths."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.data.preprocess import Preprocess
from pipelines.graph import query
from pipelines.graph.infer import infer_shapes
from zoo.training.onnx_builder import OPSET, Writer, path_of

if TYPE_CHECKING:
    from torch import fx, nn

IMAGE, LOGITS = "image", "logits"


def export(model: nn.Module, preprocess: Preprocess) -> ir.Model:
    """Exports an image classifier in inference mode to ONNX, by torch.fx.

    The graph begins with (image / 255 - mean) / std, after reversing the channels for BGR networks; it has no resizing.
    Operators and values are named by the path of their module ("layer1.0.conv1"), weights as in the state dict.

    Args:
        model: The network.
        preprocess: Preprocessing of the network.

    Returns:
        Graph with `image` uint8 [batch, 3, size, size] (RGB) -> `logits` float32 [batch, classes].

    Raises:
        RequestError: A module or function is not supported; names its path.
    """
    from torch import fx, nn

    size = preprocess.size
    image = ir.Value(name=IMAGE, type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape(["batch", 3, size, size]))
    writer = _Writer(ir.Graph([image], [], nodes=[], name=type(model).__name__, opset_imports={"": OPSET}))
    values = writer.values
    traced = fx.symbolic_trace(model)
    ranks = _ranks(traced, model, size)
    for node in traced.graph.nodes:
        inputs = [values[argument] for argument in node.args if isinstance(argument, fx.Node)]
        match node.op:
            case "placeholder":
                values[node] = _normalize(writer, image, preprocess)
            case "output":
                writer.main.outputs.append(inputs[0])
            case "get_attr":
                parameter: Any = attrgetter(node.target)(model)
                values[node] = writer.weight(node.target, np.array(parameter.detach().cpu()))
            case "call_module":
                module = model.get_submodule(node.target)
                tokens = type(module) is nn.Linear and ranks.get(node.args[0], 2) > 2
                append = writer.token_linear if tokens else writer.layer
                values[node] = append(inputs, node.target, module)
            case _:
                values[node] = writer.function(inputs, node)
    logits = writer.main.outputs[0]
    logits.name, logits.shape = LOGITS, ir.Shape(["batch", _columns(logits)])
    exported = ir.Model(writer.main, ir_version=9)
    infer_shapes(exported)
    for node in writer.main:
        _drop_ceil(node)
    return exported


def _ranks(traced: fx.GraphModule, model: nn.Module, size: int) -> dict[Any, int]:
    """Number of axes of the values of a network that has tokens; {} for others, whose linear layers take vectors."""
    import torch
    from torch.fx.passes.shape_prop import ShapeProp

    if not any(isinstance(module, torch.nn.LayerNorm) for module in model.modules()):
        return {}
    training = model.training
    with torch.no_grad():
        ShapeProp(traced.eval()).propagate(torch.zeros(1, 3, size, size))
    traced.train(training)
    return {
        node: len(node.meta["tensor_meta"].shape)
        for node in traced.graph.nodes
        if hasattr(node.meta.get("tensor_meta"), "shape")
    }


def _normalize(writer: _Writer, image: ir.Value, preprocess: Preprocess) -> ir.Value:
    reverse = preprocess.channels == "BGR"
    order = slice(None, None, -1 if reverse else 1)
    mean, std = (np.array(stat[order], np.float32).reshape(1, 3, 1, 1) for stat in (preprocess.mean, preprocess.std))
    x = writer.add("Cast", [image], f"{IMAGE}.float", to=int(ir.DataType.FLOAT))
    if reverse:
        x = writer.add("Gather", [x, writer.weight(f"{IMAGE}.order", np.array([2, 1, 0]))], f"{IMAGE}.reversed", axis=1)
    x = writer.add("Div", [x, writer.weight(f"{IMAGE}.white", np.array(255, np.float32))], f"{IMAGE}.scaled")
    x = writer.add("Sub", [x, writer.weight(f"{IMAGE}.mean", mean)], f"{IMAGE}.centred")
    return writer.add("Div", [x, writer.weight(f"{IMAGE}.std", std)], f"{IMAGE}.normalized")


def _columns(logits: ir.Value) -> int:
    gemm = logits.producer()
    weight = query.constant(gemm.inputs[1]) if gemm is not None and gemm.op_type == "Gemm" else None
    if weight is None:
        raise RequestError("the network does not end with a linear layer; expected a classifier")
    return int(weight.shape[0])


def _drop_ceil(pool: ir.Node) -> None:
    """Clears ceil_mode if it has no effect (all windows end at the border); engines have no int8 kernel with it."""
    sides, kernel, strides = (
        query.dimensions(pool.inputs[0] if pool.inputs else None),
        *(pool.attributes.get_ints(key, ()) for key in ("kernel_shape", "strides")),
    )
    if sides is None or not pool.attributes.get_int("ceil_mode", 0) or any(pool.attributes.get_ints("pads", ())):
        return
    if all(side is not None and (side - k) % s == 0 for side, k, s in zip(sides[2:], kernel, strides, strict=True)):
        del pool.attributes["ceil_mode"]


class _Writer(Writer):
    """Writer of the modules and functions of image classifiers.

    Attributes:
        values: Values of the nodes of the traced network.
    """

    def __init__(self, main: ir.Graph) -> None:
        super().__init__(main)
        self.values: dict[Any, ir.Value] = {}

    def layer(self, inputs: list[ir.Value], path: str, module: nn.Module) -> ir.Value:
        """See `Writer.layer`; supports the modules of convolutional networks."""
        kind = type(module).__name__
        state = {
            key: self.weight(f"{path}.{key}", np.array(tensor.cpu()))
            for key, tensor in module.state_dict().items()
            if tensor.ndim
        }
        m: Any = module
        match kind:
            case "Conv2d" if m.padding_mode == "zeros" and not isinstance(m.padding, str):
                attributes = {"group": m.groups, "dilations": list(m.dilation)}
                return self.add("Conv", [*inputs, *state.values()], path, **_window(m), **attributes)
            case "BatchNorm2d" if len(state) == 4:  # with weights and running statistics
                return self.add("BatchNormalization", [*inputs, *state.values()], path, epsilon=m.eps)
            case "Identity" | "Dropout" | "Linear" | "ReLU":
                return super().layer(inputs, path, module)
            case "GELU" if m.approximate == "none":
                return self.activation(inputs[0], path, "gelu")
            case "Hardswish":
                return self.add("HardSwish", inputs, path)
            case "Hardsigmoid":
                return self.add("HardSigmoid", inputs, path, alpha=1 / 6, beta=0.5)
            case "LayerNorm" if len(m.normalized_shape) == 1:
                return self.add("LayerNormalization", [*inputs, *state.values()], path, axis=-1, epsilon=m.eps)
            case "ReLU6":
                bounds = [self.weight(name, np.array(value, np.float32)) for name, value in (("zero", 0), ("six", 6))]
                return self.add("Clip", [*inputs, *bounds], path)
            case "MaxPool2d" if _pair(m.dilation) == [1, 1] and not m.return_indices:
                return self.add("MaxPool", inputs, path, **_window(m), ceil_mode=int(m.ceil_mode))
            case "AvgPool2d" if m.divisor_override is None:
                counts = {"count_include_pad": int(m.count_include_pad), "ceil_mode": int(m.ceil_mode)}
                return self.add("AveragePool", inputs, path, **_window(m), **counts)
            case "AdaptiveAvgPool2d" if m.output_size in (1, (1, 1)):
                return self.add("GlobalAveragePool", inputs, path)
            case "ZeroPad2d":
                return self._pad(inputs, path, m.padding)
            case "Flatten" if (m.start_dim, m.end_dim) == (1, -1):
                return self.add("Flatten", inputs, path, axis=1)
        raise RequestError(
            f"{path} is {module}, which has no ONNX form here; known kinds: see zoo/vision/export/fx_export.py"
        )

    def token_linear(self, inputs: list[ir.Value], path: str, module: Any) -> ir.Value:
        """Appends a linear layer of tokens [..., columns], as MatMul and Add.

        Args:
            inputs: Tokens.
            path: Path of the module in the network.
            module: `torch.nn.Linear`.
        """
        weight = self.weight(f"{path}.weight.T", np.ascontiguousarray(module.weight.detach().cpu().numpy().T))
        product = self.add("MatMul", [*inputs, weight], path if module.bias is None else f"{path}.product")
        if module.bias is None:
            return product
        return self.add("Add", [product, self.weight(f"{path}.bias", module.bias.detach().cpu().numpy())], path)

    def function(self, inputs: list[ir.Value], node: fx.Node) -> ir.Value:
        """Appends a function that the `forward` of a module calls.

        Args:
            inputs: Inputs of the function.
            node: Call of the function in the traced network.

        Returns:
            Output of the function.

        Raises:
            RequestError: The function is not supported.
        """
        kind, path = getattr(node.target, "__name__", str(node.target)), path_of(node)
        options: dict[str, Any] = {key: value for key, value in node.kwargs.items() if value is not None}
        arguments: Any = node.args
        match kind, arguments[1:]:
            case "add" | "iadd", (_,) if len(inputs) == 2 and not options:
                return self.add("Add", inputs, path)
            case "flatten", (1,) if not options:
                return self.add("Flatten", inputs, path, axis=1)
            case "flatten", (2,) if not options:
                return self.add("Reshape", [*inputs, self.constant("shape.flat", [0, 0, -1])], path)
            case "mul", (_,) if len(inputs) == 2 and not options:
                return self.add("Mul", inputs, path)
            case "mul", (float(factor),) if not options:
                return self.add("Mul", [*inputs, self.constant(f"factor.{factor:g}", factor)], path)
            case "matmul", (_,) if len(inputs) == 2:
                return self.add("MatMul", inputs, path)
            case "softmax", (-1,):
                return self.add("Softmax", inputs, path, axis=-1)
            case "permute", (*order,) if sorted(order) == list(range(len(order))):
                return self.add("Transpose", inputs, path, perm=order)
            case "reshape", (-1, *sizes) if all(isinstance(size, int) for size in sizes):
                shape = self.constant(f"shape.{'.'.join(map(str, sizes))}", [-1, *sizes])
                return self.add("Reshape", [*inputs, shape], path)
            case "layer_norm", ((_,),) if options.keys() == {"weight", "bias", "eps"}:
                weights = [self.values[options[key]] for key in ("weight", "bias")]
                return self.add("LayerNormalization", [*inputs, *weights], path, axis=-1, epsilon=options["eps"])
            case "getattr", ("shape",):
                return self.add("Shape", inputs, path, dtype=ir.DataType.INT64)
            case "getitem", (int(index),) if inputs[0].dtype == ir.DataType.INT64:
                side = [*inputs, self.constant(f"axis.{index}", [index])]
                return self.add("Gather", side, path, axis=0, dtype=ir.DataType.INT64)
            case "getitem", (int(index),):
                return self.add("Gather", [*inputs, self.constant(f"index.{index}", np.array(index))], path, axis=0)
            case "getitem", ((slice(start=None, stop=None, step=None), int(index)),):
                return self.add("Gather", [*inputs, self.constant(f"index.{index}", np.array(index))], path, axis=1)
            case "expand", (_, *sizes) if len(inputs) == 2 and set(sizes) == {-1}:
                ones = self.constant(f"ones.{len(sizes)}", [1] * len(sizes))
                shape = self.add("Concat", [inputs[1], ones], f"{path}.shape", axis=0, dtype=ir.DataType.INT64)
                return self.add("Expand", [inputs[0], shape], path)
            case "cat", (int(axis),):
                return self.add("Concat", [self.values[argument] for argument in arguments[0]], path, axis=axis)
            case "pad", (tuple(pads),) if len(pads) == 4 and options in (
                {"mode": "constant"},
                {"mode": "constant", "value": 0},
            ):
                return self._pad(inputs, path, pads)
        raise RequestError(
            f"{path} is {node.format_node()}, which has no ONNX form here; known functions: "
            "see zoo/vision/export/fx_export.py"
        )

    def _pad(self, inputs: list[ir.Value], path: str, pads: Sequence[Any]) -> ir.Value:
        left, right, top, bottom = pads
        widths = self.weight(f"{path}.pads", np.array([0, 0, top, left, 0, 0, bottom, right], np.int64))
        return self.add("Pad", [*inputs, widths], path)


def _pair(value: Any) -> list[int]:
    return list(value) if isinstance(value, tuple) else [value, value]


def _window(module: Any) -> dict[str, list[int]]:
    strides = module.kernel_size if module.stride is None else module.stride
    return {"kernel_shape": _pair(module.kernel_size), "strides": _pair(strides), "pads": _pair(module.padding) * 2}
