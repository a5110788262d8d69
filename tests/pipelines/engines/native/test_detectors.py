"""The engine native for detectors: maps made larger, several outputs, and what goes on in float behind the int8 layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.qdq_graphs import Graph
from onnx import TensorProto, helper

from pipelines.core.errors import RequestError
from pipelines.engines import catalog
from pipelines.engines.native import images
from pipelines.engines.session import BatchError
from pipelines.kernels import extension

SHAPE = [3, 12, 16]
pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))


def detector(scale: float = 2.0, last: str = "Sigmoid", **resize: Any) -> tuple[Graph, str, list[str]]:
    """(graph, boxes and scores of all places, two int8 maps): two strides, the lower map made larger and joined.

    last: the function of the scores, Sin if ONNX Runtime is to compute it.
    """
    g = Graph()
    x = g.quantize("image", 0.02, 120)
    high = g.quantize(g.add("Relu", [g.layer("Conv", x, (24, 3, 3, 3), 0.02, pads=[1, 1, 1, 1])]), 0.1, 0)
    low = g.quantize(g.layer("Conv", high, (40, 24, 3, 3), 0.1, strides=[2, 2], pads=[1, 1, 1, 1]), 0.2, 130)
    scales = g.constant(np.array([1, 1, scale, scale], np.float32))
    larger = g.quantize(g.add("Resize", [low, "", scales], **resize), 0.2, 130)
    joined, channels, joined_scale = larger, 40, 0.2
    if scale == 2:
        joined, channels, joined_scale = g.quantize(g.add("Concat", [larger, high], axis=1), 0.25, 100), 64, 0.25
    heads = [
        g.quantize(g.layer("Conv", value, (9, inputs, 1, 1), of), 0.5, 120)
        for value, inputs, of in ((joined, channels, joined_scale), (low, 40, 0.2))
    ]
    flat = [g.add("Reshape", [head, g.constant(np.array([0, 9, -1]))]) for head in heads]
    places = g.add("Concat", flat, axis=2)
    bounds = [g.constant(np.array([number])) for number in (0, 4, 9, 1)]
    boxes = g.add("Slice", [places, bounds[0], bounds[1], bounds[3]])
    scores = g.add(last, [g.add("Slice", [places, bounds[1], bounds[2], bounds[3]])])
    out = g.add("Concat", [boxes, scores], axis=1)
    g.ranks[out] = 3
    return g, out, heads


def agree(path: Path, count: int = 3) -> Any:
    """The native session, whose results are onnxruntime's on one thread and on two."""
    batch = {"image": np.random.default_rng(1).normal(0, 1, (count, *SHAPE)).astype(np.float32)}
    wanted = catalog.load(path, "onnxruntime").run(batch)
    for threads in (2, 1):
        session = catalog.load(path, "native", threads)
        outputs = session.run(batch)
        assert list(outputs) == list(wanted)
        for name, array in wanted.items():
            np.testing.assert_allclose(outputs[name], array, atol=1e-6)
    return session


@pytest.mark.parametrize(
    ("scale", "resize"),
    [
        (2.0, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
        (2.0, {}),
        (3.0, {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}),
        (1.5, {"coordinate_transformation_mode": "align_corners"}),
        (0.5, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "ceil"}),
    ],
)
def test_boxes_and_scores_are_those_of_onnxruntime(scale: float, resize: dict[str, Any], tmp_path: Path) -> None:
    g, out, _ = detector(scale, **resize)
    session = agree(g.save(tmp_path / "m.onnx", SHAPE, out))
    kinds = [operator.type.split()[0] for operator in session.executed({"image": np.zeros((2, *SHAPE), np.float32)})]
    assert kinds.count("convolution") == 4 and "resampling" in kinds and kinds[-4:] == ["dequantize"] * 4


def test_what_is_computed_where_is_said(tmp_path: Path) -> None:
    g, out, _ = detector(last="Sin")
    form = images.form(g.save(tmp_path / "m.onnx", SHAPE, out))
    assert (form["steps"]["Resampling"], form["steps"]["Dequantize"]) == (1, 4)
    assert form["rest"] == {"Sin": 1, "Concat": 1}


