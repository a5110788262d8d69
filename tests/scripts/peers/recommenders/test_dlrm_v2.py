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
    columns = {each["name"]: each for each in json.loads((tmp_path / "schema.json").read_text())["columns"]}
    lists = [columns[f"list_{at}"] for at in range(4)]
    assert [each["kind"] for each in lists] == ["categories", "category", "categories", "category"]
    assert [each["tower"] for each in lists] == ["item", "item", "user", "user"]
    assert all(each["encoding"] == {"type": "hash", "buckets": 60} for each in lists)
    before = (model / "int8.onnx").stat().st_mtime_ns
    assert dlrm_v2.build(tmp_path, 60) == model and (model / "int8.onnx").stat().st_mtime_ns == before
    found = dlrm_v2.pairs_a_second(model, 1)
    assert list(found) == ["pairs", "rank"] and all(each["pairs_per_second"]["median"] > 0 for each in found.values())
