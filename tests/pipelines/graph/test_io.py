"""Files: saved, loaded and refused; digests."""

import gzip
import random
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from helpers.arrays import normals
from helpers.rewriting import BRANCH, mlp, model, ops, run

from pipelines.core.errors import RequestError
from pipelines.core.files import mapped
from pipelines.graph import io, query, tensor_sizes
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import SHARED

# --- load and save


@pytest.fixture
def saved(tmp_path):
    return io.save(mlp(), tmp_path / "m.onnx")


def test_a_model_survives_saving(rng, saved):
    loaded, x = io.load(saved), rng.standard_normal((3, 8)).astype(np.float32)
    assert ops(loaded) == ["Gemm", "LeakyRelu", "MatMul"] and query.op_counts(loaded) == {
        "Gemm": 1,
        "LeakyRelu": 1,
        "MatMul": 1,
    }
    again = io.save(loaded, saved.parent / "again" / "m.onnx")
    assert again.read_bytes() == saved.read_bytes()
    np.testing.assert_array_equal(run(loaded, x=x)["y"], run(io.load(again), x=x)["y"])


def one_line(path, *parts):
    with pytest.raises(RequestError) as caught:
        io.load(path)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text and all(part in text for part in parts), text


def test_a_model_may_be_compressed(saved, tmp_path):
    packed = gzip.compress(saved.read_bytes())
    (tmp_path / "packed.onnx").write_bytes(packed)
    assert io.digest(io.load(tmp_path / "packed.onnx")) == io.digest(io.load(saved))
    (tmp_path / "packed.onnx").write_bytes(packed[:-9])
    with pytest.raises(RequestError, match=r"packed\.onnx is damaged"):
        io.load(tmp_path / "packed.onnx")


def test_a_missing_file_or_a_folder_is_named(tmp_path):
    one_line(tmp_path / "none.onnx", "no ONNX model at")
    one_line(tmp_path, "no ONNX model at")


def test_a_file_cut_anywhere_is_refused(saved):
    body = saved.read_bytes()
    for size in [0, 1, 2, *range(3, len(body), 29), len(body) - 1]:
        saved.write_bytes(body[:size])
        one_line(saved)


def test_other_files_are_refused(tmp_path):
    noise = random.Random(0)
    for body in [b"hello world\n", b"PK\x03\x04", b"{}", *(noise.randbytes(noise.randint(1, 400)) for _ in range(100))]:
        (tmp_path / "noise.onnx").write_bytes(body)
        one_line(tmp_path / "noise.onnx")


def test_damaged_files_are_refused_in_one_line_or_read(saved):
    body, noise = saved.read_bytes(), random.Random(1)
    for _ in range(300):
        damaged = bytearray(body)
        for _ in range(3):
            damaged[noise.randrange(len(body))] = noise.randrange(256)
        saved.write_bytes(damaged)
        try:
            assert io.digest(io.load(saved))
        except RequestError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("(float[n] x) => (float[n] y) { y = Foo(x) }", "No Op registered for Foo"),
        ("(float[n] x) => (float[n] y) { y = Relu<alpha=1.0>(x) }", "alpha"),
        ("(float[n] x) => (float[n] y) { y = Add(x) }", "Add"),
        ("(float[n] x) => (float[n] y) { z = Relu(x) }", "y"),
        ("(float[n] x) => (float[n] y) { y = Relu(z) z = Relu(x) }", "topologically sorted"),
    ],
)
def test_an_invalid_graph_says_what_is_wrong(tmp_path, text, what):
    path = tmp_path / "bad.onnx"
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text}')
    path.write_bytes(proto.SerializeToString())
    one_line(path, what)


# --- digest


def test_digest_ignores_who_made_the_file_and_notes():
    proto = ir.to_proto(mlp())
    before = io.digest(ir.from_proto(proto))
    proto.producer_name, proto.producer_version, proto.doc_string, proto.model_version = "else", "9", "note", 7
    proto.graph.name, proto.graph.doc_string = "other", "note"
    for number, node in enumerate(proto.graph.node):
        node.name, node.doc_string = f"node{number}", "note"
    proto.metadata_props.add(key="author", value="nobody")
    assert io.digest(ir.from_proto(proto)) == before


