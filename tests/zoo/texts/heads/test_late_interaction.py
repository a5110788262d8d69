"""Multi-vector encoders: vectors of tokens equal to those of transformers' networks by the definition."""

import json

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers", reason="needs the texts extra")
torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="the originals are its models")

from helpers import multi_vector_models as models  # noqa: E402
from helpers import text_models  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from pipelines.engines.native import validation  # noqa: E402
from pipelines.engines.native.texts import LENGTHS, NativeTexts  # noqa: E402
from pipelines.kernels.transformer.token_vectors import TokenVectors  # noqa: E402
from zoo.texts.data.tokenizer import Tokenizer  # noqa: E402
from zoo.texts.heads.late_interaction.roles import ROLES, Roles  # noqa: E402

PLACES = {"query": {"marker": "[unused63]", "most": 12, "expand": 12}, "document": {"marker": "cat", "most": 20}}
TEXTS = [*text_models.TEXTS, "", "z " * 40]


def opened(path, precision="fp32", engine="onnxruntime"):
    """The pipeline of the imported folder path/theirs."""
    assert zoo.import_model(path / "theirs", path / "ours")["family"] == "multi-vector-encoder"
    return zoo.pipeline(path / "ours", precision, engine)


def check(ours, made, query, document, texts=TEXTS):
    """The vectors of queries and documents are those of the definition."""
    for encode, settings in ((ours.encode_query, query), (ours.encode_document, document)):
        for text, vectors in zip(texts, encode(texts), strict=True):
            wanted = models.expected(made, text, **settings)
            assert vectors.shape == wanted.shape
            assert np.abs(vectors - wanted).max() < 1e-5


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("attend", [False, True])
def test_folders_of_stanford(tmp_path, kind, attend):
    made = models.stanford(tmp_path / "theirs", kind, attend_to_mask_tokens=attend)
    skipped = {"skipped": models.PUNCTUATION}
    check(opened(tmp_path), made, {**PLACES["query"], "attend": attend}, {**PLACES["document"], **skipped})


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_folders_of_pylate(tmp_path, kind):
    layers = ((24, True), (24, True), (models.OUTPUTS, False))
    made = models.pylate(tmp_path / "theirs", kind, layers, skiplist_words=["a"], query_length=11)
    query = {**PLACES["query"], "most": 11, "expand": 11}
    check(opened(tmp_path), made, query, {**PLACES["document"], "skipped": ["a"]})


def test_folders_of_pylate_without_expansion_and_markers(tmp_path):
    made = models.pylate(tmp_path / "theirs", do_query_expansion=False, query_prefix="", document_prefix="")
    plain = {"most": 20, "skipped": models.PUNCTUATION}
    check(opened(tmp_path), made, {"most": 12}, plain)


def test_folders_of_bge_m3(tmp_path, caplog):
    made = models.bge(tmp_path / "theirs")
    zoo.import_model(tmp_path / "theirs", tmp_path / "dense", pooling="cls")
    assert "has colbert_linear.pt and sparse_linear.pt, which are not imported" in caplog.text
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", format="multi-vector-encoder")
    ours = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    role = {"most": ours.folder.preprocessing["max_length"], "skipped": [made[2].cls_token]}
    check(ours, made, role, role)


def test_folders_of_sentence_transformers(tmp_path):
    expansion = {"strategy": "min", "length": 10, "attend": False, "token": "cat"}
    made = models.sentence_transformers(tmp_path / "theirs", expansion=expansion, skiplist_words=["."])
    ours = opened(tmp_path)
    assert [len(rows) for rows in ours.encode_query(["a", "b c d e f g h i j k", "z " * 40])] == [10, 14, 16]
    for text, vectors in zip(TEXTS, ours.encode_document(TEXTS), strict=True):
        assert np.abs(vectors - models.expected(made, text, most=20, skipped=["."])).max() < 1e-5


def test_int8_ranking_run_and_evaluation(tmp_path):
    models.pylate(tmp_path / "theirs")
    exact = opened(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(text_models.TEXTS * 30))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "texts.txt"), samples=16)
    native = zoo.pipeline(tmp_path / "ours", "int8", "native")
    for encode, other in ((exact.encode_query, native.encode_query), (exact.encode_document, native.encode_document)):
        cosines = [(a * b).sum(axis=1) for a, b in zip(encode(TEXTS), other(TEXTS), strict=True)]
        assert min(cosine.min() for cosine in cosines) > 0.95 and np.concatenate(cosines).mean() > 0.99
    query, texts = "the cat", text_models.TEXTS
    scores = [models.max_sim(exact.encode_query(query), document) for document in exact.encode_document(texts)]
    ranked = exact.rank(query, texts, top_k=3, return_documents=True)
    assert [hit["corpus_id"] for hit in ranked] == np.argsort(-np.array(scores))[:3].tolist()
    assert ranked[0]["text"] == texts[ranked[0]["corpus_id"]]
    assert np.allclose([result["score"] for result in exact(texts, query=query)], scores, atol=1e-4)
    zoo.run(tmp_path / "ours", tmp_path / "texts.txt", tmp_path / "out.jsonl", query=query, engine="onnxruntime")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 150 and {*lines[0]} == {"row", "score"}
    zoo.run(tmp_path / "ours", tmp_path / "texts.txt", tmp_path / "index.npz", engine="native")
    index = TokenVectors.load(tmp_path / "index.npz")
    assert len(index) == 150
    (tmp_path / "queries.txt").write_text("the cat\nzebra")
    zoo.run(
        tmp_path / "ours", tmp_path / "queries.txt", tmp_path / "found.jsonl", index=tmp_path / "index.npz", top_k=2
    )
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [(line["row"], line["document"] - 1) for line in lines[::2]] == [
        (i, native.rank(text, index, top_k=1)[0]["corpus_id"]) for i, text in enumerate(("the cat", "zebra"), 1)
    ]
    assert (
        native.index(texts).scores(native.encode_query(query)).tobytes()
        == index.scores(native.encode_query(query), np.arange(5)).tobytes()
    )
    assert np.allclose([result["score"] for result in native(texts, query=query)], scores, rtol=0.02)
    rows = ["\t".join((query, text, str(i % 2))) for i, text in enumerate(texts)]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows))
    report = zoo.evaluate(tmp_path / "ours", str(tmp_path / "pairs.tsv"))
    assert report["metrics"]["fp32"].keys() == {"ndcg10", "mrr10"} and report["difference"]["cosine"] > 0.95


