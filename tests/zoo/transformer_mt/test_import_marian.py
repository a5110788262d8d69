"""Models of Marian, made here with random weights, and what Marian itself translates with them."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

import zoo
from pipelines.core.errors import RequestError
from pipelines.graph import io as graph_io
from pipelines.kernels import extension
from pipelines.kernels.transformer.from_graph import programs
from zoo.transformer_mt.data import END, START, padded
from zoo.transformer_mt.decode import Hypothesis, beam_search
from zoo.transformer_mt.importing import marian, marian_file, recognize
from zoo.transformer_mt.importing.imported import Imported
from zoo.transformer_mt.model import Transformer
from zoo.transformer_mt.shortlist import HEADER, MAGIC, SHORTLIST, Shortlist, checksum_of
from zoo.transformer_mt.vocabularies import PIECES, ImportedVocabulary

WIDTH, HIDDEN, PIECE_COUNT = 32, 48, 128
OPTIONS: dict[str, Any] = {
    "type": "transformer",
    "version": "v1.12.42 b7be0e964 2025-05-24",
    "bert-train-type-embeddings": True,
    "bert-type-vocab-size": 2,
    "dec-cell": "gru",
    "dec-cell-base-depth": 2,
    "dec-cell-high-depth": 1,
    "dec-depth": 2,
    "dim-emb": WIDTH,
    "dim-rnn": 1024,
    "dim-vocabs": [PIECE_COUNT, PIECE_COUNT],
    "enc-cell": "gru",
    "enc-cell-depth": 1,
    "enc-depth": 2,
    "enc-type": "bidirectional",
    "factors-combine": "sum",
    "factors-dim-emb": 0,
    "input-types": [],
    "layer-normalization": False,
    "lemma-dependency": "",
    "lemma-dim-emb": 0,
    "output-omit-bias": False,
    "right-left": False,
    "skip": False,
    "tied-embeddings": False,
    "tied-embeddings-all": False,
    "tied-embeddings-src": False,
    "transformer-aan-activation": "swish",
    "transformer-aan-depth": 2,
    "transformer-aan-nogate": False,
    "transformer-attention-mask": "default",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-decoder-dim-ffn": 0,
    "transformer-decoder-ffn-depth": 0,
    "transformer-dim-aan": 64,
    "transformer-dim-ffn": HIDDEN,
    "transformer-disable-position-embeddings": False,
    "transformer-ffn-activation": "swish",
    "transformer-ffn-depth": 2,
    "transformer-guided-alignment-layer": "last",
    "transformer-heads": 4,
    "transformer-no-affine": False,
    "transformer-no-bias": False,
    "transformer-no-projection": False,
    "transformer-pool": False,
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-preprocess": "",
    "transformer-rnn-projection": False,
    "transformer-tied-layers": [],
    "transformer-train-position-embeddings": False,
    "ulr": False,
    "ulr-dim-emb": 0,
    "ulr-trainable-transformation": False,
}
SSRU = {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}
AVERAGE = {"transformer-decoder-autoreg": "average-attention"}
ALL = {"tied-embeddings-all": True}
MODELS: dict[str, dict[str, Any]] = {
    "ssru": {**SSRU, **ALL},
    "attention": {**ALL, "transformer-ffn-activation": "relu", "enc-depth": 3, "dec-depth": 1},
    "average": {**AVERAGE, "tied-embeddings": True},
    "untied": {**SSRU, "transformer-decoder-dim-ffn": 64, "transformer-ffn-activation": "gelu"},
    "tied source": {"tied-embeddings-src": True, "tied-embeddings": True, "transformer-postprocess-emb": "dn"},
    "tied source alone": {
        **SSRU,
        "tied-embeddings-src": True,
        "output-omit-bias": True,
        "transformer-no-projection": True,
    },
    "before": {
        **SSRU,
        **ALL,
        "transformer-preprocess": "n",
        "transformer-postprocess": "da",
        "transformer-postprocess-top": "n",
        "transformer-tied-layers": [1, 1],
    },
}


def words(count: int, seed: int) -> list[str]:
    """Sentences of made-up words."""
    draw = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    known = ["".join(draw.choices(syllables, k=draw.randint(2, 4))) for _ in range(200)]
    return [" ".join(draw.choices(known, k=draw.randint(1, 9))) for _ in range(count)]


torch.set_num_threads(1)
TEXTS = words(40, 1)


def pieces(path: Path, seed: int) -> None:
    """A vocabulary as Marian trains it."""
    model = io.BytesIO()
    special = {"eos_id": 0, "unk_id": 1, "bos_id": -1, "pad_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words(400, seed) + TEXTS),
        model_writer=model,
        vocab_size=PIECE_COUNT,
        minloglevel=2,
        **special,
    )
    path.write_bytes(model.getvalue())


def weights(options: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by the names that Marian gives them."""
    draw, found = np.random.default_rng(seed), dict[str, np.ndarray]()

    def linear(prefix: str, suffix: str, rows: int, columns: int, bias: bool = True) -> None:
        found[f"{prefix}_W{suffix}"] = draw.uniform(-1, 1, (rows, columns)) * (6 / (rows + columns)) ** 0.5
        if bias:
            found[f"{prefix}_b{suffix}"] = draw.normal(0, 0.1, (1, columns))

    def norm(prefix: str, suffix: str = "") -> None:
        found[f"{prefix}_ln_scale{suffix}"] = draw.normal(1, 0.1, (1, WIDTH))
        found[f"{prefix}_ln_bias{suffix}"] = draw.normal(0, 0.1, (1, WIDTH))

    before = "n" in options["transformer-preprocess"]

    def around(first: str, last: str = "") -> None:
        norm(first if before else last or first, "_pre" if before else "")

    def attention(prefix: str) -> None:
        for part in "qkv" if options["transformer-no-projection"] else "qkvo":
            linear(prefix, part, WIDTH, WIDTH)
        around(f"{prefix}_Wo")

    def feed(prefix: str, hidden: int) -> None:
        linear(prefix, "1", WIDTH, hidden)
        linear(prefix, "2", hidden, WIDTH)
        around(f"{prefix}_ffn")

    for i in range(1, options["enc-depth"] + 1):
        attention(f"encoder_l{i}_self")
        feed(f"encoder_l{i}_ffn", options["transformer-dim-ffn"])
    for i in sorted(set(options["transformer-tied-layers"] or range(1, options["dec-depth"] + 1))):
        layer = f"decoder_l{i}"
        if options["transformer-decoder-autoreg"] == "rnn":
            linear(f"{layer}_rnn", "", WIDTH, WIDTH, bias=False)
            linear(f"{layer}_rnn", "f", WIDTH, WIDTH)
            around(f"{layer}_rnn", f"{layer}_rnn_ffn")
        elif options["transformer-decoder-autoreg"] == "average-attention":
            linear(f"{layer}_aan", "1", WIDTH, options["transformer-dim-aan"])
            linear(f"{layer}_aan", "2", options["transformer-dim-aan"], WIDTH)
            linear(f"{layer}_aan", "i", WIDTH, WIDTH)
            linear(f"{layer}_aan", "f", WIDTH, WIDTH)
            around(f"{layer}_aan_ffn")
        else:
            attention(f"{layer}_self")
        attention(f"{layer}_context")
        feed(f"{layer}_ffn", options["transformer-decoder-dim-ffn"] or options["transformer-dim-ffn"])
    for side in ("encoder", "decoder"):
        if "n" in options["transformer-postprocess-emb"]:
            norm(f"{side}_emb", "_pre")
        if "n" in options["transformer-postprocess-top"]:
            norm(f"{side}_top")
    everywhere = options["tied-embeddings-all"]
    for name in ["Wemb"] if everywhere or options["tied-embeddings-src"] else ["encoder_Wemb", "decoder_Wemb"]:
        found[name] = draw.normal(0, 0.3, (PIECE_COUNT, WIDTH))
    if not everywhere and not options["tied-embeddings"]:
        found["decoder_ff_logit_out_Wt"] = draw.normal(0, 0.3, (PIECE_COUNT, WIDTH))
    if not options["output-omit-bias"]:
        bias = draw.normal(0, 0.3, (1, PIECE_COUNT))
        bias[0, 0] += 3  # the end comes before the limit, mostly
        found["decoder_ff_logit_out_b"] = bias
    return {name: each.astype(np.float32) for name, each in found.items()}


