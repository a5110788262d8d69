"""Image networks with the inputs, outputs and metadata of exporters, whose results are known."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Arrays = Mapping[str, NDArray[Any]]


def constant_network(
    path: Path,
    outputs: Arrays,
    metadata: Mapping[str, Any] | None = None,
    shape: tuple[Any, ...] = (1, 3, 64, 64),
    *,
    last: str = "",
    free: tuple[str, ...] = (),
    sizes: bool = False,
) -> Path:
    """Writes a network whose outputs are given arrays, whatever the image.

    Args:
        path: File to write.
        outputs: Arrays by name.
        metadata: Values of `metadata_props`.
        shape: Shape of the input "images"; texts are free sizes.
        last: Operator between an array and its output, such as Sigmoid.
        free: Outputs whose sizes behind the first the file does not say.
        sizes: Also take the sizes of the images, int64 [n, 2].
    """
    nodes, weights, ports = [helper.make_node("ReduceMean", ["images"], ["mean"], keepdims=0)], [], []
    nodes.append(helper.make_node("Sub", ["mean", "mean"], ["zero"]))
    for name, array in outputs.items():
        weights.append(numpy_helper.from_array(array, f"{name}_values"))
        if array.dtype.kind == "f":
            nodes.append(helper.make_node("Add", [f"{name}_values", "zero"], [f"{name}_sum"]))
            nodes.append(helper.make_node(last or "Identity", [f"{name}_sum"], [name]))
        else:
            nodes.append(helper.make_node("Identity", [f"{name}_values"], [name]))
        sides = [array.shape[0], *(None for _ in array.shape[1:])] if name in free else array.shape
        ports.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), sides))
    inputs = [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, shape)]
    if sizes:
        inputs.append(helper.make_tensor_value_info("orig_target_sizes", onnx.TensorProto.INT64, ("n", 2)))
    return _saved(path, helper.make_graph(nodes, "constant", inputs, ports, weights), metadata)


def bright_box_network(path: Path, side: int = 64) -> Path:
    """Writes a detector as Ultralytics exports YOLOv8: its first anchor is the box of all pixels above 0.9, class 1.

    Args:
        path: File to write.
        side: Height and width of the input.
    """
    ramp = np.arange(1, side + 1, dtype=np.float32)
    anchors = sum((side // stride) ** 2 for stride in (8, 16, 32))
    others = np.zeros((1, 6, anchors - 1), np.float32)
    weights = {
        "limit": np.float32(0.9),
        "up": ramp,
        "down": ramp[::-1].copy(),
        "side": np.float32(side),
        "half": np.float32(0.5),
    }
    weights |= {"scores": np.array([[[0.1], [0.75]]], np.float32), "rest": others}
    steps = [
        ("ReduceMin", ["images"], "grey", {"axes": [1], "keepdims": 0}),
        ("Greater", ["grey", "limit"], "bright", {}),
        ("Cast", ["bright"], "mask", {"to": onnx.TensorProto.FLOAT}),
    ]
    for axis, name in ((1, "x"), (2, "y")):
        steps += [
            ("ReduceMax", ["mask"], f"{name}_line", {"axes": [axis], "keepdims": 0}),
            ("Mul", [f"{name}_line", "up"], f"{name}_ups", {}),
            ("ReduceMax", [f"{name}_ups"], f"{name}_last", {"axes": [1], "keepdims": 1}),
            ("Mul", [f"{name}_line", "down"], f"{name}_downs", {}),
            ("ReduceMax", [f"{name}_downs"], f"{name}_size", {"axes": [1], "keepdims": 1}),
            ("Sub", ["side", f"{name}_size"], f"{name}_first", {}),
            ("Add", [f"{name}_first", f"{name}_last"], f"{name}_sum", {}),
            ("Mul", [f"{name}_sum", "half"], f"{name}_centre", {}),
            ("Sub", [f"{name}_last", f"{name}_first"], f"{name}_extent", {}),
        ]
    steps += [
        ("Concat", ["x_centre", "y_centre", "x_extent", "y_extent"], "box", {"axis": 1}),
        ("Unsqueeze", ["box", "two"], "column", {}),
        ("ReduceMax", ["mask"], "any", {}),
        ("Mul", ["scores", "any"], "anchor_scores", {}),
        ("Concat", ["column", "anchor_scores"], "anchor", {"axis": 1}),
        ("Concat", ["anchor", "rest"], "output0", {"axis": 2}),
    ]
    weights["two"] = np.array([2], np.int64)
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, [output], **options) for kind, inputs, output, options in steps],
        "bright",
        [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, (1, 3, side, side))],
        [helper.make_tensor_value_info("output0", onnx.TensorProto.FLOAT, (1, 6, anchors))],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    return _saved(path, graph, ultralytics("detect", ["dark", "bright"], side))


def ultralytics(task: str, names: list[str], side: int = 64, **more: Any) -> dict[str, Any]:
    """Returns the metadata that Ultralytics writes.

    Args:
        task: Task of the network.
        names: Class names.
        side: Size of the images.
        **more: Further keys.
    """
    return {"stride": 32, "task": task, "imgsz": [side, side], "names": dict(enumerate(names)), "batch": 1, **more}


def _saved(path: Path, graph: onnx.GraphProto, metadata: Mapping[str, Any] | None) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    helper.set_model_props(model, {key: str(value) for key, value in (metadata or {}).items()})
    onnx.save(model, path)
    return path
