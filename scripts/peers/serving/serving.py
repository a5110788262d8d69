"""Requests a second and their tail: `zoo serve` beside the servers that users know, in turn, the server on one core.

ENVIRONMENTS is a folder with a Python environment for each server, as they conflict; `--make` makes it. Parts:
"layers", one native session behind each HTTP layer; "peers", int8.onnx in onnxruntime behind KServe, LitServe, Ray
Serve and MLServer beside `zoo serve`, one row a request; "rows", 500 rows a request as TSV beside `zoo run`'s rate in a
process; "lone", the overhead of a server for one row and one photo; "sentences", 32 clients of a translation model
beside batches in a process; "embeddings", 64 clients of an encoder's /v1/embeddings likewise; "workers", the memory of
one to four of them. Load comes from wrk (Debian's package) or, where a rate or single times count, from `load.py`, on
the other core. `servers/` has the code of each server.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.core.errors import ZooError
from pipelines.core.machine import environment
from scripts.peers import harness
from scripts.peers.harness import median
from scripts.peers.processes import memory_mb, run, session_members
from scripts.peers.serving import load
from scripts.peers.serving.load import Request
from scripts.peers.serving.server import CLICKS, CORES, CSV, JSON, TEXT, TSV, Running, Server, running, wrk

PHOTOS, TRANSLATION, ENCODER = "mobilenet-v2-imagenet", "multi30k-en-de", "minilm-l6"
LOAD = [sys.executable, str(Path(load.__file__))]
REQUIREMENTS = {
    "uvicorn": ["starlette", "uvicorn", "httptools", "uvloop"],
    "granian": ["granian", "starlette", "uvloop"],
    "mosec": ["mosec"],
    "robyn": ["robyn"],
    "blacksheep": ["blacksheep", "uvicorn", "httptools", "uvloop"],
    "socketify": ["socketify"],
    "litserve": ["litserve", "onnxruntime"],
    "kserve": ["kserve==0.21.*", "onnxruntime"],
    "ray": ["ray[serve]==2.60.*", "onnxruntime"],
    "mlserver": ["mlserver==1.7.1", "onnxruntime"],
}
OWN = ("uvicorn", "granian", "mosec", "robyn", "blacksheep", "socketify", "litserve")  # hold this project as well
MADE = "made"  # a file in an environment that is whole


def _layer(name: str, environment: str, file: str = "layers.py") -> Server:
    package = name.partition("-")[0].partition("+")[0]
    return Server(name, environment, (file, name) if file == "layers.py" else (file,), package)


LAYERS = [
    _layer("granian-rsgi", "granian"),
    _layer("granian-asgi", "granian"),
    _layer("granian+starlette", "granian"),
    _layer("uvicorn", "uvicorn"),
    _layer("uvicorn+starlette", "uvicorn"),
    _layer("mosec", "mosec", "mosec_native.py"),
    _layer("litserve", "litserve", "litserve_model.py"),
    _layer("robyn", "robyn"),
    _layer("blacksheep", "blacksheep", "blacksheep_native.py"),
    _layer("socketify", "socketify"),
]
ZOO = Server("zoo serve", "", (CLICKS,), "int8-zoo")
PEERS = [
    ZOO,
    Server("kserve", "kserve", ("kserve_onnx.py",), "kserve"),
    Server("litserve", "litserve", ("litserve_model.py", "onnx"), "litserve"),
    Server("litserve, batched", "litserve", ("litserve_model.py", "batched"), "litserve"),
    Server("ray serve", "ray", ("ray_onnx.py",), "ray"),
    Server("ray serve, batched", "ray", ("ray_onnx.py", "batched"), "ray"),
    Server("mlserver", "mlserver", ("mlserver_onnx.py",), "mlserver"),
]
SERVED = {"layers": LAYERS, "peers": PEERS}  # part: servers


# ---------------------------------------------------------------------------------------------------------------- parts


def run_request(model: str, kind: str, body: bytes, accept: str = "*/*") -> Request:
    """Returns a request of raw input to a model."""
    return Request(f"/v1/models/{model}:run", kind, body, accept)


def one_row() -> tuple[Request, float]:
    """Returns a request of the protocol with one row, and its probability by onnxruntime."""
    model = zoo.pipeline(CLICKS, engine="onnxruntime", threads=1)
    batch = model.preprocess(model.example(1))
    kinds = {"int32": "INT32", "float32": "FP32"}
    inputs = [
        {"name": name, "shape": array.shape, "datatype": kinds[array.dtype.name], "data": array.ravel().tolist()}
        for name, array in batch.items()
    ]
    body = json.dumps({"inputs": inputs}).encode()
    return Request(f"/v2/models/{CLICKS}/infer", JSON, body), float(model.predict(batch)["probability"][0, 0])


def in_turn(servers: list[Server], environments: Path, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures one row a request on 64 connections, then on one; servers are restarted in every round."""
    request, expected = one_row()
    turns: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    faults: dict[str, str] = {}
    for _ in range(rounds):
        for server in servers:
            if server.name in faults:
                continue
            try:
                with running(server, environments, request) as live:
                    wrk(live.port, request, 8, 1)
                    many = wrk(live.port, request, 64, seconds)
                    alone = wrk(live.port, request, 1, max(1.0, seconds / 4))
                    answer = json.loads(load.ask(live.port, request)[1])
                    memory = memory_of(live)
                    tables = {output["name"]: output["data"] for output in answer["outputs"]}
                    gap = abs(tables["probability"][0] - expected)
                turns[server.name].append(
                    {**many, "lone": alone["p50"], "memory": memory, "gap": gap, "ready": live.ready, **live.stop}
                )
                print(server.name, round(many["rate"]), file=sys.stderr)
            except (ZooError, OSError) as error:
                faults[server.name] = str(error)
                print(error, file=sys.stderr)
    return [
        {"server": server.name, "left_out": faults[server.name]}
        if server.name in faults
        else _summed(server, turns[server.name], environments)
        for server in servers
    ]


