"""Groups of channels of a network in torch, what they matter, and the network without some."""

import numpy as np
import pytest

from pipelines.core.errors import RequestError

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("torch_pruning", reason="needs the train extra")

from pipelines.compression import channels  # noqa: E402
from zoo.vision.models.mobilenet import build as mobilenet  # noqa: E402
from zoo.vision.models.resnet import build as resnet  # noqa: E402

EXAMPLE = torch.zeros(1, 3, 32, 32)


@pytest.fixture(scope="module", params=["mobilenet-v1", "mobilenet-v2", "resnet26d"])
def network(request):
    torch.manual_seed(0)
    made = resnet("resnet26d", 4) if request.param == "resnet26d" else mobilenet(request.param, 4, 0.25)
    for module in made.modules():  # so that no channel is like another
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias)
    return made.eval()


def test_channels_that_give_nothing_can_go_without_changing_the_result(network):
    """A channel of a group whose every layer and norm gives zeros is cut: the others compute what they did."""
    grouped = channels.groups(network, EXAMPLE)
    x = torch.randn(2, 3, 32, 32)
    removed, silent = {}, __import__("copy").deepcopy(network)
    for name, members in grouped.items():
        width = len(members[0][1])
        gone = np.arange(0, width, 4)[: max(1, width // 4)]
        removed[name] = gone
        for path, index in members:
            module = silent.get_submodule(path)
            if isinstance(module, torch.nn.BatchNorm2d):
                with torch.no_grad():
                    module.weight[index[gone]] = 0
                    module.bias[index[gone]] = 0
    smaller = channels.cut(network, EXAMPLE, removed)
    assert sum(p.numel() for p in smaller.parameters()) < 0.8 * sum(p.numel() for p in network.parameters())
    with torch.no_grad():
        torch.testing.assert_close(smaller(x), silent(x), rtol=1e-4, atol=1e-4)


def test_a_cut_network_is_made_again_from_its_shapes(network):
    name, members = list(channels.groups(network, EXAMPLE).items())[1]
    smaller = channels.cut(network, EXAMPLE, {name: np.arange(len(members[0][1]) // 2)})
    sizes = channels.shapes(smaller, network)
    assert name in sizes
    again = channels.resize(__import__("copy").deepcopy(network), sizes)
    again.load_state_dict(smaller.state_dict())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again.eval()(x), smaller.eval()(x))
    with pytest.raises(RequestError, match="of another network"):
        channels.resize(again, {"nowhere": [3, 3]})


@pytest.mark.parametrize("kind", ["taylor", "activation"])
def test_channels_without_weight_matter_least(kind):
    torch.manual_seed(0)
    network = mobilenet("mobilenet-v1", 4, 0.25).eval()
    torch.nn.init.normal_(network.classifier.weight)
    grouped = channels.groups(network, EXAMPLE)
    name, members = next(iter(grouped.items()))
    with torch.no_grad():
        for path, index in members:
            module = network.get_submodule(path)
            for tensor in (module.weight, module.bias):
                if tensor is not None:
                    tensor[index[:2]] = 0
    batches = [(torch.randn(8, 3, 32, 32), torch.arange(8) % 4) for _ in range(2)]
    loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    scores = channels.importances(network, grouped, batches, loss, kind)
    assert scores.keys() == grouped.keys()
    assert set(np.argsort(scores[name])[:2]) == {0, 1} and (scores[name][2:] > 0).all()
