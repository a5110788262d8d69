"""The parts of scripts/reproduce.py that measure recommenders."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

import zoo
from pipelines.core import files, machine
from pipelines.engines.catalog import ENGINES, load
from pipelines.models import npz
from pipelines.models.pipeline import model_file
from pipelines.models.record import SAMPLES
from scripts import synthesize_log
from scripts.peers import harness, processes
from scripts.peers.engines import onnx_runtime
from scripts.peers.recommenders import click_models
from scripts.peers.recommenders.runs import synthesize
from scripts.reproduction.reports import (
    MODEL,
    ROUNDS,
    card_metrics,
    cpu_slug,
    evaluate,
    measure_model,
    measure_together,
    peers_report,
    report,
    watched,
    written,
    zoo_command,
    zoo_json,
)
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.metrics import click_metrics

HELD_OUT = 1500


def quality() -> None:
    """Wide & Deep trained by its recipe without the last 1,500 rows: fp32 and int8 compared on those rows; card.

    The shipped model saw them (it is trained again on all rows), so its own metrics there would flatter it: these are
    the recipe's.
    """
    source = harness.development_data("data/criteo/criteo_10390.tsv")
    with tempfile.TemporaryDirectory() as scratch:
        folder, held_out = Path(scratch) / "model", Path(scratch) / "held_out.tsv"
        held_out.write_bytes(b"".join(source.read_bytes().splitlines(keepends=True)[-HELD_OUT:]))
        zoo.train("wide-deep", str(source), folder, settings={"refit": "false", "held_out": str(HELD_OUT)})
        result = evaluate(folder, held_out)
        data = f"the last {HELD_OUT} rows of {source.name}, used for early stopping, not for training"
        result |= {"model": MODEL, "data": data}
        result["peers"] = {"onnxruntime quantize_static": stock_quantizer(folder, held_out)}
    report("quality", result)
    note = "a run of the same recipe without these rows; the shipped weights were then trained on all rows"
    about = {"on": data, "by": note, "report": "reports/quality.json"}
    card_metrics(MODEL, {**about, **result["metrics"], "difference": result["difference"]})


def stock_quantizer(folder: Path, held_out: Path) -> dict[str, Any]:
    """Evaluates the same model and rows, quantized by onnxruntime (QDQ, MinMax, per channel) from plain fp32.onnx."""
    opened: Any = zoo.pipeline(folder, "fp32", "onnxruntime")
    rows = Rows.concatenate(list(opened.rows(str(held_out))))
    target = folder / "stock.onnx"
    onnx_runtime.quantize_static(folder / "fp32.onnx", target, npz.read_npz(folder / SAMPLES)[0])
    batch = opened.features.encode(rows)
    scores = [load(path, "onnxruntime").run(batch)["probability"].ravel() for path in (folder / "fp32.onnx", target)]
    assert rows.labels is not None
    exact, metrics = (click_metrics(rows.labels, values) for values in scores)
    difference = {key: metrics[key] - exact[key] for key in exact}
    return {
        "metrics": metrics,
        "difference": {**difference, "max_probability": float(np.abs(scores[1] - scores[0]).max())},
    }


def shop() -> None:
    """fp32 and int8 of shop-clicks on 10,000 other rows of its shop, its speed in all engines, pinned; card."""
    name, about = "shop-clicks", "10,000 synthetic rows of scripts/synthesize_log.py, seed 1"
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.csv"
        synthesize_log.write(log, 10_000, seed=1)
        result = evaluate(name, log) | {"model": name, "data": about}
        report("quality", result, name)
        said = {"on": about, "report": "reports/quality.json", **result["metrics"], "difference": result["difference"]}
        card_metrics(name, said)
        options = ("--batch-size", "512,1", "--threads", 1, "--rounds", 15, "--data", log)
        speed = zoo_json("benchmark", name, *options)
    report(f"speed-{cpu_slug()}", speed, name)


LABELS = ("clicked", "loved")
COMPILED_FAMILIES = ("dcn-v2", "din", "mmoe")  # one of each kind
QUALITY = ("samples", "metrics", "difference", "native")  # of an evaluation, in a report


def families() -> None:
    """All families of recommenders on a log with columns of its own, beside their peers, one pinned thread.

    Trained on the first three quarters of the log, evaluated on the last, those of several labels on both labels of the
    log; DeepCTR-Torch where it is installed. Every core trains a family at once. Engines that torch compiles are
    measured with three of the families: with all families they reached .86 of the best peer at most, on three CPUs.
    """
    source = harness.development_data("data/movielens/train2.csv.gz")
    with tempfile.TemporaryDirectory() as scratch:
        first, last = (Path(scratch) / f"{name}.csv" for name in ("first", "last"))
        header, *lines = gzip.decompress(source.read_bytes()).splitlines(keepends=True)
        cut = len(lines) * 3 // 4
        first.write_bytes(header + b"".join(lines[:cut]))
        last.write_bytes(header + b"".join(lines[cut:]))
        left_out: dict[str, str] = {}

        def train(job: str | tuple[str, ...], core: int) -> dict[str, Any]:
            if isinstance(job, str):
                return processes.in_process(_trained, job, first, last, Path(scratch) / job, cores={core})
            with harness.leave_out(f"DeepCTR-Torch for {' and '.join(job)}", left_out):
                return processes.in_process(click_models.deepctr, first, last, job, cores={core})
            return {}

        *trained, one, several = processes.on_all_cores(train, (*click_models.KNOWN, LABELS[:1], LABELS))
        models = []
        for family, facts in zip(click_models.KNOWN, trained, strict=True):
            left_out_peers = () if family in COMPILED_FAMILIES else click_models.COMPILED
            peers = [name for name in click_models.ENGINES if name not in left_out_peers]
            models.append({**click_models.compare(Path(scratch) / family, peers=peers, rounds=ROUNDS), **facts})
        figures = {
            "data": f"the last {len(lines) - cut:,} of {len(lines):,} rows of {source.parent.name}",
            "models": models,
            "deepctr": one | several,
            "left_out": left_out,
            "environment": harness.environment(*click_models.PACKAGES, rounds=ROUNDS),
        }
    written(peers_report("click-models"), figures)


def _trained(family: str, first: Path, last: Path, folder: Path) -> dict[str, Any]:
    """Trains a family into `folder`; returns its fields of the report."""
    several, start = family in click_models.SEVERAL_LABELS, time.perf_counter()
    zoo.train(family, str(first), folder, label=LABELS if several else LABELS[0])
    seconds = time.perf_counter() - start
    quality = evaluate(folder, last, *(("labels",) if several else ()))
    kept = {key: quality[key] for key in (*QUALITY, "labels", "next_items") if key in quality}
    return {"model": family, "quality": kept, "training_seconds": round(seconds, 1)}


DAYS, NEW_EACH_DAY, DAY_ROWS, JUDGED_ROWS = 4, (100, 75), 6000, 8000  # days; users and items new on each of them
ONE_TRAINING, SEEDS = "one training on all days", 3


def new_ids() -> None:
    """Four daily logs, each with new users and items: fine-tuning by either start of new ids, and one training on all.

    AUC on rows of all users and items, and on those whose user or item is new on the last day; a number a seed.
    """
    models = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        days = [_day(work / f"day{number}.csv", number + 1, DAY_ROWS, number) for number in range(DAYS)]
        judged = _day(work / "judged.csv", DAYS, JUDGED_ROWS, DAYS)
        table = pyarrow.csv.read_csv(judged)
        ids = [np.array([int(text[1:]) for text in table[name].to_pylist()]) for name in ("user_id", "item_id")]
        new = np.any([column >= (DAYS - 1) * count for column, count in zip(ids, NEW_EACH_DAY, strict=True)], axis=0)
        labels = table["clicked"].to_numpy().astype(np.float32)
        jobs = [(family, seed) for family in ("deepfm", "dcn-v2") for seed in range(SEEDS)]

        def train(job: tuple[str, int], core: int) -> dict[str, Any]:
            place = work / "-".join(map(str, job))
            return processes.in_process(_daily_scores, place, *job, days, table.to_pylist(), cores={core})

        scored = dict(zip(jobs, processes.on_all_cores(train, jobs), strict=True))
        for family in dict.fromkeys(family for family, _ in jobs):
            auc: dict[str, list[float]] = {}
            auc_new: dict[str, list[float]] = {}
            for seed in range(SEEDS):
                for way, scores in scored[family, seed].items():
                    auc.setdefault(way, []).append(click_metrics(labels, scores)["auc"])
                    auc_new.setdefault(way, []).append(click_metrics(labels[new], scores[new])["auc"])
            models.append({"model": family, "auc": auc, "auc_new": auc_new})
    figures = {"days": DAYS, "rows": DAY_ROWS, "users": NEW_EACH_DAY[0], "items": NEW_EACH_DAY[1], "models": models}
    figures |= {"judged": JUDGED_ROWS, "new": int(new.sum()), "environment": harness.environment("torch", rounds=SEEDS)}
    written(peers_report("new-ids"), figures)


def _day(path: Path, days: int, count: int, seed: int) -> Path:
    """Writes a log of the users and items of so many days."""
    users, items = (added * DAYS for added in NEW_EACH_DAY)
    log = pa.concat_tables(synthesize_log.chunks(20 * count, seed, users, items))
    conditions = [
        pc.less(pc.utf8_slice_codeunits(log[name], 1).cast(pa.int64()), days * added)
        for name, added in zip(("user_id", "item_id"), NEW_EACH_DAY, strict=True)
    ]
    log = log.filter(pc.and_(*conditions)).slice(0, count)
    times = pc.add(log["timestamp"], seed * 10**6)  # a later day
    pyarrow.csv.write_csv(log.set_column(log.schema.get_field_index("timestamp"), "timestamp", times), path)
    return path


def _daily_scores(work: Path, family: str, seed: int, days: list[Path], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the probabilities of rows by each way of training."""
    folders = _daily_trainings(work, family, days, {"seed": str(seed)})
    return {
        way: np.array([result["probability"] for result in zoo.pipeline(folder, "fp32")(rows)])
        for way, folder in folders.items()
    }


