"""Put a trained model into the package: weights rounded to float16, int8 built from them, a card with the digests.

    python scripts/ship_model.py TRAINED_FOLDER NAME [FOLDER]

FOLDER is the package's folder of models, zoo/weights unless named. What is common to all versions of a model
(description, data, licence, ...; of a translation model how it searches, preprocessing.search) is read from
FOLDER/NAME/card.json, so write that first; this script fills in files, preprocessing, training and calibration. Metrics
come from reports: see scripts/render_models_md.py.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import zoo
from pipelines.core import files
from pipelines.core.errors import ZooError
from pipelines.graph import edit, io
from pipelines.models import stages
from pipelines.models.hub import CARD, Card, CardFile

SHIPPED_FILES = (stages.HALF, "calibration.json", "int8.onnx", "quantization.json")


def ship(trained: Path, name: str, into: Path | None = None) -> Card:
    """Build in a scratch folder exactly as a user's machine would from the shipped float16 weights, then copy the
    results.
    """
    target = (into or zoo.SHIPPED) / name
    source = zoo.load(trained)
    shipped = (*SHIPPED_FILES, *source.entry.files)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        model = io.load(source.ensure("fp32.onnx"))
        edit.compress_fp16(model)
        io.save(model, work / stages.HALF)
        for each in (stages.SAMPLES, *source.entry.files):
            if (source.path / each).is_file():
                shutil.copy(source.path / each, work)
        half = CardFile(stages.HALF, None, None, None)
        files.write_json(work / CARD, replace(source.card, files=(half,)).to_json())
        folder = zoo.load(work)
        folder.ensure("int8.onnx")
        for each in shipped:
            if (work / each).is_file():
                shutil.copy(work / each, target / each)
        calibration = {**folder.recipe.to_json(), "samples": folder.record["calibration.json"]["samples"]}
    listed = [target / each for each in shipped if (target / each).is_file()]
    before = Card.read(target / CARD)
    details = {**before.details, **source.card.details, "calibration": calibration}
    if search := before.details.get("preprocessing", {}).get("search"):
        details["preprocessing"] = {**details["preprocessing"], "search": search}
    card = replace(
        before, files=tuple(CardFile(p.name, p.stat().st_size, files.sha256(p), None) for p in listed), details=details
    )
    files.write_json(target / CARD, card.to_json())
    return card


if __name__ == "__main__":
    try:
        for file in ship(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:4])).files:
            print(f"{file.name}: {file.size} bytes, sha256 {file.sha256}")
    except (ZooError, IndexError) as error:
        sys.exit(f"ship_model: {error}")