def _summed(server: Server, rounds: list[dict[str, Any]], environments: Path) -> dict[str, Any]:
    last = rounds[-1]
    return {
        "server": server.name,
        "version": _asked(server, environments)["version"],
        "requests_per_second": median([turn["rate"] for turn in rounds], 0),
        "p50_ms": median([turn["p50"] for turn in rounds]),
        "p99_ms": median([turn["p99"] for turn in rounds]),
        "failed": sum(turn["failed"] for turn in rounds),
        "lone_p50_ms": median([turn["lone"] for turn in rounds]),
        "max_difference": float(f"{max(turn['gap'] for turn in rounds):.1e}"),
        "ready_seconds": median([turn["ready"] for turn in rounds], 2),
        "memory_mb": median([turn["memory"] for turn in rounds], 0),
        "stop": {key: last[key] for key in ("exit", "seconds", "left")},
        "package_mb": _asked(server, environments)["mb"],
    }


def memory_of(live: Running) -> float:
    """Returns the memory (PSS) of all processes of a server, in MB."""
    return sum(memory_mb("Pss", pid) for pid in session_members(live.process.pid))


ASK = """
import importlib.metadata as m, json, re, sys
todo, seen, size = [sys.argv[1]], set(), 0
while todo:
    name = re.sub("[-_.]+", "-", todo.pop()).lower()
    try: package = m.distribution(name)
    except m.PackageNotFoundError: continue
    if name in seen: continue
    seen.add(name)
    size += sum(file.size or 0 for file in package.files or ())
    todo += [re.match("[A-Za-z0-9._-]+", text)[0] for text in package.requires or () if "extra ==" not in text]
print(json.dumps({"version": m.version(sys.argv[1]), "mb": round(size / 1e6, 1), "packages": len(seen)}))
"""


