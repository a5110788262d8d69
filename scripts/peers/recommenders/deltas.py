"""Deltas applied to a served recommender, compared with the reload of a folder, under load.

A DeepFM with a table of many simulated ids is served by one worker, which has a core of its own; the clients have the
other core, and the processes of the server use both. Two servers run in turn: one takes a delta of new vectors every
.85 seconds, the other the newer folder in the place of the older every few seconds (`--watch`). Their turns alternate
between a short time with changes and one without, so that the load of other sessions affects both alike. Clients send a
request as soon as the last one is answered.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.deltas.scales import keep_scales
from scripts.peers import harness, processes
from scripts.peers.serving import load
from scripts.peers.serving.server import CORES, CSV, Server, running
from zoo import api

MODEL, COLUMN = "served", "user_id"
STEPS = {"delta": 0.85, "reload": 3.0}  # seconds from a change to the next
POLL = 0.1  # seconds between requests that look for the change
GRACE = 30.0
PRIORITY = "-15"  # of the sessions of server and clients


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.count("--rows", 100_000, "changed rows of a delta")
    parser.count("--buckets", 1 << 19, "rows of the large table")
    parser.count("--clients", 64, "clients")
    parser.count("--rounds", 9, "servers of each way")
    parser.count("--turns", 3, "turns with changes and without them, of a server")
    parser.count("--seconds", 6, "of a turn")
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"clients", "changed_rows", "delta_bytes", "ways": [...], "p99_ratio", "equal_bits", "environment"}."""
    _go_first(os.getpid())
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(args.work or scratch)
        models = _models(work, args.buckets, args.rows)
        deltas = [work / "there.zoo", work / "back.zoo"]
        for file, (old, new) in zip(deltas, [models, models[::-1]], strict=True):
            api.delta(old, new, file)
        requests = _requests(work / "log.csv")
        figures: dict[str, list[dict[str, float]]] = {way: [] for way in ("none", *STEPS)}
        pairs: dict[str, list[tuple[float, float]]] = {way: [] for way in STEPS}
        for way in [way for _ in range(args.rounds) for way in STEPS]:
            with _served(way, work, models, deltas, requests[0]) as (port, change):
                _turn(port, requests, None, args)  # warms up
                for number in range(args.turns):
                    turns = {}
                    for changes in (None, change) if number % 2 else (change, None):
                        turns["none" if changes is None else way] = _turn(port, requests, changes, args, STEPS[way])
                    pairs[way].append((turns[way]["p99"], turns["none"]["p99"]))
                    for kind, measured in turns.items():
                        figures[kind].append(measured)
        equal = _equal_bits(work, models, deltas, requests[0])
        size = deltas[0].stat().st_size
    ways = [
        {"way": way, **{key: harness.median([turn[key] for turn in series]) for key in series[0]}}
        for way, series in figures.items()
    ]
    return {
        "clients": args.clients,
        "table_rows": args.buckets + 2,
        "changed_rows": args.rows,
        "delta_bytes": size,
        "ways": ways,
        "p99_ratio": {way: harness.ratio(*zip(*p99s, strict=True)) for way, p99s in pairs.items()},
        "equal_bits": equal,
        "environment": harness.environment(rounds=args.rounds, data="synthetic log, simulated ids", priority=PRIORITY),
    }


def _models(work: Path, buckets: int, rows: int) -> list[Path]:
    """Creates two models that differ in the vectors of `rows` ids of the large table."""
    log, schema, models = work / "log.csv", work / "schema.json", [work / "older", work / "newer"]
    if all((model / "native.onnx").is_file() for model in models):
        return models
    script = harness.ROOT / "scripts" / "synthesize_log.py"
    subprocess.run([sys.executable, script, log, "-n", "4000", "--users", "2000"], check=True, capture_output=True)
    zoo.schema(log, schema)
    content = json.loads(schema.read_text())
    for column in content["columns"]:
        if column["name"] == COLUMN:
            column["encoding"] = {"type": "hash", "buckets": buckets}
    schema.write_text(json.dumps(content))
    for model in models:
        shutil.rmtree(model, ignore_errors=True)
    zoo.train("deepfm", log, models[0], schema=schema, settings={"epochs": "1"})
    shutil.copytree(models[0], models[1])
    generator = np.random.default_rng(0)
    changed = generator.permutation(np.arange(1, buckets + 1))[:rows]
    for number, model in enumerate(models):
        _fill(model, changed if number else changed[:0])
        card = json.loads((model / "card.json").read_text()) | {"name": MODEL}
        (model / "card.json").write_text(json.dumps(card, indent=2))
        zoo.build(model, force=True)
    keep_scales(zoo.load(models[1]), zoo.load(models[0]))
    for model in models:
        zoo.pipeline(model, engine="native")
    return models


