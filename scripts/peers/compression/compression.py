"""A model before and after `zoo finetune --prune`: quality of int8, its time in each engine, size of its file, memory.

    python scripts/peers/compression/compression.py BEFORE AFTER --log DIR/compression.json [--data RAW] [--batch-size 1] [-o FILE]
        [--peers torch-pruning,nncf --images RAW --epochs 5 --work DIR [--most 10000]]

BEFORE and AFTER are models of one family, by name or folder. Times are of int8 with one thread, all engines and both
models in turn in one process, medians; "times" is before beside after, the median over the rounds. "megabytes": what a
process of its own takes at most that loads and runs it. The qualities are those that the strategy's log holds, or
`--quality BEFORE,AFTER` where it was measured elsewhere. "peer": what onnxruntime's own quantizer (MinMax, per channel)
makes of the same float networks, in onnxruntime.

--peers: what other libraries make of BEFORE by pruning and training of their own on the same images
(`scripts/peers/compression/pruning.py`), judged on those held out and timed in the same turns; kept in the folder --work, from
which the same command goes on after an interrupt. One that does not run is left out, and the report says why.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


import zoo
from pipelines.analysis.benchmark import Configuration, memory_mb
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.core.power import Meter
from pipelines.engines.catalog import load
from pipelines.engines.timing import measure
from pipelines.models.folder import SAMPLES
from pipelines.models.pipeline import GraphPipeline, Predictor
from pipelines.models.stages import read_arrays
from scripts.peers import harness
from scripts.peers.compression import pruning
from zoo.api.evaluation import configuration

PACKAGES = ("nncf", "torch", "torch-pruning")
AT_ONCE = 100  # images that are judged in one batch


def quantized_by_onnxruntime(folder: Any, samples: Path, path: Path) -> Path:
    """The float network through onnxruntime.quantization, on the model's own samples."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    arrays = read_arrays(samples)
    count = min(128, len(next(iter(arrays.values()))))

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter([{name: each[i : i + 1] for name, each in arrays.items()} for i in range(count)])

        def get_next(self) -> Any:
            return next(self.left, None)

    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    source = folder.ensure("rewritten.onnx")
    quantize_static(source, path, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, **types)
    return path


@dataclass(frozen=True)
class Peer:
    """What a peer made, open: (before, after), and what they are timed on."""

    made: pruning.Made
    sessions: tuple[Any, Any]
    batch: dict[str, Any]

    def judged(self, images: Any, labels: Any) -> list[float]:
        """The share of images, normalized in parts, that each recognizes."""
        right = np.zeros(2)
        for begin in range(0, len(labels), AT_ONCE):
            x = images(slice(begin, begin + AT_ONCE))
            for i, session in enumerate(self.sessions):
                (logits,) = session.run({name: x for name in self.batch}).values()
                right[i] += (logits.argmax(1) == labels[begin : begin + AT_ONCE]).sum()
        return [round(float(each), 4) for each in right / len(labels)]

    def told(self, task: pruning.Task) -> dict[str, Any]:
        """Its part of the report."""
        pixels, labels = task.data["held_out"]
        quality = self.judged(lambda part: task.normalize(pixels[part]).contiguous().numpy(), labels.numpy())
        paths = (self.made.before, self.made.after)
        memory = [memory_mb(Configuration(self.made.engine, "int8", each), self.batch, 1) for each in paths]
        about = {name: each for name, each in self.made.about.items() if name != "task"} | {"epochs": task.epochs}
        about |= {"images_an_epoch": task.seen}
        return {"quality": quality, "bytes": self.made.sizes, "megabytes": memory, "engine": self.made.engine, **about}


class Fed:
    """A session that is timed on a batch of its own."""

    def __init__(self, session: Any, batch: dict[str, Any]) -> None:
        self.session, self.batch = session, batch

    def run(self, _: Any) -> Any:
        return self.session.run(self.batch)