def folder_of(path: Path, changed: Mapping[str, Any], seed: int = 0, **more: Any) -> Path:
    """A folder with a model: the options with what is `changed`, and `more` files of YAML."""
    path.mkdir(parents=True, exist_ok=True)
    options = {**OPTIONS, **changed}
    shared = options["tied-embeddings-all"] or options["tied-embeddings-src"]
    for i, name in enumerate(["vocab.spm"] if shared else ["srcvocab.spm", "trgvocab.spm"]):
        pieces(path / name, i)
    text = np.frombuffer(json.dumps(options).encode() + b"\0", np.int8)
    np.savez(path / "model.npz", **weights(options, seed), **{marian_file.CONFIG: text})
    for name, values in more.items():
        (path / f"{name}.yml").write_text("".join(f"{key}: {json.dumps(each)}\n" for key, each in values.items()))
    return path


def network(found: Imported) -> tuple[Transformer, ImportedVocabulary]:
    """What was read, as modules."""
    sizes = [len(each) for each in found.pieces]
    model = Transformer(found.form, sizes[-1], pre_norm=found.pre_norm, dropout=0.0, source_vocabulary=sizes[0])
    model.load_state_dict({key: torch.from_numpy(each) for key, each in found.state.items()})
    texts = dict(zip(("source", "target"), found.pieces, strict=False))
    return model.eval(), ImportedVocabulary(found.framing, {**found.files, PIECES: json.dumps(texts).encode()})


