"""Dot products of all pairs of embeddings, which networks add to their logits."""

import json
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

import zoo

torch = pytest.importorskip("torch", reason="needs the train extra")
torch.set_num_threads(1)

from zoo.recommenders.data.features import Features  # noqa: E402
from zoo.recommenders.data.logs import open_logs  # noqa: E402
from zoo.recommenders.data.schema_inference import infer  # noqa: E402
from zoo.recommenders.models.checkpoints import restore_config  # noqa: E402

FAMILIES = ("dcn-v2", "autoint", "finalmlp", "gdcn")
SMALL = {"embedding_size": "4", "hidden": "8", "epochs": "1", "l2_embeddings": "10"}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("log") / "log.csv"
    rows = [[rng.integers(2), f"u{rng.integers(9)}", f"i{rng.integers(9)}", rng.random(), "a|b"] for _ in range(400)]
    pd.DataFrame(rows, columns=["clicked", "user_id", "item_id", "price", "genres"]).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_added(log, family):
    entry = zoo.entry(family)
    features = Features(infer(open_logs(log)))
    (rows,) = features.read(log)
    inputs = [torch.from_numpy(getattr(rows, name)) for name in ("ids", "numbers", "scales")]
    networks = []
    for products in (True, False):
        torch.manual_seed(0)
        networks.append(entry.build(features, type(entry.config)(embedding_size=4, products=products)).eval())
    with torch.no_grad():
        for network in networks:
            network.embeddings.weight.mul_(100)
        vectors = networks[0].embeddings(inputs[0], inputs[2]).view(len(rows), -1, 4).unbind(1)
        pairs = sum((one * other).sum(1, keepdim=True) for one, other in combinations(vectors, 2))
        np.testing.assert_allclose(networks[0](*inputs) - networks[1](*inputs), pairs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_trained_without_products_have_none(log, family, tmp_path):
    entry = zoo.entry(family)
    assert entry.config.products and not restore_config(type(entry.config), {"embedding_size": 4}).products
    zoo.train(family, log, tmp_path / "old", settings=SMALL | {"products": "false"})
    entry.freeze(tmp_path / "old")
    before = (tmp_path / "old" / "fp32.onnx").read_bytes()
    record = tmp_path / "old" / "train.json"
    about = json.loads(record.read_text())
    del about["config"]["products"]  # as in a folder of version 0.2.0
    record.write_text(json.dumps(about))
    entry.freeze(tmp_path / "old")
    assert (tmp_path / "old" / "fp32.onnx").read_bytes() == before
    zoo.finetune(tmp_path / "old", log, tmp_path / "tuned", settings={"epochs": "1"})
    assert not json.loads((tmp_path / "tuned" / "train.json").read_text())["config"]["products"]
