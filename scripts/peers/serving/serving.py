"""Requests a second and their tail: `zoo serve` beside the servers that users know, in turn, the server on one core.

    python scripts/peers/serving/serving.py --make ENVIRONMENTS      # each server in an environment of its own, they conflict
    python scripts/peers/serving/serving.py ENVIRONMENTS [--parts layers,peers,rows,lone,sentences,workers] [-o report.json]

Parts: "layers", one native session behind each HTTP layer; "peers", int8.onnx in onnxruntime behind KServe, LitServe,
Ray Serve and MLServer beside `zoo serve`, one row a request; "rows", 500 rows a request as TSV beside `zoo run`'s rate
in a process; "lone", what a server adds to one row and one photo; "sentences", 32 clients of a translation model beside
batches in a process; "workers", the memory of one to four of them. Load comes from wrk (Debian's package) or, where a
rate or single times count, from `serving_load.py`, on the other core. `servers/` has the code of each server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import zoo
from pipelines.core.errors import ZooError
from pipelines.core.machine import environment
from scripts.peers.harness import ONE_THREAD, Parser, gather, listed, median, one_line, require_known, show
from scripts.peers.serving import load

CLICKS, PHOTOS, TRANSLATION = "wide-deep-criteo", "mobilenet-v2-imagenet", "multi30k-en-de"
SERVERS = Path(__file__).parent / "servers"
INFER, RUN = f"/v2/models/{CLICKS}/infer", f"/v1/models/{CLICKS}:run"
JSON, TSV, TEXT, CSV = "application/json", "text/tab-separated-values", "text/plain", "text/csv"
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
READY, GRACE = 90.0, 10.0  # seconds for a server to answer, and to end
CORES = sorted(os.sched_getaffinity(0))
MADE = "made"  # a file in an environment that is whole


@dataclass(frozen=True)
class Server:
    """How a server is started. environment: of `REQUIREMENTS`; "" for this one. package: what it is called there."""

    name: str
    environment: str
    arguments: tuple[str, ...]
    package: str

    def command(self, environments: Path, port: int) -> list[str]:
        """The process on its core."""
        if not self.environment:
            words = [sys.executable, "-m", "zoo.cli.app", "serve", *self.arguments, "--port", str(port)]
            if "--workers" not in words:
                words += ["--workers", "1"]
        else:
            file, *rest = self.arguments
            words = [str(environments / self.environment / "bin/python"), str(SERVERS / file), str(port), *rest]
        return ["taskset", "-c", str(CORES[0]), *words]


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
    _layer("litserve", "litserve", "litserve_native.py"),
    _layer("robyn", "robyn"),
    _layer("blacksheep", "blacksheep", "blacksheep_native.py"),
    _layer("socketify", "socketify"),
]
ZOO = Server("zoo serve", "", (CLICKS,), "int8-zoo")
PEERS = [
    ZOO,
    Server("kserve", "kserve", ("kserve_onnx.py",), "kserve"),
    Server("litserve", "litserve", ("litserve_onnx.py",), "litserve"),
    Server("litserve, batched", "litserve", ("litserve_onnx.py", "batched"), "litserve"),
    Server("ray serve", "ray", ("ray_onnx.py",), "ray"),
    Server("ray serve, batched", "ray", ("ray_onnx.py", "batched"), "ray"),
    Server("mlserver", "mlserver", ("mlserver_onnx.py",), "mlserver"),
]
SERVED = {"layers": LAYERS, "peers": PEERS}  # part: servers


@dataclass
class Running:
    """A server that answers. ready: seconds from its start to its first answer. stop: how it ended, afterwards."""

    port: int
    ready: float
    process: subprocess.Popen[bytes]
    stop: dict[str, Any] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def running(server: Server, environments: Path, path: str, kind: str, body: bytes) -> Iterator[Running]:
    """A server in a session of its own, which ends with it. Raises ZooError where it does not answer `body`."""
    port = _free_port()
    model = {"ZOO_INT8": str(zoo.load(CLICKS).ensure("int8.onnx")), "PYTHONPATH": str(SERVERS)}
    with tempfile.TemporaryFile() as said:
        start = time.perf_counter()
        process = subprocess.Popen(
            server.command(environments, port),
            stdout=said,
            stderr=said,
            env={**os.environ, **ONE_THREAD, **model},
            start_new_session=True,
        )
        try:
            while load.status(port, path, kind, body) != 200:
                if time.perf_counter() - start > READY or process.poll() is not None:
                    said.seek(0)
                    last = (said.read().decode(errors="replace").split("\n") or [""])[-2:]
                    raise ZooError(f"{server.name} does not answer: {' '.join(last)[:200]}")
                time.sleep(0.005)
            found = Running(port, round(time.perf_counter() - start, 2), process)
            yield found
            found.stop = _stop(process)
        finally:
            for each in _members(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            process.wait()


def _stop(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """SIGTERM: exit code (None: it did not end), seconds, and processes that were left."""
    start = time.perf_counter()
    process.terminate()
    code: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(GRACE)
    seconds = round(time.perf_counter() - start, 2)
    time.sleep(0.3)
    left = [each for each in _members(process.pid) if each != process.pid or code is None]
    return {"exit": code, "seconds": seconds, "left": len(left)}


def _members(session: int) -> list[int]:
    """The live processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, *fields = path.read_text().rpartition(") ")[2].split()
            if int(fields[2]) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wrk(
    port: int, path: str, kind: str, body: bytes, connections: int, seconds: float, accept: str = "*/*"
) -> dict[str, Any]:
    """{"rate" (answers with 200 a second), "p50", "p99" (ms), "failed"} of a load as quick as answers come."""
    with tempfile.TemporaryDirectory() as scratch:
        file, script = Path(scratch) / "body", Path(scratch) / "post.lua"
        file.write_bytes(body)
        script.write_text(
            f'local f = io.open("{file}", "rb"); wrk.body = f:read("*a"); f:close(); wrk.method = "POST"\n'
            f'wrk.headers["Content-Type"] = "{kind}"; wrk.headers["Accept"] = "{accept}"\n'
            "done = function(s, l, r) io.write(string.format('%d %d %d %d %d\\n', s.requests, s.duration,"
            " l:percentile(50), l:percentile(99), s.errors.status + s.errors.read + s.errors.timeout)) end\n"
        )
        command = ["taskset", "-c", str(CORES[-1]), "wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s"]
        url = f"http://127.0.0.1:{port}{path}"
        said = subprocess.run([*command, "-s", str(script), url], capture_output=True, text=True).stdout
    numbers = re.search(r"^(\d+) (\d+) (\d+) (\d+) (\d+)$", said, re.M)
    if numbers is None:
        raise ZooError(f"under load it does not answer: wrk said {said[-200:]!r}")
    requests, microseconds, p50, p99, failed = map(int, numbers.groups())
    return {
        "rate": max(requests - failed, 0) / microseconds * 1e6,
        "p50": p50 / 1e3,
        "p99": p99 / 1e3,
        "failed": failed,
    }


