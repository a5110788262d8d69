"""Networks are read from model folders whose fp32.onnx was removed after the next stage."""

import pytest

import zoo
from pipelines.models.family import network_of

pytestmark = pytest.mark.usefixtures("shared_home")

pytest.importorskip("torch", reason="networks need the train extra")


def test_the_network_of_a_shipped_model_is_read_from_its_graph_made_anew():
    """As the soft targets of `zoo train --teacher multi30k-en-de --set soft=1` need it."""
    folder = zoo.load("multi30k-en-de")
    folder.ensure("rewritten.onnx")
    (folder.path / "fp32.onnx").unlink(missing_ok=True)
    features, network = network_of(folder)
    assert features["features"]["source"].is_file()
    assert network.embedding.weight.shape[1] == network.config.width
