"""The shared passes together, from ONNX text."""

import random

import numpy as np
import onnx_ir as ir
import pytest
from helpers.arrays import normals
from helpers.rewriting import integers, model, ops, rewritten, run

from pipelines.graph import io, query
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import SHARED

NHWC, NCHW = "Transpose<perm=[0,2,3,1]>", "Transpose<perm=[0,3,1,2]>"
NET = f"""(float[n,16,16,3] image) => (float[n,5] y) {{
    t = {NCHW}(image) p = Pad(t, pads) c = Conv<strides=[2,2]>(p, W) m = Mul(c, s) a = Add(m, o) l = Max(a, zero) h = Min(l, six)
    dw = Conv<group=8,pads=[1,1,1,1]>(h, D) bn = BatchNormalization(dw, g, be, me, v) r = Clip(bn, zero)
    n1 = {NHWC}(r) n2 = Add(n1, bias) n3 = Tanh(n2) n4 = {NCHW}(n3) skip = Add(n4, h)
    pool = GlobalAveragePool(skip) sh = Shape(pool) b0 = Gather(sh, first) shape = Concat<axis=0>(b0, minus) f = Reshape(pool, shape)
    drop = Dropout(f) d = MatMul(drop, F) y = Add(d, fb) }}"""


def side():
    """The weights of `NET`."""
    normal = normals(0)
    return {
        "pads": integers(0, 0, 0, 0, 0, 0, 1, 1), "W": normal(8, 3, 3, 3), "s": normal(1, 8, 1, 1), "o": normal(1, 8, 1, 1),
        "D": normal(8, 1, 3, 3), "g": normal(8), "be": normal(8), "me": normal(8), "v": np.abs(normal(8)) + 1, "zero": np.float32(0),
        "six": np.float32(6), "bias": normal(8), "first": integers(0), "minus": integers(-1), "F": normal(8, 5), "fb": normal(5),
    }  # fmt: skip


SIDE = side()


@pytest.mark.parametrize("opset", [13, 17])
def test_the_shared_passes_on_a_small_net(normal, opset, tmp_path):
    net = model(NET, opset, **SIDE)
    rewritten(net, *[pass_() for pass_ in SHARED], image=normal(2, 16, 16, 3))
    assert ops(net) == [
        "Transpose",
        "Conv",
        "Clip",
        "Conv",
        "Relu",
        "Add",
        "Tanh",
        "Add",
        "GlobalAveragePool",
        "Reshape",
        "Gemm",
    ]
    once = io.save(net, tmp_path / "once.onnx").read_bytes()
    again = model(NET, opset, **SIDE)
    rewrite(again, [pass_() for pass_ in SHARED])
    assert io.save(again, tmp_path / "again.onnx").read_bytes() == once
    loaded = io.load(tmp_path / "once.onnx")
    rewrite(loaded, [pass_() for pass_ in SHARED])
    assert io.save(loaded, tmp_path / "loaded.onnx").read_bytes() == once


def random_net(seed):
    """Up to twelve operators that the passes look for, in any order, and weights for them; every result may be an
    output.
    """
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    lines, weights, shapes = [], {}, {"x": (4, 6, 6)}

    def weight(array):
        weights[f"w{len(weights)}"] = np.asarray(array)
        return f"w{len(weights) - 1}"

    def add(op, shape, *inputs):
        name = f"v{len(lines)}"
        lines.append(f"{name} = {op}({', '.join(inputs)})")
        shapes[name] = shape
        return name

    def some(*shape):
        return weight((np.abs(rng.standard_normal(shape)) + 0.5).astype(np.float32))

    for _ in range(12):
        x = choose.choice([*shapes, *[list(shapes)[-1]] * 9])
        c, h, w = shape = shapes[x]
        kind, pad = choose.randrange(10), choose.choice([0, 1])
        if kind == 0:
            add(f"Conv<pads=[{pad},{pad},{pad},{pad}]>", (3, h + 2 * pad, w + 2 * pad), x, some(3, c, 1, 1))
        elif kind == 1:
            add("BatchNormalization", shape, x, *(some(c) for _ in range(4)))
        elif kind == 2:
            add(
                choose.choice(["Mul", "Add", "Sub", "Div"]),
                shape,
                x,
                some(*choose.choice([(), (1,), (1, c, 1, 1), (c, 1, 1), (1, 1, 1, w)])),
            )
        elif kind == 3:
            add(choose.choice(["Max", "Min"]), shape, x, weight(np.float32(choose.choice([-1, 0, 6]))))
        elif kind == 4:
            add(choose.choice(["Relu", "Tanh", "Neg", "Identity", "Dropout"]), shape, x)
        elif kind == 5:
            perm = choose.choice([(0, 2, 3, 1), (0, 3, 1, 2)])
            add(f"Transpose<perm={[*perm]}>", tuple(shape[axis - 1] for axis in perm[1:]), x)
        elif kind == 6:
            add("Pad", (c, h + 2, w + 1), x, weight(integers(0, 0, 1, 1, 0, 0, 1, 0)))
        elif kind == 7 and min(h, w) > 2:
            add(choose.choice(["MaxPool", "AveragePool"]) + "<kernel_shape=[3,3]>", (c, h - 2, w - 2), x)
        elif kind == 8:
            add("Add", shape, x, choose.choice([name for name, other in shapes.items() if other == shape]))
        elif kind == 9:
            flat = add("Reshape", shape, x, weight(integers(0, c * h * w)))
            add("Reshape", shape, flat, weight(integers(-1, c, h, w)))
            del shapes[flat]
    last = list(shapes)[-1]
    outputs = [last, *(name for name in shapes if name not in ("x", last) and choose.random() < 0.1)]
    heads = ", ".join(f"float[{name}0,{name}1,{name}2,{name}3] {name}" for name in outputs)
    return model(f"(float[n,4,6,6] x) => ({heads}) {{ {' '.join(lines)} }}", **weights)


