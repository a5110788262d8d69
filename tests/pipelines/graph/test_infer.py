"""Shapes and types that are inferred."""

import numpy as np
import onnx_ir as ir
from helpers.rewriting import model, run

from pipelines.graph import query
from pipelines.graph.infer import infer_shapes
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fold_constants import FoldConstants

PARTS = """(float[n,8] x) => (float[n,4] y) {
    parts = SplitToSequence<axis=1>(x, four) same = Identity(parts) first = SequenceAt(same, zero) y = Relu(first) }"""


def test_sequences_of_tensors_stay_sequences():
    net = model(PARTS, four=np.int64(4), zero=np.int64(0))
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    for _ in range(2):
        infer_shapes(net)
    values = {str(value.name): value for node in net.graph for value in node.outputs}
    assert all(isinstance(values[name].type, ir.SequenceType) for name in ("parts", "same"))
    assert not query.is_float(values["parts"]) and query.is_float(values["first"])
    np.testing.assert_array_equal(run(net, x=x)["y"], np.maximum(x[:, :4], 0))


def test_stated_shapes_that_contradict_the_inputs_are_not_trusted(caplog):
    """As in a file whose input was made larger by hand."""
    net = model(
        "(float[n,8] x) => (float[n,m] y) { h = Relu(x) s = Shape<start=1>(h) c = Cast<to=1>(s) y = Mul(h, c) }"
    )
    hidden = next(iter(net.graph)).outputs[0]
    hidden.type, hidden.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["n", 6])
    rewrite(net, [FoldConstants()])
    x = np.ones((2, 8), np.float32)
    np.testing.assert_array_equal(run(net, x=x)["y"], 8 * x)
    assert not caplog.records
