"""`zoo serve` beside `zoo serve --on ray` on one machine, a worker and a replica of one core each, in turn.

Requests of a row and of 500 rows come from clients that send the next one as soon as the last is answered.
"""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core import machine
from scripts.peers import harness, processes
from scripts.peers.serving import load
from scripts.peers.serving.server import CSV, Server, running

MODEL, CLIENTS, ROWS = "shop-clicks", 8, (1, 500)
SERVERS = [
    Server("zoo serve", "", (MODEL, "--workers", "1"), "int8-zoo", pinned=False),
    Server("zoo serve --on ray", "", (MODEL, "--on", "ray", "--replicas", "1"), "int8-zoo", pinned=False),
]
STOP_SECONDS = 60.0


def request(rows: int) -> load.Request:
    """Returns a request of `rows` rows of the model's sample."""
    header, *lines = gzip.decompress((zoo.load(MODEL).path / "sample.csv.gz").read_bytes()).splitlines(keepends=True)
    body = header + b"".join((lines * (rows // len(lines) + 1))[:rows])
    return load.Request(f"/v1/models/{MODEL}:run", CSV, body)


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.count("--rounds", 3, "turns of each server")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load (default 4)")


def measure(args: Any) -> dict[str, Any]:
    """Returns {"model", "clients", "results": [{"way", "rows", "rate", "p50", "p99"}], "share", "environment"}."""
    figures: dict[tuple[str, int], list[dict[str, float]]] = {}
    requests = {rows: request(rows) for rows in ROWS}
    with contextlib.ExitStack() as stack:
        ports = {
            server.name: stack.enter_context(running(server, Path(), requests[1], STOP_SECONDS)).port
            for server in SERVERS
        }
        for number in range(args.rounds + 1):
            for rows, asked in requests.items():
                for name, port in ports.items():
                    seconds = args.seconds if number else 1  # the first round warms up
                    measured = processes.in_process(load.clients, port, [asked], CLIENTS, seconds, machine.cores() - 1)
                    if number:
                        figures.setdefault((name, rows), []).append(measured)
    results = [
        {"way": name, "rows": rows, **{key: float(np.median([turn[key] for turn in turns])) for key in turns[0]}}
        for (name, rows), turns in figures.items()
    ]
    rates = {(result["way"], result["rows"]): result["rate"] for result in results}
    share = {str(rows): rates[SERVERS[1].name, rows] / rates[SERVERS[0].name, rows] for rows in ROWS}
    about = machine.environment(threads=1, rounds=args.rounds)
    return {"model": MODEL, "clients": CLIENTS, "results": results, "share": share, "environment": about}
