"""Put a trained model into the package: weights rounded to float16, int8 built from them, a card with the digests.

    python scripts/ship_model.py TRAINED_FOLDER NAME [FOLDER]
    python scripts/ship_model.py    # the public addresses in all cards of zoo/weights anew

FOLDER is the package's folder of models, zoo/weights unless named. Write FOLDER/NAME/card.json first, with the fields
that all versions of a model share: description, data, licence, ... and, for translation, preprocessing.search. This
script fills in files, preprocessing, training and calibration. Metrics come from reports: see scripts/render.py.
"""

from __future__ import annotations

import gzip
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import zoo
from pipelines.core import files
from pipelines.core.errors import ZooError
from pipelines.graph import edit, io
from pipelines.models.hub import CARD, Card, CardFile
from pipelines.models.record import HALF, SAMPLES

# The repository of the Hugging Face Hub with the float weights of a model, and their tag: the one place that says so.
# With another, change it here, run python scripts/ship_model.py and zoo push.
HUB = "hf://int8-zoo/{name}@weights-1"
# the float weights that wheels leave out (pyproject.toml, wheel.exclude) and that are fetched when a stage needs them
LARGE = 5_000_000  # bytes
COMPRESSED = (HALF, "calibration.json")  # files that only the build reads
SHIPPED_FILES = (HALF, "calibration.json", "int8.onnx", "quantization.json")


def ship(trained: Path, name: str, into: Path | None = None) -> Card:
    """Builds a model from its float16 weights, as a user's machine does, and copies the files.

    Args:
        trained: Folder of the trained model.
        name: Name of the shipped model.
        into: Folder of models; zoo/weights if None.

    Returns:
        The card of the shipped model.
    """
    target = (into or zoo.SHIPPED) / name
    source = zoo.load(trained)
    shipped = (*SHIPPED_FILES, *source.entry.files)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        model = io.load(source.ensure("fp32.onnx"))
        edit.compress_fp16(model)
        io.save(model, work / HALF)
        for file in (SAMPLES, *source.entry.files):
            if (source.path / file).is_file():
                shutil.copy(source.path / file, work)
        half = CardFile(HALF, None, None, None)
        files.write_json(work / CARD, replace(source.card, files=(half,)).to_json())
        folder = zoo.load(work)
        folder.ensure("int8.onnx")
        for file in shipped:
            if (work / file).is_file():
                shutil.copy(work / file, target / file)
        calibration = {**folder.recipe.to_json(), "samples": folder.record["calibration.json"]["samples"]}
    for file in COMPRESSED:
        if (target / file).is_file():
            compress(target / file)
    listed = [target / path for path in shipped if (target / path).is_file()]
    before = Card.read(target / CARD)
    details = {**before.details, **source.card.details, "calibration": calibration}
    if search := before.details.get("preprocessing", {}).get("search"):
        details["preprocessing"] = {**details["preprocessing"], "search": search}
    card = replace(before, files=tuple(map(CardFile.of, listed)), details=details)
    files.write_json(target / CARD, (card := with_addresses(card)).to_json())
    return card


def compress(path: Path) -> None:
    """Compresses a file by gzip, unless it is; the same content gives the same bytes.

    Args:
        path: A file that `read_json` or `io.load` reads.
    """
    if not files.starts_with(path, files.GZIP):
        path.write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))


def with_addresses(card: Card) -> Card:
    """Returns the card with the hub's repository for its float weights where these are too large for a wheel."""

    def addressed(file: CardFile) -> CardFile:
        if file.name != HALF:
            return file
        return replace(file, url=None, hub=HUB.format(name=card.name) if (file.size or 0) > LARGE else None)

    return replace(card, files=tuple(map(addressed, card.files)))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for path in sorted(zoo.SHIPPED.glob(f"*/{CARD}")):
            if (card := with_addresses(Card.read(path))) != Card.read(path):
                files.write_json(path, card.to_json())
        sys.exit()
    try:
        for file in ship(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:4])).files:
            print(f"{file.name}: {file.size} bytes, sha256 {file.sha256}")
    except (ZooError, IndexError) as error:
        sys.exit(f"ship_model: {error}")