@torch.inference_mode()
def search(found: Imported, texts: Sequence[str], beam: int, **rules: Any) -> list[list[tuple[str, float]]]:
    """Texts and scores of the `beam` best translations of every text."""
    model, vocabulary = network(found)
    shortlist = Shortlist.from_bytes(found.files[SHORTLIST]) if SHORTLIST in found.files else None
    changed = dataclasses.replace(found.rules, **rules)
    tokens = vocabulary.encode(texts)
    limits = np.array([changed.limit(len(each), 512) for each in tokens])
    allowed = [shortlist.allowed(each.tolist()) for each in tokens] if shortlist else None
    options = {
        "beam": beam,
        "best": beam,
        "length_penalty": changed.length_penalty,
        "rules": changed,
        "allowed": allowed,
    }
    given: list[list[Hypothesis]] = beam_search(
        model.begin(torch.from_numpy(padded(tokens))), limits, start=START, end=END, **options
    )
    return [[(vocabulary.decode([one.tokens])[0], one.score) for one in each] for each in given]


def theirs(folder: Path, texts: Sequence[str], beam: int, **options: Any) -> list[list[tuple[str, float]]]:
    """The same by Marian itself."""
    pymarian = pytest.importorskip("pymarian", reason="Marian's Translator (pip install pymarian: Python 3.11 alone)")
    files = sorted(folder.glob("*vocab.*"))
    names = [files[0].name, files[-1].name]
    translator = pymarian.Translator(
        models=[str(folder / options.pop("model", "model.npz"))],
        vocabs=[str(folder / each) for each in names],
        beam_size=beam,
        n_best="true",
        cpu_threads=1,
        mini_batch=1,
        workspace=64,
        quiet="true",
        quiet_translation="true",
        **options,
    )
    found: list[list[tuple[str, float]]] = [[] for _ in texts]
    for line in translator.translate("\n".join(texts)).splitlines():
        number, text, *_, score = line.split(" ||| ")
        found[int(number)].append((text.strip(), float(score)))
    return found


