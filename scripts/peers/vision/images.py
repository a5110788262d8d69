"""Time JPEG bytes to label in this project and in the obvious pipelines of its peers: same weights, same photos, one
core, in turn.

    python scripts/peers/vision/images.py [MODEL,...] [--peers NAME,...] [--photos 500] [--rounds 9] [--work DIR] [-o FILE]

Photos are those of the development data ($ZOO_SHARED, by default ../shared): every fifth of data/imagenet/nips17
calibrates the peers, the others are classified, one by one, from bytes in memory. This project's model is what
`zoo.pipeline` opens: its calibration is shipped. A peer gets the float network in fp32.onnx from the normalized image
on, and its photos the obvious way: Pillow opens, converts to RGB and resizes, the middle is cut out, numpy normalizes
and transposes. LiteRT and torch get it with batch norms folded, rebuilt of their own operators; LiteRT's takes and
gives float32, as its converter makes it unless told.

Peers are quantized in processes of their own, as their documentation does it; then one process on one core, one thread,
gives each `BLOCK` photos in turn. Milliseconds are of processor time; "core_share" is its share of the clock's: well
below 1 others were at work, and the figures are rough. A peer that cannot be built or opened is left out, and the
report says why. Needs the `train` and `peers` extras. The weight files are taken from $ZOO_MIRROR, by default
$ZOO_SHARED/weights.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from pipelines.data.images import labelled
from pipelines.data.preprocess import Preprocess
from scripts.peers import harness
from scripts.peers.quantization import vision
from scripts.peers.vision.float_networks import (
    NORMALIZED,
    Work,
    crop,
    network,
    obvious,
    tensorflow_network,
    torch_network,
)

Array = NDArray[Any]
MODELS = ("mobilenet-v2-imagenet", "resnet50-imagenet", "mobilenet-v1-imagenet")
OURS, FLOAT, STOCK = "zoo-int8", "openvino-fp32", "zoo-openvino"
BLOCK = 10  # photos of a turn
BUILD_SECONDS = 600
PACKAGES = ("nncf", "pillow", "simplejpeg", "torch", "torchao", "tensorflow-cpu", "tensorflow")


# --------------------------------------------------------------------------------------------------------------- peers


def build_zoo(work: Work, target: Path) -> None:
    """This project's files, all that its engines read."""
    opened = zoo.pipeline(work.model, batch_size=1)
    opened.predict(opened.blank())  # type: ignore[attr-defined]


def build_torch(work: Work, target: Path) -> None:
    """Post-training quantization of the exported graph for Inductor on x86, compiled ahead of time, weights frozen."""
    import torch
    from torchao.quantization.pt2e import move_exported_model_to_eval  # type: ignore[import-untyped]
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # type: ignore[import-untyped]
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # type: ignore[import-untyped]

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    samples = [
        torch.from_numpy(batch[NORMALIZED]).contiguous(memory_format=torch.channels_last) for batch in work.batches()
    ]
    exported = torch.export.export(torch_network(work.folded), (samples[0],), strict=True).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    for sample in samples:
        prepared(sample)
    converted = torch.export.export(move_exported_model_to_eval(convert_pt2e(prepared)), (samples[0],))
    if not any(
        "quantize" in str(node.target) for node in converted.graph.nodes
    ):  # as of a graph that is not exported strictly
        raise ZooError("torch's quantizer found nothing to quantize")
    path = target.with_suffix(".pt2")
    torch._inductor.aoti_compile_and_package(converted, package_path=str(path), inductor_configs={"freezing": True})


def build_litert(work: Work, target: Path) -> None:
    """Full integer quantization by TensorFlow's converter."""
    import tensorflow as tf

    spec = tf.TensorSpec([1, work.spec.size, work.spec.size, 3], tf.float32)
    function = tf.function(tensorflow_network(work.folded), input_signature=[spec], autograph=False)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function.get_concrete_function()], function)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([batch[NORMALIZED].transpose(0, 2, 3, 1)] for batch in work.batches())
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    target.with_suffix(".tflite").write_bytes(converter.convert())


class System(NamedTuple):
    """One way from JPEG bytes to the number of a class: decode and preprocess, run the model, take the label."""

    prepare: Callable[[bytes], Any]
    run: Callable[[Any], Any]
    label: Callable[[Any], int]
    engine: str = ""


def _peer(session: Callable[[Array], Array], spec: Preprocess, *, last: bool = False) -> System:
    return System(lambda data: obvious(data, spec, last=last), session, lambda logits: int(logits.argmax()))