def change_weight(proto):
    body = bytearray(proto.graph.initializer[0].raw_data)
    body[0] ^= 1
    proto.graph.initializer[0].raw_data = bytes(body)


def rename(proto, old, new):
    for node in proto.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = new if name == old else name
    for value in (*proto.graph.output, *proto.graph.input, *proto.graph.initializer):
        value.name = new if value.name == old else value.name


def swap_inputs(proto):
    first, second = proto.graph.node[2].input
    proto.graph.node[2].input[:] = [second, first]


@pytest.mark.parametrize(
    "change",
    [
        change_weight,
        lambda proto: setattr(proto.graph.node[1].attribute[0], "f", 0.2),
        lambda proto: rename(proto, "y", "z"),
        lambda proto: rename(proto, "x", "z"),
        lambda proto: rename(proto, "h", "z"),
        lambda proto: rename(proto, "w", "z"),
        lambda proto: setattr(proto.graph.node[1], "op_type", "Elu"),
        lambda proto: setattr(proto.graph.node[1], "domain", "com.example"),
        swap_inputs,
        lambda proto: setattr(proto.graph.input[0].type.tensor_type, "elem_type", onnx.TensorProto.DOUBLE),
        lambda proto: setattr(proto.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", 4),
        lambda proto: proto.graph.output.append(onnx.helper.make_tensor_value_info("h", 1, ["n", 16])),
        lambda proto: proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1, np.float32), "more")),
    ],
    ids=[
        "weight",
        "attribute",
        "output",
        "input",
        "value",
        "weight name",
        "operator",
        "domain",
        "order",
        "dtype",
        "shape",
        "new",
        "more",
    ],
)
def test_digest_changes_with_what_the_graph_computes(change):
    proto = ir.to_proto(mlp())
    before = io.digest(ir.from_proto(proto))
    change(proto)
    assert io.digest(ir.from_proto(proto)) != before


def made_in_memory():
    network = mlp()
    network.graph[1].attributes["alpha"] = ir.AttrFloat32("alpha", 0.1)  # a Python float; a file keeps 32 bits of it
    return network


@pytest.mark.parametrize(
    "found",
    [
        mlp(),
        made_in_memory(),
        model(BRANCH),
        model(
            "(float[n,3] x, float z) => (float[n,3] y) { a = Mul(x, z) y = Einsum<equation='ij->ij'>(a) }".replace(
                "'", '"'
            )
        ),
        model("(float[n,3] x) => (float[n,3] y) { k = Constant<value = float {2}>() y = Mul(x, k) }"),
    ],
    ids=["plain", "float attribute", "branches", "string attribute", "tensor attribute"],
)
def test_digest_survives_copying_and_saving(found, tmp_path):
    before = io.digest(found)
    assert io.digest(found.clone()) == before
    assert io.digest(io.load(io.save(found, tmp_path / "m.onnx"))) == before


def test_digest_looks_into_branches():
    before = io.digest(model(BRANCH))
    assert io.digest(model(BRANCH)) == before
    assert io.digest(model(BRANCH.replace("{2}", "{3}"))) != before
    assert io.digest(model(BRANCH.replace("Relu", "Abs"))) != before


def test_digest_is_the_same_in_another_process(saved):
    code = "import sys; from pipelines.graph import io; print(io.digest(io.load(sys.argv[1])))"
    digest = subprocess.run(
        [sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert digest == io.digest(io.load(saved))


# --- any graph


def keep(proto, path):
    path.write_bytes(proto.SerializeToString())
    return path


def parsed(text, opset=17, ir_version=9, **weights):
    proto = onnx.parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}]> g {text}')
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()
    )
    return proto


DENSE = "(float[n,8] x) => (float[n,4] y) { h = MatMul(x, w) a = Add(h, b) y = Clip(a, low) }"
WEIGHTS = {
    "w": normals(0)(8, 4),
    "b": normals(2)(4),
    "low": np.float32(0),
}


