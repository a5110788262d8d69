"""Recognizes an image network by the shapes of its inputs and outputs, its graph and its metadata."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from pipelines.core.errors import RequestError
from pipelines.engines.session import Port
from pipelines.graph.io import unreadable
from zoo.vision.networks.heads import (
    CLASSIFY,
    DETECT,
    EMBED,
    SEGMENT,
    SIGMOID,
    SOFTMAX,
    TASKS,
    ClassHead,
    DenseHead,
    EmbeddingHead,
    Head,
    ListedHead,
    MapHead,
    QueryHead,
    SelectedHead,
)

PASSING = frozenset(  # operators behind which an activation is still that of the output
    [
        "Identity",
        "Cast",
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "QuantizeLinear",
        "DequantizeLinear",
    ]
)
LAYERS = frozenset(("Conv", "ConvTranspose", "ConvInteger", "QLinearConv"))
STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))  # of the feature maps of YOLO networks
VECTORS = (
    "image_embeds",
    "pooler_output",
    "embedding",
    "sentence_embedding",
)  # outputs that are embeddings, the best first
SELECTED = 1000  # boxes of networks that select them, at most
METADATA_TASKS = {"detect": DETECT, "segment": SEGMENT, "semantic": SEGMENT, "classify": CLASSIFY}  # of Ultralytics
QUANTIZED = frozenset(("QuantizeLinear", "QLinearConv", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"))
LAYERS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))


@dataclass(frozen=True)
class Signature:
    """Inputs, outputs and metadata of an ONNX file.

    Attributes:
        path: The file.
        inputs: Element type and shape by name.
        outputs: Element type and shape by name.
        metadata: Its `metadata_props`.
        last: Last operator before each output that is none of `PASSING`.
        undecoded: Outputs between which and the convolutions nothing is multiplied: raw maps of a detector.
        precision: "int8" where operators compute in int8, "fp16" where layers have float16 weights, else "fp32".
    """

    path: Path
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    metadata: Mapping[str, str]
    last: Mapping[str, str]
    undecoded: frozenset[str]
    precision: str

    @property
    def image(self) -> str:
        """Name of the input that takes images.

        Raises:
            RequestError: There is none, or several.
        """
        names = [
            name
            for name, port in self.inputs.items()
            if len(port.shape) in (3, 4) and (port.dtype.kind == "f" or port.dtype == np.uint8)
        ]
        if len(names) != 1:
            ports = ", ".join(_described(name, port) for name, port in self.inputs.items())
            raise RequestError(f"{self.path} takes {ports or 'nothing'}; expected one image [n, 3, height, width]")
        return names[0]

    @property
    def channels_last(self) -> bool:
        """Whether the channels are the last axis of the input."""
        shape = self.inputs[self.image].shape
        return shape[-1] == 3 and shape[-3] != 3

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Height and width of the input; None for a free one."""
        shape = self.inputs[self.image].shape
        return (shape[-3], shape[-2]) if self.channels_last else (shape[-2], shape[-1])

    @property
    def batched(self) -> bool:
        """Whether the input has an axis of samples; torchvision's detectors have none."""
        return len(self.inputs[self.image].shape) == 4

    @property
    def most(self) -> int | None:
        """Samples of a batch if the file fixes their number, else None."""
        return self.inputs[self.image].shape[0] if self.batched else 1

    def literal(self, key: str) -> Any:
        """Returns a value of the metadata, which Ultralytics writes as Python literals; None if it is missing.

        Args:
            key: Key of the metadata.
        """
        try:
            return ast.literal_eval(self.metadata[key])
        except (KeyError, ValueError, SyntaxError):
            return self.metadata.get(key)

    @property
    def described(self) -> str:
        """The outputs, for messages."""
        return ", ".join(_described(name, port) for name, port in self.outputs.items())


def _described(name: str, port: Port) -> str:
    return f"{name} {port.dtype} [{', '.join('?' if side is None else str(side) for side in port.shape)}]"


