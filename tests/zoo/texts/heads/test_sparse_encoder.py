"""Sparse vectors of SPLADE, equal to those of transformers' logits by the definition."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="the originals are its models")

from helpers import multi_vector_models, text_models  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from pipelines.graph import io  # noqa: E402
from pipelines.kernels import extension  # noqa: E402
from pipelines.kernels.transformer import native as kernels  # noqa: E402
from pipelines.kernels.transformer.text import reference  # noqa: E402
from pipelines.kernels.transformer.text.from_graph import text_program  # noqa: E402
from zoo.texts import metrics  # noqa: E402
from zoo.texts.heads import sparse_encoder  # noqa: E402


def imported(path, kind="bert", **settings):
    """(an imported folder of a random model, the original, its tokenizer)."""
    model, fast = text_models.write_task(path / "theirs", "AutoModelForMaskedLM", kind)
    module = "sentence_transformers.sparse_encoder.models."
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{module}MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{module}SpladePooling"},
    ]
    (path / "theirs" / "modules.json").write_text(json.dumps(modules))
    (path / "theirs" / "1_SpladePooling").mkdir()
    (path / "theirs" / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    assert zoo.import_model(path / "theirs", path / "ours")["family"] == "sparse-encoder"
    return path / "ours", model, fast


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert"])
def test_weights_are_those_of_transformers(tmp_path, kind):
    folder, model, fast = imported(tmp_path, kind, pooling_strategy="max")
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    for text, vector in zip(text_models.TEXTS, ours(text_models.TEXTS), strict=True):
        with torch.no_grad():
            logits = model(**fast(text, return_tensors="pt")).logits[0]
        wanted = torch.log1p(torch.relu(logits)).max(0).values.numpy()
        dense = np.zeros(len(wanted), np.float32)
        dense[vector["indices"]] = vector["values"]
        assert np.abs(dense - wanted).max() < 1e-5
        (few,) = ours(text, max_active_dims=3)
        assert {*few["indices"]} == {*np.argsort(-wanted)[:3]}


def test_the_vocabulary_may_be_the_default_of_the_architecture():
    assert sparse_encoder.HEAD.outputs({"model_type": "bert"}) == 30522


def test_prompts_are_those_of_sentence_encoders(tmp_path):
    text_models.write_task(tmp_path / "theirs", "AutoModelForMaskedLM")
    text_models.prompted(tmp_path / "theirs")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", format="sparse-encoder")
    ours = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")

    def same(found, wanted):
        return all(found[key].tobytes() == wanted[key].tobytes() for key in ("indices", "values"))

    (plain,), (query,), (document,) = (ours("cat", prompt=name) for name in ("", "query", "passage"))
    assert same(query, ours("the cat", prompt="")[0]) and not same(query, plain)
    assert same(ours("cat")[0], query)  # the default
    assert same(ours.encode_query("cat")[0], query) and same(ours.encode_document("cat")[0], document)
    with pytest.raises(RequestError, match="found no prompt other; the model has query, passage, document"):
        ours("cat", prompt="other")
    (tmp_path / "texts.txt").write_text("cat")
    options = {"prompt": "passage", "engine": "onnxruntime", "precision": "fp32"}
    zoo.run(tmp_path / "ours", tmp_path / "texts.txt", tmp_path / "out.jsonl", **options)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["token"] for line in lines] == document["indices"].tolist()


def routed(folder, fast, weights, *, query="query_0_SparseStaticEmbedding"):
    """Makes a folder one whose queries need no network, as those of opensearch-neural-sparse-encoding-doc-v3."""
    module = "sentence_transformers.sparse_encoder.models."
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "x.models.Router"}]))
    structure = {"document": ["", "document_1_SpladePooling"], "query": [query]}
    kinds = ("MLMTransformer", "SpladePooling", query.rpartition("_")[2])
    types = dict(zip([*structure["document"], query], [module + kind for kind in kinds], strict=True))
    (folder / "router_config.json").write_text(json.dumps({"types": types, "structure": structure, "parameters": {}}))
    for name, settings in ((structure["document"][1], {"activation_function": "log1p_relu"}), (query, {})):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(settings))
    if isinstance(weights, dict):
        (folder / "idf.json").write_text(json.dumps(weights))
    else:
        save_file({"weight": torch.tensor(weights)}, folder / query / "model.safetensors")


@pytest.mark.parametrize("is_json", [pytest.param(False, marks=pytest.mark.slow), True])
def test_queries_without_a_network_have_the_weights_of_their_tokens(tmp_path, is_json):
    model, fast = text_models.write_task(tmp_path / "theirs", "AutoModelForMaskedLM")
    weights = np.linspace(0.5, 3, 64, dtype=np.float32)
    weights[fast.convert_tokens_to_ids("a")] = 0
    named = {fast.convert_ids_to_tokens(i): float(weights[i]) for i in range(64)}
    routed(tmp_path / "theirs", fast, named if is_json else weights)
    assert zoo.import_model(tmp_path / "theirs", tmp_path / "ours")["family"] == "sparse-encoder"
    ours = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    vector, empty = ours.encode_query(["the cat, a cat", ""])
    ids = np.unique(fast("the cat, cat", add_special_tokens=False)["input_ids"])
    assert vector["indices"].tolist() == ids.tolist() and np.allclose(vector["values"], weights[ids])
    assert not len(empty["indices"])
    with torch.no_grad():
        logits = model(**fast("the cat", return_tensors="pt")).logits[0]
    wanted = torch.log1p(torch.log1p(torch.relu(logits))).max(0).values.numpy()
    (vector,) = ours.encode_document("the cat")
    assert np.abs(vector["values"] - wanted[vector["indices"]]).max() < 1e-5
    with pytest.raises(RequestError, match="with a table for queries .* does not support"):
        zoo.evaluate(tmp_path / "ours", data=tmp_path / "theirs" / "config.json")


def test_lexical_weights_of_bge_m3(tmp_path):
    model, _, fast = multi_vector_models.bge(tmp_path / "theirs")
    layer = torch.load(tmp_path / "theirs" / "sparse_linear.pt", weights_only=True)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", format="sparse-encoder")
    ours = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    texts = [*text_models.TEXTS, "cat zebra cat"]
    for text, vector, few in zip(texts, ours(texts), ours(texts, max_active_dims=2), strict=True):
        encoding, wanted = fast(text, return_tensors="pt"), {}
        with torch.no_grad():
            rows = torch.relu(model(**encoding).last_hidden_state[0] @ layer["weight"][0] + layer["bias"])
        for number, weight in zip(encoding["input_ids"][0].tolist(), rows.tolist(), strict=True):
            if number not in fast.all_special_ids and weight > 0:
                wanted[number] = max(weight, wanted.get(number, 0))
        assert vector["indices"].tolist() == sorted(wanted)
        assert np.allclose(vector["values"], [wanted[i] for i in sorted(wanted)], atol=1e-5)
        assert {*few["indices"]} == {*sorted(wanted, key=wanted.get)[-2:]}
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{text}\t{texts[3]}\t{i}\n" for i, text in enumerate(texts)))
    assert zoo.evaluate(tmp_path / "ours", data=pairs, engine="onnxruntime")["samples"] == len(texts)
    if extension.isas():
        native = zoo.pipeline(tmp_path / "ours", "int8", "native")
        exact, int8 = (pipeline.compute_texts([(text,) for text in texts]) for pipeline in (ours, native))
        assert np.abs(exact - int8).max() < 0.1


def test_damaged_routers_are_refused(tmp_path):
    _, fast = text_models.write_task(tmp_path / "theirs", "AutoModelForMaskedLM")
    routed(tmp_path / "theirs", fast, np.ones(7, np.float32))
    with pytest.raises(RequestError, match=r"its weights of queries .* are \[7\]; expected 64 numbers"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    routed(tmp_path / "theirs", fast, {}, query="query_0_Transformer")
    with pytest.raises(RequestError, match="its queries have a network of their own"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "theirs/router_config.json").write_text("{}")
    with pytest.raises(RequestError, match="router_config.json has no modules of queries and documents"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_int8_run_and_evaluation(tmp_path):
    folder, _, _ = imported(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(text_models.TEXTS * 30))
    zoo.calibrate(folder, str(tmp_path / "texts.txt"), samples=16)
    exact, int8 = (zoo.pipeline(folder, name, "onnxruntime") for name in ("fp32", "int8"))
    rows = [(text,) for text in text_models.TEXTS]
    a, b = (pipeline.compute_texts(rows) for pipeline in (exact, int8))
    assert ((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min() > 0.95
    native = zoo.pipeline(folder, "int8", "native")
    assert native.engine == "native"
    c = native.compute_texts(rows)
    assert ((a * c).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(c, axis=1)).min() > 0.97
    assert np.array_equal(native.compute_texts(rows[3:4])[0], c[3])
    program = text_program(io.load(folder / "int8.onnx"))
    ids = np.random.default_rng(0).integers(0, 64, 250)
    lengths = np.array([70, 3, 57, 70, 50])
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    wanted = np.stack([reference.compute(program, part, np.zeros_like(part)) for part in parts])
    for isa in extension.isas():
        encoder = kernels.compile_texts(program, isa)
        weights = encoder.compute(ids.astype(np.int32), np.zeros(250, np.int32), lengths, 2)
        assert weights.tobytes() == wanted.tobytes() and (weights > 0).any()
    zoo.run(folder, tmp_path / "texts.txt", tmp_path / "out.jsonl", max_active_dims=2)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 150 and {*lines[0]} == {"row", "token", "token_str", "weight"}
    pairs = zip(text_models.TEXTS, text_models.TEXTS[::-1], [5, 1, 4, 2, 3], strict=True)
    (tmp_path / "pairs.tsv").write_text("\n".join("\t".join(map(str, pair)) for pair in pairs))
    report = metrics.evaluate({"fp32": exact, "int8": int8}, tmp_path / "pairs.tsv")
    assert report["difference"]["cosine"] > 0.95


def test_other_poolings_are_refused(tmp_path):
    with pytest.raises(RequestError, match="its pooling_strategy is 'sum'"):
        imported(tmp_path, pooling_strategy="sum")
