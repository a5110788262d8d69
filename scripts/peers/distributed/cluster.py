"""Scoring 20,000,000 rows in 20 Parquet files by several processes and on Ray, each way from its start to its end.

Ways: one process, two shards, two actors of Ray with a cluster of their own and on one that runs, the same with actors
killed, and Ray Data with onnxruntime. Rows come from scripts/synthesize_log.py; each file holds the same ones in an
order of its own. Ray Data scores with pandas and onnxruntime as `pandas_script.py` does, each distinct value encoded
once a block. The folder keeps the rows for the next time.
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
from scripts.peers import harness
from scripts.peers.processes import memory_mb
from scripts.peers.recommenders import pandas_script
from scripts.peers.recommenders.runs import synthesize

MODEL, FILES, WORKERS = "shop-clicks", 20, 2
SELF = [sys.executable, harness.ROOT / "scripts" / "peers", "cluster"]
LOOK = 0.5  # seconds between looks at the actors, which cost time that the actors lack


def prepare(folder: Path, count: int) -> list[str]:
    """The files of rows."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    found = [folder / f"{count}-{i:02d}.parquet" for i in range(FILES)]
    if not all(each.is_file() for each in found):
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.csv"
        synthesize("log", log, count // FILES)
        table = pa.csv.read_csv(log)
        for i, each in enumerate(found):
            order = np.random.default_rng(i).permutation(len(table))
            with files.replacing(each) as temporary:
                pa.parquet.write_table(table.take(order), temporary, row_group_size=1 << 18)
        log.unlink()
    return [str(each) for each in found]


def named(start: bytes) -> list[int]:
    """The processes whose command begins so."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place.read_bytes().startswith(start):
                found.append(int(place.parent.name))
        except OSError:
            continue
    return found


def timed(commands: Sequence[Sequence[Any]], watch: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """{"seconds", "memory_mb": of the largest process started here} of commands that run at once."""
    start, most = time.perf_counter(), 0.0
    running = [
        subprocess.Popen([*map(str, each)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for each in commands
    ]
    while any(each.poll() is None for each in running):
        most = max(most, *(memory_mb("VmHWM", each.pid) for each in running))
        watch()
        time.sleep(0.05)
    seconds = time.perf_counter() - start
    for each in running:
        if each.returncode:
            raise ZooError(f"{' '.join(each.args[:6])} failed: {each.communicate()[1][-300:]}")
    return {"seconds": round(seconds, 2), "memory_mb": round(most)}


def digests(folder: Path) -> list[str]:
    """Of the results of all parts."""
    return [files.sha256(each) for each in sorted(folder.glob("part-*.parquet"))]


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
    """The address of a cluster that runs meanwhile."""
    command = [sys.executable, "-c", HELD, str(WORKERS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as held:
        assert held.stdin is not None and held.stdout is not None
        told = next((each for each in held.stdout if each.startswith(b"address ")), b"")
        if not told:
            raise ZooError("no cluster of Ray could be started here")
        yield told.decode().split()[1]
        held.stdin.close()


def on_ray(
    run: list[Any], rows: list[str], out: Path, kills: Sequence[float] = (), address: str | None = None
) -> dict[str, Any]:
    """`timed`, with "worker_mb"; actors are killed when these shares of the parts are done. address: of the cluster."""
    workers: dict[int, float] = {}
    waiting = list(kills)
    looked = 0.0

    def watch() -> None:
        nonlocal looked
        if time.monotonic() < looked + LOOK:
            return
        looked = time.monotonic()
        found = named(b"ray::Scorer")
        workers.update((pid, max(workers.get(pid, 0.0), memory_mb("VmHWM", pid))) for pid in found)
        done = (
            len(list(out.glob("part-*.json"))) / max(len(json.loads((out / "plan.json").read_text())["parts"]), 1)
            if (out / "plan.json").is_file()
            else 0
        )
        if waiting and done >= waiting[0] and found:
            os.kill(found[0], signal.SIGKILL)
            waiting.pop(0)

    where = [] if address is None else ["--address", address]
    found = timed([[*run, *rows, "-o", out, "--on", "ray", "--workers", str(WORKERS), *where]], watch)
    if waiting:
        raise ZooError("the run ended before its actors were killed")
    return {**found, "worker_mb": round(max(workers.values())), "killed": len(kills)}


class PandasScorer:
    """The code one writes for `map_batches`."""

    def __init__(self, folder: str) -> None:
        preprocessing = json.loads((Path(folder) / "card.json").read_text())["preprocessing"]
        self.session = pandas_script.open_session(f"{folder}/int8.onnx")
        self.form = pandas_script.SchemaColumns(preprocessing, factorize=True)

    def __call__(self, chunk: Any) -> Any:
        for each in self.form.columns:
            chunk[each["name"]] = chunk[each["name"]].astype(float if each["kind"] == "number" else "string")
        chunk["probability"] = pandas_script.probabilities(self.session, self.form.encode(chunk))
        return chunk[["probability"]]


def by_ray_data(address: str, folder: str, out: str, *rows: str) -> None:
    """Ray Data as its documents show it."""
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
    """All ways, one after the other."""
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
        results["one process"] = timed([["taskset", "-c", "0", *run, *rows, "-o", one, "--shard", "1/1"]])
        shards = [
            ["taskset", "-c", str(i), *run, *rows, "-o", two, "--shard", f"{i + 1}/{WORKERS}"] for i in range(WORKERS)
        ]
        results["two shards"] = timed(shards)
        results["ray"] = on_ray(run, rows, scratch / "ray")
        with cluster() as address:
            results["ray, a running cluster"] = on_ray(run, rows, scratch / "running", address=address)
            naive = [*SELF, "--by-ray-data", address, model.path, scratch / "naive"]
            results["ray data, onnxruntime, a running cluster"] = timed([[*naive, *rows]])
        results["ray, two actors killed"] = on_ray(run, rows, scratch / "killed", (1 / 3, 2 / 3))
        expected = digests(one)
        for way, place in (
            ("two shards", two),
            ("ray", scratch / "ray"),
            ("ray, a running cluster", scratch / "running"),
            ("ray, two actors killed", scratch / "killed"),
        ):
            results[way]["equal"] = bool(expected) and digests(place) == expected
        for each in results.values():
            each |= {"rows": count, "rows_per_second": round(count / each["seconds"])}
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