def read_signature(path: Path) -> Signature:
    """Reads the signature of an ONNX file, without its weights.

    Args:
        path: ONNX file.

    Returns:
        The signature.

    Raises:
        RequestError: The file is missing or no ONNX model.
    """
    if not path.is_file():
        raise RequestError(f"no ONNX model at {path}; pass the path of an .onnx file")
    try:
        graph = (proto := onnx.load(path, load_external_data=False)).graph
    except Exception as error:  # protobuf raises its own kinds for every sort of damage
        raise RequestError(unreadable(path, error)) from error
    weights = {tensor.name for tensor in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    outputs = {value.name: port for value in graph.output if (port := _port(value)) is not None}
    return Signature(
        path,
        {value.name: port for value in graph.input if value.name not in weights and (port := _port(value)) is not None},
        outputs,
        {entry.key: entry.value for entry in proto.metadata_props},
        {name: _last(name, producers) for name in outputs},
        frozenset(name for name in outputs if _is_undecoded(name, producers)),
        _precision(graph),
    )


def _precision(graph: onnx.GraphProto) -> str:
    """See `Signature`."""
    if any(node.op_type in QUANTIZED for node in graph.node):
        return "int8"
    half = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT16}
    layers = (node for node in graph.node if node.op_type in LAYERS)
    return "fp16" if any(half.intersection(node.input) for node in layers) else "fp32"


def _port(value: onnx.ValueInfoProto) -> Port | None:
    """The port of a tensor; None for sequences and maps."""
    tensor = value.type.tensor_type
    if not tensor.elem_type:
        return None
    sides = tuple(side.dim_value if side.dim_value > 0 else None for side in tensor.shape.dim)
    return Port(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)), sides)


def _last(name: str, producers: Mapping[str, onnx.NodeProto]) -> str:
    while (node := producers.get(name)) is not None and node.op_type in PASSING:
        name = node.input[0]
    return "" if node is None else node.op_type


def _is_undecoded(name: str, producers: Mapping[str, onnx.NodeProto]) -> bool:
    waiting, seen, kinds = [name], {name}, set()
    while waiting:
        node = producers.get(waiting.pop())
        if node is None:
            continue
        kinds.add(node.op_type)
        if node.op_type not in LAYERS:
            waiting += [source for source in node.input if source not in seen]
            seen.update(node.input)
    return bool(kinds & LAYERS) and not kinds & {"Mul", "Div"}


def recognize(
    signature: Signature, task: str | None, classes: int | None, size: tuple[int, int] | None
) -> tuple[str, Head]:
    """Recognizes the outputs of a network.

    Args:
        signature: Its signature; shapes that `missing` names must be known.
        task: Task that the user asks for; None for that of the network.
        classes: Number of class names; None if they are unknown.
        size: (height, width) of the input; None if it is that of the image.

    Returns:
        The task and the head.

    Raises:
        RequestError: The outputs are ambiguous or unknown.
    """
    if task is not None and task not in TASKS:
        raise RequestError(f"unknown task {task!r}; choose one of {', '.join(TASKS)}")
    own = signature.metadata.get("task")
    if own is not None and own not in METADATA_TASKS and task != EMBED:
        raise RequestError(f"{signature.path} is a network for the task {own!r}; expected {', '.join(TASKS)}")
    wanted = task or METADATA_TASKS.get(own or "")
    heads: dict[str, Head] = {}
    if wanted in (None, DETECT, SEGMENT) and (detector := _detector(signature, classes, size)) is not None:
        heads = {SEGMENT if detector.masked else DETECT: detector}
        if wanted in (None, DETECT):
            return DETECT if wanted or not detector.masked else SEGMENT, detector
    if wanted in (None, SEGMENT) and not heads and (head := _map(signature)) is not None:
        heads[SEGMENT] = head
    if wanted in (None, CLASSIFY) and (head := _classes(signature)) is not None:
        heads[CLASSIFY] = head
    if wanted in (None, EMBED) and (head := _embedding(signature)) is not None:
        heads[EMBED] = head
    if wanted is None and CLASSIFY in heads and _classes(signature) == ClassHead(next(iter(signature.outputs)), ""):
        heads.pop(EMBED, None)  # probabilities are no embedding
    if wanted in heads:
        return wanted, heads[wanted]
    if wanted is not None:
        raise RequestError(
            f"{signature.path}: found no outputs for the task {wanted}: {signature.described}; {_EXPECTED[wanted]}"
        )
    if len(heads) == 1:
        return next(iter(heads.items()))
    choice = f"{' or '.join(heads)}: say which with --task" if heads else "no network of a known task"
    raise RequestError(f"{signature.path}: the outputs are {signature.described}; found {choice}")


_EXPECTED = {
    DETECT: "expected [n, 4 + classes, anchors], [n, anchors, 5 + classes], [n, boxes, 6], boxes with scores and "
    "labels, or boxes [n, queries, 4] with logits [n, queries, classes]",
    SEGMENT: "expected a detector with mask prototypes or masks, logits [n, classes, rows, columns], or classes "
    "[n, rows, columns]",
    CLASSIFY: "expected one output [n, classes]",
    EMBED: "expected one output [n, width], or [n, tokens, width]",
}


