"""A model before and after `zoo finetune --prune`: quality of int8, its time in each engine, file size, memory.

MODELs are BEFORE and AFTER, of one family, by name or folder. Both models are timed in int8, in all engines in turn, in
one process and on one thread; times are medians. "times" is the median over the rounds of the time before divided by
the time after. "megabytes" is the peak memory of a process that loads and runs the model. The qualities are those of
the strategy's log, or `--quality BEFORE,AFTER` where it was measured elsewhere. "peer": the same float networks
quantized by onnxruntime (MinMax, per channel), in onnxruntime.

--peers adds models that other libraries prune from BEFORE and train on the same images (`pruning.py`). They are
evaluated on the held-out images and timed in the same turns. The folder --work keeps them; after an interruption, the
same command continues there. A peer that does not run is left out, and the report says why.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.analysis.benchmark import Configuration, memory_mb
from pipelines.analysis.power import Meter
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.engines.catalog import load
from pipelines.engines.timing import measure as time_in_turn
from pipelines.models.family import Lowerable
from pipelines.models.folder import ModelFolder
from pipelines.models.npz import read_arrays
from pipelines.models.pipeline import GraphPipeline, Predictor
from pipelines.models.record import SAMPLES
from scripts.peers import harness
from scripts.peers.compression import pruning
from scripts.peers.engines import onnx_runtime
from zoo.api.evaluation import configuration

PACKAGES = ("nncf", "torch", "torch-pruning")
AT_ONCE = 100  # images that are judged in one batch
CALIBRATED = 128  # samples of the peer's quantizer
UNPRINTED = ("strategy", "steps")


def quantized_by_onnxruntime(folder: ModelFolder, samples: Path, path: Path) -> Path:
    """Quantizes the float network by onnxruntime on the model's own samples."""
    arrays = read_arrays(samples)
    count = min(CALIBRATED, len(next(iter(arrays.values()))))
    batches = ({name: array[i : i + 1] for name, array in arrays.items()} for i in range(count))
    onnx_runtime.quantize_static(folder.ensure("rewritten.onnx"), path, batches, prepare=False)
    return path


@dataclass(frozen=True)
class Peer:
    """The open models of a peer, before and after, and the batch that they are timed on."""

    made: pruning.Made
    sessions: tuple[Any, Any]
    batch: dict[str, Any]

    def judged(self, images: Any, labels: Any) -> list[float]:
        """Returns the share of images, normalized in parts, that each recognizes."""
        right = np.zeros(2)
        for begin in range(0, len(labels), AT_ONCE):
            x = images(slice(begin, begin + AT_ONCE))
            for i, session in enumerate(self.sessions):
                (logits,) = session.run({name: x for name in self.batch}).values()
                right[i] += (logits.argmax(1) == labels[begin : begin + AT_ONCE]).sum()
        return [round(float(share), 4) for share in right / len(labels)]

    def report(self, task: pruning.Task) -> dict[str, Any]:
        """Returns the peer's part of the report."""
        pixels, labels = task.data["held_out"]
        quality = self.judged(lambda part: task.normalize(pixels[part]).contiguous().numpy(), labels.numpy())
        paths = (self.made.before, self.made.after)
        memory = [memory_mb(Configuration(self.made.engine, "int8", path), self.batch, 1) for path in paths]
        about = {name: fact for name, fact in self.made.about.items() if name != "task"} | {"epochs": task.epochs}
        about |= {"images_an_epoch": task.seen}
        return {"quality": quality, "bytes": self.made.sizes, "megabytes": memory, "engine": self.made.engine, **about}


class OwnBatch:
    """A session that is timed on a batch of its own."""

    def __init__(self, session: Any, batch: dict[str, Any]) -> None:
        self.session, self.batch = session, batch

    def run(self, _: Any) -> Any:
        """Runs the batch, whatever is passed."""
        return self.session.run(self.batch)


def peers_of(
    names: list[str], task: pruning.Task | None, work: Path, size: int
) -> tuple[dict[str, Peer], dict[str, str]]:
    """Opens the peers; returns those that run, and why others do not.

    Raises:
        RequestError: The folder `work` is of another task.
    """
    peers: dict[str, Peer] = {}
    left_out: dict[str, str] = {}
    for name in names if task else ():
        with harness.leave_out(name, left_out, fatal=(RequestError,)):
            assert task is not None
            made = pruning.make(name, task, work / name)
            sessions = tuple(load(path, made.engine, 1) for path in (made.before, made.after))
            x = task.normalize(task.data["held_out"][0][:size]).contiguous().numpy()
            batch = dict.fromkeys(sessions[0].inputs, x)
            for session in sessions:
                session.run(batch)
            peers[name] = Peer(made, sessions, batch)
    return peers, left_out