def peers_of(
    names: list[str], task: pruning.Task | None, work: Path, size: int
) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that run, and why others do not."""
    found, left_out = {}, {}
    for name in names if task else ():
        try:
            made = pruning.make(name, task, work / name)
            sessions = tuple(load(each, made.engine, 1) for each in (made.before, made.after))
            x = task.normalize(task.data["held_out"][0][:size]).contiguous().numpy()
            batch = dict.fromkeys(sessions[0].inputs, x)
            for each in sessions:
                each.run(batch)
            found[name] = Peer(made, sessions, batch)
        except RequestError:
            raise
        except Exception as error:  # whatever the peer's libraries raise
            left_out[name] = harness.why(error)
            print(f"{name} is left out: {left_out[name]}", file=sys.stderr)
    return found, left_out


def measured(
    models: list[str],
    size: int,
    rounds: int,
    data: str | None,
    scratch: Path,
    peers: Mapping[str, Peer],
) -> dict[str, Any]:
    """Times, bytes and megabytes of both models in each engine, times of the peers'."""
    folders = [zoo.load(each) for each in models]
    kind = folders[0].entry.part("pipeline")
    engines = [each for each in kind.engines(folders[0]) if each in kind.engines(folders[1])]
    pipelines = {
        (engine, i): kind(each, "int8", engine, 1, size) for engine in engines for i, each in enumerate(folders)
    }
    raw = next(iter(pipelines.values())).example(size, data)
    batches = [pipelines[engines[0], i].preprocess(raw) for i in (0, 1)]  # vocabularies may differ
    runs = {(engine, i): Fed(Predictor(each), batches[i]) for (engine, i), each in pipelines.items()}
    left_out = {}
    try:
        if not issubclass(kind, GraphPipeline):
            raise RequestError("a result is many runs of this graph, which that quantizer makes no pipeline of")
        for i, folder in enumerate(folders):
            own = folder.path / SAMPLES
            samples = own if own.is_file() else folders[1].path / SAMPLES
            made = quantized_by_onnxruntime(folder, samples, scratch / f"{i}.onnx")
            runs["peer", i] = Fed(load(made, "onnxruntime", 1), batches[i])
    except Exception as error:  # whatever the peer's quantizer raises
        left_out["peer"] = harness.why(error)
        runs = {key: each for key, each in runs.items() if key[0] != "peer"}
    for name, peer in peers.items():
        runs |= {(name, i): Fed(each, peer.batch) for i, each in enumerate(peer.sessions)}
    times = np.array([measure(list(runs.values()), {}) for _ in range(rounds)])
    columns = dict(zip(runs, times.T, strict=True))
    found = {}
    for engine in dict.fromkeys(key[0] for key in runs):
        before, after = columns[engine, 0], columns[engine, 1]
        found[engine] = {
            "before_ms": harness.median(list(before), 4),
            "after_ms": harness.median(list(after), 4),
            "times": round(float(np.median(before / after)), 3),
        }
    memory = {
        engine: [
            memory_mb(configuration(each, "int8", engine), batch, 1)
            for each, batch in zip(folders, batches, strict=True)
        ]
        for engine in engines
        if engine != "native" or not folders[0].entry.native
    }
    sizes = [each.ensure("int8.onnx").stat().st_size for each in folders]
    return {"engines": found, "bytes": sizes, "megabytes": memory, "left_out": left_out}


def table(report: Mapping[str, Any]) -> str:
    """The results as text."""
    (found,) = report["models"]
    before, after = found["quality"]
    lines = [f"{found['metric']} {before:.4f} -> {after:.4f}; {found['bytes'][0]:,} -> {found['bytes'][1]:,} bytes"]
    for engine, each in found["engines"].items():
        memory = found["megabytes"].get(engine)
        shown = f", {memory[0]:.0f} -> {memory[1]:.0f} MB" if memory else ""
        times = f"{each['before_ms']['median']:.3f} -> {each['after_ms']['median']:.3f} ms, {each['times']:.2f}x"
        lines.append(f"  {engine}: {times}{shown}")
    for name, each in found["peers"].items():
        before, after = each["quality"]
        sizes, memory = each["bytes"], each["megabytes"]
        lines.append(
            f"  {name}, {each['epochs']} epochs: {found['metric']} {before:.4f} -> {after:.4f}; {sizes[0]:,} -> "
            f"{sizes[1]:,} bytes, {memory[0]:.0f} -> {memory[1]:.0f} MB"
        )
    return "\n".join([*lines, *(f"  {name}: {why}" for name, why in found["left_out"].items())])


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument("models", nargs=2, metavar="MODEL")
    parser.add_argument("--log", required=True, help="compression.json of the strategy")
    parser.add_argument("--quality", metavar="BEFORE,AFTER", help="instead of those in the log")
    parser.add_argument("--note", default="", help="what was done beside the strategy")
    parser.add_argument("--data", help="raw input that is timed; by default the model's sample")
    parser.add_argument("--metric", default="top1")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", metavar="NAME,...", help=f"of image classifiers: {', '.join(pruning.PEERS)}")
    parser.add_argument("--images", metavar="RAW", help="labelled images that peers train on and are judged by")
    parser.add_argument("--epochs", type=int, default=5, help="that peers train for, 2 or more")
    parser.add_argument("--most", type=int, default=0, help="images of a peer's epoch, for a trial; by default all")
    parser.add_argument("--work", metavar="DIR", help="where peers' models are kept")
    with harness.one_line("smaller"):
        args = parser.parse_args()
        log = read_json(Path(args.log))
        best = next(each for each in log["steps"] if each["step"] == log["best"])
        quality = [each["metrics"][args.metric] for each in (log["base"], best)]
        if args.quality:
            quality = [float(each) for each in args.quality.split(",")]
        facts = machine.environment(threads=1, rounds=args.rounds, power=Meter().fault or "read")
        facts["peers"] = harness.versions(*PACKAGES)
        names = [zoo.load(each).card.name for each in args.models]
        chosen = harness.listed("peer", args.peers, pruning.PEERS) if args.peers else []
        if chosen and (not args.images or args.epochs < 2):
            raise RequestError("found --peers without --images or with less than 2 --epochs; give what they train on")
        task = pruning.Task(*args.models, args.images, args.epochs, args.most) if chosen else None

        def one(_: Any) -> Any:
            with tempfile.TemporaryDirectory() as scratch, harness.folder(args.work) as work:
                peers, left_out = peers_of(chosen, task, work, args.batch_size)
                told = measured(args.models, args.batch_size, args.rounds, args.data, Path(scratch), peers)
                told["peers"] = {name: each.told(task) for name, each in peers.items()}
                told["left_out"] |= left_out
            about = {"model": names[0], "batch_size": args.batch_size, "metric": args.metric, "quality": quality}
            return about | told | {"strategy": log["strategy"], "steps": log["steps"], "note": args.note}

        report = harness.gather("models", [names[0]], one, args.output, facts)
        harness.show(report, table, args.json)


if __name__ == "__main__":
    main()