def missing(signature: Signature) -> bool:
    """Returns whether sizes of outputs are free, which `recognize` needs: those behind the first axis.

    Args:
        signature: Signature of the network.
    """
    return any(not port.shape or None in port.shape[1:] for port in signature.outputs.values())


def with_shapes(signature: Signature, out: Mapping[str, Any]) -> Signature:
    """Returns the signature with the shapes of computed outputs.

    Args:
        signature: The signature.
        out: Array of every output.
    """
    ports = {name: Port(port.dtype, out[name].shape) for name, port in signature.outputs.items() if name in out}
    return replace(signature, outputs=ports)


def _inner(signature: Signature, name: str) -> tuple[int | None, ...]:
    """Shape of an output for one image."""
    return signature.outputs[name].shape[signature.batched :]


def _detector(signature: Signature, classes: int | None, size: tuple[int, int] | None) -> Any:
    floats = [name for name, port in signature.outputs.items() if port.dtype.kind == "f"]
    shapes = {name: _inner(signature, name) for name in signature.outputs}
    pairs = [name for name in floats if len(shapes[name]) == 2]
    planes = [name for name in floats if len(shapes[name]) == 3]
    if (listed := _listed(signature)) is not None:
        return listed
    if {"logits", "pred_boxes"} <= {*pairs}:  # transformers; others are hidden states
        return _queries(signature, "pred_boxes", "logits", classes)
    if len(pairs) == 2 and len(signature.outputs) == 2 and shapes[pairs[0]][0] == shapes[pairs[1]][0]:
        boxes = [name for name in pairs if shapes[name][1] == 4]
        if len(boxes) == 1 and shapes[boxes[0]][0] not in _anchors(size):
            return _queries(signature, boxes[0], next(name for name in pairs if name != boxes[0]), classes)
    if len(pairs) == 1 and len(signature.outputs) == 1 + len(planes) <= 2:
        return _yolo(signature, pairs[0], "".join(planes), classes, size)
    return None


def _listed(signature: Signature) -> ListedHead | None:
    """Boxes [n, 4], scores [n] and classes [n] of one image; of a batch, if the sizes of the images are an input."""
    axes = len(signature.inputs) - 1  # of the batch
    shapes = {name: port.shape[axes:] for name, port in signature.outputs.items() if len(port.shape) > axes}
    kinds = {
        name: ("f" if port.dtype.kind == "f" else "i", len(shapes.get(name, ())))
        for name, port in signature.outputs.items()
    }
    by_kind = {kind: name for name, kind in kinds.items()}
    boxes, scores, labels = (by_kind.get(kind, "") for kind in (("f", 2), ("f", 1), ("i", 1)))
    own_masks = by_kind.get(("f", 4), "")
    if not (boxes and scores and labels) or len(kinds) != len(by_kind) or axes not in (0, 1):
        return None
    if shapes[boxes][1] != 4 or len(kinds) != 3 + bool(own_masks) or (own_masks and shapes[own_masks][1] != 1):
        return None
    return ListedHead(boxes, scores, labels, own_masks, original=axes == 1)


def _queries(signature: Signature, boxes: str, scores: str, classes: int | None) -> QueryHead:
    count = _inner(signature, scores)[1]
    activation = signature.last.get(scores, "")
    if activation in (SIGMOID, SOFTMAX):  # applied within the graph
        return QueryHead(boxes, scores, "", activation == SOFTMAX, activation == SIGMOID)
    if classes is not None and count in (classes, classes + 1):
        softmax = count == classes + 1
        return QueryHead(boxes, scores, SOFTMAX if softmax else SIGMOID, softmax, not softmax)
    raise RequestError(
        f"{signature.path}: found boxes {boxes} and scores {scores} of {count} classes, and {classes or 'no'} names; "
        f"give --labels FILE with {count} names (sigmoid, as in RT-DETR) or {(count or 1) - 1} (softmax with "
        "no object, as in DETR)"
    )