def compare(
    models: list[str], size: int, rounds: int, data: str | None, scratch: Path, peers: Mapping[str, Peer]
) -> dict[str, Any]:
    """Times, bytes and megabytes of both models in each engine, times of the peers'."""
    folders = [zoo.load(model) for model in models]
    kind = folders[0].entry.pipeline()
    engines = [engine for engine in kind.engines(folders[0]) if engine in kind.engines(folders[1])]
    pipelines = {
        (engine, i): kind(folder, "int8", engine, 1, size) for engine in engines for i, folder in enumerate(folders)
    }
    raw = next(iter(pipelines.values())).example(size, data)
    batches = [pipelines[engines[0], i].preprocess(raw) for i in (0, 1)]  # vocabularies may differ
    runs = {(engine, i): OwnBatch(Predictor(pipeline), batches[i]) for (engine, i), pipeline in pipelines.items()}
    left_out: dict[str, str] = {}
    quantized: dict[Any, Any] = {}
    with harness.leave_out("peer", left_out):
        if not issubclass(kind, GraphPipeline):
            raise RequestError(
                "ONNX Runtime's quantizer is not compared for models whose results take several runs of a graph"
            )
        for i, folder in enumerate(folders):
            own = folder.path / SAMPLES
            samples = own if own.is_file() else folders[1].path / SAMPLES
            made = quantized_by_onnxruntime(folder, samples, scratch / f"{i}.onnx")
            quantized["peer", i] = OwnBatch(load(made, "onnxruntime", 1), batches[i])
    runs |= quantized if len(quantized) == len(folders) else {}
    for name, peer in peers.items():
        runs |= {(name, i): OwnBatch(session, peer.batch) for i, session in enumerate(peer.sessions)}
    times = np.array([time_in_turn(list(runs.values()), {}) for _ in range(rounds)])
    columns = dict(zip(runs, times.T, strict=True))
    figures = {
        engine: {
            "before_ms": harness.median(columns[engine, 0], 4),
            "after_ms": harness.median(columns[engine, 1], 4),
            "times": harness.ratio(columns[engine, 0], columns[engine, 1]),
        }
        for engine in dict.fromkeys(key[0] for key in runs)
    }
    both = list(zip(folders, batches, strict=True))
    memory = {
        engine: [memory_mb(configuration(folder, "int8", engine), batch, 1) for folder, batch in both]
        for engine in engines
        if engine != "native" or not isinstance(folders[0].entry, Lowerable)
    }
    sizes = [folder.ensure("int8.onnx").stat().st_size for folder in folders]
    return {"engines": figures, "bytes": sizes, "megabytes": memory, "left_out": left_out}


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("models", nargs=2, metavar="MODEL")
    parser.add_argument("--log", required=True, help="compression.json of the strategy")
    parser.add_argument("--quality", metavar="BEFORE,AFTER", help="qualities in place of those in the log")
    parser.add_argument("--note", default="", help="remark on the model, for the report")
    parser.add_argument("--data", help="raw input that is timed (default: the model's sample)")
    parser.add_argument("--metric", default="top1")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.count("--rounds", 15, "turns of each model in each engine")
    parser.add_argument("--peers", metavar="NAME,...", help=f"of image classifiers: {', '.join(pruning.PEERS)}")
    parser.add_argument("--images", metavar="RAW", help="labelled images that peers train on and are judged by")
    parser.count("--epochs", 5, "training epochs of peers", least=2)
    parser.count("--most", 0, "images of a peer's epoch, for a trial; 0: all", least=0)
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [`compare` with "model", "batch_size", "metric", "quality", "peers", ...], "environment"}."""
    log = read_json(Path(args.log))
    best = next(step for step in log["steps"] if step["step"] == log["best"])
    quality = [step["metrics"][args.metric] for step in (log["base"], best)]
    if args.quality:
        quality = [float(number) for number in args.quality.split(",")]
    facts = machine.environment(threads=1, rounds=args.rounds, power=Meter().fault or "read")
    facts["peers"] = harness.versions(*PACKAGES)
    name = zoo.load(args.models[0]).card.name
    chosen = harness.split_names("peer", args.peers, pruning.PEERS) if args.peers else []
    if chosen and not args.images:
        raise RequestError("found --peers without --images; name the images that they train on")
    task = pruning.Task(*args.models, args.images, args.epochs, args.most) if chosen else None
    with tempfile.TemporaryDirectory() as scratch, harness.folder(args.work) as work:
        peers, left_out = peers_of(chosen, task, work, args.batch_size)
        compared = compare(args.models, args.batch_size, args.rounds, args.data, Path(scratch), peers)
        compared["peers"] = {name: peer.report(task) for name, peer in peers.items() if task}
        compared["left_out"] |= left_out
    about = {"model": name, "batch_size": args.batch_size, "metric": args.metric, "quality": quality}
    history = {"strategy": log["strategy"], "steps": log["steps"], "note": args.note}
    return {"models": [about | compared | history], "environment": facts}
