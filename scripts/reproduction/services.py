"""The parts of scripts/reproduce.py that measure encoders of texts, servers and clusters."""

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
from scripts.peers import harness
from scripts.reproduction.reports import PEERS, measure_together, report, watched, zoo_command

ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
CLONE = harness.SHARED / "weights" / ENCODER.split("/")[1]  # also a ZOO_MIRROR of minilm-l6


def encoder() -> None:
    """fp32 and int8 of the sentence encoder on the pairs of the STS benchmark, judged by people."""
    name, pairs = "minilm-l6", sorted(harness.development_data("data/stsb").glob("*.csv"), reverse=True)
    data = [word for path in pairs for word in ("--data", path)]
    out, _ = watched(zoo_command("evaluate", name, *data)[3:], {"ZOO_MIRROR": str(CLONE)} if CLONE.is_dir() else None)
    report("quality", {"model": name, **json.loads(out), "data": [path.name for path in pairs]}, name)


def texts() -> None:
    """Sentence encoders in this project and in the libraries that people run them with, on 13,000 sentences.

    fastembed runs the float32 graph in onnxruntime.
    """
    source = harness.development_data("data/stsb")
    if not CLONE.is_dir():
        raise RequestError(f"found no {CLONE}; set ZOO_SHARED to the folder with a clone of {ENCODER} under weights/")
    with tempfile.TemporaryDirectory() as scratch:
        unique: dict[str, None] = {}  # each once, in order
        for path in sorted(source.glob("*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                unique.update({" ".join(text.split()): None for row in csv.reader(file) for text in row[:2]})
        lines = Path(scratch) / "texts.txt"
        lines.write_text("\n".join(unique) + "\n", encoding="utf-8")
        ways = "zoo,zoo-two-threads,sentence-transformers,st-onnx-int8,st-openvino-int8"
        ways += ",onnxruntime-dynamic,onnxruntime-static,openvino-nncf,fastembed"
        measure_together("texts", CLONE, lines, "--ways", ways, more={"ZOO_MIRROR": str(CLONE)})


def text_networks() -> None:
    """Small text encoders by architecture beside the engines of others, from texts to vectors, labels and entities."""
    small = "--sizes", "small"
    measure_together(
        "text-networks-heads", *small, "--tasks", "classify,tag", "--memory", "0", comparison="text-networks"
    )
    measure_together("text-networks", *small, "--tasks", "embed")


def contexts() -> None:
    """Two contexts of one opened model beside one, on two quiet cores."""
    measure_together("contexts")


def cluster() -> None:
    """20,000,000 rows by one process, by two shards and on Ray; two quiet cores."""
    if importlib.util.find_spec("ray") is None:
        raise RequestError("found no ray, expected it for the shards on a cluster; pip install '.[ray]'")
    measure_together("cluster")


def servers() -> None:
    """`zoo serve` beside the servers that users know; their environments are made under build/."""
    if shutil.which("wrk") is None:
        raise RequestError("found no wrk, expected it for the load; apt-get install wrk")
    places, parts = harness.ROOT / "build" / "servers", "peers,rows,lone,sentences,workers"
    subprocess.run([sys.executable, PEERS, "serving", "--make", "--parts", f"{parts},embeddings", places], check=True)
    measure_together("serving", places, "--parts", parts, "--seconds", "3")
    measure_together("serving-embeddings", places, "--parts", "embeddings", comparison="serving")
