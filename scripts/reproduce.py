"""Measure again what README.md, MODELS.md and docs/benchmarks.md show, and render them from the reports.

    python scripts/reproduce.py [PART ...]        all parts if none is named; `make bench` runs it

All parts together take up to three hours on two quiet cores. Each writes a report file for each model or comparison,
under zoo/weights/NAME/reports/ or scripts/peers/reports/, some the figures of a card, too. Timings are kept per CPU
(the file name says which), so that reports of several machines stand side by side. A part that cannot be measured here
(data is missing) is told at the end, and the others go on; a peer that is not installed (extras `peers` and `ray`, and
wrk, Debian's package) is missing in the report. $ZOO_SHARED (by default ../shared) holds weights/ and data/criteo/,
movielens/, cifar10/, imagenet/nips17/, translation/ and stsb/.

What takes longer or a cluster has scripts of its own: smaller.py and soak_serving.py here; communication.py,
serving_on_ray.py, own_models.py, other choices of vision.py, translation.py and serving.py in peers/.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zoo
from pipelines.core import files, machine, settings
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines.catalog import ENGINES, load
from pipelines.models import hub, stages
from pipelines.models.folder import SAMPLES
from pipelines.models.pipeline import model_file
from scripts import synthesize_log
from scripts.peers import harness
from scripts.peers.recommenders import click_models
from scripts.peers.recommenders.wide_deep import stock_quantize
from scripts.reproduction.peers import cluster, contexts, detectors, encoder, networks, reading, servers, texts
from scripts.reproduction.reports import (
    MODEL,
    ROOT,
    ROUNDS,
    SHARED,
    cpu_slug,
    measure_by,
    measure_together,
    report,
    watched,
)
from scripts.reproduction.translation import bleu, imported, steps, students, threads, translation
from zoo.recommenders.criteo.data import Rows
from zoo.recommenders.metrics import click_metrics

PEERS = ROOT / "scripts" / "peers"
HELD_OUT = 1500
CALIBRATED = 5  # every so manieth photo made the tables that ship


def quality() -> None:
    """Train by the recipe without the last 1,500 rows, quantize, and compare fp32 and int8 on those rows.

    The shipped model saw them (it is trained again on all rows), so its own metrics there would flatter it: these are
    the recipe's.
    """
    source = SHARED / "data" / "criteo" / "criteo_10390.tsv"
    if not source.is_file():
        raise RequestError(f"no training rows at {source}; set ZOO_SHARED to the folder that holds data/criteo/")
    with tempfile.TemporaryDirectory() as scratch:
        folder, held_out = Path(scratch) / "model", Path(scratch) / "held_out.tsv"
        held_out.write_bytes(b"".join(source.read_bytes().splitlines(keepends=True)[-HELD_OUT:]))
        zoo.train("wide-deep", str(source), folder, settings={"refit": "false", "validation": str(HELD_OUT)})
        found = zoo.evaluate(folder, str(held_out), engine="onnxruntime")
        found |= {
            "model": MODEL,
            "data": f"the last {HELD_OUT} rows of {source.name}, on which this run was stopped but not trained",
        }
        native = zoo.evaluate(folder, str(held_out), engine="native")
        found["native"] = {"metrics": native["metrics"]["int8"], "difference": native["difference"]}
        found["peers"] = {"onnxruntime quantize_static": stock_quantizer(folder, held_out)}
    report("quality", found)
    card = zoo.SHIPPED / MODEL / "card.json"
    note = "a run of the same recipe without these rows; the shipped weights were then trained on all rows"
    said = {
        "on": found["data"],
        "by": note,
        "report": "reports/quality.json",
        **found["metrics"],
        "difference": found["difference"],
    }
    files.write_json(card, files.read_json(card) | {"metrics": said})


def shop() -> None:
    """fp32 and int8 of shop-clicks on 10,000 other rows of its shop, its speed in all engines, pinned; card."""
    name = "shop-clicks"
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.csv"
        synthesize_log.write(log, 10_000, seed=1)
        found, native = (zoo.evaluate(name, str(log), engine=engine) for engine in ("onnxruntime", "native"))
        about = "10,000 synthetic rows of scripts/synthesize_log.py, seed 1"
        found |= {"model": name, "data": about}
        found["native"] = {"metrics": native["metrics"]["int8"], "difference": native["difference"]}
        report("quality", found, name)
        said = {"on": about, "report": "reports/quality.json", **found["metrics"], "difference": found["difference"]}
        card = zoo.SHIPPED / name / "card.json"
        files.write_json(card, files.read_json(card) | {"metrics": said})
        options = ["--batch-size", "512,1", "--threads", "1", "--rounds", "15", "--json", "--data", str(log)]
        command = ["taskset", "-c", "0", sys.executable, "-m", "zoo.cli.app", "benchmark", name, *options]
        speed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    report(f"speed-{cpu_slug()}", speed, name)


FAMILIES = ("wide-deep", "deepfm", "dcn-v2", "dlrm", "two-tower")


def families() -> None:
    """Every family of recommenders on a log with columns of its own: trained on the first three quarters of it, judged
    on the last, timed beside its peers (`scripts/peers/recommenders/click_models.py`), one pinned thread; DeepCTR-Torch where it is
    installed.
    """
    source = SHARED / "data" / "movielens" / "train.csv.gz"
    if not source.is_file():
        raise RequestError(f"no log at {source}; set ZOO_SHARED to the folder that holds data/movielens/")
    with tempfile.TemporaryDirectory() as scratch:
        first, last = (Path(scratch) / f"{name}.csv" for name in ("first", "last"))
        header, *lines = gzip.decompress(source.read_bytes()).splitlines(keepends=True)
        cut = len(lines) * 3 // 4
        first.write_bytes(header + b"".join(lines[:cut]))
        last.write_bytes(header + b"".join(lines[cut:]))
        found: dict[str, Any] = {
            "data": f"the last {len(lines) - cut:,} of {len(lines):,} rows of {source.parent.name}"
        }
        found["models"] = []
        for family in FAMILIES:
            folder = Path(scratch) / family
            start = time.perf_counter()
            zoo.train(family, str(first), folder)
            seconds = time.perf_counter() - start
            quality = zoo.evaluate(folder, str(last), engine="onnxruntime")
            native = zoo.evaluate(folder, str(last), engine="native")
            quality["native"] = {"metrics": native["metrics"]["int8"], "difference": native["difference"]}
            timed = click_models.compare(folder, rounds=ROUNDS)
            kept = {key: quality[key] for key in ("samples", "metrics", "difference", "native")}
            found["models"].append({**timed, "model": family, "quality": kept, "training_seconds": round(seconds, 1)})
        found["deepctr"] = click_models.deepctr(first, last)
    found["environment"] = machine.environment(threads=1, rounds=ROUNDS, peers=harness.versions(*click_models.PACKAGES))
    target = ROOT / "scripts" / "peers" / "reports" / f"click-models-{cpu_slug()}.json"
    files.write_json(target, found)
    print(f"wrote {target.relative_to(ROOT)}")


def stock_quantizer(folder: Path, held_out: Path) -> dict[str, Any]:
    """What onnxruntime's own quantizer (QDQ, MinMax, per channel, on the model's plain fp32.onnx) makes of the same
    model and rows.
    """
    opened: Any = zoo.pipeline(folder, "fp32", "onnxruntime")
    rows = Rows.concatenate(list(opened.rows(str(held_out))))
    target = folder / "stock.onnx"
    stock_quantize(folder / "fp32.onnx", target, stages.read_npz(folder / SAMPLES)[0])
    batch = opened.features.encode(rows)
    scores = [load(path, "onnxruntime").run(batch)["probability"].ravel() for path in (folder / "fp32.onnx", target)]
    assert rows.labels is not None
    metrics = [click_metrics(rows.labels, each) for each in scores]
    difference = {key: metrics[1][key] - metrics[0][key] for key in metrics[0]}
    return {
        "metrics": metrics[1],
        "difference": {**difference, "max_probability": float(np.abs(scores[1] - scores[0]).max())},
    }


def speed() -> None:
    """Batches of 512, 64 and 1 in all engines and precisions, in turn, one pinned thread; with what the int8 graph
    really ran.
    """
    options = ["--batch-size", "512,64,1", "--threads", "1", "--rounds", "21", "--json"]
    command = [sys.executable, "-m", "zoo.cli.app", "benchmark", MODEL, *options]
    out = subprocess.run(["taskset", "-c", "0", *command], capture_output=True, text=True, check=True).stdout
    found = json.loads(out)
    opened: Any = zoo.pipeline(MODEL)
    batch = opened.preprocess(opened.example(512))
    found["executed"] = {}
    for name in ENGINES:
        session = load(opened.folder.ensure(model_file("int8", name)), name)
        found["executed"][name] = [f"{each.type} {each.precision}" for each in session.executed(batch)]
    found["native"] = zoo.info(MODEL)["native"]
    report(f"speed-{cpu_slug()}", found)


def stream() -> None:
    """`zoo run` on 2,000,000 synthetic rows, file to file, one pinned thread: rows/s and peak resident memory of the
    process.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "rows.tsv", Path(scratch) / "scores.csv"
        subprocess.run(
            [sys.executable, ROOT / "scripts" / "synthesize_criteo.py", "-n", "2000000", "-o", source], check=True
        )
        command = [
            "taskset",
            "-c",
            "0",
            sys.executable,
            "-m",
            "zoo.cli.app",
            "run",
            MODEL,
            str(source),
            "-o",
            str(target),
            "--json",
        ]
        out, measured = watched(command)
    found = {**json.loads(out), **measured}
    report(
        f"stream-{cpu_slug()}",
        {**found, "data": "scripts/synthesize_criteo.py -n 2000000", "environment": machine.environment(threads=1)},
    )


