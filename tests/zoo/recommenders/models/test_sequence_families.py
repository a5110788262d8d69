"""Families that read the history as a sequence: every command, empty histories, and scores that padding leaves alone."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest
from helpers.tiers import one_in

import zoo
from pipelines.core.errors import RequestError

torch = pytest.importorskip("torch", reason="needs the train extra")
torch.set_num_threads(1)

RANKERS = ("din", "bst", "sasrec")
SMALL = {"hidden": "16,8", "embedding_size": "8", "epochs": "2", "batch_size": "64", "l2_embeddings": "10"}
TRAINED = {"epochs": "6", "ema": "0.9", "learning_rate": "0.01", "refit": "false", "patience": "9"}
OWN = {"din": {"attention": "8,4"}, "bst": {"heads": "2", "inner": "8"}, "sasrec": {"hidden": "8"}}
PLAIN = {"sasrec": {"columns": "false", "disliked": "0"}}  # the columns of `log_of` are noise
ITEMS = 30


def log_of(count, seed=0):
    """Users click the items next to those of their history."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        taste = rng.integers(ITEMS)
        history = (taste + rng.integers(-2, 3, rng.integers(0, 7))) % ITEMS
        item = (taste + rng.integers(-2, 3)) % ITEMS if i % 2 else rng.integers(ITEMS)
        near = len(history) and min((item - history[-1]) % ITEMS, (history[-1] - item) % ITEMS) < 5
        names = "|".join(f"i{number}" for number in history)
        clicked = int(rng.random() < (0.8 if near else 0.2))
        rows.append([clicked, f"u{rng.integers(20)}", f"i{item}", rng.integers(1, 99), "a|b" if i % 3 else "c", names])
    return pd.DataFrame(rows, columns=["clicked", "user_id", "item_id", "price", "genres", "history"])


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    log_of(1200).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def models(log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in RANKERS:
        zoo.train(family, log, folder / family, settings=SMALL | TRAINED | OWN[family] | PLAIN.get(family, {}))
        zoo.quantize(folder / family)
    return folder


@pytest.mark.parametrize("family", RANKERS)
def test_trained_and_quantized(models, log, family):
    report = zoo.evaluate(models / family, log)
    assert report["metrics"]["fp32"]["auc"] > 0.6 or family != "din"  # the others learn slower
    assert abs(report["difference"]["auc"]) <= 0.002
    assert report["difference"]["max_probability"] <= 0.005
    schema = json.loads((models / family / "schema.json").read_text())
    (history,) = [spec for spec in schema["columns"] if spec["name"] == "history"]
    assert history["pooling"] == "none" and history["shares"] == "item_id" and "encoding" not in history


@pytest.mark.parametrize("family", RANKERS)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_padding_and_neighbours_change_nothing(models, family, precision):
    pipeline = zoo.pipeline(models / family, precision=precision, engine="onnxruntime")
    rows = log_of(40, seed=1).drop(columns="clicked").astype(str).to_dict("records")
    rows[0]["history"] = ""
    together = pipeline.predict(pipeline.preprocess(rows))["probability"]
    assert np.isfinite(together).all()
    for index in (0, 1, 7):
        alone = pipeline.predict(pipeline.preprocess([rows[index]]))["probability"]
        np.testing.assert_allclose(alone, together[index : index + 1], atol=1e-6)


@pytest.mark.parametrize("family", RANKERS)
def test_more_places_than_items_change_nothing(models, family):
    """The same weights with longer sequences."""
    from zoo.recommenders.data.features import Features
    from zoo.recommenders.models.checkpoints import load_network

    entry = zoo.entry(family)
    about, network = load_network(models / family, entry.build, type(entry.config))
    schema = about["features"]["schema"]
    longer = [{**spec, "length": 11} if spec["name"] == "history" else spec for spec in schema["columns"]]
    rows = log_of(50, seed=2).drop(columns="clicked").astype(str).to_dict("records")
    scores = []
    for columns in (schema["columns"], longer):
        features = Features.from_json({"schema": {**schema, "columns": columns}})
        other = entry.build(features, about["config"]).eval()
        own = other.state_dict()
        fewer = {name: min(len(own[name]), len(tensor)) for name, tensor in network.state_dict().items() if tensor.ndim}
        for name, count in fewer.items():
            own[name][:count] = network.state_dict()[name][:count]
        other.load_state_dict(own)
        (batch,) = features.read(rows)
        with torch.inference_mode():
            results = other(*(torch.from_numpy(getattr(batch, name)) for name in ("ids", "numbers", "scales")))
            scores.append(results[0] if isinstance(results, tuple) else results)
    np.testing.assert_allclose(scores[0].numpy(), scores[1].numpy(), atol=1e-6)


@pytest.mark.parametrize("family", ["din", "bst"])
def test_rank_equals_rows(models, family):
    pipeline = zoo.pipeline(models / family, engine="onnxruntime")
    rows = log_of(30, seed=3).drop(columns="clicked").astype(str)
    user = rows.iloc[5][["user_id", "history"]].to_dict()
    items = rows[["item_id", "price", "genres"]].to_dict("records")
    ranked = pipeline.rank(user, items)
    expected = pipeline.predict(pipeline.preprocess([item | user for item in items]))["probability"].ravel()
    scores = {hit["row"]: hit["probability"] for hit in ranked}
    np.testing.assert_allclose([scores[row] for row in range(30)], expected, atol=1e-6)


@pytest.mark.parametrize("family", RANKERS)
def test_finetuned_from_its_graph(models, log, family, tmp_path):
    settings = {"epochs": "1", "learning_rate": "0.000000001", "ema": "0"}
    zoo.finetune(models / family, log, tmp_path / "tuned", settings=settings)
    rows = log_of(50, seed=4).drop(columns="clicked").astype(str).to_dict("records")
    scores = []
    for folder in (models / family, tmp_path / "tuned"):
        pipeline = zoo.pipeline(folder, precision="fp32", engine="onnxruntime")
        scores.append(pipeline.predict(pipeline.preprocess(rows))["probability"])
    np.testing.assert_allclose(scores[0], scores[1], atol=0.02)


@pytest.mark.parametrize("family", RANKERS)
def test_interrupted_training_is_resumed(log, family, tmp_path):
    settings = SMALL | OWN[family] | {"refit": "false", "seed": "3"}
    zoo.train(family, log, tmp_path / "whole", settings=settings)
    with pytest.MonkeyPatch.context() as patch:
        from zoo.recommenders.training import fitting

        def stop(path, state):
            save(path, state)
            if state.get("epoch") == 1:
                raise KeyboardInterrupt

        save = fitting.save_checkpoint
        patch.setattr(fitting, "save_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            zoo.train(family, log, tmp_path / "model", settings=settings)
    zoo.train(family, log, tmp_path / "model", settings=settings, resume=True)
    whole, resumed = (torch.load(tmp_path / name / "model.pt")["state_dict"] for name in ("whole", "model"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.fixture(scope="module")
def next_items(models):
    return zoo.pipeline(models / "sasrec", engine="onnxruntime")


def test_next_items_leave_the_history_out(next_items, tmp_path):
    rows = log_of(60, seed=5)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    summary = zoo.run(next_items.path, tmp_path / "rows.csv", tmp_path / "next.csv", top=4, engine="onnxruntime")
    frame = pd.read_csv(tmp_path / "next.csv")
    assert summary["rows"] == 60 and list(frame.columns) == ["row", "rank", "item", "score"]
    histories = rows.history.str.split("|")
    for row, items in frame.groupby("row")["item"]:
        assert len(set(items)) == 4 and not set(items) & set(histories[row])
    assert frame.groupby("row")["score"].is_monotonic_decreasing.all()


def test_next_items_are_learned(models, log):
    report = zoo.evaluate(models / "sasrec", log)
    for metrics in report["metrics"].values():
        assert metrics["recall@10"] > 0.5 and 0 < metrics["mrr"] < 1 and metrics["ndcg@10"] < metrics["recall@10"]
    assert abs(report["difference"]["recall@10"]) < 0.02
    ranks, _ = zoo.pipeline(models / "sasrec", precision="fp32", engine="onnxruntime").ranks(log)
    assert len(ranks) == report["next_items"] and ranks.min() == 1 and ranks.max() <= ITEMS


def test_next_items_of_a_catalogue(next_items):
    rows = log_of(200, seed=6).astype(str)
    catalogue = next_items.catalogue(rows[["item_id", "price", "genres"]].to_dict("records"))
    user = {"user_id": "u1", "history": "i3|i4"}
    ranked = next_items.rank(user, catalogue, 5)
    assert not {hit["item"] for hit in ranked} & {"i3", "i4"} and len(ranked) == 5
    assert next_items.rank(user, catalogue)[:5] == ranked
    assert next_items.retrieve(user, catalogue, 5) == [hit["item"] for hit in ranked]
    without = next_items.rank(user, catalogue, 4, exclude=[ranked[0]["item"], "unknown"])
    assert [hit["item"] for hit in without] == [hit["item"] for hit in ranked[1:]]
    assert len(next_items.retrieve(user, catalogue, 999)) == len(catalogue) - 2
    full = [
        {"user_id": "u1", "history": "i3|i4", **rows.iloc[hit["row"]][["price", "genres"]], "item_id": hit["item"]}
        for hit in ranked
    ]
    expected = next_items.predict(next_items.preprocess(full))["probability"].ravel()
    np.testing.assert_allclose([hit["probability"] for hit in ranked], expected, atol=0.01)


@pytest.mark.parametrize(
    "settings", one_in(3, [{"block": "hstu", "heads": "2"}, {"negatives": "8", "blocks": "1"}, {"past": "0.1"}])
)
def test_options_of_sasrec(log, tmp_path, settings):
    sizes = SMALL | {"hidden": "8", "epochs": "1", "refit": "false"} | settings
    zoo.train("sasrec", log, tmp_path / "model", settings=sizes)
    zoo.quantize(tmp_path / "model")
    report = zoo.evaluate(tmp_path / "model", log, engine="onnxruntime")
    assert report["difference"]["max_probability"] <= 0.02  # vectors of 8 columns are coarse
    compare_with_torch(tmp_path / "model", "sasrec")


@pytest.mark.parametrize("family", RANKERS)
def test_graph_computes_what_the_network_does(models, family):
    compare_with_torch(models / family, family)


@pytest.mark.parametrize("family", ["din", "bst"])
def test_pairs_of_vectors_are_multiplied(models, family):
    """Without its network, the logit is the sum of the dot products of the embeddings and of the sequence's vector."""
    from zoo.recommenders.models.checkpoints import load_network

    entry = zoo.entry(family)
    about, network = load_network(models / family, entry.build, type(entry.config))
    (rows,) = zoo.pipeline(models / family, engine="onnxruntime").rows(log_of(40, seed=10))
    ids, numbers, scales = (torch.from_numpy(getattr(rows, name)) for name in ("ids", "numbers", "scales"))
    with torch.inference_mode():
        network.deep[-1].weight.zero_()
        network.deep[-1].bias.zero_()
        target, items = network.queries[0](ids), network.keys[0](ids)
        interest = network.interests[0](target, items, network.masks[0](ids))
        vectors = [*network.embeddings(ids, scales).split(about["config"].embedding_size, 1), interest]
        expected = sum((a * b).sum(1) for a, b in itertools.combinations(vectors, 2))
        logits = network(ids, numbers, scales)[:, 0]
    assert expected.abs().max() > 0.01
    np.testing.assert_allclose(logits.numpy(), expected.numpy(), atol=1e-5)


def compare_with_torch(folder, family):
    from zoo.recommenders.models.checkpoints import load_network

    entry = zoo.entry(family)
    _, network = load_network(folder, entry.build, type(entry.config))
    pipeline = zoo.pipeline(folder, precision="fp32", engine="onnxruntime")
    (rows,) = pipeline.rows(log_of(40, seed=7))
    batch = pipeline.encode(rows)
    with torch.inference_mode():
        results = network(*(torch.from_numpy(getattr(rows, name)) for name in ("ids", "numbers", "scales")))
    logits = results[0] if isinstance(results, tuple) else results
    out = pipeline.predict(batch)
    np.testing.assert_allclose(out["probability"], torch.sigmoid(logits).numpy(), atol=1e-5)
    for name, vectors in zip(getattr(network, "outputs", ()), results[1:], strict=False):
        np.testing.assert_allclose(out[name], vectors.numpy(), atol=1e-5)


@pytest.mark.parametrize("family", RANKERS)
def test_native_program(models, family):
    """The same bits alone, in a batch and in a ranking, near the float graph, and the same file twice."""
    pipeline = zoo.pipeline(models / family, engine="native")
    rows = log_of(140, seed=8).drop(columns="clicked").astype(str).to_dict("records")
    rows[2]["history"] = ""
    batch = pipeline.preprocess(rows)
    together = pipeline.predict(batch)["probability"]
    for index in (0, 2, 139):
        alone = pipeline.predict({name: array[index : index + 1] for name, array in batch.items()})["probability"]
        assert alone.tobytes() == together[index : index + 1].tobytes()
    exact = zoo.pipeline(models / family, precision="fp32", engine="onnxruntime").predict(batch)["probability"]
    np.testing.assert_allclose(together, exact, atol=0.005)
    user = {name: rows[3][name] for name in ("user_id", "history")}
    items = [{name: row[name] for name in ("item_id", "price", "genres")} for row in rows]
    expected = pipeline.predict(pipeline.preprocess([item | user for item in items]))["probability"].ravel()
    scores = {hit["row"]: hit["probability"] for hit in pipeline.rank(user, items)}
    ranked = np.array([scores[row] for row in range(140)], np.float32)
    np.testing.assert_allclose(ranked, expected, atol=0.005)  # sasrec scores by int8 vectors
    assert family == "sasrec" or ranked.tobytes() == expected.tobytes()


def test_table_takes_in_the_columns_of_items(log):
    """In training a network adds the columns to the ids; afterwards it has the weights of a network without them."""
    from zoo.recommenders.data.features import Features
    from zoo.recommenders.data.logs import open_logs
    from zoo.recommenders.data.schema_inference import infer
    from zoo.recommenders.models.sequences.sasrec import SASRec, SASRecConfig

    features = Features(infer(open_logs(log), sequences=True))
    (rows,) = features.read(log, labelled=True)
    inputs = [torch.from_numpy(getattr(rows, name)) for name in ("ids", "numbers", "scales")]
    network = SASRec(features, SASRecConfig(embedding_size=8, hidden=(8,)))
    plain = network.eval()(*inputs)[0]
    network.begin_training([dict(zip(("ids", "numbers", "scales"), inputs, strict=True))])
    columns = network.columns
    with torch.no_grad():
        columns.embeddings.weight.normal_()
    item, last = rows.ids[-1, network.key.start], rows.ids[-1]
    assert columns.ids[item].tolist() == last[columns.chosen].tolist() and columns.known[item] == 1
    assert not columns(torch.tensor([0, network.sequence.last])).any()
    with torch.inference_mode():
        before = network(*inputs)
    assert (before[0] - plain).abs().max() > 0.01
    network.end_training()
    with torch.inference_mode():
        after = network(*inputs)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(before, after, strict=True))
    assert network.state_dict().keys() == SASRec(features, SASRecConfig(hidden=(8,))).state_dict().keys()


def test_columns_and_disliked_rows_teach_the_vectors_of_items(tmp_path):
    """Users like the next items of the genre of their history; of 300 items each one is seldom seen."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(3000):
        genre = rng.integers(6)
        history = genre + 6 * rng.integers(0, 50, 3)
        item = genre + 6 * rng.integers(0, 50) if i % 2 else rng.integers(300)
        names = "|".join(f"i{number}" for number in history)
        rows.append([int(item % 6 == genre), f"u{rng.integers(20)}", f"i{item}", f"g{item % 6}", names])
    names = ["clicked", "user_id", "item_id", "genre", "history"]
    pd.DataFrame(rows[:2000], columns=names).to_csv(tmp_path / "first.csv", index=False)
    pd.DataFrame(rows[2000:], columns=names).to_csv(tmp_path / "last.csv", index=False)
    recall = {}
    for name, settings in {"plain": {"columns": "false", "disliked": "0"}, "default": {}}.items():
        settings = SMALL | {"hidden": "8", "epochs": "4", "learning_rate": "0.01", "refit": "false"} | settings
        zoo.train("sasrec", tmp_path / "first.csv", tmp_path / name, settings=settings)
        ranks, _ = zoo.pipeline(tmp_path / name, precision="fp32").ranks(tmp_path / "last.csv")
        recall[name] = (ranks <= 50).mean()
    assert recall["default"] > recall["plain"] + 0.2


@pytest.mark.parametrize("settings", [{"weights": "sigmoid"}, {"activation": "prelu"}])
def test_options_of_din_run_native(log, tmp_path, settings):
    zoo.train(
        "din", log, tmp_path / "model", settings=SMALL | OWN["din"] | {"epochs": "1", "refit": "false"} | settings
    )
    zoo.quantize(tmp_path / "model")
    rows = log_of(60, seed=9).drop(columns="clicked").astype(str).to_dict("records")
    pipeline = zoo.pipeline(tmp_path / "model", engine="native")
    batch = pipeline.preprocess(rows)
    exact = zoo.pipeline(tmp_path / "model", precision="fp32", engine="onnxruntime").predict(batch)["probability"]
    np.testing.assert_allclose(pipeline.predict(batch)["probability"], exact, atol=0.005)


def test_other_families_refuse_sequences(log, models, tmp_path):
    with pytest.raises(RequestError, match='found the sequence history .*expected "mean", "sum" or "max"'):
        zoo.train("deepfm", log, tmp_path / "model", settings=SMALL, schema=models / RANKERS[0] / "schema.json")
    with pytest.raises(RequestError, match='the schema has no sequence; give the list .* "pooling": "none"'):
        zoo.train("din", log, tmp_path / "model", settings=SMALL, schema=pooled(log, tmp_path))


def pooled(log, folder):
    zoo.schema(log, folder / "pooled.json")
    return folder / "pooled.json"
