"""Whole runs over a file, a log in and a file of scores out: `zoo run` beside a script of pandas and onnxruntime.

A run is a process from its start to its end, in turn on one core. Rows come from scripts/synthesize_criteo.py for
wide-deep-criteo (500,000 rows, 5 rounds by default), from scripts/synthesize_log.py for a model with a schema
(2,000,000 rows, 3 rounds). The script (`pandas_script.py`) runs in its plain form, and with each distinct value encoded
once per chunk, also with an int8 graph: for Criteo's rows the graph of onnxruntime's quantizer, for other logs
int8.onnx. For other logs the scripts score the first --part rows; `zoo run` scores these rows and all rows, which shows
how memory grows.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.engines.catalog import ENGINES
from pipelines.kernels import extension
from scripts.peers import harness, processes
from scripts.peers.engines import onnx_runtime
from scripts.peers.recommenders.wide_deep import drawn_inputs

CRITEO = "wide-deep-criteo"
SCRIPT = Path(__file__).with_name("pandas_script.py")
Ways = dict[str, list[Any]]  # commands by name


def synthesize(kind: str, path: Path, rows: int, *more: Any) -> None:
    """Writes rows of scripts/synthesize_KIND.py, "criteo" or "log"."""
    place = ["-o", path] if kind == "criteo" else [path]
    command = [sys.executable, harness.ROOT / "scripts" / f"synthesize_{kind}.py", "-n", rows, *place, *more]
    subprocess.run(list(map(str, command)), check=True)


def quantize(model: str, scratch: Path) -> None:
    """Quantizes a Wide & Deep model by onnxruntime."""
    inputs = drawn_inputs(model, scratch)
    onnx_runtime.quantize_static(inputs.fp32, inputs.stock, inputs.samples())


def criteo_ways(model: str, rows: int, scratch: Path, output: Path) -> Ways:
    """Returns commands over Criteo's rows."""
    source, folder = scratch / "rows.tsv", zoo.load(model)
    folder.ensure("fp32.onnx")
    synthesize("criteo", source, rows)
    processes.in_process(quantize, model, scratch)  # its memory is not counted with that of the runs
    script = [sys.executable, SCRIPT, source, "-o", output, "--model", folder.path]
    run = [sys.executable, "-m", "zoo", "run", model, source, "-o", output]
    ways = {
        "obvious, onnxruntime fp32": script,
        "factorize, onnxruntime int8": [*script, "--factorize", "--onnx", scratch / "stock.onnx"],
        "zoo run, onnxruntime fp32": [*run, "--precision", "fp32", "--engine", "onnxruntime"],
    }
    engines = [engine for engine in ENGINES if engine != "native" or extension.isas()]
    return ways | {f"zoo run, {engine} int8": [*run, "--engine", engine] for engine in engines}


def log_ways(model: str, rows: int, part: int, scratch: Path, output: Path) -> tuple[Ways, dict[str, int]]:
    """Returns commands over a log of other columns, and how many rows each scores."""
    folder, whole, first = zoo.load(model), scratch / "log.csv", scratch / "part.csv"
    for name in ("fp32.onnx", "int8.onnx"):
        folder.ensure(name)
    synthesize("log", whole, rows)
    with whole.open("rb") as source, first.open("wb") as target:
        target.writelines(itertools.islice(source, part + 1))  # no value holds a line break
    script = [sys.executable, SCRIPT, first, "-o", output, "--model", folder.path]
    run = [sys.executable, "-m", "zoo", "run", model]
    ways = {
        "obvious, onnxruntime fp32": script,
        "factorize, onnxruntime fp32": [*script, "--factorize"],
        "factorize, onnxruntime int8": [*script, "--factorize", "--onnx", folder.path / "int8.onnx"],
        "zoo run": [*run, first, "-o", output],
        f"zoo run, {rows:,} rows": [*run, whole, "-o", output],
    }
    return ways, {way: part if first in command else rows for way, command in ways.items()}


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("model", nargs="?", default=CRITEO, help=f"a recommender (default {CRITEO})")
    parser.add_argument("-n", "--rows", type=int, help="number of rows")
    parser.add_argument("--part", type=int, default=1_000_000, help="rows that the scripts score (default 1000000)")
    parser.add_argument("--rounds", type=int, help="runs of each command")


def measure(args: Any) -> dict[str, Any]:
    """Returns {"model", "rows", "by", "results" (see `processes.whole_processes`), "environment"}."""
    criteo = args.model == CRITEO
    count, rounds = args.rows or (500_000 if criteo else 2_000_000), args.rounds or (5 if criteo else 3)
    part = count if criteo else args.part
    if min(count, rounds, part) < 1 or part > count:
        raise RequestError(
            f"found {count} rows, part {part}, {rounds} rounds; expected 1 or more, part within the rows"
        )
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "scores.csv"
        if criteo:
            ways = criteo_ways(args.model, count, Path(name), output)
            rows = dict.fromkeys(ways, count)
        else:
            ways, rows = log_ways(args.model, count, part, Path(name), output)
        results = processes.whole_processes(ways, rows, output, rounds)
    facts = machine.environment(threads=1, rounds=rounds)
    return {"model": args.model, "rows": part, "by": Path(__file__).name, "results": results, "environment": facts}