def training() -> None:
    """An epoch over 8,000,000 synthetic rows, one thread of TensorFlow: rows/s, what the input takes of it, peak
    memory.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "rows.tsv"
        synthesize = [
            sys.executable,
            ROOT / "scripts" / "synthesize_criteo.py",
            "-n",
            "8000000",
            "--seed",
            "1",
            "-o",
            source,
        ]
        subprocess.run(synthesize, check=True)
        epoch(source, "scripts/synthesize_criteo.py -n 8000000 --seed 1")


def epoch(source: Path, data: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        options = ["--epochs", "1", "--batch-size", "4096", "--set", "refit=false", "--json"]
        command = [
            sys.executable,
            "-m",
            "zoo.cli.app",
            "train",
            "wide-deep",
            "--data",
            str(source),
            "-o",
            str(folder),
            *options,
        ]
        one = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
        _, measured = watched(command, one)
        found = files.read_json(folder / "train.json")
    environment = machine.environment(threads=1)
    environment["versions"] |= found["versions"]
    kept = {key: found[key] for key in ("rows", "trained_rows", "seconds", "metrics", "seed")}
    recipe = {key: found["config"][key] for key in ("hidden", "buckets", "embedding_size", "batch_size")}
    measured |= {"load_average": os.getloadavg(), "memory": "VmHWM of the process, looked at 5 times a second"}
    report(
        f"training-{cpu_slug()}",
        {"model": MODEL, **kept, **recipe, **measured, "data": data, "environment": environment},
    )


def instances() -> None:
    """Two pinned processes at once, one thread each, int8 in every engine, batches of 512: throughput together, memory
    by shares (PSS).
    """
    command = [
        sys.executable,
        "-m",
        "zoo.cli.app",
        "benchmark",
        MODEL,
        "--precision",
        "int8",
        "--instances",
        "2",
        "--json",
    ]
    report(
        f"instances-{cpu_slug()}",
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout),
    )


def peers() -> None:
    """scripts/peers/recommenders/wide_deep.py: the same weights and inputs in the engines of others and in ours, in turn, one pinned
    thread.
    """
    measure_by("recommenders/wide_deep.py", f"peers-{cpu_slug()}")


def runs() -> None:
    """scripts/peers/recommenders/criteo_run.py: whole processes from a file of rows to a file of scores, `zoo run` beside the script
    written by hand.
    """
    measure_by("recommenders/criteo_run.py", f"runs-{cpu_slug()}")
    measure_by("recommenders/log_run.py", f"runs-{cpu_slug()}", "shop-clicks")


def images() -> None:
    """The image models whose table ships, on images that calibrated nothing: fp32 and int8, then one after the other,
    pinned.
    """
    source, archive = SHARED / "data" / "imagenet" / "nips17", SHARED / "data" / "cifar10" / "cifar10_jpeg.tar.gz"
    for each in (source / "labels.csv", archive):
        if not each.is_file():
            raise RequestError(
                f"found no {each}; set ZOO_SHARED to the folder that holds data/imagenet/nips17/ and data/cifar10/"
            )
    os.environ.setdefault("ZOO_MIRROR", str(SHARED / "weights"))
    cards = [hub.Hub(zoo.SHIPPED).card(name) for name in zoo.names()]
    with tempfile.TemporaryDirectory() as scratch:
        photos, small = Path(scratch) / "photos", Path(scratch) / "cifar10"
        photos.mkdir()
        lines = (source / "labels.csv").read_text().splitlines(keepends=True)
        rows = [line for at, line in enumerate(lines[1:]) if at % CALIBRATED]
        (photos / "labels.csv").write_text("".join([lines[0], *rows]))
        for row in rows:
            (photos / row.split(",")[0]).symlink_to(source / row.split(",")[0])
        with tarfile.open(archive) as opened:
            opened.extractall(small, [each for each in opened if each.name.startswith("test/")], filter="data")
        said = (
            f"{len(rows)} photos of the development set of the NIPS 2017 adversarial competition, easier "
            "than ImageNet's own"
        )
        for name in [card.name for card in cards if any(file.name == "calibration.json" for file in card.files)]:
            if name.endswith("-imagenet"):
                classify(name, photos, said)
            elif name.endswith("-cifar10"):
                classify(name, small / "test", "the 10,000 test images of CIFAR-10")


def classify(name: str, folder: Path, data: str) -> None:
    options = [
        "--data",
        str(folder),
        "--scenario",
        "single-stream",
        "--engine",
        "onnxruntime,openvino,native",
        "--count",
        "200",
        "--json",
    ]
    command = ["taskset", "-c", "0", sys.executable, "-m", "zoo.cli.app", "benchmark", name, *options]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    quality = zoo.evaluate(name, str(folder), engine="openvino")
    said = {key: quality[key] for key in ("samples", "metrics", "difference", "interval")}
    report(f"images-{cpu_slug()}", {**found, "data": data, "quality": said}, name)
    card = files.read_json(path := zoo.SHIPPED / name / "card.json")
    if "metrics" in card:
        metrics = {"on": card["metrics"]["on"], "report": f"reports/images-{cpu_slug()}.json", **quality["metrics"]}
        files.write_json(path, card | {"metrics": metrics})


def photos() -> None:
    """scripts/peers/vision/images.py: from JPEG bytes to label, here and in the obvious pipelines of the peers, same weights
    and photos: 300 of the 500, which leaves the ratios as they are.
    """
    measure_together("images", "--photos", "300", path=PEERS / "vision" / "images.py")


def quantizers() -> None:
    """scripts/peers/quantization/vision.py: this quantizer beside onnxruntime's and NNCF's, same float files and photos: accuracy,
    speed, memory. By its own settings beside the default this quantizer takes half an hour more.
    """
    kinds = "onnxruntime-minmax,onnxruntime-percentile,onnxruntime-entropy,nncf-default,nncf-mixed"
    measure_together(
        "vision",
        "--settings",
        f"zoo,{kinds},nncf-default-exact,nncf-mixed-exact",
        path=PEERS / "quantization" / "vision.py",
    )


PARTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        quality,
        shop,
        families,
        speed,
        stream,
        training,
        instances,
        peers,
        runs,
        images,
        encoder,
        photos,
        networks,
        quantizers,
        detectors,
        reading,
        bleu,
        translation,
        imported,
        threads,
        students,
        steps,
        texts,
        contexts,
        cluster,
        servers,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all if none is named")
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"reproduce: unknown part {', '.join(unknown)}; choose among {', '.join(PARTS)}")
    settings.home().mkdir(parents=True, exist_ok=True)
    left_out = []
    for part in parts:
        print(f"{part}: {(PARTS[part].__doc__ or '').splitlines()[0]}", flush=True)
        start = time.perf_counter()
        try:
            PARTS[part]()
        except ZooError as error:
            left_out.append(f"{part}: {error}")
        except subprocess.CalledProcessError as error:
            command = " ".join(map(str, error.cmd))
            left_out.append(f"{part}: {command} ended with {error.returncode}: {(error.stderr or '').strip()}")
        except Exception as error:  # hours of other parts are still to come
            traceback.print_exc()
            left_out.append(f"{part}: {type(error).__name__}: {error}")
        print(f"{part}: took {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
    subprocess.run([sys.executable, ROOT / "scripts" / "render.py"], check=True)
    if left_out:
        sys.exit("\n".join(f"reproduce: {each}" for each in left_out))


if __name__ == "__main__":
    main()