@pytest.mark.parametrize("opset", range(11, 24))
def test_opsets_from_11_on_are_read(rng, opset, tmp_path, caplog):
    body = (
        DENSE.replace("y = Clip", "s = Softmax<axis=1>(a) q = Squeeze<axes=[0]>(u) u = Unsqueeze<axes=[0]>(s) y = Clip")
        if opset < 13
        else DENSE
    )
    body = body.replace(
        "q = Squeeze<axes=[0]>(u) u = Unsqueeze<axes=[0]>(s)", "u = Unsqueeze<axes=[0]>(s) q = Squeeze<axes=[0]>(u)"
    )
    body = body.replace("Clip(a", "Clip(q") if opset < 13 else body
    proto = parsed(body, opset, **WEIGHTS)
    loaded, x = io.load(keep(proto, tmp_path / "m.onnx")), rng.standard_normal((3, 8)).astype(np.float32)
    assert loaded.opset_imports[""] == max(opset, 13)
    assert (f"opset {opset}; it is read as opset 13" in caplog.text) == (opset < 13)
    np.testing.assert_allclose(run(loaded, x=x)["y"], run(ir.from_proto(proto), x=x)["y"], rtol=1e-6)
    rewrite(loaded, [rule() for rule in SHARED])
    np.testing.assert_allclose(run(loaded, x=x)["y"], run(ir.from_proto(proto), x=x)["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("opset", "what"),
    [
        (999, "it has opset 999, onnx .* knows up to .* update onnx"),
    ],
)
def test_other_opsets_are_refused(opset, what, tmp_path):
    path = keep(
        parsed("(float[n] x) => (float[n] y) { y = Relu(x) }", opset),
        tmp_path / "m.onnx",
    )
    with pytest.raises(RequestError, match=what):
        io.load(path)


def test_opset_9_of_ir_version_3_is_read_with_its_weights_constant(rng, tmp_path, caplog):
    proto = parsed("(float[n,8] x, float[8,4] w) => (float[n,4] y) { y = MatMul(x, w) }", 9, 3, w=WEIGHTS["w"])
    loaded, x = io.load(keep(proto, tmp_path / "m.onnx")), rng.standard_normal((3, 8)).astype(np.float32)
    assert "opset 9; it is read as opset 13" in caplog.text
    assert [value.name for value in loaded.graph.inputs] == ["x"]
    np.testing.assert_allclose(run(loaded, x=x)["y"], x @ WEIGHTS["w"], rtol=1e-5, atol=1e-6)


def test_sizes_that_say_nothing_are_dynamic(tmp_path):
    proto = parsed("(float[n,3,a,b] x, float[2,c] s) => (float[n,3,a,b] y, float[2,c] t) { y = Relu(x) t = Relu(s) }")
    first, second = (value.type.tensor_type.shape.dim for value in proto.graph.input)
    first[0].dim_value, first[2].dim_param, first[3].dim_param, second[1].dim_value = -1, "?", "?", 0
    loaded = io.load(keep(proto, tmp_path / "m.onnx"))
    assert [list(query.symbolic_shape(value)) for value in loaded.graph.inputs] == [[None, 3, None, None], [2, None]]


def test_a_conversion_that_fails_is_one_line(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no adapter\nfor Upsample")

    monkeypatch.setattr(onnx.version_converter, "convert_version", fail)
    one_line(
        keep(parsed("(float[n] x) => (float[n] y) { y = Relu(x) }", 12), tmp_path / "m.onnx"), "no adapter for Upsample"
    )


@pytest.fixture
def outside(rng, tmp_path):
    """A model that keeps its weights in a file beside it."""
    proto = parsed(DENSE, **WEIGHTS | {"w": rng.standard_normal((8, 4)).astype(np.float32)})
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    return tmp_path / "m.onnx", proto


def test_weights_beside_the_model_are_read(rng, outside, tmp_path):
    path, _ = outside
    assert (path.parent / "weights.bin").stat().st_size >= 144
    loaded, x = io.load(path), rng.standard_normal((3, 8)).astype(np.float32)
    rewrite(loaded, [rule() for rule in SHARED])
    alone = io.save(loaded, tmp_path / "other" / "m.onnx")
    (path.parent / "weights.bin").unlink()
    assert ops(io.load(alone)) == ["Gemm", "Relu"] and run(loaded, x=x)["y"].shape == (3, 4)


def test_weights_that_are_not_there_are_named(outside):
    path, _ = outside
    (path.parent / "weights.bin").write_bytes(bytes(10))
    one_line(path)
    (path.parent / "weights.bin").unlink()
    one_line(path, "weights.bin")


def test_weights_outside_the_folder_are_refused(outside):
    path, _ = outside
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        tensor.external_data[0].value = "../weights.bin"
    one_line(keep(proto, path), "weights.bin")


def test_a_model_too_large_for_one_file_keeps_its_weights_beside_it(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_sizes, "MAX_PROTOBUF_BYTES", 1000)
    network = model(
        "(float[n,512] x) => (float[n,520] y) { y = MatMul(x, w) }",
        w=rng.standard_normal((512, 520)).astype(np.float32),
    )
    path, x = io.save(network, tmp_path / "m.onnx"), rng.standard_normal((2, 512)).astype(np.float32)
    assert path.stat().st_size < 1000 and mapped(path).stat().st_size >= 2**20
    before = (path.read_bytes(), mapped(path).read_bytes())
    again = io.load(path)
    np.testing.assert_array_equal(run(again, x=x)["y"], run(network, x=x)["y"])
    io.save(again, tmp_path / "m.onnx")
    assert (path.read_bytes(), mapped(path).read_bytes()) == before


def test_weights_listed_as_inputs_are_weights(tmp_path):
    proto = parsed(DENSE, 13, 3, **WEIGHTS)  # IR version 3 asks for it
    for name, array in WEIGHTS.items():
        proto.graph.input.append(onnx.helper.make_tensor_value_info(name, 1, array.shape))
    loaded = io.load(keep(proto, tmp_path / "m.onnx"))
    rewrite(loaded, [rule() for rule in SHARED])
    assert ops(loaded) == ["Gemm", "Relu"] and [value.name for value in loaded.graph.inputs] == ["x"]
    again = io.load(io.save(loaded, tmp_path / "again.onnx"))
    assert run(again, x=np.ones((2, 8), np.float32))["y"].shape == (2, 4)


def test_several_inputs_dynamic_batch_and_shared_weights(rng, tmp_path):
    text = """(float[n,8] x, float[m,8] z, float[n,m] k) => (float[n,m] y) { a = MatMul(x, w) b = Add(a, b1) c = MatMul(z, w) d = Add(c, b1)
        e = Transpose(d) f = MatMul(b, e) y = Mul(f, k) }"""
    proto = parsed(text, w=WEIGHTS["w"], b1=WEIGHTS["b"])
    loaded = io.load(keep(proto, tmp_path / "m.onnx"))
    rewrite(loaded, [rule() for rule in SHARED])
    assert ops(loaded) == ["Gemm", "Gemm", "Transpose", "MatMul", "Mul"] and set(loaded.graph.initializers) == {
        "w",
        "b1",
    }
    for n, m in ((1, 1), (3, 5)):
        feeds = {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, shape in {"x": (n, 8), "z": (m, 8), "k": (n, m)}.items()
        }
        np.testing.assert_allclose(
            run(loaded, **feeds)["y"], run(ir.from_proto(proto), **feeds)["y"], rtol=1e-4, atol=1e-5
        )


def test_operators_of_other_domains_are_left_alone(tmp_path):
    text = """<ir_version: 9, opset_import: ["": 17, "com.example": 1]> g (float[n,8] x) => (float[n,4] y)
        { a = com.example.Clip(x) h = MatMul(a, w) y = com.example.Add(h, b) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(WEIGHTS[name], name) for name in "wb")
    loaded = io.load(keep(proto, tmp_path / "m.onnx"))
    rewrite(loaded, [rule() for rule in SHARED])
    assert ops(loaded) == ["Clip", "MatMul", "Add"] and [node.domain for node in loaded.graph] == [
        "com.example",
        "",
        "com.example",
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "(float[n] x) => (float[n] y) { y = Add(x, w) }",
            "Add y reads w, which is no input, no initializer, and computed nowhere",
        ),
        (
            "(float[n] x) => (float[n] y) { a = Add(x, b) b = Relu(a) y = Neg(b) }",
            "read each other's results in a circle: a, b, y",
        ),
        ("(float[n] x) => (float[n] y) { y = Relu(y) }", "in a circle: y"),
    ],
)
def test_graphs_that_can_never_run_say_why(tmp_path, text, what):
    one_line(keep(parsed(text), tmp_path / "m.onnx"), what)


def test_text_in_place_of_protobuf_is_refused(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_text(onnx.printer.to_text(parsed(DENSE, **WEIGHTS)))
    one_line(path, "is not a readable ONNX model")


@pytest.mark.parametrize("opset", [9, 10])
@pytest.mark.parametrize(("mode", "scale"), [("linear", 2.0), ("linear", 0.5), ("nearest", 1.5), ("nearest", 0.6)])
def test_old_pictures_are_resized_as_before(rng, tmp_path, opset, mode, scale):
    """The converter leaves a Resize to opset 11's defaults, which read other pixels."""
    op = "Upsample" if opset == 9 else "Resize"
    text = f'(float[1,1,5,5] x) => (float[1,1,h,w] y) {{ y = {op}<mode: string = "{mode}">(x, s) }}'
    path = keep(parsed(text, opset, 4, s=np.array([1, 1, scale, scale], np.float32)), tmp_path / "m.onnx")
    if op == "Upsample" and scale < 1:
        pytest.skip("Upsample does not shrink")
    x = rng.standard_normal((1, 1, 5, 5)).astype(np.float32)
    wanted = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    np.testing.assert_allclose(run(io.load(path), x=x)["y"], wanted, rtol=1e-6, atol=1e-6)


def test_a_nearest_resize_that_grows_and_shrinks_is_refused(tmp_path):
    text = "(float[1,1,5,5] x) => (float[1,1,h,w] y) { y = Resize(x, s) }"
    path = keep(parsed(text, 10, 4, s=np.array([1, 1, 2, 0.5], np.float32)), tmp_path / "m.onnx")
    one_line(path, "grows one axis and shrinks another")


FUNCTIONS = """<ir_version: 9, opset_import: ["": 17, "own": 1]> g (float[n,8] x) => (float[n,4] y)
    { h = MatMul(x, w) a = own.Shift(h, b) y = Relu(a) }
    <domain: "own", opset_import: ["": 17]> Shift (h, b) => (a) { a = Add(h, b) }"""


def test_the_models_own_functions_are_inlined(rng, tmp_path):
    proto = onnx.parser.parse_model(FUNCTIONS)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(WEIGHTS[name], name) for name in "wb")
    path = keep(proto, tmp_path / "m.onnx")
    loaded, x = io.load(path), rng.standard_normal((3, 8)).astype(np.float32)
    assert ops(loaded) == ["MatMul", "Add", "Relu"] and not loaded.functions
    np.testing.assert_allclose(run(loaded, x=x)["y"], np.maximum(x @ WEIGHTS["w"] + WEIGHTS["b"], 0), rtol=1e-5)


def test_weights_beside_the_file_may_be_those_of_constants(tmp_path, monkeypatch):
    proto = parsed("(float[n,8] x) => (float[n,4] y) { w = Constant() y = MatMul(x, w) }")
    tensor = onnx.numpy_helper.from_array(WEIGHTS["w"], "w")
    proto.graph.node[0].attribute.append(onnx.helper.make_attribute("value", tensor))
    path = tmp_path / "there" / "m.onnx"
    path.parent.mkdir()
    onnx.save(proto, path, save_as_external_data=True, location="m.bin", size_threshold=0, convert_attribute=True)
    monkeypatch.chdir(tmp_path)
    loaded = io.load(path)
    (path.parent / "m.bin").unlink()
    x = np.ones((2, 8), np.float32)
    np.testing.assert_allclose(run(loaded, x=x)["y"], x @ WEIGHTS["w"], rtol=1e-5)


@pytest.mark.parametrize("flat", [True, False])
def test_sparse_weights_are_read(rng, tmp_path, flat):
    dense = np.zeros((8, 4), np.float32)
    dense[[1, 3, 7], [0, 2, 3]] = [1, 2, 3]
    places = np.array([4, 14, 31]) if flat else np.array([[1, 0], [3, 2], [7, 3]])
    values = onnx.numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w")
    proto = parsed("(float[n,8] x) => (float[n,4] y) { y = MatMul(x, w) }")
    indices = onnx.numpy_helper.from_array(places.astype(np.int64), "places")
    proto.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [8, 4]))
    x = rng.standard_normal((3, 8)).astype(np.float32)
    loaded = io.load(keep(proto, tmp_path / "m.onnx"))
    np.testing.assert_allclose(run(loaded, x=x)["y"], x @ dense, rtol=1e-6)


