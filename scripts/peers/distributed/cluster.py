"""Scoring 20,000,000 rows in 20 Parquet files by several processes and on Ray, each way from its start to its end.

Ways: one process, two shards, two actors of Ray with a cluster of their own and on one that runs, the same with actors
killed, and Ray Data with onnxruntime. Rows come from scripts/synthesize_log.py; every file has the same rows in its own
order. Ray Data scores with pandas and onnxruntime as `pandas_script.py` does, each distinct value encoded once a block.
The folder keeps the rows for the next time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core import files, machine
from pipelines.core.errors import RequestError, ZooError
from scripts.peers import harness, processes
from scripts.peers.recommenders import pandas_script
from scripts.peers.recommenders.runs import synthesize

MODEL, FILES, WORKERS = "shop-clicks", 20, 2
SELF = [sys.executable, harness.ROOT / "scripts" / "peers", "cluster"]
LOOK = 0.5  # seconds between looks at the actors, which cost time that the actors lack


def prepare(folder: Path, count: int) -> list[str]:
    """Returns the files of rows; those that a former run left are used again."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    paths = [folder / f"{count}-{i:02d}.parquet" for i in range(FILES)]
    if not all(path.is_file() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.csv"
        synthesize("log", log, count // FILES)
        table = pa.csv.read_csv(log)
        for i, target in enumerate(paths):
            order = np.random.default_rng(i).permutation(len(table))
            with files.replacing(target) as temporary:
                pa.parquet.write_table(table.take(order), temporary, row_group_size=1 << 18)
        log.unlink()
    return [str(path) for path in paths]


def named(start: bytes) -> list[int]:
    """Returns the processes whose command line begins with `start`."""
    pids = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place.read_bytes().startswith(start):
                pids.append(int(place.parent.name))
        except OSError:
            continue
    return pids


def timed(*commands: Sequence[Any], watch: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Runs commands at once; returns {"seconds", "memory_mb": peak of the largest process started here}."""
    finished = processes.run(*commands, watch=watch)
    return {"seconds": round(finished.seconds, 2), "memory_mb": round(finished.peak_mb)}


def digests(folder: Path) -> list[str]:
    """Returns the digests of the results of all parts."""
    return [files.sha256(path) for path in sorted(folder.glob("part-*.parquet"))]


HELD = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": int(sys.argv[1]), "include_dashboard": False})
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Runs a cluster of Ray meanwhile; yields its address."""
    command = [sys.executable, "-c", HELD, str(WORKERS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as held:
        assert held.stdin is not None and held.stdout is not None
        line = next((line for line in held.stdout if line.startswith(b"address ")), b"")
        if not line:
            raise ZooError("no cluster of Ray could be started here")
        yield line.decode().split()[1]
        held.stdin.close()


def on_ray(
    run: list[Any], rows: list[str], out: Path, kills: Sequence[float] = (), address: str | None = None
) -> dict[str, Any]:
    """Scores rows on Ray.

    Args:
        run: Command of `zoo run` and the model.
        rows: The files.
        out: Folder of the results.
        kills: An actor is killed when each of these shares of the parts is done.
        address: Address of a running cluster; None for one of its own.

    Returns:
        The fields of `timed`, "worker_mb" and "killed".

    Raises:
        ZooError: The run fails, or ends before its actors are killed.
    """
    workers: dict[int, float] = {}
    waiting = list(kills)
    looked = 0.0

    def watch() -> None:
        nonlocal looked
        if time.monotonic() < looked + LOOK:
            return
        looked = time.monotonic()
        scorers = named(b"ray::Scorer")
        workers.update((pid, max(workers.get(pid, 0.0), processes.memory_mb("VmHWM", pid))) for pid in scorers)
        done = (
            len(list(out.glob("part-*.json"))) / max(len(json.loads((out / "plan.json").read_text())["parts"]), 1)
            if (out / "plan.json").is_file()
            else 0
        )
        if waiting and done >= waiting[0] and scorers:
            os.kill(scorers[0], signal.SIGKILL)
            waiting.pop(0)

    where = [] if address is None else ["--address", address]
    figures = timed([*run, *rows, "-o", out, "--on", "ray", "--workers", str(WORKERS), *where], watch=watch)
    if waiting:
        raise ZooError("the run ended before its actors were killed")
    return {**figures, "worker_mb": round(max(workers.values())), "killed": len(kills)}


class PandasScorer:
    """Scores chunks of rows by pandas and onnxruntime, for `map_batches`."""

    def __init__(self, folder: str) -> None:
        preprocessing = json.loads((Path(folder) / "card.json").read_text())["preprocessing"]
        self.session = pandas_script.open_session(f"{folder}/int8.onnx")
        self.form = pandas_script.SchemaColumns(preprocessing, factorize=True)

    def __call__(self, chunk: Any) -> Any:
        """Returns the probabilities of a chunk of rows."""
        for column in self.form.columns:
            chunk[column["name"]] = chunk[column["name"]].astype(float if column["kind"] == "number" else "string")
        chunk["probability"] = pandas_script.probabilities(self.session, self.form.encode(chunk))
        return chunk[["probability"]]


def by_ray_data(address: str, folder: str, out: str, *rows: str) -> None:
    """Scores rows by Ray Data as its documentation shows it."""
    import ray

    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(harness.ROOT)}})
    data = ray.data.read_parquet(list(rows))
    scored = data.map_batches(
        PandasScorer,
        fn_constructor_args=(folder,),
        batch_format="pandas",
        batch_size=50_000,
        concurrency=WORKERS,
        num_cpus=0.5,
    )
    scored.write_parquet(out)


def compare(count: int, folder: Path) -> dict[str, Any]:
    """Measures all ways, one after the other."""
    if count < FILES:
        raise RequestError(f"found {count} rows, expected one a file or more")
    model = zoo.load(MODEL)
    model.ensure("int8.onnx")
    rows = prepare(folder, count)
    run = [sys.executable, "-m", "zoo", "run", MODEL]
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        one, two = scratch / "one", scratch / "two"
        results["one process"] = timed(["taskset", "-c", "0", *run, *rows, "-o", one, "--shard", "1/1"])
        shards = [
            ["taskset", "-c", str(i), *run, *rows, "-o", two, "--shard", f"{i + 1}/{WORKERS}"] for i in range(WORKERS)
        ]
        results["two shards"] = timed(*shards)
        results["ray"] = on_ray(run, rows, scratch / "ray")
        with cluster() as address:
            results["ray, a running cluster"] = on_ray(run, rows, scratch / "running", address=address)
            naive = [*SELF, "--by-ray-data", address, model.path, scratch / "naive"]
            results["ray data, onnxruntime, a running cluster"] = timed([*naive, *rows])
        results["ray, two actors killed"] = on_ray(run, rows, scratch / "killed", (1 / 3, 2 / 3))
        expected = digests(one)
        for way, place in (
            ("two shards", two),
            ("ray", scratch / "ray"),
            ("ray, a running cluster", scratch / "running"),
            ("ray, two actors killed", scratch / "killed"),
        ):
            results[way]["equal"] = bool(expected) and digests(place) == expected
        for result in results.values():
            result |= {"rows": count, "rows_per_second": round(count / result["seconds"])}
    return {
        "model": MODEL,
        "rows": count,
        "files": FILES,
        "results": results,
        "environment": machine.environment(threads=1),
    }


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("-n", "--rows", type=int, default=20_000_000, help="number of rows (default 20000000)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "zoo-cluster-rows")
    parser.add_argument("--by-ray-data", nargs="+", help="ADDRESS MODEL OUTPUT ROWS...: score by Ray Data, and no more")


def measure(args: Any) -> dict[str, Any] | None:
    """See `compare`."""
    if args.by_ray_data:
        by_ray_data(*args.by_ray_data)
        return None
    return compare(args.rows, args.folder)
