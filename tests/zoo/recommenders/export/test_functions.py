"""Functions of tensors in `forward` become ONNX operators of the same results."""

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.graph import reference_session
from zoo.recommenders.criteo import category
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.schema import Column, Schema

torch = pytest.importorskip("torch", reason="needs the train extra")

FEATURES = Features(Schema((Column("click", "label"), category("user", 5), category("item", 7))))
CALLS = {
    "arithmetic": lambda x: (1 - x * 0.5 + 2 / (x * x + 3) - x / 4) ** 2,
    "power": lambda x: (x * x + 1) ** 1.5,
    "single": lambda x: torch.relu(x) + torch.sigmoid(x) * x.tanh() + (-x).exp() + torch.log(x.abs() + 1).sqrt(),
    "reduced": lambda x: x.sum(1, keepdim=True) + x.mean(dim=-1, keepdim=True) + torch.sum(x, 1).unsqueeze(1),
    "shapes": lambda x: x.reshape(-1, 2, 4).permute(0, 2, 1).flatten(1) + x.view((-1, 8)).unsqueeze(2).squeeze(2),
    "products": lambda x: (x.reshape(-1, 2, 4) @ x.reshape(-1, 4, 2)).softmax(dim=-1).flatten(1),
    "columns": lambda x: (x.reshape(-1, 2, 4)[:, [0, 0, 1]] * x.reshape(-1, 2, 4)[:, [1, 0, 1]]).flatten(1),
    "joined": lambda x: torch.stack([x, x * 2.0], dim=1).sum(1) + torch.cat([x, x], 1).reshape(-1, 2, 8).sum(1),
}


def network(call):
    from zoo.recommenders.models.layers import Embeddings

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embeddings = Embeddings(FEATURES.fields, 4)
            self.bias = torch.nn.Parameter(torch.tensor([0.25]))

        def forward(self, ids, numbers, scales):
            return (call(self.embeddings(ids, scales)) + self.bias).sum(1, keepdim=True)

    model = Network()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.eval()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_functions_have_the_results_of_torch(call):
    from zoo.recommenders.export.fx_export import export

    model = network(call)
    graph = export(model, FEATURES)
    draw = np.random.default_rng(0)
    ids = np.stack([draw.integers(0, field.rows, 9) for field in FEATURES.fields], 1).astype(np.int32)
    session = reference_session.lean_session(graph, "a test", quick=True)
    result = reference_session.run(session, {"ids": ids})[0]
    with torch.no_grad():
        wanted = torch.sigmoid(model(torch.from_numpy(ids), None, None)).numpy()
    assert result.shape == wanted.shape and np.abs(result - wanted).max() < 1e-6


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda x: x.cumsum(1),
            r"cumsum calls cumsum\(tensor, 1\), which has no rule in .*functions.py; known functions: ab",
        ),
        (lambda x: x.sum(0), r"calls sum\(tensor, 0\)"),
        (lambda x: x.reshape(3, 8), r"calls reshape\(tensor, 3, 8\)"),
    ],
)
def test_functions_without_a_rule_are_named(call, said):
    from zoo.recommenders.export.fx_export import export

    with pytest.raises(RequestError, match=said):
        export(network(call), FEATURES)


def test_a_layer_of_torch_takes_no_vectors_of_fields():
    from zoo.recommenders.export.fx_export import export

    model = network(lambda x: model.layer(x.reshape(-1, 2, 4)).flatten(1))
    model.layer = torch.nn.Linear(4, 4)
    with pytest.raises(RequestError, match=r"has no shapes \(.*rank 3.*\); .*SplitFields and JoinFields"):
        export(model, FEATURES)