def _daily_trainings(work: Path, family: str, days: list[Path], settings: dict[str, str]) -> dict[str, Path]:
    """Trains on all days at once, and day after day by either start of new ids; returns the last folder of each way."""
    folders = {ONE_TRAINING: work / "all", "first day alone": work / "0"}
    zoo.train(family, days, folders[ONE_TRAINING], label="clicked", settings=settings)
    zoo.train(family, days[0], work / "0", label="clicked", settings=settings)
    for start in ("unknown", "similar"):
        folders[start] = work / "0"
        for number, day in enumerate(days[1:], 1):
            before, folders[start] = folders[start], work / f"{start}-{number}"
            zoo.finetune(before, day, folders[start], settings={**settings, "new_ids": start})
    return folders


def speed() -> None:
    """Wide & Deep in batches of 512, 64 and 1 in all engines and precisions, in turn, one pinned thread."""
    result = zoo_json("benchmark", MODEL, "--batch-size", "512,64,1", "--threads", 1, "--rounds", 21)
    opened: Any = zoo.pipeline(MODEL)
    batch = opened.preprocess(opened.example(512))
    result["executed"] = {}
    for name in ENGINES:
        session = load(opened.folder.ensure(model_file("int8", name)), name)
        result["executed"][name] = [f"{operator.type} {operator.precision}" for operator in session.executed(batch)]
    result["native"] = zoo.info(MODEL)["native"]
    report(f"speed-{cpu_slug()}", result)