@pytest.mark.parametrize("seed", range(25))
def test_the_shared_passes_on_random_nets(seed):
    net, x = random_net(seed), np.random.default_rng(seed).standard_normal((2, 4, 6, 6)).astype(np.float32)
    before = run(net, x=x)
    rewrite(net, [pass_() for pass_ in SHARED])
    once = ir.to_proto(net).SerializeToString(deterministic=True)
    for name, value in run(net, x=x).items():
        np.testing.assert_allclose(value, before[name], rtol=1e-3, atol=1e-4 * np.abs(before[name]).max() + 1e-6)
    rewrite(net, [pass_() for pass_ in SHARED])
    assert ir.to_proto(net).SerializeToString(deterministic=True) == once


LOOP = """(float[n,4] x, int64 trips, bool go) => (float[n,4] y, float[n,4] z) {
    k = Relu(x) c = Clip(k, zero, six) m = MatMul(c, w) a = Add(m, b) t = Transpose(a) u = Transpose(t)
    y = Loop(trips, go, x) <body = f (int64 i, bool g, float[n,4] s) => (bool g2, float[n,4] s2) {
        g2 = Identity(g) r = Add(s, k) q = Mul(r, b) o = Add(q, u) s2 = Add(o, a) }>
    z = If(go) <then_branch = th () => (float[n,4] v) { v = Add(u, c) }, else_branch = el () => (float[n,4] v2) { v2 = Neg(m) }> }"""


@pytest.mark.parametrize("go", [True, False])
def test_values_that_loops_and_branches_read_survive(normal, go):
    net = model(LOOP, w=normal(4, 4), b=normal(4), zero=np.float32(0), six=np.float32(6))
    rewritten(net, *[pass_() for pass_ in SHARED], x=normal(3, 4), trips=np.array(2), go=np.array(go))
    inner = [node.op_type for node in ir.traversal.RecursiveGraphIterator(net.graph) if node.graph is not net.graph]
    assert ops(net)[-2:] == ["Loop", "If"] and inner.count("Add") == 4 and "Mul" in inner


@pytest.mark.data
@pytest.mark.slow
def test_shared_keeps_what_mobilenet_computes(rng, shared):
    pytest.importorskip("tf2onnx")
    file = shared / "weights" / "mobilenet_v1_1.0_224_imagenet.tflite"
    import tf2onnx

    proto, _ = tf2onnx.convert.from_tflite(str(file), opset=17)
    net = ir.from_proto(proto)
    x = rng.uniform(-1, 1, (1, 224, 224, 3)).astype(np.float32)
    before = run(net, input=x)
    rewrite(net, [pass_() for pass_ in SHARED])
    for name, value in run(net, input=x).items():
        np.testing.assert_allclose(value, before[name], atol=1e-4)
    assert query.op_counts(net) == {
        "Conv": 28,
        "Clip": 27,
        "AveragePool": 1,
        "Reshape": 1,
        "Softmax": 1,
        "Transpose": 1,
    }


def test_the_shared_passes_bring_a_keras_export_to_gemms(normal):
    text = """(int64[n] i) => (float[n,2] y) {
        c = Less(i, zero) w = Add(i, length) s = Where(c, w, i) e = Gather(T, s) h = MatMul(e, u) a = Add(h, b) r = Relu(a) k = MatMul(r, v) y = Add(d, k) }"""
    weights = {"T": normal(5, 4), "u": normal(4, 3), "b": normal(3), "v": normal(3, 2), "d": normal(1, 2)}
    net = model(text, **weights, zero=np.int64(0), length=np.int64(5))
    report = rewritten(net, *[pass_() for pass_ in SHARED], i=integers(-5, 4, 0))
    assert ops(net) == ["Gather", "Gemm", "Relu", "Gemm"]
    assert report.to_json()["nodes"] == {"before": 9, "after": 4}
