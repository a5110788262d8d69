"""Repairs of files that onnxruntime runs and that onnx's checker refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx

FUSED = "com.microsoft"  # domain that marks an operator for `pipelines.rewrites.expand_fused`
BLOCKED = ("com.microsoft.nchwc", "com.ms.internal.nhwc")  # layouts of one machine
FIRST = {"LayerNormalization": 17, "SimplifiedLayerNormalization": 1000}  # first opset of onnx with the operator


def name_graphs(graph: onnx.GraphProto) -> int:
    """Names graphs without a name.

    Args:
        graph: Main graph; it and its subgraphs are changed.

    Returns:
        Number of changes.
    """
    nameless = [part for part in graphs(graph) if not part.name]
    for body in nameless:
        body.name = "graph"
    return len(nameless)


def name_nodes_apart(graph: onnx.GraphProto) -> None:
    """Renames operators that have the name of another, which onnxruntime refuses, by their first output.

    Args:
        graph: Main graph; it is changed.
    """
    counts = Counter(node.name for node in graph.node)
    taken, seen = set(counts), set[str]()
    for node in graph.node:
        if counts[node.name] > 1 and node.name and node.name in seen:
            name, number = next(filter(None, node.output), node.op_type), 0
            while name in taken:
                name, number = f"{node.name}_{number}", number + 1
            taken.add(name)
            node.name = name
        seen.add(node.name)


def with_ranks(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Copies a model with a shape for every input and output that states none, for the checker.

    Args:
        proto: Model without the data of its weights.

    Returns:
        The copy; `proto` itself if all have a shape.
    """

    def shapeless(graph: onnx.GraphProto) -> list[onnx.TypeProto.Tensor]:
        tensors = (port.type.tensor_type for port in (*graph.input, *graph.output) if port.type.HasField("tensor_type"))
        return [tensor for tensor in tensors if not tensor.HasField("shape")]

    if not shapeless(proto.graph):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for tensor in shapeless(copy.graph):
        tensor.shape.SetInParent()
    return copy


def make_dense(graph: onnx.GraphProto) -> None:
    """Writes sparse initializers and sparse Constants as dense ones.

    Args:
        graph: Main graph; it and its subgraphs are changed.
    """
    for part in graphs(graph):
        part.initializer.extend(dense(sparse, sparse.values.name) for sparse in part.sparse_initializer)
        del part.sparse_initializer[:]
        for attribute in (attr for node in part.node if node.op_type == "Constant" for attr in node.attribute):
            if attribute.name == "sparse_value":
                tensor = dense(attribute.sparse_tensor, attribute.sparse_tensor.values.name)
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))


def dense(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    """Returns a sparse tensor as a dense one.

    Args:
        sparse: Values and their places.
        name: Name of the result.
    """
    values, places = (onnx.numpy_helper.to_array(tensor) for tensor in (sparse.values, sparse.indices))
    array = np.zeros(tuple(sparse.dims), values.dtype)
    if places.ndim == 1:  # places in the array as it lies
        array.reshape(-1)[places] = values
    else:
        array[tuple(places.T)] = values
    return onnx.numpy_helper.from_array(array, name)


def mark_fused_norms(graph: onnx.GraphProto, opset: int) -> int:
    """Moves norms that onnxruntime's optimizer writes into the domain of onnx, at any opset, into its own domain.

    Args:
        graph: Main graph; it and its subgraphs are changed.
        opset: Opset of the model.

    Returns:
        Number of changes.

    Raises:
        ValueError: An operator has the layout of one machine, in which the file cannot be quantized.
    """
    nodes = [node for part in graphs(graph) for node in part.node]
    if blocked := next((node for node in nodes if node.domain in BLOCKED), None):
        raise ValueError(
            f"{blocked.op_type} {blocked.name or blocked.output[0]} has the domain {blocked.domain}: onnxruntime "
            "optimized the file for one machine (ORT_ENABLE_ALL); expected the file before that, or one written with "
            "ORT_ENABLE_EXTENDED"
        )
    norms = [node for node in nodes if node.domain in ("", "ai.onnx") and opset < FIRST.get(node.op_type, 0)]
    for node in norms:
        node.domain = FUSED
    return len(norms)


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yields a graph and the subgraphs in it.

    Args:
        graph: Main graph.

    Yields:
        The graphs.
    """
    yield graph
    for body in bodies(graph):
        yield from graphs(body)


def bodies(nodes: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto]:
    """Yields the graphs in the attributes of operators, such as the branches of an If.

    Args:
        nodes: Graph or function of the operators.

    Yields:
        The graphs, without those inside them.
    """
    for node in nodes.node:
        for attribute in node.attribute:
            yield from (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else []))
