"""all-MiniLM-L6-v2 from the folder in ZOO_MIRROR: int8 similarities of sentences are near those of fp32."""

import os
from pathlib import Path

import pytest

import zoo
from pipelines.core.errors import ZooError

MIRROR = os.environ.get("ZOO_MIRROR", "")


@pytest.mark.data
def test_int8_keeps_the_quality_of_minilm(shared):
    if not (Path(MIRROR) / "model.safetensors").is_file():
        pytest.skip("needs the folder of all-MiniLM-L6-v2; name it in $ZOO_MIRROR")
    try:
        found = zoo.evaluate("minilm-l6", str(shared / "data" / "stsb" / "en-dev.csv"))
    except ZooError as error:
        pytest.skip(f"$ZOO_MIRROR holds another model: {error}")
    assert found["metrics"]["fp32"]["spearman"] > 0.86
    assert abs(found["difference"]["spearman"]) < 0.003
    assert found["difference"]["cosine"] > 0.997
    assert found["difference"]["overlap"] > 0.95
