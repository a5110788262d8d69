"""Static embeddings in the layouts of sentence-transformers and model2vec: means of the rows of a table."""

import json

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers", reason="needs the texts extra")
safetensors = pytest.importorskip("safetensors.numpy", reason="needs the texts extra")

from helpers import text_models  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402

WIDTH = 64
EMPTY, UNKNOWN = "\u0301", "漢字 the 🙂"  # texts without a token, and with unknown ones
TEXTS = [*text_models.TEXTS, EMPTY, UNKNOWN, "漢字", "the cat sat " * 3000]  # the last one is above the limit


def tokenizer():
    """The tokenizer of other tests, with a limit and special tokens, which static embeddings have none of."""
    made = text_models.tokenizer()
    made.enable_padding()
    return made


def write(folder, table, layout="st", **more):
    """Writes a folder as a library does: "st" or "model2vec", or that of model2vec without modules, "bare"."""
    place = folder / "0_StaticEmbedding" if layout == "st" else folder
    place.mkdir(parents=True)
    tokenizer().save(str(place / "tokenizer.json"))
    name = "embedding.weight" if layout == "st" else "embeddings"
    safetensors.save_file({name: table, **more}, place / "model.safetensors")
    if layout != "st":
        about = {"model_type": "model2vec", "architectures": ["StaticModel"], "hidden_dim": WIDTH, "normalize": True}
        (folder / "config.json").write_text(json.dumps(about))
    if layout != "bare":
        kinds = [("StaticEmbedding", "0_StaticEmbedding" if layout == "st" else "."), ("Normalize", "1_Normalize")]
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds[: 1 if layout == "st" else 2])
        ]
        (folder / "modules.json").write_text(json.dumps(modules))


def expected(texts, table, *, unknown=True, normalize=False):
    """Means of the rows of the tokens, without special tokens; zeros for a text without tokens."""
    made, rows = text_models.tokenizer(), []
    for encoding in made.encode_batch(texts, add_special_tokens=False):
        ids = [i for i in encoding.ids if unknown or i != made.token_to_id("[UNK]")][:8192]
        rows.append(table[ids].mean(0, np.float64) if ids else np.zeros(table.shape[1]))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True) if normalize else 1
    return np.stack(rows) / np.maximum(lengths, 1e-12)


def table(rows=None, seed=0):
    count = rows or text_models.tokenizer().get_vocab_size()
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def assert_equal(found, wanted):
    """Float32 sums of 8,192 rows are rounded more."""
    errors = np.abs(found - wanted).max(1)
    assert errors[:-1].max() < 1e-6 and errors[-1] < 1e-4


def cosines(found, wanted):
    sizes = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return ((found * wanted).sum(1) / np.maximum(sizes, 1e-12))[sizes > 0]


@pytest.mark.parametrize("layout", ["st", "model2vec", "bare"])
def test_vectors_are_the_means_of_rows(tmp_path, layout):
    write(tmp_path / "theirs", table(), layout)
    assert zoo.import_model(tmp_path / "theirs", tmp_path / "ours")["family"] == "sentence-encoder"
    wanted = expected(TEXTS, table(), unknown=layout == "st", normalize=layout != "st")
    rows = [(text,) for text in TEXTS]
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts(rows)
    assert_equal(vectors, wanted)
    for engine in ("native", "onnxruntime"):
        opened = zoo.pipeline(tmp_path / "ours", "int8", engine)
        vectors = opened.compute_texts(rows)
        assert opened.engine == engine and cosines(vectors, wanted).min() > 0.999
        assert not vectors[TEXTS.index(EMPTY)].any()
        alone = np.concatenate([opened.compute_texts([row]) for row in rows])
        assert np.array_equal(vectors, alone) if engine == "native" else np.allclose(vectors, alone, atol=1e-5)


def test_tokens_that_share_rows_have_their_own_factors(tmp_path):
    rows, rng = table(7), np.random.default_rng(1)
    count = text_models.tokenizer().get_vocab_size()
    mapping, factors = rng.integers(0, 7, count), rng.random(count, np.float32)
    write(tmp_path / "theirs", rows.astype(np.float16), "model2vec", mapping=mapping, weights=factors)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    whole = rows.astype(np.float16).astype(np.float32)[mapping] * factors[:, None]
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    assert_equal(vectors, expected(TEXTS, whole, unknown=False, normalize=True))


def test_truncated_dimensions_and_the_limit_of_the_tokenizer(tmp_path):
    write(tmp_path / "theirs", table())
    (tmp_path / "theirs" / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 16}))
    file = tmp_path / "theirs" / "0_StaticEmbedding" / "tokenizer.json"
    limited = tokenizers.Tokenizer.from_file(str(file))
    limited.enable_truncation(4)
    limited.save(str(file))
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    results = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")("the cat sat the cat sat")
    wanted = table()[text_models.tokenizer().encode("the cat sat the", add_special_tokens=False).ids[:4]].mean(0)
    assert results[0]["cut"] and np.allclose(results[0]["embedding"], wanted[:16], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "there is no tokenizer.json"),
        (
            lambda folder: safetensors.save_file({"other": table()}, folder / "model.safetensors"),
            "has other; expected a table named embedding.weight",
        ),
        (
            lambda folder: safetensors.save_file({"embeddings": table()[:-1]}, folder / "model.safetensors"),
            "is of another model",
        ),
        (
            lambda folder: safetensors.save_file(
                {"embeddings": table(), "mapping": np.arange(1, 99)}, folder / "model.safetensors"
            ),
            "maps tokens to other rows",
        ),
        (
            lambda folder: safetensors.save_file(
                {"embeddings": table(), "weights": np.ones(3, np.float32)}, folder / "model.safetensors"
            ),
            r"has weights \[3\], expected one for each",
        ),
    ],
)
def test_damaged_folders_are_refused(tmp_path, change, message):
    write(tmp_path / "theirs", table(), "model2vec")
    change(tmp_path / "theirs")
    with pytest.raises(RequestError, match=message):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
