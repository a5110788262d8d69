"""Graphs whose batch is joined with another axis, or stands behind one, as networks of torch leave it."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from pipelines.graph import io, query
from zoo.recommenders.importers.batch_axis import batch_first
from zoo.recommenders.importers.canonicalize import RUNS
from zoo.recommenders.importers.inputs import run

FIELDS, SIZE, HEADS = 4, 6, 2


class Heads(nn.Module):
    """Attention between fields (Song et al. 2019) as DeepCTR-Torch writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.r = (nn.Parameter(torch.randn(SIZE, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.tensordot(x, w, dims=([-1], [0])) for w in (self.q, self.k, self.v)]
        q, k, v = (torch.stack(torch.split(part, 8 // HEADS, dim=2)) for part in parts)
        attended = torch.matmul(torch.softmax(torch.einsum("bnik,bnjk->bnij", q, k), -1), v)
        joined = torch.squeeze(torch.cat(torch.split(attended, 1), dim=-1), dim=0)
        return torch.relu(joined + torch.tensordot(x, self.r, dims=([-1], [0])))


class Unsqueezed(Heads):
    """The same as the exporter on torch.export writes it: what is squeezed was unsqueezed before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.squeeze(torch.unsqueeze(super().forward(x), 0), 0)


class Rows(nn.Module):
    """A network on every field, which sees a matrix of all fields of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(SIZE, 5), nn.PReLU(5), nn.Linear(5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.mlp(torch.cat([x, x * x], -1)[..., :SIZE].reshape(-1, SIZE)).view(-1, FIELDS)
        return (weights.softmax(-1)[:, :, None] * x).sum(1)


class AcrossRows(nn.Module):
    """What cannot be moved: a sum over all fields of all samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, SIZE).cumsum(0).view(-1, FIELDS, SIZE)


def exported(network: nn.Module, path) -> ir.Model:
    options = {"dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}, "opset_version": 17, "dynamo": False}
    names = {"input_names": ["x"], "output_names": ["y"]}
    torch.manual_seed(0)
    torch.onnx.export(network.eval(), (torch.zeros(2, FIELDS, SIZE),), str(path), **names, **options)
    return io.load(path)


@pytest.mark.parametrize(("network", "moves"), [(Heads, True), (Unsqueezed, True), (Rows, True), (AcrossRows, False)])
def test_the_batch_is_first_and_the_results_are_the_same(network, moves, tmp_path, rng):
    model = exported(network(), tmp_path / "model.onnx")
    x = {n: rng.normal(size=(n, FIELDS, SIZE)).astype(np.float32) for n in (*RUNS, 1, 7)}
    moved = batch_first(model, [run(model, {"x": x[n]}) for n in RUNS], RUNS)
    assert (moved is not model) is moves
    sessions = [
        ort.InferenceSession(io.serialized(graph), providers=["CPUExecutionProvider"]) for graph in (model, moved)
    ]
    for batch in x.values():
        expected, result = (session.run(None, {"x": batch})[0] for session in sessions)
        np.testing.assert_allclose(result, expected, atol=1e-6, rtol=0)
    if moves:
        values = [run(moved, {"x": x[n]}) for n in RUNS]
        sizes = {name for name, value in values[0].items() if value.ndim > 1 and len(value) != RUNS[0]}
        constant = {str(output.name) for node in moved.graph if _is_constant(node) for output in node.outputs}
        assert not sizes - constant - {"x"}


def _is_constant(node: ir.Node) -> bool:
    return all(value is None or query.constant(value) is not None for value in node.inputs)