def _anchors(size: tuple[int, int] | None) -> set[int]:
    """Numbers of anchors of YOLO networks at an input size, one a cell."""
    if size is None:
        return set()
    return {sum(-(-size[0] // stride) * -(-size[1] // stride) for stride in strides) for strides in STRIDES}


def _yolo(signature: Signature, output: str, prototypes: str, classes: int | None, size: tuple[int, int] | None) -> Any:
    """A head of the YOLO networks: all readings that the shape allows; one must remain."""
    rows, columns = _inner(signature, output)
    if rows is None or columns is None:
        return None
    masks = (_inner(signature, prototypes)[0] or 0) if prototypes else 0
    single = _anchors(size)
    triple = {3 * count for count in single}
    detr = "RTDETR" in signature.metadata.get("head", "") or "rtdetr" in _squeezed(signature.metadata)
    selects = signature.literal("end2end") is True

    def fits(side: int, fixed: int) -> bool:  # the channels of an anchor
        return side == fixed + masks + classes if classes is not None else side > fixed + masks

    readings: dict[str, Head] = {}
    if detr and not masks:
        if columns == 6 and ("head" in signature.metadata or classes != 2):  # which 4 + classes would be, too
            readings["RT-DETR"] = SelectedHead(output, False, False, shares=True)
        elif fits(columns, 4):
            readings["RT-DETR"] = QueryHead(output, output, "", False, False)
    elif columns == 6 + masks and (selects or (rows <= SELECTED and rows not in single | triple)):
        readings["boxes [n, 6]"] = SelectedHead(output, False, False, prototypes)
    else:
        if fits(rows, 4) and (columns in single or (classes is not None and columns != rows)):
            readings["[4 + classes, anchors]"] = DenseHead(output, True, False, prototypes)
        if fits(columns, 4) and rows in single:
            readings["[anchors, 4 + classes]"] = DenseHead(output, False, False, prototypes)
        if fits(columns, 5) and (rows in triple or rows in single or (classes is not None and rows != columns)):
            readings["[anchors, 5 + classes]"] = DenseHead(output, False, True, prototypes)
    if output in signature.undecoded and readings:
        raise RequestError(
            f"{signature.path}: {output} has raw boxes that the graph does not decode; export it with its decoding "
            "(YOLOX: --decode_in_inference, YOLOv7: --grid)"
        )
    if len(readings) > 1:
        raise RequestError(
            f"{signature.path}: {signature.described} may be {' or '.join(readings)}; give the names of the classes: "
            "--labels FILE"
        )
    if not readings and (rows in single | triple or columns in single | triple):
        count = rows if columns in single | triple else columns
        raise RequestError(
            f"{signature.path}: {signature.described} does not fit {classes or 'no'} class names"
            f"{f' and {masks} masks' if masks else ''}; expected {count - 4 - masks} names, or {count - 5 - masks} if "
            "anchors have an objectness: --labels FILE"
        )
    return next(iter(readings.values()), None)


def _squeezed(metadata: Mapping[str, str]) -> str:
    return metadata.get("description", "").lower().replace("-", "").replace(" ", "")


def _map(signature: Signature) -> Head | None:
    """The first of the maps: torchvision's networks have an auxiliary one of the same shape behind it."""
    shapes = {name: _inner(signature, name) for name in signature.outputs}
    maps = [
        name
        for name, port in signature.outputs.items()
        if (port.dtype.kind == "f" and len(shapes[name]) == 3)
        or (port.dtype.kind in "iu" and (len(shapes[name]) == 2 or (len(shapes[name]) == 3 and shapes[name][0] == 1)))
    ]
    if not maps or len(maps) != len(signature.outputs) or len({shapes[name] for name in maps}) > 1:
        return None
    return MapHead(maps[0], 0.5 if signature.last.get(maps[0]) == SIGMOID else 0.0)


def _classes(signature: Signature) -> Head | None:
    vectors = list(_vectors(signature))
    names = [name for name in vectors if name == "logits"] or vectors
    if len(names) != 1:
        return None
    return ClassHead(names[0], "" if signature.last.get(names[0]) in (SOFTMAX, SIGMOID) else SOFTMAX)


def _vectors(signature: Signature) -> Iterator[str]:
    """Outputs of one vector an image."""
    for name, port in signature.outputs.items():
        shape = _inner(signature, name)
        if port.dtype.kind == "f" and (len(shape) == 1 or (len(shape) == 3 and shape[1:] == (1, 1))):
            yield name


def _embedding(signature: Signature) -> Head | None:
    """A vector if there is one, else tokens or features; the names are those of transformers."""
    vectors = list(_vectors(signature))
    candidates = [name for name in VECTORS if name in vectors] or vectors
    if candidates and (len(vectors) == 1 or candidates[0] in VECTORS):
        return EmbeddingHead(candidates[0], "")
    floats = [name for name, port in signature.outputs.items() if port.dtype.kind == "f"]
    names = [name for name in floats if name == "last_hidden_state"] or floats
    if len(names) != 1:
        return None
    shape = _inner(signature, names[0])
    if len(shape) == 2 and shape[0] is not None:  # a square of tokens has no class token
        return EmbeddingHead(names[0], "mean" if round(shape[0] ** 0.5) ** 2 == shape[0] else "cls")
    return EmbeddingHead(names[0], "pixels") if len(shape) == 3 else None
