"""Time whole runs over a file, Criteo rows in and a file of scores out: `zoo run` beside the obvious script, in turn on
one core.

    python scripts/peers/recommenders/criteo_run.py [-n 500000] [--rounds 5] [-o FILE]

A run is a process from its start to its end. Rows come from scripts/synthesize_criteo.py. The better-informed script
hashes each distinct value once a chunk and runs the graph that onnxruntime's own quantizer made.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import zoo
from pipelines.core import files, machine
from pipelines.core.errors import RequestError
from pipelines.engines.catalog import ENGINES
from pipelines.kernels import extension
from scripts.peers import harness
from scripts.peers.recommenders.wide_deep import Work, stock_quantize

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

    Returns {"model", "rows", "by", "results" (see `harness.whole_processes`), "environment"}. Raises RequestError for
    fewer than one row or round, ZooError where a run fails.
    """
    if min(count, rounds) < 1:
        raise RequestError(f"rows {count} and rounds {rounds} must both be 1 or more")
    folder = zoo.load(MODEL)
    folder.ensure("fp32.onnx")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        source, output = scratch / "rows.tsv", scratch / "scores.csv"
        subprocess.run(
            [sys.executable, HERE.parents[1] / "synthesize_criteo.py", "-n", str(count), "-o", source], check=True
        )
        quantizing = multiprocessing.get_context("spawn").Process(target=make_stock, args=(scratch,))
        quantizing.start()
        quantizing.join()
        obvious = [sys.executable, HERE / "pandas_criteo.py", source, "-o", output, "--model", folder.path]
        run = [sys.executable, "-m", "zoo.cli.app", "run", MODEL, source, "-o", output]
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
        results = harness.whole_processes(ways, dict.fromkeys(ways, count), output, rounds)
    return {
        "model": MODEL,
        "rows": count,
        "by": "criteo_run.py",
        "results": results,
        "environment": machine.environment(threads=1, rounds=rounds),
    }


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument("-n", "--rows", default="500000", help="how many rows (default 500000)")
    parser.add_argument("--rounds", default="5", help="runs of each way (default 5)")
    with harness.one_line("criteo_run"):
        args = parser.parse_args()
        (count, *_), (rounds, *_) = harness.numbers("rows", args.rows), harness.numbers("rounds", args.rounds)
        report = compare(count, rounds)
        if args.output:
            files.write_json(args.output, report)
        harness.show(report, harness.whole_table, args.json)


if __name__ == "__main__":
    main()
