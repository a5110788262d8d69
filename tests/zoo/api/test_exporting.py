"""Model repositories for Triton and the OpenVINO Model Server, as those check them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

import zoo
from pipelines.core.errors import RequestError
from pipelines.graph import io
from zoo import api
from zoo.api.exporting import triton

pytestmark = pytest.mark.usefixtures("shared_home")

NAME = "wide-deep-criteo"
# https://github.com/openvinotoolkit/model_server, docs/parameters.md: the options of a model in config.json
KINDS = {"tensor(uint8)": 2, "tensor(int32)": 8, "tensor(int64)": 9, "tensor(float)": 11}  # Triton's enum DataType
OVMS_OPTIONS = {
    "name",
    "base_path",
    "batch_size",
    "shape",
    "layout",
    "model_version_policy",
    "nireq",
    "target_device",
    "plugin_config",
}


def config_of(text: str) -> Any:
    """The text as Triton's own ModelConfig."""
    messages = pytest.importorskip(
        "tritonclient.grpc.model_config_pb2", reason="Triton's ModelConfig comes with tritonclient[grpc]"
    )
    from google.protobuf import text_format

    return text_format.Parse(text, messages.ModelConfig())


def graph(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model('<ir_version: 8, opset_import: ["" : 18]> ' + text), path)
    return io.load(path)


@pytest.mark.parametrize("name", [NAME, "mobilenet-v1-cifar10", "multi30k-en-de"])
def test_triton_reads_the_config_and_its_tensors_are_the_graphs(tmp_path: Path, name: str) -> None:
    report = api.export(name, "triton", tmp_path, threads=3)
    config = config_of(Path(report["config"]).read_text())
    file = tmp_path / name / "1" / config.default_model_filename
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    for ports, tensors in ((session.get_inputs(), config.input), (session.get_outputs(), config.output)):
        assert [tensor.name for tensor in tensors] == [port.name for port in ports]
        for declared, port in zip(tensors, ports, strict=True):
            assert list(declared.dims) == [size if isinstance(size, int) else -1 for size in port.shape[1:]]
            assert declared.data_type == KINDS[port.type]
    assert config.name == name == file.parents[1].name  # Triton refuses another name than the folder's
    assert config.max_batch_size > 1
    assert config.parameters["intra_op_thread_count"].string_value == "3"


@pytest.mark.parametrize("name", [NAME, "mobilenet-v1-cifar10", "multi30k-en-de"])
def test_ovms_reads_the_config(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_config_list": [{"config": {"name": "other", "base_path": "/models/other"}}]})
    )
    api.export(name, "ovms", tmp_path)
    api.export(name, "ovms", tmp_path)  # again: nothing is named twice
    document = json.loads((tmp_path / "config.json").read_text())
    configs = [entry["config"] for entry in document["model_config_list"]]
    assert [config["name"] for config in configs] == ["other", name]
    assert all(config.keys() <= OVMS_OPTIONS for config in configs)
    folder = tmp_path / configs[1]["base_path"]  # relative to config.json
    assert [path.name for path in folder.iterdir()] == ["1"]
    assert [path.suffix for path in (folder / "1").iterdir()] == [".onnx"]


def test_another_file_is_another_version(tmp_path: Path) -> None:
    assert api.export(NAME, "triton", tmp_path)["version"] == 1
    file = tmp_path / NAME / "1" / "int8.onnx"
    file.write_bytes(file.read_bytes() + b"\0")
    report = api.export(NAME, "triton", tmp_path)
    assert report["version"] == 2
    assert Path(report["path"], "int8.onnx").read_bytes() == zoo.load(NAME).ensure("int8.onnx").read_bytes()


def test_a_graph_without_a_batch_is_given_whole(tmp_path: Path) -> None:
    config = config_of(
        triton(graph(tmp_path, "g (float[2, n] x) => (float[2, n] y) { y = Relu(x) }"), "m", "m.onnx", 1)
    )
    assert config.max_batch_size == 0
    assert list(config.input[0].dims) == [2, -1]
    assert not config.HasField("dynamic_batching")


@pytest.mark.parametrize(("axis", "batch"), [("n", 64), ("rows", 0)])
def test_rows_that_the_data_count_are_no_samples(tmp_path: Path, axis: str, batch: int) -> None:
    """Of Triton with detectors that list the boxes of all images: the numbers of requests and results differ."""
    text = f"g (float[n, 4] x) => (float[{axis}, 4] y) {{ i = NonZero(x) y = CastLike(x, x) }}"
    assert config_of(triton(graph(tmp_path, text), "m", "m.onnx", 1)).max_batch_size == batch


def test_a_number_a_sample_gets_the_axis_that_triton_wants(tmp_path: Path) -> None:
    config = config_of(triton(graph(tmp_path, "g (float[n] x) => (float[n] y) { y = Relu(x) }"), "m", "m.onnx", 1))
    assert config.max_batch_size > 0
    assert list(config.input[0].dims) == [1]
    assert config.input[0].HasField("reshape")
    assert list(config.input[0].reshape.shape) == []


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match="choose triton, ovms, sentence-transformers, huggingface or, for tables, npz or safetensors"
    ):
        api.export(NAME, "torchserve", tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(RequestError, match="model_config_list"):
        api.export(NAME, "ovms", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_an_onnx_file_is_exported_as_it_is(tmp_path: Path) -> None:
    graph(tmp_path, "g (float[n, 3] x) => (float[n, 3] y) <float[3] w = {1.0, 2.0, 3.0}> { y = Mul(x, w) }")
    model = onnx.load(tmp_path / "model.onnx")
    model.graph.input[0].name = model.graph.node[0].input[0] = 'an "image"\\0'
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    source = tmp_path / "détecteur 1.onnx"
    onnx.save(model, source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    report = api.export(source, "triton", tmp_path / "repository")
    assert report["model"] == "d-tecteur-1" and report["version"] == 1
    assert sorted(path.name for path in Path(report["path"]).iterdir()) == ["détecteur 1.onnx", "weights.bin"]
    assert 'name: "an \\"image\\"\\\\0"' in Path(report["config"]).read_text()
    assert config_of(Path(report["config"]).read_text()).input[0].name == 'an "image"\\0'
    assert api.export(source, "triton", tmp_path / "repository")["version"] == 1
    (tmp_path / "weights.bin").write_bytes(b"\1" * 12)
    assert api.export(source, "triton", tmp_path / "repository")["version"] == 2
    (tmp_path / "page.onnx").write_text("<html>")
    with pytest.raises(RequestError, match="a page of HTML"):
        api.export(tmp_path / "page.onnx", "ovms", tmp_path / "repository")
