"""The parts of scripts/reproduce.py that are a script each, beside other projects or on two cores."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pipelines.core.errors import RequestError
from scripts.reproduction.reports import ROOT, SHARED, measure_together, report, watched

ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
CLONE = SHARED / "weights" / ENCODER.split("/")[1]  # which is a ZOO_MIRROR of minilm-l6, too
PEERS = ROOT / "scripts" / "peers"


def networks() -> None:
    """scripts/peers/vision/image_networks.py: image networks alone, layer by layer, beside OpenVINO and others."""
    measure_together("image-networks", path=PEERS / "vision" / "image_networks.py")


def detectors() -> None:
    """scripts/peers/quantization/own_models.py on a detector and a segmentation of detector_models.py."""
    photos = SHARED / "data" / "imagenet" / "nips17"
    if not photos.is_dir():
        raise RequestError(f"no photos at {photos}; set ZOO_SHARED to the folder that holds data/imagenet/nips17/")
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, PEERS / "quantization" / "detectors.py", scratch, "--photos", photos]
        subprocess.run(command, check=True)
        measure_together("detectors", scratch, path=PEERS / "quantization" / "own_models.py")


def encoder() -> None:
    """fp32 and int8 of the sentence encoder on the pairs of the STS benchmark, judged by people."""
    name, source = "minilm-l6", SHARED / "data" / "stsb"
    if not (pairs := sorted(source.glob("*.csv"), reverse=True)):
        raise RequestError(f"no pairs in {source}; set ZOO_SHARED to the folder that holds data/stsb/")
    data = [word for each in pairs for word in ("--data", str(each))]
    command = [sys.executable, "-m", "zoo.cli.app", "evaluate", name, *data, "--json"]
    out, _ = watched(command, {"ZOO_MIRROR": str(CLONE)} if CLONE.is_dir() else None)
    report("quality", {"model": name, **json.loads(out), "data": [each.name for each in pairs]}, name)


def texts() -> None:
    """scripts/peers/texts.py: sentence encoders in this project and what people run them with, on 13,000 sentences;
    fastembed runs the float32 graph in onnxruntime.
    """
    source = SHARED / "data" / "stsb"
    if not CLONE.is_dir() or not source.is_dir():
        raise RequestError(f"no {CLONE} (a clone of {ENCODER}) or no {source}; set ZOO_SHARED to the folder with both")
    with tempfile.TemporaryDirectory() as scratch:
        found: dict[str, None] = {}  # each once, in order
        for path in sorted(source.glob("*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                found.update({" ".join(each.split()): None for row in csv.reader(file) for each in row[:2]})
        lines = Path(scratch) / "texts.txt"
        lines.write_text("\n".join(found) + "\n", encoding="utf-8")
        ways = "zoo,zoo-two-threads,sentence-transformers,st-onnx-int8,st-openvino-int8"
        ways += ",onnxruntime-dynamic,onnxruntime-static,openvino-nncf,fastembed"
        measure_together("texts", str(CLONE), str(lines), "--ways", ways, more={"ZOO_MIRROR": str(CLONE)})


def reading() -> None:
    """scripts/peers/recommenders/log_reading.py: click logs read here, by pandas and by pyarrow."""
    measure_together("log-reading", path=PEERS / "recommenders" / "log_reading.py")


def contexts() -> None:
    """scripts/peers/serving/contexts.py: two contexts of one opened model beside one, on two quiet cores."""
    measure_together("contexts", path=PEERS / "serving" / "contexts.py")


def cluster() -> None:
    """scripts/peers/distributed/cluster.py: 20,000,000 rows by one process, by two shards and on Ray; two quiet cores."""
    if importlib.util.find_spec("ray") is None:
        raise RequestError("found no ray, wanted it for the shards on a cluster; pip install '.[ray]'")
    measure_together("cluster", path=PEERS / "distributed" / "cluster.py")


def servers() -> None:
    """scripts/peers/serving/serving.py: `zoo serve` beside the servers that users know; environments of theirs under build/."""
    if shutil.which("wrk") is None:
        raise RequestError("found no wrk, wanted it for the load; apt-get install wrk")
    places, parts = ROOT / "build" / "servers", "peers,rows,lone,sentences,workers"
    subprocess.run([sys.executable, PEERS / "serving" / "serving.py", "--make", "--parts", parts, places], check=True)
    measure_together("serving", str(places), "--parts", parts, "--seconds", "3", path=PEERS / "serving" / "serving.py")
