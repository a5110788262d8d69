"""Folders of CTranslate2, imported: their tokens and scores are those of its Translator; wrong folders are refused."""

import json
import struct

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from zoo.translation.importers import ctranslate2 as reader

torch = pytest.importorskip("torch", reason="importing needs the train extra")
ctranslate2 = pytest.importorskip("ctranslate2", reason="the originals are its models (the peers extra)")
torch.set_num_threads(1)

PIECES = ["<blank>", "<unk>", "<s>", "</s>", *(f"w{i}" for i in range(60))]
TEXTS = [" ".join(f"w{i * j % 60}" for j in range(1, 2 + i % 9)) for i in range(1, 41)]


def folder_of(path, *, pre_norm=False, quantization="float32", separate=False, encodings=True, **more):
    """A folder of random weights by CTranslate2's own specification. more: its options."""
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    draw = np.random.default_rng(3)
    spec = TransformerSpec.from_config(
        (2, 1), 4, pre_norm=pre_norm, activation=Activation[more.pop("activation", "RELU")], **more
    )
    tables = {"source": (64, 32), "target": (64, 32)}

    def array(*shape, scale=0.3):
        return draw.normal(0, scale, shape).astype(np.float32)

    def fill(spec, outputs, inputs):
        spec.weight, spec.bias = array(outputs, inputs, scale=inputs**-0.5), array(outputs, scale=0.1)

    def norm(spec):
        spec.gamma, spec.beta = 1 + array(32, scale=0.1), array(32, scale=0.1)

    def attention(spec, sizes):
        for linear, outputs in zip(spec.linear, sizes, strict=True):
            fill(linear, outputs, 32)
        norm(spec.layer_norm)

    for side in (spec.encoder, spec.decoder):
        for layer in side.layer:
            attention(layer.self_attention, (96, 32))
            if side is spec.decoder:
                attention(layer.attention, (32, 64, 32))
            fill(layer.ffn.linear_0, 48, 32)
            fill(layer.ffn.linear_1, 32, 48)
            norm(layer.ffn.layer_norm)
        for name in ("layer_norm", "layernorm_embedding"):
            if hasattr(side, name):
                norm(getattr(side, name))
        if encodings:
            side.position_encodings.encodings = array(300, 32)
    table = array(*tables["target"], scale=0.5)
    spec.decoder.embeddings.weight, spec.decoder.projection.weight = table, table.copy()
    spec.encoder.embeddings[0].weight = array(*tables["source"]) if separate else table.copy()
    spec.decoder.projection.bias = array(64)
    spec.decoder.projection.bias[3] += 2
    spec.config.add_source_eos, spec.config.decoder_start_token = True, "<s>"
    spec.register_source_vocabulary([*PIECES[:4], *PIECES[:3:-1]] if separate else PIECES)
    spec.register_target_vocabulary(PIECES)
    spec.validate()
    spec.optimize(None if quantization == "float32" else quantization)
    path.mkdir()
    spec.save(str(path))
    return path


def agree(original, imported, beam, length_penalty):
    """Assert equal tokens, and scores within 1e-4."""
    pipeline = zoo.pipeline(imported, "fp32")
    pipeline.beam, pipeline.best, pipeline.length_penalty = beam, beam, length_penalty
    translator = ctranslate2.Translator(str(original), compute_type="float32", intra_threads=1, inter_threads=1)
    results = translator.translate_batch(
        [text.split() for text in TEXTS],
        beam_size=beam,
        num_hypotheses=beam,
        length_penalty=length_penalty,
        min_decoding_length=0,
        return_scores=True,
    )
    translated = pipeline.translate(pipeline.vocabulary.encode(TEXTS))
    for one, other in zip(translated, results, strict=True):
        assert pipeline.vocabulary.decode([hypothesis.tokens for hypothesis in one]) == [
            " ".join(words) for words in other.hypotheses
        ]
        np.testing.assert_allclose([hypothesis.score for hypothesis in one], other.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pre_norm": True, "encodings": False},
        {"activation": "SWISH", "separate": True, "layernorm_embedding": True},
        {"activation": "GELU", "quantization": "int16"},
        {"quantization": "int8"},
    ],
)
def test_translations_equal_ctranslate2s(options, tmp_path):
    original = folder_of(tmp_path / "original", **options)
    report = zoo.import_model(original, tmp_path / "imported")
    assert report["format"] == "ctranslate2"
    agree(original, tmp_path / "imported", 1, 1.0)
    agree(original, tmp_path / "imported", 4, 0.6)


