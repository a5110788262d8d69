"""Drafts of speculative decoding: trained for a model, they join its folder and change none of its translations."""

from __future__ import annotations

import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.models.npz import read_arrays

torch = pytest.importorskip("torch", reason="needs the train extra")
pytestmark = pytest.mark.skipif(not extension.isas(), reason="no kernels for this CPU")
SETTINGS = {"width": "32", "hidden": "64", "epochs": "12", "batch_size": "384", "learning_rate": "0.01", "ahead": "3"}


def test_a_draft_joins_its_model(translator, language, tmp_path, capsys):
    data, out = language.write(tmp_path / "pairs.tsv", 400), tmp_path / "with-draft"
    settings = {**SETTINGS, "teacher": str(translator), "synthetic": "20"}
    report = zoo.train("transformer-mt", str(data), out, settings=settings, preset="draft")
    assert report["bytes"] == {"draft.npz": (out / "draft.npz").stat().st_size} and "acceptance" in "".join(
        capsys.readouterr()
    )
    pipeline = zoo.pipeline(out, precision="int8", engine="native")
    assert pipeline.folder.preprocessing["draft"] == "draft.npz"
    sentences = [source for source, _ in language.pairs(60)]
    plain = pipeline.with_options(beam=1, draft="off")(sentences)
    always = pipeline._native.speculation(draft=read_arrays(out / "draft.npz"), costs=(1.0, 0.0, 0.0))
    pipeline._speculations["auto"] = always
    for batch_size in (1, 5, 32):
        pipeline.batch_size = batch_size
        for draft in ("auto", str(out / "draft.npz")):
            assert pipeline.with_options(beam=1, draft=draft)(sentences) == plain
    _, proposed, accepted = always.counts
    assert proposed >= accepted > 0
    assert pipeline(sentences) == pipeline.with_options(draft="off")(sentences)  # a beam has no proposals
    with pytest.raises(RequestError, match="found .* in use, expected a new or empty folder"):
        zoo.train("transformer-mt", str(data), out, settings=settings, preset="draft")
    (out / "draft.npz").write_bytes(b"other")
    with pytest.raises(RequestError, match="not the file that its card lists"):
        zoo.pipeline(out, precision="int8", engine="native").with_options(beam=1)(sentences)


def test_what_a_draft_needs(translator, language, tmp_path):
    data = str(language.write(tmp_path / "pairs.tsv", 15))
    for family, settings, why in (
        ("transformer-mt", {}, "found no model to train a draft for, expected --teacher FOLDER"),
        ("transformer-mt", {"width": "40"}, r"width 40 \(expected a multiple of 32\)"),
        ("transformer-mt", {"arch": "tiny"}, "no training setting arch"),
        ("transformer-mt", {"teacher": str(translator)}, "found 15 sentences, expected at least 20"),
        ("deepfm", {}, "expected draft of transformer-mt"),
    ):
        with pytest.raises(RequestError, match=why):
            zoo.train(family, data, tmp_path / "out", settings=settings, preset="draft")
    pipeline = zoo.pipeline(translator, precision="int8", engine="onnxruntime")
    with pytest.raises(RequestError, match="drafts need --engine native"):
        pipeline.with_options(beam=1, draft="draft.npz")
    native = zoo.pipeline(translator, precision="int8", engine="native").with_options(beam=1, draft=data)
    with pytest.raises(RequestError, match="cannot read"):
        native(["text"])
