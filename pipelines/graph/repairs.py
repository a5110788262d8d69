"""Repairs of files that onnxruntime runs and that onnx's checker refuses."""

from __future__ import annotations

from collections.abc import Iterator

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
    nameless = [each for each in graphs(graph) if not each.name]
    for each in nameless:
        each.name = "graph"
    return len(nameless)


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
    found = [node for each in graphs(graph) for node in each.node]
    if blocked := next((node for node in found if node.domain in BLOCKED), None):
        raise ValueError(
            f"{blocked.op_type} {blocked.name or blocked.output[0]} has the domain {blocked.domain}: onnxruntime "
            "optimized the file for one machine (ORT_ENABLE_ALL); expected the file before that, or one written with "
            "ORT_ENABLE_EXTENDED"
        )
    norms = [node for node in found if node.domain in ("", "ai.onnx") and opset < FIRST.get(node.op_type, 0)]
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