def agree(ours: list[list[tuple[str, float]]], given: list[list[tuple[str, float]]]) -> None:
    """Assert equal texts, of hundreds but for ties of one in 200, and scores within 1e-4."""
    different = []
    for one, other in zip(ours, given, strict=True):
        np.testing.assert_allclose([score for _, score in one], [score for _, score in other], rtol=1e-4, atol=1e-4)
        different += [(one, other)] if [text for text, _ in one] != [text for text, _ in other] else []
    assert len(different) <= len(ours) // 200, different


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_translations_of_many_sentences_equal_marians(name: str, tmp_path: Path) -> None:
    folder, texts = folder_of(tmp_path, MODELS[name], seed=1), words(500, 2)
    found = marian.read(folder)
    agree(search(found, texts, 1, length_penalty=0.0), theirs(folder, texts, 1))
    agree(search(found, texts, 4, length_penalty=1.0), theirs(folder, texts, 4, normalize=1.0))


@pytest.mark.parametrize("name", ["ssru", "attention", "average"])
def test_an_imported_folder_translates_as_marian_does(name: str, tmp_path: Path) -> None:
    """Through the frozen graph, its step with caches, and the pipeline."""
    decoder = {"models": ["model.npz"], "beam-size": 3, "normalize": 1.0, "shortlist": ["lex.s2t", 11, 5, 0.2]}
    folder = folder_of(tmp_path / "original", MODELS[name], decoder=decoder)
    path = folder / "lex.s2t"
    path.write_text("".join(f"{to} {of} {probability}\n" for to, of, probability in lexicon(folder)))
    report = zoo.import_model(folder, tmp_path / "imported")
    assert (report["format"], report["imported"]["version"]) == ("marian", "v1.12.42")
    pipeline = zoo.pipeline(tmp_path / "imported", "fp32")
    assert (pipeline.engine, pipeline.beam) == ("onnxruntime", 3)
    given = theirs(folder, TEXTS, 3, normalize=1.0, shortlist=[str(path), "11", "5", "0.2"])
    found = pipeline(TEXTS)
    agree([[(each["translation"], each["score"])] for each in found], [each[:1] for each in given])


@pytest.mark.skipif(not extension.isas(), reason="the native kernels are not built")
def test_an_imported_folder_becomes_int8(tmp_path: Path) -> None:
    """By ranges of some text, in native code, whose activations are float between int8 layers."""
    folder = folder_of(tmp_path / "original", MODELS["ssru"])
    zoo.import_model(folder, tmp_path / "imported")
    (tmp_path / "text").write_text("\n".join(TEXTS))
    zoo.calibrate(tmp_path / "imported", str(tmp_path / "text"))
    zoo.build(tmp_path / "imported")
    found, wanted = (zoo.pipeline(tmp_path / "imported", precision) for precision in ("int8", "fp32"))
    assert (found.engine, found.rules.kind) == ("native", "marian")
    found.beam = wanted.beam = 1
    scores = [[each["score"] for each in one(TEXTS)] for one in (found, wanted)]
    assert np.corrcoef(*scores)[0, 1] > 0.8


@pytest.mark.parametrize("name", MODELS)
def test_translations_equal_marians(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS[name])
    found = marian.read(folder)
    agree(search(found, TEXTS, 1, length_penalty=0.0), theirs(folder, TEXTS, 1))
    agree(search(found, TEXTS, 4, length_penalty=0.6), theirs(folder, TEXTS, 4, normalize=0.6))


