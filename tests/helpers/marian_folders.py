"""Models of Marian with random weights, and what Marian itself translates with them."""

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

from zoo.translation.data.tokens import END, START, pad
from zoo.translation.data.vocabularies import PIECES, ImportedVocabulary
from zoo.translation.importers import marian_file
from zoo.translation.importers.imported import ImportedModel
from zoo.translation.models.transformer import Transformer
from zoo.translation.search.beam_search import Hypothesis, beam_search
from zoo.translation.search.shortlist import SHORTLIST, Shortlist

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
    lexicon = ["".join(draw.choices(syllables, k=draw.randint(2, 4))) for _ in range(200)]
    return [" ".join(draw.choices(lexicon, k=draw.randint(1, 9))) for _ in range(count)]


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
    draw, arrays = np.random.default_rng(seed), dict[str, np.ndarray]()

    def linear(prefix: str, suffix: str, rows: int, columns: int, bias: bool = True) -> None:
        arrays[f"{prefix}_W{suffix}"] = draw.uniform(-1, 1, (rows, columns)) * (6 / (rows + columns)) ** 0.5
        if bias:
            arrays[f"{prefix}_b{suffix}"] = draw.normal(0, 0.1, (1, columns))

    def norm(prefix: str, suffix: str = "") -> None:
        arrays[f"{prefix}_ln_scale{suffix}"] = draw.normal(1, 0.1, (1, WIDTH))
        arrays[f"{prefix}_ln_bias{suffix}"] = draw.normal(0, 0.1, (1, WIDTH))

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
        arrays[name] = draw.normal(0, 0.3, (PIECE_COUNT, WIDTH))
    if not everywhere and not options["tied-embeddings"]:
        arrays["decoder_ff_logit_out_Wt"] = draw.normal(0, 0.3, (PIECE_COUNT, WIDTH))
    if not options["output-omit-bias"]:
        bias = draw.normal(0, 0.3, (1, PIECE_COUNT))
        bias[0, 0] += 3  # the end comes before the limit, mostly
        arrays["decoder_ff_logit_out_b"] = bias
    return {name: array.astype(np.float32) for name, array in arrays.items()}


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
        (path / f"{name}.yml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))
    return path


def network(found: ImportedModel) -> tuple[Transformer, ImportedVocabulary]:
    """What was read, as modules."""
    sizes = [len(vocab) for vocab in found.pieces]
    model = Transformer(found.config, sizes[-1], pre_norm=found.pre_norm, dropout=0.0, source_vocabulary=sizes[0])
    model.load_state_dict({key: torch.from_numpy(array) for key, array in found.state.items()})
    texts = dict(zip(("source", "target"), found.pieces, strict=False))
    return model.eval(), ImportedVocabulary(found.framing, {**found.files, PIECES: json.dumps(texts).encode()})


@torch.inference_mode()
def search(found: ImportedModel, texts: Sequence[str], beam: int, **rules: Any) -> list[list[tuple[str, float]]]:
    """Texts and scores of the `beam` best translations of every text."""
    model, vocabulary = network(found)
    shortlist = Shortlist.from_bytes(found.files[SHORTLIST]) if SHORTLIST in found.files else None
    changed = dataclasses.replace(found.rules, **rules)
    tokens = vocabulary.encode(texts)
    limits = np.array([changed.limit(len(source), 512) for source in tokens])
    allowed = [shortlist.allowed(source.tolist()) for source in tokens] if shortlist else None
    options = {
        "beam": beam,
        "best": beam,
        "length_penalty": changed.length_penalty,
        "rules": changed,
        "allowed": allowed,
    }
    hypotheses: list[list[Hypothesis]] = beam_search(
        model.begin(torch.from_numpy(pad(tokens))), limits, start=START, end=END, **options
    )
    return [[(vocabulary.decode([one.tokens])[0], one.score) for one in ranked] for ranked in hypotheses]


def theirs(folder: Path, texts: Sequence[str], beam: int, **options: Any) -> list[list[tuple[str, float]]]:
    """The same by Marian itself."""
    pymarian = pytest.importorskip("pymarian", reason="Marian's Translator (pip install pymarian: Python 3.11 alone)")
    files = sorted(folder.glob("*vocab.*"))
    names = [files[0].name, files[-1].name]
    translator = pymarian.Translator(
        models=[str(folder / options.pop("model", "model.npz"))],
        vocabs=[str(folder / name) for name in names],
        beam_size=beam,
        n_best="true",
        cpu_threads=1,
        mini_batch=1,
        workspace=64,
        quiet="true",
        quiet_translation="true",
        **options,
    )
    results: list[list[tuple[str, float]]] = [[] for _ in texts]
    for line in translator.translate("\n".join(texts)).splitlines():
        number, text, *_, score = line.split(" ||| ")
        results[int(number)].append((text.strip(), float(score)))
    return results


def agree(ours: list[list[tuple[str, float]]], given: list[list[tuple[str, float]]]) -> None:
    """Assert equal texts, of hundreds but for ties of one in 200, and scores within 1e-4."""
    different = []
    for one, other in zip(ours, given, strict=True):
        np.testing.assert_allclose([score for _, score in one], [score for _, score in other], rtol=1e-4, atol=1e-4)
        different += [(one, other)] if [text for text, _ in one] != [text for text, _ in other] else []
    assert len(different) <= len(ours) // 200, different


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