def _asked(server: Server, environments: Path) -> dict[str, Any]:
    """Version, and size with all that it needs, of a server's package."""
    python = environments / server.environment / "bin/python" if server.environment else Path(sys.executable)
    done = subprocess.run([str(python), "-c", ASK, server.package], capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def rows(environments: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Measures 500 rows a request, TSV to CSV, beside `zoo run` in a process.

    The tail is that at 70% of the greatest load, of requests at equal distances and of a Poisson process.
    """
    model = zoo.pipeline(CLICKS, engine="native", threads=1)
    lines = model.example(2000)
    body = b"".join(line.rstrip(b"\n") + b"\n" for line in lines[:500])
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.tsv"
        log.write_bytes(body * 1000)
        request, command = run_request(CLICKS, TSV, body, CSV), [*LOAD, "run", CLICKS, str(log)]
        inside: list[float] = []
        served: list[dict[str, Any]] = []
        tail: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for _ in range(rounds):
            inside.append(float(_pinned(command)))
            with running(ZOO, environments, request) as live:
                wrk(live.port, request, 4, 1)
                served.append(wrk(live.port, request, 8, seconds))
                rate = 0.7 * served[-1]["rate"]
                for even, tails in tail.items():
                    tails.append(load.at_rate(live.port, request, rate, seconds, CORES[-1], even))
    most = median([500 * turn["rate"] for turn in served], 0)
    return {
        "rows": 500,
        "in_process_rows_per_second": median(inside, 0),
        "served_rows_per_second": most,
        "share": round(most["median"] / median(inside, 0)["median"], 3),
        **{
            name: {
                **{key: median([turn[key] for turn in tail[even]]) for key in ("p50", "p99")},
                "p99_by_median": median([turn["p99"] / turn["p50"] for turn in tail[even]], 2),
            }
            for name, even in (("at_70_percent", True), ("at_70_percent_poisson", False))
        },
    }


def _pinned(command: list[str]) -> str:
    return run(["taskset", "-c", CORES[0], *command]).output.strip().splitlines()[-1]


def a_row() -> bytes:
    """Returns a row of the model's sample as TSV."""
    return bytes(zoo.pipeline(CLICKS, engine="native").example(1)[0].rstrip(b"\n") + b"\n")


def lone(environments: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Measures a single request beside the same call in a process: milliseconds of one row and of one photo."""
    results: dict[str, Any] = {}
    cases = {"row": (CLICKS, TSV, a_row()), "photo": (PHOTOS, "image/jpeg", load.photo())}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (model, kind, body) in cases.items():
            file, request = Path(scratch) / name, run_request(model, kind, body)
            file.write_bytes(body)
            inside, served = [], []
            for _ in range(rounds):
                inside.append(float(_pinned([*LOAD, "alone", model, str(file)])))
                server = dataclasses.replace(ZOO, arguments=(model,))
                with running(server, environments, request) as live:
                    served.append(load.alone(live.port, request, seconds, CORES[-1]))
            added = round(median(served)["median"] - median(inside)["median"], 3)
            results[name] = {"in_process_ms": median(inside), "served_ms": median(served), "added_ms": added}
    return results


def sentences(environments: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Measures 32 clients with a sentence a request beside batches in a process, and a single sentence."""
    texts = list(zoo.pipeline(TRANSLATION, engine="native").example(512))
    requests = [run_request(TRANSLATION, TEXT, text.encode()) for text in texts]
    return _texts(TRANSLATION, texts, requests, 32, environments, rounds, seconds)


def embeddings(environments: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Measures 64 clients of OpenAI's API with a text a request beside batches in a process, and a single text."""
    texts = list(zoo.pipeline(ENCODER, engine="native").example(512))
    bodies = [{"input": text, "model": ENCODER, "encoding_format": "base64"} for text in texts]
    requests = [Request("/v1/embeddings", JSON, json.dumps(body).encode()) for body in bodies]
    return _texts(ENCODER, texts, requests, 64, environments, rounds, seconds)


def _texts(
    model: str,
    texts: Sequence[str],
    requests: Sequence[Request],
    clients: int,
    environments: Path,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """Measures clients with a text a request beside batches of them in a process, and a single text."""
    server = dataclasses.replace(ZOO, arguments=(model,))
    inside, served, tails, single, first = [], [], [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "text"
        file.write_text("\n".join(texts))
        for _ in range(rounds):
            rate, alone = _pinned([*LOAD, "texts", model, str(file)]).split()
            inside.append(float(rate))
            single.append(float(alone))
            with running(server, environments, requests[0]) as live:
                many = load.clients(live.port, requests, clients, 2 * seconds, CORES[-1])
                served.append(many["rate"])
                tails.append(many["p99"])
                first.append(load.alone(live.port, requests[0], seconds, CORES[-1]))
    return {
        "clients": clients,
        "in_process_per_second": median(inside, 1),
        "served_per_second": median(served, 1),
        "share": round(median(served)["median"] / median(inside)["median"], 3),
        "p99_ms": median(tails, 1),
        "lone": {"in_process_ms": median(single), "served_ms": median(first)},
        "lone_added_ms": round(median(first)["median"] - median(single)["median"], 3),
    }


def workers(environments: Path, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures the memory (PSS) of processes that share one copy of two models, after requests to both."""
    results = []
    row = run_request(CLICKS, TSV, a_row())
    text = run_request(TRANSLATION, TEXT, zoo.pipeline(TRANSLATION, engine="native").example(1)[0].encode())
    for count in (1, 2, 4):
        server = dataclasses.replace(ZOO, arguments=(CLICKS, TRANSLATION, "--workers", str(count)))
        with running(server, environments, row) as live:
            wrk(live.port, row, 16, 1)
            wrk(live.port, text, 4 * count, 2)
            time.sleep(0.5)
            memory = round(memory_of(live))
        results.append({"workers": count, "memory_mb": memory})
    return results


PARTS: dict[str, Callable[[Path, int, float], Any]] = {
    "layers": lambda where, rounds, seconds: in_turn(LAYERS, where, rounds, seconds),
    "peers": lambda where, rounds, seconds: in_turn(PEERS, where, rounds, seconds),
    "rows": rows,
    "lone": lone,
    "sentences": sentences,
    "embeddings": embeddings,
    "workers": workers,
}


def make(environments: Path, parts: Sequence[str]) -> None:
    """Makes the environments of the servers of these parts, and installs this project where it is needed.

    Complete environments are kept; an environment that pip cannot install is left out.
    """
    names = dict.fromkeys(server.environment for part in parts for server in SERVED.get(part, ()) if server.environment)
    free = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}  # they are not this project
    for name in names:
        place = environments / name
        if (place / MADE).is_file():
            continue
        own = [str(harness.ROOT)] if name in OWN else []
        pip = [str(place / "bin/python"), "-m", "pip", "install", "-q"]
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
            subprocess.run([*pip, *REQUIREMENTS[name], *own], check=True, env=free)
        except subprocess.CalledProcessError as error:
            print(f"{name}: left out, its environment was not made: {error}", file=sys.stderr)
        else:
            (place / MADE).touch()


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("environments", type=Path, help="folder of the servers' environments")
    parser.add_argument("--make", action="store_true", help="only create the environments of the parts")
    parser.names("--parts", "part", PARTS)
    parser.count("--rounds", 3, "starts of each server")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load (default 5)")


def measure(args: Any) -> dict[str, Any] | None:
    """Returns {"parts": [{"part", "found"}], "environment"}."""
    if args.make:
        make(args.environments, args.parts)
        return None
    os.sched_setaffinity(0, {CORES[-1]})
    about = environment(rounds=args.rounds, seconds=args.seconds, connections=64)

    def one(part: str) -> dict[str, Any]:
        return {"part": part, "found": PARTS[part](args.environments, args.rounds, args.seconds)}

    return harness.gather("parts", args.parts, one, args.output, about)