def test_rules_of_the_search_equal_marians(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS["ssru"])
    found = marian.read(folder)
    options = {"normalize": 1.0, "word_penalty": 0.3, "max_length_factor": 0.7}
    agree(
        search(found, TEXTS, 3, length_penalty=1.0, word_penalty=0.3, growth=0.7), theirs(folder, TEXTS, 3, **options)
    )


def lexicon(folder: Path, seed: int = 0) -> list[tuple[str, str, float]]:
    """Target pieces, source pieces and probabilities, made up."""
    draw = random.Random(seed)
    sides = [sentencepiece.SentencePieceProcessor(model_file=str(each)) for each in sorted(folder.glob("*.spm"))]
    source, target = ([side.id_to_piece(i) for i in range(len(side))] for side in (sides[0], sides[-1]))
    return [
        (to, of, round(draw.random(), 4))
        for of in source
        if of != "<unk>"
        for to in draw.sample(target[2:], draw.randint(0, 9))
    ] + [("NULL", source[9], 0.5), (target[9], "NULL", 0.5)]


@pytest.mark.parametrize("name", ["ssru", "average"])
@pytest.mark.parametrize("binary", [False, True])
def test_translations_with_a_shortlist_equal_marians(name: str, binary: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS[name], decoder={"models": ["model.npz"], "shortlist": ["lex.s2t", 11, 5, 0.2]})
    path = folder / "lex.s2t"
    path.write_text("".join(f"{to} {of} {probability}\n" for to, of, probability in lexicon(folder)))
    if binary:
        names = sorted(str(each) for each in folder.glob("*.spm"))
        marian_itself("convert", "-s", path, "11", "5", "0.2", "-d", folder / "lex.bin", "-V", names[0], names[-1])
        path.unlink()
        path = folder / "lex.bin"
        (folder / "decoder.yml").unlink()
    options: dict[str, Any] = {"shortlist": [str(path)] if binary else [str(path), "11", "5", "0.2"]}
    found = marian.read(folder)
    agree(search(found, TEXTS, 1, length_penalty=0.0), theirs(folder, TEXTS, 1, **options))
    agree(search(found, TEXTS, 4, length_penalty=0.6), theirs(folder, TEXTS, 4, normalize=0.6, **options))


def marian_itself(*arguments: object) -> None:
    """Run Marian's own tool, where it is installed."""
    pytest.importorskip("pymarian", reason="Marian's tools (pip install pymarian: Python 3.11 alone)")
    subprocess.run([sys.executable, "-m", "pymarian", *map(str, arguments)], check=True, capture_output=True)


def binary(tensors: Mapping[str, np.ndarray], options: Mapping[str, Any], kind: int = 0x4101) -> bytes:
    """A .bin as Marian writes it, with int8 matrices; kind: their type. Tables are int8 in those of Bergamot."""
    parts = []
    for name, values in tensors.items():
        table = "Wemb" in name
        if name.rpartition("_")[2][:1] == "W" if not table else kind == 0x4101:
            multiplier = 127 / np.abs(values).max()
            integers = np.rint((values if table else values.T) * multiplier).astype(np.int8)
            content = integers.tobytes() + struct.pack("<f", multiplier)
            parts.append((name, kind, values.shape, content))
            parts.append((f"{name}_QuantMultA", 0x404, (1,), struct.pack("<f", 9.5)))
        else:
            parts.append((name, 0x404, values.shape, values.astype("<f4").tobytes()))
    text = json.dumps(options).encode() + b"\0"
    parts.append((marian_file.CONFIG, 0x101, (len(text),), text))
    parts = [(name, kind, shape, content + bytes(-len(content) % 256)) for name, kind, shape, content in parts]
    made = struct.pack("<QQ", 1, len(parts))
    for name, kind, shape, content in parts:
        made += struct.pack("<4Q", len(name.encode()) + 1, kind, len(shape), len(content))
    made += b"".join(name.encode() + b"\0" for name, *_ in parts)
    made += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in parts)
    padding = -(len(made) + 8) % 256
    return made + struct.pack("<Q", padding) + bytes(padding) + b"".join(content for *_, content in parts)


