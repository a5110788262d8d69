"""Choices of elements, pixels and boxes: the same bits everywhere, and ONNX Runtime's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from helpers.image_programs import program, same_bits
from helpers.qdq_graphs import Graph
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from pipelines.engines.native import images
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.kernels import extension
from pipelines.kernels.images import reference
from pipelines.kernels.images.steps import (
    Choice,
    Dequantize,
    FloatFloor,
    FloatLog,
    FloatQuotient,
    Operand,
    Pixels,
    Suppression,
    TopK,
)

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


def drawn(rng: np.random.Generator, size: int, odd: bool = True) -> Any:
    """Random floats, many of them equal; odd: with infinite ones and NaN."""
    values = np.rint(rng.normal(0, 6, size)).astype(np.float32) / np.float32(4)
    values[rng.random(size) < 0.05] = -0.0
    for odd_one in (np.inf, -np.inf, np.nan) if odd else ():
        values[rng.random(size) < 0.05] = odd_one
    return values


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_choice(data: st.DataObject) -> None:
    """Equal, infinite and no values, bytes too; indices outside."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng, (height, width, channels) = np.random.default_rng(draw(0, 2**32)), (draw(1, 3), draw(1, 4), draw(1, 50))
    count = (1, channels, draw(1, channels))[draw(0, 2)]
    largest, shape, bytes_too = bool(draw(0, 1)), (height, width, channels), (draw(1, 4), draw(1, 3), channels)
    size, pairs = int(np.prod(shape)), (height, width, 2 * count)
    chosen = (2 * count * height, width, channels)
    steps: list[Any] = [
        Pixels(0, (), True, 0.0, 0, 0),
        Pixels(1, (), True, 0.1, 100, 0),
        Pixels(2, (), True, 0.05, 128, size),
        TopK(Operand(0), 3, count, largest),
        TopK(Operand(1, 0.1, 100), 4, count, largest),
        Choice(2, 3, 5),
        Choice(0, 4, 6),
        *(Dequantize(tensor, 1, 0) for tensor in range(3, 7)),
    ]
    total = size + int(np.prod(bytes_too))
    built = program(
        (total,),
        [shape, shape, bytes_too, pairs, pairs, chosen, chosen],
        steps,
        2 * int(np.prod(pairs)) + 2 * int(np.prod(chosen)),
        floats=frozenset({0, 3, 4, 6}),
        dtype="float32",
        inputs=(("a", (size,)), ("b", (total - size,))),
    )
    same_bits(built, np.stack([drawn(rng, total) for _ in range(2)]))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_logarithms_quotients_and_floors(data: st.DataObject) -> None:
    """Of all floats, the smallest too; near the values as they are defined."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng, shape = np.random.default_rng(draw(0, 2**32)), (draw(1, 3), draw(1, 4), draw(4, 40))
    divisor = ((1, 1, shape[2]), (*shape[:2], 1), shape)[draw(0, 2)]
    size, parts = int(np.prod(shape)), int(np.prod(divisor))
    samples = (np.exp2(rng.uniform(-149, 127, (2, size + parts))) * rng.choice([1, 1, 1, -1])).astype(np.float32)
    samples[0, :4] = 0, np.inf, np.nan, 1
    steps: list[Any] = [
        Pixels(0, (), True, 0.0, 0, 0),
        Pixels(1, (), True, 0.0, 0, size),
        FloatLog(Operand(0), Operand(2)),
        FloatQuotient(Operand(0), Operand(1), Operand(3)),
        FloatFloor(Operand(0), Operand(4), 80.0),
        *(Dequantize(tensor, 1, 0, True) for tensor in range(2, 5)),
    ]
    built = program(
        (size + parts,),
        [shape, divisor, shape, shape, shape],
        steps,
        3 * size,
        floats=frozenset(range(5)),
        dtype="float32",
        inputs=(("a", (size,)), ("b", (parts,))),
    )
    same_bits(built, samples)
    with np.errstate(all="ignore"):
        wanted = np.log(samples[1, :size].astype(np.float64))
    np.testing.assert_allclose(reference.run(built, samples[1])[:size], wanted, rtol=3e-7, atol=2e-7)


def suppressed(boxes: Any, scores: Any, most: int, overlap: float, least: float | None, centered: bool) -> Any:
    """What ONNX Runtime selects of one sample."""
    tensors = [
        helper.make_tensor("most", TensorProto.INT64, [1], [most]),
        helper.make_tensor("overlap", TensorProto.FLOAT, [1], [overlap]),
        *([] if least is None else [helper.make_tensor("least", TensorProto.FLOAT, [1], [least])]),
    ]
    names = ["boxes", "scores", *(tensor.name for tensor in tensors)]
    node = helper.make_node("NonMaxSuppression", names, ["y"], center_point_box=int(centered))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "a", "b"]) for name in names[:2]]
    made = [helper.make_tensor_value_info("y", TensorProto.INT64, ["k", 3])]
    graph = helper.make_graph([node], "g", ports, made, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return ort.InferenceSession(model.SerializeToString()).run(None, {"boxes": boxes[None], "scores": scores.T[None]})[
        0
    ]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_boxes_are_those_of_onnxruntime(data: st.DataObject) -> None:
    """Equal scores, empty and turned boxes."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng, (rows, columns, classes) = np.random.default_rng(draw(0, 2**32)), (draw(1, 6), draw(1, 9), draw(1, 20))
    count, centered = rows * columns, bool(draw(0, 1))
    most, overlap = draw(1, count), draw(0, 10) / 10
    least = (None, draw(-4, 4) / 4)[draw(0, 1)]
    shape = (1 + classes * most, 1, 3)
    steps: list[Any] = [
        Pixels(0, (), True, 0.0, 0, 0),
        Pixels(1, (), True, 0.0, 0, 4 * count),
        Suppression(0, 1, 2, most, overlap, np.nan if least is None else least, centered),
        Dequantize(2, 1, 0, True),
    ]
    built = program(
        (count * (4 + classes),),
        [(rows, columns, 4), (rows, columns, classes), shape],
        steps,
        int(np.prod(shape)),
        floats=frozenset({0, 1, 2}),
        dtype="float32",
        inputs=(("boxes", (4 * count,)), ("scores", (classes * count,))),
    )
    samples = np.stack([drawn(rng, count * (4 + classes), odd=False) for _ in range(2)])
    same_bits(built, samples)
    found = reference.run(built, samples[0]).reshape(-1, 3)
    boxes, scores = samples[0, : 4 * count].reshape(-1, 4), samples[0, 4 * count :].reshape(-1, classes)
    wanted = suppressed(boxes, scores, most, overlap, least, centered)
    np.testing.assert_array_equal(found[1 : 1 + int(found[0, 0])], wanted)
    assert not found[1 + len(wanted) :].any()


