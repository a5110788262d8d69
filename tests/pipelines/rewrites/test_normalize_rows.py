"""NormalizeRows, from ONNX text."""

import numpy as np
import pytest
from helpers.rewriting import model, ops, reasons, rewritten

from pipelines.rewrites.fold_batch_norm import FoldBatchNorm
from pipelines.rewrites.fuse_linear import FuseLinear
from pipelines.rewrites.normalize_rows import NormalizeRows

NORM = "BatchNormalization<epsilon=0.001>({x}, gamma, beta, mean, variance)"


def norm(normal, channels):
    """Constants of a batch normalization."""
    return {name: normal(channels) for name in ("gamma", "beta", "mean")} | {"variance": np.abs(normal(channels)) + 0.1}


@pytest.mark.parametrize("flatten", ["Flatten<axis=2>(m)", "Reshape(m, rows)"])
def test_tokens_that_are_flattened_for_their_normalization(flatten, normal):
    text = f"""(float[n,5,4] x) => (float[n,5,6] y) {{
        m = MatMul(x, w) f = {flatten} b = {NORM.format(x="f")} y = Reshape(b, whole) }}"""
    net = model(text, w=normal(4, 6), rows=np.array([-1, 6]), whole=np.array([-1, 5, 6]), **norm(normal, 6))
    report = rewritten(net, NormalizeRows(), FoldBatchNorm(), FuseLinear(), x=normal(2, 5, 4))
    assert report.fired("NormalizeRows") == 1 and ops(net)[:2] == ["MatMul", "Add"]


def test_a_layer_of_rows(normal):
    net = model(
        f"(float[n,4] x) => (float[n,6] y) {{ m = MatMul(x, w) y = {NORM.format(x='m')} }}",
        w=normal(4, 6),
        **norm(normal, 6),
    )
    assert rewritten(net, NormalizeRows(), x=normal(3, 4)).fired("NormalizeRows") == 1
    assert ops(net) == ["MatMul", "Mul", "Add"]


def test_channels_that_are_split_are_refused(normal):
    net = model(
        f"(float[n,8] x) => (float[m,4] y) {{ f = Reshape(x, rows) y = {NORM.format(x='f')} }}",
        rows=np.array([-1, 4]),
        **norm(normal, 4),
    )
    report = rewritten(net, NormalizeRows(), x=normal(3, 8))
    assert report.fired("NormalizeRows") == 0 and len(reasons(report, "NormalizeRows")) == 1
