"""OneHotToGather and TabulateRows, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, rewritten

from pipelines.rewrites.fold_constants import FoldConstants
from pipelines.rewrites.one_hot_to_gather import OneHotToGather
from pipelines.rewrites.tabulate_rows import TabulateRows

CODES = "(int32[n,{size}] x) => (float[n,{size},3] y) {{ u = Unsqueeze(x, last) e = Equal(u, codes) c = Cast<to=1>(e) "


def net(normal, ends, codes=None, size=4, **constants):
    codes = np.arange(5, dtype=np.int32) if codes is None else codes
    text = CODES.format(size=size) + ends
    return model(text, last=np.array([-1]), codes=codes, w=normal(5, 3), **constants)


def test_a_layer_of_one_hot_codes_is_a_lookup(normal):
    graph = net(normal, "y = MatMul(c, w) }")
    indices = np.array([[0, 4, 5, -1], [2, 7, 3, 1]], np.int32)  # 5, -1 and 7 have no code
    assert rewritten(graph, OneHotToGather(), exact=True, x=indices).fired("OneHotToGather") == 1
    assert "MatMul" not in ops(graph) and "Gather" in ops(graph)


@pytest.mark.parametrize(("codes", "size"), [(np.array([0, 1, 2, 4, 3], np.int32), 4), (np.arange(5)[:, None], 5)])
def test_other_codes_are_left_alone(normal, codes, size):
    graph = net(normal, "y = MatMul(c, w) }", codes.astype(np.int32), size)
    if codes.ndim == 2:  # compares the positions of x
        graph = model(
            "(int32[n,5] x) => (float[n,5,3] y) { u = Unsqueeze(x, last) t = Transpose<perm=[0,2,1]>(u) "
            "e = Equal(t, codes) c = Cast<to=1>(e) y = MatMul(c, w) }",
            last=np.array([-1]), codes=codes.astype(np.int32), w=normal(5, 3),
        )  # fmt: skip
    x = np.arange(2 * size, dtype=np.int32).reshape(2, size) % 6
    assert rewritten(graph, OneHotToGather(), exact=True, x=x).fired("OneHotToGather") == 0


def test_a_bias_and_an_activation_behind_a_lookup_move_into_the_table(normal):
    graph = model(
        "(int64[n,4] x) => (float[n,4,3] y) { g = Gather(w, x) a = Add(g, b) s = Sigmoid(a) y = Mul(a, s) }",
        w=normal(5, 3), b=normal(1, 1, 3),
    )  # fmt: skip
    x = np.array([[0, 4, 3, 1], [2, 2, 3, 1]])
    report = rewritten(graph, TabulateRows(), FoldConstants(), x=x)
    assert report.fired("TabulateRows") >= 3 and ops(graph) == ["Gather"]


@pytest.mark.parametrize("bias", [(4, 3), (5000,)])
def test_functions_of_positions_and_of_large_tables_stay(normal, bias):
    rows = 5000 if bias == (5000,) else 5
    graph = model(
        "(int64[n,4] x) => (float[n,4,3] y) { g = Gather(w, x) y = Add(g, b) }",
        w=normal(rows, 3), b=normal(*(bias if rows == 5 else (3,))),
    )  # fmt: skip
    x = np.array([[0, 4, 3, 1]])
    assert rewritten(graph, TabulateRows(), FoldConstants(), x=x).fired("TabulateRows") == 0
