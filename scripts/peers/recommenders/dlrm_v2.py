"""A model with the shapes of MLPerf's DLRM-v2: pairs of a user and an item a second on one core.

26 lists of 1 to 100 ids, vectors of 128, a bottom network 13-512-256-128, three cross layers of rank 512 on 3,456
columns, and a top network 1024-1024-512-256-1. Tables have --rows rows instead of up to 40,000,000, and weights are
those of one epoch on random rows. It is this project's family `dlrm` with cross layers, which adds a first-order
weight for each id. As in MLPerf, a sample is one user with 100 to 700 items, here drawn uniformly: every pair is a row
of its own (`pairs`), or the columns of the user, the second half of the lists and the numbers, are shared (`rank`).
Stock engines run the same graph at --batch-size rows, see `click-models`. One pinned core, in turn, CPU time.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.analysis import markdown
from scripts.peers import harness, processes
from scripts.peers.recommenders import click_models
from zoo.recommenders.data.schema import Column

# Lists of the reference model (mlcommons/inference, recommendation/dlrm_v2: --multi_hot_sizes).
LISTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
NUMBERS, ITEM_LISTS = 13, 13
SETTINGS = {
    "embedding_size": "128",
    "bottom": "512,256",
    "layers": "3",
    "rank": "512",
    "hidden": "1024,1024,512,256",
    "dropout": "0",
    "epochs": "1",
    "batch_size": "512",
    "l2_embeddings": "10",
    "refit": "false",
}
LOG_ROWS = 1500
PAIRS = 100, 700  # of a sample
SAMPLES = 16  # of a call
# Samples a second and core of the best CPU submission (closed division, offline), a Xeon 6980P with AMX; not run here.
MLPERF = {"samples_per_second_a_core": 73, "cpu": "Xeon 6980P", "pairs_a_sample": "100 to 700"}
OURS = "zoo-native"
PEERS = ("onnxruntime-fp32", "onnxruntime-int8", "openvino-nncf", OURS)


def build(folder: Path, rows: int) -> Path:
    """Trains and quantizes the model, unless the folder has it.

    Args:
        folder: Folder of the log and the model.
        rows: Rows of each table.

    Returns:
        The model folder.
    """
    model = folder / f"dlrm-v2-{rows}"
    if (model / "int8.onnx").is_file():
        return model
    from zoo.recommenders.data.logs import open_logs
    from zoo.recommenders.data.schema_inference import infer

    random, log = np.random.default_rng(0), folder / "log.csv"
    lists = [f"list_{index}" for index in range(len(LISTS))]
    with log.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["click", *(f"number_{index}" for index in range(NUMBERS)), *lists])
        for _ in range(LOG_ROWS):
            ids = ["|".join(f"v{number}" for number in random.integers(0, rows, size)) for size in LISTS]
            writer.writerow([random.integers(2), *random.random(NUMBERS).round(4), *ids])
    schema = infer(open_logs(log)[0], None)
    columns = tuple(
        _list(column, lists.index(column.name), rows) if column.name in lists else column for column in schema.columns
    )
    replace(schema, columns=columns).save(folder / "schema.json")
    zoo.train("dlrm", str(log), model, settings=SETTINGS, schema=folder / "schema.json", label="click")
    zoo.build(model)
    return model


def _list(column: Column, number: int, rows: int) -> Column:
    """Returns the column of a list, of hashed ids; lists of one id are categories."""
    column = replace(
        column, shares="", encoding={"type": "hash", "buckets": rows}, tower="item" if number < ITEM_LISTS else "user"
    )
    if LISTS[number] == 1:
        return replace(column, kind="category")
    return replace(column, kind="categories", separator="|", pooling="sum", length=LISTS[number])


def pairs_a_second(model: Path, rounds: int) -> dict[str, Any]:
    """Measures samples of one user and many items, in the native kernels.

    Args:
        model: The model folder.
        rounds: Turns of each way.

    Returns:
        {"way": {"pairs_per_second", "samples_per_second"}}.
    """
    pipeline: Any = zoo.pipeline(model, engine="native", threads=1, batch_size=PAIRS[1])
    counts = np.random.default_rng(0).integers(PAIRS[0], PAIRS[1] + 1, SAMPLES)
    with np.load(model / "calibration.npz") as kept:
        columns = {name: kept[name] for name in kept.files}
    shared = pipeline.sides.user.shared
    samples = []
    for number, count in enumerate(counts.tolist()):
        drawn = np.random.default_rng(number).integers(0, len(columns["ids"]), count)
        batch = {name: np.ascontiguousarray(column[drawn]) for name, column in columns.items()}
        for name, places in (("ids", shared.ids), ("numbers", shared.numbers), ("scales", shared.scales)):
            if places and name in batch:
                batch[name][:, list(places)] = batch[name][:1, list(places)]
        samples.append(batch)
    calls = {
        "pairs": lambda: [pipeline.predict(batch) for batch in samples],
        "rank": lambda: [pipeline.predict_shared(batch, shared) for batch in samples],
    }
    times = harness.in_turn(calls, rounds)
    return {
        way: {
            "pairs_per_second": harness.median([counts.sum() / ms * 1e3 for ms in taken], 0),
            "samples_per_second": harness.median([SAMPLES / ms * 1e3 for ms in taken], 2),
        }
        for way, taken in times.items()
    }


def rendered(report: Mapping[str, Any], source: str) -> str:
    """Returns a report as a part of a page.

    Args:
        report: Content of the report.
        source: Machine and link of the report.
    """
    rows = []
    for compared in report["engines"]:
        over = {ratio["batch_size"]: ratio["over"] for ratio in compared["ratios"] if ratio["engine"] == OURS}
        for row in compared["results"]:
            size, name = row["batch_size"], row["engine"]
            ratio = f"{over[size][name]:.2f}x" if name in over.get(size, {}) else ""
            changed = f"{row['max_probability']:.4f}"
            rows.append([name, f"{size}", f"{row['samples_per_second']:,.0f}", ratio, changed])
    ways, mlperf = report["native"], report["mlperf"]
    pairs, samples = ({way: ways[way][f"{what}_per_second"]["median"] for way in ways} for what in ("pairs", "samples"))
    return (
        f"A model of the shapes of MLPerf's DLRM-v2 by `scripts/peers/recommenders/dlrm_v2.py` ({source}): tables of "
        f"{report['environment']['table_rows']:,} rows, weights trained for an epoch on random rows. "
        f"zoo-native computes {pairs['pairs']:,.0f} user-item pairs a second as full rows, "
        f"{pairs['rank']:,.0f} with shared user columns: {samples['rank']:.1f} samples a second of "
        f"{mlperf['pairs_a_sample']} pairs each. MLPerf's best CPU submission (closed division, offline) has "
        f"{mlperf['samples_per_second_a_core']} samples a second per core, on a {mlperf['cpu']} with AMX.\n\n"
        + markdown.table(["engine", "batch size", "rows/s", "zoo-native over it", "max probability error"], rows)
    )


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.count("--rows", 10_000, "rows of a table")
    parser.numbers("--batch-size", "400", "batch sizes of the stock engines")
    parser.names("--peers", "engine", click_models.ENGINES, PEERS)
    parser.count("--rounds", 9, "turns of each engine")
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"native": `pairs_a_second`, "mlperf", "engines": [`click_models.compare`], "environment"}."""
    facts = harness.environment(*click_models.PACKAGES, rounds=args.rounds, table_rows=args.rows, clock="CPU time")
    with harness.folder(args.work) as folder:
        model = build(folder, args.rows)
        native = processes.on_one_core(pairs_a_second, model, args.rounds, cores={processes.last_core()})

        def one(model: Path) -> dict[str, Any]:
            return click_models.compare(model, args.batch_size, args.peers, args.rounds)

        report = harness.gather("engines", [model], one, None, facts)
    return {"native": native, "mlperf": MLPERF, **report}