@pytest.mark.parametrize("kind", [0x4101, 0x10001])
@pytest.mark.parametrize("name", ["ssru", "untied"])
def test_int8_weights_are_read_with_their_multipliers(name: str, kind: int, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS[name])
    options = {**OPTIONS, **MODELS[name]}
    originals = marian.read(folder).state
    (folder / "model.npz").rename(tmp_path / "model.txt")
    (folder / "model.ende.intgemm.bin").write_bytes(binary(weights(options), options, kind))
    found = marian.read(folder)
    matrices = {key for key, each in originals.items() if each.ndim == 2}
    tables = {"embedding.weight", "source_embedding.weight"}
    quantized = matrices if kind == 0x4101 else matrices - tables
    assert found.about["int8"] == f"{len(quantized)} matrices"
    multiplied = quantized - tables if name == "untied" else quantized
    assert found.magnitudes == dict.fromkeys(multiplied, pytest.approx(127 / 9.5))
    for key, each in found.state.items():
        if key in quantized:
            step = np.abs(originals[key]).max() / 127
            np.testing.assert_allclose(each / step, np.rint(each / step), atol=1e-4)
            np.testing.assert_allclose(each, originals[key], atol=0.51 * step)
        else:
            np.testing.assert_array_equal(each, originals[key])
    assert (found.languages, found.rules) == ("en-de", marian.FIREFOX)


def test_int8_files_of_marian_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS["untied"])
    marian_itself("convert", "-f", folder / "model.npz", "-t", folder / "their.bin", "-g", "intgemm8")
    (folder / "ours.bin").write_bytes(binary(weights(options := {**OPTIONS, **MODELS["untied"]}), options, 0x10001))
    theirs_, ours = (marian.read(folder / name) for name in ("their.bin", "ours.bin"))
    for key, each in ours.state.items():
        np.testing.assert_allclose(theirs_.state[key], each, rtol=1e-6)
    assert theirs_.about["int8"] == ours.about["int8"] and not theirs_.magnitudes and ours.magnitudes


@pytest.mark.skipif(not extension.isas(), reason="the native kernels are not built")
def test_int8_weights_stay_as_they_are(tmp_path: Path) -> None:
    """In int8.onnx and in native code, with their steps; the file's multipliers say how what they multiply is scaled."""
    changed = {**MODELS["ssru"], "transformer-heads": 2}  # of 16 columns, which native code does not pad
    folder, options = folder_of(tmp_path / "original", changed), {**OPTIONS, **changed}
    originals, imported = weights(options), tmp_path / "imported"
    (folder / "model.npz").unlink()
    (folder / "model.ende.intgemm.bin").write_bytes(binary(originals, options))
    zoo.import_model(folder, imported)
    (tmp_path / "text").write_text("\n".join(TEXTS))
    zoo.calibrate(imported, str(tmp_path / "text"))
    zoo.build(imported)

    wanted: dict[bytes, float] = {}
    for name, each in originals.items():
        if name.rpartition("_")[2].startswith("W"):
            step = np.abs(each).max() / 127
            integers = np.rint(each / step).astype(np.int8)
            for column in integers if "Wemb" in name else integers.T:
                wanted[column.tobytes()] = step / 4 if name.endswith("_Wq") else step  # attention's 1 / sqrt(16)
    encoder, decoder = programs(graph_io.load(imported / "int8.onnx"))
    layers = [each.layer for each in (*encoder.operations, *decoder.operations) if hasattr(each, "layer")]
    assert len(layers) == 2 * 4 + 2 * 6 + 1
    for layer in layers:
        for column, scale in zip(layer.weight.T, layer.scale.tolist(), strict=True):
            if column.any():
                assert scale == pytest.approx(wanted[np.ascontiguousarray(column).tobytes()], rel=1e-5)
        assert layer.qparams is not None and layer.qparams.scale == pytest.approx(
            127 / 9.5 / (127.5 if layer.qparams.zero_point else 255), rel=1e-2
        )


