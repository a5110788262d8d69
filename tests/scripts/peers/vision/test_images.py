"""The benchmark of image pipelines: the photos its peers get, the networks it rebuilds of other libraries' operators,
what it reports.
"""

import io
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from pipelines.data.images import normalized, prepare
from pipelines.data.preprocess import Preprocess
from scripts.peers import harness
from scripts.peers.vision import float_networks, images

SIZE, CLASSES = 13, 5


def jpeg(width: int, height: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small fp32.onnx of pixels, with every operator and every kind of padding that the classifiers have."""
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {
        "stem": random.normal(size=(8, 3, 3, 3)),
        "depthwise": random.normal(size=(8, 1, 3, 3)),
        "point": random.normal(size=(8, 8, 1, 1)),
        "head": random.normal(size=(CLASSES, 8)),
        "head_bias": random.normal(size=CLASSES),
        **{key: random.uniform(0.5, 1.5, size=8) for key in ("bias", "gamma", "beta", "mean", "variance")},
        "white": np.array(255.0),
        "zero": np.array(0.0),
        "six": np.array(6.0),
    }

    def convolution(
        given: str, kernel: str, made: str, side: int, stride: int, pads: list[int], group: int = 1
    ) -> onnx.NodeProto:
        shape = {
            "kernel_shape": [side, side],
            "strides": [stride, stride],
            "pads": pads,
            "group": group,
            "dilations": [1, 1],
        }
        return helper.make_node("Conv", [given, kernel, "bias"], [made], name=made, **shape)

    pooled = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Cast", ["image"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["float", "white"], ["image.normalized"]),
        convolution("image.normalized", "stem", "stem.y", 3, 2, [0, 0, 1, 1]),
        helper.make_node(
            "BatchNormalization", ["stem.y", "gamma", "beta", "mean", "variance"], ["normal"], name="normal"
        ),
        helper.make_node("Clip", ["normal", "zero", "six"], ["clipped"]),
        convolution("clipped", "depthwise", "depth.y", 3, 2, [1, 1, 1, 1], 8),
        convolution("depth.y", "depthwise", "same.y", 3, 1, [1, 1, 1, 1], 8),
        convolution("same.y", "point", "point.y", 1, 1, [0, 0, 0, 0]),
        helper.make_node("Add", ["point.y", "depth.y"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["positive"]),
        helper.make_node("MaxPool", ["positive"], ["pooled"], **pooled),
        helper.make_node("GlobalAveragePool", ["pooled"], ["mean.y"]),
        helper.make_node("Flatten", ["mean.y"], ["flat"], axis=1),
        helper.make_node("Gemm", ["flat", "head", "head_bias"], ["logits"], transB=1),
    ]
    constants = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in weights.items()]
    image = [helper.make_tensor_value_info("image", TensorProto.UINT8, ["batch", 3, SIZE, SIZE])]
    logits = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])]
    graph = helper.make_graph(nodes, "classifier", image, logits, constants)
    path = tmp_path_factory.mktemp("frozen") / "fp32.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def work(frozen: Path, tmp_path_factory: pytest.TempPathFactory):
    """The float networks made of it."""
    folder = tmp_path_factory.mktemp("work")
    np.save(folder / "calibration.npy", np.random.default_rng(1).integers(0, 256, (3, SIZE, SIZE, 3), dtype=np.uint8))
    spec = Preprocess(SIZE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    made = float_networks.Work("some", folder / "fp32.onnx", folder / "calibration.npy", spec)
    float_networks.network(frozen, made)
    return made


@pytest.fixture(scope="module")
def expected(frozen: Path, work) -> np.ndarray:
    pixels = np.ascontiguousarray(np.load(work.pixels).transpose(0, 3, 1, 2))
    return onnxruntime.InferenceSession(frozen).run(None, {"image": pixels})[0]


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(80, 61), (61, 80), (40, 40)])
def test_the_obvious_way_gives_the_pixels_of_this_projects(
    size: tuple[int, int], interpolation: str, channels: str
) -> None:
    spec = Preprocess(32, 37, interpolation, channels=channels)
    pixels = float_networks.obvious(jpeg(*size), spec)
    assert (pixels.dtype, pixels.shape, pixels.flags.c_contiguous) == (np.float32, (1, 3, 32, 32), True)
    assert np.abs(pixels[0] - normalized(prepare(jpeg(*size), spec), spec)).max() < 1e-5
    assert np.array_equal(float_networks.obvious(jpeg(*size), spec, last=True), pixels.transpose(0, 2, 3, 1))


def test_the_float_networks_are_the_frozen_graph_without_its_front(work, expected: np.ndarray) -> None:
    (batch,) = work.batches(3)
    for path in (work.fp32, work.folded):
        assert np.abs(onnxruntime.InferenceSession(path).run(None, batch)[0] - expected).max() < 1e-4
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(work.folded).graph.node}
    assert [len(batch[float_networks.NORMALIZED]) for batch in work.batches()] == [1, 1, 1]


def test_the_tensorflow_network_is_the_frozen_graph(work, expected: np.ndarray) -> None:
    pytest.importorskip("tensorflow", reason="needs the train extra")
    run = float_networks.tensorflow_network(work.folded)
    outputs = [run(batch[float_networks.NORMALIZED].transpose(0, 2, 3, 1)).numpy() for batch in work.batches()]
    assert np.abs(np.concatenate(outputs) - expected).max() < 1e-4


def test_systems_are_opened_timed_in_turn_and_left_out_with_a_reason(
    work, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    photos = [tmp_path / f"{index}.jpg" for index in range(12)]
    for index, path in enumerate(photos):
        path.write_bytes(bytes([index]))

    def opened(work, path):
        return images.System(lambda data: data[0], lambda x: x % 3, lambda out: out, "some")

    def broken(work, path):
        raise ValueError("no such\nkernel")

    monkeypatch.setattr(
        images, "SYSTEMS", {"a-int8": images.Peer(None, "", opened), "b-int8": images.Peer(None, "", broken)}
    )
    monkeypatch.setattr(harness, "TURN_SECONDS", 0)
    report = images.time_systems(work, ["a-int8", "b-int8"], photos, 2)
    assert report["left_out"].keys() == {"b-int8"}
    assert report["left_out"]["b-int8"].startswith("ValueError: no such") and "\n" not in report["left_out"]["b-int8"]
    assert report["labels"] == {"a-int8": [index % 3 for index in range(12)]}
    for key in (*images.COLUMNS, "model_only"):
        assert len(report[key]["a-int8"]) == 2
    assert report["whole"]["a-int8"][0] >= report["prepare"]["a-int8"][0] + report["model"]["a-int8"][0]


def test_the_report_compares_with_the_quickest_int8_peer() -> None:
    whole = {
        "zoo-int8": [2.0, 2.0, 1.0],
        "slow-int8": [9.0, 9.0, 9.0],
        "quick-int8": [4.0, 3.0, 4.0],
        "openvino-fp32": [1.0, 1.0, 1.0],
    }
    labels = {
        "zoo-int8": [1, 2, 3, 4],
        "slow-int8": [0, 0, 0, 0],
        "quick-int8": [1, 2, 3, 0],
        "openvino-fp32": [1, 2, 0, 0],
    }
    times = dict.fromkeys((*images.COLUMNS, "model_only"), whole)
    summary = images.summary({**times, "labels": labels, "engine": dict.fromkeys(whole, "")})
    assert summary["best_int8_peer"] == "quick-int8"
    ours = summary["results"][0]
    assert ours["ms"]["whole"] == {"median": 2.0, "spread": [1.0, 2.0]}
    assert (ours["images_per_second"], ours["times_as_fast_as_best"]) == (500.0, 2.0)
    assert (ours["labels_as_best"], ours["labels_as_fp32"], ours["core_share"]) == (0.75, 0.5, 1.0)
    assert summary["ours"]["slow-int8"] == {"times_as_fast": 4.5, "same_labels": 0.0}


@pytest.mark.parametrize(
    "arguments", [["nosuchmodel"], ["--peers", "nosuchpeer"], ["--photos", "1"], ["--rounds", "0"]], ids=" ".join
)
def test_what_is_wrong_with_a_request_is_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZOO_MIRROR", "")
    with pytest.raises(SystemExit) as ended:
        harness.run("images", images, arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert len(said.err.splitlines()) == 1
    assert said.out == ""