def test_the_check_of_native_kernels_covers_tokens_that_are_not_attended_to(tmp_path, monkeypatch):
    models.stanford(tmp_path / "theirs")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "texts.txt").write_text("\n".join(text_models.TEXTS * 30))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "texts.txt"), samples=16)
    ours = zoo.pipeline(tmp_path / "ours", "int8", "native")
    subject, batch = ours._unvalidated, ours._queries()
    assert batch["attention_mask"].sum() < batch[LENGTHS].sum() == 24
    result = validation.compare(subject, batch)
    assert result["difference"] < validation.ALIKE and result["sizes"]
    compute = NativeTexts.compute
    monkeypatch.setattr(
        NativeTexts, "compute", lambda self, ids, types, lengths, attended=None: compute(self, ids, types, lengths)
    )
    assert validation.compare(subject, batch)["difference"] > validation.ALIKE


@pytest.mark.parametrize("attend", [pytest.param(False, marks=pytest.mark.slow), True])
def test_expansion_beyond_the_window_of_local_attention(tmp_path, attend):
    """The last tokens have no key within the window of 8 tokens: attention is 0, as that of torch."""
    made = models.stanford(tmp_path / "theirs", "modernbert", query_maxlen=30, attend_to_mask_tokens=attend)
    made[0].set_attn_implementation("sdpa")
    ours = opened(tmp_path)
    query = {**PLACES["query"], "most": 30, "expand": 30, "attend": attend}
    check(ours, made, query, {**PLACES["document"], "skipped": models.PUNCTUATION})
    (tmp_path / "texts.txt").write_text("\n".join(text_models.TEXTS * 30))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "texts.txt"), samples=16)
    native = zoo.pipeline(tmp_path / "ours", "int8", "native")
    for vectors, wanted in zip(native.encode_query(TEXTS), ours.encode_query(TEXTS), strict=True):
        assert (vectors * wanted).sum(axis=1).min() > 0.97


def test_layout_of_jina_colbert(tmp_path):
    """jina-colbert-v2: custom code of Jina v3, markers that were added to the tokenizer of XLM-R."""
    made = models.jina(tmp_path / "theirs")
    place = {"marker": "[DocumentMarker]", "most": 30, "skipped": models.PUNCTUATION}
    check(opened(tmp_path), made, {"marker": "[QueryMarker]", "most": 12, "expand": 12, "attend": True}, place)


@pytest.mark.parametrize("splits", [False, True])
def test_skipped_words_are_tokens_or_begin_with_them(tmp_path, splits):
    """Stanford's ColBERT tokenizes the words; PyLate and sentence-transformers look them up, or take the unknown one."""
    vocabulary = ["<unk>", "▁", "▁!", "!", "?", "▁a", *(f"<{i}>" for i in range(9))]
    network = tokenizers.Tokenizer(tokenizers.models.Unigram([(token, -1.0) for token in vocabulary], 0))
    network.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    network.save(str(tmp_path / "tokenizer.json"))
    features = {"roles": {role: {"marker": "", "length": 8} for role in ROLES}, "expansion": None}
    features |= {"skipped": {"query": [], "document": ["!", "?", "^"]}, "unknown": "<unk>", "splits_skipped": splits}
    roles = Roles(features, Tokenizer(tmp_path / "tokenizer.json", len(vocabulary), 8))
    skipped = np.flatnonzero(~roles.kept(np.arange(len(vocabulary)), "document")).tolist()
    assert [vocabulary[i] for i in skipped] == (["▁", "▁!"] if splits else ["<unk>", "!", "?"])


def test_refusals(tmp_path):
    models.pylate(tmp_path / "theirs", query_length=2)
    with pytest.raises(RequestError, match="its length of the role query is 2"):
        opened(tmp_path)
    settings = tmp_path / "theirs" / "config_sentence_transformers.json"
    settings.write_text(json.dumps({"model_type": "ColBERT"}))
    ours = opened(tmp_path)
    with pytest.raises(RequestError, match="found the role 'passage'"):
        ours("a", role="passage")
    with pytest.raises(RequestError, match="found none, expected one of --query, --index"):
        ours.run(["a"], tmp_path / "out.csv")