def test_a_binary_shortlist(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS["ssru"])
    lists = [[i % 7, i] if i % 3 else [] for i in range(PIECE_COUNT)]
    offsets = np.cumsum([0, *map(len, lists)]).astype("<u8").tobytes()
    body = offsets + np.array([each for one in lists for each in one], "<u4").tobytes()

    def made(words: int = PIECE_COUNT + 1) -> bytes:
        rest = struct.pack("<4Q", 10, 2, words, sum(map(len, lists))) + body
        return struct.pack("<QQ", MAGIC, checksum_of(bytes(16) + rest)) + rest

    content = made()
    (folder / "lex.50.50.ende.s2t.bin").write_bytes(content)
    found = Shortlist.from_bytes(marian.read(folder).files[SHORTLIST])
    _, vocabulary = network(marian.read(folder))
    assert set(found.allowed(vocabulary.encode([""])[0].tolist())) >= {1, 3, *range(4, 12)}
    for damage, why in (
        (content[:-4], "it has"),
        (content[:-1] + b"\1", "its checksum is another"),
        (made(PIECE_COUNT)[: HEADER.size], "it has"),
    ):
        (folder / "lex.50.50.ende.s2t.bin").write_bytes(damage)
        with pytest.raises(RequestError, match=why):
            marian.read(folder)


@pytest.mark.parametrize("cut", [False, True])
def test_a_vocabulary_of_yaml(cut: bool, tmp_path: Path) -> None:
    """With and without models of sentencepiece that cut the text before; words such as no and 1 stay words."""
    folder = folder_of(tmp_path, MODELS["ssru"])
    content = (folder / "vocab.spm").read_bytes()
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    known = [model.id_to_piece(i) for i in range(PIECE_COUNT)]
    known[5:8] = ["no", "1", "~"]
    known[11], known[0] = 'a"b: c', "</s>"
    (folder / "vocab.spm").unlink()
    text = "".join(
        f"{each if each in ('no', '1') else json.dumps(each)}: {i}\n" for i, each in enumerate(known)
    ).encode()
    (folder / "vocab.yml").write_bytes(text)
    if cut:
        for side in ("source", "target"):
            (folder / f"{side}.spm").write_bytes(content)
    texts = TEXTS if cut else [" ".join(model.encode(each, out_type=str)) for each in TEXTS] + ["no 1 nowhere ~ no"]
    given = [" ".join(model.encode(each, out_type=str)) for each in TEXTS] if cut else texts
    found = marian.read(folder)
    ours = search(found, texts, 2, length_penalty=1.0)
    wanted = theirs(folder, given, 2, normalize=1.0)
    if cut:
        wanted = [[(model.decode_pieces(text.split()), score) for text, score in each] for each in wanted]
    agree(ours, wanted)


def changed_bytes(path: Path, **arrays: Any) -> None:
    """Change arrays of an npz; None leaves one out."""
    with np.load(path, allow_pickle=True) as archive:
        found = {name: archive[name] for name in archive.files} | arrays
    np.savez(path, **{name: each for name, each in found.items() if each is not None})