def open_zoo(work: Work, path: Path, engine: str = "auto") -> System:
    opened = zoo.pipeline(work.model, engine=engine, batch_size=1)
    opened.predict(opened.blank())  # type: ignore[attr-defined]  # "auto" decides
    return System(
        opened.preprocess, opened.predict, lambda out: int(opened.postprocess(out)[0]["index"]), opened.engine
    )


def open_torch(work: Work, path: Path) -> System:
    import torch

    torch.set_num_threads(1)
    model = torch._inductor.aoti_load_package(str(path))
    return _peer(lambda x: model(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy(), work.spec, last=True)


def open_litert(work: Work, path: Path) -> System:
    import tensorflow as tf

    interpreter = tf.lite.Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    (given,), (found,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(x: Array) -> Array:
        interpreter.set_tensor(given["index"], x)
        interpreter.invoke()
        logits: Array = interpreter.get_tensor(found["index"])
        return logits

    return _peer(run, work.spec, last=True)


class Peer(NamedTuple):
    """How a system is built, the suffix of the file it writes, if any, and how that is opened."""

    build: Callable[[Work, Path], Any] | None
    suffix: str
    open: Callable[[Work, Path], System]


SYSTEMS = {
    OURS: Peer(build_zoo, "", open_zoo),
    STOCK: Peer(None, "", functools.partial(open_zoo, engine="openvino")),  # this project's file in the stock engine
    "openvino-int8": Peer(
        vision.nncf("performance"),
        ".xml",
        lambda work, path: _peer(vision.openvino_session(path, 1, work.spec.size), work.spec),
    ),
    "onnxruntime-int8": Peer(
        vision.onnxruntime("MinMax"), ".onnx", lambda work, path: _peer(vision.onnxruntime_session(path, 1), work.spec)
    ),
    "torch-int8": Peer(build_torch, ".pt2", open_torch),
    "litert-int8": Peer(build_litert, ".tflite", open_litert),
    FLOAT: Peer(None, "", lambda work, path: _peer(vision.openvino_session(work.fp32, 1, work.spec.size), work.spec)),
}


# ----------------------------------------------------------------------------------------------------------- measuring


def target_of(work: Work, name: str) -> Path:
    return (work.fp32.parent / name).with_suffix(SYSTEMS[name].suffix)


def _begin(cores: set[int], log: Path, seconds: int, environment: Mapping[str, str]) -> None:
    os.sched_setaffinity(0, cores)
    os.environ.update(environment, TORCHINDUCTOR_CACHE_DIR=str(log.parent / "inductor"))
    harness.talk_into(log)
    signal.alarm(seconds)


def apart(
    cores: set[int],
    log: Path,
    seconds: int,
    function: Callable[..., Any],
    *args: Any,
    environment: Mapping[str, str] = harness.ONE_THREAD,
) -> Any:
    """Run in a process of its own on some cores, its libraries' talk in a file, which ends after so many seconds (0:
    never). Raises what goes wrong there.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (cores, log, seconds, environment)) as pool:
        return pool.submit(function, *args).result()


def _network(name: str, work: Work) -> None:
    network(zoo.load(name).ensure("fp32.onnx"), work)


def _build(name: str, work: Work) -> None:
    build = SYSTEMS[name].build
    assert build is not None
    build(work, target_of(work, name))


def _why(error: Exception) -> str:
    if isinstance(error, BrokenProcessPool):
        return f"its process ended, or took more than {BUILD_SECONDS} s"
    return harness.why(error)


def measure(work: Work, names: Sequence[str], photos: Sequence[Path], rounds: int) -> dict[str, Any]:
    """Open all and time them, in this process.

    Returns {"left_out": {name: reason}, "engine": {name: the one chosen, or ""}, "labels": {name: a class a photo},
    "whole", "prepare", "model", "clock" (of the whole): {name: milliseconds a photo, one number a round}, "model_only":
    the same of one input again and again}.
    """
    opened: dict[str, System] = {}
    left_out: dict[str, str] = {}
    some = photos[0].read_bytes()
    for name in names:
        try:
            opened[name] = SYSTEMS[name].open(work, target_of(work, name))
            opened[name].run(opened[name].prepare(some))
        except Exception as error:  # any library's own kinds
            left_out[name] = _why(error)
            opened.pop(name, None)
    labels: dict[str, list[int]] = {name: [] for name in opened}
    spent = {name: np.zeros((rounds, 4)) for name in opened}
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        for at in range(0, len(photos), BLOCK):
            block = [path.read_bytes() for path in photos[at : at + BLOCK]]
            for name, system in opened.items():
                system.label(system.run(system.prepare(block[-1])))  # caches warm again after the others' turns
                found, clock = [], time.perf_counter()
                for data in block:
                    begin = time.process_time()
                    x = system.prepare(data)
                    prepared = time.process_time()
                    out = system.run(x)
                    computed = time.process_time()
                    found.append(system.label(out))
                    spent[name][turn, :3] += time.process_time() - begin, prepared - begin, computed - prepared
                spent[name][turn, 3] += time.perf_counter() - clock
                if turn == 0:
                    labels[name] += found
        gc.collect()
    gc.enable()
    times = {
        key: {name: list(each[:, i] / len(photos) * 1e3) for name, each in spent.items()}
        for i, key in enumerate(COLUMNS)
    }
    inputs = {name: system.prepare(some) for name, system in opened.items()}
    again = {name: (lambda _, run=system.run, x=inputs[name]: run(x)) for name, system in opened.items()}
    times["model_only"] = vision.time_in_turn(again, np.empty(0), rounds)
    return {
        "left_out": left_out,
        "engine": {name: each.engine for name, each in opened.items()},
        "labels": labels,
        **times,
    }


COLUMNS = ("whole", "prepare", "model", "clock")


def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """What `measure` found, as the report tells it.

    Returns {"best_int8_peer", "results": [{"system", "engine", "ms": {"whole", "prepare", "model", "model_only":
    {"median", "spread"}}, "images_per_second", "times_as_fast_as_best" (median over the rounds), "labels_as_best",
    "labels_as_fp32" (shares), "core_share"}], "ours": {peer: {"times_as_fast", "same_labels"} of this project's}}.
    """
    whole, labels = measured["whole"], measured["labels"]
    peers = [name for name in whole if name.endswith("-int8") and name != OURS]
    best = min(peers, key=lambda name: float(np.median(whole[name]))) if peers else None
    results = []
    for name in whole:
        found: dict[str, Any] = {"system": name, "engine": measured["engine"][name]}
        found["ms"] = {key: harness.median(measured[key][name]) for key in ("whole", "prepare", "model", "model_only")}
        found["images_per_second"] = round(1e3 / float(np.median(whole[name])), 1)
        if best is not None:
            found["times_as_fast_as_best"] = round(float(np.median(np.divide(whole[best], whole[name]))), 3)
        for key, other in (("labels_as_best", best), ("labels_as_fp32", FLOAT)):
            if other in labels:
                found[key] = round(float(np.mean(np.equal(labels[name], labels[other]))), 4)
        found["core_share"] = round(float(np.median(np.divide(whole[name], measured["clock"][name]))), 3)
        results.append(found)
    ours = {
        name: {
            "times_as_fast": round(float(np.median(np.divide(whole[name], whole[OURS]))), 3),
            "same_labels": round(float(np.mean(np.equal(labels[name], labels[OURS]))), 4),
        }
        for name in whole
        if OURS in whole and name != OURS
    }
    return {"best_int8_peer": best, "results": results, "ours": ours}


def built(
    name: str, peers: Sequence[str], photos: Sequence[Path], scratch: Path, advance: Callable[[float], None]
) -> tuple[Work, dict[str, float], dict[str, str]]:
    """A model's float network and its peers' files, in `scratch`; what is there is not built again.

    Returns the work, {peer: seconds} of what was built, {peer: why it is left out}. Raises ZooError or
    BrokenProcessPool without the network.
    """
    core = max(os.sched_getaffinity(0))
    calibration = photos[:: vision.CALIBRATE_EVERY]
    folder = scratch / f"{name}-{len(calibration)}"
    folder.mkdir(parents=True, exist_ok=True)
    spec = Preprocess.from_json(zoo.load(name).preprocessing)
    work = Work(name, folder / "fp32.onnx", folder / "calibration.npy", spec)
    apart({core}, folder / "network.log", BUILD_SECONDS, _network, name, work)
    np.save(work.pixels, np.stack([np.asarray(crop(Image.open(path).convert("RGB"), spec)) for path in calibration]))
    seconds, left_out = {}, {}
    for each in peers:
        if SYSTEMS[each].build is not None and not target_of(work, each).is_file():
            start = time.perf_counter()
            try:
                apart({core}, folder / f"{each}.log", BUILD_SECONDS, _build, each, work)
                seconds[each] = round(time.perf_counter() - start, 1)
            except Exception as error:  # any library's own kinds
                left_out[each] = _why(error)
                target_of(work, each).unlink(missing_ok=True)
        advance(1)
    return work, seconds, left_out


def compare(
    name: str,
    peers: Sequence[str],
    photos: Sequence[Path],
    rounds: int,
    scratch: Path,
    advance: Callable[[float], None],
) -> dict[str, Any]:
    """All systems of one model: `summary`, "model", "photos", "build_seconds", "left_out". What `scratch` holds is not
    built again.
    """
    core = max(os.sched_getaffinity(0))
    tested = [path for index, path in enumerate(photos) if index % vision.CALIBRATE_EVERY]
    about: dict[str, Any] = {
        "model": name,
        "photos": {"calibration": len(photos) - len(tested), "tested": len(tested)},
    }
    try:
        work, seconds, left_out = built(name, peers, photos, scratch, advance)
    except (ZooError, BrokenProcessPool) as error:
        advance(len(peers) + 1)
        return {
            **about,
            "best_int8_peer": None,
            "results": [],
            "ours": {},
            "left_out": dict.fromkeys(peers, _why(error)),
        }
    try:
        measured = apart(
            {core},
            work.fp32.with_name("measure.log"),
            0,
            measure,
            work,
            [each for each in peers if each not in left_out],
            tested,
            rounds,
        )
    except BrokenProcessPool as error:
        raise ZooError(
            f"the process that times {name} ended; what its libraries said is in {work.fp32.with_name('measure.log')}"
        ) from error
    advance(1)
    return {**about, "build_seconds": seconds, **summary(measured), "left_out": left_out | measured["left_out"]}


# -------------------------------------------------------------------------------------------------------------- report


def table(report: Mapping[str, Any]) -> str:
    """The results as text."""
    line = "{:22} {:17} {:11} {:>8} {:>15} {:>8} {:>8} {:>8} {:>6} {:>6} {:>7} {:>7} {:>5}".format
    lines = [
        line(
            "model",
            "system",
            "engine",
            "ms",
            "spread",
            "prepare",
            "model",
            "alone",
            "/s",
            "ratio",
            "=best",
            "=fp32",
            "core",
        )
    ]
    for each in report["models"]:
        for row in each["results"]:
            times = row["ms"]
            spread = "{:.2f}..{:.2f}".format(*times["whole"]["spread"])
            medians = (f"{times[key]['median']:.3f}" for key in ("prepare", "model", "model_only"))
            shares = (f"{row[key]:.1%}" if key in row else "" for key in ("labels_as_best", "labels_as_fp32"))
            rates = f"{row['images_per_second']:.0f}", row.get("times_as_fast_as_best", "")
            whole = f"{times['whole']['median']:.3f}"
            lines.append(
                line(
                    each["model"],
                    row["system"],
                    row["engine"],
                    whole,
                    spread,
                    *medians,
                    *rates,
                    *shares,
                    row["core_share"],
                )
            )
        beside = ", ".join(
            f"{name} {found['times_as_fast']}x {found['same_labels']:.1%}" for name, found in each["ours"].items()
        )
        if beside:
            lines.append(f"{each['model']}: {OURS} is so many times as fast, with the same labels: {beside}")
        lines += [f"{each['model']}: {name} left out: {why}" for name, why in each["left_out"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument(
        "models", nargs="?", default=",".join(MODELS), help=f"with commas; {', '.join(MODELS)} by default"
    )
    parser.add_argument("--peers", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}; all by default")
    parser.add_argument(
        "--photos", type=int, default=500, help="so many photos, of which every fifth calibrates (default 500)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="times that each system sees every photo (default 9)")
    parser.add_argument(
        "--work", metavar="DIR", help="keep the peers' models there; what is found there is not built again"
    )
    os.environ.setdefault("ZOO_MIRROR", str(vision.SHARED / "weights"))
    with harness.one_line("images"):
        args = parser.parse_args()
        names, peers = harness.listed("model", args.models, zoo.names()), harness.listed("peer", args.peers, SYSTEMS)
        if args.photos < 2 or args.rounds < 1:
            raise RequestError(f"photos {args.photos} and rounds {args.rounds} must be at least 2 and 1")
        photos = labelled(vision.photo_folder()).paths[: args.photos]
        facts = machine.environment(threads=1, rounds=args.rounds, peers=harness.versions(*PACKAGES))
        with harness.folder(args.work) as scratch, progress("comparing", len(names) * (len(peers) + 1)) as advance:

            def one(name: str) -> dict[str, Any]:
                return compare(name, peers, photos, args.rounds, scratch, advance)

            report = harness.gather("models", names, one, args.output, facts)
        harness.show(report, table, args.json)


if __name__ == "__main__":
    main()
