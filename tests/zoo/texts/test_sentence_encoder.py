"""The methods of sentence-transformers, on tiny random models; beside the library itself where it is installed."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
from helpers.text_models import PAIRS, TEXTS, built, prompted, write

import zoo
from pipelines.core.errors import RequestError
from zoo.texts.sentence_encoder import quantized


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [built(tmp_path_factory.mktemp("texts"), labels) for labels in (0, 1)]


@pytest.fixture(scope="module")
def encoder(folders: list[Path]):
    return zoo.pipeline(folders[0], engine="native")


def test_encode_returns_one_array(encoder) -> None:
    rows = [(text,) for text in TEXTS]
    vectors = encoder.encode(TEXTS)
    assert np.array_equal(vectors, encoder.compute_texts(rows)) and vectors.dtype == np.float32
    assert np.array_equal(encoder.encode(TEXTS[0]), vectors[0]) and encoder.encode([]).shape == (0, 32)
    assert np.array_equal(encoder.encode(TEXTS, prompt="a "), encoder.compute_texts(rows, "a "))
    assert encoder.encode([""]).shape == (1, 32)  # of the special tokens
    assert encoder.get_sentence_embedding_dimension() == 32 and encoder.max_seq_length == 80
    tensor = encoder.encode(TEXTS, convert_to_tensor=True)
    assert np.array_equal(tensor.numpy(), vectors)
    listed = encoder.encode(TEXTS, convert_to_numpy=False)
    assert type(listed) is list and np.array_equal(listed[1].numpy(), vectors[1])


def test_truncation_precision_and_similarity(encoder) -> None:
    full = encoder.encode(TEXTS)
    short = encoder.encode(TEXTS, truncate_dim=5)
    assert np.array_equal(short, full[:, :5])
    unit = encoder.encode(TEXTS, truncate_dim=5, normalize_embeddings=True)
    assert np.abs(unit - short / np.linalg.norm(short, axis=1, keepdims=True)).max() < 1e-6
    assert np.array_equal(encoder.encode(TEXTS, precision="ubinary"), np.packbits(full > 0, axis=1))
    binary = encoder.encode(TEXTS, precision="binary")
    assert np.array_equal(binary, (np.packbits(full > 0, axis=1).astype(int) - 128).astype(np.int8))
    codes = encoder.encode(TEXTS, precision="uint8")
    assert codes.dtype == np.uint8 and codes.min(axis=0).max() == 0 and codes.max(axis=0).min() >= 254
    assert np.array_equal(encoder.encode(TEXTS, precision="int8").astype(int) + 128, codes)
    assert np.array_equal(quantized(np.ones((2, 3), np.float32), "uint8"), np.zeros((2, 3)))
    assert quantized(np.ones((0, 3), np.float32), "int8").shape == (0, 3)
    similarities = encoder.similarity(full, full[:2])
    assert similarities.shape == (len(TEXTS), 2) and np.abs(similarities - full @ full[:2].T).max() < 1e-6
    assert np.abs(encoder.similarity(full[0], list(full)) - full[:1] @ full.T).max() < 1e-6
    assert np.abs(encoder.similarity_pairwise(full, full) - 1).max() < 1e-6


@pytest.mark.parametrize("name", ["dot", "euclidean", "manhattan"])
def test_similarity_is_that_of_the_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "theirs").mkdir()
    write(tmp_path / "theirs")
    prompted(tmp_path / "theirs", similarity_fn_name=name)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    encoder = zoo.pipeline(tmp_path / "ours", "fp32")
    vectors = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    gaps = vectors[:, None] - vectors[None]
    expected = {
        "dot": vectors @ vectors.T,
        "euclidean": -np.sqrt((gaps**2).sum(axis=-1)),
        "manhattan": -np.abs(gaps).sum(axis=-1),
    }[name]
    assert encoder.similarity_fn_name == name
    assert np.abs(encoder.similarity(vectors, vectors) - expected).max() < 1e-5
    shifted = np.roll(vectors, 1, axis=0)
    assert np.abs(encoder.similarity_pairwise(vectors, shifted) - np.diag(np.roll(expected, 1, axis=1))).max() < 1e-5
    if library := _library():
        theirs = library.SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
        assert np.abs(theirs.similarity(vectors, vectors).numpy() - expected).max() < 1e-4
        assert np.abs(theirs.encode_query(TEXTS) - encoder.encode_query(TEXTS)).max() < 1e-5


def _library():
    try:
        import sentence_transformers
    except ImportError:
        return None
    return sentence_transformers


@pytest.mark.parametrize(
    "options",
    [
        {"output_value": "token_embeddings"},
        {"precision": "int4"},
        {"precision": "int8", "inputs": "one"},
        {"device": "cuda"},
        {"truncate_dim": 0},
        {"prompt_name": "query"},
        {"inputs": ["a", None]},
        {"inputs": [0]},
    ],
)
def test_what_is_not_supported_is_refused(encoder, options) -> None:
    with pytest.raises(RequestError, match="expected|the model has none"):
        encoder.encode(**{"inputs": TEXTS, **options})


def test_rank_orders_documents(folders: list[Path]) -> None:
    ranker = zoo.pipeline(folders[1], engine="native")
    documents = [pair[0] for pair in PAIRS]
    scores = [row["score"] for row in ranker([("the cat", text) for text in documents])]
    ranking = ranker.rank("the cat", documents, return_documents=True)
    assert [row["corpus_id"] for row in ranking] == np.argsort(-np.array(scores), kind="stable").tolist()
    assert all(row["score"] == scores[row["corpus_id"]] for row in ranking)
    assert all(row["text"] == documents[row["corpus_id"]] for row in ranking)
    assert ranker.rank("the cat", documents, top_k=2) == [
        {key: row[key] for key in ("corpus_id", "score")} for row in ranking[:2]
    ]


def test_results_are_those_of_sentence_transformers(folders: list[Path]) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    theirs = library.SentenceTransformer(str(folders[0].parent / "theirs"), device="cpu")
    ours = zoo.pipeline(folders[0], "fp32")
    texts = [*TEXTS, "", " the cat ", "zoo " * 100]
    for options in (
        {},
        {"normalize_embeddings": True, "truncate_dim": 7},
        {"prompt": "the "},
        {"precision": "binary"},
        {"precision": "ubinary"},
    ):
        result, expected = ours.encode(texts, **options), theirs.encode(texts, **options)
        assert result.dtype == expected.dtype and result.shape == expected.shape
        assert np.abs(result.astype(float) - expected.astype(float)).max() < 1e-5, options
    vectors = theirs.encode(texts)
    for precision in ("int8", "uint8"):
        expected = library.util.quantize_embeddings(vectors, precision)
        assert np.array_equal(quantized(vectors, precision), expected)
    assert np.abs(ours.similarity(vectors, vectors) - theirs.similarity(vectors, vectors).numpy()).max() < 1e-6
    pairs = library.CrossEncoder(str(folders[1].parent / "theirs"), device="cpu")
    ranker, documents = zoo.pipeline(folders[1], "fp32"), [pair[0] for pair in PAIRS]
    for result, expected in zip(
        ranker.rank("the cat", documents), pairs.rank("the cat", documents, return_documents=False), strict=True
    ):
        assert result["corpus_id"] == expected["corpus_id"]
        assert result["score"] == pytest.approx(expected["score"], abs=1e-5)


@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_run_divides_texts_into_chunks(encoder, tmp_path: Path, pooling: str) -> None:
    long = "the cat sat, and the zoo ran. " * 9
    texts = ["a cat", long, "", long * 30, "b"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    options = {"chunk": 20, "stride": 4, "chunk_pooling": pooling}
    report = encoder.run(str(tmp_path / "texts.txt"), tmp_path / "out.parquet", **options)
    valid = [text for text in texts if text]
    vectors, chunks = encoder.encode_chunks(valid, 20, 4, pooling)
    table = parquet.read_table(tmp_path / "out.parquet")
    numbers = np.array([1, 2, 4, 5])
    expected = (numbers[chunks.rows] if pooling == "none" else numbers).tolist()
    kept = [i for i, row in enumerate(table["row"].to_pylist()) if row != 3]
    assert [table["row"][i].as_py() for i in kept] == expected and len(kept) == len(table) - 1
    stored = np.array([table["embedding"][i].as_py() for i in kept], np.float32)
    assert np.abs(stored - vectors).max() < 1e-6
    assert report["texts"] == 4 and report["skipped"] == 1 and report["chunks"] == len(chunks.texts)
    assert report["cut"] == 0 and encoder.chunks is None


def test_chunks_without_a_place_for_their_rows_are_refused(encoder, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a cat\n" * 3)
    for output, options in (
        ("out.npy", {"chunk": 20}),
        ("out.parquet", {"chunk": 20, "stride": 18}),
        ("out.parquet", {"chunk": 81}),
        ("out.parquet", {"stride": 3}),
        ("out.parquet", {"chunk": 20, "chunk_pooling": "max"}),
    ):
        with pytest.raises(RequestError, match="expected|add --chunk TOKENS"):
            encoder.run(str(tmp_path / "texts.txt"), tmp_path / output, **options)
        assert not (tmp_path / output).exists()
    with pytest.raises(RequestError, match="found max length 0"):
        encoder.run(str(tmp_path / "texts.txt"), tmp_path / "out.npy", chunk=0)
    encoder.run(str(tmp_path / "texts.txt"), tmp_path / "out.npy", chunk=20, chunk_pooling="mean")
    assert np.load(tmp_path / "out.npy").shape == (3, 32)
