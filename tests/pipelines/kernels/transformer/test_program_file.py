"""Programs in a file: the same when they are read, damaged ones refused, and a version that changes with them."""

import hashlib
import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
from helpers.translation_networks import network, plain_network

from pipelines.core.errors import RequestError
from pipelines.engines.native.translation import store
from pipelines.graph import edit, io
from pipelines.kernels.transformer import program_file
from pipelines.kernels.transformer.mapping.from_graph import programs
from zoo.translation.export.freeze import export

# (program_file.VERSION, digest of what the programs below are in a file of that version)
RECORDED = (6, "36bfcecb7adaaa28")


def test_stored_programs_are_the_same_and_share_what_they_shared(tmp_path):
    path = io.save(export(network()), tmp_path / "model.onnx")
    store(path, tmp_path / "model.zoo")
    original, loaded = programs(io.load(path)), program_file.load(tmp_path / "model.zoo")
    for one, other in zip(original, loaded, strict=True):
        assert [type(operation) for operation in one.operations] == [type(operation) for operation in other.operations]
        for a, b in zip(one.operations, other.operations, strict=True):
            for name, value in vars(a).items():
                arrays = [(value, getattr(b, name))]
                if name == "layer":
                    arrays = [(getattr(value, part), getattr(b.layer, part)) for part in ("weight", "scale", "bias")]
                assert all(np.array_equal(x, y) for x, y in arrays), name
    for encoder, decoder in (original, loaded):
        assert np.may_share_memory(encoder.embedding.table, decoder.vocabulary.layer.weight)
        assert np.may_share_memory(decoder.embedding.table, decoder.vocabulary.layer.weight)


@pytest.mark.parametrize("damage", ["nothing", "cut", "header", "other"])
def test_damaged_stored_programs_are_refused_in_one_line(tmp_path, damage):
    path = tmp_path / "model.zoo"
    store(io.save(export(network()), tmp_path / "model.onnx"), path)
    content = path.read_bytes()
    other = {
        "nothing": b"",
        "cut": content[:9000],
        "header": content[:20],
        "other": content.replace(f'"version": {program_file.VERSION}'.encode(), b'"version": 0', 1),
    }
    path.write_bytes(other[damage])
    with pytest.raises(RequestError, match=r"model\.zoo is not readable.*it is rebuilt") as caught:
        program_file.load(path)
    assert "\n" not in str(caught.value)


def quantize_inputs(model):
    """A Q/DQ pair before every matrix product with constant weights."""
    for node in [node for node in model.graph if node.op_type == "MatMul"]:
        if node.inputs[1].const_value is None:
            continue
        name = str(node.outputs[0].name)
        qparams = [
            edit.initializer(model.graph, f"{name}.scale", np.float32(1 / 32)),
            edit.initializer(model.graph, f"{name}.zero", np.uint8(128)),
        ]
        quantize = edit.node("QuantizeLinear", [node.inputs[0], *qparams], f"{name}.quantized")
        dequantize = edit.node("DequantizeLinear", [quantize.outputs[0], *qparams], f"{name}.dequantized")
        model.graph.insert_before(node, [quantize, dequantize])
        node.replace_input_with(0, dequantize.outputs[0])
    return model


def summary(value):
    """What a program holds: integers as they are, floats by their sum, which CPUs may round otherwise."""
    if isinstance(value, np.ndarray):
        exact = value.dtype.kind in "iu"
        content = hashlib.sha256(value.tobytes()).hexdigest() if exact else f"{np.abs(value).sum(dtype=np.float64):.3g}"
        return [value.dtype.str, list(value.shape), content]
    if isinstance(value, list | tuple):
        return [summary(element) for element in value]
    if type(value).__name__ in program_file.CLASSES:
        return {type(value).__name__: {name: summary(field) for name, field in vars(value).items()}}
    return value


def test_the_version_changes_with_what_is_in_a_file(tmp_path):
    sha = hashlib.sha256()
    for number, model in enumerate((export(plain_network()), quantize_inputs(export(plain_network())))):
        path = tmp_path / f"{number}.zoo"
        program_file.save(path, programs(model))
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header.pop("version") == program_file.VERSION
        sha.update(json.dumps([header, summary(program_file.load(path))]).encode())
    stamp = (program_file.VERSION, sha.hexdigest()[:16])
    assert stamp == RECORDED, (
        "a graph becomes other programs, or these another file, than when RECORDED was written: bump VERSION in "
        f"pipelines/kernels/transformer/program_file.py, so that cached files are made anew, and record {stamp} here "
        "with the new version"
    )
