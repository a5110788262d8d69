"""The comparison of a model shaped like DLRM-v2, with small shapes."""

import json

import pytest

from pipelines.kernels import extension
from scripts.peers import harness
from scripts.peers.recommenders import dlrm_v2

SMALL = {"embedding_size": "8", "bottom": "16", "layers": "1", "rank": "8", "hidden": "16,8"}


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
def test_a_small_model_is_built_once_and_ranks(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="needs the train extra")
    monkeypatch.setattr(dlrm_v2, "SETTINGS", dlrm_v2.SETTINGS | SMALL)
    for name, value in {
        "LISTS": (3, 1, 2, 1),
        "ITEM_LISTS": 2,
        "LOG_ROWS": 700,
        "PAIRS": (9, 30),
        "SAMPLES": 2,
    }.items():
        monkeypatch.setattr(dlrm_v2, name, value)
    monkeypatch.setattr(harness, "TURN_SECONDS", 0.001)
    model = dlrm_v2.build(tmp_path, 60)
    columns = {column["name"]: column for column in json.loads((tmp_path / "schema.json").read_text())["columns"]}
    lists = [columns[f"list_{index}"] for index in range(4)]
    assert [column["kind"] for column in lists] == ["categories", "category", "categories", "category"]
    assert [column["tower"] for column in lists] == ["item", "item", "user", "user"]
    assert all(column["encoding"] == {"type": "hash", "buckets": 60} for column in lists)
    before = (model / "int8.onnx").stat().st_mtime_ns
    assert dlrm_v2.build(tmp_path, 60) == model and (model / "int8.onnx").stat().st_mtime_ns == before
    rates = dlrm_v2.pairs_a_second(model, 1)
    assert list(rates) == ["pairs", "rank"] and all(rate["pairs_per_second"]["median"] > 0 for rate in rates.values())