@pytest.mark.parametrize(
    ("dims", "entries", "raw", "message"),
    [
        ((1 << 40, 1 << 20), {"offset": "0", "length": "4096"}, b"", "has 4,096 bytes of w.bin, expected 4,611,686"),
        ((64, 16), {"offset": "0", "length": "10"}, b"", "has 10 bytes of w.bin, expected 4,096 bytes for its shape"),
        ((64, 16), {"offset": "8", "length": "4096"}, b"", "lies at byte 8 of w.bin, which has 4,096 bytes"),
        ((64, 8), {}, b"", "has 4,096 bytes of w.bin, expected 2,048 bytes"),
        ((64, 16), {"length": "x"}, b"", "invalid literal"),
        (
            (64, 16),
            {"location": "gone.bin"},
            b"",
            "its weights are in .*gone.bin, which does not exist; copy that file",
        ),
        ((64, 16), None, bytes(4000), "4,?000 bytes"),
        ((64, 16), {"offset": "0", "length": "4096"}, b"", ""),
        ((64, 16), {}, b"", ""),
        ((64, 16), None, bytes(4096), ""),
    ],
)
def test_tensors_whose_length_lies_are_named(tmp_path, dims, entries, raw, message):
    (tmp_path / "w.bin").write_bytes(bytes(4096))
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=dims)
    if entries is None:
        weight.raw_data = raw
    else:
        weight.data_location = onnx.TensorProto.EXTERNAL
        for key, value in {"location": "w.bin", **entries}.items():
            weight.external_data.add(key=key, value=value)
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("n", size))
        for name, size in (("x", 64), ("y", 16))
    )
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    if not message:
        assert io.load(tmp_path / "m.onnx").graph.initializers["w"].shape == dims
        return
    with pytest.raises(RequestError, match=rf"m\.onnx is not a valid ONNX model: .*{message}"):
        io.load(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a pointer of Git LFS; run git lfs pull"),
        (b"\n<!DOCTYPE html>", "a page of HTML"),
        (b"PK\3\4" + bytes(26) + b"plan.json", "a plan file; give the .onnx file"),
        (b"\x10\0\0\0\0\0\0\0" + b'{"version":1}', "a program of the native engine"),
        (b"PK\3\4\0\0", "a checkpoint of PyTorch"),
        (b"\x80\2}q\0.", "a pickle"),
        (b"\x89HDF\r\n", "an HDF5 file of Keras"),
        (b"\0\0\0\0ORTM", "ONNX Runtime's own format"),
        (b"\x1c\0\0\0TFL3", "a TensorFlow Lite model"),
        (b"\x10\0\0\0\0\0\0\0" + b'{"w":{}}', "a file of safetensors"),
    ],
)
def test_files_of_other_formats_are_named(tmp_path, start, said):
    (tmp_path / "model.onnx").write_bytes(start + bytes(100))
    with pytest.raises(RequestError, match=said):
        io.load(tmp_path / "model.onnx")
