"""TileToExpand, from ONNX text."""

import numpy as np
from helpers.rewriting import integers, model, ops, rewritten

from pipelines.rewrites.tile_to_expand import TileToExpand

REPEATED = """(float[n,4] x) => (float[n,3,4] y) {
    s = Shape(x) i = Constant<value_ints=[0]>() c = Gather(s, i) r = Concat<axis=0>(c, ones)
    t = Tile(token, r) y = Add(t, t) }"""


def test_tokens_repeated_for_each_sample_get_their_sizes(normal):
    net = model(REPEATED, ones=integers(1, 1), token=normal(1, 3, 4))
    assert rewritten(net, TileToExpand(), exact=True, x=normal(2, 4)).fired("TileToExpand") == 1
    assert "Expand" in ops(net) and "Tile" not in ops(net)
    (added,) = [node for node in net.graph if node.op_type == "Add"]
    assert list(added.inputs[0].shape)[1:] == [3, 4]


def test_repeated_elements_are_left_alone(normal):
    net = model("(float[n,3] x) => (float[n,6] y) { y = Tile(x, r) }", r=np.array([1, 2]))
    assert rewritten(net, TileToExpand(), exact=True, x=normal(2, 3)).fired("TileToExpand") == 0
    assert ops(net) == ["Tile"]
