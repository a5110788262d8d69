"""PoolToMatMul, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, rewritten

from pipelines.rewrites.pool_to_matmul import PoolToMatMul

GATHERED = """(float[n,3,4,5] x) => (float[n,3,2,2] y) {{ t = Transpose<perm=[2,3,0,1]>(x) g = GatherND(t, places)
    i = Transpose<perm=[4,5,0,1,2,3]>(g) {} }}"""
SUMS = """w = Where(outside, zero, i) a = Gather<axis=3>(w, first) b = Gather<axis=3>(w, second) s = Add(a, b)
    c = ReduceSum<keepdims=0>(s, last) y = Div(c, counts)"""


def net(normal, ends):
    rows, columns = (
        np.array([[0, 1], [2, 3]]),
        np.array([[0, 1, 2], [2, 3, 4]]),
    )  # of windows, as torch's exporter has them
    places = np.stack(np.broadcast_arrays(rows[:, :, None, None], columns), axis=-1)
    constants = {"outside": np.array([[False, False, True], [False, False, False]]), "counts": np.float32([4, 6])}
    constants |= {"first": np.array(0), "second": np.array(1), "last": np.array([-1]), "zero": np.float32(0)}
    return model(GATHERED.format(ends), places=places, windows=np.array([3, 5]), **constants)


@pytest.mark.parametrize("ends", ["y = ReduceMean<axes=[3,5], keepdims=0>(i)", SUMS])
def test_an_adaptive_pooling_is_a_layer_over_pixels(normal, ends):
    graph = net(normal, ends)
    assert rewritten(graph, PoolToMatMul(), x=normal(2, 3, 4, 5)).fired("PoolToMatMul") == 1
    assert ops(graph) == ["Reshape", "MatMul", "Reshape"]


def test_other_functions_of_windows_stay(normal):
    graph = net(normal, "m = Mul(i, i) y = ReduceMean<axes=[3,5], keepdims=0>(m)")
    assert rewritten(graph, PoolToMatMul(), x=normal(2, 3, 4, 5)).fired("PoolToMatMul") == 0
