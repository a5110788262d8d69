"""`zoo serve` beside `zoo serve --on ray` on one machine, a worker and a replica of one core each, in turn: requests of
a row and of 500 rows by clients that ask again as soon as they are answered.

    python scripts/peers/serving/ray_serve.py [--rounds 3] [--seconds 4] [-o FILE]
"""

from __future__ import annotations

import contextlib
import gzip
import multiprocessing
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import zoo
from pipelines.core import files, machine
from pipelines.core.errors import ZooError
from scripts.peers import harness
from scripts.peers.serving import load as serving_load

MODEL, CLIENTS, ROWS = "shop-clicks", 8, (1, 500)
WAYS = {"zoo serve": ["--workers", "1"], "zoo serve --on ray": ["--on", "ray", "--replicas", "1"]}


@contextlib.contextmanager
def serving(words: list[str]) -> Iterator[int]:
    """The port of a server that is ready, and ends with the block."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    command = [sys.executable, "-m", "zoo", "serve", MODEL, "--port", str(port), *words]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{MODEL}/ready", timeout=2).status == 200:
                    break
            time.sleep(0.2)
        else:
            raise ZooError(f"{' '.join(command[2:])} does not answer")
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def load(port: int, count: int, seconds: float) -> dict[str, float]:
    """{"rate", "p50", "p99"} of the clients, from a process of their own."""
    text = gzip.decompress((zoo.load(MODEL).path / "sample.csv.gz").read_bytes()).splitlines(keepends=True)
    rows = (text[1:] * (count // len(text) + 2))[:count]
    body = text[0] + b"".join(rows)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        asked = (port, f"/v1/models/{MODEL}:run", "text/csv", [body], CLIENTS, seconds, machine.cores() - 1)
        return pool.submit(serving_load.clients, *asked).result()


def compare(rounds: int, seconds: float) -> dict[str, Any]:
    """Both ways in turn."""
    found: dict[str, dict[int, list[dict[str, float]]]] = {way: {count: [] for count in ROWS} for way in WAYS}
    with contextlib.ExitStack() as stack:
        ports = {way: stack.enter_context(serving(words)) for way, words in WAYS.items()}
        for i in range(rounds + 1):
            for count in ROWS:
                for way, port in ports.items():
                    each = load(port, count, seconds if i else 1)  # the first warms up
                    found[way][count] += [each] if i else []
    results = [
        {"way": way, "rows": count, **{key: float(np.median([each[key] for each in some])) for key in some[0]}}
        for way, parts in found.items()
        for count, some in parts.items()
    ]
    share = {
        str(count): next(e["rate"] for e in results if e["way"] != "zoo serve" and e["rows"] == count)
        / next(e["rate"] for e in results if e["way"] == "zoo serve" and e["rows"] == count)
        for count in ROWS
    }
    about = machine.environment(threads=1, rounds=rounds)
    return {"model": MODEL, "clients": CLIENTS, "results": results, "share": share, "environment": about}


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    found = compare(args.rounds, args.seconds)
    if args.output:
        files.write_json(args.output, found)
    for each in found["results"]:
        times = f"p50 {each['p50']:.2f}  p99 {each['p99']:.2f} ms"
        print(f"{each['way']:20}{each['rows']:5} rows {each['rate']:9.1f}/s  {times}")
    print(found["share"])


if __name__ == "__main__":
    with harness.one_line("serving_on_ray"):
        main()
