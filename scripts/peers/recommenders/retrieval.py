"""One user and a catalogue of a million items: retrieval and ranking, beside FAISS and ONNX Runtime.

The vectors of the items are those of a two-tower model with noise, so that none repeats; the items of the ranker are
drawn from those of a log. A request is a user of the log: a user's vector, the nearest items, their ranking, the best
of them. Here: exact search in int8, and `rank` by the ids found. The peers: an index of FAISS over the same vectors in
float, and the ranker's float graph in ONNX Runtime on full rows, whose items are encoded before. One process, one
thread, in turn. The report has, for every way, the wall and CPU time of a request, the recall of its candidates against
exact search in float, and the recall of its best items against ranking all of its candidates by full rows. On a busy
machine `chrt -f 1` keeps other processes off the core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import zoo
from pipelines.core.errors import requires
from scripts.peers import harness
from zoo.recommenders.ranking.catalogue import Catalogue
from zoo.recommenders.retrieval.index import ItemIndex

NOISE = 0.1  # deviation of a vector's noise, in its length
LISTS, PROBED = 1024, 32  # of FAISS's inverted file
TOP = 10
OURS = "int8-zoo"
Found = tuple[NDArray[np.int64], NDArray[np.int64]]  # positions of the candidates, and of the best items
SCHEDULERS = {os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}  # real-time ones: wall times of a busy machine
IDLE = 0.1  # of the time, since Linux stops real-time processes that take 95% of a core
SEEN_ROWS = 20_000  # rows of the log whose items and users are drawn


class Request:
    """One model pair and its catalogue.

    Args:
        ranker: Name or folder of the model that ranks.
        towers: Name or folder of the two-tower model that retrieves.
        log: Log with the columns of both.
        count: Number of items of the catalogue.
        candidates: Number of items that are ranked.
    """

    def __init__(self, ranker: str, towers: str, log: Path, count: int, candidates: int) -> None:
        self.candidates = candidates
        self.clicks: Any = zoo.pipeline(ranker, engine="native", threads=1)
        self.nearest: Any = zoo.pipeline(towers, engine="native", threads=1)
        self.stock: Any = zoo.pipeline(ranker, "fp32", "onnxruntime", threads=1)
        self.stock_towers: Any = zoo.pipeline(towers, "fp32", "onnxruntime", threads=1)
        rows = self.clicks.example(SEEN_ROWS, log)
        items = list({row[self.clicks.sides.key]: row for row in rows}.values())
        draw = np.random.default_rng(0)
        chosen = draw.integers(0, len(items), count)
        self.names = np.array([f"item {index}" for index in range(count)])
        self.catalogue, self.tower_items = (
            self._catalogue(pipeline, items, chosen) for pipeline in (self.clicks, self.nearest)
        )
        vectors = self.nearest.item_vectors(self.nearest.catalogue(items, distinct=False))[chosen]
        vectors = vectors + draw.normal(0, NOISE / vectors.shape[1] ** 0.5, vectors.shape)
        self.vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        self.nearest._indexed = self.tower_items, ItemIndex(self.vectors)
        names = [column.name for column in self.clicks.sides.user.features.schema.columns]
        self.users = [{name: row[name] for name in names} for row in rows]

    def _catalogue(self, pipeline: Any, items: list[Any], chosen: NDArray[np.int64]) -> Catalogue:
        """The drawn items, each with an id of its own."""
        rows = pipeline.catalogue(items, distinct=False, precompute=False).rows[chosen]
        return Catalogue(rows, pa.array(self.names, pa.large_string()), pipeline.precomputed(rows))

    def ours(self, user: dict[str, Any]) -> Found:
        """Finds and ranks items by this project."""
        items = self.nearest.retrieved(user, self.tower_items, self.candidates)
        return items.positions, self.clicks.rank_columns(user, self.catalogue, TOP, ids=items)["row"]

    def peers(self, index: Any) -> Callable[[dict[str, Any]], Found]:
        """Returns the same by an index of FAISS and ONNX Runtime."""

        def call(user: dict[str, Any]) -> Found:
            one = self.stock_towers.sides
            vector = self.stock_towers.predict(one.join(one.read_user(user), self.tower_items.rows, slice(1)))["user"]
            candidates = index.search(vector, self.candidates)[1][0]
            return candidates, self.ranked(self.stock, user, candidates)

        return call

    def ranked(self, pipeline: Any, user: dict[str, Any], candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ranks all candidates by full rows."""
        return candidates[np.argsort(-self.probabilities(pipeline, user, candidates), kind="stable")[:TOP]]

    def probabilities(self, pipeline: Any, user: dict[str, Any], items: NDArray[np.int64]) -> NDArray[np.float32]:
        """Probabilities of items by full rows."""
        sides = pipeline.sides
        rows = sides.join(sides.read_user(user), self.catalogue.rows, items)
        return np.asarray(pipeline.predict(rows)["probability"].reshape(-1))


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("ranker", help="model that ranks")
    parser.add_argument("towers", help="two-tower model that retrieves")
    parser.add_argument("--log", required=True, metavar="FILE", help="log whose rows give users and items")
    parser.count("--items", 1_000_000, "items of the catalogue")
    parser.count("--candidates", 1000, "items that are ranked")
    parser.count("--rounds", 300, "requests of each way")


