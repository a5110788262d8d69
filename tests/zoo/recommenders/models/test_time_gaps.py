"""Time gaps between the items of a history: what families learn from them, and that all commands work with them."""

import numpy as np
import pandas as pd
import pytest

import zoo

torch = pytest.importorskip("torch", reason="needs the train extra")
torch.set_num_threads(1)

SMALL = {"hidden": "16,8", "embedding_size": "8", "epochs": "8", "batch_size": "64", "l2_embeddings": "1"}
TRAINED = {"ema": "0.9", "learning_rate": "0.01", "refit": "false", "patience": "9"}
OWN = {"din": {"attention": "8,4"}, "bst": {"heads": "2", "inner": "8"}, "sasrec": {"hidden": "8"}}
PLAIN = {"sasrec": {"columns": "false", "disliked": "0"}}
ITEMS = 20


def log_of(count, seed=0):
    """Users whose history is of the last minutes click, others do not: the times alone tell."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        when = 1_700_000_000 + 600 * index
        history = rng.permutation(ITEMS)[: rng.integers(2, 6)]
        recent = rng.random() < 0.5
        ages = np.sort(rng.integers(100_000, 200_000, len(history)))[::-1]
        ages = ages // 1000 if recent else ages
        clicked = int(rng.random() < (0.9 if recent else 0.1))
        items = "|".join(f"i{number}" for number in history)
        happened = "|".join(str(when - age) for age in ages)
        rows.append(
            [clicked, when, f"u{rng.integers(20)}", f"i{rng.integers(ITEMS)}", rng.integers(1, 99), items, happened]
        )
    columns = ["clicked", "timestamp", "user_id", "item_id", "price", "history", "history_times"]
    return pd.DataFrame(rows, columns=columns)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    log_of(1500).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def models(log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in OWN:
        zoo.train(family, log, folder / family, settings=SMALL | TRAINED | OWN[family] | PLAIN.get(family, {}))
    return folder


@pytest.mark.parametrize("family", OWN)
def test_trained_quantized_and_exported(models, log, family):
    report = zoo.evaluate(models / family, log)
    assert report["metrics"]["fp32"]["auc"] > 0.8 or family == "sasrec"
    assert report["difference"]["max_probability"] <= 0.005


def test_without_the_times_there_is_little_to_learn(log, tmp_path):
    pd.read_csv(log).drop(columns="history_times").to_csv(tmp_path / "log.csv", index=False)
    zoo.train("din", tmp_path / "log.csv", tmp_path / "din", settings=SMALL | TRAINED | OWN["din"])
    assert zoo.evaluate(tmp_path / "din", tmp_path / "log.csv")["metrics"]["fp32"]["auc"] < 0.75


@pytest.mark.parametrize("family", OWN)
def test_exported_as_trained(models, family):
    from zoo.recommenders.models.checkpoints import load_checkpoint, load_network

    entry = zoo.entry(family)
    trained, features = load_checkpoint(models / family, entry.build, type(entry.config))
    _, restored = load_network(models / family, entry.build, type(entry.config))
    rows = log_of(60, seed=1).drop(columns="clicked").astype(str).to_dict("records")
    rows[0] |= {"history": "", "history_times": ""}
    rows[1] |= {"history_times": ""}
    (batch,) = features.read(rows)
    scores = []
    with torch.inference_mode():
        for network in (trained, restored):
            outputs = network(*(torch.from_numpy(getattr(batch, name)) for name in ("ids", "numbers", "scales")))
            logits = outputs[0] if isinstance(outputs, tuple) else outputs
            scores.append(torch.sigmoid(logits).numpy())
    pipeline = zoo.pipeline(models / family, precision="fp32", engine="onnxruntime")
    scores.append(pipeline.predict(pipeline.preprocess(rows))["probability"])
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-6)
    np.testing.assert_allclose(scores[2], scores[0], atol=1e-5)


@pytest.mark.parametrize("family", OWN)
def test_native_form(models, family):
    rows = log_of(60, seed=4).drop(columns="clicked").astype(str).to_dict("records")
    rows[0] |= {"history": "", "history_times": ""}
    rows[1] |= {"history_times": ""}
    native = zoo.pipeline(models / family, engine="native")
    stock = zoo.pipeline(models / family, precision="fp32", engine="onnxruntime")
    scores, expected = (pipeline.predict(pipeline.preprocess(rows))["probability"] for pipeline in (native, stock))
    np.testing.assert_allclose(scores, expected, atol=0.005)
    rows[2] |= {"history_times": ""}
    assert native.predict(native.preprocess(rows))["probability"][2] != scores[2]


@pytest.mark.parametrize("engine", ["native", "onnxruntime"])
@pytest.mark.parametrize("family", ["din", "bst"])
def test_rank_equals_rows(models, family, engine):
    pipeline = zoo.pipeline(models / family, engine=engine)
    rows = log_of(30, seed=3).drop(columns="clicked").astype(str)
    user = rows.iloc[5][["timestamp", "user_id", "history", "history_times"]].to_dict()
    items = rows[["item_id", "price"]].to_dict("records")
    ranked = pipeline.rank(user, items)
    expected = pipeline.predict(pipeline.preprocess([item | user for item in items]))["probability"].ravel()
    scores = {hit["row"]: hit["probability"] for hit in ranked}
    np.testing.assert_array_equal([scores[row] for row in range(30)], expected)
    if engine == "native":
        first = np.flatnonzero(~rows["item_id"].duplicated())
        ranked = pipeline.rank(user, pipeline.catalogue([items[index] for index in first]))
        assert [hit["probability"] for hit in ranked] == sorted(expected[first], reverse=True)


def test_finetuned_with_new_items(models, log, tmp_path):
    later = log_of(400, seed=5).replace({"item_id": {"i3": "new"}})
    later.to_csv(tmp_path / "later.csv", index=False)
    zoo.finetune(models / "din", tmp_path / "later.csv", tmp_path / "tuned", settings={"epochs": "1"})
    assert zoo.evaluate(tmp_path / "tuned", tmp_path / "later.csv")["metrics"]["fp32"]["auc"] > 0.8