def stream() -> None:
    """`zoo run` on 2,000,000 synthetic rows, file to file, one pinned thread: rows/s and peak resident memory."""
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "rows.tsv", Path(scratch) / "scores.csv"
        synthesize("criteo", source, 2_000_000)
        out, measured = watched(zoo_command("run", MODEL, source, "-o", target))
    about = {"data": "scripts/synthesize_criteo.py -n 2000000", "environment": machine.environment(threads=1)}
    report(f"stream-{cpu_slug()}", {**json.loads(out), **measured, **about})


def training() -> None:
    """An epoch over 1,000,000 synthetic rows, one thread: rows/s, peak memory."""
    count = 1_000_000
    with tempfile.TemporaryDirectory() as scratch:
        source, folder = Path(scratch) / "rows.tsv", Path(scratch) / "model"
        synthesize("criteo", source, count, "--seed", 1)
        recipe = ("--epochs", 1, "--batch-size", 4096, "--set", "refit=false")
        command = zoo_command("train", "wide-deep", "--data", source, "-o", folder, *recipe)
        _, measured = watched(command[3:], {"OMP_NUM_THREADS": "1"})  # not pinned
        record = files.read_json(folder / "train.json")
    environment = machine.environment(threads=1)
    environment["versions"] |= record["versions"]
    kept = {key: record[key] for key in ("rows", "metrics", "seed")}
    kept |= {"trained_rows": record["epochs"] * record["rows"]["train"], "seconds": {"train": record["seconds"]}}
    config = {key: record["config"][key] for key in ("hidden", "buckets", "embedding_size", "batch_size")}
    measured |= {"load_average": os.getloadavg(), "memory": "VmHWM of the process, looked at 20 times a second"}
    about = {"data": f"scripts/synthesize_criteo.py -n {count} --seed 1", "environment": environment}
    report(f"training-{cpu_slug()}", {"model": MODEL, **kept, **config, **measured, **about})


def instances() -> None:
    """Two pinned processes at once, one thread each, int8 in every engine: throughput together, memory (PSS)."""
    result = zoo_json("benchmark", MODEL, "--precision", "int8", "--instances", 2, pinned=False)
    report(f"instances-{cpu_slug()}", result)


def peers() -> None:
    """Wide & Deep in the engines of others and of this project, in turn, one pinned thread."""
    measure_model("peers", "wide-deep")


def runs() -> None:
    """Whole processes from a file of rows to a file of scores: `zoo run` beside a script of pandas and onnxruntime."""
    measure_model("runs", "runs")
    measure_model("runs", "runs", "shop-clicks")


def reading() -> None:
    """Logs read by this project and by pandas."""
    measure_together("log-reading")


def tables() -> None:
    """Quantized embedding tables beside FBGEMM, zentorch and torch."""
    measure_together("tables")
