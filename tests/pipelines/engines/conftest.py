"""The folded click model in a folder, for the tests of the engine native."""

import pytest
from helpers.clicks_folded import folded

from pipelines.core.files import mapped
from pipelines.graph import io
from pipelines.models.record import NATIVE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """native.onnx of the small model, and float.onnx."""
    path = tmp_path_factory.mktemp("native")
    result, float32 = folded()
    io.save_mapped(result, path / NATIVE)
    io.save(float32, path / "float.onnx")
    assert mapped(path / NATIVE).stat().st_size > 1 << 20
    return path
