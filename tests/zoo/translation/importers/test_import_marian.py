"""Models of Marian translate as Marian itself does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from helpers.marian_folders import MODELS, TEXTS, agree, folder_of, marian_itself, search, theirs, words

import zoo
from pipelines.kernels import extension
from zoo.translation.importers import marian

torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_translations_of_many_sentences_equal_marians(name: str, tmp_path: Path) -> None:
    folder, texts = folder_of(tmp_path, MODELS[name], seed=1), words(500, 2)
    model = marian.read(folder)
    agree(search(model, texts, 1, length_penalty=0.0), theirs(folder, texts, 1))
    agree(search(model, texts, 4, length_penalty=1.0), theirs(folder, texts, 4, normalize=1.0))


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
    reference = theirs(folder, TEXTS, 3, normalize=1.0, shortlist=[str(path), "11", "5", "0.2"])
    results = pipeline(TEXTS)
    agree(
        [[(result["translation"], result["score"])] for result in results], [hypotheses[:1] for hypotheses in reference]
    )


@pytest.mark.skipif(not extension.isas(), reason="the native kernels are not built")
def test_an_imported_folder_becomes_int8(tmp_path: Path) -> None:
    """By ranges of some text, in native code, whose activations are float between int8 layers."""
    folder = folder_of(tmp_path / "original", MODELS["ssru"])
    zoo.import_model(folder, tmp_path / "imported")
    (tmp_path / "text").write_text("\n".join(TEXTS))
    zoo.calibrate(tmp_path / "imported", str(tmp_path / "text"))
    zoo.build(tmp_path / "imported")
    int8, wanted = (zoo.pipeline(tmp_path / "imported", precision) for precision in ("int8", "fp32"))
    assert (int8.engine, int8.rules.kind) == ("native", "marian")
    int8.beam = wanted.beam = 1
    scores = [[result["score"] for result in one(TEXTS)] for one in (int8, wanted)]
    assert np.corrcoef(*scores)[0, 1] > 0.8


@pytest.mark.parametrize("name", MODELS)
def test_translations_equal_marians(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS[name])
    model = marian.read(folder)
    agree(search(model, TEXTS, 1, length_penalty=0.0), theirs(folder, TEXTS, 1))
    agree(search(model, TEXTS, 4, length_penalty=0.6), theirs(folder, TEXTS, 4, normalize=0.6))


def test_rules_of_the_search_equal_marians(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS["ssru"])
    model = marian.read(folder)
    options = {"normalize": 1.0, "word_penalty": 0.3, "max_length_factor": 0.7}
    agree(
        search(model, TEXTS, 3, length_penalty=1.0, word_penalty=0.3, growth=0.7), theirs(folder, TEXTS, 3, **options)
    )


def lexicon(folder: Path, seed: int = 0) -> list[tuple[str, str, float]]:
    """Target pieces, source pieces and probabilities, made up."""
    draw = random.Random(seed)
    sides = [sentencepiece.SentencePieceProcessor(model_file=str(path)) for path in sorted(folder.glob("*.spm"))]
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
        names = sorted(str(path) for path in folder.glob("*.spm"))
        marian_itself("convert", "-s", path, "11", "5", "0.2", "-d", folder / "lex.bin", "-V", names[0], names[-1])
        path.unlink()
        path = folder / "lex.bin"
        (folder / "decoder.yml").unlink()
    options: dict[str, Any] = {"shortlist": [str(path)] if binary else [str(path), "11", "5", "0.2"]}
    model = marian.read(folder)
    agree(search(model, TEXTS, 1, length_penalty=0.0), theirs(folder, TEXTS, 1, **options))
    agree(search(model, TEXTS, 4, length_penalty=0.6), theirs(folder, TEXTS, 4, normalize=0.6, **options))
