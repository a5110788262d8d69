"""GatherToReshape, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, reasons, rewritten

from pipelines.rewrites.gather_to_reshape import GatherToReshape
from pipelines.rewrites.reshape_chains import ReshapeChains

MEAN = "m = ReduceMean<axes=[2, 3], keepdims=1>(x) r = Reshape(m, flat) y = Gather(r, i)"  # of channels_last, by torch 2.13


def test_the_mean_of_a_network_in_channels_last_is_a_reshape(normal):
    text = f"(float[1,6,4,4] x) => (float[a,b,c,d] y) {{ {MEAN} }}"
    indices = np.arange(6).reshape(1, 6, 1, 1)
    net = model(text, flat=np.array([-1]), i=indices)
    report = rewritten(net, GatherToReshape(), ReshapeChains(), exact=True, x=normal(1, 6, 4, 4))
    assert report.fired("GatherToReshape") == 1 and ops(net) == ["ReduceMean"]


def test_indices_along_another_axis(normal):
    net = model("(float[n,6,5] x) => (float[n,b,c,d] y) { y = Gather<axis=1>(x, i) }", i=np.arange(6).reshape(2, 3))
    report = rewritten(net, GatherToReshape(), exact=True, x=normal(2, 6, 5))
    assert report.fired("GatherToReshape") == 1 and ops(net) == ["Reshape"]


@pytest.mark.parametrize("indices", [np.arange(5), np.arange(6)[::-1].copy(), np.array([0, 1, 2, 3, 4, 4])])
def test_other_indices_are_left_alone(normal, indices):
    net = model("(float[n,6] x) => (float[n,b] y) { y = Gather<axis=1>(x, i) }", i=indices)
    assert rewritten(net, GatherToReshape(), exact=True, x=normal(2, 6)).fired("GatherToReshape") == 0
    assert ops(net) == ["Gather"]


def test_two_unknown_sizes_are_refused(normal):
    net = model("(float[n,m,6] x) => (float[n,m,b,c] y) { y = Gather<axis=2>(x, i) }", i=np.arange(6).reshape(2, 3))
    report = rewritten(net, GatherToReshape(), exact=True, x=normal(2, 3, 6))
    assert report.fired("GatherToReshape") == 0 and len(reasons(report, "GatherToReshape")) == 1