def measure(args: Any) -> dict[str, Any]:
    """Returns {"ways": [{"way", "ms", "cpu_ms": {"p50", "p99"}, "cpu_ratio", "candidates", "best"}], "environment"}."""
    log = harness.log_file(args.log)
    with requires("the comparison", "faiss-cpu"):
        import faiss

    faiss.omp_set_num_threads(1)
    request = Request(args.ranker, args.towers, log, args.items, args.candidates)
    size = request.vectors.shape[1]
    flat = faiss.IndexFlatIP(size)
    flat.add(request.vectors)
    inverted = faiss.index_factory(size, f"IVF{LISTS},Flat", faiss.METRIC_INNER_PRODUCT)
    inverted.train(request.vectors[: 64 * LISTS])
    inverted.add(request.vectors)
    inverted.nprobe = PROBED
    ways: dict[str, tuple[Callable[[dict[str, Any]], Found], Any]] = {
        OURS: (request.ours, request.clicks),
        "faiss Flat + onnxruntime fp32": (request.peers(flat), request.stock),
        f"faiss IVF{LISTS} ({PROBED} probed) + onnxruntime fp32": (request.peers(inverted), request.stock),
    }
    exact = request.peers(flat)
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    same: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(args.rounds):
        user = request.users[number * 37 % len(request.users)]
        begin, nearest = time.perf_counter(), exact(user)[0]
        for way, (call, ranker) in ways.items():
            start, used = time.perf_counter(), time.process_time()
            candidates, best = call(user)
            taken[way].append((time.perf_counter() - start, time.process_time() - used))
            least = np.sort(request.probabilities(ranker, user, candidates))[-TOP]  # items with equal ones are as good
            good = request.probabilities(ranker, user, best) >= least
            same[way].append((np.isin(candidates, nearest).mean(), good.mean()))
        time.sleep(IDLE * (time.perf_counter() - begin))
    results = []
    for way, times in taken.items():
        wall, cpu = 1e3 * np.array(times).T
        shares = np.mean(same[way], 0).round(4).tolist()
        results.append(
            {
                "way": way,
                "ms": _percentiles(wall),
                "cpu_ms": _percentiles(cpu),
                "cpu_ratio": round(float(np.median(cpu / (1e3 * np.array(taken[OURS])[:, 1]))), 2),
                "candidates": shares[0],
                "best": shares[1],
            }
        )
    scheduler = SCHEDULERS.get(os.sched_getscheduler(0), "other")
    facts = harness.environment("onnxruntime", "faiss-cpu", rounds=args.rounds, scheduler=scheduler)
    about = {"ranker": request.clicks.folder.entry.name, "vector_size": size, "items": args.items}
    return {**about, "candidates": args.candidates, "ways": results, "environment": facts}


def _percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    return {"p50": round(float(np.median(values)), 3), "p99": round(float(np.percentile(values, 99)), 3)}
