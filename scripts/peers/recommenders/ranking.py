"""One user and many candidates: `rank` beside full rows, in one process and over HTTP.

The candidates are drawn from the items of a log, the user is one of its rows. In a process, on one thread, in turn:
full rows in the native kernels and in ONNX Runtime (the float graph), each read and encoded from rows of Python; `rank`
with the items as rows, and with ids of a catalogue; and the model alone, with and without sharing of the user's inputs,
also by step. The model's time per candidate bounds the possible gain. Over HTTP (loopback, one worker, one client),
servers in turn: `:run` with full rows, as JSON and as CSV, by the native kernels, by ONNX Runtime in float and by
OpenVINO with the model that NNCF quantized (where nncf is installed), all of them in the same server; and `:rank` with
rows and with ids, JSON. Results are checked first: the native probabilities must have the same bits.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

import zoo
from pipelines.core.errors import RequestError, ZooError
from pipelines.kernels.recommenders import native
from pipelines.kernels.recommenders.native import SharedInputs
from scripts.peers import harness
from scripts.peers.engines import open_vino
from scripts.peers.processes import cpu_seconds
from scripts.peers.recommenders.engines import Inputs
from scripts.peers.serving import load
from scripts.peers.serving.load import Request
from scripts.peers.serving.server import CSV, JSON, Running, Server, running

TURN = 50  # requests of a turn over HTTP
STEP_ROUNDS = 100
RANKS = "rank rows", "rank ids"


def compare(model: str | Path, log: Path, count: int, rounds: int, served: bool) -> dict[str, Any]:
    """Measures one model.

    Args:
        model: Name or folder of a recommender with columns of items.
        log: Log of raw rows.
        count: Number of candidates.
        rounds: Turns of each way.
        served: Whether it is measured over HTTP, too.

    Returns:
        {"model", "family", "candidates", "user_columns": share of the columns that are the user's, "ms": medians of a
        request by way, "steps": `_steps`, "http_ms": the same over HTTP, "http_cpu_ms": CPU time of the server for it,
        "ratios"}.

    Raises:
        ZooError: The ways give other probabilities.
    """
    pipeline: Any = zoo.pipeline(model, engine="native")
    stock: Any = zoo.pipeline(model, "fp32", "onnxruntime")
    sides = pipeline.sides
    names = {side: [field.name for field in getattr(sides, side).features.schema.columns] for side in ("user", "item")}
    rows = pipeline.example(4 * count, log)
    items = list({row[sides.key]: {name: row[name] for name in names["item"]} for row in rows}.values())
    items = [items[index % len(items)] for index in range(count)]
    user = {name: rows[0][name] for name in names["user"]}
    full, ids = [item | user for item in items], [item[sides.key] for item in items]
    catalogue = pipeline.catalogue(items)
    batch, shared = pipeline.preprocess(full), sides.user.shared
    _require_same(pipeline, user, items, batch)

    calls = {
        "full rows": lambda: pipeline.predict(pipeline.preprocess(full)),
        "full rows, onnxruntime fp32": lambda: stock.predict(stock.preprocess(full)),
        "rank rows": lambda: pipeline.rank(user, items, 10),
        "rank ids": lambda: pipeline.rank(user, catalogue, 10, ids=ids),
        "model, full rows": lambda: pipeline.predict(batch),
        "model, shared": lambda: pipeline.predict_shared(batch, shared),
    }
    times = harness.in_turn(calls, rounds)
    http, cpu = _over_http(str(model), user, items, full, ids, rounds) if served else ({}, {})
    pairs = {
        "rank rows": ("full rows", "rank rows"),
        "rank ids": ("full rows", "rank ids"),
        "rank ids to onnxruntime fp32": ("full rows, onnxruntime fp32", "rank ids"),
        "model": ("model, full rows", "model, shared"),
    }
    return {
        "model": pipeline.folder.card.name,
        "family": pipeline.folder.entry.name,
        "candidates": count,
        "user_columns": round(len(names["user"]) / (len(names["user"]) + len(names["item"])), 3),
        "ms": {name: harness.median(ms) for name, ms in times.items()},
        "steps": _steps(pipeline, batch, shared),
        "http_ms": {name: harness.median(ms) for name, ms in http.items()},
        "http_cpu_ms": {name: harness.median(ms) for name, ms in cpu.items()},
        "ratios": {name: harness.ratio(times[a], times[b]) for name, (a, b) in pairs.items()}
        | {
            f"http cpu {name} to {way}": harness.ratio(cpu[way], cpu[name])
            for name in RANKS
            for way in cpu
            if way != name
        }
        | {
            f"http {name} to {way}": harness.ratio(http[way], http[name])
            for name in RANKS
            for way in http
            if way != name
        },
    }


def _steps(pipeline: Any, batch: Mapping[str, Any], shared: SharedInputs) -> list[dict[str, Any]]:
    """CPU time in us of every step of the program: {"step", "full rows", "shared"}, by programs that end behind it."""
    session = pipeline.session
    graph = getattr(session, "session", lambda _: session)(batch)._graph
    program, arrays = graph._model.program, [None if name is None else batch[name] for name in graph.fed]
    ways = {"full rows": SharedInputs(), "shared": shared}
    calls = {
        (way, count): partial(native.click_program(program, shared=inputs, steps=count), *arrays)
        for way, inputs in ways.items()
        for count in range(len(program.steps) + 1)
    }
    times: dict[tuple[str, int], list[int]] = {key: [] for key in calls}
    for _ in range(STEP_ROUNDS):
        for key, call in calls.items():
            start = time.thread_time_ns()
            call()
            times[key].append(time.thread_time_ns() - start)
    until = {key: float(np.percentile(taken, 25)) / 1e3 for key, taken in times.items()}
    return [
        {"step": " ".join([type(step).__name__, *map(str, np.shape(getattr(step, "weight", None)))])}
        | {way: round(max(until[way, index + 1] - until[way, index], 0.0), 1) for way in ways}
        for index, step in enumerate(program.steps)
    ]


def _require_same(pipeline: Any, user: Mapping[str, Any], items: list[Any], batch: Mapping[str, Any]) -> None:
    """Raises ZooError unless `rank` gives the bits of full rows."""
    expected = pipeline.predict(batch)["probability"].reshape(-1)
    ranked = np.empty(len(items), np.float32)
    for row in pipeline.rank(user, items):
        ranked[row["row"]] = row["probability"]
    if ranked.tobytes() != expected.tobytes():
        raise ZooError(f"{pipeline.folder.card.name}: rank gives other probabilities than full rows")


def _over_http(
    model: str, user: Mapping[str, Any], items: list[Any], full: list[Any], ids: list[str], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds of a request, and CPU time of its server, by way, a number a round."""
    name = zoo.load(model).card.name
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        file = Path(scratch) / "items.jsonl"
        file.write_bytes(b"".join(orjson.dumps(item) + b"\n" for item in items))

        def request(verb: str, body: Any, form: str = JSON) -> Request:
            return Request(f"/v1/models/{name}:{verb}", form, body if form == CSV else orjson.dumps(body))

        rows, text = request("run", {"rows": full}), request("run", _csv(full), CSV)
        servers = {
            "native": Server("native", "", (model, "--items", str(file), "--engine", "native"), "int8-zoo"),
            "onnxruntime": Server("onnxruntime", "", (f"{model}@fp32", "--engine", "onnxruntime"), "int8-zoo"),
        }
        if importlib.util.find_spec("nncf") is not None:
            graph, place = Path(scratch) / "nncf.xml", Path(sys.prefix)
            inputs = Inputs(model, Path(scratch))
            open_vino.save(open_vino.quantize(inputs.fp32, inputs.samples()), graph)
            servers["openvino nncf"] = Server("nncf", place.name, ("zoo_nncf.py", model, str(graph)), "int8-zoo")
        ways: dict[str, tuple[Running, Request]] = {}
        for key, server in servers.items():
            public = {
                sent: _public(sent, f"{name}@fp32") if "fp32" in server.arguments[0] else sent for sent in (rows, text)
            }
            live = stack.enter_context(running(server, Path(sys.prefix).parent, public[rows]))
            ways |= {f"{key} run": (live, public[rows]), f"{key} run csv": (live, public[text])}
            if key == "native":
                ways["rank rows"] = live, request("rank", {"user": user, "items": items, "top": 10})
                ways["rank ids"] = live, request("rank", {"user": user, "items": ids, "top": 10})
        times: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, (live, body) in ways.items():
                start, used = time.perf_counter(), cpu_seconds(live.process.pid)
                load.repeat(live.port, body, TURN)
                times[way].append((time.perf_counter() - start) / TURN * 1e3)
                cpu[way].append((cpu_seconds(live.process.pid) - used) / TURN * 1e3)
    return times, cpu


def _public(request: Request, name: str) -> Request:
    """The same request to the model of another public name."""
    return request._replace(path=f"/v1/models/{name}:run")


def _csv(rows: list[dict[str, Any]]) -> bytes:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("models", nargs="+", help="model folders or names")
    help_text = "log whose rows give the user and the items: one of all models, or one a model"
    parser.add_argument("--log", required=True, nargs="+", metavar="FILE", help=help_text)
    parser.add_argument("--in-process", nargs="+", default=[], metavar="MODEL", help="models not measured over HTTP")
    parser.count("--items", 500, "candidates of a request")
    parser.count("--rounds", 15, "turns of each way")


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [`compare`], "environment"}."""
    logs = [*map(harness.log_file, args.log)] * (len(args.models) if len(args.log) == 1 else 1)
    if len(logs) != len(args.models):
        raise RequestError(f"found {len(logs)} logs, expected one, or one of each of {len(args.models)} models")
    facts = harness.environment("onnxruntime", "openvino", "nncf", rounds=args.rounds)
    return harness.gather(
        "models",
        zip(args.models, logs, strict=True),
        lambda pair: compare(*pair, args.items, args.rounds, pair[0] not in args.in_process),
        args.output,
        facts,
    )
