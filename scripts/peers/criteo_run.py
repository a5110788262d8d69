"""Time whole runs over a file, Criteo rows in and a file of scores out: `zoo run` beside the obvious script, in turn on
one core.

    python scripts/peers/criteo_run.py [-n 500000] [--rounds 5] [-o FILE]

A run is a process from its start to its end. Rows come from scripts/synthesize_criteo.py. The better-informed script
hashes each distinct value once a chunk and runs the graph that onnxruntime's own quantizer made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from wide_deep import Work, stock_quantize

import zoo
from pipelines.core import files, machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from pipelines.engines.catalog import ENGINES
from pipelines.kernels import extension

MODEL = "wide-deep-criteo"
HERE = Path(__file__).resolve().parent


def make_stock(scratch: Path) -> None:
    """Quantize the model by onnxruntime; in a process of its own, so that its memory is not counted with that of the
    runs.
    """
    features = zoo.load(MODEL).preprocessing
    work = Work(MODEL, scratch, features["categorical"], features["buckets"], features["numeric"])
    stock_quantize(work.fp32, work.stock, work.samples())


def compare(count: int, rounds: int) -> dict[str, Any]:
    """All ways in turn.

    Returns {"model", "rows", "results": [{"way", "seconds" (median), "spread" (least and most), "cpu_seconds" (median;
    a busy machine changes it less), "rows_per_second", "peak_memory_mb", "max_probability" (largest difference to the
    obvious script)}], "environment"}. Raises RequestError for fewer than one row or round, ZooError where a run fails.
    """
    if min(count, rounds) < 1:
        raise RequestError(f"rows {count} and rounds {rounds} must both be 1 or more")
    core = max(os.sched_getaffinity(0))
    folder = zoo.load(MODEL)
    folder.ensure("fp32.onnx")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        source, output = scratch / "rows.tsv", scratch / "scores.csv"
        subprocess.run(
            [sys.executable, HERE.parent / "synthesize_criteo.py", "-n", str(count), "-o", source], check=True
        )
        quantizing = multiprocessing.get_context("spawn").Process(target=make_stock, args=(scratch,))
        quantizing.start()
        quantizing.join()
        obvious = [sys.executable, HERE / "criteo_obvious.py", source, "-o", output, "--model", folder.path]
        run = [sys.executable, "-m", "zoo.cli", "run", MODEL, source, "-o", output]
        ways: dict[str, list[Any]] = {
            "obvious, onnxruntime fp32": obvious,
            "factorize, onnxruntime int8": [*obvious, "--factorize", "--onnx", scratch / "stock.onnx"],
            "zoo run, onnxruntime fp32": [*run, "--precision", "fp32", "--engine", "onnxruntime"],
            **{
                f"zoo run, {engine} int8": [*run, "--engine", engine]
                for engine in ENGINES
                if engine != "native" or extension.isas()
            },
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        memory: dict[str, float] = {}
        scores: dict[str, Any] = {}
        with progress("runs", rounds * len(ways)) as advance:
            for _ in range(rounds):
                for way, command in ways.items():
                    taken, worked, peak = timed(["taskset", "-c", str(core), *map(str, command)])
                    seconds[way].append(taken)
                    cpu[way].append(worked)
                    memory[way] = max(peak, memory.get(way, 0))
                    scores[way] = np.loadtxt(output, delimiter=",", skiprows=1, usecols=1)
                    advance(1)
    results = []
    first = next(iter(scores.values()))
    for way, each in seconds.items():
        middle = float(np.median(each))
        results.append(
            {
                "way": way,
                "seconds": round(middle, 2),
                "spread": [round(min(each), 2), round(max(each), 2)],
                "cpu_seconds": round(float(np.median(cpu[way])), 2),
                "rows_per_second": round(count / middle),
                "peak_memory_mb": round(memory[way], 1),
                "max_probability": float(f"{np.abs(scores[way] - first).max():.2e}"),
            }
        )
    return {
        "model": MODEL,
        "rows": count,
        "results": results,
        "environment": machine.environment(threads=1, rounds=rounds),
    }


def timed(command: list[str]) -> tuple[float, float, float]:
    """Seconds, seconds of processor time, and peak resident memory (MB, 10^6 bytes) of a process.

    Raises ZooError with its last line where it fails.
    """
    with tempfile.TemporaryFile() as said:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        if process.returncode:
            raise ZooError(f"{' '.join(command)} failed: {(said.read().decode().splitlines() or ['no message'])[-1]}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--rows", type=int, default=500_000, help="how many rows (default 500000)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way (default 5)")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the report")
    args = parser.parse_args()
    try:
        report = compare(args.rows, args.rounds)
        if args.output:
            files.write_json(args.output, report)
        print(json.dumps(report["results"], indent=2))
    except ZooError as error:
        print(f"criteo_run: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
