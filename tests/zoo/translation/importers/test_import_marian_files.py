"""Files of Marian: int8 weights with multipliers, binary shortlists, vocabularies, and every fault of theirs."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from helpers.marian_folders import (
    MODELS,
    OPTIONS,
    PIECE_COUNT,
    TEXTS,
    agree,
    binary,
    folder_of,
    marian_itself,
    network,
    search,
    theirs,
    weights,
)

import zoo
from pipelines.core.errors import RequestError
from pipelines.graph import io as graph_io
from pipelines.kernels import extension
from pipelines.kernels.transformer.mapping.from_graph import programs
from zoo.translation.importers import marian, marian_file, marian_folder, recognize
from zoo.translation.search.shortlist import HEADER, MAGIC, SHORTLIST, Shortlist, compute_checksum

torch.set_num_threads(1)


@pytest.mark.parametrize("kind", [0x4101, 0x10001])
@pytest.mark.parametrize("name", ["ssru", "untied"])
def test_int8_weights_are_read_with_their_multipliers(name: str, kind: int, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS[name])
    options = {**OPTIONS, **MODELS[name]}
    originals = marian.read(folder).state
    (folder / "model.npz").rename(tmp_path / "model.txt")
    (folder / "model.ende.intgemm.bin").write_bytes(binary(weights(options), options, kind))
    model = marian.read(folder)
    matrices = {key for key, matrix in originals.items() if matrix.ndim == 2}
    tables = {"embedding.weight", "source_embedding.weight"}
    quantized = matrices if kind == 0x4101 else matrices - tables
    assert model.about["int8"] == f"{len(quantized)} matrices"
    multiplied = quantized - tables if name == "untied" else quantized
    assert model.magnitudes == dict.fromkeys(multiplied, pytest.approx(127 / 9.5))
    for key, array in model.state.items():
        if key in quantized:
            step = np.abs(originals[key]).max() / 127
            np.testing.assert_allclose(array / step, np.rint(array / step), atol=1e-4)
            np.testing.assert_allclose(array, originals[key], atol=0.51 * step)
        else:
            np.testing.assert_array_equal(array, originals[key])
    assert (model.languages, model.rules) == ("en-de", marian.FIREFOX)


def test_int8_files_of_marian_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS["untied"])
    marian_itself("convert", "-f", folder / "model.npz", "-t", folder / "their.bin", "-g", "intgemm8")
    (folder / "ours.bin").write_bytes(binary(weights(options := {**OPTIONS, **MODELS["untied"]}), options, 0x10001))
    theirs_, ours = (marian.read(folder / name) for name in ("their.bin", "ours.bin"))
    for key, array in ours.state.items():
        np.testing.assert_allclose(theirs_.state[key], array, rtol=1e-6)
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
    for name, array in originals.items():
        if name.rpartition("_")[2].startswith("W"):
            step = np.abs(array).max() / 127
            integers = np.rint(array / step).astype(np.int8)
            for column in integers if "Wemb" in name else integers.T:
                wanted[column.tobytes()] = step / 4 if name.endswith("_Wq") else step  # attention's 1 / sqrt(16)
    encoder, decoder = programs(graph_io.load(imported / "int8.onnx"))
    layers = [
        operation.layer for operation in (*encoder.operations, *decoder.operations) if hasattr(operation, "layer")
    ]
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
    body = offsets + np.array([word for one in lists for word in one], "<u4").tobytes()

    def made(words: int = PIECE_COUNT + 1) -> bytes:
        content = struct.pack("<4Q", 10, 2, words, sum(map(len, lists))) + body
        return struct.pack("<QQ", MAGIC, compute_checksum(bytes(16) + content)) + content

    content = made()
    (folder / "lex.50.50.ende.s2t.bin").write_bytes(content)
    shortlist = Shortlist.from_bytes(marian.read(folder).files[SHORTLIST])
    _, vocabulary = network(marian.read(folder))
    assert set(shortlist.allowed(vocabulary.encode([""])[0].tolist())) >= {1, 3, *range(4, 12)}
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
    pieces = [model.id_to_piece(i) for i in range(PIECE_COUNT)]
    pieces[5:8] = ["no", "1", "~"]
    pieces[11], pieces[0] = 'a"b: c', "</s>"
    (folder / "vocab.spm").unlink()
    text = "".join(
        f"{piece if piece in ('no', '1') else json.dumps(piece)}: {i}\n" for i, piece in enumerate(pieces)
    ).encode()
    (folder / "vocab.yml").write_bytes(text)
    if cut:
        for side in ("source", "target"):
            (folder / f"{side}.spm").write_bytes(content)
    texts = TEXTS if cut else [" ".join(model.encode(line, out_type=str)) for line in TEXTS] + ["no 1 nowhere ~ no"]
    sources = [" ".join(model.encode(line, out_type=str)) for line in TEXTS] if cut else texts
    imported = marian.read(folder)
    ours = search(imported, texts, 2, length_penalty=1.0)
    wanted = theirs(folder, sources, 2, normalize=1.0)
    if cut:
        wanted = [[(model.decode_pieces(text.split()), score) for text, score in hypotheses] for hypotheses in wanted]
    agree(ours, wanted)


def test_words_of_characters_that_yaml_refuses_are_kept(tmp_path: Path) -> None:
    """Words of corpora hold control characters, line ends of Unicode and a byte order mark."""
    words = ["</s>", "<unk>", "\x90", "a\u2028b", "\ufeff", "\x7fc", "\x85", "\ufffe", "d"]
    lines = [f"{word}: {i}" if word != "\x85" else f'? "{word}"\n: {i}' for i, word in enumerate(words[:-1])]
    (tmp_path / "vocab.yml").write_text("\ufeff" + "\r\n".join([*lines, '"\\x64": 8']), "utf-8", newline="")
    vocabulary = marian_folder.Folder(tmp_path)._vocabulary("vocab.yml", ())
    assert vocabulary.pieces == words and (vocabulary.end, vocabulary.unknown) == (0, 1)


def changed_bytes(path: Path, **arrays: Any) -> None:
    """Change arrays of an npz; None leaves one out."""
    with np.load(path, allow_pickle=True) as archive:
        merged = {name: archive[name] for name in archive.files} | arrays
    np.savez(path, **{name: array for name, array in merged.items() if array is not None})


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
        ({"decoder_l1_rnn_W": np.zeros((3, 4), np.float32)}, "decoder_l1_rnn_W is 3 x 4, expected 32 x 32"),
        ({"decoder_l1_rnn_W": np.full((32, 32), np.nan, np.float32)}, "decoder_l1_rnn_W holds NaN"),
        ({"decoder_l9_rnn_W": np.zeros((3, 4), np.float32)}, "decoder_l9_rnn_W, which is not supported"),
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