@pytest.mark.parametrize("kind", ["TopK", "NonMaxSuppression"])
def test_choices_of_boxes_are_native(kind: str, tmp_path: Path) -> None:
    """What reads boxes whose number depends on the data is the float remainder."""
    g, out, _ = detector()
    ends = [g.constant(np.array([number])) for number in (0, 4, 9, 2)]
    turned = g.add("Transpose", [out], perm=[0, 2, 1])
    boxes, scores = (g.add("Slice", [turned, ends[index], ends[index + 1], ends[3]]) for index in (0, 1))
    if kind == "TopK":
        best = g.add("ReduceMax", [scores], axes=[2], keepdims=0)
        g.nodes.append(helper.make_node("TopK", [best, g.constant(np.array([5]))], ["best", "places"]))
        places = g.add("Unsqueeze", ["places", ends[3]])
        chosen = g.add("GatherElements", [boxes, g.add("Tile", [places, g.constant(np.array([1, 1, 4]))])], axis=1)
    else:
        limits = [g.constant(limit) for limit in (np.array([3]), np.float32(0.5), np.float32(0.6))]
        by_class = g.add("Transpose", [scores], perm=[0, 2, 1])
        picks = g.add("NonMaxSuppression", [boxes, by_class, *limits], center_point_box=1)
        chosen = g.add("Gather", [boxes, g.add("Gather", [picks, g.constant(np.array(2))], axis=1)], axis=1)
    g.ranks[chosen] = 3
    path = g.save(tmp_path / "m.onnx", SHAPE, chosen)
    agree(path)
    made = images.form(path)
    assert made.get("rest", {}) == ({} if kind == "TopK" else {"Gather": 2})
    assert ("Choice" if kind == "TopK" else "Suppression") in made["steps"]


def test_a_sum_of_maps_in_float_is_native(tmp_path: Path) -> None:
    """With the Relu behind it."""
    g, _, heads = detector(1.0)
    total = g.add("Relu", [g.add("Add", heads)])
    out = g.add("Reshape", [total, g.constant(np.array([0, 9, -1]))])
    g.ranks[out] = 3
    path = g.save(tmp_path / "m.onnx", SHAPE, out)
    agree(path)
    assert "rest" not in images.form(path)


@pytest.mark.parametrize("changed", ["parts", "shape", "remainder", "outputs"])
def test_a_damaged_program_is_one_line(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g, out, _ = detector(last="Sin")
    path = g.save(tmp_path / "m.onnx", SHAPE, out)
    program = images.packed(path)
    (name, *_), other = program.parts
    fields: dict[str, Any] = {
        "parts": {"parts": (other,)},
        "shape": {"parts": ((name, (1, 2, 3), "float32"), other)},
        "remainder": {"remainder": program.remainder[:50]},
        "outputs": {"outputs": ("none",)},
    }
    damaged = dataclasses.replace(program, **fields[changed])
    monkeypatch.setattr(images, "packed", lambda *_: damaged)
    with pytest.raises(RequestError) as caught:
        images.ImageSession(path, 1).run({"image": np.zeros((1, *SHAPE), np.float32)})
    assert "\n" not in str(caught.value)


def test_several_outputs_int8_and_float(tmp_path: Path) -> None:
    g, out, heads = detector(last="Sin")
    agree(g.save(tmp_path / "m.onnx", SHAPE, heads[0], TensorProto.FLOAT, out, heads[1]))
    agree(g.save(tmp_path / "maps.onnx", SHAPE, heads[1], TensorProto.FLOAT, heads[0]))


def test_a_graph_of_so_many_samples_takes_them(tmp_path: Path) -> None:
    g, out, _ = detector(last="Sin")
    path = g.save(tmp_path / "m.onnx", SHAPE, out, batch=2)
    session = agree(path, 2)
    assert session.inputs["image"].shape == (2, *SHAPE)
    with pytest.raises(BatchError, match=r"expected image float32 \[2, 3, 12, 16\]"):
        session.run({"image": np.zeros((1, *SHAPE), np.float32)})


def test_what_goes_on_may_hold_layers(tmp_path: Path) -> None:
    g, _, heads = detector()
    g.flat = g.add("MatMul", [g.add("LRN", [heads[1]], size=3), g.constant(np.ones((8, 900), np.float32))])
    path = g.save(tmp_path / "m.onnx", SHAPE, g.flat)
    agree(path)
    assert [part.split(":")[0] for part in images.form(path)["parts"]] == ["native", "onnxruntime"]


def test_a_map_that_is_interpolated_is_native(tmp_path: Path) -> None:
    g, out, _ = detector(mode="linear")
    assert "Interpolation" in images.form(g.save(tmp_path / "m.onnx", SHAPE, out))["steps"]


def test_what_goes_on_may_take_fewer_samples_than_the_layers(tmp_path: Path) -> None:
    """A number of samples written into a Reshape behind them: the batch is at fault, not the program."""
    g, _, heads = detector()
    out = g.add("Reshape", [heads[0], g.constant(np.array([1, 9, 12 * 16]))])
    g.ranks[out] = 3
    path = g.save(tmp_path / "m.onnx", SHAPE, out)
    agree(path, 1)
    with pytest.raises(RequestError, match="^onnxruntime cannot run .* on this batch"):
        catalog.load(path, "native").run({"image": np.zeros((2, *SHAPE), np.float32)})
