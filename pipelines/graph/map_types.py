"""Types of maps, which onnx_ir does not represent: outputs of the ZipMap that sklearn's exporters end classifiers with.

A loaded model has no type for such outputs; the file that is written has it again.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, TypeProto


def clear(graph: onnx.GraphProto) -> None:
    """Removes types of maps, and of sequences of maps, from the outputs and inner values of a graph.

    Args:
        graph: Graph to change.

    Raises:
        ValueError: An input is a map; samples are arrays.
    """
    if maps := [value.name for value in graph.input if _is_map(value.type)]:
        raise ValueError(
            f"its input {maps[0]} is a map; expected tensors, as exporters write them without DictVectorizer"
        )
    for value in (*graph.output, *graph.value_info):
        if _is_map(value.type):
            value.ClearField("type")


def restore(graph: onnx.GraphProto) -> None:
    """Writes the types of outputs that a ZipMap computes.

    Args:
        graph: Graph to change.
    """
    outputs = {value.name: value for value in graph.output if not value.HasField("type")}
    for node in graph.node if outputs else ():
        if node.op_type == "ZipMap" and node.output[0] in outputs:
            made = outputs[node.output[0]].type.sequence_type.elem_type.map_type
            texts = any(attribute.name == "classlabels_strings" for attribute in node.attribute)
            made.key_type = TensorProto.STRING if texts else TensorProto.INT64
            made.value_type.tensor_type.elem_type = TensorProto.FLOAT


def _is_map(type_: TypeProto) -> bool:
    kind = type_.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        return _is_map(getattr(type_, kind).elem_type)
    return bool(kind == "map_type")
