"""DLRM with the cross layers of DCN-V2 in place of the dot products."""

import numpy as np
import pandas as pd
import pytest
from helpers.clicks_folded import needs_kernels

import zoo

torch = pytest.importorskip("torch", reason="needs the train extra")
torch.set_num_threads(1)

from zoo.recommenders.data.features import Features  # noqa: E402
from zoo.recommenders.data.logs import open_logs  # noqa: E402
from zoo.recommenders.data.schema_inference import infer  # noqa: E402
from zoo.recommenders.models.dlrm import DLRM, DLRMConfig  # noqa: E402

SMALL = {"embedding_size": "8", "bottom": "16", "layers": "2", "rank": "12", "hidden": "24,8", "epochs": "1"}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("log") / "log.csv"
    users, items = rng.integers(0, 20, (2, 1500))
    clicked = (rng.random(1500) < np.where((users + items) % 2, 0.8, 0.2)).astype(int)
    columns = {"clicked": clicked, "user_id": users, "item_id": items, "price": rng.random(1500)}
    columns |= {"genres": [f"{a}|{b}" for a, b in rng.integers(0, 5, (1500, 2))]}
    pd.DataFrame(columns).astype({"user_id": str, "item_id": str}).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("rank", [0, 12])
def test_the_top_network_reads_the_crossed_vectors(log, rank):
    features = Features(infer(open_logs(log)))
    (rows,) = features.read(log)
    inputs = [torch.from_numpy(getattr(rows, name)) for name in ("ids", "numbers", "scales")]
    torch.manual_seed(0)
    network = DLRM(features, DLRMConfig(embedding_size=8, hidden=(16,), layers=2, rank=rank)).eval()
    with torch.no_grad():
        network.embeddings.weight.mul_(100)
        ids, numbers, scales = inputs
        x0 = x = torch.cat([network.bottom(numbers), network.embeddings(ids, scales)], 1)
        for layer in network.cross:
            weight = layer.u.weight @ layer.v.weight if rank else layer.u.weight
            x = x0 * (x @ weight.T + layer.u.bias) + x
        expected = network.top(x) + network.wide(ids, scales)
        np.testing.assert_allclose(network(*inputs), expected, rtol=1e-4, atol=1e-5)


@needs_kernels
def test_a_model_with_cross_layers_runs_native(log, tmp_path):
    zoo.train("dlrm", log, tmp_path / "m", settings=SMALL | {"refit": "false", "l2_embeddings": "10"})
    zoo.build(tmp_path / "m")
    exact = zoo.pipeline(tmp_path / "m", "fp32", "onnxruntime")
    batch = exact.preprocess(log)
    for name in zoo.info(tmp_path / "m")["native"]["forms"]:
        result = zoo.pipeline(tmp_path / "m", engine=f"native:{name['form']}").predict(batch)
        np.testing.assert_allclose(result["probability"], exact.predict(batch)["probability"], atol=0.005)
