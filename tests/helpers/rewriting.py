"""Small ONNX models from text, run in a plain onnxruntime session (all optimizations off); engines whose int8 can be
held to that.
"""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from helpers.arrays import normals
from pipelines.core.machine import has_vnni
from pipelines.engines.stock import STOCK, exact
from pipelines.graph import edit
from pipelines.rewrites.driver import rewrite

EXACT = [name for name in STOCK if exact(name)]
needs_vnni = pytest.mark.skipif(not has_vnni(), reason="this CPU sums products of bytes in 16 bits, which may saturate")


def model(text, opset=17, **weights):
    """`text` is "(inputs) => (outputs) { nodes }"; weights: {initializer: array}."""
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> g {text}')
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()
    )
    return ir.from_proto(proto)


MLP = "(float[n,8] x) => (float[n,2] y) { h = Gemm(x, w, b) r = LeakyRelu<alpha=0.1>(h) y = MatMul(r, v) }"
BRANCH = """(bool c, float[n] x) => (float[n] y) {
    y = If (c) <then_branch = f () => (float[n] a) { a = Relu(x) },
                else_branch = g () => (float[n] d) <float[1] k = {2}> { d = Mul(x, k) }> }"""


def mlp():
    """`MLP` with random weights, always the same."""
    normal = normals(0)
    return model(MLP, w=normal(8, 16), b=normal(16), v=normal(16, 2))


def integers(*values):
    """int64, 1-D."""
    return np.array(values, np.int64)


def run(model, optimized=False, **feeds):
    """{output: array} of a plain session; `optimized` turns the engine's own rewrites on."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.x64quantprecision", "1")  # as in pipelines.engines.onnxruntime
    model = model.clone()
    edit.own_weights(model)
    options.intra_op_num_threads = 1
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))


def ops(model):
    """Operator types in order."""
    return [node.op_type for node in model.graph]


def rewritten(model, *passes, exact=False, **feeds):
    """Apply `passes`; the outputs must stay (bit for bit if `exact`), the graph valid, and a second time must change
    nothing.
    """
    before = run(model, **feeds)
    report = rewrite(model, passes)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    after = run(model, **feeds)
    assert list(before) == list(after)
    for name, value in before.items():
        assert value.shape == after[name].shape and value.dtype == after[name].dtype
        if exact:
            np.testing.assert_array_equal(value, after[name])
        else:
            np.testing.assert_allclose(value, after[name], rtol=1e-5, atol=1e-6)
    settled, fired = ops(model), [transform.fired for transform in passes]
    rewrite(model, passes)
    assert (ops(model), [transform.fired for transform in passes]) == (settled, fired), "fires again on its own result"
    return report


def fires(model, one, wanted, exact=False, **feeds):
    """Apply one pass as `rewritten`; the operators after must be `wanted`, space between. Returns the report."""
    report = rewritten(model, one, exact=exact, **feeds)
    assert ops(model) == wanted.split()
    return report


def reasons(report, name):
    """Why the pass called `name` left near matches alone: {node: reason}."""
    return next(refused for title, _, refused in report.passes if title == name)
