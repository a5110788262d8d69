"""Shared by the parts of scripts/reproduce.py: commands of this project, evaluations, reports and figures of cards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import files, machine
from scripts.peers import processes
from scripts.peers.harness import ROOT

MODEL = "wide-deep-criteo"
ROUNDS = 9
PEERS = ROOT / "scripts" / "peers"
Words = str | Path | int


def cpu_slug() -> str:
    """Returns the CPU as part of a file name, e.g. amd-epyc-25-17 (family and model tell apart what shares a name)."""
    cpu = machine.cpu()
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu['name']} {cpu['family']} {cpu['model']}".lower()).strip("-")


# ------------------------------------------------------------------------------------------------------------- reports


def written(path: Path, value: Any = None) -> None:
    """Writes a report, unless another process has, and prints its path."""
    if value is not None:
        files.write_json(path, value)
    print(f"wrote {path.relative_to(ROOT)}")


def report(name: str, value: Any, model: str = MODEL) -> None:
    """Writes a report of a model that ships."""
    written(zoo.SHIPPED / model / "reports" / f"{name}.json", value)


def peers_report(name: str) -> Path:
    """Returns the path of a report of several models on this CPU."""
    return PEERS / "reports" / f"{name}-{cpu_slug()}.json"


def card_metrics(model: str, metrics: Mapping[str, Any]) -> None:
    """Writes the metrics of a model's card."""
    card = zoo.SHIPPED / model / "card.json"
    files.write_json(card, files.read_json(card) | {"metrics": metrics})


def evaluate(model: str | Path, data: str | Path, *keys: str) -> dict[str, Any]:
    """Runs `zoo evaluate` in onnxruntime, with "native": {"metrics", "difference", *keys} of int8 in native code."""
    result, native = (zoo.evaluate(model, str(data), engine=engine) for engine in ("onnxruntime", "native"))
    result["native"] = {"metrics": native["metrics"]["int8"], **{key: native[key] for key in ("difference", *keys)}}
    return result


# ------------------------------------------------------------------------------------------------------------ commands


def zoo_command(*words: Words) -> list[str]:
    """Returns a command of this project, pinned to one core, that prints JSON."""
    return ["taskset", "-c", str(processes.last_core()), sys.executable, "-m", "zoo", *map(str, words), "--json"]


def zoo_json(*words: Words, pinned: bool = True) -> Any:
    """Returns the JSON that a command of this project prints."""
    command = zoo_command(*words)[0 if pinned else 3 :]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def watched(command: list[str], environment: dict[str, str] | None = None) -> tuple[str, dict[str, float]]:
    """Runs a command with further environment variables.

    Returns:
        (its output, its seconds, its seconds of processor time and its peak resident memory).

    Raises:
        ZooError: It fails.
    """
    finished = processes.run(command, environment=environment)
    return finished.output, {
        "process_seconds": round(finished.seconds, 2),
        "processor_seconds": round(finished.processor_seconds, 2),
        "peak_memory_mb": round(finished.peak_mb, 1),
    }


def measure_together(
    name: str, *arguments: str | Path, comparison: str = "", more: dict[str, str] | None = None
) -> None:
    """Writes scripts/peers/reports/NAME-CPU.json by a comparison of `scripts/peers`, on two cores.

    Args:
        name: Name of the report.
        arguments: Arguments of the comparison.
        comparison: Its name, where that is not the report's.
        more: Environment variables beside those of this process.
    """
    command = [sys.executable, PEERS, comparison or name, *arguments, "-o", peers_report(name)]
    subprocess.run(["taskset", "-c", "0,1", *command], check=True, env=os.environ | (more or {}))
    written(peers_report(name))


def measure_model(name: str, comparison: str, model: str = MODEL) -> None:
    """Writes the report NAME-CPU.json of a model that ships by a comparison of `scripts/peers`."""
    target = zoo.SHIPPED / model / "reports" / f"{name}-{cpu_slug()}.json"
    subprocess.run([sys.executable, PEERS, comparison, model, "-o", target], check=True)
    written(target)