SHAPE, PLACES, CLASSES, COUNT = [3, 16, 16], 64, 5, 12


class Head(Graph):
    """Boxes [n, 64, 4] and scores [n, 64, 5] of a detector, and operators of exporters around choices."""

    def __init__(self, batch: Any, odd: bool = False) -> None:
        """odd: with an operator between the layers that has no native form."""
        super().__init__(3)
        self.batch = batch
        x = self.quantize(
            self.layer("Conv", self.quantize("image", 0.02, 120), (24, 3, 2, 2), 0.02, strides=[2, 2]), 0.1, 0
        )
        for number in range(6 if odd else 0):
            x = x if number != 2 else self.quantize(self.add("LRN", [x], size=3), 0.1, 0)
            made = self.layer("Conv", x, (24, 24, 3, 3), 0.1, pads=[1, 1, 1, 1])
            x = self.quantize(self.add("Relu", [made]), 0.1, 0)
        maps = [self.layer("Conv", x, (channels, 24, 1, 1), 0.1) for channels in (4, CLASSES)]
        rows = [
            self.add("Reshape", [part, self.ints(0, channels, -1)])
            for part, channels in zip(maps, (4, CLASSES), strict=True)
        ]
        self.boxes, scores = (self.add("Transpose", [row], perm=[0, 2, 1]) for row in rows)
        self.scores = self.add("Sigmoid", [scores])

    def ints(self, *numbers: int) -> str:
        """Constant integers of one axis."""
        return self.constant(np.array(numbers))

    def top(self, x: str) -> tuple[str, str]:
        """The largest values of the last axis, and their indices."""
        names = f"best{len(self.nodes)}", f"places{len(self.nodes)}"
        self.nodes.append(helper.make_node("TopK", [x, self.ints(COUNT)], list(names)))
        return names

    def chosen(self, x: str, places: str, channels: int) -> str:
        """Elements of tokens by indices [n, 12], repeated over the channels."""
        column = self.add("Unsqueeze", [places, self.ints(2)])
        return self.add("GatherElements", [x, self.add("Tile", [column, self.ints(1, 1, channels)])], axis=1)

    def samples(self) -> str:
        """The number of each sample, [n, 1]."""
        count = self.add("Gather", [self.add("Shape", [self.boxes]), self.constant(np.array(0))])
        numbers = self.add("Range", [self.constant(np.array(0)), count, self.constant(np.array(1))])
        return self.add("Unsqueeze", [numbers, self.ints(1)])

    def quotient(self, x: str, divisor: int) -> str:
        """The quotient of integers rounded down, as PyTorch's exporter writes it."""
        number, zero = self.constant(np.array(divisor)), self.constant(np.array(0))
        signs = self.add("Equal", [self.add("Less", [x, zero]), self.constant(np.array(True))])
        parts = self.add("Cast", [self.add("Mod", [x, number])], to=TensorProto.BOOL)
        below = self.add("Cast", [self.add("And", [signs, parts])], to=TensorProto.INT64)
        return self.add("Sub", [self.add("Div", [x, number]), below])

    def twice(self, form: str) -> list[str]:
        """Boxes, scores and classes of two choices, as YOLOv10 has them."""
        _, places = self.top(self.add("ReduceMax", [self.scores], axes=[-1], keepdims=0))
        boxes, scores = self.chosen(self.boxes, places, 4), self.chosen(self.scores, places, CLASSES)
        best, flat = self.top(self.add("Flatten", [scores], axis=1))
        labels = self.add("Mod", [flat, self.constant(np.array(CLASSES))])
        if form == "joined":  # TorchScript's exporter, of a free batch
            index = self.add("Div", [flat, self.constant(np.array(CLASSES))])
            first = self.add("Mul", [self.samples(), self.constant(np.array(COUNT))])
            boxes = self.add("Gather", [self.add("Flatten", [boxes], axis=2), self.add("Add", [index, first])])
        else:
            index = self.quotient(flat, CLASSES)
            shape = self.add("Shape", [self.add("Max", [self.samples(), index])])
            number = self.add("Unsqueeze", [self.add("Expand", [self.samples(), shape]), self.ints(2)])
            pairs = self.add("Concat", [number, self.add("Unsqueeze", [index, self.ints(2)])], axis=2)
            boxes = self.add("GatherND", [boxes, pairs])
        columns = [best, self.add("Cast", [labels], to=TensorProto.FLOAT)]
        return [self.add("Concat", [boxes, *(self.add("Unsqueeze", [x, self.ints(2)]) for x in columns)], axis=2)]

    def labels(self) -> list[str]:
        """Classes, boxes and scores of one choice, as RT-DETR's authors have them, and the classes as int32."""
        best, flat = self.top(self.add("Reshape", [self.scores, self.ints(0, -1)]))
        number = self.constant(np.array(CLASSES))
        index = self.add("Div", [flat, number])
        classes = self.add("Sub", [flat, self.add("Mul", [index, number])])
        return [classes, self.chosen(self.boxes, index, 4), best, self.add("Cast", [classes], to=TensorProto.INT32)]

    def single(self) -> list[str]:
        """Of one sample, without its axis: the best class of each place, and boxes by the scores of one class."""
        own, boxes = (self.add("Squeeze", [x, self.ints(0)]) for x in (self.scores, self.boxes))
        _, places = self.top(self.add("ReduceMin", [own], axes=[1], keepdims=0))
        results = self.add("ArgMax", [own], axis=1, keepdims=0), self.add("Gather", [boxes, places])
        return [self.add("Unsqueeze", [result, self.ints(0)]) for result in results]

    def extremes(self) -> list[str]:
        """Indices of the smallest elements, the largest ones, and classes as the bytes of a map."""
        classes = self.add("Cast", [self.add("ArgMax", [self.scores], axis=2, keepdims=0)], to=TensorProto.UINT8)
        most = self.add("MaxPool", [self.scores], kernel_shape=[CLASSES])  # as `WholeMaxPool` writes a ReduceMax
        return [self.add("ArgMin", [self.boxes], axis=2), self.add("ReduceMax", [self.scores], axes=[1]), most, classes]

    def suppressed(self) -> list[str]:
        """Rows of boxes that do not overlap."""
        limits = [self.ints(6), self.constant(np.float32([0.3])), self.constant(np.float32([0.4]))]
        classes = self.add("Transpose", [self.scores], perm=[0, 2, 1])
        return [self.add("NonMaxSuppression", [self.boxes, classes, *limits], center_point_box=1)]


