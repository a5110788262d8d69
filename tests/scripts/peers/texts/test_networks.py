"""The comparison of text networks on a tiny one, in this project and onnxruntime."""

import argparse
import importlib.util

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from scripts.peers.texts import networks, shapes
from zoo.texts import report_sections

tokenizers = pytest.importorskip("tokenizers", reason="needs the texts extra")


def test_texts_have_as_many_tokens_as_asked_for():
    tokenizer, rng = shapes.tokenizer(), np.random.default_rng(0)
    assert [len(tokenizer.encode(shapes.text(rng, count)).ids) for count in (3, 16, 300)] == [3, 16, 300]


def test_packages_name_engines_and_folders(tmp_path):
    assert networks.read_packages(f"fastembed={tmp_path}") == {"fastembed": str(tmp_path)}
    with pytest.raises(RequestError, match="unknown engine nothing"):
        networks.read_packages(f"nothing={tmp_path}")
    with pytest.raises(RequestError, match="found no folder /none"):
        networks.read_packages("fastembed=/none")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the texts extra")
@pytest.mark.skipif(not extension.isas(), reason="needs the kernels")
def test_networks_are_measured_and_rendered(tmp_path, monkeypatch):
    monkeypatch.setattr(networks, "LENGTHS", (8, 16))
    monkeypatch.setattr(networks, "LONG", 200)
    monkeypatch.setattr(networks, "STREAM", 6)
    monkeypatch.setitem(shapes.WIDTHS, "small", 64)
    engines = ["zoo", "onnxruntime-fp32", "fastembed"]
    args = argparse.Namespace(
        shapes=["modernbert"], sizes=["small"], tasks=["embed", "tag"], engines=engines, packages="", layers=2,
        rounds=1, long_rounds=1, memory=2, output=None, work=str(tmp_path),
    )  # fmt: skip
    report = networks.measure(args)
    embed, tag = report["networks"]
    assert [load["load"] for load in embed["loads"]] == ["8 tokens", "16 tokens", "stream", "200 tokens"]
    assert all({"zoo", "onnxruntime-fp32"} <= load["results"].keys() for load in embed["loads"])
    assert embed["engines"]["zoo"]["cosine"] > 0.99 < tag["engines"]["zoo"]["cosine"]
    assert tag["engines"].keys() == {"zoo", "onnxruntime-fp32"} and not tag["left_out"]
    file = tmp_path / "text-networks.json"
    assert "modernbert, small, tag" in report_sections._network_table(report_sections.Report(file, report))
