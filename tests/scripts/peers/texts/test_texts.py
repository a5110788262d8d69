"""The comparison of sentence encoders on a small graph, in onnxruntime alone."""

import functools
import importlib.util

import numpy as np
import onnx
import pytest

from pipelines.core import machine
from pipelines.core.errors import ZooError
from scripts.peers import processes
from scripts.peers.texts import encoders, runs, texts

tokenizers = pytest.importorskip("tokenizers", reason="needs the texts extra")
WORDS = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(40))]


@pytest.fixture
def folder(tmp_path):
    """tokenizer.json, and a graph of embeddings, a linear layer and the mean over tokens."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = """<ir_version: 8, opset_import: ["" : 17]>
    encoder (int64[n, t] input_ids, int64[n, t] attention_mask) => (float[n, 8] embedding) {
        tokens = Gather(table, input_ids)
        hidden = MatMul(tokens, weight)
        mask = Cast<to = 1>(attention_mask)
        wide = Unsqueeze(mask, last)
        masked = Mul(hidden, wide)
        embedding = ReduceMean<axes = [1], keepdims = 0>(masked)
    }"""
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    arrays = {"table": random.normal(size=(len(WORDS), 8)), "weight": random.normal(size=(8, 8))}
    constants = {name: array.astype(np.float32) for name, array in arrays.items()} | {"last": np.array([-1])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    onnx.save(model, tmp_path / "fp32.onnx")
    return tmp_path


def lines(count: int) -> list[str]:
    random = np.random.default_rng(1)
    return [" ".join(random.choice(WORDS[2:], random.integers(2, 9))) for _ in range(count)]


def test_ways_are_built_opened_compared_and_timed(folder, require_fields):
    names = ["onnxruntime-fp32", "onnxruntime-dynamic", "onnxruntime-static", "broken"]
    ways = {**encoders.WAYS, "broken": encoders.Encoder}
    with processes.Workers(folder) as workers:
        makers = {name: functools.partial(ways[name], folder, folder, lines(8)) for name in names}
        opened = runs.open_encoders(makers, lines(32), folder, workers)
        assert list(opened) == names[:3] and workers.live.keys() == opened.keys()
        assert workers.left_out == {"broken": "NotImplementedError: NotImplementedError"}
        assert all(0.9 < figures["cosine"] <= 1 for figures in opened.values())
        assert (folder / "dynamic.onnx").is_file() and (folder / "onnxruntime-static.built").is_file()
        load = texts.time_load("sentences", workers.live, lines(40), 2, lambda done: None)
        memory = workers.ask_all("memory")
    assert list(load["results"])[:2] == ["single", "unsorted"]
    assert all(result.keys() == opened.keys() for result in load["results"].values())
    figures = {name: {**result, "memory_mb": memory[name]} for name, result in opened.items()}
    report = {"loads": [load], "ways": figures, "left_out": workers.left_out, "bytes": {"fp32": 1, "int8": 1}}
    report["environment"] = machine.environment(threads=1, packages={})
    absent = (".left_out.*", ".ways.*.least_cosine", ".ways.*.cosine_below_99")
    require_fields(report, "scripts/peers/reports/texts-*.json", ways, absent)


def test_loads_are_sentences_paragraphs_and_both_mixed(folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    loads = texts.loads(lines(6000), tokenizer)
    assert {name: len(load) for name, load in loads.items()} == {"sentences": 512, "paragraphs": 64, "mixed": 64}
    sizes = [len(tokenizer.encode(paragraph).ids) for paragraph in loads["paragraphs"]]
    assert min(sizes) >= 95 and max(sizes) <= 310
    assert set(loads["mixed"]) <= {*loads["sentences"], *loads["paragraphs"]}


def test_vectors_that_are_missing_are_an_error(tmp_path):
    way = encoders.FastEmbed(tmp_path, tmp_path, [])  # any that takes texts
    way.run = lambda batch: np.ones((0, 4), np.float32)
    with pytest.raises(ZooError, match="returned 0 vectors of 2 texts"):
        way.vectors(["a", "b"])


def test_texts_are_taken_in_the_order_of_their_lengths(folder):
    way = encoders.OnnxRuntime(folder, folder, lines(8))
    way.open()
    assert way.vectors(lines(40)).shape == (40, 8)
    assert np.allclose(np.linalg.norm(way.vectors(lines(5)), axis=1), 1)
    assert len(way.time(lines(40), 32, True, True)) == 2


@pytest.mark.skipif(importlib.util.find_spec("nncf") is None, reason="needs the peers extra")
def test_nncf_quantizes_the_graph(folder):
    way = encoders.OpenVino(folder, folder, lines(20))
    way.build()
    way.open()
    assert way.vectors(lines(4)).shape == (4, 8)