def test_every_fault_is_listed_by_its_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS["ssru"])
    wrong = {
        "transformer-ffn-activation": "tanh",
        "transformer-ffn-depth": 3,
        "dec-cell": "gru",
        "transformer-postprocess": "dhn",
        "transformer-postprocess-top": "a",
        "lemma-dim-emb": 8,
        "right-left": True,
    }
    text = json.dumps({**OPTIONS, **MODELS["ssru"], **wrong}).encode()
    changed_bytes(folder / "model.npz", **{marian_file.CONFIG: np.frombuffer(text, np.int8)})
    with pytest.raises(RequestError) as error:
        marian.read(folder)
    assert all(name in str(error.value) for name in wrong) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"decoder_l1_rnn_W": None}, "decoder_l1_rnn_W is missing"),
        ({"decoder_l1_rnn_W": np.zeros((3, 4), np.float32)}, "decoder_l1_rnn_W is 3 x 4, wanted 32 x 32"),
        ({"decoder_l1_rnn_W": np.full((32, 32), np.nan, np.float32)}, "decoder_l1_rnn_W holds NaN"),
        ({"decoder_l9_rnn_W": np.zeros((3, 4), np.float32)}, "decoder_l9_rnn_W, which is not known"),
        ({"Wemb": np.zeros((50, 32), np.float32)}, "the vocabulary has 128 pieces, the weights 50"),
        ({"Wpos": np.zeros((50, 32), np.float32)}, "transformer-train-positions"),
        ({"Wemb": np.array([len], object)}, "damaged"),
        ({marian_file.CONFIG: None}, "model.npz.yml"),
        ({marian_file.CONFIG: np.frombuffer(b"a: [", np.int8)}, "no YAML"),
        ({marian_file.CONFIG: np.frombuffer(b"!!python/object/apply:os.system [ls]", np.int8)}, "no YAML"),
    ],
)
def test_wrong_weights_are_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS["ssru"])
    changed_bytes(folder / "model.npz", **change)
    assert recognize(folder) == "marian"
    with pytest.raises(RequestError, match=why):
        marian.read(folder)


@pytest.mark.parametrize("name", ["attention", "average"])
def test_layers_that_normalize_before_are_refused_where_they_differ(name: str, tmp_path: Path) -> None:
    before = {"transformer-preprocess": "n", "transformer-postprocess": "da"}
    with pytest.raises(RequestError, match="transformer-preprocess: n with transformer-decoder-autoreg: "):
        marian.read(folder_of(tmp_path, {**MODELS[name], **before}))
    with pytest.raises(RequestError, match=r"transformer-preprocess: n of Marian v1\.9\.1"):
        marian.read(folder_of(tmp_path, {**MODELS["before"], "version": "v1.9.1"}))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS["ssru"])
    options = {**OPTIONS, **MODELS["ssru"]}
    content = binary(weights(options), options)
    (folder / "model.npz").unlink()
    for size in (9, 40, 500, 3000, len(content) - 300):
        (folder / "model.bin").write_bytes(content[:size])
        with pytest.raises(RequestError, match=r"model.bin is damaged"):
            marian.read(folder)
    (folder / "model.bin").write_bytes(content)
    assert marian.read(folder).rules.kind == "marian"
    (folder / "model.bin").write_bytes(b"\1" + b"\377" * 4000)
    with pytest.raises(RequestError, match="found no model"):
        marian.read(folder)


def test_what_is_missing_beside_a_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS["ssru"], decoder={"models": ["a.npz", "b.npz"]})
    with pytest.raises(RequestError, match="ensemble"):
        marian.read(folder)
    (folder / "decoder.yml").write_text("models: [model.npz]\nbeam-size: many\nvocabs: [vocab.spm, vocab.spm]\n")
    with pytest.raises(RequestError, match="beam-size is many"):
        marian.read(folder)
    (folder / "decoder.yml").write_text("models: [model.npz]\nbeam-size: 6\nnormalize: 0.6\nallow-unk: true\n")
    rules = marian.read(folder / "model.npz").rules
    assert (rules.beam, rules.length_penalty, rules.banned, rules.growth) == (6, 0.6, (), 3.0)
    (folder / "vocab.spm").write_bytes(b"no model")
    with pytest.raises(RequestError, match="vocab.spm is no vocabulary"):
        marian.read(folder)
    (folder / "vocab.spm").unlink()
    with pytest.raises(RequestError, match="found the vocabularies none"):
        marian.read(folder)
    with pytest.raises(RequestError, match="--source-language"):
        marian.read(folder, source_language="en")
