"""Exports recommenders from torch to ONNX: traced by torch.fx, one table per field, layers named by module path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from pipelines.core.errors import RequestError, one_line
from pipelines.graph.infer import infer_shapes
from zoo.recommenders.data.features import Features
from zoo.recommenders.export import functions, sequence_parts
from zoo.recommenders.export.field_operators import FIELD_LAYERS, FieldWriter
from zoo.recommenders.models.multitask.outputs import parents_of
from zoo.training.onnx_builder import OPSET, path_of

if TYPE_CHECKING:
    from torch import fx, nn

PARTS = (
    *("Embeddings", "FirstOrder", "FactorizationMachine", "DotInteraction", "SelectColumns", "L2Normalize", "RowDot"),
    *FIELD_LAYERS,
    *sequence_parts.PARTS,
    "GatedSum",
)


TENSOR = "tensor"  # where a traced step's meta has the name of its result in the graph


def trace(model: nn.Module) -> fx.Graph:
    """Traces a network with torch.fx.

    Args:
        model: Network of torch layers and modules of `zoo.recommenders.models.layers`.

    Returns:
        Graph of the calls of modules and functions.
    """
    from torch import fx

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return type(module).__name__ in PARTS or super().is_leaf_module(module, name)

    return Tracer().trace(model)


def export(model: nn.Module, features: Features, steps: fx.Graph | None = None) -> ir.Model:
    """Exports the inference graph of a network.

    The graph has the inputs of `features` and the output `probability`, float32 [batch, 1]: the sigmoid of the
    network's first result. Further results have the names in `model.outputs`. For several labels that result
    concatenates their logits, and there is an output `probability_LABEL`, float32 [batch, 1], for every label.

    Args:
        model: Network.
        features: Features of the network.
        steps: Trace of the network; the meta of every node gets the name of its result (`TENSOR`). None: traced here.

    Returns:
        Float32 ONNX model.

    Raises:
        RequestError: A module or function is not supported; the message has its path.
    """
    from torch import fx

    inputs = {
        name: ir.Value(
            name=name, type=ir.TensorType(ir.DataType.from_numpy(dtype)), shape=ir.Shape(["batch", *shape[1:]])
        )
        for name, (dtype, shape) in features.inputs.items()
    }
    graph = ir.Graph(list(inputs.values()), [], nodes=[], name=type(model).__name__, opset_imports={"": OPSET})
    writer = RecommenderWriter(graph, inputs, {id(module): path for path, module in model.named_modules()})
    values: dict[Any, Any] = {}
    steps = trace(model) if steps is None else steps
    labels = features.schema.labels
    logits = _logits(steps) if len(labels) > 1 else None
    for node in steps.nodes:
        arguments, options = fx.map_arg(node.args, values.get), fx.map_arg(node.kwargs, values.get)
        match node.op:
            case "placeholder":
                values[node] = inputs.get(node.target)
            case "output":
                results = arguments[0] if isinstance(arguments[0], tuple) else arguments
            case _ if node is logits:
                values[node] = arguments[0]
            case "call_module":
                values[node] = writer.part(
                    [argument for argument in arguments if argument is not None],
                    node.target,
                    model.get_submodule(node.target),
                )
            case "get_attr":
                array = attrgetter(node.target)(model).detach().float().numpy()
                values[node] = writer.weight(node.target, array)
            case _:
                kind = getattr(node.target, "__name__", str(node.target))
                values[node] = writer.function(arguments, path_of(node), kind, options)
    names = ["probability"] if logits is None else [f"probability_{label}" for label in labels]
    probabilities = writer.probabilities(results[:1] if logits is None else results[0], names, parents_of(model))
    names += getattr(model, "outputs", ())
    for name, value in zip(names, [*probabilities, *results[1:]], strict=True):
        width = 1 if value in probabilities else int(model.output_size)  # type: ignore[arg-type]
        value.name, value.shape = name, ir.Shape(["batch", width])
        graph.outputs.append(value)
    for node, value in values.items():
        if value is not None and node is not logits:
            node.meta[TENSOR] = value.name
    exported = ir.Model(graph, ir_version=9)
    infer_shapes(exported)
    if any(node.op_type == "Gemm" and node.outputs[0].shape is None for node in graph):
        try:
            onnx.shape_inference.infer_shapes(ir.to_proto(exported), strict_mode=True)
        except onnx.shape_inference.InferenceError as error:
            raise RequestError(
                f"the exported network has no shapes ({one_line(error)}); layers of torch.nn take [n, width]: "
                "SplitFields and JoinFields of models/field_layers.py make rows of the vectors of fields"
            ) from error
    return exported


def _logits(steps: fx.Graph) -> Any:
    """Returns the step that concatenates the logits of several labels."""
    (result,) = next(node for node in steps.nodes if node.op == "output").args
    logits: Any = result[0] if isinstance(result, tuple) else result
    if getattr(logits.target, "__name__", "") != "cat":
        raise RequestError(f"found {logits} as the logits of several labels, expected their concatenation")
    return logits


class RecommenderWriter(FieldWriter):
    """Writes modules and functions of recommenders; `paths` has the path of every module by its `id`."""

    def __init__(self, main: ir.Graph, inputs: dict[str, ir.Value], paths: dict[int, str]) -> None:
        super().__init__(main)
        self.inputs, self.paths = inputs, paths
        self._lookups: dict[tuple[str, str], ir.Value] = {}
        self._columns: dict[tuple[str, int, int], ir.Value] = {}

    def part(self, inputs: list[ir.Value], path: str, module: Any) -> ir.Value:
        """Appends a module of `zoo.recommenders.models`, or a layer of torch.

        Args:
            inputs: Inputs of the module.
            path: Path of the module in the network, the prefix of its names.
            module: The module.

        Returns:
            Its result.
        """
        if type(module).__name__ in FIELD_LAYERS:
            return self.field_layer(inputs[0], path, module)
        match type(module).__name__:
            case "Embeddings":
                return self.add("Concat", self._vectors(module, path), path, axis=1)
            case "FirstOrder":
                return self.add("Sum", self._vectors(module, path), path)
            case "FactorizationMachine" if module.fields < 2:  # no pair: zeros, as a layer that every engine knows
                zeros = self.weight(f"{path}.none", np.zeros((module.size, 1), np.float32))
                return self.add("MatMul", [inputs[0], zeros], path)
            case "FactorizationMachine":
                e = self._vectors_apart(inputs[0], module.fields, module.size, path)
                total = self._sum(e, f"{path}.total", 1, keepdims=0)
                square = self.add("Mul", [total, total], f"{path}.total.square")
                squares = self._sum(self.add("Mul", [e, e], f"{path}.squares"), f"{path}.squares.total", 1, keepdims=0)
                pairs = self._sum(self.add("Sub", [square, squares], f"{path}.twice"), f"{path}.twice.total", 1)
                return self.add("Mul", [pairs, self.weight("half", np.array(0.5, np.float32))], path)
            case "DotInteraction":
                x = self._vectors_apart(inputs[0], module.count, module.size, path)
                turned = self.add("Transpose", [x], f"{path}.transposed", perm=[0, 2, 1])
                products = self.add("MatMul", [x, turned], f"{path}.products")
                flat = self.weight(f"{path}.flat", np.array([-1, module.count**2]))
                products = self.add("Reshape", [products, flat], f"{path}.products.flat")
                return self.add("Gather", [products, self.weight(f"{path}.pairs", module.pairs.numpy())], path, axis=1)
            case "SelectColumns":
                return self.add(
                    "Gather", [inputs[0], self.weight(f"{path}.columns", module.chosen.numpy())], path, axis=1
                )
            case "L2Normalize":
                squares = self.add("Mul", [inputs[0], inputs[0]], f"{path}.squares")
                least = self.weight("least", np.array(1e-12, np.float32))
                total = self.add("Max", [self._sum(squares, f"{path}.total", 1), least], f"{path}.least")
                return self.add("Div", [inputs[0], self.add("Sqrt", [total], f"{path}.length")], path)
            case "RowDot":
                return self._sum(self.add("Mul", inputs, f"{path}.products"), path, 1)
            case "GatedSum":
                return self._gated_sum(inputs[0], inputs[1:], path)
        if type(module).__name__ in sequence_parts.PARTS:
            return sequence_parts.part(self, inputs, path, module)
        return self.layer(inputs, path, module)

    def probabilities(self, logits: Sequence[ir.Value], names: Sequence[str], parents: Sequence[int]) -> list[ir.Value]:
        """Appends the sigmoid of every logit, and its product with that of its parent, if it has one.

        Args:
            logits: Logit of every label, [batch, 1].
            names: Names of the results.
            parents: See `parents_of`.

        Returns:
            Probability of every label, [batch, 1].
        """
        parents = parents or [-1] * len(names)
        names = [f"{name}.conditional" if parent >= 0 else name for name, parent in zip(names, parents, strict=True)]
        shares = [self.add("Sigmoid", [logit], name) for logit, name in zip(logits, names, strict=True)]
        return [
            share if parent < 0 else self.add("Mul", [share, shares[parent]], name.removesuffix(".conditional"))
            for share, name, parent in zip(shares, names, parents, strict=True)
        ]

    def _gated_sum(self, gates: ir.Value, experts: Sequence[ir.Value], path: str) -> ir.Value:
        """Appends the sum of the experts, weighted by the softmax of the gates: [batch, width]."""
        shares = self.add("Softmax", [gates], f"{path}.shares", axis=1)
        column = self.weight(f"{path}.column", np.array([-1, len(experts), 1]))
        row = self.weight("row", np.array([1]))
        stack = [self.add("Unsqueeze", [expert, row], f"{path}.expert{index}") for index, expert in enumerate(experts)]
        stacked = self.add("Concat", stack, f"{path}.experts", axis=1)
        weights = self.add("Reshape", [shares, column], f"{path}.weights")
        return self._sum(self.add("Mul", [stacked, weights], f"{path}.weighted"), path, 1, keepdims=0)

    def function(self, inputs: tuple[Any, ...], path: str, kind: str, options: Mapping[str, Any]) -> ir.Value:
        """Appends a function or a method of a tensor called by `forward`, see `functions`.

        Args:
            inputs: Positional arguments.
            path: Prefix of the names.
            kind: Name of the function.
            options: Keyword arguments.

        Returns:
            Its result.

        Raises:
            RequestError: The function has no ONNX form.
        """
        if (result := functions.function(self, kind, inputs, options, path)) is not None:
            return result
        arguments = [str(argument) for argument in (*inputs, *options.items()) if not isinstance(argument, ir.Value)]
        raise RequestError(
            f"{path} calls {kind}({', '.join(['tensor', *arguments])}), which has no rule in "
            f"zoo/recommenders/export/functions.py; known functions: "
            f"{', '.join(sorted(name for names, _ in functions.RULES for name in names))}"
        )

    def _vectors(self, module: Any, path: str) -> list[ir.Value]:
        """Appends the lookup of every field, [batch, size] each."""
        vectors = []
        for field in module.pooled:
            name = f"{path}.{field.name}"
            rows = self.rows(module, path, field)
            if field.is_list:
                mean = field.scale >= 0
                axes = self.weight("axis1", np.array([1], np.int64))
                op = "ReduceMax" if field.column.pooling == "max" else "ReduceSum"
                rows = self.add(op, [rows, axes], f"{name}.sum" if mean else name, keepdims=0)
                if mean:
                    rows = self.add("Mul", [rows, self._cut("scales", field.scale, 1)], name)
            vectors.append(rows)
        return vectors

    def rows(self, module: Any, path: str, field: Any) -> ir.Value:
        """Appends the lookup of a field, once.

        Args:
            module: The `Embeddings` with the tables.
            path: Their path in the network.
            field: The field.

        Returns:
            float32 [batch, size], or [batch, items, size] for a list.
        """
        key = (path, field.name)
        if key not in self._lookups:
            name = f"{path}.{field.name}"
            array = module.table(module.fields.index(field)).detach().numpy()
            table = self.weight(f"{path}.{module.owner(field)}.table", array)
            inputs = [table, self.ids(field)]
            self._lookups[key] = self.add("Gather", inputs, f"{name}.rows" if field.is_list else name)
        return self._lookups[key]

    def ids(self, field: Any) -> ir.Value:
        """Returns the ids of a field.

        Args:
            field: The field.

        Returns:
            int32 [batch], or [batch, items] for a list.
        """
        if field.is_list:
            return self._cut("ids", field.start, field.width)
        key = ("ids", field.start, 0)
        if key not in self._columns:
            column = self.weight(f"ids.{field.name}.column", np.array(field.start))
            self._columns[key] = self.add(
                "Gather", [self.inputs["ids"], column], f"ids.{field.name}", dtype=ir.DataType.INT32, axis=1
            )
        return self._columns[key]

    def _cut(self, name: str, start: int, width: int) -> ir.Value:
        """Returns columns of an input, [batch, width]."""
        key = (name, start, width)
        if key not in self._columns:
            source = self.inputs[name]
            ends = [self.weight(f"at{bound}", np.array([bound], np.int64)) for bound in (start, start + width)]
            inputs = [source, *ends, self.weight("axis1", np.array([1], np.int64))]
            assert source.dtype is not None
            self._columns[key] = self.add("Slice", inputs, f"{name}.{start}.{width}", dtype=source.dtype)
        return self._columns[key]

    def _vectors_apart(self, flat: ir.Value, count: int, size: int, path: str) -> ir.Value:
        return self.add("Reshape", [flat, self.weight(f"{path}.shape", np.array([-1, count, size]))], f"{path}.vectors")

    def _sum(self, value: ir.Value, name: str, axis: int, keepdims: int = 1) -> ir.Value:
        axes = self.weight(f"axis{axis}", np.array([axis], np.int64))
        return self.add("ReduceSum", [value, axes], name, keepdims=keepdims)
