"""Time whole runs over a click log with columns of its own, CSV in and a file of scores out: `zoo run` beside the
obvious script, in turn on one core.

    python scripts/peers/recommenders/log_run.py [MODEL] [-n 2000000] [--part 1000000] [--rounds 3] [-o FILE]

A run is a process from its start to its end. Rows come from scripts/synthesize_log.py. The scripts score the first
`--part` rows, with the model's fp32.onnx or its int8.onnx in onnxruntime; the better-informed one looks up each
distinct value once a chunk. `zoo run` scores the part, which says what memory grows by, and all rows.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import zoo
from pipelines.core import files, machine
from pipelines.core.errors import RequestError
from scripts.peers import harness

MODEL = "shop-clicks"
HERE = Path(__file__).resolve().parent


def compare(model: str, count: int, part: int, rounds: int) -> dict[str, Any]:
    """All ways in turn.

    Returns {"model", "rows", "by", "results" (see `harness.whole_processes`), "environment"}. Raises RequestError for
    fewer than one row or round, ZooError where a run fails.
    """
    if min(count, part, rounds) < 1 or part > count:
        raise RequestError(f"rows {count}, part {part} and rounds {rounds} must be 1 or more, the part within the rows")
    folder = zoo.load(model)
    for name in ("fp32.onnx", "int8.onnx"):
        folder.ensure(name)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        whole, some, output = scratch / "log.csv", scratch / "part.csv", scratch / "scores.csv"
        subprocess.run([sys.executable, HERE.parents[1] / "synthesize_log.py", whole, "-n", str(count)], check=True)
        with whole.open("rb") as source, some.open("wb") as target:
            target.writelines(itertools.islice(source, part + 1))  # no value holds a line break
        script = [sys.executable, HERE / "pandas_log.py", some, "-o", output, "--model", folder.path]
        run = [sys.executable, "-m", "zoo", "run", model]
        ways: dict[str, list[Any]] = {
            "obvious, onnxruntime fp32": script,
            "factorize, onnxruntime fp32": [*script, "--factorize"],
            "factorize, onnxruntime int8": [*script, "--factorize", "--onnx", folder.path / "int8.onnx"],
            "zoo run": [*run, some, "-o", output],
            f"zoo run, {count:,} rows": [*run, whole, "-o", output],
        }
        rows = {way: part if some in command else count for way, command in ways.items()}
        results = harness.whole_processes(ways, rows, output, rounds)
    return {
        "model": model,
        "rows": part,
        "by": "log_run.py",
        "results": results,
        "environment": machine.environment(threads=1, rounds=rounds),
    }


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument("model", nargs="?", default=MODEL, help=f"a model that reads such logs (default {MODEL})")
    parser.add_argument("-n", "--rows", default="2000000", help="how many rows (default 2000000)")
    parser.add_argument("--part", default="1000000", help="how many of them the scripts score (default 1000000)")
    parser.add_argument("--rounds", default="3", help="runs of each way (default 3)")
    with harness.one_line("log_run"):
        args = parser.parse_args()
        (count, *_), (part, *_) = harness.numbers("rows", args.rows), harness.numbers("part", args.part)
        rounds, *_ = harness.numbers("rounds", args.rounds)
        report = compare(args.model, count, part, rounds)
        if args.output:
            files.write_json(args.output, report)
        harness.show(report, harness.whole_table, args.json)


if __name__ == "__main__":
    main()