HEADS: dict[str, Any] = {
    "pairs": lambda head: head.twice("pairs"),
    "joined": lambda head: head.twice("joined"),
    "labels": Head.labels,
    "extremes": Head.extremes,
    "single": Head.single,
    "boxes": Head.suppressed,
}


@pytest.mark.parametrize("batch", ["n", 1])
@pytest.mark.parametrize("kind", HEADS)
def test_choices_of_exporters_are_whole(kind: str, batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers too, and the number of boxes of samples."""
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    head = Head(1 if kind == "single" else batch)
    path = saved(head, HEADS[kind](head), tmp_path / "m.onnx")
    made = images.form(path)
    assert "rest" not in made, made
    x = np.random.default_rng(2).normal(0, 1, (1 if head.batch == 1 else 3, *SHAPE)).astype(np.float32)
    outputs = images.opened(path, 1, validate=False).run({"image": x})
    for name, array in OnnxRuntimeSession(path, 1).run({"image": x}).items():
        assert outputs[name].dtype == array.dtype
        np.testing.assert_allclose(outputs[name], array, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["pairs", "joined", "labels", "boxes"])
def test_choices_behind_an_operator_in_onnxruntime_are_native(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the numbers of samples, which arithmetic on shapes computes; near values may be chosen in another order."""
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    head = Head("n", odd=True)
    path = saved(head, HEADS[kind](head), tmp_path / "m.onnx")
    assert images.form(path)["rest"] == {"LRN": 1}
    x = np.random.default_rng(2).normal(0, 1, (3, *SHAPE)).astype(np.float32)
    outputs = images.opened(path, 1, validate=False).run({"image": x})
    for name, array in OnnxRuntimeSession(path, 1).run({"image": x}).items():
        assert outputs[name].dtype == array.dtype and outputs[name].shape == array.shape
        assert np.isclose(outputs[name], array, atol=0.02).mean() > 0.7


def saved(head: Head, outputs: list[str], path: Path) -> Path:
    """The file of a head; the types of its outputs are inferred."""
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [head.batch, *SHAPE])
    made = [numpy_helper.from_array(np.asarray(value), name) for name, value in head.constants.items()]
    ports = [helper.make_empty_tensor_value_info(name) for name in outputs]
    model = helper.make_model(
        helper.make_graph(head.nodes, "g", [image], ports, made),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path