def _fill(model: Path, changed: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Fills the large table with random vectors, and passes those of some ids on to the next of them."""
    import torch

    from zoo.recommenders.models.checkpoints import load_checkpoint
    from zoo.recommenders.models.layers import Embeddings

    entry: Any = zoo.load(model).entry
    network, _ = load_checkpoint(model, entry.build, type(entry.config))
    stored = torch.load(model / "model.pt", weights_only=True)
    generator = torch.Generator().manual_seed(0)
    for path, module in network.named_modules():
        if isinstance(module, Embeddings):
            for field, start in zip(module.fields, module.starts, strict=True):
                if field.name == COLUMN:
                    table = stored["state_dict"][f"{path}.weight"][start + 1 : start + field.rows - 1]
                    table.copy_(0.1 * torch.randn(table.shape, generator=generator))
                    table[changed - 1] = table[np.roll(changed - 1, 1)]
    torch.save(stored, model / "model.pt")


def _requests(log: Path) -> list[load.Request]:
    """Returns requests of a row each."""
    header, *lines = log.read_bytes().splitlines(keepends=True)
    return [load.Request(f"/v1/models/{MODEL}:run", CSV, header + line) for line in lines[:512]]


@contextlib.contextmanager
def _served(
    way: str, work: Path, models: list[Path], deltas: list[Path], request: load.Request
) -> Iterator[tuple[int, Callable[[], None]]]:
    """Serves the older model; yields the port, and a function that makes the next change."""
    place, live = work / "place", work / "live"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    live.unlink(missing_ok=True)
    live.symlink_to(models[0].resolve())
    numbers = itertools.count(1)

    def delta() -> None:
        number = next(numbers)
        (place / ".next").hardlink_to(deltas[(number - 1) % 2])
        (place / ".next").rename(place / f"{number:06d}.zoo")

    def folder() -> None:
        (work / "next").symlink_to(models[next(numbers) % 2].resolve())
        (work / "next").replace(live)

    more = {"delta": ("--deltas", str(place)), "reload": ("--watch",)}[way]
    with running(Server(way, "", (str(live), *more), "int8-zoo", False), Path(), request, GRACE) as server:
        _go_first(server.process.pid)
        change = {"delta": delta, "reload": folder}[way]
        _until_changed(server.port, request, change)  # the first change loads libraries
        yield server.port, change


def _go_first(pid: int) -> None:
    """Gives the session of a process priority over other sessions, where the user may: neighbours do not count."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(PRIORITY)


def _turn(
    port: int, requests: list[load.Request], change: Callable[[], None] | None, args: Any, step: float = 0.0
) -> dict[str, float]:
    """Returns {"rate", "p50", "p99", "until_scored": seconds, "rows_per_second"} of a turn."""
    stop, waits, begin = threading.Event(), list[float](), time.perf_counter()

    def changes() -> None:
        assert change is not None
        due = begin
        while not stop.wait(max(0.0, due - time.perf_counter())):
            took, due = _until_changed(port, requests[0], change), due + step
            if not stop.is_set():
                waits.append(took)

    thread = threading.Thread(target=changes)
    if change is not None:
        thread.start()
    try:
        figures = dict(processes.in_process(load.clients, port, requests, args.clients, float(args.seconds), CORES[-1]))
    finally:
        seconds = time.perf_counter() - begin
        stop.set()
    if change is None:
        return figures
    thread.join()
    scored = float(np.median(waits)) if waits else float("inf")
    return figures | {"until_scored": scored, "rows_per_second": len(waits) * args.rows / seconds}


def _until_changed(port: int, request: load.Request, change: Callable[[], None]) -> float:
    """Makes a change; returns the seconds until an answer names another version."""
    before, start = _version(port, request), time.perf_counter()
    change()
    while _version(port, request) == before:
        time.sleep(POLL)
    return time.perf_counter() - start


def _version(port: int, request: load.Request) -> str:
    """Returns the version of the model that answers."""
    import urllib.request

    asked = urllib.request.Request(f"http://127.0.0.1:{port}{request.path}", request.body, {"content-type": CSV})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return str(answer.headers["model-version"])


def _equal_bits(work: Path, models: list[Path], deltas: list[Path], request: load.Request) -> bool:
    """Returns whether a server with the delta answers all rows as one of the newer model does."""
    lines = (work / "log.csv").read_bytes()
    whole = request._replace(body=lines)
    answers = []
    with _served("delta", work, models, deltas, request) as (port, change):
        _until_changed(port, request, change)  # back at the older model
        _until_changed(port, request, change)
        answers.append(load.ask(port, whole))
    with _served("reload", work, models, deltas, request) as (port, _):  # which a change has left at the newer model
        answers.append(load.ask(port, whole))
    return answers[0] == answers[1] and answers[0][0] == 200
