"""The table of exporters and networks in docs/own-model.md."""

from __future__ import annotations

import pytest

from scripts.peers.scan import exporters

PAGE = exporters.PAGE.read_text()


def test_the_page_has_every_row() -> None:
    rows = exporters.rows_of(PAGE)
    assert list(rows) == list(exporters.NETWORKS)
    assert exporters.written(PAGE, rows.values()) == PAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", exporters.NETWORKS)
def test_networks_run_as_the_page_says(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for package in ("transformers", "onnxscript", *(("keras", "tf2onnx") if name in exporters.APPLICATIONS else ())):
        pytest.importorskip(package)
    monkeypatch.setenv("ZOO_HOME", str(tmp_path_factory.getbasetemp()))
    assert exporters.table([name]) == [exporters.rows_of(PAGE)[name]]