# ---------------------------------------------------------------------------------------------------------------- parts


def one_row() -> tuple[bytes, float]:
    """A request of the protocol with one row, and its probability by onnxruntime."""
    model = zoo.pipeline(CLICKS, engine="onnxruntime", threads=1)
    batch = model.preprocess(model.example(1))
    kinds = {"int32": "INT32", "float32": "FP32"}
    inputs = [
        {"name": name, "shape": each.shape, "datatype": kinds[each.dtype.name], "data": each.ravel().tolist()}
        for name, each in batch.items()
    ]
    return json.dumps({"inputs": inputs}).encode(), float(model.predict(batch)["probability"][0, 0])


def in_turn(servers: list[Server], environments: Path, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row a request, 64 connections, then one; each server is started anew in every round."""
    body, wanted = one_row()
    found: dict[str, list[dict[str, Any]]] = {each.name: [] for each in servers}
    faults: dict[str, str] = {}
    for _ in range(rounds):
        for server in servers:
            if server.name in faults:
                continue
            try:
                with running(server, environments, INFER, JSON, body) as live:
                    wrk(live.port, INFER, JSON, body, 8, 1)
                    many = wrk(live.port, INFER, JSON, body, 64, seconds)
                    alone = wrk(live.port, INFER, JSON, body, 1, max(1.0, seconds / 4))
                    answer = json.loads(load.ask(live.port, INFER, JSON, body)[1])
                    memory = sum(map(_pss, _members(live.process.pid)))
                    tables = {each["name"]: each["data"] for each in answer["outputs"]}
                    gap = abs(tables["probability"][0] - wanted)
                found[server.name].append(
                    {**many, "lone": alone["p50"], "memory": memory, "gap": gap, "ready": live.ready, **live.stop}
                )
                print(server.name, round(many["rate"]), file=sys.stderr)
            except (ZooError, OSError) as error:
                faults[server.name] = str(error)
                print(error, file=sys.stderr)
    return [
        {"server": each.name, "left_out": faults[each.name]}
        if each.name in faults
        else _summed(each, found[each.name], environments)
        for each in servers
    ]


def _summed(server: Server, rounds: list[dict[str, Any]], environments: Path) -> dict[str, Any]:
    last = rounds[-1]
    return {
        "server": server.name,
        "version": _asked(server, environments)["version"],
        "requests_per_second": median([each["rate"] for each in rounds], 0),
        "p50_ms": median([each["p50"] for each in rounds]),
        "p99_ms": median([each["p99"] for each in rounds]),
        "failed": sum(each["failed"] for each in rounds),
        "lone_p50_ms": median([each["lone"] for each in rounds]),
        "max_difference": float(f"{max(each['gap'] for each in rounds):.1e}"),
        "ready_seconds": median([each["ready"] for each in rounds], 2),
        "memory_mb": median([each["memory"] for each in rounds], 0),
        "stop": {key: last[key] for key in ("exit", "seconds", "left")},
        "package_mb": _asked(server, environments)["mb"],
    }


def _pss(pid: int) -> float:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:"))
    return 0.0


ASK = """
import importlib.metadata as m, json, re, sys
todo, seen, size = [sys.argv[1]], set(), 0
while todo:
    name = re.sub("[-_.]+", "-", todo.pop()).lower()
    try: found = m.distribution(name)
    except m.PackageNotFoundError: continue
    if name in seen: continue
    seen.add(name)
    size += sum(each.size or 0 for each in found.files or ())
    todo += [re.match("[A-Za-z0-9._-]+", each)[0] for each in found.requires or () if "extra ==" not in each]
print(json.dumps({"version": m.version(sys.argv[1]), "mb": round(size / 1e6, 1), "packages": len(seen)}))
"""


def _asked(server: Server, environments: Path) -> dict[str, Any]:
    """Version, and size with all that it needs, of a server's package."""
    python = environments / server.environment / "bin/python" if server.environment else Path(sys.executable)
    said = subprocess.run([str(python), "-c", ASK, server.package], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def rows(environments: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """500 rows a request as TSV, answered in CSV, beside what `zoo run` scores in a process and writes so; the tail at
    70% of that load, at equal distances as wrk2 has it, and at those of a Poisson process.
    """
    model = zoo.pipeline(CLICKS, engine="native", threads=1)
    lines = model.example(2000)
    body = b"".join(line.rstrip(b"\n") + b"\n" for line in lines[:500])
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.tsv"
        log.write_bytes(body * 1000)
        command = [sys.executable, str(Path(__file__).with_name("load.py")), "run", CLICKS, str(log)]
        inside: list[float] = []
        served: list[dict[str, Any]] = []
        tail: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for _ in range(rounds):
            inside.append(float(_pinned(command)))
            with running(ZOO, environments, RUN, TSV, body) as live:
                wrk(live.port, RUN, TSV, body, 4, 1)
                served.append(wrk(live.port, RUN, TSV, body, 8, seconds, CSV))
                rate = 0.7 * served[-1]["rate"]
                for even, tails in tail.items():
                    tails.append(load.at_rate(live.port, RUN, TSV, body, rate, 8, seconds, CORES[-1], CSV, even))
    most = median([500 * each["rate"] for each in served], 0)
    return {
        "rows": 500,
        "in_process_rows_per_second": median(inside, 0),
        "served_rows_per_second": most,
        "share": round(most["median"] / median(inside, 0)["median"], 3),
        **{
            name: {
                **{key: median([each[key] for each in tail[even]]) for key in ("p50", "p99")},
                "p99_by_median": median([each["p99"] / each["p50"] for each in tail[even]], 2),
            }
            for name, even in (("at_70_percent", True), ("at_70_percent_poisson", False))
        },
    }


def _pinned(command: list[str]) -> str:
    run = subprocess.run(["taskset", "-c", str(CORES[0]), *command], capture_output=True, text=True, check=True)
    return run.stdout.strip().splitlines()[-1]


def lone(environments: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """A lone request beside the same call in a process: milliseconds of one row and of one photo."""
    found: dict[str, Any] = {}
    script = str(Path(__file__).with_name("load.py"))
    row = zoo.pipeline(CLICKS, engine="native").example(1)[0].rstrip(b"\n") + b"\n"
    with tempfile.TemporaryDirectory() as scratch:
        photo = load.photo()
        for name, model, kind, body in (("row", CLICKS, TSV, row), ("photo", PHOTOS, "image/jpeg", photo)):
            file = Path(scratch) / name
            file.write_bytes(body)
            path = f"/v1/models/{model}:run"
            inside, served = [], []
            for _ in range(rounds):
                inside.append(float(_pinned([sys.executable, script, "alone", model, str(file)])))
                server = dataclasses.replace(ZOO, arguments=(model,))
                with running(server, environments, path, kind, body) as live:
                    served.append(load.alone(live.port, path, kind, body, seconds, CORES[-1]))
            added = round(median(served)["median"] - median(inside)["median"], 3)
            found[name] = {"in_process_ms": median(inside), "served_ms": median(served), "added_ms": added}
    return found


def sentences(environments: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """32 clients with a sentence a request beside batches in a process, and a lone sentence."""
    texts = list(zoo.pipeline(TRANSLATION, engine="native").example(512))
    script = str(Path(__file__).with_name("load.py"))
    path = f"/v1/models/{TRANSLATION}:run"
    server = dataclasses.replace(ZOO, arguments=(TRANSLATION,))
    inside, served, tails, single, first = [], [], [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "text"
        file.write_text("\n".join(texts))
        for _ in range(rounds):
            rate, alone = _pinned([sys.executable, script, "translate", TRANSLATION, str(file)]).split()
            inside.append(float(rate))
            single.append(float(alone))
            with running(server, environments, path, TEXT, texts[0].encode()) as live:
                bodies = [each.encode() for each in texts]
                many = load.clients(live.port, path, TEXT, bodies, 32, 2 * seconds, CORES[-1])
                served.append(many["rate"])
                tails.append(many["p99"])
                first.append(load.alone(live.port, path, TEXT, bodies[0], seconds, CORES[-1]))
    return {
        "clients": 32,
        "in_process_per_second": median(inside, 1),
        "served_per_second": median(served, 1),
        "share": round(median(served)["median"] / median(inside)["median"], 3),
        "p99_ms": median(tails, 1),
        "lone": {"in_process_ms": median(single), "served_ms": median(first)},
        "lone_added_ms": round(median(first)["median"] - median(single)["median"], 3),
    }


def workers(environments: Path, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """What processes that share one copy of two models hold: PSS of all of them, after requests to each."""
    found = []
    row = zoo.pipeline(CLICKS, engine="native").example(1)[0].rstrip(b"\n") + b"\n"
    text = zoo.pipeline(TRANSLATION, engine="native").example(1)[0].encode()
    for count in (1, 2, 4):
        server = dataclasses.replace(ZOO, arguments=(CLICKS, TRANSLATION, "--workers", str(count)))
        with running(server, environments, RUN, TSV, row) as live:
            wrk(live.port, RUN, TSV, row, 16, 1)
            wrk(live.port, f"/v1/models/{TRANSLATION}:run", TEXT, text, 4 * count, 2)
            time.sleep(0.5)
            memory = round(sum(map(_pss, _members(live.process.pid))))
        found.append({"workers": count, "memory_mb": memory})
    return found


PARTS: dict[str, Callable[[Path, int, float], Any]] = {
    "layers": lambda where, rounds, seconds: in_turn(LAYERS, where, rounds, seconds),
    "peers": lambda where, rounds, seconds: in_turn(PEERS, where, rounds, seconds),
    "rows": rows,
    "lone": lone,
    "sentences": sentences,
    "workers": workers,
}


def table(report: Mapping[str, Any]) -> str:
    """The report as text."""
    lines: list[str] = []
    for part in report["parts"]:
        lines.append(f"{part['part']}:")
        if not isinstance(part["found"], list) or part["part"] == "workers":
            lines.append(f"  {json.dumps(part['found'])}")
            continue
        for each in part["found"]:
            if "left_out" in each:
                lines.append(f"  {each['server']:20} {each['left_out']}")
                continue
            rate, p99, lone = (each[key]["median"] for key in ("requests_per_second", "p99_ms", "lone_p50_ms"))
            lines.append(f"  {each['server']:20} {rate:10,.0f}/s  p99 {p99:8.2f} ms  lone {lone:6.2f} ms")
    return "\n".join(lines)


def make(environments: Path, parts: Sequence[str]) -> None:
    """The environments of the servers of these parts: what is whole is kept, what pip cannot install is left out. This
    project is installed into those that it runs in.
    """
    wanted = dict.fromkeys(each.environment for part in parts for each in SERVED.get(part, ()) if each.environment)
    free = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}  # they are not this project
    for name in wanted:
        place = environments / name
        if (place / MADE).is_file():
            continue
        own = [str(Path(__file__).parents[3])] if name in OWN else []
        pip = [str(place / "bin/python"), "-m", "pip", "install", "-q"]
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
            subprocess.run([*pip, *REQUIREMENTS[name], *own], check=True, env=free)
        except subprocess.CalledProcessError as error:
            print(f"{name}: left out, its environment was not made: {error}", file=sys.stderr)
        else:
            (place / MADE).touch()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("environments", type=Path, help="the folder with the servers' environments")
    parser.add_argument("--make", action="store_true", help="make those of the parts, and no more")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, with commas between them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    given = parser.parse_args()
    parts = listed("part", given.parts, PARTS)
    require_known("part", parts, PARTS)
    if given.make:
        make(given.environments, parts)
        return
    os.sched_setaffinity(0, {CORES[-1]})
    about = {**environment(), "rounds": given.rounds, "seconds": given.seconds, "connections": 64}

    def measure(part: str) -> dict[str, Any]:
        return {"part": part, "found": PARTS[part](given.environments, given.rounds, given.seconds)}

    show(gather("parts", parts, measure, given.output, about), table, given.json)


if __name__ == "__main__":
    with one_line("serving.py"):
        main()
