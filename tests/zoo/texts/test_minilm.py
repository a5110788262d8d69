"""all-MiniLM-L6-v2 from the folder in ZOO_MIRROR: int8 similarities of sentences are near those of fp32."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

import zoo
from pipelines.core.errors import ZooError

MIRROR = os.environ.get("ZOO_MIRROR", "")


def require_mirror():
    if not (Path(MIRROR) / "model.safetensors").is_file():
        pytest.skip("needs the folder of all-MiniLM-L6-v2; name it in $ZOO_MIRROR")


@pytest.mark.data
@pytest.mark.slow
def test_no_sentence_is_an_outlier(shared):
    """Sentences of "late", "point" or "pain" had cosines down to .90 before outlier weights were split."""
    require_mirror()
    with zipfile.ZipFile(shared / "data" / "translation" / "tatoeba_deu_eng.zip") as archive:
        lines = archive.read("deu.txt").decode().splitlines()
    texts = list(dict.fromkeys(line.split("\t")[0] for line in lines))  # by length
    drawn = texts[::90]
    outliers = ["It's not too late to change your mind.", "I woke up too late.", "Where's your date tonight?"]
    paragraphs = [" ".join(texts[i : i + 25]) for i in range(60_000, 130_000, 5000)]
    rows = [(text,) for text in (*outliers, *drawn, *paragraphs)]
    exact, int8 = (zoo.pipeline("minilm-l6", precision).compute_texts(rows) for precision in ("fp32", "int8"))
    cosines = (exact * int8).sum(axis=1)
    assert cosines.min() > 0.98 and (cosines < 0.99).mean() < 0.001
    assert np.mean(cosines[-len(paragraphs) :]) > 0.997


@pytest.mark.data
def test_int8_keeps_the_quality_of_minilm(shared):
    require_mirror()
    try:
        report = zoo.evaluate("minilm-l6", str(shared / "data" / "stsb" / "en-dev.csv"))
    except ZooError as error:
        pytest.skip(f"$ZOO_MIRROR holds another model: {error}")
    assert report["metrics"]["fp32"]["spearman"] > 0.86
    assert abs(report["difference"]["spearman"]) < 0.003
    assert report["difference"]["cosine"] > 0.998 and report["difference"]["cosine_below_99"] < 0.001
    assert report["difference"]["overlap"] > 0.95
