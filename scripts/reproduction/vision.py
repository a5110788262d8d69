"""The parts of scripts/reproduce.py that measure image models."""

from __future__ import annotations

import functools
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import zoo
from pipelines.core import files
from pipelines.models import hub
from scripts.peers import harness
from scripts.reproduction.reports import PEERS, card_metrics, cpu_slug, measure_together, report, zoo_json

PHOTOS = "data/imagenet/nips17"
CALIBRATED = 5  # every fifth photo calibrated the tables that ship


def images() -> None:
    """The image models that ship on images that calibrated nothing: fp32 and int8, one after the other, pinned."""
    labels = harness.development_data(f"{PHOTOS}/labels.csv")
    archive = harness.development_data("data/cifar10/cifar10_jpeg.tar.gz")
    cards = [hub.Hub(zoo.SHIPPED).card(name) for name in zoo.names()]
    with tempfile.TemporaryDirectory() as scratch:
        photos, small = Path(scratch) / "photos", Path(scratch) / "cifar10"
        photos.mkdir()
        header, *lines = labels.read_text().splitlines(keepends=True)
        rows = [line for index, line in enumerate(lines) if index % CALIBRATED]
        (photos / labels.name).write_text("".join([header, *rows]))
        for row in rows:
            (photos / row.split(",")[0]).symlink_to(labels.with_name(row.split(",")[0]))
        with tarfile.open(archive) as opened:
            opened.extractall(small, [member for member in opened if member.name.startswith("test/")], filter="data")
        about = (
            f"{len(rows)} photos of the development set of the NIPS 2017 adversarial competition, easier "
            "than ImageNet's own"
        )
        for name in [card.name for card in cards if any(file.name == "calibration.json" for file in card.files)]:
            if name.endswith("-imagenet"):
                classify(name, photos, about)
            elif name.endswith("-cifar10"):
                classify(name, small / "test", "the 10,000 test images of CIFAR-10")


def classify(name: str, folder: Path, data: str) -> None:
    """Measures one model: speed, quality, card."""
    options = ("--scenario", "single-stream", "--engine", "onnxruntime,openvino,native", "--count", 200)
    result = zoo_json("benchmark", name, "--data", folder, *options)
    quality = zoo.evaluate(name, str(folder), engine="openvino")
    kept = {key: quality[key] for key in ("samples", "metrics", "difference", "interval")}
    target = f"images-{cpu_slug()}"
    report(target, {**result, "data": data, "quality": kept}, name)
    card = files.read_json(zoo.SHIPPED / name / "card.json")
    if "metrics" in card:
        about = {"on": card["metrics"]["on"], "report": f"reports/{target}.json"}
        card_metrics(name, {**about, **quality["metrics"]})


@functools.cache
def peer_files() -> tempfile.TemporaryDirectory[str]:
    """Returns the folder of the peers' files that `photos` and `networks` share within a run."""
    return tempfile.TemporaryDirectory()


def photos() -> None:
    """From JPEG bytes to label, here and in the usual pipelines of the peers, same weights and photos.

    300 of the 500 photos, which leaves the ratios as they are.
    """
    measure_together("images", "--photos", "300", "--work", peer_files().name)


def networks() -> None:
    """Image networks alone, layer by layer, beside OpenVINO and others."""
    measure_together("image-networks", "--work", peer_files().name)


def quantizers() -> None:
    """This quantizer beside onnxruntime's and NNCF's, same float files and photos: accuracy, speed, memory.

    200 photos, of which 40 calibrate. By its own settings beside the default this quantizer takes half an hour more.
    """
    kinds = "onnxruntime-minmax,onnxruntime-percentile,onnxruntime-entropy,nncf-default,nncf-mixed"
    settings = f"zoo,{kinds},nncf-default-exact,nncf-mixed-exact"
    measure_together("vision", "--settings", settings, "--photos", "200")


EXPORTED = (
    "deit-tiny",
    "swin-tiny",
    "convnext-tiny",
    "mobilevit-small",
    "mobilenet-v3-large",
    "efficientnet-lite0",
    "yolov8n",
)
OPENED = ("deit-tiny", "convnext-tiny", "mobilenet-v3-large", "yolov8n")


def exported() -> None:
    """Networks of seven kinds as users export them, quantized by this project and by the peers.

    Report exported-others has six larger or similar ones, which take an hour more: the same commands with other names.
    """
    photos = harness.development_data(PHOTOS)
    settings = "zoo,onnxruntime-static,onnxruntime-dynamic,nncf-default,nncf-transformer"
    networks, opened = (",".join(f"{name}-shaped" for name in names) for names in (EXPORTED, OPENED))
    with tempfile.TemporaryDirectory() as scratch:
        made = [scratch, "--photos", photos, "--networks", networks, "--free-batch"]
        subprocess.run([sys.executable, PEERS, "exported", *made], check=True)
        arguments = scratch, "--settings", settings, "--batch", "1,8", "--opened", opened
        measure_together("exported", *arguments, comparison="own-models")