@pytest.mark.parametrize(
    "options",
    [{}, {"alignment_layer": 0, "alignment_heads": 3}, {"alignment_layer": -1, "alignment_heads": 0}],
    ids=str,
)
def test_alignments_are_by_the_layer_and_heads_that_ctranslate2_aligns_by(options, tmp_path):
    original = folder_of(tmp_path / "original", **options)
    zoo.import_model(original, tmp_path / "imported")
    pipeline = zoo.pipeline(tmp_path / "imported", "fp32")
    translator = ctranslate2.Translator(str(original), compute_type="float32", intra_threads=1, inter_threads=1)
    results = translator.translate_batch([text.split() for text in TEXTS], beam_size=1, return_attention=True)
    texts = [" ".join(result.hypotheses[0]) for result in results]
    targets = [tokens[:-1].tolist() for tokens in pipeline.vocabulary.encode_target(texts)]
    maps = pipeline.forced.attention(pipeline.vocabulary.encode(TEXTS), targets)
    for rows, other in zip(maps, results, strict=True):
        attention = np.array(other.attention[0], np.float32).reshape(len(rows), -1)
        np.testing.assert_allclose(rows[:, : attention.shape[1]], attention, atol=1e-4)
    assert sum(len(target) for target in targets) > len(TEXTS)


def edited(path, **changes):
    """Change the configuration."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_line_of_one_known_word_is_translated_where_sources_have_no_end(tmp_path):
    original = folder_of(tmp_path / "original")
    edited(original, add_source_eos=False)  # as CTranslate2 writes OpenNMT-py's
    zoo.import_model(original, tmp_path / "imported")
    pipeline = zoo.pipeline(tmp_path / "imported", "fp32")
    faults = [bool(pipeline.line("line 1", text).fault) for text in ("w1", "what w1 w2", "what", "what w1")]
    assert faults == [False, False, True, True]
    assert pipeline([""]) == [{"translation": "", "score": 0.0}]


def test_options_of_a_run_hold_for_that_run_alone(tmp_path):
    zoo.import_model(folder_of(tmp_path / "original"), tmp_path / "imported")
    pipeline = zoo.pipeline(tmp_path / "imported", "fp32")
    source = tmp_path / "in.txt"
    source.write_text("\n".join(TEXTS[:9]))
    wanted = pipeline(TEXTS[:9])
    pipeline.run(source, tmp_path / "short.txt", max_tokens=1, beam=3, n_best=3, sentences=True)
    pipeline.run(source, tmp_path / "out.txt")
    whole = (tmp_path / "out.txt").read_text().splitlines()
    assert whole == [result["translation"] for result in wanted] and max(len(line.split()) for line in whole) > 1
    assert all(len(line.split("\t")[1].split()) < 2 for line in (tmp_path / "short.txt").read_text().splitlines())
    assert pipeline(TEXTS[:9]) == wanted


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda path: edited(path, decoder_start_token=None), "decoder_start_token"),
        (lambda path: edited(path, eos_token="nowhere"), "has no nowhere"),
        (lambda path: (path / "config.json").unlink(), "cannot read config.json"),
        (lambda path: (path / "shared_vocabulary.json").write_text('["a", "b"]'), "2 tokens, the weights 64"),
        (lambda path: (path / "shared_vocabulary.json").unlink(), "cannot read source_vocabulary.json"),
        (lambda path: (path / "a.spm").write_bytes(b"no model"), "a.spm"),
    ],
)
def test_wrong_folders_are_refused(fault, why, tmp_path):
    original = folder_of(tmp_path / "original")
    fault(original)
    with pytest.raises(RequestError, match=why):
        zoo.import_model(original, tmp_path / "imported", format="ctranslate2")
    assert not (tmp_path / "imported").exists()


def test_damaged_files_are_refused(tmp_path):
    original = folder_of(tmp_path / "original")
    content = (original / "model.bin").read_bytes()
    for size in (6, 30, 200, 5000, len(content) - 9):
        (original / "model.bin").write_bytes(content[:size])
        with pytest.raises(RequestError, match=r"model.bin is damaged"):
            reader.read(original)
    (original / "model.bin").write_bytes(struct.pack("<I", 5) + content[4:])
    with pytest.raises(RequestError, match="version 5, expected 6"):
        reader.read(original)


def test_what_is_not_supported_is_named(tmp_path):
    with pytest.raises(RequestError, match="encoder/layer_0/ffn/linear_0_noact"):
        reader.read(glued(tmp_path / "glu"))
    with pytest.raises(RequestError, match="activation 1 is not supported"):
        reader.read(folder_of(tmp_path / "tanh", activation="GELUTanh"))


def glued(path):
    """A folder with a further tensor in its file."""
    content = (folder_of(path) / "model.bin").read_bytes()
    offset = content.index(b"Spec\0") + 5 + 4
    (count,) = struct.unpack_from("<I", content, offset)
    name = b"encoder/layer_0/ffn/linear_0_noact/weight\0"
    more = struct.pack("<H", len(name)) + name + struct.pack("<BIBI", 1, 1, 0, 4) + bytes(4)
    (path / "model.bin").write_bytes(content[:offset] + struct.pack("<I", count + 1) + more + content[offset + 4 :])
    return path
