"""The comparison of text networks on a tiny one, in this project and onnxruntime."""

import argparse
import importlib.util

import numpy as np
import pytest

from pipelines.core.errors import RequestError, ZooError
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


class Worker:
    """An engine of a known result, or of an error."""

    def __init__(self, vector=None):
        self.vector = vector

    def ask(self, action, *arguments):
        if action == "vectors" and self.vector is None:
            raise ZooError("no memory")
        return {"vectors": np.array([self.vector]), "time": [0.002], "limit_memory": None}[action]


def test_results_of_a_long_text_are_compared_before_it_is_timed():
    workers = {
        "zoo": Worker([0.995, 0.0999]),
        "sentence-transformers": Worker([1.0, 0.0]),
        "onnxruntime-fp32": Worker(),
    }
    workers["openvino-nncf"] = Worker([0.1, 0.995])
    results, reasons = networks.time_long(workers, ["a text"], 1, 4)
    assert results.keys() == {"zoo", "sentence-transformers"} and results["zoo"]["cosine"] == 0.995
    assert reasons["openvino-nncf"].startswith("its result has the cosine 0.100 with that of sentence-transformers")
    assert reasons["onnxruntime-fp32"] == "no memory"


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
